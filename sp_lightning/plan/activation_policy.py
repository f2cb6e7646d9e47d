"""What becomes of each unit's activations: the choice by name, and the device memory that a choice takes.

A *unit* is a module of the model's cut, a layer or a part that stays on the device. What autograd saves in its forward
is kept, computed again in backward, or sent to the host and brought back. Nothing here touches memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

from sp_lightning.model.patterns import matching

Mode = Literal["keep", "recompute", "offload"]
Activations = Mode | Literal["auto"] | Mapping[str, Mode]
"""What ``activations=`` takes."""

FREEING: tuple[Mode, ...] = ("recompute", "offload")
"""What frees memory on the device."""

# The last units of a forward are needed again at once: those that backward begins with, and the one that would come back
# one ahead.
EXEMPT = 2


@dataclass(frozen=True)
class Call:
    """One call of a unit in a forward. Bytes of storages, each counted with the first that saves it.

    Attributes:
        unit: its name.
        saved: what autograd saves in it: what is kept, or travels.
        inputs: what it is called with, and so all that is kept where the rest is computed again.
    """

    unit: str
    saved: int
    inputs: int


def resolve(choice: Activations, module: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, Mode]:
    """The mode of each unit.

    Args:
        choice: one mode for all (``"auto"`` begins with ``"offload"``, which takes least), or patterns of names of units,
            or of modules above them; the first one that matches decides, and what none matches is kept.
        module: the root.
        units: by name.

    Raises:
        ValueError: a pattern that matches no unit, or none that an earlier one has not matched.
    """
    if isinstance(choice, str):
        return dict.fromkeys(units, "offload" if choice == "auto" else choice)
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


def summary(modes: Mapping[str, Mode]) -> str:
    """Which units have which mode, in a few words."""
    groups = {mode: [unit for unit, each in modes.items() if each == mode] for mode in get_args(Mode)}
    return "; ".join(f"{mode} {len(units)} ({_some(units)})" for mode, units in groups.items() if units)


def _some(units: Sequence[str]) -> str:
    return ", ".join(units) if len(units) <= 4 else f"{units[0]}, {units[1]}, … {units[-1]}"


def peak_bytes(calls: Sequence[Call], modes: Mapping[str, Mode]) -> int:
    """Most bytes of saved tensors on the device at once, over one forward and its backward.

    Workspaces, gradients and what is saved outside units are not in it: they are the same whatever the modes.

    Args:
        calls: in the order of the forward.
        modes: by unit.
    """
    last = len(calls) - EXEMPT
    travels = [modes[call.unit] == "offload" and at < last for at, call in enumerate(calls)]
    stays = [call.inputs if modes[call.unit] == "recompute" else call.saved for call in calls]
    peak = held = 0
    leaving: list[int] = []  # calls whose copies may still be under way: they go when the next one has returned
    for at, call in enumerate(calls):
        flying = sum(calls[each].saved for each in leaving)
        peak = max(peak, held + flying + call.saved)
        if travels[at]:
            leaving = [at]
        else:
            leaving = []
            held += stays[at]
    for at in reversed(range(len(calls))):  # its backward, while the one before it comes back
        coming = calls[at - 1].saved if at and travels[at - 1] else 0
        here = calls[at].saved
        held -= 0 if travels[at] else stays[at]
        peak = max(peak, held + here + coming)
    return peak


def least_bytes(calls: Sequence[Call]) -> int:
    """As :func:`peak_bytes`, with the one mode for all that takes least."""
    return min(peak_bytes(calls, dict.fromkeys([call.unit for call in calls], mode)) for mode in FREEING)


def scaled(calls: Iterable[Call], factor: float) -> tuple[Call, ...]:
    """The calls of a batch so many times as large."""
    return tuple(Call(call.unit, int(call.saved * factor), int(call.inputs * factor)) for call in calls)
