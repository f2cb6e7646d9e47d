"""Swaps the parameters of modules: host parameters between steps, device parameters while a step runs.

User code may have captured host parameters: in a list in ``__init__`` (gradnorm-pytorch), in another object, in an optimizer's
groups (schedule-free optimizers write theirs). The graph of a step has device parameters as its leaves. A captured host parameter
would be another leaf: ``torch.autograd.grad`` would not find it in the graph, and its gradients would be added in another order.
So host parameters have a role while a step runs (:class:`_HostParameterInStep`). An operation that is given a host parameter
computes

- with the device parameter, if the operation builds a graph, if another argument is on the device, or if the step's own thread
  calls it while modules hold device parameters;
- with the host's memory otherwise: for example beside tensors on the host, and in backward. ``.grad`` is always the host
  parameter's, because gradients are on the host between backward and the optimizer's step.

``.data`` and ``.detach()`` give out the device's memory, and ``.device`` says so: what user code makes there can be combined with
it. User code may write the memory between two uses of the layer, and views of a slot are compared before each fetch.

Between two steps without backward, host parameters may keep this role (:meth:`ParameterSwap.watch_between`). Hooks run there, and
may write weights through ``.data``, which changes no version counter. So a layer is uploaded again if an operation could have
written one of its parameters, or given out their memory, or if user code still holds such memory (``HostBlock.is_viewed``).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass, Tensor, nn
from torch.autograd.graph import GradientEdge
from torch.compiler import is_compiling
from torch.jit import ScriptModule

from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.own_threads import ONLY_READS, OwnThreads
from sp_lightning.core.model.found import Place
from sp_lightning.core.model.wrapped import OffloadedWrapper, parts
from sp_lightning.core.torch_compat.metadata import METADATA, PLACE
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.private import compiled_call, is_view, tree_leaves, tree_map_only
from sp_lightning.core.weights.buffers import AveragesOnDevice, PrunedWeights
from sp_lightning.core.weights.device_parameter import DeviceParameter, Untouched, hides_stand_ins, present_edge
from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.core.weights.residents import Residents
from sp_lightning.core.weights.roles import (
    OF_THE_PARAMETER,
    ParameterRole,
    leave_all,
    left,
    looked_at,
    take_all,
    writes_in_place,
)

_Exchange = tuple[nn.Module, bool, str, Any, Any]
"""A module, True if its ``__setattr__`` is to be called, the attribute's name, the host parameter, the device parameter."""


