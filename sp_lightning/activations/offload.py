"""Saved tensors on their way to the host and back: they leave while forward goes on, and come back one unit ahead.

::

    saved ──store──▶ ring on the host ──bring──▶ device, again ──▶ backward
             (1)                          (2)

(1) A storage leaves on the drain stream as soon as autograd saves something of it; views and duplicates travel once. Its
device memory is free when compute has waited for the copy, at the end of the next unit's forward (``retire``). (2) When
backward comes to a unit, those that the unit before it has saved begin to come back; whatever else is unpacked comes on
demand. A wrong guess costs time, never a result.
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

from sp_lightning.device.device import Device
from sp_lightning.device.layout import strided
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import preserve_version_counter, storage_id
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.plan.activation_policy import Mode
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.host_ring import Berth, HostRing

# Smaller storages stay: they are not worth the host's time.
WORTH_MOVING = 2**18


class Parcel:
    """What one storage held at one version: on the device until it has left, on the host, on the device again.

    Attributes:
        storage: keeps its address from being given to another.
        witness: shares the counter of that version, and has no memory.
        nbytes: of the storage.
        source: all of it on the device, ``uint8``; None once compute may use the memory again.
        berth: where it is on the host.
        left: event of the copy to the host.
        back: what came back, while backward is about to need it.
        arrived: event of the copy from the host.
        row: of the timeline.
    """

    __slots__ = (
        "__weakref__",
        "_ring",
        "arrived",
        "back",
        "berth",
        "left",
        "nbytes",
        "row",
        "source",
        "storage",
        "witness",
    )

    def __init__(self, saved: Tensor, source: Tensor, berth: Berth, ring: HostRing, row: int) -> None:
        self.storage = StorageWeakRef(source.untyped_storage())
        self.witness = saved.detach()
        self.witness.data = saved.new_empty(0)
        self.nbytes = source.nbytes
        self.source: Tensor | None = source
        self.berth = berth
        self.left: Any = None
        self.back: Tensor | None = None
        self.arrived: Any = None
        self.row = row
        self._ring = ring

    @property
    def on_host(self) -> Tensor:
        """All of it, on the host."""
        return self.berth.memory.bytes[: self.nbytes]

    def __del__(self) -> None:  # the graph has let go of it
        self._ring.give_back(self.berth)


class Stored(NamedTuple):
    """A saved tensor that has left: where it lies in its parcel, and its version then."""

    parcel: Parcel
    version: int
    offset: int
    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]


@dataclass(eq=False)
class Bundle:
    """One call of a unit, and what was saved in it.

    Attributes:
        row: of the timeline: the index of the unit's layer.
        before: the call before it in the same forward, whose backward comes after.
        mode: what becomes of it; what is recomputed is not saved but for its inputs, which stay.
        parcels: in the order in which they left.
        saved: bytes of the storages that were saved here first, whether they left or not.
        inputs: bytes of the storages that it was called with, if it was the first.
    """

    unit: str
    row: int
    before: Bundle | None
    mode: Mode
    parcels: list[weakref.ref[Parcel]] = field(default_factory=list)
    saved: int = 0
    inputs: int = 0

    def alive(self) -> list[Parcel]:
        """Those that the graph still needs, in the order in which backward does."""
        return [parcel for each in reversed(self.parcels) if (parcel := each()) is not None]


class Offload:
    """Stores saved tensors and brings them back.

    Args:
        device: the seam.
        ring: host memory.
        stays: addresses of storages that are on the device in any case, now and later.
        log: where warnings go; None for Lightning's log.
    """

    def __init__(self, device: Device, ring: HostRing, stays: Set[int], log: logging.Logger | None = None) -> None:
        self._log = log or logging.getLogger("lightning.pytorch.superpipeline")
        self._device = device
        self._ring = ring
        self._stays = stays
        self._lock = threading.RLock()
        self._calls = threading.local()  # of each thread: the bundle of the call under way
        self._known: weakref.WeakValueDictionary[tuple[int, int], Parcel] = weakref.WeakValueDictionary()
        self._flying: deque[list[Parcel]] = deque()  # by calls
        self._leaving: dict[int, Parcel] = {}  # the latest of each storage
        self._home: list[Parcel] = []  # on the device again
        self._seen: dict[int, StorageWeakRef] = {}  # storages that are counted
        self._given: dict[int, StorageWeakRef] = {}  # and those among arguments
        self.active = False
        """Whether any call was ever entered: before that nothing leaves."""
        self.stored_bytes = 0
        self.returned_bytes = 0
        self._warned = False

    # ------------------------------------------------------------------ forward

    @property
    def bundle(self) -> Bundle | None:
        """Of the call under way in this thread."""
        return getattr(self._calls, "bundle", None)

    def enter(self, bundle: Bundle, given: Iterable[Any]) -> Bundle | None:
        """A unit's forward begins. Returns the bundle of the call that it is made in, for :meth:`leave`."""
        outer = self.bundle
        self._calls.bundle = bundle
        self.active = True
        with self._lock:
            bundle.inputs = sum(count_once(each, self._given) for each in given if isinstance(each, Tensor))
            self._flying.append([])
        return outer

    def leave(self, outer: Bundle | None) -> None:
        """It has returned, or raised: what the one before it saved has left by the time compute goes on."""
        self._calls.bundle = outer
        self.retire(keep=1)

    def store(self, tensor: Tensor) -> Stored | None:
        """Have a saved tensor leave (1). None if it is to stay."""
        bundle = self.bundle
        if bundle is None or type(tensor) is not Tensor or tensor.layout is not torch.strided or tensor.is_nested:
            return None
        storage = tensor.untyped_storage()
        nbytes = storage.nbytes()
        if nbytes < WORTH_MOVING or tensor.device != self._device.device or storage.data_ptr() in self._stays:
            return None
        if tensor.is_conj() or tensor.is_neg():
            return None
        with self._lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            bundle.saved += count_once(tensor, self._seen)
            parcel = self._known.get((storage_id(storage), tensor._version))
            if parcel is None or not _counted_together(tensor, parcel.witness):
                if bundle.mode != "offload":
                    return None
                parcel = self._send(tensor, bundle)
                if parcel is None:
                    return None
                self._known[storage_id(storage), tensor._version] = parcel
            if bundle.mode == "offload":
                bundle.parcels.append(weakref.ref(parcel))
            offset = int(tensor.storage_offset()) * tensor.element_size()
            return Stored(parcel, tensor._version, offset, tensor.dtype, tensor.shape, tensor.stride())

    def _send(self, saved: Tensor, bundle: Bundle) -> Parcel | None:
        source = strided(saved, 0, torch.uint8, (saved.untyped_storage().nbytes(),), (1,))
        berth = self._ring.take(source.nbytes)
        if berth is None:
            self.warn(bundle.unit, "stay on the device")
            return None
        parcel, device = Parcel(saved, source, berth, self._ring, bundle.row), self._device
        before = self._leaving.get(parcel.storage.cdata)
        if before is not None:  # what it held before it was written; nobody may read that any more
            device.wait(Stream.COMPUTE, before.left, Wait.REUSE_AFTER_STORE)
        self._leaving[parcel.storage.cdata] = parcel
        device.access(source, Stream.COMPUTE, write=True)
        # Compute has waited for what was read from the berth before, so this is after that, too.
        device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.STORE_AFTER_SAVE)
        begun = device.mark(Stream.DOWNLOAD)
        device.copy([parcel.on_host], [source], Stream.DOWNLOAD, why=Wait.REUSE_AFTER_STORE)
        device.note("store", bundle.row, begun, Stream.DOWNLOAD, source.nbytes)
        parcel.left = berth.last = device.record(Stream.DOWNLOAD)
        if not self._flying:  # a backward inside the call has come to its end meanwhile
            self._flying.append([])
        self._flying[-1].append(parcel)
        self.stored_bytes += source.nbytes
        return parcel

    def warn(self, unit: str, instead: str) -> None:
        """Say once that the host has no room for a unit's activations, and what is done instead."""
        if not self._warned:
            self._warned = True
            self._log.warning(
                "Superpipeline: the host has no room for the activations of %r: %s of %s are taken. They %s. Use a smaller "
                'batch, or activations={"%s": "recompute"}.',
                unit, human_bytes(self._ring.nbytes), human_bytes(self._ring.limit or 0), instead, unit,
            )  # fmt: skip

    def retire(self, *, keep: int) -> None:
        """Free the device memory of what all but the ``keep`` latest calls have stored; compute waits for the copies."""
        with self._lock:
            while len(self._flying) > keep:
                for parcel in self._flying.popleft():
                    self._device.wait(Stream.COMPUTE, parcel.left, Wait.REUSE_AFTER_STORE)
                    if parcel.source is not None and self._leaving.get(parcel.storage.cdata) is parcel:
                        self._device.access(parcel.source, Stream.COMPUTE, write=True)  # whatever comes there next
                        del self._leaving[parcel.storage.cdata]
                    parcel.source = None

    # ------------------------------------------------------------------ backward

    def comes_to(self, bundle: Bundle) -> None:
        """Backward has come to a call: what it saved is there, what the call before it saved is coming (2)."""
        with self._lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            self.retire(keep=0)
            mine = bundle.alive()
            ahead = bundle.before.alive() if bundle.before is not None else []
            wanted = {*mine, *ahead}
            self._drop([parcel for parcel in self._home if parcel not in wanted])
            self._bring(mine)
            with suppress(torch.OutOfMemoryError):  # they come on demand, when there is room again
                self._bring(ahead)

    def load(self, stored: Stored) -> Tensor:
        """A saved tensor for backward; its layer's turn may not have been announced."""
        with self._lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            parcel = stored.parcel
            memory = parcel.source
            if memory is None:
                self._bring([parcel])
                memory = parcel.back
                assert memory is not None
                self._device.wait(Stream.COMPUTE, parcel.arrived, Wait.USE_AFTER_RETURN)
                self._device.access(memory, Stream.COMPUTE, write=False)
            return strided(memory, stored.offset, stored.dtype, stored.shape, stored.stride)

    def settle(self) -> None:
        """A step or a backward is over: nothing is on its way, nothing is kept on the device."""
        with self._lock:
            self.retire(keep=0)
            self._drop(self._home)
            self._seen.clear()
            self._given.clear()

    def close(self) -> None:
        """Free the ring."""
        self.settle()
        self._ring.close()

    def _bring(self, parcels: Sequence[Parcel]) -> None:
        device = self._device
        missing = [parcel for parcel in dict.fromkeys(parcels) if parcel.source is None and parcel.back is None]
        if not missing:
            return
        memories = [device.empty(parcel.nbytes) for parcel in missing]  # all of it, or an error and none
        for parcel, memory in zip(missing, memories, strict=True):
            parcel.back = memory
            device.access(memory, Stream.COMPUTE, write=True)  # compute may have used that memory last
        # Compute has waited for the copies to the host, so this is after those, too.
        device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.RETURN_AFTER_USE)
        for parcel in missing:
            assert parcel.back is not None
            begun = device.mark(Stream.UPLOAD)
            device.copy([parcel.back], [parcel.on_host], Stream.UPLOAD, why=Wait.USE_AFTER_RETURN)
            device.note("return", parcel.row, begun, Stream.UPLOAD, parcel.nbytes)
            parcel.arrived = parcel.berth.last = device.record(Stream.UPLOAD)
            self.returned_bytes += parcel.nbytes
        self._home += missing

    def _drop(self, parcels: Sequence[Parcel]) -> None:
        for parcel in list(parcels):
            assert parcel.back is not None
            self._device.wait(Stream.COMPUTE, parcel.arrived, Wait.REUSE_AFTER_RETURN)
            self._device.access(parcel.back, Stream.COMPUTE, write=True)
            parcel.back = None
            self._home.remove(parcel)


def _counted_together(tensor: Tensor, other: Tensor) -> bool:
    """Whether a write of one is one of the other: two views of a storage may count by themselves (``unsafe_chunk``)."""
    with preserve_version_counter(tensor):
        before = other._version
        increment_version(tensor)
        return other._version != before


def count_once(tensor: Tensor, seen: dict[int, StorageWeakRef], *, small: bool = False) -> int:
    """Bytes of a tensor's storage, if it was not seen before, and is large or may be ``small``."""
    try:
        storage = tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # none of its own: sparse, or wrapped by a transform
        return 0
    if storage_id(storage) in seen or (is_small(storage.nbytes()) and not small):
        return 0
    seen[storage_id(storage)] = StorageWeakRef(storage)
    return storage.nbytes()


def is_small(nbytes: int) -> bool:
    """Whether a storage stays where it is."""
    return nbytes < WORTH_MOVING
