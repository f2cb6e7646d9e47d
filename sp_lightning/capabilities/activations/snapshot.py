"""Records the state that a forward reads, so that it can be restored: of its module, its arguments and the process."""

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

from sp_lightning.core.device.layout import flat_bytes
from sp_lightning.core.model.found import join_names
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import (
    COMPILED_CALL,
    RNN_WEIGHTS,
    NormBase,
    is_traceable_wrapper_subclass,
    overlaps_itself,
)
from sp_lightning.core.weights.device_parameter import same_place

TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.")
"""Forwards of modules from these packages change only buffers, and tensors that hooks set as attributes."""

_SMALL = 2**20
"""Copies of tensors of at most this many bytes are kept. A larger tensor's copy is kept only if the forward has written it."""

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# Objects of these packages have no state that a forward changes, but refer to the whole run.
_OF_THE_RUN = ("lightning", "pytorch_lightning", "sp_lightning", "torch")
_DEEP = 3
"""The depth to which objects are followed: a cache of keys and values has a list of objects, one for each layer, with tensors."""

_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
# Attributes of modules that forwards do not change, and the lists of weights that nn.RNNBase rebuilds if a weight is replaced.
_OF_MODULES = frozenset(vars(nn.Module())) - {"training"} | {"forward", COMPILED_CALL, *RNN_WEIGHTS}
# Stands for a missing key. None would be a value, and would hide an attribute of that name.
_ABSENT = object()
# Methods of the base classes, because those of a subclass may have other effects.
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
    """A value that a forward may read and change.

    Attributes:
        read: returns the value.
        write: sets the value.
        before: the value before the forward.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    before: Any


class TensorCopy(NamedTuple):
    """A tensor and a copy from before the forward.

    Attributes:
        tensor: the tensor itself.
        place: another tensor with its memory, shape and strides from before the forward (:func:`_place_of`).
        before: the copy.
        version: the tensor's version when it was copied, which counts in-place writes.
        kept: True if the copy is kept even if the first run does not write the tensor.
        trusted: True if every write changes the version.
    """

    tensor: Tensor
    place: Tensor | None
    before: Tensor
    version: int
    kept: bool
    trusted: bool

    @property
    def same_bits(self) -> bool:
        """True if the tensor is bit-identical to the copy. The host waits for the device.

        It could read the result later. But the host runs ahead of the device, so until then the copies of all layers would take
        memory. Only buffers above :data:`_SMALL` of modules that are not :data:`TRUSTED` are compared.
        """
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            return torch.equal(flat_bytes(self.tensor), flat_bytes(self.before))

    @property
    def state(self) -> State:
        """The tensor's place in memory and its value, as a state."""
        return State(partial(_read, self.tensor), partial(_write, self.tensor), (self.place, self.before))

    @property
    def is_in_place(self) -> bool:
        """True if the tensor has the memory, shape and strides from before the forward. ``.data = …`` changes no version."""
        return self.place is None or same_place(self.tensor, self.place)


class WeightState(NamedTuple):
    """A weight before a forward, by its place among the device parameters.

    This object holds no device parameter, because a reference to a device parameter keeps its layer on the device.

    Attributes:
        name: the weight's name in the unit.
        group: the device parameters of the weight's layer.
        position: the weight's position among these device parameters.
        writes: the counter of the weight's writes before the forward.
        gradient: the identity and the version of the weight's gradient before the forward; None without a gradient.
    """

    name: str
    group: Any
    position: int
    writes: int
    gradient: tuple[int, int] | None

    def is_trained(self) -> bool:
        """Returns True if the weight requires a gradient now."""
        return bool(self.group.hosts[self.position].requires_grad)

    def train(self, trained: bool) -> None:
        """Sets ``requires_grad`` of the weight."""
        if trained != self.is_trained():
            self.group.all[self.position].requires_grad = trained

    @property
    def updated_early(self) -> bool:
        """True if the running backward has updated the weight's layer."""
        return bool(self.group.layer.owner.updated_early)

    @property
    def is_written(self) -> bool:
        """True if the forward or any other code has written the weight since."""
        return int(self.group.writes(self.position)) != self.writes

    @property
    def has_other_gradient(self) -> bool:
        """True if the weight has another gradient now. A missing gradient does not count: background updates set it to None."""
        return _gradient(self.group.hosts[self.position]) not in (None, self.gradient)


