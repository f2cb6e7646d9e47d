"""Sources of random numbers beside torch's global one: Python's, NumPy's, and generators that a forward holds."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch


class RandomSource(NamedTuple):
    """A source of random numbers.

    Attributes:
        read: returns its state.
        write: sets its state.
        state: its state before the forward.
    """

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    state: Any


def global_sources() -> Iterator[RandomSource]:
    """The global sources of Python and, if it is imported, of NumPy."""
    yield RandomSource(random.getstate, random.setstate, random.getstate())
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield RandomSource(numpy.random.get_state, numpy.random.set_state, numpy.random.get_state())


def sources_of(value: Any) -> list[RandomSource] | None:
    """An object that gives random numbers, as a source. None for any other object.

    The list is empty if the object has no state, as ``random.SystemRandom`` has none.
    """
    if isinstance(value, random.SystemRandom):
        return []
    if isinstance(value, random.Random):
        return [RandomSource(value.getstate, value.setstate, value.getstate())]
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.random.RandomState)):
        return [RandomSource(value.get_state, value.set_state, value.get_state())]
    bits = value
    if numpy is not None and isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
    if numpy is None or not isinstance(bits, numpy.random.BitGenerator):
        return None
    return [RandomSource(lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state)]
