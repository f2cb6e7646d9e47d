"""Residents: the weights outside all layers. They stay on the device in one piece of memory, and are uploaded together."""

from __future__ import annotations

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.lease import Lease
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.layer import Slot, StreamedLayer
from sp_lightning.core.weights.ring import BlockSource
from sp_lightning.core.weights.write_guard import drop_if_empty
from sp_lightning.core.weights.writes import WriteBack


class Residents:
    """The copy of the resident weights on the device, in a slot that no other layer uses.

    Args:
        layer: the layer of all residents. It is always IN_USE.
        source: the layer's bytes on the host.
        writes: copies weights to the host that were written on the device.

    Attributes:
        current: True unless the copy on the device is out of date, or may be, because user code may write host weights without
            a change of a version.
        nbytes: bytes of device memory.
    """

    def __init__(self, layer: StreamedLayer, source: BlockSource, writes: WriteBack) -> None:
        self.layer = layer
        self.group = layer.parameters
        self._source = source
        self._writes = writes
        self._device: Device = writes.device
        self._slot = self._new_slot(0)
        self._take_memory()
        self.current = False

    @property
    def address(self) -> int:
        """The address of the residents' memory."""
        return self._slot.memory.data_ptr()

    def refresh(self) -> None:
        """Uploads the residents if the copy on the device is out of date. Later kernels read the new values.

        Before the upload, weights that were written on the device are copied to the host. Exception: if versions show a write on
        the host, and user code keeps no view of the memory, nothing is copied back, and the host's values are uploaded.

        Called when a step begins or continues, before module calls, and before other operations on residents.
        """
        group, layer = self.group, self.layer
        if layer.update is not None:
            self._source.wait(layer)
        stale = layer.stale
        self.current = not group.hosts or (self.current and not stale)
        if self.current:
            return
        if not stale or self._is_compared:
            self.write_back()
        weights, staged = self._source.stage(layer)
        if self._is_absent or self._slot.stale or self._slot.lease.moved:
            # User code has given a host parameter other memory (param.data = other), and graphs that have saved views of the
            # present device memory keep that memory, as with plain autograd. Or share_memory_ has moved the parameters.
            self._take_memory()
        memory = self._slot.memory
        self._device.access(memory, Stream.COMPUTE, write=False)
        self._device.wait(Stream.UPLOAD, self._device.record(Stream.COMPUTE), Wait.RESIDENTS_AFTER_USE)
        if staged is not None:
            self._device.wait(Stream.UPLOAD, staged, Wait.FETCH_AFTER_UPDATE)
        self._device.copy([memory], [weights], Stream.UPLOAD)
        layer.transfer = self._device.record(Stream.UPLOAD)
        self._device.wait(Stream.COMPUTE, layer.transfer, Wait.USE_AFTER_RESIDENTS)
        self._device.access(memory, Stream.COMPUTE, write=False)
        if layer.guard is not None and layer.guard.retyped:
            self._attach()  # copies the host's values to weights of another dtype, which have memory outside the slot
        group.fetched()
        group.sync_requires_grad()
        self.current = True
        if self._is_compared:
            self._writes.take_digests(self._slot)

    def invalidate(self) -> None:
        """Marks the copy on the device as out of date, because the host's weights were written, or may have been.

        If user code keeps views of the copy, the residents are uploaded at once, because views must show the writes.
        """
        self.current = False
        if self._is_compared:
            self.refresh()

    def write_back(self) -> None:
        """Copies to the host all weights that were written on the device.

        If user code keeps views of the memory, takes digests, to detect later writes.
        """
        if self._is_absent:
            return
        written, replaced = self._writes.write_back_slot(self._slot)
        if replaced:
            # User code has given a parameter other memory on the device (param.data = other). A graph that has saved a view of
            # the old memory keeps the old values, as with plain autograd.
            old = self._slot
            self._take_memory()
            self._writes.note_stale_views(old, replaced)
        if written:
            self._attach()  # a weight that had other memory is a view of the slot again, which has older values
            self.current = False
        if self.group.hosts and self._held:
            self._writes.take_digests(self._slot)
        elif self.layer.guard is not None:
            self.layer.guard.drop_views()
            drop_if_empty(self.layer)

    @property
    def _is_compared(self) -> bool:
        """True if user code keeps views of the memory, which are compared with digests."""
        return self.layer.guard is not None and self.layer.guard.digests is not None

    @property
    def _held(self) -> bool:
        """True if tensors other than the device parameters view the memory."""
        own = sum(
            self.group.value(index).untyped_storage().data_ptr() == self.address for index in range(len(self.group.all))
        )
        return self._slot.lease.in_use_beside(own)

    @property
    def _is_absent(self) -> bool:
        """True if the residents have no device memory, after :meth:`leave`."""
        return self.nbytes < self.layer.planned.nbytes

    def leave(self) -> None:
        """Frees the device memory between two steps, except memory that tensors view. :meth:`refresh` takes new memory."""
        self.write_back()
        self.current = False
        if not self._is_compared and self.group.detach():
            self._writes.resident_storages.discard(self.address)
            self._slot = self._new_slot(0)

    def close(self) -> None:
        """Frees the device memory."""
        self._slot = self._new_slot(0)

    def _take_memory(self) -> None:
        """Allocates new memory on the device, and makes the device parameters views of it.

        Called by ``__init__``, and after :meth:`leave`. Otherwise only if ``share_memory_`` has moved the parameters, or if user
        code has given one of them other memory (``param.data = other``), on the host (:meth:`refresh`) or on the device
        (:meth:`write_back`): graphs may have saved views of the old memory, and have to keep the old values, as with plain
        autograd. An upload to the old memory would change these values.
        """
        self._writes.resident_storages.discard(self.address)
        if self.layer.guard is not None:
            self.layer.guard.leave_slot()
        self._slot = self._new_slot(self.layer.planned.nbytes)
        self._writes.resident_storages.add(self.address)
        self._attach()

    def _new_slot(self, nbytes: int) -> Slot:
        """Allocates device memory of ``nbytes`` bytes, and makes it the slot of the residents."""
        memory = self._device.empty(nbytes)
        self.nbytes = memory.nbytes
        self.layer.slot = Slot(-1, memory, Lease(memory), layer=self.layer, locked=True)
        return self.layer.slot

    def _attach(self) -> None:
        """Makes the device parameters views of the memory."""
        with no_inference_mode():  # views that were made in a prediction could not be used in training
            self.group.attach(self._slot.lease.views(0, self.group.spans))
