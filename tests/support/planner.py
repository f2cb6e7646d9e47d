"""What ``superpipeline plan`` answers, the visits that are expected of a batch, and those that a timeline shows."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.core.device.timeline import Interval, Kind
from sp_lightning.core.plan.plan import Plan
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.prediction.visits import RESOURCES, Rates, Visit


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The answer; the exit status has to be that of its verdict."""
    status: Any = 0
    try:
        main(["plan", *arguments, "--json"])
    except SystemExit as ended:
        status = ended.code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (1 if found["best"] is None else 0)
    return found


def question(*arguments: str) -> Question:
    """What such a command line asks."""
    asked = make_parser().parse_args(["plan", *arguments], namespace=Question())
    asked.given = frozenset(vars(make_parser(usual=False).parse_args(["plan", *arguments])))
    return asked


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


def measured(intervals: Iterable[Interval], layers: int, *, synchronous: bool) -> tuple[list[Visit], Rates]:
    """Reads the visits of one batch, and the speed of the machine, from its timeline.

    Args:
        intervals: the timeline, ordered by the begin of the intervals.
        layers: the number of layers of the plan. Layers with a higher index are uploaded on demand; their computation
            counts as computation between layers.
        synchronous: whether nothing else runs during a copy, as on the CPU.

    Returns:
        The visits and the rates. Host memory counts as unlimited, because a timeline does not contain it. The host's own
        time is part of the visits: the device waits for the host inside of them.
    """
    by_kind: defaultdict[Kind, list[Interval]] = defaultdict(list)
    visits: list[Visit] = []
    enclosing: list[tuple[float, int]] = []  # the enclosing calls: their end, and their index in visits
    for interval in intervals:
        by_kind[interval.kind].append(interval)
        if interval.kind in RESOURCES["compute"]:
            seconds = interval.end - interval.begin
            while enclosing and enclosing[-1][0] < interval.end:
                enclosing.pop()
            if enclosing:  # an expert inside its block: its time does not count for the block
                outer = enclosing[-1][1]
                visits[outer] = replace(visits[outer], seconds=visits[outer].seconds - seconds)
            enclosing.append((interval.end, len(visits)))
            used = () if interval.layer is None or interval.layer >= layers else (interval.layer,)
            visits.append(Visit(used, seconds, interval.kind == "backward", used))
    with_backward = {layer for visit in visits if visit.backward for layer in visit.layers}
    known = {layer for visit in visits for layer in visit.layers}
    # The backward of an embedding needs no weights, so the timeline contains only the copy of its gradients.
    for drain in by_kind["drain"]:
        if drain.layer in known and drain.layer not in with_backward and drain.layer is not None:
            visits.append(Visit((drain.layer,), 0.0, backward=True))
            with_backward.add(drain.layer)
    upload, download, update = (_rate(by_kind, RESOURCES[kind]) for kind in ("fetch", "drain", "optimizer"))
    return visits, Rates(upload, download, update, math.inf, visit_seconds=0.0, synchronous=synchronous)


def _rate(by_kind: Mapping[Kind, Sequence[Interval]], kinds: Sequence[Kind]) -> float:
    """Bytes per second in intervals of these kinds; infinite if no bytes were copied."""
    seconds = sum(copy.end - copy.begin for kind in kinds for copy in by_kind[kind])
    nbytes = sum(copy.nbytes for kind in kinds for copy in by_kind[kind])
    return nbytes / seconds if nbytes and seconds else math.inf
