"""What becomes of each unit's activations: the choice by name, and the device memory that a choice takes.

A *unit* is a layer, or a part beside the layers that stays on the device. What autograd saves in its forward is kept,
computed again in backward, or sent to the host and brought back. Nothing here touches memory;
:mod:`sp_lightning.activations.calls` has what carries each mode out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import nn

from sp_lightning.model.found import Found
from sp_lightning.model.patterns import matching
from sp_lightning.plan.choices import ActivationChoice, Mode, Modes

FREEING: tuple[Mode, ...] = ("recompute", "offload")
"""The modes that free memory on the device."""

EXEMPT = 2
"""How many calls at the end of a forward keep what they save in ``"offload"``: backward begins with the last one, and the
one before it would have to come back at once."""


@dataclass(frozen=True)
class Call:
    """One call of a unit in a forward. A storage is counted with the first call that saves it.

    Attributes:
        unit: the unit's name.
        saved: bytes that autograd saves in the call, which are kept or travel.
        inputs: bytes that the unit is called with. They are all that is kept if the rest is computed again.
    """

    unit: str
    saved: int
    inputs: int


def resolve(choice: ActivationChoice, module: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, Mode]:
    """The mode of each unit.

    Args:
        choice: one mode for all (``"auto"`` begins with ``"keep"``), or modes by patterns. A pattern matches names of
            units, or of modules above them. The first pattern that matches decides, and a unit that no pattern matches
            keeps what it saves.
        module: the root.
        units: the units by name.

    Raises:
        ValueError: a pattern matches no unit, or only units that earlier patterns have matched.
    """
    if isinstance(choice, str):
        return dict.fromkeys(units, "keep" if choice == "auto" else choice)
    modes: dict[str, Mode] = {}
    named = dict(module.named_modules(remove_duplicate=False))  # a module may have several names
    for pattern, mode in choice.items():
        matches = {inner for match in matching(module, pattern, "activations", named) for inner in match.modules()}
        inside = [unit for unit, each in units.items() if each in matches]
        if not inside:
            above = [unit for unit, each in units.items() if matches & set(each.modules())]
            raise ValueError(
                f"activations={{{pattern!r}: {mode!r}}} names a part of {above[0]!r}, whose activations are treated as one. "
                f"Use activations={{{above[0]!r}: {mode!r}}}."
                if above
                else f"activations={{{pattern!r}: {mode!r}}} names modules without parameters, outside of all layers: what they "
                f"save stays on the device. Layers and parts with parameters are: {list(units)[:5]}."
            )
        if all(unit in modes for unit in inside):
            raise ValueError(
                f"activations={{{pattern!r}: {mode!r}}} decides nothing: patterns before it have matched {inside[:3]}, and the "
                f"first match decides. Put {pattern!r} before them."
            )
        for unit in inside:
            modes.setdefault(unit, mode)
    return {unit: modes.get(unit, "keep") for unit in units}


def with_inner_experts(found: Found) -> dict[str, str]:
    """Returns the units that cannot be recomputed because experts inside them are layers of their own, with the reason."""
    moving = {index for index in found.experts if not found.layers[index].rows}
    experts = {module for module, used in found.visits.items() if moving.intersection(used)} if moving else set()
    inside = [unit for unit, module in found.units.items() if experts.intersection(module.modules()) - {module}]
    return dict.fromkeys(inside, "has experts that move by themselves")


def summary(modes: Modes) -> str:
    """Which units have which mode, in a few words."""
    groups = {mode: [unit for unit, each in modes.items() if each == mode] for mode in get_args(Mode)}
    return "; ".join(f"{mode} {len(units)} ({_some(units)})" for mode, units in groups.items() if units)


def _some(units: Sequence[str]) -> str:
    return ", ".join(units) if len(units) <= 4 else f"{units[0]}, {units[1]}, … {units[-1]}"


def peak_bytes(calls: Sequence[Call], modes: Modes) -> int:
    """The most bytes of saved tensors on the device at once, in one forward and its backward.

    Workspaces, gradients and what is saved outside of units are not counted, because they are the same whatever the
    modes. A mode that is neither ``"recompute"`` nor ``"offload"`` is counted as one that keeps everything.

    Args:
        calls: the calls in the order of the forward.
        modes: the mode of each unit.
    """
    last = len(calls) - EXEMPT
    travels = [modes[call.unit] == "offload" and at < last for at, call in enumerate(calls)]
    stays = [call.inputs if modes[call.unit] == "recompute" else call.saved for call in calls]
    peak = held = 0
    leaving: list[int] = []  # calls whose copies may still be under way: they end when the next call has returned
    for at, call in enumerate(calls):
        flying = sum(calls[each].saved for each in leaving)
        peak = max(peak, held + flying + call.saved)
        if travels[at]:
            leaving = [at]
        else:
            leaving = []
            held += stays[at]
    for at in reversed(range(len(calls))):  # the backward of each call, while what the call before it saved comes back
        coming = calls[at - 1].saved if at and travels[at - 1] else 0
        here = calls[at].saved
        held -= 0 if travels[at] else stays[at]
        peak = max(peak, held + here + coming)
    return peak


def least_bytes(calls: Sequence[Call]) -> int:
    """As :func:`peak_bytes`, if all units have the one mode that takes least."""
    return min(peak_bytes(calls, dict.fromkeys([call.unit for call in calls], mode)) for mode in FREEING)


def scaled(calls: Iterable[Call], factor: float) -> tuple[Call, ...]:
    """The calls of a batch that is ``factor`` times as large."""
    return tuple(Call(call.unit, int(call.saved * factor), int(call.inputs * factor)) for call in calls)
