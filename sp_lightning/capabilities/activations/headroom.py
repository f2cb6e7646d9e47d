"""Keeps activations on the device while memory is free, and offloads the oldest ones before memory runs out.

This is for batches whose memory use was not measured. If a batch fits, nothing is copied and nothing runs twice. If a batch does
not fit, the oldest activations are offloaded first, because backward needs them last.

torch's allocator gives no notice before memory runs out. So free memory is compared with the expected allocations:

- Before a layer's forward. Expected are the gradients of weights, the most bytes that one layer has saved so far, and temporary
  results. Temporary results are estimated from the largest result that the layer's weights can compute from its input: for
  example, a head computes logits, and the loss has several tensors of that size (``_COPIES``).
- When autograd saves a tensor, and when it needs one again. Expected are the gradients of weights, and an average layer's
  temporary results. A tensor on the device is only counted, until the tensors add up to a part of the free memory (``_LOOK``).

If memory ends nevertheless, between two comparisons, the error is torch's.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from sp_lightning.capabilities.activations.offload import Offload, SavedReference, UnitCall
from sp_lightning.core.torch_compat.private import tree_leaves

_COPIES = 4
"""The float32 tensors of a layer's widest result that may be alive at once. A loss has four: logits, their log-softmax, and both
gradients. A layer's backward has fewer, of several widths."""

_LOOK = 4
"""Free memory is counted again after activations have taken a quarter of what is free beyond the expected allocations. The other
quarters are for tensors that are not activations."""


class Kept:
    """The object that a graph holds in place of a saved tensor that may be offloaded later.

    Attributes:
        tensor: the tensor, as a graph would hold it without this object; None after the tensor was offloaded.
        version: the version of the tensor when it was saved.
        call: the layer call in which the tensor was saved.
        reference: the place of the tensor after it was offloaded; None before.
        held: the object that counts the tensor as long as it is on the device.
    """

    __slots__ = ("__weakref__", "_headroom", "call", "held", "reference", "tensor", "version")

    def __init__(self, tensor: Tensor, call: UnitCall, headroom: Headroom, held: Any) -> None:
        self.tensor: Tensor | None = tensor if tensor.is_leaf else tensor.detach()
        self.held = held
        self.version = tensor._version
        self.call = call
        self.reference: SavedReference | None = None
        self._headroom = headroom

    def load(self) -> tuple[Tensor, int, int]:
        """Returns the tensor on the device, its version when it was saved, and its version now."""
        return self._headroom.load(self)


