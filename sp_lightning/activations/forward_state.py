"""What a forward finds and changes in Python objects and tensors, so that it can be run again as if for the first time."""

from __future__ import annotations

import contextvars
import operator
import random
import sys
import types
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda as attention
from torch.nn.attention import SDPBackend, sdpa_kernel

from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import (
    COMPILED_CALL,
    RNN_WEIGHTS,
    NormBase,
    overlaps_itself,
    preserve_version_counter,
)

# A module of these packages keeps no state in a forward but its buffers.
TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.")
_SMALL = 2**20  # bytes of a tensor that is kept as it was, in case that it is written where no version shows it
_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# What forwards do not touch, and the lists of weights that nn.RNNBase makes anew whenever its weights are others.
_MODULES = frozenset(vars(nn.Module())) | {"forward", COMPILED_CALL, *RNN_WEIGHTS}
# Objects of these have no state that a forward changes, but lead to the whole run.
_OF_THE_RUN = ("lightning", "pytorch_lightning", "sp_lightning", "torch")
# A cache of keys and values has a list of objects, one for each layer, that have tensors.
_DEEP = 3
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_KERNELS = {
    SDPBackend.FLASH_ATTENTION: attention.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: attention.mem_efficient_sdp_enabled,
    SDPBackend.MATH: attention.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: attention.cudnn_sdp_enabled,
}


class Unrepeatable(RuntimeError):
    """A forward that cannot be run a second time as if it were the first."""


