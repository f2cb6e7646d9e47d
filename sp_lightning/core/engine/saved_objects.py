"""Gives the backward of a custom ``torch.autograd.Function`` the objects that it saved, as plain autograd does.

If saved-tensor hooks are active, autograd makes a new tensor of the hooks' result: without the attributes of the saved one, of no
subclass, and of no parameter. The engine's hooks are active in each step, so code that reads ``ctx.saved_tensors`` would miss
``weight.main_grad``, and lose ``weight.grad = …`` or ``weight.data.add_(…)``. So two patches of torch last as long as runs:

- ``ctx.save_for_backward`` also notes which objects are saved, if the hooks are those of a run. It keeps no tensor alive.
- ``ctx.saved_tensors`` returns these objects: the device parameter of a weight, whose layer is attached then; any other tensor
  itself, if it still exists, and otherwise a new one with its class, attributes and version.

Below hooks of the user or a checkpoint, plain autograd makes new tensors as well. Nodes of torch's own operators also show what
they saved (``grad_fn._saved_self``). These are new tensors with equal values: torch has no place for a patch there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet, WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx
from torch.autograd.graph import saved_tensors_hooks

from sp_lightning.core.layers.device_parameter import DeviceParameter, set_class
from sp_lightning.core.layers.layer import Kind
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.patched import Patch, PropertyPatch, while_runs_last
from sp_lightning.core.torch_compat.private import (
    is_of_compiled_graph,
    is_traceable_wrapper_subclass,
    set_version_counter,
    top_saved_tensors_hooks,
)

like_plain: WeakSet[Callable[..., Any]] = WeakSet()
"""The pack hooks in whose place plain autograd has no hooks."""


def hooks_in_place_of_none(pack: Callable[[Tensor], Any], unpack: Callable[[Any], Tensor]) -> saved_tensors_hooks:
    """Returns a context of hooks. Where they are active, plain autograd has no hooks.

    A packed tensor also holds the attributes of the tensor that was saved, so they are freed with it.
    """

    def pack_noted(tensor: Tensor) -> Any:
        packed = pack(tensor)
        return with_attributes(tensor, packed) if known else packed

    def unpack_noted(packed: Any) -> Tensor:
        return unpack(packed.packed if type(packed) is Noted else packed)

    like_plain.add(pack_noted)
    return saved_tensors_hooks(pack_noted, unpack_noted)


def plain_has_no_hooks() -> bool:
    """Returns True if hooks of a run are active, and plain autograd would have none now."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in like_plain


class _Attributes:
    """The ``__dict__`` of a tensor that was saved (``values``). Packed tensors hold this object."""

    __slots__ = ("__weakref__", "values")

    def __init__(self, tensor: Tensor) -> None:
        self.values = vars(tensor)


class Noted(NamedTuple):
    """A packed tensor with the attributes of the tensor that was saved."""

    packed: Any
    attributes: _Attributes


