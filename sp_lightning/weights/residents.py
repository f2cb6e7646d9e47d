"""Residents: the weights outside all layers, which stay on the device, in one piece of memory, and come anew as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import view
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.source import BlockSource


class Residents:
    """The device's copy of the resident weights.

    Args:
        layer: their layer; its device parameters are attached from here on.
        source: brings its bytes on the host up to date.
        device: the seam.
        write_back: called with indices and values of those that were written on the device.
        stays: addresses of storages that never leave the device; the residents' is added, and follows them.

    Attributes:
        nbytes: device memory.
    """

    def __init__(
        self,
        layer: StreamedLayer,
        source: BlockSource,
        device: Device,
        *,
        write_back: Callable[[StreamedLayer, Iterable[tuple[int, Tensor]]], None],
        stays: set[int],
    ) -> None:
        self.layer = layer
        self.group = layer.parameters
        self._source = source
        self._device = device
        self._write_back = write_back
        self._stays = stays
        self._memory = device.empty(0)
        self._take_memory()
        self._current = False
        self._attach()

    @property
    def address(self) -> int:
        """Of that memory."""
        return self._memory.data_ptr()

    def refresh(self) -> None:
        """The device's copy is up to date, for whatever is computed from here on."""
        group = self.group
        self._source.wait(self.layer)
        if not group.hosts or (self._current and not group.stale):
            return
        if not group.stale:
            self.take_back_writes()
        elif self.layer.block.displaced:  # param.data = other, of the host's: graphs keep what they have saved views of
            self._take_memory()
            self._attach()
        self._device.access(self._memory, Stream.COMPUTE, write=False)
        self._device.wait(Stream.UPLOAD, self._device.record(Stream.COMPUTE), Wait.RESIDENTS_AFTER_USE)
        weights, staged = self._source.stage(self.layer)
        if staged is not None:
            self._device.wait(Stream.UPLOAD, staged, Wait.FETCH_AFTER_UPDATE)
        self._device.copy([self._memory], [weights], Stream.UPLOAD)
        self.layer.transfer = self._device.record(Stream.UPLOAD)
        self._device.wait(Stream.COMPUTE, self.layer.transfer, Wait.USE_AFTER_RESIDENTS)
        self._device.access(self._memory, Stream.COMPUTE, write=False)
        if group.apart:
            self._attach()
        group.fetched()
        group.sync_requires_grad()
        self._current = True

    def forget(self) -> None:
        """Host weights have been or may have been written."""
        self._current = False

    def take_back_writes(self) -> None:
        """What was written on the device is the host's now."""
        written = self.group.take_written()
        if written:
            values = [(index, self.group.value(index)) for index in written]
            if any(value.untyped_storage().data_ptr() != self.address for _, value in values):
                # param.data = other: a graph that has saved a view keeps what it saw, as plain autograd does.
                self._take_memory()
            self._write_back(self.layer, values)
            self._attach()
            self._current = False

    def synchronize(self) -> None:
        """The host waits until no transfer reads its weights any more."""
        self._device.synchronize(self.layer.transfer, Wait.UPDATE_AFTER_RESIDENTS)

    def close(self) -> None:
        """Let go of the memory."""
        self._memory = self._device.empty(0)
        self.nbytes = 0

    def _take_memory(self) -> None:
        self._stays.discard(self.address)
        self._memory = self._device.empty(self.layer.planned.nbytes)
        self._stays.add(self.address)
        self.nbytes = self._memory.nbytes

    def _attach(self) -> None:
        self.group.attach([view(self._memory, span) for span in self.group.spans])