class Changes:
    """What a forward finds, and what it changes between here and :meth:`keep`.

    Args:
        unit: the module's name.
        module: it and those inside are looked at.
        given: arguments; objects that are no tensors are looked at, and what they hold.
        volatile: by unit, the buffers whose values change.
    """

    def __init__(self, unit: str, module: nn.Module, given: Sequence[Any], volatile: dict[str, set[str]]) -> None:
        self._unit = unit
        self._volatile = volatile
        self._containers: dict[int, tuple[Any, Any]] = {}  # dicts, lists and the like, each with a copy
        self._tensors: dict[str, _Copied] = {}
        self._unchanged: list[tuple[str, Tensor, int]] = []  # by this forward
        self._learned: set[str] = set()  # to be volatile
        self._random: list[_Random] = []
        self._training = [(child, child.training) for child in module.modules()]
        self._held: list[tuple[str, dict[str, Any], str, Any]] = []  # weights and modules, and where they are held
        self._foreign: list[tuple[dict[str, Any], str, Any]] = []  # what stands in the place of weights
        self._weights: list[_Weight] = []
        self._inputs = [(each, each._version) for each in given if isinstance(each, Tensor) and not each.is_inference()]
        self._look_at_random()
        for name, child in module.named_modules():
            self._look_at(name, child)
        for value in given:
            if not isinstance(value, Tensor):
                self._look("", value, objects=_DEEP)
        self.context = contextvars.copy_context()
        self._kernels = [kernel for kernel, enabled in _KERNELS.items() if enabled()]
        self._dtype = torch.get_default_dtype()

    def keep(self) -> None:
        """The forward is over: forget the values of what it did not change.

        Raises:
            Unrepeatable: it has written what cannot be put back.
        """
        for weight in self._weights:
            if weight.writes_now != weight.writes:
                raise Unrepeatable(self._refusal(f"writes its parameter {weight.name!r}"))
            if weight.gradient_now not in (None, weight.gradient):  # updates in the background take it away
                raise Unrepeatable(
                    self._refusal(f"runs a backward that gives its parameter {weight.name!r} a gradient")
                )
        for tensor, version in self._inputs:
            if tensor._version != version:
                raise Unrepeatable(self._refusal(f"writes a tensor of shape {tuple(tensor.shape)} that it is given"))
        self._inputs.clear()  # a weight among them would keep its layer there
        volatile = self._volatile.get(self._unit)
        for name, copied in list(self._tensors.items()):
            if copied.stays or copied.tensor._version != copied.version:
                continue
            if not (copied.trusted and volatile is not None) and not _same(copied.tensor, copied.before):
                self._learned.add(name)  # by .data, or in NumPy: no version shows it
            elif volatile is None and copied.trusted and copied.tensor.nbytes <= _SMALL:
                pass  # until a first backward has shown what is written in between
            elif volatile is None or name not in volatile:
                del self._tensors[name]
                self._unchanged.append((name, copied.tensor, copied.version))

    def let_go(self) -> None:
        """Of all but what :meth:`check` needs: there is no second run."""
        for each in (self._containers, self._tensors, self._random, self._foreign, self._inputs):
            each.clear()

    def check(self) -> None:
        """Whether :meth:`undone` could put back what was written since.

        Raises:
            Unrepeatable: it could not.
        """
        for weight in self._weights:
            if weight.writes_now != weight.writes:
                raise Unrepeatable(self._written_since(weight.name, "Parameter"))
        for name, place, key, held in self._held:
            if _lasting(place.get(key)) is not held:
                raise Unrepeatable(self._written_since(name.lstrip("."), "What is called", "exchanged"))
        volatile = self._volatile.get(self._unit, ())
        for name, tensor, version in self._unchanged:
            if tensor._version != version or name in volatile:  # which it was not yet
                raise Unrepeatable(self._written_since(name, "Buffer or attribute"))

    @contextmanager
    def undone(self) -> Iterator[None]:
        """While this is active everything is as it was before; then as it is now again.

        Raises:
            Unrepeatable: weights were written since.
        """
        self.check()
        written = (name for name, copied in self._tensors.items() if copied.tensor._version != copied.version)
        self._volatile.setdefault(self._unit, set()).update(self._learned, written)
        tensors = tuple(copied.tensor for copied in self._tensors.values())
        values = [(tensor, _clone(tensor)) for tensor in tensors]
        states = [(each.write, each.read()) for each in self._random]
        containers = [(container, _copy(container)) for container, _ in self._containers.values()]
        places = [(place, key, place.get(key)) for place, key, _ in self._foreign]
        training = [(child, child.training) for child, _ in self._training]
        dtype = torch.get_default_dtype()
        kernels = sdpa_kernel(self._kernels) if self._kernels else nullcontext()
        with preserve_version_counter(tensors), kernels:
            self._put(
                [(copied.tensor, copied.before) for copied in self._tensors.values()],
                [(each.write, each.state) for each in self._random],
                list(self._containers.values()),
                self._foreign,
                self._training,
                self._dtype,
            )
            try:
                yield
            finally:
                self._put(values, states, containers, places, training, dtype)

    @staticmethod
    def _put(values: Any, states: Any, containers: Any, places: Any, training: Any, dtype: torch.dtype) -> None:
        for tensor, value in values:
            _write(tensor, value)
        for write, state in states:
            write(state)
        for container, state in containers:
            _restore(container, state)
        for place, key, value in places:
            place[key] = value
        for child, mode in training:
            child.training = mode
        torch.set_default_dtype(dtype)

    # ------------------------------------------------------------------ what there is

    def _look_at(self, name: str, child: nn.Module) -> None:
        self._look_at_buffers(name, child)
        if isinstance(child, torch.jit.ScriptModule):
            return
        for key, parameter in child._parameters.items():
            if hasattr(parameter, "_of"):
                self._held.append((f"{name}.{key}", child._parameters, key, _lasting(parameter)))
                group: Any = parameter._of  # type: ignore[union-attr]
                index: int = parameter._index  # type: ignore[union-attr]
                self._weights.append(
                    _Weight(
                        f"{name}.{key}".lstrip("."),
                        group,
                        index,
                        group.writes(index),
                        _gradient(group.hosts[index]),
                    )
                )
            elif parameter is not None:  # of functional_call, say
                self._foreign.append((child._parameters, key, parameter))
        self._held += [(f"{name}.{key}", child._modules, key, inner) for key, inner in child._modules.items()]
        attributes = vars(child)
        if _is_trusted(child):  # what hooks have set: the weight, of an old spectral norm
            self._foreign += [
                (attributes, key, value) for key, value in attributes.items() if isinstance(value, Tensor)
            ]
        else:
            self._containers[id(attributes)] = attributes, _without_graphs(_own(attributes))
            for key, value in _own(attributes).items():
                self._look(f"{name}.{key}".lstrip("."), value, objects=_DEEP - 1)

    def _look_at_buffers(self, name: str, child: nn.Module) -> None:
        if isinstance(child, torch.jit.ScriptModule):  # its dictionaries are none, its kernels anybody's
            for key, statistic in child.named_buffers(recurse=False):
                self._copy_tensor(f"{name}.{key}".lstrip("."), statistic, uncounted=True)
            return
        self._containers[id(child._buffers)] = child._buffers, child._buffers.copy()
        uncounted = isinstance(child, NormBase)  # its kernels write statistics and tell nobody
        for key, buffer in child._buffers.items():
            if buffer is not None:
                self._copy_tensor(f"{name}.{key}".lstrip("."), buffer, trusted=_is_trusted(child), uncounted=uncounted)

    def _look(self, name: str, value: Any, *, objects: int) -> None:
        """At what can be changed in place, and into it, through so many ``objects``."""
        if isinstance(value, Tensor):
            if value.is_leaf and not isinstance(value, nn.Parameter):
                self._copy_tensor(name or str(id(value)), value)
        elif isinstance(value, (list, dict, set, deque, bytearray, array)) or _is_array(value):
            self._look_into(name, value, objects)
        elif isinstance(value, tuple):
            for number, each in enumerate(value):
                self._look(name and f"{name}.{number}", each, objects=objects)
        elif isinstance(value, torch.Generator):
            self._random.append(_Random(value.get_state, value.set_state, value.get_state()))
        elif isinstance(value, random.SystemRandom):
            pass  # it has no state
        elif isinstance(value, random.Random):
            self._random.append(_Random(value.getstate, value.setstate, value.getstate()))
        elif _is_random_state(value):
            self._random.append(_Random(value.get_state, value.set_state, value.get_state()))
        elif (bits := _numpy_source(value)) is not None:
            self._random.append(_Random(lambda: bits.state, lambda state: setattr(bits, "state", state), bits.state))
        elif isinstance(value, nn.Module):
            if objects == _DEEP or not any(True for _ in value.parameters()):
                for inner in value.modules():
                    if id(inner._buffers) not in self._containers:
                        self._look_at(str(id(inner)), inner)
            elif id(value._buffers) not in self._containers:  # an attribute may lead to the whole model
                self._look_at_buffers(str(id(value)), value)
        elif objects and not isinstance(value, _CODE) and not _is_of_the_run(value):
            attributes = _attributes(value)
            if attributes is not None:
                self._look_into(name, attributes, objects - 1)

    def _look_into(self, name: str, container: Any, objects: int) -> None:
        if id(container) not in self._containers:
            self._containers[id(container)] = container, _without_graphs(_copy(container))
            if isinstance(container, (list, dict, set, deque)):
                inside = container.values() if isinstance(container, dict) else container
                for number, each in enumerate(list(inside)):
                    if type(each) in _PLAIN:
                        continue
                    self._look(name and f"{name}.{number}", each, objects=objects)

    def _copy_tensor(self, name: str, tensor: Tensor, *, trusted: bool = False, uncounted: bool = False) -> None:
        """``trusted``: its versions show every write, if not ``uncounted``."""
        if name not in self._tensors and _can_be_copied(tensor):
            stays = uncounted or not (trusted or tensor.nbytes > _SMALL)
            self._tensors[name] = _Copied(tensor, _clone(tensor), tensor._version, stays, trusted)

    def _look_at_random(self) -> None:
        self._random.append(_Random(random.getstate, random.setstate, random.getstate()))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            self._random.append(_Random(numpy.random.get_state, numpy.random.set_state, numpy.random.get_state()))
        pyro = sys.modules.get("pyro.poutine.runtime")
        if pyro is not None:  # the handlers around a forward are gone in backward: it would sample anew, not replay
            self._look("Pyro's handlers", pyro._PYRO_STACK, objects=_DEEP)

    def _refusal(self, what: str) -> str:
        return (
            f'The forward of {self._unit!r} {what}, and cannot be run again (activations="recompute"). {self._remedy()}'
        )

    def _written_since(self, name: str, what: str, how: str = "modified by an inplace operation") -> str:
        return (
            f"{what} {name!r} of {self._unit!r} has been {how} between forward and backward, which was to "
            f'compute the forward again (activations="recompute"). {self._remedy()}'
        )

    def _remedy(self) -> str:
        return (
            "Keep or offload what it saves: "
            f'SuperpipelineStrategy(activations={{"{self._unit}": "offload", "**": "recompute"}}).'
        )