class ParameterSwap:
    """Swaps all streamed and resident parameters of a module, and averages and masks. The caller holds the engine's lock.

    Args:
        module: the root.
        places: the places of each parameter in the module tree. A shared parameter has several.
        layers: the layers, whose host and device parameters are in the same order.
        wrapped: the stand-in of each wrapped parameter, which modules hold in place of the parameter.
        residents: the residents, whose copy is current whenever modules hold device parameters.
        pruned: the masks of pruned weights, which are on the device only within a step.
        averages: the buffers that are on the device from their first use in a step until its end.
        threads: the threads of the run. Every other thread always finds host parameters in modules.

    Attributes:
        between: True from :meth:`watch_between` until the next step or module call.
        touched: the layers whose host weights user code may have written without a change of a version, since the last
            :meth:`take_touched`. With the masters of each layer.
    """

    def __init__(
        self,
        module: nn.Module,
        places: dict[nn.Parameter, tuple[Place, ...]],
        layers: Sequence[StreamedLayer],
        wrapped: Mapping[nn.Parameter, Any],
        residents: Residents,
        pruned: PrunedWeights,
        averages: Sequence[AveragesOnDevice],
        threads: OwnThreads,
    ) -> None:
        self.threads = threads
        self._residents = residents
        self._pruned = pruned
        self._averages = averages
        self.between = False
        self.touched: set[StreamedLayer] = set()
        self._layers = layers
        # The parts of wrapped parameters are plain tensors, so operations on them are not noticed.
        self._unnoticed = {
            layer for layer in layers if not all(isinstance(p, nn.Parameter) for p in layer.block.parameters)
        }
        self.blocks = [layer.block for layer in layers]
        self._module = module
        # Without ScriptModules, which are on the device as a whole. Their dictionaries are wrappers, which cannot be compared.
        self._modules = [each for each in module.modules() if not isinstance(each, ScriptModule)]
        plain = [pair for layer in layers for pair in zip(layer.block.parameters, layer.parameters.all, strict=True)]
        # For each place of a parameter in the module tree, the exchange of host and device parameter. nn.RNNBase keeps a list of
        # its weights, which only its __setattr__ updates.
        pairs = [
            ((place[0], isinstance(place[0], nn.RNNBase), place[1]), *pair)
            for pair in (*plain, *wrapped.items())
            for place in places.get(pair[0], ())
        ]
        self._pairs: list[_Exchange] = [(*place, host, device) for place, host, device in pairs]
        # Without the parts of wrapped parameters, which are plain tensors.
        of = {id(host): device for host, device in plain if isinstance(host, nn.Parameter)}
        # The host parameters that user code may have captured: they get the role while a step runs.
        self._captured = [device.host for device in of.values()]
        self._role: type[_HostParameterInStep] = type(
            "HostParameterInStep", (_HostParameterInStep,), {"device_of": of, "swap": self}
        )
        self._wrapped = list(wrapped)
        # For changed(), which is called before each batch: comparing these lists runs hardly any Python code.
        self._children = [
            (each, dict(each._modules), len(each._parameters), compiled_call(each)) for each in self._modules
        ]
        named = [(each, name, p) for each in self._modules for name, p in each._parameters.items()]
        self._named = [(each, name, p, p.dtype, p.shape, p.stride()) for each, name, p in named if p is not None]
        self._missing = [
            (each, name) for each, name, p in named if p is None
        ]  # for example, `bias` of a layer without one
        self._parts = self._parts_of_wrapped()
        for each in {place[0] for place, *_ in pairs}:
            vars(each)["_parameters"] = ByThread(each._parameters, threads)
        self.on_device = False
        """True if the modules hold device parameters now."""

    def to_device(self) -> None:
        """Puts device parameters into the modules, which hold host parameters, and masks on the device.

        Uses of residents are not noticed from then on.
        """
        self._residents.group.notice_uses(False)
        self.between = False
        self.on_device = True  # set first, so that `to_host` undoes a call that was interrupted
        _swap(self._pairs, to_device=True)
        self._pruned.hold_device()

    def to_host(self) -> None:
        """Puts host parameters into the modules, and averages and masks on the host.

        Also removes the role of captured parameters, and notices each use of residents from then on.
        """
        if not self.on_device:
            return
        self._residents.group.notice_uses(True)
        self._pruned.hold_host()
        for average in self._averages:
            average.send_back()
        self.watch_captured(False)
        _swap(self._pairs, to_device=False)
        for module in self._modules:  # user code may have put device parameters in other places (b.weight = a.weight)
            parameters: dict[str, Any] = module._parameters
            for attribute, parameter in dict.items(parameters) if parameters else ():
                kind = type(parameter)
                # isinstance is slow: the metaclass of Parameter checks in Python.
                if kind is not nn.Parameter and issubclass(kind, (DeviceParameter, OffloadedWrapper)):
                    parameters[attribute] = parameter.host
        self.on_device = False  # set last: after an interrupt in this call, the next call does all of it again

    def watch_captured(self, watch: bool, besides: Iterable[StreamedLayer] = ()) -> None:
        """Adds the role that host parameters have in a step, or removes it.

        Args:
            watch: True to add the role. Without the role each use is an ordinary one: by an optimizer, or between steps.
            besides: layers whose host parameters get the role in any case.
        """
        self.between = False
        if watch:
            take_all(self._captured, self._role)
        else:
            leave_all(self._captured, self._role)
        for layer in besides:
            take_all([p for p in layer.block.parameters if isinstance(p, nn.Parameter)], self._role)

    def watch_between(self) -> None:
        """Notices uses of host parameters between two steps, so that only layers that user code may have written are uploaded.

        Layers count as :attr:`touched` at once if user code can write them unnoticed: it holds memory of a weight on the host or
        on the device, or a weight is wrapped.
        """
        self.watch_captured(True)
        self.between = True
        unseen = [
            each
            for each in self._layers
            if each.views or each.parameters.written() or each in self._unnoticed or each.block.is_viewed
        ]
        self.touch(self.take_touched().union(unseen))

    def touch(self, layers: Iterable[StreamedLayer]) -> None:
        """Adds layers to :attr:`touched`, and waits for transfers that read them, because user code may write them next.

        In the run's own thread, their host parameters lose the role: later uses of them are ordinary ones.
        """
        for layer in {member for each in layers for member in each.owner.with_masters} - self.touched:
            self.touched.add(layer)
            layer.parameters.engine.device.synchronize(layer.transfer, Wait.UPDATE_AFTER_FETCH)
            if self.threads.own:
                leave_all(layer.block.parameters, self._role)

    def take_touched(self) -> set[StreamedLayer]:
        """Returns :attr:`touched`, which is empty from then on."""
        touched, self.touched = self.touched, set()
        return touched

    def in_graph(self, edge: GradientEdge) -> GradientEdge:
        """Returns the edge of a device parameter in place of that of its host parameter, while captured parameters have the role.

        User code has taken the edge before the step, and gives it to ``backward`` or ``torch.autograd.grad``: see `_OF_GRAPHS`.
        """
        host = getattr(edge.node, "variable", None)
        if host is None or self.between or not issubclass(type(host), self._role) or not self.threads.own:
            return edge
        return present_edge(self._role.device_of[id(host)])

    @property
    def captured_used(self) -> bool:
        """True if user code has computed with a host parameter in any step of the run so far."""
        return self._role.used

    def changed(self) -> bool:
        """Returns True if modules or parameters were replaced or renamed, or a parameter has another dtype, shape or strides.

        Also True if a module was compiled, because its graph needs other casts.
        """
        # Updates may be under way. The code below reads neither weights nor gradients, so it need not wait for the updates.
        with DisableTorchFunctionSubclass():
            for module, children, count, compiled in self._children:
                if module._modules != children or len(module._parameters) != count:
                    return True
                if compiled_call(module) is not compiled:
                    return True
            for module, name, p, dtype, shape, stride in self._named:
                if module._parameters.get(name) is not p or p.dtype is not dtype or p.shape != shape:
                    return True
                if p.stride() != stride:
                    return True
            missing = any(module._parameters.get(name, self) is not None for module, name in self._missing)
            return missing or self._parts_of_wrapped() != self._parts

    def close(self) -> None:
        """Drops the device parameters, and gives the modules plain dictionaries again. Averages stay on the host for good."""
        for module in self._modules:
            if type(module._parameters) is ByThread:
                vars(module)["_parameters"] = dict(dict.items(module._parameters))
        self._pairs.clear()
        for average in self._averages:
            average.close()

    def _parts_of_wrapped(self) -> list[object]:
        return [(p.requires_grad, *(id(part) for _, part in parts("", p))) for p in self._wrapped]


