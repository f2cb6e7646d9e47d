"""Gives the backward of a custom ``torch.autograd.Function`` the weights that it saved, as plain autograd does.

If saved-tensor hooks are active, autograd makes a new tensor of the hooks' result: without the attributes of the saved one, of no
subclass, and of no parameter. The engine's hooks are active in each step, so code that reads ``ctx.saved_tensors`` would miss
``weight.main_grad``, and lose ``weight.grad = …`` or ``weight.data.add_(…)``. So two patches of torch last as long as runs:

- ``ctx.save_for_backward`` also notes which weights are saved, if the hooks are those of a run. It keeps no tensor alive.
- ``ctx.saved_tensors`` returns these: the device parameter of a weight, whose layer is attached then; another leaf itself. An
  activation is a new tensor. If the saved one had attributes or a class of its own, this is an error.

Below hooks of the user or a checkpoint, plain autograd makes new tensors as well. Nodes of torch's own operators also show what
they saved (``grad_fn._saved_self``). These are new tensors with equal values: torch has no place for a patch there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx

from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.patched import Patch, PropertyPatch, while_runs_last
from sp_lightning.core.torch_compat.private import DYNAMO_MARKS, is_of_compiled_graph, top_saved_tensors_hooks
from sp_lightning.core.weights.device_parameter import DeviceParameter
from sp_lightning.core.weights.layer import Kind

like_plain: WeakSet[Callable[..., Any]] = WeakSet()
"""The pack hooks in whose place plain autograd has no hooks."""


def plain_has_no_hooks() -> bool:
    """Returns True if hooks of a run are active, and plain autograd would have none now."""
    top = top_saved_tensors_hooks()
    return top is not None and top[0] in like_plain


class _SavedObject(NamedTuple):
    """A tensor, other than a weight of a layer, that a custom Function has saved.

    Attributes:
        found: a weak reference to the tensor.
        version: its version when it was saved.
        kind: its class.
        attributes: its ``__dict__``, which also has attributes that it gets later.
    """

    found: ref[Tensor]
    version: int
    kind: type
    attributes: dict[str, Any]

    def of(self, unpacked: Tensor, function: str) -> Tensor:
        """Returns the saved tensor for backward. ``unpacked``: the tensor that autograd has made of the hooks' result.

        Raises:
            RuntimeError: backward of ``function`` would not find the class or the attributes of the saved tensor.
        """
        found = self.found()
        # An offloaded leaf may be written after its copy.
        if found is not None and found.is_leaf and found._version == self.version:
            return found
        lost = [name for name in self.attributes.keys() - vars(unpacked) if not name.startswith(DYNAMO_MARKS)]
        if lost or self.kind is not type(unpacked):
            what = f"with the attribute {lost[0]!r}" if lost else f"of the class {self.kind.__name__}"
            raise RuntimeError(
                f"The autograd function {function} has saved an activation {what}, and would find a new one in backward. "
                "Save ordinary tensors (x.as_subclass(torch.Tensor)), and their attributes in ctx: ctx.scale = x.scale."
            )
        return unpacked


_OBJECTS = "_superpipeline_saved_objects"


def _note(tensor: Any) -> _SavedObject | ref[DeviceParameter] | None:
    """Returns the object that notes a saved tensor."""
    if issubclass(type(tensor), DeviceParameter):
        return ref(tensor)
    if not isinstance(tensor, Tensor) or tensor.is_inference():  # None; autograd saves no inference tensor
        return None
    return _SavedObject(ref(tensor), tensor._version, type(tensor), vars(tensor))


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
                    found[index] = saved.of(tensor, type(ctx).__name__)
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
