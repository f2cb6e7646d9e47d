"""Visits that a test expects of a batch, without one that has shown them."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.core.plan.plan import Plan
from sp_lightning.tools.planner.prediction.visits import Visit


def schedule_visits(plan: Plan, seconds: Sequence[float], *, training: bool) -> list[Visit]:
    """Expects what a batch does before one has shown it: a forward, then a backward that takes twice as long.

    Args:
        plan: gives the order of the layers.
        seconds: how long each layer's forward takes.
        training: whether there is a backward.
    """
    visits = [Visit((layer,), seconds[layer]) for layer in plan.order]
    if training:
        visits += [Visit((layer,), 2 * seconds[layer], True, (layer,)) for layer in reversed(plan.order)]
    return visits
