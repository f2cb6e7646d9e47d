"""Device parameters: the parameters that modules hold in place of the host parameters while a step runs.

A :class:`DeviceParameter` is a leaf of the autograd graph with the right shape, dtype and device for the whole step.

- While its layer is attached, it is a view of the slot. Computing with it is as fast as with a plain ``Parameter``.
- Otherwise it is a *stand-in* (:class:`OffloadedParameter`): a tensor of the weight's shape without memory. Its class fetches the
  layer before any operation computes with it.

So every use of a weight gets the right values, wherever it happens: a read outside of forward, arithmetic on
``self.parameters()``, ``torch.autograd.grad`` with respect to parameters.

All other attributes of a device parameter are those of the host parameter: ``.grad``, ``requires_grad_``, hooks.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks

from sp_lightning.core.messages import SWAPPED_IN_STEP
from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.modes import (
    never_compiled,
    no_dispatch_modes,
    no_inference_mode,
    warn_of_ended_graphs,
)
from sp_lightning.core.torch_compat.private import (
    DYNAMO_MARKS,
    NoticesSwap,
    compiles_here,
    count_function_modes,
    top_saved_tensors_hooks,
    transforms_active,
    tree_leaves,
    tree_map_only,
)
from sp_lightning.core.weights.casts import LOWERED_FUNCTIONS, Cast, autocast_would_cast

Untouched = torch.DisableTorchFunctionSubclass  # in this context a stand-in itself is read, and no layer is fetched
# The attributes of the tensor itself, which the properties of DeviceParameter hide.
tensor_data: Any = Tensor.data
tensor_grad: Any = Tensor.grad
tensor_requires_grad: Any = Tensor.requires_grad
# Sets ``parameter.__class__`` without DeviceParameter's __setattr__, because each weight changes its class twice in each use.
set_class: Callable[[object, type], None] = object.__dict__["__class__"].__set__


class DeviceParameter(NoticesSwap, nn.Parameter):
    """The base class of device parameters. Only :class:`ParameterGroup` makes them."""

    _of: Any  # the ParameterGroup; not typed, because the class's file imports this file
    _index: int

    def __new__(cls, data: Any = None, requires_grad: bool = True) -> Any:
        """Lets ``type(p)(data)`` make an ordinary parameter."""
        made: nn.Parameter = _users_class(cls)(data, requires_grad)
        return made

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
        """Returns True for the same weight, so that dictionaries find it; otherwise compares each element, as ``p == p`` does."""
        kept: Any = other  # by a dictionary of the user, perhaps since an earlier engine
        if kept is not self and (
            kept is self.host or (issubclass(type(kept), DeviceParameter) and kept.host is self.host)
        ):
            return True
        return super().__eq__(other)

    @property
    def host(self) -> nn.Parameter:
        """The user's parameter."""
        found: nn.Parameter = self._of.hosts[self._index]
        return found

    @property
    @never_compiled  # the layer may be uploaded
    def data(self) -> Tensor:
        if self._of.engine.at_host():
            return self.host.data
        with self._of.present(self):
            data: Tensor = self._of.hand_out(self._index)
            return data

    @data.setter
    @never_compiled
    def data(self, value: Tensor) -> None:
        if value is self:  # module.to(…) assigns this if it changes nothing
            return
        if self._of.engine.at_host():
            self.host.data = value
            return
        with self._of.present(self):
            self._of.engine.give(self._of.layer, self._index, value)

    @property
    def grad(self) -> Tensor | None:
        self._of.engine.gradient_is_used(self._of.layer)
        return self.host.grad

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        self._of.engine.gradient_is_used(self._of.layer)
        self.host.grad = None if value is None else self._of.engine.device.on_host(value)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def requires_grad(self) -> bool:
        return self.host.requires_grad

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        self.host.requires_grad = value
        self._of.sync_requires_grad()

    def as_subclass(self, cls: Any) -> Any:
        if self._of.engine.at_host():
            return self.host.as_subclass(cls)
        with self._of.present(self):  # torch's own method does not call __torch_function__
            return super().as_subclass(cls)

    def requires_grad_(self, requires_grad: bool = True) -> DeviceParameter:
        self.requires_grad = requires_grad
        return self

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Writes nothing if the source is the parameter itself: ``torch.nn.utils.parametrize``, which PEFT uses, calls it so."""
        if len(args) == 1 and args[0] is self and not kwargs:
            return self
        return super().set_(*args, **kwargs)

    def before_swap(self) -> None:
        raise RuntimeError(SWAPPED_IN_STEP.format(what=repr(self._of.spans[self._index].name)))

    def register_hook(self, hook: Callable[[Tensor], Tensor | None]) -> Any:
        return self.host.register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Callable[[Tensor], None]) -> Any:
        return self.host.register_post_accumulate_grad_hook(hook)

    def _ordinary(self, data: Tensor) -> nn.Parameter:
        """Returns a parameter of the user's class, with the attributes that the user has given the host parameter."""
        made: Any = nn.Parameter(data, self.requires_grad)
        vars(made).update(vars(self.host))
        made.__class__ = _users_class(type(self))
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        """Returns a copy that is an ordinary parameter of the user's class, because a copied module is a plain module.

        It is also the copy of the host parameter, which an optimizer that is copied with the module refers to.
        """
        if id(self.host) not in memo:
            memo[id(self.host)] = copy.deepcopy(self._ordinary(self.data.detach()), memo)
        return memo[id(self.host)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._ordinary(self.data.detach().clone()).__reduce_ex__(protocol)


def _users_attribute(parameter: DeviceParameter, name: str) -> Any:
    """Returns an attribute that the user gave the host's parameter."""
    if name in (
        "_of",
        "_index",
        "host",
    ):  # not set yet: `host` reads the others, and would call this function without end
        raise AttributeError(name)
    return getattr(parameter.host, name)


class AttachedParameter(DeviceParameter):
    """A device parameter whose layer is attached: a view of the slot."""

    __getattr__ = _users_attribute


def _notice_compiled_code(cls: Any, func: Callable[..., Any], *_: Any) -> None:
    """Warns if compiled code computes with a stand-in. Compiled modules get casts in place of stand-ins."""
    if issubclass(cls, StandIn) and func not in METADATA and not compiles_here():
        warn_of_ended_graphs()


class OffloadedParameter(DeviceParameter):
    """A device parameter whose layer is not attached. Reading its metadata is free; any other use fetches the layer.

    If torch hides the class from a function, the function gets an error: :func:`~sp_lightning.core.device.layout.absent`.
    """

    @classmethod
    @partial(never_compiled, notice=_notice_compiled_code)  # transfers cannot be part of a compiled graph
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        # 1. A linear layer or a convolution under autocast computes with the 16-bit casts, and the masters stay on the host.
        if func in LOWERED_FUNCTIONS:
            output = _call_with_casts(func, args, kwargs)
            if output is not None:
                return output
        # 2. The shape, dtype and so on of a stand-in are those of the weight. While torch.compile compiles, it calls further
        # functions of a graph's inputs, which read no values either.
        if func in METADATA or compiles_here():
            with Untouched():
                return func(*args, **kwargs)
        # 3. A look-up in a table, or an operation on routed experts, needs only rows of the weight.
        # issubclass, because isinstance is slow: the metaclass of Parameter checks in Python.
        first = next((each for each in (*args, *kwargs.values()) if issubclass(type(each), OffloadedParameter)), None)
        if first is not None and first._of.compute is not None and not first._of.engine.at_host():
            output = first._of.compute(first, func, types, args, kwargs)
            if output is not NotImplemented:
                return output
        # 4. A backward needs the parameter's place in the graph, and not its values.
        if func is torch.autograd.grad:
            return _grad_by_edges(*args, **kwargs)
        if func in (torch.autograd.backward, Tensor.backward):  # backward(inputs=…)
            args, kwargs = tree_map_only(DeviceParameter, present_edge, (args, kwargs))
            return func(*args, **kwargs)
        # 5. Any other operation computes with weights: their layers are attached while it runs.
        away = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, OffloadedParameter)]
        if not away:
            raise RuntimeError(
                f"{getattr(func, '__name__', func)} was given a weight whose layer is away, inside an object of "
                "a class other than list, tuple or dictionary. Pass the weight itself, or keep its layer on the GPU: "
                "SuperpipelineStrategy(keep_on_gpu=[…])."
            )
        if away[0]._of.engine.at_host():  # for example, user code has kept a device parameter after the step
            args, kwargs = tree_map_only(DeviceParameter, lambda each: each.host, (args, kwargs))
            return func(*args, **kwargs)
        with away[0]._of.engine.operation_on(away):
            # Attached parameters have the class of views, and the function gets them. There are two exceptions: with rows, they
            # keep the class of stand-ins; and without saved-tensor hooks (``saves_raw``), autograd would save the parameters
            # themselves. The function then gets aliases, which are plain tensors over the slot.
            noticed = any(each._of.by_rows for each in away)
            raw = away[0]._of.engine.saves_raw()
            if raw and not noticed and (hooks := _hooks_for_leaves(away[0]._of.engine)) is not None:
                with hooks:
                    return func(*args, **kwargs)
            if noticed or raw:
                if func in _AS_ALIASES:
                    with Untouched():
                        return func(*args, **kwargs)
                args, kwargs = tree_map_only(DeviceParameter, _alias, (args, kwargs))
            if func is Tensor.detach or func is torch.detach:
                # state_dict() detaches. Writes through the .data of a detached tensor change no version.
                away[0]._of.expose()
            return func(*args, **kwargs)


