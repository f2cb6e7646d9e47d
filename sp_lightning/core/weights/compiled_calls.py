"""Compiled modules (``torch.compile``): their graphs compute with 16-bit casts, so float32 masters stay on the host.

While a compiled module is called, the stand-ins of its masters have the class :class:`CompiledStandIn`. ``torch.compile`` traces
its ``__torch_function__``: a linear layer or a convolution gets the cast, which is an input of the graph in place of the weight.
So there is one graph for all equal blocks, as without streaming: a graph takes tensors in any memory, and contains no slots.

Note: masters in graphs. Some graphs need the masters themselves. With casts, their results would differ from plain Lightning's:

- a function other than those of ``LOWERED_FUNCTIONS`` reads a weight, or autocast is off where the weight is used;
- the graph uses a trained weight twice. Plain autograd adds the two gradients in float32. The graph would add them in 16 bits.

These cases are detected while ``torch.compile`` traces. The masters are then uploaded, and the trace begins again with ordinary
parameters. From then on, masters are uploaded for each call of a module of the same class: other modules may use the same graph,
which is not traced again. The class is remembered as long as the process lives, because graphs live as long. Modules that
were called earlier in the same step keep their casts until the step ends: a forward that runs again in backward (a checkpoint)
must find the graph that it has used before.

A wrapped parameter, for example with 8 bits, is whole during the call, because a graph takes its parts as inputs.

Only matrices and kernels of convolutions have casts in compiled modules. A bias is cast inside the graph, where the compiler may
leave out the rounding if it fuses the cast with the addition. So biases are uploaded in float32.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

from sp_lightning.core.model.found import Place
from sp_lightning.core.model.wrapped import OffloadedWrapper
from sp_lightning.core.torch_compat.around_calls import release, surround
from sp_lightning.core.torch_compat.metadata import METADATA
from sp_lightning.core.torch_compat.modes import never_compiled
from sp_lightning.core.torch_compat.private import (
    DYNAMO_MARKS,
    comptime,
    is_compiled,
    is_traceable_wrapper_subclass,
    original_module,
    restart_trace,
    take_for_parameter,
    trace_of,
    trace_only_inlined,
    traced_tensor,
)
from sp_lightning.core.weights.casts import LOWERED_FUNCTIONS, autocast_would_cast
from sp_lightning.core.weights.device_parameter import (
    DeviceParameter,
    OffloadedParameter,
    StandIn,
    Untouched,
    for_one_use,
    set_class,
)
from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.core.weights.parameter_group import ParameterGroup


class _CastOfRun:
    """The attribute with a stand-in's cast. With gradients, each access returns a new tensor with its own autograd node.

    A graph takes the attribute as an input, so the attribute is read each time a graph runs. Plain autograd adds the gradients
    of two uses in float32. If both uses had one node, autograd would add the gradients in 16 bits.
    """

    @never_compiled
    def __get__(self, weight: Any, owner: type) -> Any:
        if weight is None:
            return self
        return for_one_use(weight, weight._bound_cast)


class CompiledStandIn(OffloadedParameter):
    """A stand-in during a call of a compiled module.

    ``torch.compile`` traces no attribute of a class with ``__getattr__``, so this class has none, unlike :class:`StandIn`. The
    user's attributes are copied to the object for the call.

    Attributes:
        _cast: the cast. Autograd passes its gradient on to the parameter, as with autocast's own cast.
        _bound_cast: the cast in the slot.
    """

    _cast = _CastOfRun()
    _bound_cast: Tensor

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if is_dynamo_compiling():
            return _traced(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs)


@trace_only_inlined
def _traced(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a function of stand-ins while ``torch.compile`` traces it: a linear layer or a convolution gets the casts."""
    if func in LOWERED_FUNCTIONS:
        return func(*[_traced_cast(each) for each in args], **{key: _traced_cast(kwargs[key]) for key in kwargs})
    if func not in METADATA:
        comptime(_reads_masters)
    with Untouched():
        return func(*args, **kwargs)


