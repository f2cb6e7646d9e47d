"""Packs what autograd saves for backward: a weight that lies in a slot is packed as its place, not as its memory.

A graph therefore holds no slot. Unpacking brings the layer back, wherever it was meanwhile. Autograd does not check versions
of saved tensors if saved-tensor hooks are active, so this is done here, for weights and for everything else.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.device.lease import SavedView, SavedViews
from sp_lightning.engine.activations import Saved
from sp_lightning.engine.backward import Backward
from sp_lightning.engine.step import Part
from sp_lightning.layers.casts import SavedValues
from sp_lightning.layers.device_parameter import DeviceParameter
from sp_lightning.layers.layer import Kind, Rows, StreamedLayer
from sp_lightning.torch_compat.modes import held, never_compiled
from sp_lightning.torch_compat.private import base_of, current_graph_task, top_saved_tensors_hooks


class _Packed(tuple[StreamedLayer, int | None, int, SavedView | None, SavedValues | None, Rows]):
    """The place of a saved tensor that lay in a slot, in place of its values.

    - layer.
    - which: the index of the weight that the tensor is, or is a view of; None for a cast, and for a view of ``.data``.
    - version: the version of that weight when the tensor was saved; -1 for a cast.
    - place: where it lies in the slot; None for a weight itself.
    - values: the values of a view of a weight, or of a cast. None for a weight itself, which plain autograd follows if it
      is given other memory (``param.data = other``), whereas a view keeps the old memory.
    - rows: the rows of the layer that it needs; None for all rows.
    """

    __slots__ = ()


_Kept = tuple[Tensor, int]
"""Any other saved tensor, and its version.

A leaf is kept itself, as autograd keeps it, and so follows an assignment to its ``.data``. Other tensors are detached, because
a node that kept its own output, and with it itself, would never be freed. This and what stands for weights are plain tuples,
because there are many of them, and a class with a constructor of Python's own costs the host a call for each."""


class _Outer(NamedTuple):
    """A saved tensor that was packed by the hooks that had been active before ours."""

    packed: Any
    unpack: Callable[[Any], Tensor]


_our_packs: WeakSet[Callable[..., Any]] = WeakSet()


def packs() -> bool:
    """Whether our hooks pack what autograd saves now, with no hooks of a user or of a checkpoint above them."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in _our_packs


class RunningCalls:
    """Counts the calls of modules that are running, and has hooks pack what autograd saves in them.

    Attributes:
        depth: how many calls are running, but for those of helpers, which run within a step or a call.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._here = _CallsOfThread()

    def begin(self, make_hooks: Callable[[], AbstractContextManager[None]] | None, *, helps: bool = False) -> None:
        """Packs what autograd saves in the outermost call of a thread that builds a graph, and in those inside it.

        This includes calls outside a step, in other threads, and forwards that run again in backward: all build graphs.
        """
        here = self._here
        self.depth += not helps
        here.depth += 1
        if make_hooks is None or here.hooks is not None:
            return
        if torch.is_grad_enabled() and top_saved_tensors_hooks() is None:
            hooks = make_hooks()
            hooks.__enter__()
            here.hooks, here.pushed = hooks, here.depth

    def end(self, number: int = 1, *, helps: bool = False) -> None:
        """So many calls of this thread have ended."""
        here = self._here
        self.depth = max(self.depth - number * (not helps), 0)
        here.depth = max(here.depth - number, 0)
        if here.hooks is not None and here.depth < here.pushed:
            hooks, here.hooks = here.hooks, None
            if packs():  # otherwise a nested backward that failed has removed them already
                hooks.__exit__(None, None, None)

    def reset(self) -> bool:
        """All calls of this thread have ended. Returns whether there were any whose end was not noted."""
        ended = self._here.depth
        self.end(ended)
        return ended > 0

    def refuse_interrupted(self) -> None:
        """Refuses to go on to the next batch if Ctrl-C came just when a call between steps began or ended, and was caught.

        Raises:
            RuntimeError: it did. Until now its weights were on the device, where writes of the host's are not seen.
        """
        if self.reset():
            raise RuntimeError(
                "Ctrl-C came while a call of a module between two steps began or ended, and was caught: what was written to "
                "weights since may be lost. Let the KeyboardInterrupt end the run, and go on from a checkpoint."
            )


class _CallsOfThread(threading.local):
    """The calls of a thread: how many, and the hooks that one of them has pushed when there were so many."""

    depth = 0
    hooks: AbstractContextManager[None] | None = None
    pushed = 0


