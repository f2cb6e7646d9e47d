"""What a forward finds in its module, in the objects that it is given, and around it; and how that is put back."""

from __future__ import annotations

import contextvars
import operator
import random
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from torch import Tensor, nn
from torch.backends import cuda as attention

from sp_lightning.device.layout import flat_bytes
from sp_lightning.model.found import join_names
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import COMPILED_CALL, RNN_WEIGHTS, NormBase, overlaps_itself

TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.")
"""A module of these packages keeps no state in a forward but its buffers, and tensors that hooks set as attributes."""
# A tensor of at most so many bytes is kept as it was. A larger one is kept only if the forward has written it.
_SMALL = 2**20

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# Objects of these packages have no state that a forward changes, but lead to the whole run.
_OF_THE_RUN = ("lightning", "pytorch_lightning", "sp_lightning", "torch")
# Objects are looked into through so many others: a cache of keys and values has a list of objects, one for each layer, that
# have tensors.
_DEEP = 3
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
# Attributes of modules that forwards do not touch, and the lists of weights that nn.RNNBase makes anew whenever it is given
# other weights.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", COMPILED_CALL, *RNN_WEIGHTS}
# The value of a key that is not there: None would be one, and would hide an attribute of that name.
_ABSENT = object()
# The methods are those of the base classes, because a subclass may do more in its own.
_FILL: dict[type, Callable[[Any, Any], None]] = {
    OrderedDict: OrderedDict.update, dict: dict.update, list: list.extend, deque: deque.extend, set: set.update,
}  # fmt: skip
_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (attention.flash_sdp_enabled, attention.enable_flash_sdp),
    (attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
    (attention.math_sdp_enabled, attention.enable_math_sdp),
    (attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
)


class State(NamedTuple):
    """Something that a forward may read and change.

    Attributes:
        read: returns its value.
        write: gives it a value.
        before: its value before the forward.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    before: Any


class TensorCopy(NamedTuple):
    """A tensor before the forward.

    Attributes:
        tensor: the tensor itself.
        before: a copy of its value.
        version: its version, which counts in-place writes.
        kept: whether the value is kept for the second run, whatever the first run does.
        trusted: whether the version shows all writes.
    """

    tensor: Tensor
    before: Tensor
    version: int
    kept: bool
    trusted: bool

    @property
    def same_bits(self) -> bool:
        """Whether its value is what it was, bit for bit."""
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            return torch.equal(flat_bytes(self.tensor), flat_bytes(self.before))

    @property
    def state(self) -> State:
        """Its value, as a state."""
        return State(partial(_clone, self.tensor), partial(_write, self.tensor), self.before)


class WeightState(NamedTuple):
    """A weight before a forward, by its place among the device parameters.

    It does not hold the device parameter: who holds one keeps its layer on the device.

    Attributes:
        name: its name in the unit.
        group: the device parameters of its layer.
        position: its position among them.
        writes: how often it had been written.
        gradient: which gradient its host parameter had, and the version of that.
    """

    name: str
    group: Any
    position: int
    writes: int
    gradient: tuple[int, int] | None

    def is_trained(self) -> bool:
        """Whether it requires a gradient now."""
        return bool(self.group.hosts[self.position].requires_grad)

    def train(self, trained: bool) -> None:
        """Sets whether it requires a gradient."""
        if trained != self.is_trained():
            self.group.all[self.position].requires_grad = trained

    @property
    def is_written(self) -> bool:
        """Whether it has been written since, by the forward or by any other code."""
        return int(self.group.writes(self.position)) != self.writes

    @property
    def has_other_gradient(self) -> bool:
        """Whether it has been given a gradient since. That updates in the background take its gradient away does not count."""
        return _gradient(self.group.hosts[self.position]) not in (None, self.gradient)


class Snapshot:
    """The state that a forward can read or change, as it is now.

    Args:
        module: it and the modules inside it are looked at.
        given: the forward's arguments. Objects among them that are no tensors are looked at, and what they hold.

    Attributes:
        states: all that can be put back, but for tensors.
        tensors: tensors by name, each with its value.
        weights: the weights.
        held: weights and modules: the name, the dict that holds them, their key in it, and what is held.
        inputs: tensors among the arguments, with their versions.
        outside: modules with weights that it refers to, of which only their own buffers are looked at, and their names.
        context: a copy of the context variables.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        self.states: list[State] = [*_around_modules()]
        self.tensors: dict[str, TensorCopy] = {}
        self.weights: list[WeightState] = []
        self.held: list[tuple[str, dict[str, Any], str, Any]] = []
        self.outside: list[tuple[str, nn.Module]] = []
        self.inputs = [(each, each._version) for each in given if isinstance(each, Tensor) and not each.is_inference()]
        self._seen: set[int] = set()  # the dicts of modules and other containers, which the states keep alive
        self.add("", module)
        for number, value in enumerate(given):
            if not isinstance(value, Tensor):
                self._look(f"argument {number}", value, objects=_DEEP)
        pyro = sys.modules.get("pyro.poutine.runtime")
        if pyro is not None:
            # The handlers around a forward are gone in backward, and without them the forward would sample anew.
            self._look("Pyro's handlers", pyro._PYRO_STACK, objects=_DEEP)
        self.context = contextvars.copy_context()

    def add(self, name: str, module: nn.Module) -> None:
        """Looks at a module that the forward calls, and at the modules inside it; the name stands before theirs."""
        for inner, child in module.named_modules():
            self._look_at_module(join_names(name, inner), child)

    def _look_at_module(self, name: str, module: nn.Module) -> None:
        attributes, trusted = vars(module), type(module).__module__.startswith(TRUSTED)
        if id(attributes) in self._seen:
            return
        self._seen.add(id(attributes))
        self._look_at_buffers(name, module, trusted)
        if isinstance(module, torch.jit.ScriptModule):
            return
        for key, parameter in module._parameters.items():
            if is_device_parameter(parameter):
                self._look_at_weight(join_names(name, key), module._parameters, key, parameter)
            elif parameter is not None:  # functional_call puts tensors here, for example
                self.states.append(_item_state(module._parameters, key))
        self.held += [(join_names(name, key), module._modules, key, child) for key, child in module._modules.items()]
        self.states.append(_dict_state(attributes, besides=_OF_MODULES))
        for key, value in attributes.items() if not trusted else ():
            if key not in _OF_MODULES:
                self._look(join_names(name, key), value, objects=_DEEP - 1)

    def _look_at_weight(self, name: str, place: dict[str, Any], key: str, parameter: Any) -> None:
        group, index, host = parameter._of, parameter._index, host_of(parameter)
        weight = WeightState(name, group, index, group.writes(index), _gradient(host))
        self.held.append((name, place, key, host))
        self.weights.append(weight)
        self.states.append(_state(weight.is_trained, weight.train))

    def _look_at_buffers(self, name: str, module: nn.Module, trusted: bool = False) -> None:
        # These write buffers in kernels that raise no version. The dicts of a ScriptModule cannot be copied.
        uncounted = isinstance(module, (NormBase, torch.jit.ScriptModule))
        if not isinstance(module, torch.jit.ScriptModule):
            self.states.append(_dict_state(module._buffers))
        for key, buffer in module.named_buffers(recurse=False):
            self._copy(join_names(name, key), buffer, trusted=trusted, uncounted=uncounted)

    def _look(self, name: str, value: Any, *, objects: int) -> None:
        """Looks at a value that can be changed in place, and at what it holds, through so many ``objects``."""
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        if isinstance(value, Tensor):
            if value.is_leaf and not isinstance(value, nn.Parameter):
                self._copy(name, value)
        elif isinstance(value, nn.Module):
            # Outside of the tree. An attribute that has weights may lead to the whole model.
            if objects < _DEEP and any(True for _ in value.parameters()):
                self._look_at_buffers(name, value)
                self.outside.append((name, value))
            else:
                self.add(name, value)
        elif (state := _state_of(value)) is not None or isinstance(value, tuple):
            if state is not None:
                self._seen.add(id(value))
                self.states.append(state)
            for number, item in enumerate(_items(value)):
                self._look(f"{name}.{number}", item, objects=objects)
        elif objects and not isinstance(value, _CODE) and type(value).__module__.partition(".")[0] not in _OF_THE_RUN:
            self._look(name, _attributes(value), objects=objects - 1)

    def _copy(self, name: str, tensor: Tensor, *, trusted: bool = False, uncounted: bool = False) -> None:
        """Keeps a tensor's value.

        Args:
            name: its name, under which it is kept once.
            tensor: the tensor.
            trusted: whether its module is known to write it in no way that its version does not show.
            uncounted: whether kernels write it all the same.
        """
        if name not in self.tensors and _can_be_copied(tensor):
            kept = uncounted or tensor.nbytes <= _SMALL
            self.tensors[name] = TensorCopy(tensor, _clone(tensor), tensor._version, kept, trusted)


def put(states: Iterable[State], values: Iterable[Any]) -> None:
    """Gives each state a value."""
    for state, value in zip(states, values, strict=True):
        state.write(value)


def is_device_parameter(value: Any) -> bool:
    """Whether a module's parameter is the engine's."""
    return hasattr(value, "_of")


def host_of(value: Any) -> Any:
    """The host's parameter in place of a device parameter; any other value as it is."""
    return value._of.hosts[value._index] if is_device_parameter(value) else value


def _gradient(parameter: Tensor) -> tuple[int, int] | None:
    # Through __torch_function__, reading the gradient would wait for an update of it that is under way.
    with torch.DisableTorchFunctionSubclass():
        return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


# ---------------------------------------------------------------------- kinds of state


def _state(read: Callable[[], Any], write: Callable[[Any], object]) -> State:
    return State(read, write, read())


def _around_modules() -> Iterator[State]:
    """Random numbers of Python and NumPy, the kernels of attention that are enabled, the default dtype."""
    yield _state(random.getstate, random.setstate)
    yield _state(np.random.get_state, np.random.set_state)
    for enabled, enable in _KERNELS:
        yield _state(enabled, enable)
    yield _state(torch.get_default_dtype, torch.set_default_dtype)


def _state_of(value: Any) -> State | None:
    """A container, or an object that gives random numbers, as a state; None for any other object."""
    if isinstance(value, dict):
        return _dict_state(value)
    kind = next((kind for kind in _FILL if isinstance(value, kind)), None)
    if kind is not None:
        return _items_state(kind, value)
    if isinstance(value, (bytearray, array)):
        return State(lambda: value[:], partial(value.__setitem__, slice(None)), value[:])
    if isinstance(value, np.ndarray):  # what cannot be written does not change; what is on a disk is too large to copy
        fixed = isinstance(value, np.memmap) or not value.flags.writeable
        return None if fixed else _state(value.copy, partial(_write_array, value))
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):  # which has no state
        return _state(value.getstate, value.setstate)
    if isinstance(value, (torch.Generator, np.random.RandomState)):
        return _state(value.get_state, value.set_state)
    if isinstance(value, np.random.Generator):
        value = value.bit_generator
    if isinstance(value, np.random.BitGenerator):
        return _state(partial(getattr, value, "state"), partial(setattr, value, "state"))
    return None