class _SavedObject:
    """A tensor that a custom Function has saved. Functions that save one tensor share this object.

    Attributes:
        found: a weak reference to the tensor, or to the last tensor that took its place in backward.
        version: the version of this tensor.
        kind: the class of the tensor that was saved.
        attributes: returns the tensor's attributes; None after the last packed tensor was freed.
    """

    __slots__ = ("__weakref__", "_until_packed", "attributes", "found", "kind", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.found = ref(tensor)
        self.version, self.kind = tensor._version, type(tensor)
        self.hold_attributes(tensor)

    def hold_attributes(self, tensor: Tensor) -> None:
        """Holds the attributes of the tensor until a packed tensor holds them."""
        self._until_packed: _Attributes | None = _Attributes(tensor)
        self.attributes = ref(self._until_packed)

    def give_attributes(self) -> _Attributes | None:
        """Returns the attributes for a packed tensor, and holds them no more. None after the last packed tensor was freed."""
        attributes, self._until_packed = self.attributes(), None
        return attributes

    def of(self, unpacked: Tensor) -> Tensor:
        """Returns the saved tensor for backward. ``unpacked``: the tensor that autograd has made of the hooks' result."""
        found = self.found()
        if found is not None and found._version == self.version:  # an offloaded tensor may be written after its copy
            return found
        attributes = self.attributes()
        assert attributes is not None  # held by the packed tensor that was unpacked
        if is_traceable_wrapper_subclass(unpacked):  # its own dictionary has its inner tensors
            vars(unpacked).update({name: v for name, v in attributes.values.items() if name not in vars(unpacked)})
        else:
            set_class(unpacked, self.kind)
            unpacked.__dict__ = attributes.values
        if unpacked._version != self.version:
            set_version_counter((unpacked,), (self.version,))
        self.found = ref(unpacked)
        return unpacked


known: WeakValueDictionary[int, _SavedObject] = WeakValueDictionary()
"""The tensors that custom Functions have saved, by their ids. Nearly always empty."""


def with_attributes(tensor: Tensor, packed: Any) -> Any:
    """Returns a packed tensor; if a custom Function has saved the tensor, a :class:`Noted` one."""
    noted = known.get(id(tensor))
    attributes = None if noted is None or noted.found() is not tensor else noted.give_attributes()
    return packed if attributes is None else Noted(packed, attributes)


_OBJECTS = "_superpipeline_saved_objects"


def _note(tensor: Any) -> _SavedObject | ref[DeviceParameter] | None:
    """Returns the object that notes a saved tensor."""
    if issubclass(type(tensor), DeviceParameter):
        return ref(tensor)
    if not isinstance(tensor, Tensor) or tensor.is_inference():  # None; autograd saves no inference tensor
        return None
    noted = known.get(id(tensor))
    if noted is None or noted.found() is not tensor or noted.version != tensor._version:
        noted = known[id(tensor)] = _SavedObject(tensor)
    elif noted.attributes() is None:  # all packed tensors were freed, and another Function saves the tensor
        noted.hold_attributes(tensor)
    return noted


@never_compiled
def _save(save: Callable[..., None], ctx: Any, *tensors: Any) -> None:
    """Runs ``ctx.save_for_backward``, and notes the tensors. A compiled graph's Function reads no attributes."""
    save(ctx, *tensors)
    if plain_has_no_hooks() and not is_of_compiled_graph(ctx):
        with torch.DisableTorchFunctionSubclass():
            vars(ctx)[_OBJECTS] = list(map(_note, tensors))


@never_compiled
def _saved(get: Callable[[Any], Any], ctx: Any) -> Any:
    """Reads ``ctx.saved_tensors``. Autograd's hooks have checked the tensors' versions then."""
    tensors = get(ctx)
    noted = vars(ctx).get(_OBJECTS)
    if noted is None or ctx.saved_for_forward is not None:  # the latter are returned as they are
        return tensors
    found = list(tensors)
    weights: list[tuple[int, Any]] = []
    with torch.DisableTorchFunctionSubclass():
        for index, (saved, tensor) in enumerate(zip(noted, tensors, strict=True)):
            if type(saved) is _SavedObject:
                if tensor.grad_fn is not ctx:  # plain autograd makes a new tensor of the Function's own output, too
                    found[index] = saved.of(tensor)
            elif saved is not None:
                weights.append((index, saved()))
    away = []
    for index, weight in weights:
        layer = weight._of.layer
        if weight._of.engine.at_host():
            found[index] = weight.host
        elif layer.owner.updated_early:  # later uses of its weights are errors, but a frozen one may be read
            found[index].__dict__ = vars(weight.host)
        else:
            found[index] = weight
            if layer.kind is not Kind.RESIDENTS and not layer.state.attached:
                away.append(weight)
    if away:  # extensions in C++ and Triton run no code of the parameter's class
        with away[0]._of.engine.operation_on(away):
            pass
    return tuple(found)


while_runs_last(
    Patch(FunctionCtx, "save_for_backward", _save), PropertyPatch(BackwardCFunction, "saved_tensors", _saved)
)
