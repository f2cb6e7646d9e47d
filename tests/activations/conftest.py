"""What tests of activations share: small models whose saved tensors are worth moving all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from sp_lightning.activations.offload import Offload
from sp_lightning.activations.offloaded_storage import OffloadedStorage
from sp_lightning.device.modes import no_dispatch_modes
from tests.support.simdevice import poison


@pytest.fixture
def poisoned_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory is NaN as soon as no graph needs what is in it, and device memory when nothing is to be read there."""
    end, drop = OffloadedStorage.__del__, Offload._drop

    def ended(self: OffloadedStorage) -> None:
        with no_dispatch_modes():  # nothing that the engine does
            poison(self.buffer.memory.bytes)
        end(self)

    def dropped(self: Offload, storages: Sequence[OffloadedStorage]) -> None:
        mine = [storage.returned for storage in storages if storage.returned is not None]
        drop(self, storages)
        for memory in mine:
            if torch._C._storage_Use_Count(memory.untyped_storage()._cdata) <= 2:  # ours and the object's
                with no_dispatch_modes():
                    poison(memory)

    monkeypatch.setattr(OffloadedStorage, "__del__", ended)
    monkeypatch.setattr(Offload, "_drop", dropped)