class _Random(NamedTuple):
    """A source of random numbers: how its state is read and written, and what it was before the forward."""

    read: Callable[[], Any]
    write: Callable[[Any], Any]
    state: Any


class _Copied(NamedTuple):
    """A tensor before the forward.

    Attributes:
        before: its value.
        version: of all writes so far.
        stays: whether the value is kept for the second run, whatever the first does.
        trusted: whether versions show all writes.
    """

    tensor: Tensor
    before: Tensor
    version: int
    stays: bool
    trusted: bool


class _Weight(NamedTuple):
    """A weight before the forward, by its place among device parameters: who holds one itself keeps its layer there.

    Attributes:
        writes: how often it had been written.
        gradient: which it was, and the version of that.
    """

    name: str
    group: Any
    at: int
    writes: int
    gradient: tuple[int, int] | None

    @property
    def gradient_now(self) -> tuple[int, int] | None:
        """Of the host's parameter."""
        return _gradient(self.group.hosts[self.at])

    @property
    def writes_now(self) -> int:
        """By anybody, so far."""
        return int(self.group.writes(self.at))


def _lasting(held: Any) -> Any:
    """What a module holds, whether the host's parameter stands there now or the device's."""
    return held._of.hosts[held._index] if hasattr(held, "_of") else held


def _gradient(parameter: Tensor) -> tuple[int, int] | None:
    with torch.DisableTorchFunctionSubclass():  # an update of it may be under way, and goes on
        return None if parameter.grad is None else (id(parameter.grad), parameter.grad._version)


