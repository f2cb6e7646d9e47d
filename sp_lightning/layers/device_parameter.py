"""Device parameters: what modules hold in place of the host's parameters while a step runs.

A :class:`DeviceParameter` is a leaf of the autograd graph with the right shape, dtype and device for the whole step.
While its layer is on the device it is a view of the slot, and computing with it is no slower than with a plain
``Parameter``. While its layer is away it is a :class:`OffloadedParameter`: a tensor of the weight's shape without memory, whose
class brings the layer before anything computes with it. Every use of a weight is therefore right, wherever it happens:
a weight that is read outside of forward, arithmetic on ``self.parameters()``, ``torch.autograd.grad`` with respect to
parameters.

Everything else that a user may reach through it is the host parameter's: ``.grad``, ``requires_grad_``, hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sp_lightning.layers.casts import LOWERED_FUNCTIONS, Cast, autocast_would_cast
from sp_lightning.layers.write_guard import guard_of
from sp_lightning.torch_compat.metadata import METADATA
from sp_lightning.torch_compat.modes import never_compiled, no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import (
    DYNAMO_MARKS,
    count_function_modes,
    tree_leaves,
    tree_map_only,
)

Untouched = torch.DisableTorchFunctionSubclass  # in this context a stand-in itself is read, and no layer is brought
# The attributes of the tensor itself, which the properties of DeviceParameter hide.
tensor_data: Any = Tensor.data
tensor_grad: Any = Tensor.grad
tensor_requires_grad: Any = Tensor.requires_grad
# As ``parameter.__class__ = kind``, without DeviceParameter's __setattr__: each weight of a layer changes its class twice a use.
set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class DeviceParameter(nn.Parameter):
    """A parameter's view of the slot that its layer is in. Only :class:`ParameterGroup` makes one."""

    _of: Any  # the ParameterGroup; its file imports this one
    _index: int

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Lets ``type(p)(data)`` make an ordinary parameter."""
        made: nn.Parameter = _users_class(cls)(data, requires_grad)
        return made

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute that the user gave the host's parameter."""
        if name in ("_of", "_index"):
            raise AttributeError(name)
        return getattr(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if _is_ours(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self.host, name, value)

    def __delattr__(self, name: str) -> None:
        if _is_ours(name):
            object.__delattr__(self, name)
        else:
            delattr(self.host, name)

    def __hash__(self) -> int:
        """Returns the hash of the host's parameter, so that dictionaries of parameters find it: ``optimizer.state[p]``."""
        return hash(self.host)

    def __eq__(self, other: object) -> Any:
        if other is self.host:
            return True
        return super().__eq__(other)

    @property
    def host(self) -> nn.Parameter:
        """The user's parameter."""
        found: nn.Parameter = self._of.hosts[self._index]
        return found

    @property
    def data(self) -> Tensor:
        if self._of.doors.at_host():
            return self.host.data
        # A write through .data changes no version, and it may come as long as user code holds what is returned here.
        with self._of.present(self):
            self._of.expose(self._index)
            return tensor_data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # module.to(…) assigns this if it changes nothing
            return
        if self._of.doors.at_host():
            self.host.data = value
            return
        with self._of.present(self):
            guard_of(self._of.layer).exposed.add(self._index)
            if not same_place(value, tensor_data.__get__(self)):  # p.data += 1 assigns the same memory again
                self._of.doors.replacing(self._of.layer, self._index, value)
                tensor_data.__set__(self, value)

    @property
    def grad(self) -> Tensor | None:
        return self.host.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self.host.grad = value

    @grad.deleter
    def grad(self) -> None:
        self.host.grad = None

    @property
    def requires_grad(self) -> bool:
        return self.host.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.host.requires_grad = value
        self._of.sync_requires_grad()

    def as_subclass(self, cls: Any) -> Any:
        if self._of.doors.at_host():
            return self.host.as_subclass(cls)
        with self._of.present(self):  # torch's own method does not call __torch_function__
            return super().as_subclass(cls)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        return self.host.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return self.host.register_post_accumulate_grad_hook(hook)

    def _ordinary(self, data: Tensor) -> nn.Parameter:
        """A parameter of the user's class with the attributes that the user has given the host's."""
        made: Any = nn.Parameter(data, self.requires_grad)
        vars(made).update(vars(self.host))
        made.__class__ = _users_class(type(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Copies to an ordinary parameter, as the user's class copies one, because a copied module is a plain module."""
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self._ordinary(self.data.detach()), memo)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary(self.data.detach().clone()).__reduce_ex__(protocol)


class OffloadedParameter(DeviceParameter):
    """A device parameter whose layer is away. Reading its metadata is free; anything else brings the layer.

    A function from which torch hides the class gets an error: :func:`~sp_lightning.device.layout.absent`.
    """

    @classmethod
    @never_compiled  # transfers cannot be part of a compiled graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOWERED_FUNCTIONS:
            output = _call_with_casts(func, args, kwargs)
            if output is not None:
                return output
        if func in METADATA:
            with Untouched():
                return func(*args, **kwargs)
        # issubclass, because isinstance is slow: the metaclass of Parameter checks in Python.
        first = next((each for each in (*args, *kwargs.values()) if issubclass(type(each), OffloadedParameter)), None)
        if first is not None and first._of.compute is not None and not first._of.doors.at_host():
            output = first._of.compute(first, func, types, args, kwargs)
            if output is not NotImplemented:
                return output
        if func is torch.autograd.grad:
            return _grad_by_edges(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):  # backward(inputs=…)
            args, kwargs = tree_map_only(DeviceParameter, _present_edge, (args, kwargs))
            return func(*args, **kwargs)
        away = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OffloadedParameter)]
        if not away:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was given a weight whose layer is away, inside an object of "
                "a class other than list, tuple or dictionary. Pass the weight itself, or keep its layer on the device: "
                "SuperpipelineStrategy(keep_on_gpu=[…])."
            )
        if away[0]._of.doors.at_host():  # a parameter that was kept is the host's between steps
            args, kwargs = tree_map_only(DeviceParameter, lambda each: each.host, (args, kwargs))
            return func(*args, **kwargs)
        with away[0]._of.doors.on_demand(away):
            by_rows = any(each._of.by_rows for each in away)  # these stay stand-ins
            if by_rows or away[0]._of.shared or away[0]._of.doors.saves_raw():
                with away[0]._of.doors.lock:  # another thread may detach it as soon as this one is late
                    away[0]._of.doors.threads.refuse_late()
                    args, kwargs = tree_map_only(DeviceParameter, _alias, (args, kwargs))
            if func is Tensor.detach or func is torch.detach:
                # state_dict() detaches. Writes through the .data of a detached tensor change no version.
                away[0]._of.expose()
            return func(*args, **kwargs)


