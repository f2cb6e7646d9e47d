"""Residents: the weights outside all layers. They stay on the device in one piece of memory, and are uploaded together."""

from __future__ import annotations

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.lease import Lease
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.layer import Slot, StreamedLayer
from sp_lightning.core.weights.ring import BlockSource
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
        if not stale or layer.views:
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
        if group.retyped:
            self._attach()  # copies the host's values to weights of another dtype, which have memory outside the slot
        group.fetched()
        group.sync_requires_grad()
        self.current = True

    def invalidate(self) -> None:
        """Marks the copy on the device as out of date, because the host's weights were written, or may have been.

        If user code keeps views of the copy, the residents are uploaded at once, because views must show the writes.
        """
        self.current = False
        if self.layer.views:
            self.refresh()

    def write_back(self, *, noticed: bool = False) -> None:
        """Copies to the host all weights that were written on the device.

        Args:
            noticed: True after a use of device parameters that was noticed. Otherwise it is an error if views of the memory were
                written while modules hold host parameters.
        """
        if self._is_absent:
            return
        if self._writes.write_back_slot(self._slot, late=self._writes.on_host() and not noticed):
            self._attach()
            self.current = False
        self.layer.views = bool(self.group.hosts) and self._writes.is_held(self._slot)
        if not self.layer.views:
            self.group.forget_views()

    @property
    def _is_absent(self) -> bool:
        """True if the residents have no device memory, after :meth:`leave`."""
        return self.nbytes < self.layer.planned.nbytes

    def leave(self) -> None:
        """Frees the device memory between two steps, except memory that tensors view. :meth:`refresh` takes new memory."""
        self.write_back()
        self.current = False
        if not self.layer.views and self.group.detach():
            self._writes.resident_storages.discard(self.address)
            self._slot = self._new_slot(0)

    def close(self) -> None:
        """Frees the device memory."""
        self._slot = self._new_slot(0)

    def _take_memory(self) -> None:
        """Allocates new memory on the device, and makes the device parameters views of it.

        Called by ``__init__``, and after :meth:`leave`. Otherwise only if ``share_memory_`` has moved the parameters, or if user
        code has given one of them other memory on the host (``param.data = other``): graphs may have saved views of the old
        memory, and have to keep the old values, as with plain autograd. An upload to the old memory would change these values.
        """
        self._writes.resident_storages.discard(self.address)
        self.layer.views = False
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