def _is_trusted(module: nn.Module) -> bool:
    return type(module).__module__.startswith(TRUSTED)


def _is_of_the_run(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _OF_THE_RUN


def _own(attributes: dict[str, Any]) -> dict[str, Any]:
    """A module's own attributes."""
    return {key: value for key, value in attributes.items() if key not in _MODULES}


def _attributes(value: Any) -> dict[str, Any] | None:
    """An object's own, past whatever its class makes of the question."""
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # no attributes, or a property of that name that raises
        return None
    return found if type(found) is dict else None


def _is_array(value: Any) -> bool:
    """An array of NumPy's that can be written; not one on disk."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.ndarray)
        and not isinstance(value, numpy.memmap)
        and value.flags.writeable
    )


def _is_random_state(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.random.RandomState)


def _numpy_source(value: Any) -> Any:
    """What has the state of a source of random numbers of NumPy's; None if it is none."""
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator
    return value if isinstance(value, numpy.random.BitGenerator) else None


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return _own(container) if "_parameters" in container else dict(container.items())
    if isinstance(container, array):
        return container[:]
    if isinstance(container, (list, set, deque, bytearray)):
        return {list: list, set: set, deque: list, bytearray: bytes}[_base(container)](container)
    return container.copy()


def _base(container: Any) -> Any:
    return next(kind for kind in (list, set, deque, bytearray) if isinstance(container, kind))


def _without_graphs(state: Any) -> Any:
    """A copy that keeps no graph alive: that of the last batch would keep the one before it, and so on."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.detach().requires_grad_()
        return value

    if isinstance(state, dict):
        graphs = {key: cut(value) for key, value in state.items() if isinstance(value, Tensor)}
        return {**state, **graphs} if graphs else state
    return [cut(value) for value in state] if isinstance(state, list) else state


def _restore(container: Any, state: Any) -> None:
    """Make a container what it was, by its base class's own methods; one that is so already is left alone."""
    if _is_array(container):
        if container.shape != state.shape:
            container.resize(state.shape, refcheck=False)
        container[...] = state
    elif isinstance(container, dict):
        if "_parameters" in container:  # a module's
            state = {**{key: value for key, value in container.items() if key in _MODULES}, **state}
        if not (_same_items(container, state) and _same_items(container.values(), state.values())):
            kind = OrderedDict if isinstance(container, OrderedDict) else dict
            kind.clear(container)  # the order of keys, too
            kind.update(container, state)
    elif isinstance(container, (bytearray, array)):
        container[:] = state
    elif isinstance(container, set):
        if container != state:
            set.clear(container)
            set.update(container, state)
    elif not _same_items(container, state):
        if isinstance(container, list):
            list.__setitem__(container, slice(None), state)
        else:
            deque.clear(container)
            deque.extend(container, state)


def _same_items(items: Collection[Any], others: Collection[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


def _can_be_copied(tensor: Tensor) -> bool:
    """Whether a tensor has memory of its own that can be put back."""
    if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_meta or tensor.is_inference():
        return False
    if tensor.numel() and not tensor.untyped_storage().nbytes():  # given up for the time being
        return False
    return not overlaps_itself(tensor)  # expanded: its base has the values


def _same(tensor: Tensor, before: Tensor) -> bool:
    """Bit for bit."""
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        return torch.equal(*(each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (tensor, before)))


def _clone(tensor: Tensor) -> Tensor:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        return tensor.detach().clone()


def _write(tensor: Tensor, value: Tensor) -> None:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
        tensor.copy_(value)
