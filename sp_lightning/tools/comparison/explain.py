"""Explains a difference: the first module whose output differs, and an option that avoids the difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from sp_lightning.tools.comparison.record import Compared
from sp_lightning.tools.comparison.runs import RunResult, RunVariant

_LIMITS = "examples/guide/limits.md"
_WRITTEN = (
    f'"Not detected" of {_LIMITS} names such writes. Reach weights through their modules, not through what was '
    "taken before the step."
)
_STALE = (
    "Only the run whose freed memory is overwritten with NaN differs, so something reads weights after their layer was released: "
    f"code that keeps an address, or a defect of the strategy. {_LIMITS} names what is not detected; if it does not name yours, "
    "please report it with the model's code."
)
_OPTIMIZER = (
    "All gradients are equal and weights are not: the optimizers' steps differ. One of torch's that runs fused has other last "
    "bits than one that does not: fused_optimizer=False leaves it as it is."
)

_WITHIN = "What it is given is equal, so its weights differ, by an earlier step, or what its forward does."
_BEFORE = "What it is given differs already, by code outside of modules that runs before it."


def sentences(rows: dict[str, Compared], ways: list[RunVariant]) -> Iterator[str]:
    """Yields explanations that follow from the rows and the runs that differ.

    Args:
        rows: the comparison of each kind.
        ways: the runs of the strategy that were compared.
    """
    found = {what: row.first for what, row in rows.items() if row.first is not None}
    if any("was written within a step" in str(each) for each in found.values()):
        yield _WRITTEN
    differ = {each.run for each in found.values()}
    if differ and differ <= {way.name for way in ways if way.poison}:
        yield _STALE
    if "weights" in found and not {"gradients", "losses"} & set(found):
        yield _OPTIMIZER


def first_module(ours: RunResult, plain: RunResult) -> tuple[str, ...]:
    """Finds the module whose output is the first to differ, in the order in which plain Lightning's calls end.

    Args:
        ours: a run of the strategy with recorded inputs and outputs of modules.
        plain: a run of plain Lightning with the same records.

    Returns:
        The name of the module and sentences on it. If no output differs, the name is ``"**"``, a pattern for all modules.
    """
    for (moment, name, again), (given, expected) in plain.calls.items():
        given_ours, output = ours.calls.get((moment, name, again), ("", ""))
        if output != expected:
            call = f", call {again + 1}," if again else ""
            first = f"The first module whose output differs is {name!r}{call} in {moment}."
            return name, first, _WITHIN if given == given_ours else _BEFORE
    return "**", (
        "With a hook on each module, all outputs in forward are equal: the difference comes from backward, from an optimizer's "
        "step, or from code outside of modules' calls."
    )


def avoided_by(way: RunVariant, name: str, differs: Callable[[RunVariant], bool]) -> str:
    """Tries options one by one until one avoids the difference. Returns a sentence that names this option.

    Args:
        way: the run that differs.
        name: the module whose output differs first, or a pattern.
        differs: runs a variant and returns True if that run differs as well.
    """
    options: dict[str, Any] = dict(way.options or {})
    tried: list[dict[str, Any]] = [
        {"activations": "keep"},
        {"optimizer_overlap": "off"},
        {"keep_on_gpu": [name]},
        *[{"optimizer_on": "cpu"}] * ("optimizer_on" in options),
    ]
    for change in tried:
        if any(options.get(option) != value for option, value in change.items()):
            named = ", ".join(f"{option}={value!r}" for option, value in change.items())
            if not differs(replace(way, name=f"superpipeline, {named}", options={**options, **change})):
                return f"With {named} all is equal."
    return "No option that was tried avoids it."