_AS_ALIASES = {Tensor.view_as, Tensor.expand_as}
"""Functions whose result is an alias, so that autograd saves no parameter. User code finds the parameter's node with them."""


class StandIn(OffloadedParameter):
    """A stand-in; see :class:`OffloadedParameter`."""

    __getattr__ = _users_attribute


def _is_ours(name: str) -> bool:
    """Returns True if an attribute is the device parameter's own, and not the host parameter's. torch.compile's marks are own."""
    return name in ("_of", "_index", "data", "grad", "requires_grad", "__class__") or name.startswith(DYNAMO_MARKS)


def _users_class(kind: type) -> Any:
    """Returns the class of the user's parameter: ``nn.Parameter``, or a subclass from which ``kind`` also derives."""
    return next(base for base in kind.__mro__ if not issubclass(base, DeviceParameter | NoticesSwap))


def _call_with_casts(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor | None:
    """Calls a function with the casts of all stand-ins among its arguments, as autocast would cast the weights.

    Returns:
        The result; None if autocast would not cast, so that the function needs the masters themselves.
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
            # Read once, because another thread may replace the casts meanwhile. If the function is called outside the forward of
            # the layer, the group has no casts.
            casts[group] = group.casts
    if None not in casts.values():
        return _call(casts, func, args, kwargs) if casts else None
    away = [argument for argument in (*args, *kwargs.values()) if issubclass(type(argument), OffloadedParameter)]
    if away[0]._of.engine.at_host():
        return None
    with away[0]._of.engine.operation_on(away, casts=True):  # attaches the owners, which offer the groups their casts
        casts = {group: group.casts for group in casts}
        return None if None in casts.values() else _call(casts, func, args, kwargs)


def _call(casts: Any, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
    """Calls a function with casts in place of stand-ins. ``casts`` has the casts of each group."""
    if not (kwargs or torch.is_grad_enabled()):  # in inference the host's time counts most, so this calls no functions
        given = [casts[each._of][each._index] if issubclass(type(each), OffloadedParameter) else each for each in args]
        return func(*given)
    # Autograd runs the nodes of a graph in the reverse of their order of creation. Autocast casts the last argument
    # first, so this does the same. Sorting puts the bias before the weight among named arguments.
    last = {name: _cast(kwargs[name], casts) for name in sorted(kwargs)} if kwargs else kwargs
    return func(*[_cast(argument, casts) for argument in reversed(args)][::-1], **last)


def _cast(argument: Any, casts: dict[Any, Sequence[Tensor]]) -> Any:
    """Returns the tensor that a function gets for an argument. An argument that is not a stand-in is returned unchanged."""
    # issubclass, because isinstance is slow: the metaclass of Parameter checks in Python.
    if not issubclass(type(argument), OffloadedParameter):
        return argument
    return for_one_use(argument, casts[argument._of][argument._index])


def for_one_use(weight: OffloadedParameter, cast: Tensor) -> Tensor:
    """Returns the tensor that takes the place of a stand-in in one use of its cast.

    - Without a graph: the cast itself.
    - For a trained weight: the output of :class:`Cast`, whose backward passes the gradient to the stand-in.
    - For a frozen weight: a new tensor object over the cast. Autograd may keep the object, as it keeps autocast's own cast, and
      the group's tensor is shared by all uses.
    """
    if not torch.is_grad_enabled():
        return cast
    trained = weight._of.hosts[weight._index].requires_grad
    return Cast.apply(weight, cast) if trained else cast.detach()


def same_place(tensor: Tensor, other: Tensor) -> bool:
    """Returns True if two tensors consist of the same elements in memory."""
    return (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()) == (
        other.data_ptr(), other.dtype, other.shape, other.stride()
    )  # fmt: skip


def hides_stand_ins(inputs: Any) -> bool:
    """Returns True if torch may call another ``__torch_function__`` before that of a stand-in.

    This happens if a function mode is active, or if an input has a class with its own ``__torch_function__``, for example a
    jagged nested tensor. The mode or the class could read a stand-in, which has no memory.
    """
    if count_function_modes():
        return True
    if type(inputs) is tuple and all(type(each) is Tensor for each in inputs):
        return False  # nearly always, and faster than to flatten the inputs
    return any(
        isinstance(leaf, Tensor) and getattr(type(leaf).__torch_function__, "__func__", None) not in _NO_HANDLERS
        for leaf in tree_leaves(inputs)
        if type(leaf) is not Tensor
    )


# The __torch_function__ of a class without one of its own, and that of a class that has disabled it, as nn.Parameter has.
_NO_HANDLERS = (Tensor.__torch_function__.__func__, None)  # type: ignore[attr-defined]


def _grad_by_edges(outputs: Any, inputs: Any, *args: Any, materialize_grads: bool = False, **kwargs: Any) -> Any:
    """Calls ``torch.autograd.grad`` with the graph edges of its inputs, so that no layer is fetched for them.

    The call must not run in :data:`Untouched`, because user code that runs in backward (a checkpoint's recompute) needs
    ``__torch_function__``.
    """
    if isinstance(inputs, dict):  # torch 2.14
        values = list(inputs.values())
        found = _grad_by_edges(outputs, values, *args, materialize_grads=materialize_grads, **kwargs)
        return dict(zip(inputs, found, strict=True))
    inputs = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    edges = [present_edge(tensor) if isinstance(tensor, DeviceParameter) else tensor for tensor in inputs]
    if not materialize_grads:
        return torch.autograd.grad(outputs, edges, *args, **kwargs)
    # torch refuses `materialize_grads` for edges, so the zeros are made here.
    gradients = torch.autograd.grad(outputs, edges, *args, **{**kwargs, "allow_unused": True})
    return tuple(
        torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device) if gradient is None else gradient
        for gradient, tensor in zip(gradients, inputs, strict=True)
    )


def present_edge(parameter: DeviceParameter) -> GradientEdge:
    """Returns :func:`gradient_edge`, after copying ``requires_grad`` from the host parameter, which the user may have changed."""
    parameter._of.sync_requires_grad()
    return gradient_edge(parameter)


def _alias(parameter: DeviceParameter) -> Tensor:
    """Returns a plain tensor over a weight's memory. A graph that keeps the tensor keeps the memory, which is then not reused.

    For a trained weight with gradients enabled, the tensor is connected to the parameter in the graph.
    """
    with Untouched(), no_dispatch_modes():
        wanted = torch.is_grad_enabled() and tensor_requires_grad.__get__(parameter)
        return parameter.view_as(parameter) if wanted else parameter.detach()


def _hooks_for_leaves(engine: Any) -> AbstractContextManager[None] | None:
    """Returns a context in which a function may get device parameters themselves; None if aliases have the same results.

    Autocast's cache keeps only casts of leaves, and the gradients of all uses of such a cast are added in the lower precision.
    An alias is not a leaf, so each use would have a cast of its own. In the context, aliases are saved in place of parameters.
    """
    kind = engine.device.device.type
    if not (torch.is_autocast_enabled(kind) and torch.is_autocast_cache_enabled()) or transforms_active():
        return None
    if (outer := top_saved_tensors_hooks()) is None:
        hooks: AbstractContextManager[None] = engine.hooks()
        return hooks

    def pack(tensor: Tensor) -> Any:
        return outer[0](_alias(tensor) if isinstance(tensor, DeviceParameter) else tensor)

    return saved_tensors_hooks(pack, outer[1])


def gradient_edge(parameter: DeviceParameter) -> GradientEdge:
    """Returns the graph edge of a device parameter without fetching its layer."""
    with Untouched(), no_inference_mode(), torch.enable_grad():
        return get_gradient_edge(parameter)
