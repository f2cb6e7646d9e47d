"""Copies saved tensors to the host in forward, and back one unit before backward needs them.

::

    saved ──store──▶ ring on the host ──return──▶ device ──▶ backward
             (1)                          (2)

(1) A storage is copied on the download stream when autograd first saves a view of the storage. All views of a storage share one
copy. The storage's device memory is freed when compute has waited for the copy, at the end of the next unit's forward
(``retire``). (2) When backward begins a unit's call, the storages of the previous call in the forward are prefetched, because
backward needs them next. Other storages are uploaded on demand. A wrong guess costs time, never a result.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.capabilities.activations.host_ring import HostRing
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import strided
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import base_of, preserve_version_counter, storage_id

WORTH_MOVING = 2**18
"""Smaller storages, in bytes, stay on the device: a copy would cost the host more time than the memory is worth."""


@dataclass(eq=False)
class OffloadedStorage:
    """The values of one storage at one version, and where they are.

    Attributes:
        counter: a tensor that shares the version counter of the saved tensor, but not its memory.
        source: the whole storage on the device, ``uint8``; None once compute may reuse the memory.
        buffer: the storage's memory on the host.
        offload: uploads the storage again. Its ring gets the buffer when no graph holds this object any more.
        row: the row of the copies in timelines.
        identity: a weak reference to the storage. While the reference lives, no other storage has the same number.
        nbytes: bytes of the storage.
        stored: the event of the copy to the host.
        returned: the storage in other device memory, ``uint8``, from the upload until backward does not need it any more.
        arrived: the event of the upload.
    """

    counter: Tensor
    source: Tensor | None
    buffer: PinnedMemory
    offload: Offload
    row: int
    identity: StorageWeakRef
    nbytes: int
    stored: Any = None
    returned: Tensor | None = None
    arrived: Any = None

    @property
    def on_device(self) -> bool:
        """True if the storage is in device memory: not offloaded yet, or copied back."""
        return self.source is not None or self.returned is not None

    @property
    def on_host(self) -> Tensor:
        """The whole storage on the host, ``uint8``."""
        return self.buffer.bytes[: self.nbytes]

    @property
    def version(self) -> int:
        """The version of the saved tensor now. In-place writes have increased it."""
        return self.counter._version

    def counts_with(self, tensor: Tensor) -> bool:
        """Returns True if an in-place write of a tensor increases :attr:`version`. Tries this, and restores the counter.

        Not all views of a storage share a version counter: each result of ``unsafe_chunk`` has its own counter.
        """
        with preserve_version_counter(tensor):
            before = self.version
            increment_version(tensor)
            return self.version != before

    def __del__(self) -> None:
        # No graph holds this object any more. Any thread may release the last reference.
        self.offload.ring.give_back(self.buffer)


class SavedReference(NamedTuple):
    """The object that a graph holds in place of an offloaded tensor: the tensor's place in its storage.

    Attributes:
        storage: the tensor's storage.
        version: the tensor's version when it was saved.
        offset: bytes from the start of the storage.
        dtype, shape, stride: those of the tensor; strides in elements.
    """

    storage: OffloadedStorage
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]

    def load(self) -> tuple[Tensor, int, int]:
        """Returns the tensor on the device, its version when it was saved, and its version now."""
        return self.storage.offload.load(self), self.version, self.storage.version


@dataclass(eq=False)
class UnitCall:
    """One call of a unit, and the storages that autograd saves in it.

    Attributes:
        unit: the unit's name.
        row: the row in timelines, which is the index of the unit's layer.
        previous: the previous call in the same forward. In backward it follows this call.
        at_once: True if backward needs these activations so soon that they stay on the device.
        offloads: True if the activations of this call are offloaded.
        storages: the offloaded storages, the oldest first.
        saved: bytes of the storages that this call was the first to save, offloaded or not.
        inputs: bytes of the storages that this call was the first to take as arguments.
    """

    unit: str
    row: int
    previous: UnitCall | None = None
    at_once: bool = False
    offloads: bool = False
    storages: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    saved: int = 0
    inputs: int = 0

    def needed(self) -> list[OffloadedStorage]:
        """Returns the offloaded storages that a graph still holds, in the order in which backward needs them."""
        return [storage for reference in reversed(self.storages) if (storage := reference()) is not None]


class WeightsOnDevice:
    """Recognises copies in another dtype of weights that are on the device in any case: autocast makes them in each forward.

    Such a copy is not an activation: plain Lightning has it on the device from forward to backward, too.

    Args:
        weights: the weights, as the modules hold them now.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        self._weights = {id(each): each for each in weights}
        frozen = [each for each in self._weights.values() if each.is_floating_point() and not each.requires_grad]
        self._frozen = {each.shape: each.dtype.itemsize for each in frozen}

    def copied_to(self, tensor: Tensor) -> bool:
        """Returns True if a saved tensor is such a copy, or a view of one.

        The copy of a frozen weight has no graph that leads to the weight. So each tensor of a lower precision without a graph
        counts that has the shape of a frozen weight. A wrong guess takes memory: the tensor stays on the device.
        """
        whole = tensor if (base := base_of(tensor)) is None else base
        if (node := whole.grad_fn) is not None:
            cast = node.name() == "ToCopyBackward0"
            return cast and id(getattr(node.next_functions[0][0], "variable", None)) in self._weights
        lower = whole.dtype.itemsize < self._frozen.get(whole.shape, 0)
        return lower and whole.is_floating_point() and not whole.requires_grad