class SavedTensors(Part):
    """Makes the pair of hooks for what autograd saves."""

    def __init__(self, below: Part, backward: Backward) -> None:
        super().__init__(**vars(below))
        self._backward = backward
        self._views: defaultdict[int, SavedViews] = defaultdict(SavedViews)  # by the layers' layout

    def hooks(self) -> AbstractContextManager[None]:
        """A context that packs what autograd saves. Tensors that are no weights go to the hooks that were active before."""
        outer = top_saved_tensors_hooks()
        slots, store = self.residency.slots.by_address, self.activations.store

        def pack(tensor: Tensor) -> _Packed | Saved | _Kept | _Outer:
            kind = type(tensor)
            if kind is not Tensor and issubclass(kind, DeviceParameter):
                return self._pack_weight(tensor)
            try:
                address = tensor.untyped_storage().data_ptr()
            except (RuntimeError, NotImplementedError):  # sparse, fake and transformed tensors have no memory
                address = 0
            slot = slots.get(address)
            if slot is not None and slot.layer is not None and not (tensor.is_conj() or tensor.is_neg()):
                return self._pack(slot.layer, tensor)
            if outer is not None:
                return _Outer(outer[0](tensor), outer[1])
            if store is not None and address and (saved := store(tensor)) is not None:
                return saved
            return tensor if tensor.is_leaf and not _is_of_frozen_weight(tensor) else tensor.detach(), tensor._version

        _our_packs.add(pack)
        return saved_tensors_hooks(pack, self._unpack)

    @never_compiled  # dynamo would read versions only once, when it traces the graph (torch 2.10)
    def _pack(self, layer: StreamedLayer, tensor: Tensor) -> _Packed:
        offset = int(tensor.storage_offset()) * tensor.element_size()
        group = layer.parameters
        index = which = group.at(offset)
        if which is None:
            version, values = -1, layer.casts.saved_values(offset)
        else:
            version, values = group.counters[which]._version, group.present_values[which]
            if tensor._version != version:  # a view of .data, for example, whose writes autograd does not check
                which = None
        rows = None if layer.whole else layer.rows.saved_rows(index, tensor, offset)
        return _Packed((layer, which, version, self._views[layer.layout].find(tensor, offset), values, rows))

    @never_compiled
    def _pack_weight(self, weight: Any) -> _Packed | _Kept:
        """Packs a device parameter itself. Its memory is not read, because that would bring a layer that is away."""
        group, index = weight._of, weight._index
        if group.layer.kind is Kind.RESIDENTS:  # residents are never away
            return weight, weight._version
        version = group.version_once_fetched(index)
        if weight.dtype is not group.spans[index].dtype:  # param.data = other, for which the slot has no place
            return weight.detach(), weight._version
        return _Packed((group.layer, index, version, None, None, group.layer.rows.saved_rows(index)))

    def _unpack(self, packed: Any) -> Tensor:
        if type(packed) is tuple:  # most saved tensors are of this kind
            tensor, expected = packed
            version = tensor._version
        elif type(packed) is _Packed:
            layer, which, expected, place, values, rows = packed
            group = layer.parameters
            guard = layer.guard
            if guard is not None and which is not None and (guard.exposed or guard.retyped):
                # A frozen weight's backward may go on with the values of before. A trained one's update would fail.
                goes_on = values is not None and values.copy is not None
                if not goes_on or layer.block.parameters[which].requires_grad:
                    group.refuse_exchanged(which)
            tensor = self._bring(layer, which, place, rows)
            # The host's weight counts as well: a hook may have written it while the layer is in use.
            version = expected if which is None else group.version_once_fetched(which)
            # The layer may have other values, even since it was brought a line above.
            if values is not None and values.copy is not None:
                assert place is not None
                with held(self.lock):
                    self.writes.compare_exchanged()
                tensor = values.recall(self.device, place)
        elif type(packed) is _Outer:
            return packed.unpack(packed.packed)
        else:  # of Saved
            tensor, expected, version = packed.load()
        if version != expected:
            raise RuntimeError(_modified(tensor, expected, version))
        return tensor

    def _bring(self, layer: StreamedLayer, which: int | None, place: SavedView | None, rows: Rows) -> Tensor:
        """Brings a layer, or rows of it. Returns the view of a place there, or, where there is none, a weight itself."""
        backward, residency = self._backward, self.residency
        with held(self.lock, leaves_inference_mode=True):
            if current_graph_task() not in backward.tasks:
                backward.join()
            if not layer.whole:
                layer.rows.need(rows)
            slot = residency.used.get(layer)
            new = slot is None
            if slot is None or not layer.rows.complete:
                slot = residency.unpack(layer)
            if place is not None:
                saved = slot.lease.saved(place)  # (6)
            else:
                assert which is not None
                if layer.state.attached:  # the weight itself, which may lie outside of the slot
                    saved = layer.parameters.value(which)
                else:
                    saved = slot.lease.views(layer.layout, layer.spans)[which].detach()
        if new:
            backward.make_room((layer,))
        return saved


def _is_of_frozen_weight(leaf: Tensor) -> bool:
    """True if a leaf is a view of a device parameter outside its slot. A graph that kept it would hold the parameter."""
    return issubclass(type(base_of(leaf)), DeviceParameter)


def _modified(tensor: Tensor, expected: int, version: int) -> str:
    """Autograd's own message about a saved tensor that was modified in place."""
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {expected} instead. "
        "Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
        "torch.autograd.set_detect_anomaly(True)."
    )
