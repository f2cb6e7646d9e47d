"""What this machine can compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest


@contextmanager
def as_torch_can() -> Iterator[None]:
    """Around a plain run: skips the test where torch itself has no kernel, as for an LSTM in bfloat16 on some processors."""
    try:
        yield
    except RuntimeError as error:
        if "could not create a primitive" not in str(error):
            raise
        pytest.skip(f"torch cannot compute this on this processor: {error}")
