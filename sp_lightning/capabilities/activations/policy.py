"""The mode of each unit's activations, and the device memory that modes take.

A *unit* is a layer, or a part beside the layers that stays on the device. Its activations are kept, recomputed in backward, or
offloaded to the host. This file only computes; :mod:`sp_lightning.capabilities.activations.calls` carries the modes out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torch import nn

from sp_lightning.core.model.patterns import matching
from sp_lightning.core.plan.choices import ActivationChoice, Mode, Modes

EXEMPT = 2
"""The number of calls at the end of a forward that keep their activations in ``"offload"``. Backward begins with the last call,
and the activations of the call before it would have to be uploaded again at once."""


@dataclass(frozen=True)
class Call:
    """One call of a unit in a forward. A storage counts in the first call that saves it.

    Attributes:
        unit: the unit's name.
        saved: bytes that autograd saves in the call.
        inputs: bytes of the call's arguments. ``"recompute"`` keeps only these.
        small: the bytes of ``saved`` in storages that are never offloaded: small ones, and autocast's copies of weights that stay
            on the device.
    """

    unit: str
    saved: int
    inputs: int
    small: int = 0

    @property
    def moved(self) -> int:
        """Bytes that ``"offload"`` copies to the host."""
        return self.saved - self.small


def resolve(choice: ActivationChoice, module: nn.Module, units: Mapping[str, nn.Module]) -> dict[str, Mode]:
    """Returns the mode of each unit.

    An embedding is not recomputed: its backward needs only the indices, and a second run would upload the table again.

    Args:
        choice: one mode for all (``"auto"`` is ``"keep"``), or modes by patterns. A pattern matches names of
            units, or of modules above them. The first pattern that matches decides. If no pattern matches a unit, its
            activations are kept.
        module: the root.
        units: the units by name.

    Raises:
        ValueError: a pattern matches no unit, or only units that earlier patterns have matched.
    """
    modes: dict[str, Mode] = {}
    if isinstance(choice, str):
        modes = dict.fromkeys(units, "keep" if choice == "auto" else choice)
        choice = {}
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
                else f"activations={{{pattern!r}: {mode!r}}} names modules without parameters, outside all layers. Their "
                f"activations stay on the GPU. Layers and parts with parameters are: {list(units)[:5]}."
            )
        if all(unit in modes for unit in inside):
            raise ValueError(
                f"activations={{{pattern!r}: {mode!r}}} decides nothing: patterns before it have matched {inside[:3]}, and the "
                f"first match decides. Put {pattern!r} before them."
            )
        for unit in inside:
            modes.setdefault(unit, mode)
    looked_up = {unit for unit, each in units.items() if type(each) is nn.Embedding and modes.get(unit) == "recompute"}
    return {unit: "keep" if unit in looked_up else modes.get(unit, "keep") for unit in units}


def summary(modes: Modes) -> str:
    """Returns which units have which mode, for logs."""
    groups = {mode: [unit for unit, each in modes.items() if each == mode] for mode in get_args(Mode)}
    return "; ".join(f"{mode} {len(units)} ({some(units)})" for mode, units in groups.items() if units)


def some(units: Sequence[str]) -> str:
    """Returns the names of units for logs; of many units only the first two and the last."""
    return ", ".join(units) if len(units) <= 4 else f"{units[0]}, {units[1]}, … {units[-1]}"


def peak_bytes(calls: Sequence[Call], modes: Modes) -> int:
    """Returns the most bytes of saved tensors on the device at once, in one forward and its backward.

    Workspaces, gradients and tensors saved outside units are not counted: they do not depend on the modes.

    Args:
        calls: the calls in the order of the forward.
        modes: the mode of each unit.
    """
    last = len(calls) - EXEMPT
    offloaded = [modes[call.unit] == "offload" and at < last for at, call in enumerate(calls)]
    kept = [call.inputs if modes[call.unit] == "recompute" else call.saved for call in calls]
    kept = [call.small if away else nbytes for call, nbytes, away in zip(calls, kept, offloaded, strict=True)]
    peak = held = 0
    in_flight = 0  # bytes of the previous call, whose copy to the host is complete when the present call has returned
    for at, call in enumerate(calls):
        peak = max(peak, held + in_flight + call.saved)
        in_flight = call.moved if offloaded[at] else 0
        held += kept[at]
    for at in reversed(range(len(calls))):  # in the backward of a call, activations of the previous call are uploaded
        in_flight = calls[at - 1].moved if at and offloaded[at - 1] else 0
        held -= kept[at]
        peak = max(peak, held + calls[at].saved + in_flight)
    return peak


def offloaded_bytes(calls: Sequence[Call], modes: Modes) -> int:
    """Returns the bytes of activations in host memory between forward and backward."""
    return sum(call.moved for call in calls[:-EXEMPT] if modes[call.unit] == "offload")