def _swap(exchanges: Iterable[_Exchange], *, to_device: bool) -> None:
    """Puts device parameters in place of their host parameters, or back.

    If user code has set an attribute to another object since the last swap, this attribute is not changed.
    """
    for module, keeps_list, attribute, host, device in exchanges:
        old, new = (host, device) if to_device else (device, host)
        parameters = module._parameters
        if dict.get(parameters, attribute) is old:
            parameters[attribute] = new
            if keeps_list:
                setattr(module, attribute, new)


class ByThread(dict[str, Any]):
    """A module's ``_parameters`` while a run lasts. A thread outside the run always finds host parameters in it.

    Otherwise that thread could find a device parameter, which changes its memory and its class at any time. A copy is an ordinary
    dictionary.

    Args:
        parameters: the parameters of the module.
        threads: the threads that belong to the run.
    """

    __slots__ = ("_threads",)

    def __init__(self, parameters: Mapping[str, Any], threads: OwnThreads) -> None:
        super().__init__(parameters)
        self._threads = threads

    def _seen(self, found: Any) -> Any:
        """Returns the parameter that the present thread finds in place of a stored one."""
        kind = type(found)
        if kind is nn.Parameter or not issubclass(kind, (DeviceParameter, OffloadedWrapper)) or self._threads.own:
            return found
        return found.host

    # torch.compile traces these methods in the run's thread, but cannot trace the test of the thread.

    def __getitem__(self, name: str) -> Any:
        found = dict.__getitem__(self, name)
        return found if is_compiling() or get_ident() == self._threads.main else self._seen(found)

    def get(self, name: str, default: Any = None) -> Any:
        found = dict.get(self, name, default)
        return found if is_compiling() or get_ident() == self._threads.main else self._seen(found)

    def items(self) -> Any:
        direct = is_compiling() or get_ident() == self._threads.main
        return dict.items(self) if direct else self.copy().items()

    def values(self) -> Any:
        direct = is_compiling() or get_ident() == self._threads.main
        return dict.values(self) if direct else self.copy().values()

    def copy(self) -> dict[str, Any]:
        return {name: self._seen(found) for name, found in dict.items(self)}

    def __copy__(self) -> dict[str, Any]:
        return self.copy()

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        copied = memo[id(self)] = copy.deepcopy(self.copy(), memo)
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        return dict, (self.copy(),)


