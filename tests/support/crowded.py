"""Device memory into which no activations fit that nobody has measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from sp_lightning.activations import offload
from sp_lightning.tune.tuner import Tuner


@contextmanager
def crowded() -> Iterator[None]:
    """While this is active, a first batch keeps nothing, and the batches after it measure and choose. All is worth moving."""
    with mock.patch.object(Tuner, "_left", return_value=-1), mock.patch.object(offload, "WORTH_MOVING", 1):
        yield
