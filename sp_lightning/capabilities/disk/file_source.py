"""The source of uploads if weights stay in files: reads a layer to staging memory, and prefetches the next layers."""

from __future__ import annotations

from concurrent import futures
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from torch import Tensor

from sp_lightning.capabilities.disk.state_placement import AccessPredictor
from sp_lightning.capabilities.disk.weights_in_files import FileBlock
from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.ring import Staged

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

WINDOW = 3
"""The number of layers in staging memory at once: one that is uploaded, and two that are read meanwhile."""


@dataclass(eq=False)
class _Buffer:
    """Staging memory of the largest layer's size.

    Attributes:
        memory: the memory.
        layer: the layer whose bytes are in the buffer, or are being read into it; None if the buffer is free.
        transfer: the read from the files.
        staged: ``layer.fetches`` when :meth:`FileSource.stage` returned the buffer for an upload; None before that.
    """

    memory: PinnedMemory
    layer: StreamedLayer | None = None
    transfer: futures.Future[None] | None = None
    staged: int | None = None

    @property
    def bytes(self) -> Tensor:
        return self.memory.bytes

    @property
    def issued(self) -> bool:
        """True if the upload was issued."""
        return self.staged is not None and self.layer is not None and self.layer.fetches > self.staged


class FileSource(HostSource):
    """The source of one device with weights of some layers in files.

    The order of uploads predicts the next layer to read: the layer that followed the same two layers last time.
    """

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._slots, self._device = engine.slots, engine.device
        self._buffers: list[_Buffer] = []
        self._fetches = AccessPredictor[StreamedLayer](2)
        self._largest = 0
        self._pin = False
        for layer in engine.layers:
            if isinstance(layer.block, FileBlock):
                self._largest = max(self._largest, layer.planned.nbytes)
                self._pin = layer.block.pin

    def _fetches_as_updated(self, layer: StreamedLayer) -> bool:
        # `stage` reads a layer in a file on the host.
        in_file = any(isinstance(member.block, FileBlock) for member in layer.with_masters)
        return not in_file and super()._fetches_as_updated(layer)

    def ready(self, layer: StreamedLayer) -> bool:
        """Returns True if the layer is updated and in staging memory. Begins to read the layer if a buffer is free."""
        if not isinstance(layer.block, FileBlock):
            return super().ready(layer)
        buffer = self._read(layer)
        there = buffer is not None and buffer.transfer is not None and buffer.transfer.done()
        return there and super().ready(layer)

    def stage(self, layer: StreamedLayer) -> Staged:
        staged = super().stage(layer)
        if not isinstance(layer.block, FileBlock):
            return staged
        self._fetches.note(layer)
        buffer = self._read(layer)
        if buffer is None:
            self._free_one()
            buffer = self._read(layer)
        assert buffer is not None
        assert buffer.transfer is not None
        try:
            buffer.transfer.result()
        except OSError:
            buffer.layer = buffer.transfer = None  # so that the next call reads the layer again
            raise
        self._device.access(layer.block.weights, None, write=False)
        self._device.access(buffer.bytes, None, write=True)
        layer.block.complete(buffer.bytes)
        buffer.staged = layer.fetches
        # `itself`: a layer is read again for each upload. With a single layer in files, the next read is of this layer.
        for following in islice(self._fetches.coming(itself=True), WINDOW - 1):
            if self._read(following) is None:
                break
        return buffer.bytes[: layer.planned.nbytes], None

    def _read(self, layer: StreamedLayer) -> _Buffer | None:
        """Returns the buffer for a layer's next upload, and begins to read the layer into it; None if no buffer is free.

        If a prefetch has begun the read already, its buffer is returned.
        """
        for buffer in self._buffers:
            if buffer.layer is layer and buffer.staged is None:  # a staged buffer belongs to another upload
                return buffer
        free = next((each for each in self._buffers if each.layer is None), None) or self._reclaim()
        if free is None:
            return None
        assert isinstance(layer.block, FileBlock)
        free.layer, free.transfer, free.staged = layer, layer.block.read(free.bytes), None
        return free

    def _reclaim(self) -> _Buffer | None:
        """Returns a buffer that may be filled; None if no upload from a buffer was issued.

        If there are fewer than :data:`WINDOW` buffers, allocates one. Otherwise waits for the upload that was issued first, and
        returns its buffer.
        """
        if len(self._buffers) < WINDOW:
            return self._allocate()
        first = next((buffer for buffer in self._buffers if buffer.issued), None)
        if first is not None:
            self._slots.synchronize(Wait.UPDATE_AFTER_FETCH, first.layer)
            self._buffers.remove(first)
            self._buffers.append(first)
        return first

    def _allocate(self) -> _Buffer:
        buffer = _Buffer(PinnedMemory(self._device, self._largest, pin=self._pin))
        self._buffers.append(buffer)
        return buffer

    def _free_one(self) -> None:
        """Frees a prefetched buffer that no upload uses yet. If all buffers belong to the upload that is being prepared,
        allocates another one."""
        buffer = next((each for each in self._buffers if each.staged is None), None) or self._allocate()
        if buffer.transfer is not None:
            futures.wait([buffer.transfer])
        buffer.layer = buffer.transfer = None
