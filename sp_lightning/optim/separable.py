"""Optimizers that are not fused, and whose steps can be taken apart by layers nevertheless.

torchao's optimizers keep their state in 8 or 4 bits, or in float8. They step each parameter by itself, with one compiled
function, which gives the same bits on any number of threads. torch's own unfused optimizers step each parameter by itself,
too, but where their operators cut a tensor depends on the number of threads, and the background has one less.
"""

from __future__ import annotations

from typing import Any

from sp_lightning.plan.ledger import FEW_BITS


def is_separable(optimizer: Any) -> bool:
    """Whether the step of some parameters alone is what the whole step does to them.

    Stochastic rounding draws random numbers, in the order of the parameters and from the generator that the model uses.
    """
    kind = type(optimizer)
    rounds = getattr(optimizer, "bf16_stochastic_round", False)
    return (kind.__module__, kind.__qualname__) in FEW_BITS and not rounds
