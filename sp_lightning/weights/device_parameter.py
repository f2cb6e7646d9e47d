"""Device parameters: what modules hold in place of the host's parameters while a step runs.

A :class:`DeviceParameter` is a leaf of the autograd graph with the right shape, dtype and device for the whole step.
While its layer is on the device it is a view of the slot, and nothing about it is slower than about a plain
``Parameter``. While its layer is away it is a :class:`StandIn`: a NaN scalar expanded to shape, whose class brings the
layer before anything computes with it. So every use of a weight is right, wherever it is: weights read without
forward, arithmetic on ``self.parameters()``, ``torch.autograd.grad`` with respect to parameters.

What belongs to the host's parameter goes there: ``.grad``, ``requires_grad_``, hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from sp_lightning.device.metadata import METADATA
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import (
    DYNAMO_MARKS,
    count_function_modes,
    rebuild_parameter,
    tree_leaves,
    tree_map_only,
)
from sp_lightning.weights.casts import LOWERED_FUNCTIONS, Cast, autocast_would_cast

if TYPE_CHECKING:
    from sp_lightning.weights.parameter_group import ParameterGroup

Untouched = torch.DisableTorchFunctionSubclass  # reads of a stand-in itself, not of the weight that it stands for
# The attributes of the tensor itself, which DeviceParameter hides behind its own.
tensor_data: Any = Tensor.data
tensor_grad: Any = Tensor.grad
tensor_requires_grad: Any = Tensor.requires_grad
# As ``parameter.__class__ = kind``, without DeviceParameter's __setattr__: each weight of a layer changes its class twice a use.
set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class DeviceParameter(nn.Parameter):
    """A parameter's view of the slot that its layer is in. Made by :class:`ParameterGroup`, never by hand."""

    _of: ParameterGroup
    _index: int

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """``type(p)(data)`` is an ordinary parameter."""
        theirs = next(each for each in cls.__mro__ if not issubclass(each, DeviceParameter))
        make: Any = theirs
        return make(data, requires_grad)

    def __getattr__(self, name: str) -> Any:
        """What the user hung on the parameter."""
        if name in ("_of", "_index"):
            raise AttributeError(name)
        return getattr(self.host, name)

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in ("_of", "_index", "data", "grad", "requires_grad", "__class__")
        if own or name.startswith(DYNAMO_MARKS):  # torch.compile looks into __dict__ for what it has marked
            object.__setattr__(self, name, value)
        else:
            setattr(self.host, name, value)

    def __hash__(self) -> int:
        """As the host's parameter, so that sets and dictionaries of parameters find it: ``optimizer.state[p]``."""
        return hash(self.host)

    def __eq__(self, other: object) -> Any:
        if other is self.host:
            return True
        return super().__eq__(other)

    @property
    def host(self) -> nn.Parameter:
        """The user's parameter."""
        return self._of.hosts[self._index]

    @property
    def data(self) -> Tensor:
        # Writes through .data bump no version, and may come as long as somebody holds what is returned here.
        with self._of.present(self):
            self._of.exposed.add(self._index)
            return tensor_data.__get__(self)

    @data.setter
    def data(self, value: Tensor) -> None:
        if value is self:  # module.to(…) that changes nothing
            return
        with self._of.present(self):
            self._of.exposed.add(self._index)
            if not same_place(value, tensor_data.__get__(self)):  # as after p.data += 1
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
        set_requires_grad(self, value)

    def as_subclass(self, cls: Any) -> Any:
        with self._of.present(self):  # torch's does not ask
            return super().as_subclass(cls)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        return self.host.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return self.host.register_post_accumulate_grad_hook(hook)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """A copy is a plain parameter, as a copied module is a plain module."""
        if id(self) not in memo:
            memo[id(self)] = nn.Parameter(self.data.detach().clone(), self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return rebuild_parameter, (self.data.detach().clone(), self.requires_grad, {})


class StandIn(DeviceParameter):
    """A device parameter whose layer is away. Reading its metadata is free, anything else brings the layer."""

    @classmethod
    @torch.compiler.disable  # the engine is no part of a graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in LOWERED_FUNCTIONS:
            found = _call_with_casts(func, args, kwargs)
            if found is not None:
                return found
        if func in METADATA:
            with Untouched():
                return func(*args, **kwargs)
        if func is torch.nn.functional.embedding and (found := _look_up(*args, **kwargs)) is not None:
            return found
        if func is torch.autograd.grad:
            return _grad_by_edges(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):  # backward(inputs=…)
            args, kwargs = tree_map_only(DeviceParameter, gradient_edge, (args, kwargs))
            return func(*args, **kwargs)
        away = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, StandIn)]
        if not away:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was given a weight whose layer is away, inside an object of "
                "a class that is no list, tuple or dictionary. Pass the weight itself, or keep its layer on the device: "
                "SuperpipelineStrategy(resident=[…])."
            )
        with away[0]._of.doors.on_demand(away):
            if away[0]._of.shared or away[0]._of.doors.saves_raw():
                args, kwargs = tree_map_only(DeviceParameter, _alias, (args, kwargs))
            if (
                func is Tensor.detach or func is torch.detach
            ):  # as state_dict() does; writes of its .data bump no version
                away[0]._of.expose()
            return func(*args, **kwargs)