@trace_only_inlined
def _traced_cast(argument: Any) -> Any:
    """Returns the cast if the argument is a stand-in; otherwise the argument."""
    if isinstance(argument, CompiledStandIn):
        comptime(_uses_cast)
        return argument._cast
    return argument


def _uses_cast(context: Any) -> None:
    """Runs while ``torch.compile`` traces the use of a cast. If results would differ from plain Lightning's, uploads the masters.

    Records each trained weight of a trace, to detect a second use.
    """
    weight: Any = traced_tensor(context, "argument")
    group: ParameterGroup = weight._of
    if group.autocast is None or not autocast_would_cast(group.autocast, group.device):
        _running.call.upload_masters("autocast is off")
    if weight.requires_grad and torch.is_grad_enabled():
        if _running.trace() is not (trace := trace_of(context)):
            _running.trace, _running.used = ref(trace), set()
        if id(weight) in _running.used:
            _running.call.upload_masters("a trained weight is used twice in one graph")
        _running.used.add(id(weight))


def _reads_masters(context: Any) -> None:
    """Runs while ``torch.compile`` traces a function that needs masters, and uploads them."""
    _running.call.upload_masters("another function than a linear layer or a convolution reads a weight")


_OWN = frozenset({"_of", "_index"})
"""The attributes that a stand-in has outside of calls of compiled modules."""
_reading_masters: WeakSet[type[nn.Module]] = WeakSet()
"""The classes of compiled modules that have a graph which needs masters. A graph lives as long as the process does."""


class _Running(threading.local):
    """The compiled modules that run in this thread.

    Attributes:
        call: the innermost running call.
        trace: a weak reference to the latest trace of ``torch.compile``.
        used: the ids of the trained weights whose casts that trace has used.
    """

    call: Any = None

    def __init__(self) -> None:
        self.trace: Callable[[], Any] = lambda: None
        self.used: set[int] = set()


_running = _Running()


