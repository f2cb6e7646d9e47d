"""The optimizer's state on a disk. That of a layer is in memory while it is updated, and the next one's is read meanwhile."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.device.layout import Span, bytes_of, part, whole_pages
from sp_lightning.device.lease import shared
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import tree_leaves
from sp_lightning.optim.updatable import OptimizerState
from sp_lightning.store.away import Away, can_go_away, give, memory_for, return_to, send_away
from sp_lightning.store.scratch import Extent, ScratchFile, Transfer, aligned_memory
from sp_lightning.store.staging_ring import StagingRing
from sp_lightning.weights.layer import StreamedLayer

LEAST = 2**16
"""Bytes of the smallest tensor that goes to the disk. Numbers of steps and the state of biases and norms stay in memory."""


@dataclass(eq=False)
class _Stored:
    """The state of one layer on the disk.

    Attributes:
        extent: where it is.
        spans: where each tensor is in it.
        tensors: those that are there. Users may have given them to another layer's parameters.
        buffer: memory with the same bytes, as long as they are read or written.
        transfer: of those bytes.
    """

    extent: Extent
    spans: tuple[Span, ...]
    tensors: list[weakref.ref[Tensor]] = field(default_factory=list)
    buffer: Tensor | None = None
    transfer: Transfer | None = None


class _Place:
    """The :class:`~sp_lightning.store.away.Home` of one layer's tensors: what has been stored for it."""

    def __init__(self, state: StateOnDisk, stored: _Stored) -> None:
        self.stored = stored
        self.keeper = state

    def read(self, tensor: Away) -> Tensor:
        return self.keeper.read_for_user(tensor)