def _write_array(into: Any, value: Any) -> None:
    if into.shape != value.shape:
        into.resize(value.shape, refcheck=False)
    into[...] = value


def _item_state(place: dict[str, Any], key: str) -> State:
    """The value of a key in a dict, which may not be there."""

    def write(value: Any) -> None:
        if value is _ABSENT:
            place.pop(key, None)
        else:
            place[key] = value

    return _state(partial(place.get, key, _ABSENT), write)


def _items_state(kind: type, container: Any) -> State:
    def write(items: Any) -> None:
        if not _same(container, items):  # a container that has not changed is left alone
            kind.clear(container)  # type: ignore[attr-defined]
            _FILL[kind](container, items)

    items = [_without_graph(item) for item in container]
    return State(partial(list, container), write, items)


def _dict_state(container: dict[Any, Any], besides: frozenset[str] = frozenset()) -> State:
    """A dict, ``besides`` some keys: what belongs to them is left alone."""

    def read() -> dict[Any, Any]:
        return {key: value for key, value in container.items() if key not in besides}

    def write(items: dict[Any, Any]) -> None:
        now = read()
        if not (_same(now, items) and _same(now.values(), items.values())):
            kind = OrderedDict if isinstance(container, OrderedDict) else dict
            rest = {key: value for key, value in container.items() if key in besides}
            kind.clear(container)  # the order of the keys is restored, too
            kind.update(container, rest | items)

    return State(read, write, {key: _without_graph(value) for key, value in read().items()})


def _without_graph(value: Any) -> Any:
    """A value that keeps no graph alive. Otherwise the graph of the last batch would keep the one before it, and so on."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _same(items: Any, others: Any) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _items(container: Any) -> Iterable[Any]:
    """What is in a container that may hold containers."""
    if isinstance(container, dict):
        return list(container.values())
    return list(container) if isinstance(container, (tuple, list, deque, set)) else ()


def _attributes(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, past whatever its class does when it is asked for them."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property of that name that raises
        return None
    return attributes if type(attributes) is dict else None


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own that can be put back."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return False  # its memory is given up for the time being, as FSDP does
    return not overlaps_itself(tensor)  # an expanded tensor has its values in its base


def _clone(tensor: Tensor) -> Tensor:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        return tensor.detach().clone()


def _write(tensor: Tensor, value: Tensor) -> None:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        tensor.copy_(value)
