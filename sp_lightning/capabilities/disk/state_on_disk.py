"""Optimizer state on a disk. A layer's state is in memory while the layer is updated. The next layers' state is prefetched."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.capabilities.disk.away import OnDiskTensor, can_go_away, return_to, send_away
from sp_lightning.capabilities.disk.direct_file import ScratchFile, aligned_memory
from sp_lightning.capabilities.disk.state_placement import AccessPredictor, StatePlacement
from sp_lightning.capabilities.disk.state_transfers import StateTransfers, Stored
from sp_lightning.core.device.layout import Span, bytes_of, part, whole_pages
from sp_lightning.core.device.lease import shared
from sp_lightning.core.engine.state_store import Key
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import tree_leaves

LEAST = 2**16
"""The least bytes of a tensor on the disk. Smaller tensors stay in memory: step counters, and the state of biases and norms."""


class StateOnDisk:
    """The optimizer state of a run. The state of some layers is on a disk between two updates.

    A layer's state in one optimizer is one extent of the file, which is read into a buffer. During the update the optimizer's
    tensors are views of the buffer. After the update the buffer is written. State is prefetched in the order of the last step,
    into all free buffers, also during forward. If all buffers are in use, a read waits for the write of a buffer.

    Args:
        file: the scratch file.
        placement: which layers' state stays in memory, and the memory of the buffers.
        still: a context in which no update is under way. User code reads state in it, in any thread.
    """

    def __init__(
        self, file: ScratchFile, placement: StatePlacement, still: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._transfers = StateTransfers(file, placement.staging, self._coming)
        self._stay = frozenset(placement.in_memory)
        self._still = still
        # Several threads of user code may read state, while threads of the disk prefetch.
        self._lock = self._transfers.lock
        self._stored: dict[Key, Stored] = {}
        self._updates = AccessPredictor[Key](1)
        self._roomy: set[Key] = set()  # the keys for whose new state `load` has freed the buffers
        self._seen: list[tuple[Tensor, Stored, Span]] = []  # tensors that user code has read, and their places
        self._looking: set[int] = set()  # the ids of the threads in which user code has read state

    # ------------------------------------------------------------------ around an update

    def load(self, key: Key, part_of: Any) -> None:
        """Reads the state of a layer to memory before its update, and prefetches the state of the next layers.

        Before a layer's first update, frees the buffers, because the optimizer makes the new state in memory of its own.

        Args:
            key: the layer and the user's optimizer.
            part_of: the layer's part of that optimizer, with the optimizer's state.

        Raises:
            OSError: the disk failed.
        """
        tensors = _tensors(part_of)
        away = [tensor for tensor in tensors if type(tensor) is OnDiskTensor]
        # These tensors become ordinary ones: an earlier run has stored them, or user code has moved them to a layer whose state
        # stays in memory.
        for tensor in [tensor for tensor in away if tensor.owner is not self or key[0].name in self._stay]:
            tensor.load()
        away = [tensor for tensor in away if type(tensor) is OnDiskTensor]
        with self._lock:
            none_yet = not tensors and key[0].name not in self._stay and key not in self._roomy
            # The step makes state only for parameters with a gradient.
            if none_yet and any(p.grad is not None for group in part_of.param_groups for p in group["params"]):
                self._transfers.make_room()
                self._roomy.add(key)
            for stored in _places(away):
                self._transfers.load(stored)
            for tensor in away:
                stored = tensor.stored
                assert stored.buffer is not None
                tensor.data = part(stored.buffer, tensor.span)  # the class stays: updates do not dispatch on it
            self._updates.note(key)
            self._transfers.read_ahead()

    def _coming(self) -> Iterator[Stored]:
        """Yields the state that the next updates will load if they have the order of the last step."""
        return (self._stored[key] for key in self._updates.coming() if key in self._stored)

    def store(self, key: Key, part_of: Any) -> None:
        """Begins to write the state of a layer after its update, if the layer's state is on the disk.

        Small tensors, and tensors of which user code holds a view, stay in memory.

        Args:
            key, part_of: see :meth:`load`.
        """
        leaving = [tensor for tensor in _tensors(part_of) if can_go_away(tensor, LEAST)]
        if not leaving or key[0].name in self._stay:
            return
        with self._lock:
            old = _places(tensor for tensor in leaving if type(tensor) is OnDiskTensor)
            stored = self._stored_for(key, leaving)
            if stored.buffer is None:
                stored.buffer = self._transfers.take(stored.extent.nbytes)
            stored.tensors = [weakref.ref(tensor) for tensor in leaving]
            for tensor, span in zip(leaving, stored.spans, strict=True):
                memory = part(stored.buffer, span)
                if memory.data_ptr() != tensor.data_ptr():
                    memory.copy_(tensor)
                if type(tensor) is OnDiskTensor or not shared(tensor):
                    send_away(tensor, self, span, stored)
            for each in old:  # the places that the tensors had before, if user code has exchanged tensors
                if each is not stored:
                    self._transfers.release(each)
            # Forget tensors that user code has read, if they are stored again or were replaced: their places have other bytes.
            again = set(map(id, leaving))
            self._seen = [seen for seen in self._seen if seen[1] is not stored and id(seen[0]) not in again]
            self._transfers.write(stored)

    def absorb(self, optimizers: Iterable[Optimizer], layer_of: Callable[[nn.Parameter], StreamedLayer | None]) -> None:
        """Writes state that no update has made: the state of a checkpoint, or of an optimizer's own set-up.

        Args:
            optimizers: all optimizers of the run. No update is under way.
            layer_of: the layer that a parameter is updated with.
        """
        with torch.DisableTorchFunctionSubclass(), torch.no_grad(), no_inference_mode(), self._lock:
            self._stored.clear()
            self._roomy.clear()
            by_key = defaultdict[Key, list[nn.Parameter]](list)
            for optimizer in optimizers:
                for parameter in [p for group in optimizer.param_groups for p in group["params"]]:
                    if (layer := layer_of(parameter)) is not None:
                        by_key[layer, optimizer].append(parameter)
            self._updates = AccessPredictor(1)
            for key, parameters in by_key.items():
                part_of = SimpleNamespace(state=state_of(key[1]), param_groups=[{"params": parameters}])
                self.load(key, part_of)
                self.store(key, part_of)
            self._updates = AccessPredictor(1)  # updates have another order

    def _stored_for(self, key: Key, tensors: Sequence[Tensor]) -> Stored:
        """Returns the record of a layer's state, without a transfer in flight. Allocates a new part of the file if necessary."""
        spans, end = list[Span](), 0
        for tensor in tensors:
            stride = tensor.span.stride if type(tensor) is OnDiskTensor else tensor.stride()
            spans.append(Span("", end, tensor.nbytes, tensor.shape, tuple(stride), tensor.dtype))
            end += whole_pages(tensor.nbytes)
        found = self._stored.get(key)
        # User code may have exchanged tensors, or reordered parameters in groups. Then a write to the present part of the file
        # would overwrite the bytes of other tensors.
        same = found is not None and found.spans == tuple(spans) and _are(found.tensors, tensors)
        if found is None or not same:
            found = self._stored[key] = Stored(self._transfers.file.allocate(end), tuple(spans))
        # User code has read all tensors of the record. So `load` found none on the disk, and left a transfer in flight.
        elif found in self._transfers.behind:
            self._transfers.written(found)
        elif found in self._transfers.ahead:
            self._transfers.release(found)
        return found

    # ------------------------------------------------------------------ what users see

    def bring_for_user(self, tensors: Sequence[OnDiskTensor], beside: Collection[Any]) -> None:
        """Reads tensors for user code. They stay in memory until their next update, or until other tensors need the memory.

        Args:
            tensors: the tensors to read.
            beside: all arguments of user code's call, which must stay in memory.

        Raises:
            OSError: the disk failed.
        """
        with self._still(), self._lock, no_dispatch_modes(), torch.no_grad():
            # Another thread may have read some of them meanwhile.
            tensors = [tensor for tensor in tensors if type(tensor) is OnDiskTensor]
            self._looking.add(threading.get_ident())
            if self._alone():
                self._make_room(sum(tensor.span.nbytes for tensor in tensors), set(map(id, beside)))
            for tensor in dict.fromkeys(tensors):
                stored, span = tensor.stored, tensor.span
                self.give(tensor)
                self._seen.append((tensor, stored, span))

    def _alone(self) -> bool:
        """Returns True if no other thread can be computing with tensors that user code has read. Then their memory may be freed.

        No code runs when a thread computes with a tensor that is in memory already. So any other thread may be doing that, except
        threads of this package, and daemon threads that have never read state.
        """
        others = [each for each in threading.enumerate() if each is not threading.current_thread()]
        ours = "superpipeline"  # the names of this package's threads begin so
        return all((each.daemon and each.ident not in self._looking) or each.name.startswith(ours) for each in others)

    def give(self, tensor: OnDiskTensor) -> None:
        """Reads a tensor into new memory that it owns. From then on it is an ordinary tensor."""
        span = replace(tensor.span, offset=0)
        with no_inference_mode():
            memory = torch.empty_strided(span.shape, span.stride, dtype=span.dtype, device="cpu")
        memory.copy_(part(self._read(tensor), span))
        return_to(tensor, memory)

    def _make_room(self, nbytes: int, beside: Collection[int]) -> None:
        """Writes tensors that user code has read back to the disk, the oldest first, until few enough are in memory.

        Together with the tensors that are read next, they may take as much memory as the buffers. A tensor stays if user code
        holds a view of it, or has changed its size.

        Args:
            nbytes: the bytes of the tensors that are read next.
            beside: the ``id`` of each tensor that stays, because the same call uses it.

        Raises:
            OSError: the disk failed.
        """
        nbytes += sum(span.nbytes for _, _, span in self._seen)
        for seen in [each for each in self._seen if id(each[0]) not in beside]:
            if nbytes <= self._transfers.limit:
                return
            tensor, stored, span = seen
            nbytes -= span.nbytes
            if can_go_away(tensor, 0) and tensor.nbytes == span.nbytes and not shared(tensor):
                memory = aligned_memory(span.nbytes)
                part(memory, replace(span, offset=0)).copy_(tensor)
                if stored in self._transfers.behind:
                    self._transfers.written(stored)
                self._transfers.release(stored)  # user code may have written the tensor, so a buffer is out of date
                self._transfers.file.begin_write(stored.extent.offset + span.offset, memory).wait()
                send_away(tensor, self, span, stored)
                self._seen = [each for each in self._seen if each is not seen]  # "==" would read tensors from the disk

    def read(self, tensor: OnDiskTensor) -> Tensor:
        """Returns the bytes of a tensor, from the disk or from a buffer. The tensor stays on the disk."""
        with self._still():
            return self._read(tensor)

    def _read(self, tensor: OnDiskTensor) -> Tensor:
        """Does the same as :meth:`read`, without waiting for updates."""
        stored, span = tensor.stored, tensor.span
        with self._lock:
            memory = aligned_memory(span.nbytes)
            if stored in self._transfers.ahead:
                try:
                    stored.transfer.wait()
                except OSError:  # the prefetch has failed: below, and in the update, the state is read again
                    self._transfers.release(stored)
            if stored.buffer is None:
                self._transfers.file.begin_read(stored.extent.offset + span.offset, memory).wait()
                return memory
            memory[: span.nbytes].copy_(bytes_of(stored.buffer, span))
            return memory


def _tensors(optimizer: Any) -> list[Tensor]:
    """Returns all tensors of the state of an optimizer's parameters, each once."""
    state = state_of(optimizer)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    leaves = (leaf for p in parameters if p in state for leaf in tree_leaves(state[p]) if isinstance(leaf, Tensor))
    return list({id(leaf): leaf for leaf in leaves}.values())


def _are(references: Sequence[weakref.ref[Tensor]], tensors: Sequence[Tensor]) -> bool:
    return all(reference() is tensor for reference, tensor in zip(references, tensors, strict=True))


def _places(tensors: Iterable[Any]) -> list[Stored]:
    return list(dict.fromkeys(tensor.stored for tensor in tensors))
