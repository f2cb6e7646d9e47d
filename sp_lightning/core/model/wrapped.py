"""Wrapped parameters: tensor subclasses that consist of plain tensors, as quantisation libraries make them.

The plain tensors are stored and uploaded like other frozen parameters, so only the packed bytes are copied. During a step the
modules hold a stand-in, whose class is a subclass of the parameter's. When an operation uses the stand-in, a whole tensor is
built from the plain tensors on the device, and the operation runs with the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.modes import never_compiled, no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import (
    is_traceable_wrapper_subclass,
    take_for_parameter,
    tree_leaves,
    tree_map_only,
    writes_arguments,
)

# Functions that run on the stand-in itself, without plain tensors on the device. A stand-in is frozen, as its parameter is, so
# ``requires_grad`` is one of them. METADATA does not contain ``requires_grad``, because a device parameter overrides it.
_METADATA = METADATA | {Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
_Untouched = torch.DisableTorchFunctionSubclass


def parts(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """Yields the plain tensors of a wrapped tensor, with their names. For a plain tensor, yields the tensor with ``name``."""
    if not is_traceable_wrapper_subclass(tensor):
        yield name, tensor
        return
    for attribute in tensor.__tensor_flatten__()[0]:
        yield from parts(f"{name}.{attribute}", getattr(tensor, attribute))


def rebuild(like: Any, values: Iterator[Tensor]) -> Any:
    """Builds a tensor of the class, shape and context of ``like`` from other plain tensors, in the order of :func:`parts`."""
    return builder(like)(values)


def builder(like: Any) -> Callable[[Iterator[Tensor]], Any]:
    """Returns a function that does the same as :func:`rebuild`. The function keeps no memory of ``like`` alive."""
    if not is_traceable_wrapper_subclass(like):
        return next
    attributes, context = like.__tensor_flatten__()
    inner = {attribute: builder(getattr(like, attribute)) for attribute in attributes}
    kind, size, stride = type(like), like.size(), like.stride()

    def build(values: Iterator[Tensor]) -> Any:
        made = {attribute: make(values) for attribute, make in inner.items()}
        return kind.__tensor_unflatten__(made, context, size, stride)

    return build


OTHER_BACKEND = (
    "gpu_layers: torch does not move an existing parameter to {device} in place, as it does to CUDA, ROCm and XPU. "
    "Leave gpu_layers out."
)


def move(parameter: Any, to: Callable[[Tensor], Tensor]) -> None:
    """Moves the memory of a parameter and of its gradient. The parameter is the same object, to which other code may refer.

    So is another tensor, such as optimizer state. Where torch moves no existing tensor, it gets the insides of a new one.

    ``Module.to`` would exchange a wrapped parameter, and quantise one of bitsandbytes.

    Args:
        parameter: the parameter, or another tensor.
        to: copies a plain tensor to the other memory.

    Raises:
        RuntimeError: torch gives no existing parameter memory of that device; or something holds a weak reference to the tensor.
    """
    with no_inference_mode(), torch.no_grad(), _Untouched():
        gradient, parameter.grad = parameter.grad, None
        if is_traceable_wrapper_subclass(parameter):
            made: Any = rebuild(parameter, (to(part) for _, part in parts("", parameter)))
            Tensor.data.__set__(parameter, made)  # type: ignore[attr-defined]  # its device; the plain tensors are attributes
            for attribute in parameter.__tensor_flatten__()[0]:
                setattr(parameter, attribute, getattr(made, attribute))
        else:
            moved = to(parameter.data)
            try:
                parameter.data = moved
            except RuntimeError as error:  # torch keeps tensors of a PrivateUse1 backend apart
                if isinstance(parameter, nn.Parameter):  # a swap would leave its hooks and its node in graphs behind
                    parameter.grad = gradient
                    raise RuntimeError(OTHER_BACKEND.format(device=moved.device)) from error
                torch.utils.swap_tensors(parameter, moved)
        parameter.grad = None if gradient is None else to(gradient)


class OffloadedWrapper:
    """The stand-in for a wrapped parameter. Its class inherits from this one and from the parameter's class."""

    host: Any
    """The user's parameter."""
    _bring: Callable[..., Sequence[Tensor]]
    _expose: Callable[[], None]
    _computed: Callable[[Any, Any], None]

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that the user set on the parameter."""
        if name == "host":  # not set yet: reading `self.host` below would call this method again without end
            raise AttributeError(name)
        return getattr(self.host, name)

    def __hash__(self) -> int:
        """Returns the hash of the user's parameter, so that dictionaries of parameters find it, as with device parameters."""
        return hash(self.host)

    def __eq__(self, other: object) -> Any:
        if other is self.host or (
            other is not self and isinstance(other, OffloadedWrapper) and other.host is self.host
        ):
            return True
        return super().__eq__(other)

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        """If the value differs from the present one, calls the method of the user's parameter. Otherwise does nothing."""
        return self if requires_grad == self.requires_grad else self.host.requires_grad_(requires_grad)

    def whole(self, use: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Builds the parameter on the device, or the part of it that a use needs. Fetches its layer if necessary.

        While the result is referenced, no other layer overwrites the slot.

        Args:
            use: the function that reads the parameter, or the name of the attribute that is read.
            args, kwargs: the function's arguments.
        """
        with no_dispatch_modes(), no_inference_mode(), _Untouched():
            return rebuild(self.host, iter(self._bring(use, args, kwargs or {})))

    @classmethod
    @never_compiled  # the engine is not part of a compiled graph
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _METADATA:
            with _Untouched():
                return func(*args, **(kwargs or {}))
        return _with_wholes(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _with_wholes(func, args, kwargs)


def _with_wholes(func: Any, args: Any, kwargs: Any) -> Any:
    """Calls a function with whole parameters in the place of their stand-ins. Calls ``_computed`` of each stand-in.

    If the function writes a parameter, or returns a tensor through which user code may write it later, calls ``_expose``.
    """
    wholes: list[tuple[OffloadedWrapper, Any, int]] = []

    def whole(each: OffloadedWrapper) -> Any:
        made = each.whole(func, *arguments)  # for some functions and arguments, a part of the parameter is enough
        wholes.append((each, made, made._version))
        return made

    arguments = (args, kwargs or {})
    args, kwargs = tree_map_only(OffloadedWrapper, whole, arguments)
    result = func(*args, **kwargs)
    for each, _, _ in wholes:
        each._computed(func, result)
    writes = writes_arguments(func)
    if func is Tensor.__getitem__ and (row := _row(args[0], args[1], result)) is not None:
        return row  # version counters of the whole show writes to the row, so `_expose` is not needed
    # A wrapped result may share memory with the parameter. If its attribute ``read_only`` is True, it raises errors on writes.
    leaves = tree_leaves(result)
    returns_wrapped = any(
        is_traceable_wrapper_subclass(each) and not getattr(each, "read_only", False) for each in leaves
    )
    for each, made, version in wholes:
        if writes or returns_wrapped or made._version != version:
            each._expose()
    return result


def _row(whole: Any, index: Any, taken: Any) -> Any:
    """Rebuilds a row of a wrapped tensor from views, so that writes to the row increase the versions of the whole tensor.

    The subclass took the row below autograd, where views have their own version counters.

    Args:
        whole: the wrapped tensor.
        index: the index of the row.
        taken: the result of the subclass for this index.

    Returns:
        The row; None if ``taken`` is not a row, or does not view the memory of ``whole``.
    """
    wholes = [part for _, part in parts("", whole)]
    own = [part for _, part in parts("", taken)]
    by_rows = len(wholes) == len(own) and all(part.shape[:1] == whole.shape[:1] for part in wholes)
    if not is_traceable_wrapper_subclass(taken) or taken.shape != whole.shape[1:] or not by_rows:
        return None
    rows = [part[index] for part in wholes]
    same = all(
        (row.data_ptr(), row.dtype, row.shape, row.stride()) == (part.data_ptr(), part.dtype, part.shape, part.stride())
        for row, part in zip(rows, own, strict=True)
    )
    return rebuild(taken, iter(rows)) if same else None


def stand_in(
    host: Any,
    away: Iterator[Tensor],
    bring: Callable[..., Sequence[Tensor]],
    expose: Callable[[], None],
    computed: Callable[[Any, Any], None],
) -> Any:
    """Makes a stand-in for a wrapped parameter.

    Args:
        host: the user's parameter.
        away: tensors with the compute device, and the shapes and dtypes of the parameter's plain tensors. Their values are
            never read.
        bring: returns the parameter's plain tensors on the device, in leased memory. Its arguments are those of
            :meth:`OffloadedWrapper.whole`.
        expose: called when user code writes the plain tensors, or may write them in a way that no version counter shows.
        computed: called after each function that was called with the parameter, with the function and its result.
    """
    with no_inference_mode(), _Untouched():
        made = rebuild(host, away)
    attributes = tuple(host.__tensor_flatten__()[0])
    kind: Any = type(host)
    made.__class__ = _class_for(kind, attributes)
    vars(made).update(host=host, _bring=bring, _expose=expose, _computed=computed)
    take_for_parameter(made)
    return made


@cache
def _class_for(theirs: Any, attributes: tuple[str, ...]) -> type:
    """Makes the class of stand-ins for a tensor subclass. Its attributes for plain tensors return plain tensors on the device.

    Args:
        theirs: the tensor subclass.
        attributes: the names of its attributes that are plain tensors.
    """

    def on_the_device(attribute: str) -> property:
        def refuse(self: Any, value: Any) -> None:
            raise RuntimeError(
                f"{attribute!r} of a wrapped parameter ({theirs.__name__}) was exchanged inside a step. Write it in place "
                f"({attribute}.copy_(…)), or exchange it between two batches."
            )

        def read(self: Any) -> Any:
            self._expose()  # the caller may write the tensor through .data
            return getattr(self.whole(attribute), attribute)

        return property(read, refuse)

    return type(theirs.__name__, (OffloadedWrapper, theirs), {each: on_the_device(each) for each in attributes})
