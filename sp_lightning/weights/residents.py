"""Residents: the weights outside all layers. They stay on the device in one piece of memory and are sent as one."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import view
from sp_lightning.device.lease import Lease
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import BlockSource
from sp_lightning.weights.writes import KeptMemory


class Residents:
    """The device's copy of the resident weights.

    Args:
        layer: the layer that they form. Its device parameters are attached from the beginning.
        source: brings the layer's bytes on the host up to date.
        device: allocates the memory and copies into it.
        write_back: called with the index and the value of each weight that was written on the device.
        refuses: says whether a weight that host and device have written is refused.
        stays: addresses of storages that never leave the device. That of the residents' memory is added and kept current.

    Attributes:
        nbytes: bytes of device memory.
    """

    def __init__(
        self,
        layer: StreamedLayer,
        source: BlockSource,
        device: Device,
        write_back: Callable[[StreamedLayer, Iterable[tuple[int, Tensor]]], None],
        refuses: Callable[[], bool],
        stays: set[int],
    ) -> None:
        self.layer = layer
        self.group = layer.parameters
        self._source = source
        self._device = device
        self._write_back = write_back
        self._refuses = refuses
        self._stays = stays
        self._memory = device.empty(0)
        self._kept: KeptMemory | None  # what views are compared with that somebody has kept beyond a step
        self._take_memory()
        self._current = False
        self._attach()

    @property
    def address(self) -> int:
        """The address of the residents' memory."""
        return self._memory.data_ptr()

    def refresh(self) -> None:
        """Brings the device's copy up to date for everything that is computed from now on."""
        group = self.group
        self._source.wait(self.layer)
        if not group.hosts or (self._current and not group.stale):
            return
        if not group.stale or self._kept is not None:
            self.take_back_writes()
        if self.layer.block.displaced:
            # The user gave a host parameter other memory (param.data = other). Graphs keep the memory that they have saved
            # views of, as they do with plain autograd.
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
        if self._kept is not None:
            self._keep()

    def invalidate(self) -> None:
        """Marks the device's copy as out of date, because host weights were or may have been written.

        Views of it that somebody keeps see the present weights at once, as views of a plain parameter do.
        """
        self._current = False
        if self._kept is not None:
            self.refresh()

    def take_back_writes(self) -> None:
        """Takes what was written on the device over to the host."""
        written = self.group.take_written()
        if self._kept is not None:
            written = self._kept.written(self.group, self._values(), refuse=self._refuses())
            self.group.fetched()
        if written:
            values = [(index, self.group.value(index)) for index in written]
            if any(value.untyped_storage().data_ptr() != self.address for _, value in values):
                # A parameter was given other memory on the device (param.data = other). A graph that has saved a view
                # keeps the values that it saw, as with plain autograd.
                self._take_memory()
            self._write_back(self.layer, values)
            self._attach()
            self._current = False
        if self.group.hosts and self._held:
            self._keep()
        else:
            self._kept = None
            self.group.exposed.clear()

    @property
    def _held(self) -> bool:
        """Whether anybody but the device parameters holds the memory."""
        own = sum(
            self.group.value(index).untyped_storage().data_ptr() == self.address for index in range(len(self.group.all))
        )
        return self._lease.in_use_beside(own)

    def _keep(self) -> None:
        """Has what may be written from now on compared with what it is: views, and the host's weights."""
        self.group.expose()
        self._kept = KeptMemory(self.group, self._values())

    def _values(self) -> list[Tensor]:
        """The weights on the device, once everything is done that writes them."""
        self._device.access(self._memory, Stream.COMPUTE, write=False)
        self._device.synchronize(self._device.record(Stream.COMPUTE), Wait.WRITE_BACK_AFTER_USE)
        return [self.group.value(index) for index in range(len(self.group.all))]

    def synchronize(self) -> None:
        """Lets the host wait until no transfer reads its weights any more."""
        self._device.synchronize(self.layer.transfer, Wait.UPDATE_AFTER_RESIDENTS)

    def close(self) -> None:
        """Frees the device memory."""
        self._memory = self._device.empty(0)
        self._lease = Lease(self._memory)
        self.nbytes = 0

    def _take_memory(self) -> None:
        self._stays.discard(self.address)
        self._memory = self._device.empty(self.layer.planned.nbytes)
        self._lease = Lease(self._memory)
        self._kept = None  # whoever holds the old memory keeps its values
        self._stays.add(self.address)
        self.nbytes = self._memory.nbytes

    def _attach(self) -> None:
        with no_inference_mode():  # a batch that is trained may follow a prediction
            self.group.attach([view(self._lease.memory, span) for span in self.group.spans])