class PlainWeight(NamedTuple):
    """A weight that stays on the device, before a forward. It has the properties of :class:`WeightState`.

    Attributes:
        name: the weight's name in the unit.
        parameter: the weight.
        version: its version, which counts writes.
        address: the address of its memory.
        gradient: the identity and the version of its gradient; None without a gradient.
        before: a copy of its bytes, if code that is not :data:`TRUSTED` may write it through ``.data``; otherwise None.
    """

    name: str
    parameter: nn.Parameter
    version: int
    address: int
    gradient: tuple[int, int] | None
    before: Tensor | None

    @property
    def updated_early(self) -> bool:
        """False: backward updates no weight that stays."""
        return False

    @classmethod
    def now(cls, name: str, parameter: nn.Parameter, *, trusted: bool = True) -> PlainWeight:
        """Records a weight as it is now."""
        before = None if trusted else flat_bytes(parameter).clone()
        return cls(name, parameter, parameter._version, _address(parameter), _gradient(parameter), before)

    def is_trained(self) -> bool:
        """Returns True if the weight requires a gradient now."""
        return self.parameter.requires_grad

    @property
    def is_written(self) -> bool:
        """True if the forward or any other code has written the weight since."""
        if self.parameter._version != self.version or _address(self.parameter) != self.address:
            return True
        return self.before is not None and not torch.equal(flat_bytes(self.parameter), self.before)

    @property
    def has_other_gradient(self) -> bool:
        """True if the weight has another gradient now."""
        return _gradient(self.parameter) not in (None, self.gradient)


class Snapshot:
    """The state that a forward can read or change, as it is now.

    Args:
        module: the forward's module. Modules inside it are included.
        given: the forward's arguments. The state of objects among them is recorded; of tensors among them only the version.

    Attributes:
        states: all states that can be restored, except tensors.
        tensors: tensors by name, each with a copy.
        weights: the weights.
        held: for each weight and module: its name, the dict that contains it, its key in the dict, and the weight or module.
        inputs: tensors among the arguments, with their versions.
        outside: modules with weights outside the module's tree, each with its name. Only their own buffers are recorded.
        context: a copy of the context variables.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        self.states: list[State] = [*_around_modules()]
        self.tensors: dict[str, TensorCopy] = {}
        self.weights: list[WeightState | PlainWeight] = []
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
            # Handlers around a forward are not active in backward. Without them the forward would draw new samples.
            self._look("Pyro's handlers", pyro._PYRO_STACK, objects=_DEEP)
        self.context = contextvars.copy_context()

    def add(self, name: str, module: nn.Module) -> None:
        """Records a module that the forward calls, and the modules inside it. ``name`` is a prefix of their names."""
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
            elif parameter is not None:  # for example a tensor of functional_call
                self.states.append(_item_state(module._parameters, key))
                if isinstance(parameter, nn.Parameter) and not is_traceable_wrapper_subclass(parameter):
                    self.weights.append(PlainWeight.now(join_names(name, key), parameter, trusted=trusted))
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
        # Kernels of these modules write buffers without a change of their version. The dicts of a ScriptModule cannot be copied.
        uncounted = isinstance(module, (NormBase, torch.jit.ScriptModule))
        if not isinstance(module, torch.jit.ScriptModule):
            self.states.append(_dict_state(module._buffers))
        for key, buffer in module.named_buffers(recurse=False):
            self._copy(join_names(name, key), buffer, trusted=trusted, uncounted=uncounted)

    def _look(self, name: str, value: Any, *, objects: int) -> None:
        """Records a value that can be changed in place, and its contents, to a depth of ``objects`` further objects."""
        if type(value) in _PLAIN or id(value) in self._seen:
            return
        if _is(value, Tensor):
            if value.is_leaf and not isinstance(value, nn.Parameter):
                self._copy(name, value)
        elif _is(value, nn.Module):
            # A module outside the tree. A module with weights to which an attribute refers may contain the whole model, so only
            # the module's own buffers are recorded. A module among the arguments is recorded whole.
            if objects < _DEEP and any(True for _ in value.parameters()):
                self._look_at_buffers(name, value)
                self.outside.append((name, value))
            else:
                self.add(name, value)
        elif (state := _state_of(value)) is not None or _is(value, tuple):
            if state is not None:
                self._seen.add(id(value))
                self.states.append(state)
            for number, item in enumerate(_items(value)):
                self._look(f"{name}.{number}", item, objects=objects)
        elif objects and not _is(value, *_CODE) and type(value).__module__.partition(".")[0] not in _OF_THE_RUN:
            self._look(name, _attributes(value), objects=objects - 1)

    def _copy(self, name: str, tensor: Tensor, *, trusted: bool = False, uncounted: bool = False) -> None:
        """Copies a tensor.

        Args:
            name: the tensor's name. A second tensor of this name is not copied.
            tensor: the tensor.
            trusted: True if the tensor's module is known to change the version with each write.
            uncounted: True if kernels write the tensor without a change of its version.
        """
        if name not in self.tensors and _can_be_copied(tensor):
            kept = uncounted or tensor.nbytes <= _SMALL
            self.tensors[name] = TensorCopy(tensor, *_read(tensor), tensor._version, kept, trusted)


def put(states: Iterable[State], values: Iterable[Any]) -> None:
    """Sets the value of each state."""
    for state, value in zip(states, values, strict=True):
        state.write(value)


def is_device_parameter(value: Any) -> bool:
    """Returns True if a module's parameter is a device parameter of the engine."""
    return hasattr(value, "_of")