def _call_with_casts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """The result for the casts of all stand-ins among the arguments; None if they have to come themselves."""
    away = [each for each in (*args, *kwargs.values()) if issubclass(type(each), StandIn)]
    groups = list(dict.fromkeys(each._of for each in away))
    for of in groups:
        if of.autocast is None or not autocast_would_cast(of.autocast, of.device):
            return None
    casts = {of: of.casts for of in groups}  # another thread may exchange them meanwhile
    for of in groups:
        if casts[of] is None or of.shared:  # called from outside their layer
            with of.doors.on_demand(away, casts=True):
                casts = {of: of.casts for of in groups}
                return None if None in casts.values() else _call(casts, func, args, kwargs)
    return _call(casts, func, args, kwargs) if groups else None


def _look_up(indices: Any, weight: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """The result of ``embedding`` from the rows alone; None if all of the weight has to come."""
    look_up = weight._of.look_up if isinstance(weight, StandIn) else None
    return None if look_up is None else look_up(weight, indices, *args, **kwargs)


def _call(casts: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    # Autocast casts the last argument first, so that in backward the gradients come in the arguments' order.
    last = {name: _cast(kwargs[name], casts) for name in sorted(kwargs)} if kwargs else kwargs  # bias before weight
    return func(*[_cast(each, casts) for each in reversed(args)][::-1], **last)


def _cast(each: Any, casts: dict[ParameterGroup, Sequence[Tensor]]) -> Any:
    if not issubclass(type(each), StandIn):  # isinstance of a Parameter is slow: its metaclass asks in Python
        return each
    of, index = each._of, each._index
    if not torch.is_grad_enabled():
        return casts[of][index]
    return Cast.apply(each, casts[of][index]) if of.hosts[index].requires_grad else casts[of][index].detach()


def same_place(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same elements in memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def requires_grad(parameter: Tensor) -> bool:
    """What autograd sees on the device parameter itself."""
    with Untouched():
        return tensor_requires_grad.__get__(parameter)


def set_requires_grad(parameter: Tensor, value: bool) -> None:
    """Set what autograd sees on the device parameter itself."""
    with Untouched():
        tensor_requires_grad.__set__(parameter, value)


def take_gradient(parameter: Tensor) -> Tensor | None:
    """The gradient that autograd put on the device parameter, which lets go of it."""
    with Untouched():
        gradient = tensor_grad.__get__(parameter)
        tensor_grad.__set__(parameter, None)
    return gradient


def hides_stand_ins(inputs: Any) -> bool:
    """Whether what a module is given makes torch pass its operators by our stand-ins: another class decides first.

    A jagged nested tensor does; or a mode, which sees every operator.
    """
    return count_function_modes() > 0 or any(
        isinstance(each, Tensor) and getattr(type(each).__torch_function__, "__func__", None) not in _NO_HANDLERS
        for each in tree_leaves(inputs)
        if type(each) is not Tensor
    )


# A class without a handler of its own, and one that has switched them off, as nn.Parameter does.
_NO_HANDLERS = (Tensor.__torch_function__.__func__, None)  # type: ignore[attr-defined]


def _grad_by_edges(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **kwargs: Any) -> Any:
    """``torch.autograd.grad`` asks its inputs for their place in the graph only: no layer need come.

    Inside, nothing may switch the dispatch off: user code that runs in backward (a checkpoint's recompute) needs it.
    """
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    edges = [gradient_edge(each) if isinstance(each, DeviceParameter) else each for each in inputs]
    if not materialize_grads:
        return torch.autograd.grad(outputs, edges, *args, **kwargs)
    found = torch.autograd.grad(outputs, edges, *args, **{**kwargs, "allow_unused": True})
    return tuple(
        torch.zeros(each.shape, dtype=each.dtype, device=each.device) if gradient is None else gradient
        for gradient, each in zip(found, inputs, strict=True)
    )


def _alias(parameter: DeviceParameter) -> Tensor:
    """The weight under another tensor, which whoever keeps it keeps with its memory."""
    wanted = torch.is_grad_enabled() and requires_grad(parameter)
    with Untouched(), no_dispatch_modes():
        return parameter.view_as(parameter) if wanted else parameter.detach()


def gradient_edge(parameter: DeviceParameter) -> GradientEdge:
    with Untouched(), no_inference_mode(), torch.enable_grad():
        return get_gradient_edge(parameter)
