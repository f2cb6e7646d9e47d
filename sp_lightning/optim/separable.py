"""Optimizers that are not fused, and whose steps can be taken apart by layers nevertheless.

torchao's optimizers keep their state in 8 or 4 bits, or in float8. They step each parameter by itself, with one compiled
function, which gives the same bits on any number of threads. torch's own unfused optimizers step each parameter by itself,
too, but where their operators cut a tensor depends on the number of threads, and the background has one less.
"""

from __future__ import annotations

from typing import Any

SEPARABLE = frozenset(
    ("torchao.optim.adam", name)
    for name in ("Adam8bit", "AdamW8bit", "Adam4bit", "AdamW4bit", "AdamFp8", "AdamWFp8")
)  # fmt: skip


def is_separable(optimizer: Any) -> bool:
    """Whether the step of some parameters alone is what the whole step does to them.

    Stochastic rounding draws random numbers, in the order of the parameters and from the generator that the model uses.
    """
    kind = type(optimizer)
    rounds = getattr(optimizer, "bf16_stochastic_round", False)
    return (kind.__module__, kind.__qualname__) in SEPARABLE and not rounds