def host_of(value: Any) -> Any:
    """Returns the host parameter of a device parameter, and any other value as it is."""
    return value._of.hosts[value._index] if is_device_parameter(value) else value


def _address(tensor: Tensor) -> int:
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def _gradient(parameter: Tensor) -> tuple[int, int] | None:
    # With __torch_function__, this would wait for a running update of the weight.
    with torch.DisableTorchFunctionSubclass():
        return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


# ---------------------------------------------------------------------- kinds of state


def _state(read: Callable[[], Any], write: Callable[[Any], object]) -> State:
    return State(read, write, read())


def _around_modules() -> Iterator[State]:
    """Yields states of the process: random numbers of Python and NumPy, enabled attention kernels, the default dtype."""
    yield _state(random.getstate, random.setstate)
    yield _state(np.random.get_state, np.random.set_state)
    for enabled, enable in _KERNELS:
        yield _state(enabled, enable)
    yield _state(torch.get_default_dtype, torch.set_default_dtype)


def _is(value: Any, *kinds: type) -> bool:
    """Returns True if a value's class is one of ``kinds`` or inherits from one. ``isinstance`` may call code of the value."""
    return issubclass(type(value), kinds)


def _state_of(value: Any) -> State | None:
    """Returns the state of a container or a random number generator; None for any other object.

    Only methods of the base classes are called, because those of a subclass may raise or have effects.
    """
    kind = next((kind for kind in _FILL if _is(value, kind)), None)
    if kind is not None:
        return _dict_state(value) if issubclass(kind, dict) else _items_state(kind, value)
    if _is(value, bytearray, array):
        base: Any = bytearray if _is(value, bytearray) else array
        read = partial(base.__getitem__, value, slice(None))
        return _state(read, partial(base.__setitem__, value, slice(None)))
    if _is(value, np.ndarray):  # a read-only array does not change; an array on a disk is too large to copy
        fixed = _is(value, np.memmap) or not np.ndarray.flags.__get__(value).writeable
        return None if fixed else _state(partial(np.ndarray.copy, value), partial(_write_array, value))
    if _is(value, random.Random) and not _is(value, random.SystemRandom):  # a SystemRandom has no state
        return _state(partial(random.Random.getstate, value), partial(random.Random.setstate, value))
    for generator in (torch.Generator, np.random.RandomState):
        if _is(value, generator):
            return _state(partial(generator.get_state, value), partial(generator.set_state, value))
    if _is(value, np.random.Generator):
        value = value.bit_generator
    if _is(value, np.random.BitGenerator):
        return _state(partial(getattr, value, "state"), partial(setattr, value, "state"))
    return None