class CompiledCalls:
    """Gives a compiled module casts and whole wrapped parameters during its calls.

    Args:
        name: the module's name, for a warning.
        module: the module.
        weights: the stand-ins of the module's masters, and their names in the module.
        wrapped: the places of the module's wrapped parameters.

    Attributes:
        masters: for each group, True if calls in this step get masters instead of casts. The first call in a step decides it.
    """

    def __init__(
        self, name: str, module: nn.Module, weights: Mapping[DeviceParameter, str], wrapped: Sequence[Place]
    ) -> None:
        self.name = name
        self.names = weights
        self.wrapped = wrapped
        self.kind = type(original_module(module))
        self.module = module
        self.masters: dict[ParameterGroup, bool] = {}
        surround(module, self)

    def remove(self) -> None:
        """Stops giving casts and whole parameters to calls of the module."""
        release(self.module, self)

    @trace_only_inlined
    def __call__(self, call: Any, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        running = self._begin()
        try:
            return call(module, *args, **kwargs)
        finally:
            self._end(running)

    @never_compiled
    def _begin(self) -> _BoundCall:
        return _BoundCall(self, _running.call)

    @never_compiled
    def _end(self, running: _BoundCall) -> None:
        running.end()


class _BoundCall:
    """A running call of a compiled module: binds casts to its stand-ins, or attaches its masters, until :meth:`end`.

    Args:
        compiled: the module.
        outer: the running call of a compiled module around this call; None if there is none.
    """

    def __init__(self, compiled: CompiledCalls, outer: _BoundCall | None) -> None:
        self._compiled = compiled
        self._outer = outer
        self._is_first = not compiled.masters
        self._uploads = ExitStack()
        _running.call = self
        try:
            for group in {weight._of: None for weight in compiled.names}:
                self._bind(group)
            for place in compiled.wrapped:
                self._put_whole(place)
        except BaseException:
            self.end()
            raise

    def _bind(self, group: ParameterGroup) -> None:
        """Binds casts to the stand-ins of a group. Attaches the masters if that is impossible."""
        attached, compiled = group.layer.state.attached, self._compiled
        masters = compiled.masters.setdefault(group, attached or compiled.kind in _reading_masters)
        if attached:  # the masters are on the device, so the graph takes them
            return
        able = group.autocast is not None and autocast_would_cast(group.autocast, group.device)
        if masters or group.casts is None or not able:
            self._attach_masters(group)
            return
        for weight in self._compiled.names:
            if weight._of is group:
                host = group.hosts[weight._index]
                vars(weight)["_bound_cast"] = group.casts[weight._index]
                # The attributes that user code has given the host's parameter, without dynamo's marks. The stand-in's own
                # attributes take precedence.
                users = {key: value for key, value in vars(host).items() if not key.startswith(DYNAMO_MARKS)}
                vars(weight).update({**users, **vars(weight)})
                set_class(weight, CompiledStandIn)

    def _put_whole(self, place: Place) -> None:
        """Puts a whole wrapped parameter in the place of its stand-in until the call ends, because graphs take its parts."""
        parameters: dict[str, Any] = place.module._parameters
        stand_in: Any = parameters[place.attribute]
        if isinstance(stand_in, OffloadedWrapper):
            whole = stand_in.whole(None)
            take_for_parameter(whole)
            parameters[place.attribute] = whole
            self._uploads.callback(parameters.__setitem__, place.attribute, stand_in)

    def _attach_masters(self, group: ParameterGroup) -> None:
        self._uploads.enter_context(group.engine.operation_on([group.all[0]]))

    def upload_masters(self, why: str) -> None:
        """Attaches the masters, and begins the running trace again, which then finds ordinary parameters.

        Warns of this, and remembers the module's class: later calls attach masters at once. Does not return, because an exception
        restarts the trace.
        """
        compiled = self._compiled
        _reading_masters.add(compiled.kind)
        warnings.warn(
            f"The compiled module {compiled.name!r} needs weights in float32: {why}. So Superpipeline uploads the weights of all "
            f"compiled modules of class {compiled.kind.__name__} in float32 as well, three times the bytes. Compile a part "
            "without that weight: module.part.compile().",
            stacklevel=2,
        )
        self._unbind()
        for group in {weight._of: None for weight in compiled.names}:
            self._attach_masters(group)
            compiled.masters[group] = self._is_first
        restart_trace(why)

    def _unbind(self) -> None:
        """Removes casts and the user's attributes from the stand-ins, and gives them their ordinary class again."""
        for weight in self._compiled.names:
            for key in [key for key in vars(weight) if key not in _OWN and not key.startswith(DYNAMO_MARKS)]:
                del vars(weight)[key]
            if type(weight) is CompiledStandIn:
                set_class(weight, StandIn)

    def end(self) -> None:
        """Ends the call: removes the casts and whole wrapped parameters. Masters may then be evicted."""
        _running.call = self._outer
        self._unbind()
        self._uploads.close()


def compiled_calls(root: nn.Module, layers: Iterable[StreamedLayer]) -> list[CompiledCalls]:
    """Makes the :class:`CompiledCalls` of all compiled modules, which are in effect until they are removed.

    A compiled module inside another compiled module gets no object, because the outer module's object has all of its weights.
    """
    stand_ins = {
        host: weight
        for layer in layers
        if layer.kind is Kind.MASTERS
        for host, weight in zip(layer.parameters.hosts, layer.parameters.all, strict=True)
    }
    found: list[CompiledCalls] = []
    within: set[nn.Module] = set()
    for name, module in root.named_modules():
        if is_compiled(module) and module not in within:
            within.update(module.modules())
            weights = {stand_ins[host]: key for key, host in module.named_parameters() if host in stand_ins}
            wrapped = [
                Place(child, key)
                for child in module.modules()
                for key, host in child._parameters.items()
                if host is not None and is_traceable_wrapper_subclass(host)
            ]
            if weights or wrapped:
                found.append(CompiledCalls(name, module, weights, wrapped))
    return found