class StateOnDisk(OptimizerState):
    """The state of one optimizer, that of some layers on a disk.

    A layer's state has one extent of the file. It is read to a buffer of the ring, of which the optimizer's tensors are views
    during the update, and written from there. The layer that was updated next in the last step is read ahead; writes are waited
    for when their buffers are needed.

    Args:
        file: where state is written.
        ring: the memory that state passes through.
        stay: the names of the layers whose state stays in memory.
        finish: waits for updates that are under way, before user code looks at state.
    """

    def __init__(self, file: ScratchFile, ring: StagingRing, stay: Collection[str], finish: Callable[[], None]) -> None:
        self._file = file
        self._ring = ring
        self._stay = frozenset(stay)
        self._finish = finish
        self._lock = threading.RLock()  # several threads of users' may look at state
        self._stored: dict[StreamedLayer, _Stored] = {}
        self._next: dict[StreamedLayer, StreamedLayer] = {}
        self._last: StreamedLayer | None = None
        self._ahead: list[_Stored] = []  # read ahead, or being read
        self._behind: list[_Stored] = []  # being written
        self._seen: list[tuple[Tensor, _Stored, Span]] = []  # what users have looked at, and where it was
        _all.add(self)

    # ------------------------------------------------------------------ around an update

    def bring(self, layer: StreamedLayer, optimizer: Any) -> None:
        away = [tensor for tensor in _tensors(optimizer) if type(tensor) is Away]
        give([tensor for tensor in away if tensor.home.keeper is not self])  # another optimizer had them
        away = [tensor for tensor in away if type(tensor) is Away]
        with self._lock:
            if not away and layer.name not in self._stay and layer not in self._stored:
                self._make_room_for_new()
            for stored in _places(away):
                self._load(stored)
            for tensor in away:
                stored = _stored(tensor)
                assert stored.buffer is not None
                tensor.data = part(stored.buffer, tensor.span)
            if self._last is not None:
                self._next[self._last] = layer
            self._last = layer
            following = self._stored.get(self._next.get(layer, layer))
            if following is not None:
                self._read_ahead(following)

    def put(self, layer: StreamedLayer, optimizer: Any) -> None:
        if layer.name not in self._stay:
            self.store(layer, _tensors(optimizer))

    def store(self, layer: StreamedLayer, tensors: Iterable[Tensor]) -> None:
        """Writes the state of a layer, which leaves memory for it.

        Args:
            layer: whose state it is.
            tensors: all of it. Small ones, and those of which somebody holds a view, stay in memory.
        """
        leaving = [tensor for tensor in tensors if can_go_away(tensor, LEAST)]
        if not leaving:
            return
        with self._lock:
            old = _places(tensor for tensor in leaving if type(tensor) is Away)
            stored = self._stored_for(layer, leaving)
            if stored.buffer is None:
                stored.buffer = self._take(stored.extent.nbytes)
            place = _Place(self, stored)
            stored.tensors = [weakref.ref(tensor) for tensor in leaving]
            for tensor, span in zip(leaving, stored.spans, strict=True):
                memory = part(stored.buffer, span)
                if memory.data_ptr() != tensor.data_ptr():
                    memory.copy_(tensor)
                if type(tensor) is Away or not shared(tensor):
                    send_away(tensor, place, span)
            for each in old:
                if each is not stored:
                    self._release(each)
            stored.transfer = self._file.write(stored.extent.offset, stored.buffer)
            self._behind.append(stored)
            self._forget_seen(stored, leaving)

    def _forget_seen(self, stored: _Stored, tensors: Sequence[Tensor]) -> None:
        """Forgets what users have looked at and what is stored again, or was replaced: its place has other bytes now."""
        again = set(map(id, tensors))
        self._seen = [seen for seen in self._seen if seen[1] is not stored and id(seen[0]) not in again]

    def absorb(self, optimizer: Optimizer, layers: Mapping[StreamedLayer, Sequence[nn.Parameter]]) -> None:
        """Writes state that has come from elsewhere: from a checkpoint, or from the optimizer's own set-up.

        Args:
            optimizer: whose state it is. No update is under way.
            layers: the layers, with their parameters that the optimizer steps.
        """
        with torch.DisableTorchFunctionSubclass(), torch.no_grad(), no_inference_mode():
            self._stored.clear()
            self._next.clear()
            for layer, parameters in layers.items():
                part_of = SimpleNamespace(state=vars(optimizer)["state"], param_groups=[{"params": parameters}])
                self.bring(layer, part_of)
                self.put(layer, part_of)
            self._next.clear()  # updates have an order of their own
            self._last = None

    def _stored_for(self, layer: StreamedLayer, tensors: Sequence[Tensor]) -> _Stored:
        spans, end = list[Span](), 0
        for tensor in tensors:
            stride = tensor.span.stride if type(tensor) is Away else tensor.stride()
            spans.append(Span("", end, tensor.nbytes, tensor.shape, tuple(stride), tensor.dtype))
            end += whole_pages(tensor.nbytes)
        found = self._stored.get(layer)
        if found is None or found.spans != tuple(spans) or _others(found, tensors):
            found = self._stored[layer] = _Stored(self._file.allocate(end), tuple(spans))
        elif found in self._behind:  # all of it was looked at since
            self._written(found)
        elif found in self._ahead:
            self._release(found)
        return found

    # ------------------------------------------------------------------ transfers

    def _load(self, stored: _Stored) -> None:
        """Has a layer's bytes in its buffer."""
        if stored in self._behind:
            assert stored.transfer is not None
            stored.transfer.wait()  # the bytes are still there
            self._behind.remove(stored)
        elif stored.buffer is None:
            stored.buffer = self._take(stored.extent.nbytes)
            stored.transfer = self._file.read(stored.extent.offset, stored.buffer)
        try:
            if stored.transfer is not None:
                stored.transfer.wait()
        except OSError:
            self._release(stored)
            raise
        if stored in self._ahead:
            self._ahead.remove(stored)
        stored.transfer = None

    def _read_ahead(self, stored: _Stored) -> None:
        self._collect()
        if stored.buffer is None:
            stored.buffer = self._ring.take(stored.extent.nbytes)
            if stored.buffer is not None:
                stored.transfer = self._file.read(stored.extent.offset, stored.buffer)
                self._ahead.append(stored)

    def _make_room_for_new(self) -> None:
        """The optimizer is about to make a layer's state, in memory of its own: the ring leaves room for it."""
        while self._behind:
            self._written(self._behind[0])
        self._ring.free()

    def _take(self, nbytes: int) -> Tensor:
        """Takes memory of the ring, for which it waits until others have been written."""
        while True:
            self._collect()
            buffer = self._ring.take(nbytes)
            if buffer is not None:
                return buffer
            if self._behind:
                self._written(self._behind[0])
            elif self._ahead:
                self._release(self._ahead[0])
            else:  # another optimizer has the ring
                return aligned_memory(nbytes)

    def _collect(self) -> None:
        """Takes back the buffers of writes that are done."""
        for stored in [each for each in self._behind if each.transfer is not None and each.transfer.done]:
            self._written(stored)

    def _written(self, stored: _Stored) -> None:
        assert stored.transfer is not None
        stored.transfer.wait()  # if it fails, the bytes stay in the buffer
        self._behind.remove(stored)
        self._release(stored)

    def _release(self, stored: _Stored) -> None:
        """Gives a buffer back, once nobody writes to it any more."""
        if stored in self._ahead:
            self._ahead.remove(stored)
        if stored.transfer is not None:
            stored.transfer.settle()
        if stored.buffer is not None:
            self._ring.give_back(stored.buffer)
        stored.buffer = stored.transfer = None

    def settle(self) -> None:
        """Waits until no bytes are on their way, whether they arrive or not."""
        with suppress(Exception):  # whoever waits for the updates next has their error
            self._finish()
        for stored in (*self._ahead, *self._behind):
            if stored.transfer is not None:
                stored.transfer.settle()

    # ------------------------------------------------------------------ what users see

    def bring_for_user(self, tensors: Sequence[Away], beside: Collection[Any]) -> None:
        """Gives tensors that somebody looks at memory of their own, until their next update or until others need the room."""
        self._finish()
        with self._lock, no_dispatch_modes(), torch.no_grad():
            tensors = [tensor for tensor in tensors if type(tensor) is Away]  # another thread may have been first
            self._make_room(sum(tensor.span.nbytes for tensor in tensors), set(map(id, beside)))
            for tensor in dict.fromkeys(tensors):
                stored, span = _stored(tensor), tensor.span
                self.give(tensor)
                self._seen.append((tensor, stored, span))

    def give(self, tensor: Away) -> None:
        memory, span = memory_for(tensor.span), replace(tensor.span, offset=0)
        memory.copy_(part(self._read(tensor), span))
        return_to(tensor, memory)

    def _make_room(self, nbytes: int, beside: Collection[int]) -> None:
        """Writes tensors that were looked at, the first ones first, so that no more are in memory than the ring has.

        Args:
            nbytes: of those that come.
            beside: the ``id`` of what stays, because the same call looks at it.
        """
        nbytes += sum(span.nbytes for _, _, span in self._seen)
        for seen in [each for each in self._seen if id(each[0]) not in beside]:
            if nbytes <= self._ring.limit:
                return
            tensor, stored, span = seen
            nbytes -= span.nbytes
            if can_go_away(tensor, 0) and tensor.nbytes == span.nbytes and not shared(tensor):
                memory = aligned_memory(span.nbytes)
                part(memory, replace(span, offset=0)).copy_(tensor)
                if stored in self._behind:
                    self._written(stored)
                self._release(stored)
                self._file.write(stored.extent.offset + span.offset, memory).wait()
                send_away(tensor, _Place(self, stored), span)
                self._seen.remove(seen)

    def read_for_user(self, tensor: Away) -> Tensor:
        """Returns the bytes of one tensor, from the disk or from the buffer that they are in just now."""
        self._finish()
        return self._read(tensor)

    def _read(self, tensor: Away) -> Tensor:
        stored, span = _stored(tensor), tensor.span
        with self._lock:
            memory = aligned_memory(span.nbytes)
            if stored in self._ahead and stored.transfer is not None:
                try:
                    stored.transfer.wait()
                except OSError:  # it was read ahead for an update, which will read it again
                    self._release(stored)
            if stored.buffer is None:
                self._file.read(stored.extent.offset + span.offset, memory).wait()
                return memory
            memory[: span.nbytes].copy_(bytes_of(stored.buffer, span))
            return memory


def _tensors(optimizer: Any) -> list[Tensor]:
    """All tensors of the state of an optimizer's parameters, each once."""
    state = vars(optimizer)["state"]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    leaves = (leaf for p in parameters if p in state for leaf in tree_leaves(state[p]) if isinstance(leaf, Tensor))
    return list({id(leaf): leaf for leaf in leaves}.values())


def _stored(tensor: Away) -> _Stored:
    assert isinstance(tensor.home, _Place)
    return tensor.home.stored


def _others(stored: _Stored, tensors: Sequence[Tensor]) -> bool:
    """Whether others than these tensors are there, which a write would overwrite."""
    own = set(map(id, tensors))
    there = [tensor for each in stored.tensors if (tensor := each()) is not None and id(tensor) not in own]
    return any(type(tensor) is Away and _stored(tensor) is stored for tensor in there)


def _places(tensors: Iterable[Any]) -> list[_Stored]:
    return list(dict.fromkeys(map(_stored, tensors)))


_all: WeakSet[StateOnDisk] = WeakSet()


def _before_fork() -> None:
    """Waits until no bytes are on their way: a forked child has none of the threads that bring them."""
    for state in list(_all):
        state.settle()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork)