def _write_array(into: Any, value: Any) -> None:
    if into.shape != value.shape:
        into.resize(value.shape, refcheck=False)
    into[...] = value


def _item_state(place: dict[str, Any], key: str) -> State:
    """Returns the state of a key in a dict. The key may be missing, now or later."""

    def write(value: Any) -> None:
        if value is _ABSENT:
            place.pop(key, None)
        else:
            place[key] = value

    return _state(partial(place.get, key, _ABSENT), write)


def _items_state(kind: type, container: Any) -> State:
    """Returns the state of a container's items. ``kind`` is its base class among the keys of ``_FILL``."""

    def read() -> list[Any]:
        return list(kind.__iter__(container))  # type: ignore[attr-defined]

    def write(items: Any) -> None:
        if not _same(read(), items):
            kind.clear(container)  # type: ignore[attr-defined]
            _FILL[kind](container, items)

    return State(read, write, [_without_graph(item) for item in read()])


def _dict_state(container: dict[Any, Any], besides: frozenset[str] = frozenset()) -> State:
    """Returns the state of a dict, except the entries whose keys are in ``besides``. It hashes and compares no keys."""
    kind = OrderedDict if _is(container, OrderedDict) else dict

    def read() -> list[tuple[Any, Any]]:
        return [pair for pair in kind.items(container) if not besides or pair[0] not in besides]

    def write(items: list[tuple[Any, Any]]) -> None:
        now = read()
        if not (len(now) == len(items) and all(_same(*pairs) for pairs in zip(now, items, strict=True))):
            rest = [pair for pair in kind.items(container) if besides and pair[0] in besides]
            kind.clear(container)  # so that the order of the keys is restored
            kind.update(container, [*rest, *items])

    return State(read, write, [(key, _without_graph(value)) for key, value in read()])


def _without_graph(value: Any) -> Any:
    """Returns a value, detached from its graph if any. Otherwise each batch's graph would hold the previous batch's graph."""
    if isinstance(value, Tensor) and value.grad_fn is not None:
        return value.detach().requires_grad_()
    return value


def _same(items: Any, others: Any) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _items(container: Any) -> Iterable[Any]:
    """Returns the items of a container whose items may be containers. Calls only methods of the base classes."""
    if _is(container, dict):
        return list((OrderedDict if _is(container, OrderedDict) else dict).values(container))
    kind: Any = next((kind for kind in (tuple, list, deque, set) if _is(container, kind)), None)
    return () if kind is None else list(kind.__iter__(container))


def _attributes(value: Any) -> dict[str, Any] | None:
    """Returns an object's own attributes. It runs no ``__getattribute__`` of the object's class."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # the object has no __dict__, or its class has a property of that name that raises
        return None
    return attributes if type(attributes) is dict else None


def _can_be_copied(tensor: Tensor) -> bool:
    """Returns True if a tensor has memory of its own that can be restored."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.numel() and not tensor.untyped_storage().nbytes():
        return False  # its memory is freed for now, as FSDP does
    return not overlaps_itself(tensor)  # the values of an expanded tensor are in its base


def _read(tensor: Tensor) -> tuple[Tensor | None, Tensor]:
    """Returns the place of a tensor, and a copy of its values."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        return _place_of(tensor), tensor.detach().clone()


def _place_of(tensor: Tensor) -> Tensor | None:
    """Returns another tensor with a tensor's memory, shape and strides; None for a tensor that consists of other tensors."""
    return None if is_traceable_wrapper_subclass(tensor) else tensor.detach()


def _write(tensor: Tensor, value: tuple[Tensor | None, Tensor]) -> None:
    """Sets a tensor to a result of :func:`_read`. ``resize_`` or ``.data = …`` may have changed its place since."""
    place, values = value
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        if place is not None and not same_place(tensor, place):
            tensor.data = place
        tensor.copy_(values)
