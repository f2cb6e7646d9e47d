"""Which steps can be taken apart by layers: those of some optimizers that are not fused, and not those whose state is shared.

torchao's optimizers keep their state in 8 or 4 bits, or in float8. They step each parameter by itself, with one compiled
function, which gives the same bits on any number of threads. torch's own unfused optimizers step each parameter by itself,
too, but where their operators cut a tensor depends on the number of threads, and the background has one less.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from sp_lightning.plan.ledger import FEW_BITS


def is_separable(optimizer: Any) -> bool:
    """Whether the step of some parameters alone is what the whole step does to them.

    Stochastic rounding draws random numbers, in the order of the parameters and from the generator that the model uses.
    """
    kind = type(optimizer)
    rounds = getattr(optimizer, "bf16_stochastic_round", False)
    return (kind.__module__, kind.__qualname__) in FEW_BITS and not rounds


def lacks_buffers(group: Mapping[str, Any], state: Mapping[Any, Any]) -> bool:
    """Whether some parameters of a group have a momentum buffer and others have none yet: torch's fused SGD then fails."""
    buffers = [state.get(p, {}).get("momentum_buffer") is not None for p in group["params"] if p.requires_grad]
    return bool(group.get("momentum")) and any(buffers) and not all(buffers)


def shares_state(groups: Iterable[Mapping[str, Any]], state: Mapping[Any, Any]) -> bool:
    """Whether one tensor is the state of two parameters: what it becomes depends on the order in which they are updated."""
    # Copies of the values are asked, because an update in the background may add some.
    values = [value for group in groups for p in group["params"] for value in list(state.get(p, {}).values())]
    places = [_place(value) for value in values if isinstance(value, Tensor)]
    return len(set(places)) < len(places)


def _place(value: Tensor) -> int:
    """Its address, or, for one that has none or is on a disk, its identity."""
    return (value.data_ptr() if type(value) is Tensor else 0) or id(value)
