"""Saved tensors on their way to the host and back: they leave while forward goes on, and come back one unit ahead.

::

    saved ──store──▶ ring on the host ──return──▶ device, again ──▶ backward
             (1)                          (2)

(1) A storage leaves on the drain stream as soon as autograd saves something of it; views and duplicates travel once. Its
device memory is free when compute has waited for the copy, at the end of the next unit's forward (``retire``). (2) When
backward comes to a unit's call, the storages that the call before it has saved begin to come back. Whatever else is
unpacked comes on demand. A wrong guess costs time, never a result.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.activations.host_ring import HostRing
from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.host_memory import PinnedMemory
from sp_lightning.device.layout import strided
from sp_lightning.plan.units import human_bytes
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import preserve_version_counter, storage_id

# Storages of fewer bytes stay: they are not worth the host's time.
WORTH_MOVING = 2**18


@dataclass(eq=False)
class OffloadedStorage:
    """What one storage held at one version: on the device until it is stored, on the host, and on the device again.

    Attributes:
        counter: a tensor that shares the version counter of the saved one, and no memory with it.
        source: the whole storage on the device, ``uint8``; None as soon as compute may use the memory for something else.
        buffer: where it goes on the host.
        offload: copies it back, and takes the buffer back when no graph needs this object any more.
        row: the row of the timeline in which its copies are noted.
        identity: a weak reference to the storage: while it lives, no other storage gets the same number.
        nbytes: bytes of the storage.
        stored: the event of the copy to the host.
        returned: the storage on the device again, ``uint8``, while backward is about to need it.
        arrived: the event of the copy from the host.
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
        """The version of the saved tensor now, in-place writes since then included."""
        return self.counter._version

    def counts_with(self, tensor: Tensor) -> bool:
        """Whether a write of a tensor shows in :attr:`version`.

        Not all views of one storage share a counter: each result of ``unsafe_chunk`` has its own.
        """
        with preserve_version_counter(tensor):
            before = self.version
            increment_version(tensor)
            return self.version != before

    def __del__(self) -> None:
        # The graph has let go of it. That may happen in any thread.
        self.offload.ring.give_back(self.buffer)


