"""Weights written through what was kept, at every pair of moments: as on plain Lightning, or refused by name.

``tests/equality/programs/views.py`` has what has to be equal.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from tests.equality.programs.views import TAKE, keeps
from tests.support.engine import step, streamed
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import some

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

WAYS = {
    f"{kind}, {taken}, {written}, {'manual' if manual else 'automatic'}": (kind, taken, written, manual)
    for kind, taken, written, manual in product(
        TAKE,
        ("start", "after forward", "after backward"),
        ("before backward", "before step", "after step", "batch end", "next batch"),
        (False, True),
    )
    if (manual or written != "after step") and (taken, written) != ("after backward", "before backward")
}
# Some writes are not detected (limits.md): those to the .data of a view, numpy's, a storage's, and those of the host's weights,
# which modules hold after backward.
WAYS = {
    name: (kind, taken, written, manual)
    for name, (kind, taken, written, manual) in WAYS.items()
    if not (kind in ("data of a view", "numpy", "storage") and taken != "after backward")
    and not (kind == "data of a view" and (taken, written, manual) == ("after backward", "before step", True))
    and not (kind not in ("detach", "view", "parameters") and (taken, written) == ("after backward", "next batch"))
}
FIRST = [
    "data, start, before step, manual",
    "detach, after forward, after step, manual",
    "data, start, batch end, automatic",
    "data of parameters, start, batch end, automatic",
]


def judge(way: str, precision: Any, **options: Any) -> None:
    """Bitwise equality with plain Lightning, an error where plain has one, or an error that names the weight."""

    def make() -> At:
        return keeps(*WAYS[way])

    try:
        plain = fit(make, vectors(4), precision=precision)
    except RuntimeError:  # a weight that was written in place before backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fit(make, vectors(4), superpipeline(**options), precision=precision)
        return
    try:
        ours = fit(make, vectors(4), superpipeline(**options), precision=precision)
    except RuntimeError as error:
        assert "Parameter 'net." in str(error)  # noqa: PT017 - equal or refused: both are right
        return
    assert_same(ours, plain)


OPTIONS: list[dict[str, Any]] = [{"k": 1, "k_prime": 1}, {"k": 4, "k_prime": 1}, {"k": 2, "keep_on_gpu": ["net.1"]}]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", some(WAYS, *FIRST, why="the same at other moments"))
def test_writes_of_what_was_kept(way: str) -> None:
    for options in OPTIONS:
        judge(way, "32-true", **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", some(WAYS, *list(WAYS)[4::40], why="the same at other moments"))
def test_in_mixed_precision(way: str) -> None:
    for options in OPTIONS[:2]:
        judge(way, "bf16-mixed", **options)


# After backward modules hold the host's weights, which a device may be reading from the next forward on.
ON_A_DEVICE = [way for way in WAYS if not ("after backward, after step" in way or "after backward, next batch" in way)]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", some(ON_A_DEVICE, *FIRST[1:3], why="the same at other moments"))
def test_on_a_device_of_its_own(way: str) -> None:
    for options in OPTIONS:
        with simulated():
            judge(way, "32-true", **options)


def test_an_extra_slot_is_not_freed_while_a_layer_comes_to_it() -> None:
    """A view had the layer fetched again, and was dropped before compute had waited for that: its memory was free too early."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with streamed(net, SimDevice(torch.device("cpu")), k=1, k_prime=1) as engine:
        views = list[Any]()
        step(engine, lambda: views.extend(layer.weight.data for layer in net))
        slots = engine.slots
        extra = next(slot for slot in slots.all if slot.extra and slot.layer is not None)
        layer: Any = extra.layer
        slots.fetch([(layer, extra, engine.source.stage(layer))])
        views.clear()
        slots.give_back_extra()
        assert extra not in slots.all