class _HostParameterInStep(ParameterRole):
    """The role of a host parameter while a step runs. Each run has a subclass of its own.

    Attributes:
        device_of: the device parameters of the run, by the id of their host parameter.
        swap: the swap of the run.
        used: True if user code has computed with a host parameter in any step of the run so far.
    """

    rank = 1
    device_of: dict[int, DeviceParameter]
    swap: ParameterSwap
    used = False

    @classmethod
    def is_foreign(cls) -> bool:
        return not cls.swap.threads.own

    @classmethod
    @never_compiled
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Calls a function that was given a host parameter while a step runs. There are four cases:

        - Another thread calls it: see :func:`_call_in_other_thread`.
        - It reads or sets an attribute of the parameter (``.grad``, ``.data``, hooks): it gets the host parameter.
        - It computes on the device (:func:`_computes_on_device`): it gets device parameters.
        - It computes on the host: it gets host parameters, which have all writes of the device then.
        """
        kwargs = kwargs or {}
        # Another thread may remove the role from a parameter at any time, so the parameter's class is not read again.
        role = next(each for each in cls.roles if issubclass(each, _HostParameterInStep))
        of = role.device_of
        if role.swap.between:
            return _call_between_steps(role, func, args, kwargs)
        if not role.swap.threads.own:
            return _call_in_other_thread(role, func, args, kwargs)
        if func in OF_THE_PARAMETER:
            if func in PLACE and role.gives_device_memory():
                with Untouched():
                    return func(of[id(args[0])])
            if func == _GET_DATA:
                role.used = True
                device = of[id(args[0])]
                if role.gives_device_memory():
                    return device.data
                device._of.engine.host_is_shown(device._of.layer)
            if func not in _OF_NO_MEMORY:
                role.swap.touched.update(of[id(args[0])]._of.layer.owner.with_masters)
            # The gradient of a host parameter must be on the host.
            if func == _SET_GRADIENT and args[1] is not None and id(args[0]) in of:
                args = args[0], of[id(args[0])]._of.engine.device.on_host(args[1])
            with Untouched():
                return func(*args, **kwargs)
        leaves = tree_leaves((args, kwargs))
        hosts = [leaf for leaf in leaves if id(leaf) in of]
        others = [leaf for leaf in leaves if isinstance(leaf, Tensor) and id(leaf) not in of]
        role.used = True
        groups = {of[id(host)]._of for host in hosts}
        if _computes_on_device(func, hosts, others, role):
            for group in groups:
                group.engine.device_is_used(group.layer)
            args, kwargs = tree_map_only(Tensor, lambda each: of.get(id(each), each), (args, kwargs))
            if func == _SET_DATA:  # through the property of DeviceParameter, which torch's own setter would bypass
                args[0].data = args[1]
                return None
            return func(*args, **kwargs)
        # `host_is_used` copies writes of the device to the host, and waits for transfers that read the host weights.
        for group in groups:
            group.engine.host_is_used(group.layer)
        # If another argument has its own `__torch_function__`, or a function mode is active, that code still has to run. So only
        # this role is removed meanwhile, and not all subclasses are disabled. If an update of the parameters is under way, the
        # role that waits for the update has run before, because its rank is lower.
        with left(hosts, [role]) if hides_stand_ins(others) else Untouched():
            output = func(*args, **kwargs)
        viewed = func in _DETACH or (type(output) is Tensor and is_view(output))
        for group in groups:
            if viewed:
                role.swap.touched.update(group.layer.owner.with_masters)
            group.engine.host_was_used(group.layer, viewed=viewed)
        return output

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Runs ``Tensor.set_``, for which torch does not call ``__torch_function__`` itself."""
        return type(self).__torch_function__(Tensor.set_, (type(self),), (self, *args), kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if type(self).gives_device_memory():  # with the present values, which the host may not have
            return copy.deepcopy(type(self).device_of[id(self)], memo)
        return super().__deepcopy__(memo)

    def described(self) -> str:
        return repr(_name_of(type(self), self))

    @classmethod
    def gives_device_memory(cls) -> bool:
        """Returns True if ``.data`` and ``.detach()`` give this thread the device's memory of a weight."""
        return cls.swap.on_device and get_ident() == cls.swap.threads.main

    @classmethod
    def in_use(cls, hosts: Iterable[Tensor]) -> bool:
        """Returns True if the layers of all these parameters are in use on the device, or viewed there.

        The device then has the present values. False in other threads, which read the host's memory.
        """
        if not cls.swap.on_device or get_ident() != cls.swap.threads.main:
            return False
        return all(_is_in_use(cls.device_of[id(host)]._of.layer.owner) for host in hosts)


def _is_in_use(layer: StreamedLayer) -> bool:
    """Returns True if a layer is in use on the device, or its slot is viewed. Residents are in use while any module call runs."""
    if layer.kind is Kind.RESIDENTS:
        return bool(layer.parameters.engine.calls.depth)
    return layer.state.attached or (layer.slot is not None and layer.slot.viewed)


def _call_between_steps(
    role: type[_HostParameterInStep], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls a function that was given a host parameter between two steps. The function gets the host parameters.

    Unless the function certainly neither writes them nor gives out their memory, their layers are touched.
    """
    swap, of = role.swap, role.device_of
    leaves = tree_leaves((args, kwargs))
    others = [leaf for leaf in leaves if id(leaf) not in of]
    hosts = [leaf for leaf in leaves if id(leaf) in of]
    touches = not _keeps_values(func, kwargs)
    if touches:
        swap.touch(of[id(host)]._of.layer for host in hosts)
    if func in METADATA or (not swap.threads.own and not hides_stand_ins(others)):
        with Untouched():
            return func(*args, **kwargs)
    if not swap.threads.own:
        return looked_at(func, args, kwargs, lambda _, seen: seen)
    with nullcontext() if touches else left(hosts, [role]):  # other roles and classes still run their code
        return func(*args, **kwargs)


def _keeps_values(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns True if a function certainly neither writes a parameter nor gives out its memory."""
    return func in _OF_NO_MEMORY or (func in _READS and "out" not in kwargs)


def _call_in_other_thread(
    role: type[_HostParameterInStep], func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
) -> Any:
    """Calls a function to which a thread outside the run gives host parameters.

    The function gets the host's memory or, for weights with newer values on the device, copies of these. A backward through its
    result raises an error.

    Raises:
        RuntimeError: the function writes a host parameter, or asks for its gradient.
    """
    of = role.device_of
    hosts = [leaf for leaf in tree_leaves((args, kwargs)) if id(leaf) in of]
    if func == _SET_DATA or (func not in OF_THE_PARAMETER and writes_in_place(func, kwargs)):
        for host in tree_leaves((args[:1] or kwargs, kwargs.get("out"))):
            if id(host) in of:
                raise RuntimeError(ONLY_READS.format(what=f"{_name_of(role, host)!r} was to be written"))
    if func in _OF_GRAPHS:
        raise RuntimeError(ONLY_READS.format(what=f"The gradient of {_name_of(role, hosts[0])!r} was asked for"))
    if not _keeps_values(func, kwargs):
        role.swap.touched.update(member for host in hosts for member in of[id(host)]._of.layer.owner.with_masters)
    if func in OF_THE_PARAMETER:
        with Untouched():
            found = func(*args, **kwargs)
        return _seen_by_other_thread(role, args[0], found) if func == _GET_DATA else found
    builds_graph = torch.is_grad_enabled() and func not in _DETACH

    def seen(host: Tensor, memory: Tensor) -> Tensor:
        if id(host) not in of:
            return memory
        memory = _seen_by_other_thread(role, host, memory)
        if builds_graph and of[id(host)].requires_grad:
            memory = memory.clone() if memory.is_inference() else memory
            memory.requires_grad_().register_hook(partial(_refuse_gradient, _name_of(role, host)))
        return memory

    return looked_at(func, args, kwargs, seen)


def _name_of(role: type[_HostParameterInStep], host: Tensor) -> str:
    device = role.device_of[id(host)]
    name: str = device._of.spans[device._index].name
    return name


def _refuse_gradient(name: str, gradient: Tensor) -> None:
    """Hook of a weight that a thread outside the run has read: its gradient would be lost."""
    raise RuntimeError(ONLY_READS.format(what=f"Backward reached what was computed with {name!r}"))


def _seen_by_other_thread(role: type[_HostParameterInStep], host: Tensor, seen: Tensor) -> Tensor:
    """Returns the memory of a host parameter, or a copy of newer values on the device, for a thread outside the run."""
    group = role.device_of[id(host)]._of
    copied: Tensor | None = group.engine.copied(group.layer, role.device_of[id(host)]._index)
    return seen if copied is None else copied


def _computes_on_device(
    func: Callable[..., Any], hosts: Sequence[Tensor], others: Sequence[Tensor], role: type[_HostParameterInStep]
) -> bool:
    """Returns True if a function is to get device parameters.

    This is the case if it builds a graph, if another argument is on the device, or if no other argument is on the host while
    ``.data`` is the device's memory.

    Args:
        func: the function.
        hosts: the host parameters among its arguments.
        others: the other tensors among its arguments.
        role: the role of the run's host parameters.
    """
    device = next(iter(role.device_of.values()))._of.engine.device
    if func == _SET_DATA:
        return len(others) == 1 and role.in_use(hosts) and (device.computes_on_host or device.has(others[0]))
    if func in _OF_GRAPHS or any(issubclass(type(other), DeviceParameter) for other in others):
        return True
    if func in _DETACH:  # user code may write the result, so the run's thread gets the memory with the present values
        return role.gives_device_memory()
    others = [other for other in others if other.ndim]  # a scalar tensor may be on another device than the weight
    if any(map(device.has, others)):
        return True
    if others and not device.computes_on_host:  # all other arguments are on the host
        return False
    return torch.is_grad_enabled() or role.gives_device_memory()


_OF_GRAPHS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
"""Functions that look for parameters in a graph."""

# Each access to such a method makes a new object, so they are compared with `==`.
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_SET_GRADIENT = Tensor.grad.__set__  # type: ignore[union-attr]

_DETACH = {Tensor.detach, torch.detach}

_OF_NO_MEMORY = OF_THE_PARAMETER - {
    _GET_DATA, Tensor.data_ptr, Tensor.untyped_storage, Tensor.share_memory_
}  # fmt: skip
"""The functions of :data:`OF_THE_PARAMETER` that give out no memory of the parameter's values."""

_READS = {
    getattr(owner, name) for owner in (Tensor, torch, torch.linalg) for name in (
        "abs", "all", "allclose", "amax", "amin", "any", "clone", "count_nonzero", "equal", "isfinite", "isinf", "isnan", "max",
        "mean", "median", "min", "norm", "pow", "square", "std", "sum", "var", "vector_norm", "histc", "item",
    ) if hasattr(owner, name)
}  # fmt: skip
"""Functions that read values, write no argument but ``out``, and return new memory."""
