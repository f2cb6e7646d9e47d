"""Where a layer's bytes come from before they are copied to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import Staged


class BlockSource(Protocol):
    """Brings layers' bytes to host memory that a transfer can read. With the one implementation they are always there.

    "Ready" means updated *and* staged. A source that reads a disk, or that gathers the shares of several processes, is
    ready once that is done. The engine calls these methods from the thread that runs the model, and holds its lock.
    """

    def ready(self, layer: StreamedLayer) -> bool:
        """Whether :meth:`stage` would return without waiting."""

    def wait(self, layer: StreamedLayer) -> None:
        """Waits until the layer is ready.

        Raises:
            BaseException: what an update raised in the background.
        """

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's bytes, up to date, and the event after which they may be read (None: at once).

        They stay as they are until the transfer that reads them is over (:attr:`StreamedLayer.transfer`, which is set once it
        was issued); rows of a table are read before the next call.
        """

    def synchronize(self) -> None:
        """Waits until no transfer reads the host's weights any more: whatever comes next may write them."""

    def doubt(self, layers: Sequence[StreamedLayer]) -> None:
        """The host's weights of these layers may have been written unseen: their copies on the device are out of date."""