class SavedReference(NamedTuple):
    """What the graph holds in place of a saved tensor: where the tensor lies in its storage, and its version then.

    Attributes:
        storage: what the tensor is a view of.
        version: the tensor's version when it was saved.
        offset: bytes from the start of the storage.
        stride: in elements.
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
    """One call of a unit, and what autograd saves in it.

    Attributes:
        unit: the unit's name.
        row: the row of the timeline: the index of the unit's layer.
        previous: the call before this one in the same forward, whose backward comes after this one's.
        at_once: whether backward needs at once what is saved here, so that it is not worth to send it away.
        leaves: whether what is saved here leaves the device; the unit's mode says so.
        storages: the storages that have left, in that order.
        saved: bytes of the storages that were saved here first, whether they have left or not.
        inputs: bytes of the storages that this call was the first to be given.
        in_backward: what is to be called once, when the call's backward begins; None if nothing is.
    """

    unit: str
    row: int
    previous: UnitCall | None = None
    at_once: bool = False
    leaves: bool = False
    storages: list[weakref.ref[OffloadedStorage]] = field(default_factory=list)
    saved: int = 0
    inputs: int = 0
    in_backward: Callable[[], None] | None = None

    def needed(self) -> list[OffloadedStorage]:
        """The storages that the graph still holds, in the order in which backward needs them."""
        return [storage for reference in reversed(self.storages) if (storage := reference()) is not None]


class Offload:
    """Stores saved tensors on the host and brings them back.

    Args:
        device: the device that they leave.
        ring: the host memory that they go to.
        stays: the addresses of storages that are on the device in any case. The set may grow later.
        log: where warnings go; None for Lightning's log.

    Attributes:
        lock: guards the tables of storages.
        active: whether any call was ever entered. Before that, :meth:`store` lets everything stay.
        stored_bytes, returned_bytes: bytes copied to the host, and from it.
        buffers: the addresses of the module's buffers, which stay as well.
    """

    def __init__(self, device: Device, ring: HostRing, stays: Set[int], log: logging.Logger | None = None) -> None:
        self._log = log or logging.getLogger("lightning.pytorch.superpipeline")
        self._device = device
        self.ring = ring
        self._stays = stays
        self.lock = threading.RLock()
        self._calls = threading.local()  # of each thread: the call under way
        # By the storage's number and version: what is on the way, or on the host.
        self._known: weakref.WeakValueDictionary[tuple[int, int], OffloadedStorage] = weakref.WeakValueDictionary()
        self._leaving: deque[list[OffloadedStorage]] = deque()  # one list for each call, the latest last
        self._latest: dict[int, OffloadedStorage] = {}  # of each storage that leaves, the version that left last
        self._returned: list[OffloadedStorage] = []  # the storages that are on the device again
        # Those of them that stay until their graph releases them.
        self._returned_once: weakref.WeakSet[OffloadedStorage] = weakref.WeakSet()
        self._saved: dict[int, StorageWeakRef] = {}  # the storages whose bytes are counted as saved
        self._given: dict[int, StorageWeakRef] = {}  # the storages whose bytes are counted as inputs
        self.active = False
        self.buffers: Set[int] = frozenset()
        self.stored_bytes = 0
        self.returned_bytes = 0
        self._warned = False

    # ------------------------------------------------------------------ forward

    @property
    def call(self) -> UnitCall | None:
        """The call that is under way in this thread."""
        return getattr(self._calls, "call", None)

    def enter(self, call: UnitCall, given: Iterable[Any]) -> UnitCall | None:
        """A unit's forward begins.

        Args:
            call: the call.
            given: its arguments, taken apart.

        Returns:
            The call inside which it is made, for :meth:`leave`.
        """
        outer = self.call
        self.active = True
        with self.lock:
            call.inputs = sum(count_once(each, self._given) for each in given if isinstance(each, Tensor))
            self._leaving.append([])
        self._calls.call = call
        return outer

    def leave(self, outer: UnitCall | None) -> None:
        """The forward has returned or raised. By the time compute goes on, what the call before it saved has left."""
        self._calls.call = outer
        self.retire(keep=1)

    def store(self, tensor: Tensor) -> SavedReference | None:
        """Has a saved tensor leave (1), and returns what the graph holds in its place; None if the tensor stays."""
        call = self.call
        if call is None or not self.can_leave(tensor):
            return None
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            call.saved += count_once(tensor, self._saved)
            reference = self._refer(tensor, call, leaves=call.leaves)
            if reference is not None and call.leaves:
                call.storages.append(weakref.ref(reference.storage))
            return reference

    def evict(self, tensor: Tensor, call: UnitCall) -> SavedReference | None:
        """Sends a tensor that was saved before, and kept. Returns what stands for it; None if the host has no room."""
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            return self._refer(tensor, call, leaves=True)

    def count(self, tensor: Tensor) -> int:
        """Bytes of a saved tensor's storage; 0 if they were counted in this step."""
        with self.lock:
            return count_once(tensor, self._saved)

    def _refer(self, tensor: Tensor, call: UnitCall, *, leaves: bool) -> SavedReference | None:
        """What stands for a tensor whose storage has left, or leaves now; None if it stays."""
        key = storage_id(tensor.untyped_storage()), tensor._version
        storage = self._known.get(key)
        if storage is None or not storage.counts_with(tensor):
            storage = self._send(tensor, call) if leaves else None
            if storage is None:
                return None
            self._known[key] = storage
        offset = int(tensor.storage_offset()) * tensor.element_size()
        return SavedReference(storage, tensor._version, offset, tensor.dtype, tensor.shape, tensor.stride())

    def can_leave(self, tensor: Tensor) -> bool:
        """Whether a tensor is a plain view of a large storage on the device that does not stay there in any case."""
        if type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage = tensor.untyped_storage()
        if is_small(storage.nbytes()) or tensor.device != self._device.device:
            return False
        if storage.data_ptr() in self._stays or storage.data_ptr() in self.buffers:
            return False
        return not (tensor.is_conj() or tensor.is_neg())

    def _send(self, saved: Tensor, call: UnitCall) -> OffloadedStorage | None:
        source = strided(saved, 0, torch.uint8, (saved.untyped_storage().nbytes(),), (1,))
        buffer = self.ring.take(source.nbytes)
        if buffer is None:
            self.warn(call.unit, "stay on the device")
            return None
        counter = saved.detach()
        counter.data = saved.new_empty(0)
        identity, device = StorageWeakRef(source.untyped_storage()), self._device
        storage = OffloadedStorage(counter, source, buffer, self, call.row, identity, source.nbytes)
        earlier = self._latest.get(storage.identity.cdata)
        if earlier is not None:
            # The storage was written since it was sent, and what it held before is not read.
            device.wait(Stream.COMPUTE, earlier.stored, Wait.REUSE_AFTER_STORE)
        self._latest[storage.identity.cdata] = storage
        device.access(source, Stream.COMPUTE, write=True)
        # Compute has waited for the last copy from this buffer, so the copy to it comes after that one, too.
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
        begun = device.mark(Stream.DOWNLOAD)
        device.copy([storage.on_host], [source], Stream.DOWNLOAD, why=Wait.REUSE_AFTER_STORE)
        device.note("store", call.row, begun, Stream.DOWNLOAD, source.nbytes)
        storage.stored = buffer.last = device.record(Stream.DOWNLOAD)
        if not self._leaving:  # a backward inside this call has ended and flushed
            self._leaving.append([])
        self._leaving[-1].append(storage)
        self.stored_bytes += source.nbytes
        return storage

    def warn(self, unit: str, instead: str) -> None:
        """Says once that the host has no room for a unit's activations, and what is done instead."""
        if not self._warned:
            self._warned = True
            self._log.warning(
                "Superpipeline: the host has no room for the activations of %r: %s of %s are taken. They %s. Use a smaller "
                'batch, or activations={"%s": "recompute"}.',
                unit, human_bytes(self.ring.nbytes), human_bytes(self.ring.limit or 0), instead, unit,
            )  # fmt: skip

    def retire(self, *, keep: int) -> None:
        """Frees the device memory of what all but the ``keep`` latest calls have stored. Compute waits for the copies."""
        with self.lock:
            while len(self._leaving) > keep:
                for storage in self._leaving.popleft():
                    self._device.wait(Stream.COMPUTE, storage.stored, Wait.REUSE_AFTER_STORE)
                    if storage.source is not None and self._latest.get(storage.identity.cdata) is storage:
                        # Whatever is allocated there next is written by compute.
                        self._device.access(storage.source, Stream.COMPUTE, write=True)
                        del self._latest[storage.identity.cdata]
                    storage.source = None

    # ------------------------------------------------------------------ backward

    def pre_backward(self, call: UnitCall) -> None:
        """Backward has come to a call: what it saved is on the device, what the call before it saved is coming (2)."""
        with self.lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            self.retire(keep=0)
            now = call.needed()
            next_ = call.previous.needed() if call.previous is not None else []
            wanted = {*now, *next_}
            self._drop([storage for storage in self._returned if storage not in wanted])
            self._begin_return(now)
            # Without room for them now, they come on demand, when there may be room again.
            with suppress(torch.OutOfMemoryError):
                self._begin_return(next_)

    def load(self, reference: SavedReference) -> Tensor:
        """The saved tensor, for backward. Its storage comes on demand if it is not on the device."""
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
        """As :meth:`load`. The storage leaves the device again as soon as the graph has let go of it."""
        with self.lock:
            tensor = self.load(reference)
            if reference.storage in self._returned:
                self._returned.remove(reference.storage)
                self._returned_once.add(reference.storage)
            return tensor

    def flush(self) -> None:
        """A step or a backward is over: afterwards nothing is on its way, and nothing is kept on the device."""
        with self.lock:
            self.retire(keep=0)
            self._drop(self._returned)
            for storage in self._returned_once:  # of graphs that are kept; compute has waited for them
                storage.returned = None
            self._returned_once.clear()
            self._saved.clear()
            self._given.clear()

    def close(self) -> None:
        """Frees the ring."""
        self.flush()
        self.ring.close()

    def _begin_return(self, storages: Sequence[OffloadedStorage]) -> None:
        device = self._device
        missing = [each for each in dict.fromkeys(storages) if each.source is None and each.returned is None]
        if not missing:
            return
        memories = [device.empty(storage.nbytes) for storage in missing]  # an error here leaves no storage half there
        for storage, memory in zip(missing, memories, strict=True):
            storage.returned = memory
        # Compute may have used that memory last. It has waited for the copies to the host, so those back come after them, too.
        device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
        for storage, memory in zip(missing, memories, strict=True):
            begun = device.mark(Stream.UPLOAD)
            device.copy([memory], [storage.on_host], Stream.UPLOAD, why=Wait.USE_AFTER_RETURN)
            device.note("return", storage.row, begun, Stream.UPLOAD, storage.nbytes)
            storage.arrived = storage.buffer.last = device.record(Stream.UPLOAD)
            self.returned_bytes += storage.nbytes
        self._returned += missing

    def _drop(self, storages: Sequence[OffloadedStorage]) -> None:
        for storage in list(storages):
            assert storage.returned is not None
            self._device.wait(Stream.COMPUTE, storage.arrived, Wait.REUSE_AFTER_RETURN)
            self._device.access(storage.returned, Stream.COMPUTE, write=True)
            storage.returned = None
            self._returned.remove(storage)


def count_once(tensor: Tensor, seen: dict[int, StorageWeakRef], *, small: bool = False) -> int:
    """Bytes of a tensor's storage, or 0 if the storage is in ``seen`` already, to which it is added.

    Args:
        tensor: a tensor of any kind.
        seen: the storages that are counted already, by their numbers.
        small: whether small storages count, too.
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
    """Whether a storage of so many bytes stays where it is."""
    return nbytes < WORTH_MOVING
