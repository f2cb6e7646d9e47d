"""Counts activations on a CPU, for ``dial``: the storages that autograd holds for backward.

On a GPU the allocator counts (:meth:`~sp_lightning.core.device.device.Device.most_bytes`). The count has each storage once, from
the moment when autograd saves the first tensor of the storage until the graph frees the last one. It does not have:

- weights and buffers, which count as weights, and views of them;
- memory that an operator allocates and frees while it runs;
- tensors that are saved under other saved-tensor hooks: those of the user, and of a checkpoint (``use_reentrant=False``), whose
  tensors are computed again in backward;
- with plain Lightning, tensors that other threads save;
- sparse tensors. A buffer that a forward replaces may count as an activation.
"""

from __future__ import annotations

import threading
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import ref

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.torch_compat.private import is_traceable_wrapper_subclass
from sp_lightning.trainer.strategy import SuperpipelineStrategy


class _HeldStorage:
    """A storage that autograd holds. All objects that graphs hold in place of tensors of the storage refer to this object."""

    __slots__ = ("__weakref__",)


class _Reference(ref[_HeldStorage]):
    """A weak reference to a :class:`_HeldStorage`, with the address and the bytes of the storage."""

    __slots__ = ("address", "nbytes")
    address: int
    nbytes: int


class HeldActivations:
    """The bytes of the activations that autograd holds.

    Attributes:
        nbytes: the bytes that autograd holds now.
        peak: the most bytes that it has held.
    """

    def __init__(self) -> None:
        self._staying: Sequence[Container[int]] = ()
        self._held: dict[
            int, _Reference
        ] = {}  # by the address of the storage, which is unique as long as autograd holds it
        self._lock = threading.RLock()  # backward may run in other threads, and so may the release of a graph
        self.nbytes = self.peak = 0

    def begin(self, staying: Iterable[Tensor], *storages: Container[int]) -> None:
        """Called before each batch, because user code may have replaced parameters or buffers.

        Args:
            staying: the tensors that are on the device anyway.
            storages: collections of the addresses of other storages that are on the device anyway. They may change at any time.
        """
        self._staying = (frozenset(_address(part) for each in staying for _, part in parts("", each)), *storages)

    def hold(self, tensor: Tensor) -> Any:
        """Counts the storage of a saved tensor, as long as the result exists. The graph holds the result beside the tensor.

        The result is None for a tensor that is on the device anyway, and for one without memory of its own.
        """
        if type(tensor) is not Tensor and is_traceable_wrapper_subclass(tensor):
            return [self.hold(part) for _, part in parts("", tensor)]
        address = _address(tensor)
        if not address or any(address in each for each in self._staying):
            return None
        with self._lock:
            if (found := self._held.get(address)) is not None and (held := found()) is not None:
                return held
            held = _HeldStorage()
            self._held[address] = new = _Reference(held, self._free)
            new.address, new.nbytes = address, tensor.untyped_storage().nbytes()
            self.nbytes += new.nbytes
            self.peak = max(self.peak, self.nbytes)
            return held

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """A context with saved-tensor hooks that count, for plain Lightning. The engine has hooks of its own."""

        def pack(tensor: Tensor) -> tuple[Tensor, Any]:
            # A graph node that saves its own output would keep itself alive forever. A leaf is kept as the same object.
            return tensor if tensor.is_leaf else tensor.detach(), self.hold(tensor)

        with saved_tensors_hooks(pack, lambda packed: packed[0]):
            yield

    def _free(self, reference: Any) -> None:
        """Called when no graph holds a storage any more."""
        address: int = reference.address
        with self._lock:
            self.nbytes -= reference.nbytes
            if self._held.get(address) is reference:  # another storage may have got the address in the meantime
                del self._held[address]


class CountingStrategy(SuperpipelineStrategy):
    """The strategy, with a count of the activations of its training batches.

    Saved-tensor hooks around the run would see nothing, because only the innermost hooks are called. So the engine's hooks count.

    Attributes:
        held: the count.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.held = HeldActivations()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)  # may make another engine
        if self._run is not None:
            engine = self._run.engine
            staying = (*engine.found.on_gpu, *engine.module.buffers())
            self.held.begin(staying, engine.slots.by_address, engine.device_storages)
            engine.count_saved = self.held.hold


def _address(tensor: Tensor) -> int:
    """Returns the address of a tensor's storage; 0 for a sparse, fake, transformed or uninitialized tensor, which has none."""
    try:
        return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError, ValueError):
        return 0