class Headroom:
    """Offloads the oldest activations when little device memory is left.

    Args:
        offload: stores tensors on the host.
        left: returns the bytes of free device memory. It may call its argument, which returns the bytes of kept activations.
        reserve: returns the bytes that gradients of weights take in backward.
        evicted: gets the name of each layer in whose calls activations were offloaded.

    Attributes:
        used: True after autograd has saved a tensor.
        evicted_bytes: bytes of activations that were offloaded.
        most_kept: the most bytes of activations that one step has saved.
    """

    def __init__(
        self, offload: Offload, left: Callable[[Callable[[], int]], int], reserve: Callable[[], int], evicted: set[str]
    ) -> None:
        self._offload = offload
        self._left = left
        self._reserve = reserve
        self._evicted = evicted
        self._kept: deque[weakref.ref[Kept]] = deque()  # the oldest first
        self._call = UnitCall("the first layer", 0)
        self._transients: list[int] = []  # bytes of temporary results of each layer call so far
        self._credit = 0  # bytes that may be saved before memory is counted again
        self._step_bytes = 0  # bytes of activations that this step has saved
        self._before_layer = 0  # `_step_bytes` before the present layer call
        self._most_of_layer = 0  # the most bytes that one layer has saved
        self.used = False
        self.evicted_bytes = 0
        self.most_kept = 0
        self._staying_bytes = (
            0  # bytes that this step has saved and that stay: small activations, and copies of weights
        )

    # ------------------------------------------------------------------ forward

    def begin(self) -> None:
        """Called when a training step begins. Activations of earlier steps are not offloaded any more."""
        self._kept.clear()
        self._credit = self._step_bytes = self._before_layer = self._staying_bytes = 0

    def before(self, name: str, row: int, shapes: Iterable[Sequence[int]], inputs: Any) -> None:
        """Makes room for a layer's forward. Tensors that are saved from now on count for this layer call.

        Args:
            name: the layer's name.
            row: the layer's row in the timeline.
            shapes: the shapes of the layer's weights.
            inputs: the arguments of the module's call.
        """
        self._call = UnitCall(name, row)
        transient = _COPIES * torch.float32.itemsize * _widest(shapes, inputs)
        if transient:
            self._transients.append(transient)
        self._most_of_layer = max(self._most_of_layer, self._step_bytes - self._before_layer)
        self._before_layer = self._step_bytes
        self._make_room(self._reserve() + self._most_of_layer + max(transient, self._usual))

    def keep(self, tensor: Tensor) -> Kept | None:
        """Returns the object for the graph to hold in place of a saved tensor; None if the tensor is never offloaded.

        Counts the tensor, and may offload older ones to make room.
        """
        self.used = True
        if not self._offload.can_be_offloaded(tensor, every=True):
            return None
        nbytes = self._offload.count(tensor, small=True)
        self._step_bytes += nbytes
        self.most_kept = max(self.most_kept, self._step_bytes)
        if not self._offload.can_be_offloaded(tensor):
            self._staying_bytes += nbytes
            self._spend(nbytes, self._reserve() + self._usual)
            return None
        kept = Kept(tensor, self._call, self, self._offload.count_saved(tensor))
        self._kept.append(weakref.ref(kept))
        self._spend(tensor.untyped_storage().nbytes(), self._reserve() + self._usual)
        return kept

    # ------------------------------------------------------------------ backward

    def load(self, kept: Kept) -> tuple[Tensor, int, int]:
        """Returns a saved tensor on the device, its version when it was saved, and its version now.

        If the tensor was offloaded, uploads it. May offload other activations first to make room.
        """
        with self._offload.lock:
            tensor, reference = kept.tensor, kept.reference
            if tensor is not None:
                self._spend(tensor.untyped_storage().nbytes(), self._reserve() + self._usual)
                return tensor, kept.version, tensor._version
            assert reference is not None
            storage = reference.storage
            if not storage.on_device:
                self._make_room(storage.nbytes + self._reserve() + self._usual)
            return self._offload.load_once(reference), kept.version, storage.version

    # ------------------------------------------------------------------ memory

    @property
    def _usual(self) -> int:
        """The average bytes of a layer's temporary results."""
        return sum(self._transients) // max(len(self._transients), 1)

    def _spend(self, nbytes: int, needed: int) -> None:
        """Counts the bytes of a tensor on the device. Makes room for ``needed`` bytes if the credit is used up."""
        self._credit -= nbytes
        if self._credit < 0:
            self._make_room(needed)

    def _make_room(self, needed: int) -> None:
        """Offloads the oldest activations until ``needed`` bytes are free, all are offloaded, or the host is full.

        Sets the credit: the bytes after which free memory is counted again.
        """
        with self._offload.lock:
            left = self._left(self._count_kept)
            while left < needed and self._kept:
                if not self._evict(needed - left):
                    break
                left = self._left(self._count_kept)
            self._credit = max(0, left - needed) // _LOOK

    def _evict(self, nbytes: int) -> bool:
        """Offloads the oldest activations, at least ``nbytes`` if there are as many. Returns False if the host is full."""
        moved, room = 0, True
        while self._kept and moved < nbytes and room:
            kept = self._kept.popleft()()
            if kept is None or kept.tensor is None or not self._offload.can_be_offloaded(kept.tensor):
                continue  # freed, or a leaf whose ``.data`` user code has replaced
            before = self._offload.stats.offloaded_activation_bytes
            kept.reference = self._offload.evict(kept.tensor, kept.call)
            if kept.reference is None:
                room = False
            else:
                kept.tensor = kept.held = None
                self._evicted.add(kept.call.unit)
                moved += self._offload.stats.offloaded_activation_bytes - before
        self._offload.retire(keep=0)  # frees the device memory now
        self.evicted_bytes += moved
        return room

    def _count_kept(self) -> int:
        """Returns the bytes of the storages that are kept now. Those that are never offloaded count until the step ends."""
        storages = {}
        for each in self._kept:
            if (kept := each()) is not None and kept.tensor is not None:
                storage = kept.tensor.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        return sum(storages.values()) + self._staying_bytes


def _widest(shapes: Iterable[Sequence[int]], inputs: Any) -> int:
    """Returns the number of elements of the largest result that a layer's weights can compute from its first input.

    The first input is the first floating-point tensor with dimensions among ``inputs``. 0 if there is none, or if it is empty.
    """
    given = (
        each for each in tree_leaves(inputs) if isinstance(each, Tensor) and each.is_floating_point() and each.ndim
    )
    x = next(given, None)
    if x is None or not x.numel():
        return 0
    channels = {x.shape[-1], *x.shape[1:2]}  # the last dimension of sequences, the second one of images
    wide = [
        max(shape) * (x.numel() // size) for shape in shapes if len(shape) > 1 for size in channels.intersection(shape)
    ]
    return max(wide, default=x.numel())
