"""Simulates device memory that is too small for activations."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock


@contextmanager
def crowded() -> Iterator[None]:
    """In this context all activations are offloaded, however small they are."""
    from sp_lightning.capabilities.activations import offload
    from sp_lightning.capabilities.tuning.tuner import Tuner

    with mock.patch.object(Tuner, "_left", return_value=-1), mock.patch.object(offload, "WORTH_MOVING", 1):
        yield