def _is_ours(name: str) -> bool:
    """Whether an attribute is the device parameter's own. torch.compile looks for its marks in the tensor's own ``__dict__``."""
    return name in ("_of", "_index", "data", "grad", "requires_grad", "__class__") or name.startswith(DYNAMO_MARKS)


def _users_class(kind: type) -> Any:
    return next(base for base in kind.__mro__ if not issubclass(base, DeviceParameter))


def _call_with_casts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Calls a function with the casts of all stand-ins among its arguments.

    Returns:
        The result; None if the function needs the masters themselves.
    """
    casts: dict[Any, Any] = {}  # by ParameterGroup
    for argument in (*args, *kwargs.values()) if kwargs else args:
        # issubclass, because isinstance is slow: the metaclass of Parameter checks in Python.
        if (
            type(argument) is not Tensor
            and issubclass(type(argument), OffloadedParameter)
            and argument._of not in casts
        ):
            group = argument._of
            if group.autocast is None or not autocast_would_cast(group.autocast, group.device):
                return None
            # Read once, because another thread may replace them meanwhile. Without any the function is called from outside
            # the forward of their layer.
            casts[group] = None if group.shared else group.casts
    if None not in casts.values():
        return _call(casts, func, args, kwargs) if casts else None
    away = [argument for argument in (*args, *kwargs.values()) if issubclass(type(argument), OffloadedParameter)]
    if away[0]._of.doors.at_host():
        return None
    with away[0]._of.doors.on_demand(away, casts=True):
        casts = {group: group.casts for group in casts}
        return None if None in casts.values() else _call(casts, func, args, kwargs)


def _call(casts: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    if not (kwargs or torch.is_grad_enabled()):  # the same in one go, for inference, where it counts most
        given = [casts[each._of][each._index] if issubclass(type(each), OffloadedParameter) else each for each in args]
        return func(*given)
    # Autocast casts the last argument first, so that gradients come in the order of the arguments in backward. So does
    # this; sorted, the names have the bias before the weight.
    last = {name: _cast(kwargs[name], casts) for name in sorted(kwargs)} if kwargs else kwargs
    return func(*[_cast(argument, casts) for argument in reversed(args)][::-1], **last)


def _cast(argument: Any, casts: dict[Any, Sequence[Tensor]]) -> Any:
    """The cast of an argument that is a stand-in; any other argument as it is."""
    if not issubclass(
        type(argument), OffloadedParameter
    ):  # isinstance is slow: the metaclass of Parameter checks in Python
        return argument
    group, index = argument._of, argument._index
    if not torch.is_grad_enabled():
        return casts[group][index]
    # Either way autograd gets a tensor object of its own, as from autocast's cast; the one of the group is shared.
    return (
        Cast.apply(argument, casts[group][index]) if group.hosts[index].requires_grad else casts[group][index].detach()
    )


def same_place(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def hides_stand_ins(inputs: Any) -> bool:
    """Whether torch may ask another class, or a mode, before the stand-ins that an operator is given.

    The ``__torch_function__`` of a jagged nested tensor among a module's inputs comes first, and so does a mode.
    """
    if count_function_modes():
        return True
    if type(inputs) is tuple and all(type(each) is Tensor for each in inputs):
        return False  # nearly always; to take inputs apart takes the host longer
    return any(
        isinstance(leaf, Tensor) and getattr(type(leaf).__torch_function__, "__func__", None) not in _NO_HANDLERS
        for leaf in tree_leaves(inputs)
        if type(leaf) is not Tensor
    )


# The __torch_function__ of a class without one of its own, and that of a class that has disabled it, as nn.Parameter has.
_NO_HANDLERS = (Tensor.__torch_function__.__func__, None)  # type: ignore[attr-defined]


def _grad_by_edges(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **kwargs: Any) -> Any:
    """Calls ``torch.autograd.grad`` with the places of its inputs in the graph, for which no layer has to come.

    The call must not run in :data:`Untouched`, because user code that runs in backward (a checkpoint's recompute) needs
    ``__torch_function__``.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    edges = [_present_edge(tensor) if isinstance(tensor, DeviceParameter) else tensor for tensor in inputs]
    if not materialize_grads:
        return torch.autograd.grad(outputs, edges, *args, **kwargs)
    gradients = torch.autograd.grad(outputs, edges, *args, **{**kwargs, "allow_unused": True})
    return tuple(
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def _present_edge(parameter: DeviceParameter) -> GradientEdge:
    """As :func:`gradient_edge`. The user may have frozen or unfrozen the parameter since its layer was used last."""
    parameter._of.sync_requires_grad()
    return gradient_edge(parameter)


def _alias(parameter: DeviceParameter) -> Tensor:
    """Returns the weight as another tensor. A graph that keeps it keeps the memory with it."""
    with Untouched(), no_dispatch_modes():
        wanted = torch.is_grad_enabled() and tensor_requires_grad.__get__(parameter)
        return parameter.view_as(parameter) if wanted else parameter.detach()


def gradient_edge(parameter: DeviceParameter) -> GradientEdge:
    """The place of a device parameter in the graph; no layer is brought for it."""
    with Untouched(), no_inference_mode(), torch.enable_grad():
        return get_gradient_edge(parameter)
