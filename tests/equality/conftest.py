"""Small models are updated by kernels here, too, if llvmlite is installed; elsewhere in the tests by torch's operators."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sp_lightning.registry import is_installed


@pytest.fixture(autouse=True, scope="module")
def _kernels_for_small_ones() -> Iterator[None]:
    if not is_installed("capabilities.kernels"):
        yield
        return
    from sp_lightning.capabilities.kernels import update

    before, update.LEAST = update.LEAST, 1
    yield
    update.LEAST = before