class Offload:
    """Copies saved tensors to the host, and back for backward.

    Args:
        engine: the engine.
        ring: the host memory.

    Attributes:
        ring: as given.
        lock: guards the tables of storages.
        active: True after the first unit's call has begun. Before, :meth:`store` offloads nothing.
        stats: the device's counters.
        buffers: the addresses of the storages of the module's buffers. These storages stay on the device.
        weights: the weights whose copies in another dtype stay on the device.
    """

    def __init__(self, engine: Engine, ring: HostRing) -> None:
        self._engine = engine
        self._log = engine.log or logging.getLogger("lightning.pytorch.superpipeline")
        self._device = engine.device
        self.stats = engine.device.stats
        self.ring = ring
        self.lock = threading.RLock()
        self._calls = threading.local()  # of each thread: the running call
        # All offloaded storages, by the storage's number and version. Storages with a copy in flight are included.
        self._known: weakref.WeakValueDictionary[tuple[int, int], OffloadedStorage] = weakref.WeakValueDictionary()
        # Copies to the host for which compute has not waited: a list for each call, the latest last.
        self._in_flight: deque[list[OffloadedStorage]] = deque()
        self._latest: dict[int, OffloadedStorage] = {}  # of each storage in flight, the version that was copied last
        # Two kinds of storages are copied back to the device:
        # - by `pre_backward` and `load`. When the backward of the next call begins, `pre_backward` frees the device memory,
        #   except of storages that this call or the call after it needs.
        # - by `load_once`, for `Headroom`, whose calls have no `pre_backward`. The device memory is freed when the graph releases
        #   the saved tensor.
        # `flush` frees the device memory of both kinds.
        self._returned: list[OffloadedStorage] = []
        self._returned_once: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._saved: dict[int, StorageWeakRef] = {}  # the storages whose bytes are counted as saved
        self._given: dict[int, StorageWeakRef] = {}  # the storages whose bytes are counted as inputs
        self.active = False
        self.buffers: Set[int] = frozenset()
        self.weights = WeightsOnDevice(())
        self._warned = False

    # ------------------------------------------------------------------ forward

    @property
    def call(self) -> UnitCall | None:
        """The running call of this thread."""
        return getattr(self._calls, "call", None)

    def enter(self, call: UnitCall, given: Iterable[Any]) -> UnitCall | None:
        """Called when a unit's forward begins. Makes ``call`` the running call of this thread, and counts its inputs.

        Returns the running call that contains this call, for :meth:`leave`; None if there is none.
        """
        outer = self.call
        self.active = True
        with self.lock:
            call.inputs = sum(count_once(each, self._given) for each in given if isinstance(each, Tensor))
            self._in_flight.append([])
        self._calls.call = call
        return outer

    def leave(self, outer: UnitCall | None) -> None:
        """Called when the forward has returned or raised. Compute waits for the copies of all calls except the latest one.

        Args:
            outer: the result of :meth:`enter`, which becomes the running call again.
        """
        self._calls.call = outer
        self.retire(keep=1)

    def store(self, tensor: Tensor) -> SavedReference | None:
        """Offloads a saved tensor (1), and counts its storage in the running call.

        Returns:
            The object for the graph to hold in place of the tensor; None if the tensor stays on the device. If the call does not
            offload, a tensor stays, except if its storage was offloaded before.
        """
        call = self.call
        if call is None or not self.can_be_offloaded(tensor):
            return None
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            call.saved += count_once(tensor, self._saved)
            reference = self._refer(tensor, call, offloads=call.offloads)
            if reference is not None and call.offloads:
                call.storages.append(weakref.ref(reference.storage))
            return reference

    def evict(self, tensor: Tensor, call: UnitCall) -> SavedReference | None:
        """Offloads a tensor that was saved before and kept. Returns its reference; None if the host has no room."""
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            return self._refer(tensor, call, offloads=True)

    def count_saved(self, tensor: Tensor) -> Any:
        """Counts a tensor's storage as on the device, as long as the result exists; see :attr:`Engine.count_saved`."""
        count = self._engine.count_saved
        return None if count is None else count(tensor)

    def count(self, tensor: Tensor, *, small: bool = False) -> int:
        """Counts a saved tensor's storage. Returns its bytes; 0 if it was counted before in this step, or is small."""
        with self.lock:
            return count_once(tensor, self._saved, small=small)

    def _refer(self, tensor: Tensor, call: UnitCall, *, offloads: bool) -> SavedReference | None:
        """Returns the reference of a tensor whose storage is offloaded; None if the tensor stays on the device.

        Args:
            tensor: a tensor that can be offloaded.
            call: the unit call that saves the tensor.
            offloads: True to offload the storage now if it was not offloaded before.
        """
        key = storage_id(tensor.untyped_storage()), tensor._version
        storage = self._known.get(key)
        if storage is None or not storage.counts_with(tensor):
            storage = self._send(tensor, call) if offloads else None
            if storage is None:
                return None
            self._known[key] = storage
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return SavedReference(storage, tensor._version, offset, tensor.dtype, tensor.shape, tensor.stride())

    def can_be_offloaded(self, tensor: Tensor, *, every: bool = False) -> bool:
        """Returns True for a plain view of a storage on the device, if the storage need not stay on the device.

        With ``every``, this includes what takes memory of the forward, but is kept: storages that are not worth a copy, and
        copies of weights that are on the device.

        A graph's tensor is built again from its storage, dtype, shape and strides. This would lose the class of a subclass, and
        the bits of a conjugate or negative view.
        """
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage = tensor.untyped_storage()
        if (not every and is_small(storage.nbytes())) or tensor.device != self._device.device:
            return False
        if storage.data_ptr() in self._engine.device_storages or storage.data_ptr() in self.buffers:
            return False
        return not (tensor.is_conj() or tensor.is_neg()) and (every or not self.weights.copied_to(tensor))

    def _send(self, saved: Tensor, call: UnitCall) -> OffloadedStorage | None:
        """Issues the copy of a tensor's storage to the host. Returns None, with a warning, if the host has no room."""
        source: Any = strided(saved, 0, torch.uint8, (saved.untyped_storage().nbytes(),), (1,))
        buffer = self.ring.take(source.nbytes)
        if buffer is None:
            self.warn(call.unit)
            return None
        source._held = self.count_saved(source)  # counted as long as `source` exists
        counter = saved.detach()
        counter.data = saved.new_empty(0)
        identity, device = StorageWeakRef(source.untyped_storage()), self._device
        storage = OffloadedStorage(counter, source, buffer, self, call.row, identity, source.nbytes)
        earlier = self._latest.get(storage.identity.cdata)
        if earlier is not None:
            # An earlier copy of the same storage is in flight. If the storage was written since the copy was issued, nobody
            # reads the copy: unpacking raises an error. If not, a view with another version counter was saved.
            device.wait(Stream.COMPUTE, earlier.stored, Wait.REUSE_AFTER_STORE)
        self._latest[storage.identity.cdata] = storage
        device.access(source, Stream.COMPUTE, write=True)
        # Compute has waited for the last copy from this buffer, so this copy to the buffer follows the last copy.
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
        with device.timed("store", call.row, Stream.DOWNLOAD, source.nbytes):
            device.copy([storage.on_host], [source], Stream.DOWNLOAD, why=Wait.REUSE_AFTER_STORE)
        storage.stored = buffer.last = device.record(Stream.DOWNLOAD)
        if not self._in_flight:  # a backward inside this call has ended and flushed
            self._in_flight.append([])
        self._in_flight[-1].append(storage)
        self.stats.offloaded_activation_bytes += source.nbytes
        return storage

    def warn(self, unit: str) -> None:
        """Logs once that the host has no room for a unit's activations, which therefore stay on the device."""
        if not self._warned:
            self._warned = True
            self._log.warning(
                "Superpipeline: the CPU has no room for the activations of %r: %s of %s are taken. They stay on the GPU. Use "
                'a smaller batch, activations={"%s": "recompute"}, or the checkpointing of the model itself.',
                unit, human_bytes(self.ring.nbytes), human_bytes(self.ring.limit or 0), unit,
            )  # fmt: skip

    def retire(self, *, keep: int) -> None:
        """Makes compute wait for copies to the host, and frees the device memory. The ``keep`` latest calls are left out."""
        with self.lock:
            while len(self._in_flight) > keep:
                for storage in self._in_flight.popleft():
                    self._device.wait(Stream.COMPUTE, storage.stored, Wait.REUSE_AFTER_STORE)
                    if storage.source is not None and self._latest.get(storage.identity.cdata) is storage:
                        # The storage has no later copy in flight. The next tensor in this memory is written by compute.
                        self._device.access(storage.source, Stream.COMPUTE, write=True)
                        del self._latest[storage.identity.cdata]
                    storage.source = None

    # ------------------------------------------------------------------ backward

    def pre_backward(self, call: UnitCall) -> None:
        """Called when backward begins a call: uploads the call's offloaded storages, and prefetches those of the next call (2).

        The next call in backward is the previous call of the forward. Other storages that were uploaded are freed first.
        """
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            self.retire(keep=0)
            now = call.needed()
            next_ = call.previous.needed() if call.previous is not None else []
            wanted = {*now, *next_}
            self._drop([storage for storage in self._returned if storage not in wanted])
            self._begin_return(now)
            # If device memory is full now, :meth:`load` uploads these storages later, when backward needs them.
            with suppress(torch.OutOfMemoryError):
                self._begin_return(next_)

    def load(self, reference: SavedReference) -> Tensor:
        """Returns the saved tensor, for backward. If its storage is not on the device, it is uploaded now."""
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            storage = reference.storage
            memory = storage.source
            if memory is None:
                self._begin_return([storage])
                memory = storage.returned
                assert memory is not None
                self._device.wait(Stream.COMPUTE, storage.arrived, Wait.USE_AFTER_RETURN)
                self._device.access(memory, Stream.COMPUTE, write=False)
            return strided(memory, reference.offset, reference.dtype, reference.shape, reference.stride)

    def load_once(self, reference: SavedReference) -> Tensor:
        """Does the same as :meth:`load`. The uploaded storage is freed when the graph releases the tensor."""
        with self.lock:
            tensor = self.load(reference)
            if reference.storage in self._returned:
                self._returned.remove(reference.storage)
                self._returned_once.add(reference.storage)
            return tensor

    def flush(self) -> None:
        """Called when a step or a backward has ended: frees the device memory of all offloaded storages.

        Compute first waits for the copies in flight, to the host and back, because it may get the freed memory next. A storage
        that is saved again counts again (:attr:`UnitCall.saved`).
        """
        with self.lock:
            self.retire(keep=0)
            self._drop(self._returned)  # some were prefetched in vain, so compute waits for their copies
            # The graphs that hold these storages are retained. `load` has made compute wait for the uploads.
            for storage in self._returned_once:
                storage.returned = None
            self._returned_once.clear()
            self._saved.clear()
            self._given.clear()

    def close(self) -> None:
        """Frees the ring, and the device memory of all offloaded storages."""
        self.flush()
        self.ring.close()

    def _begin_return(self, storages: Sequence[OffloadedStorage]) -> None:
        """Issues the uploads of storages that are not on the device.

        Raises:
            torch.OutOfMemoryError: the device has no memory for all of them. Then none is uploaded.
        """
        device = self._device
        missing = [each for each in dict.fromkeys(storages) if each.source is None and each.returned is None]
        if not missing:
            return
        memories: list[Any] = [
            device.empty(storage.nbytes) for storage in missing
        ]  # before any storage is changed: this may raise
        for storage, memory in zip(missing, memories, strict=True):
            memory._held = self.count_saved(memory)
            storage.returned = memory
        # Compute may have used the new memory last. Compute has also waited for the storages' copies to the host, so the uploads
        # follow these copies.
        device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
        for storage, memory in zip(missing, memories, strict=True):
            with device.timed("return", storage.row, Stream.UPLOAD, storage.nbytes):
                device.copy([memory], [storage.on_host], Stream.UPLOAD, why=Wait.USE_AFTER_RETURN)
            storage.arrived = storage.buffer.last = device.record(Stream.UPLOAD)
            self.stats.uploaded_activation_bytes += storage.nbytes
        self._returned += missing

    def _drop(self, storages: Sequence[OffloadedStorage]) -> None:
        """Frees the device memory of storages that were uploaded. Compute waits for the uploads."""
        for storage in list(storages):  # a copy, because `storages` may be `_returned`, from which the loop removes
            assert storage.returned is not None
            self._device.wait(Stream.COMPUTE, storage.arrived, Wait.REUSE_AFTER_RETURN)
            self._device.access(storage.returned, Stream.COMPUTE, write=True)
            storage.returned = None
            self._returned.remove(storage)


def count_once(tensor: Tensor, seen: dict[int, StorageWeakRef], *, small: bool = False) -> int:
    """Returns the bytes of a tensor's storage and adds the storage to ``seen``; 0 if it was in ``seen``.

    Args:
        tensor: a tensor of any kind.
        seen: the storages that are counted already, by their numbers.
        small: True to count small storages as well.
    """
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a sparse tensor, or one that a transform has wrapped, has none
        return 0
    if storage_id(storage) in seen or (is_small(storage.nbytes()) and not small):
        return 0
    seen[storage_id(storage)] = StorageWeakRef(storage)
    return storage.nbytes()


def is_small(nbytes: int) -> bool:
    """Returns True if a storage of this size is not worth a copy."""
    return nbytes < WORTH_MOVING
