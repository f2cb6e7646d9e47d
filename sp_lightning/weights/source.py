"""Where a layer's bytes come from before they are copied to the device."""

from __future__ import annotations

from typing import Protocol

from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import Staged


class BlockSource(Protocol):
    """Brings layers' bytes to host memory that a transfer can read: today they are there, as the host store.

    "Ready" means updated *and* staged: a source that reads a disk, or gathers the shares of several processes, is ready
    once that is done. The engine calls these methods from the thread that runs the model, with its lock held.
    """

    def ready(self, layer: StreamedLayer) -> bool:
        """Whether :meth:`stage` would return without waiting."""

    def wait(self, layer: StreamedLayer) -> None:
        """Waits until the layer is ready.

        Raises:
            BaseException: what its update raised in the background.
        """

    def stage(self, layer: StreamedLayer) -> Staged:
        """The layer's bytes, up to date, and the event after which they may be read (None: now)."""
