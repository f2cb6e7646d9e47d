"""What a forward finds in its module, in the objects that it is given, and around it."""

from __future__ import annotations

import contextvars
import sys
import types
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.activations.state import (
    State,
    attributes_state,
    container_state,
    global_states,
    is_container,
    item_state,
    own_attributes,
    random_states,
    state_now,
    training_state,
)
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import NormBase, overlaps_itself
from sp_lightning.model.found import join_names

TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.")
"""A module of these packages keeps no state in a forward but its buffers."""
# A tensor of at most so many bytes is kept as it was. A larger one is kept only if the forward has written it.
_SMALL = 2**20

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# Objects of these packages have no state that a forward changes, but lead to the whole run.
_OF_THE_RUN = ("lightning", "pytorch_lightning", "sp_lightning", "torch")
# Objects are looked into through so many others: a cache of keys and values has a list of objects, one for each layer, that
# have tensors.
_DEEP = 3
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)


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
    def counted(self) -> bool:
        """Whether its version has changed."""
        return self.tensor._version != self.version

    @property
    def same_bits(self) -> bool:
        """Whether its value is what it was, bit for bit."""
        with no_inference_mode(), no_dispatch_modes(), torch.no_grad():
            return torch.equal(_bytes(self.tensor), _bytes(self.before))

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
        context: a copy of the context variables.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        self.states: list[State] = [*global_states()]
        self.tensors: dict[str, TensorCopy] = {}
        self.weights: list[WeightState] = []
        self.held: list[tuple[str, dict[str, Any], str, Any]] = []
        self.inputs = [(each, each._version) for each in given if isinstance(each, Tensor) and not each.is_inference()]
        self._seen: set[int] = set()  # containers, and dicts of buffers, which the states keep alive
        self._modules: set[nn.Module] = set()
        self.add("", module)
        for value in given:
            if not isinstance(value, Tensor):
                self._look("", value, objects=_DEEP)
        pyro = sys.modules.get("pyro.poutine.runtime")
        if pyro is not None:
            # The handlers around a forward are gone in backward, and without them the forward would sample anew.
            self._look("Pyro's handlers", pyro._PYRO_STACK, objects=_DEEP)
        self.context = contextvars.copy_context()

    def add(self, name: str, module: nn.Module) -> None:
        """Looks at a module and at the modules inside it, but for those that were looked at before.

        Args:
            name: its name in the messages; empty for the one that the forward is of.
            module: a module that the forward calls.
        """
        new = {child: inner for inner, child in module.named_modules() if child not in self._modules}
        self._modules.update(new)
        self.states.append(training_state(list(new)))
        for child, inner in new.items():
            self._look_at_module(join_names(name, inner), child)

    def _look_at_module(self, name: str, module: nn.Module) -> None:
        self._look_at_buffers(name, module)
        if isinstance(module, torch.jit.ScriptModule):
            return
        parameter: Any
        for key, parameter in module._parameters.items():
            if is_device_parameter(parameter):
                full, host = join_names(name, key), host_of(parameter)
                group, index = parameter._of, parameter._index
                weight = WeightState(full, group, index, group.writes(index), _gradient(host))
                self.held.append((full, module._parameters, key, host))
                self.weights.append(weight)
                self.states.append(state_now(weight.is_trained, weight.train))
            elif parameter is not None:  # functional_call puts tensors here, for example
                self.states.append(item_state(module._parameters, key))
        self.held += [(join_names(name, key), module._modules, key, child) for key, child in module._modules.items()]
        attributes = vars(module)
        if is_trusted(module):
            # Hooks set tensors here, as torch.nn.utils.spectral_norm sets the weight.
            self.states += [
                item_state(attributes, key) for key, value in attributes.items() if isinstance(value, Tensor)
            ]
            return
        self._seen.add(id(attributes))
        self.states.append(attributes_state(attributes))
        for key, value in own_attributes(attributes).items():
            self._look(join_names(name, key), value, objects=_DEEP - 1)

    def _look_at_buffers(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            # Its dicts cannot be copied, and it may write its buffers in kernels that raise no version.
            for key, buffer in module.named_buffers(recurse=False):
                self._copy(join_names(name, key), buffer, uncounted=True)
            return
        self._seen.add(id(module._buffers))
        self.states.append(container_state(module._buffers))
        uncounted = isinstance(module, NormBase)  # its kernels write the running statistics and raise no version
        for key, statistic in module._buffers.items():
            if statistic is not None:
                self._copy(join_names(name, key), statistic, trusted=is_trusted(module), uncounted=uncounted)

    def _look(self, name: str, value: Any, *, objects: int) -> None:
        """Looks at a value that can be changed in place, and at what it holds.

        Args:
            name: where it was found; empty if it was found in the arguments.
            value: any object.
            objects: through how many objects this goes on.
        """
        if type(value) in _PLAIN:
            return
        if isinstance(value, Tensor):
            if value.is_leaf and not isinstance(value, nn.Parameter):
                self._copy(name or str(id(value)), value)
        elif is_container(value):
            self._look_into(name, value, objects)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                self._look(name and f"{name}.{number}", item, objects=objects)
        elif (sources := random_states(value)) is not None:
            self.states += sources
        elif isinstance(value, nn.Module):
            self._look_at_attribute(value, objects)
        elif objects and not isinstance(value, _CODE) and type(value).__module__.partition(".")[0] not in _OF_THE_RUN:
            attributes = _attributes(value)
            if attributes is not None:
                self._look_into(name, attributes, objects - 1)

    def _look_at_attribute(self, module: nn.Module, objects: int) -> None:
        """Looks at a module outside of the tree. Such an attribute may lead to the whole model."""
        if objects == _DEEP or not any(True for _ in module.parameters()):
            for inner in module.modules():
                if id(inner._buffers) not in self._seen:
                    self._look_at_module(str(id(inner)), inner)
        elif id(module._buffers) not in self._seen:
            self._look_at_buffers(str(id(module)), module)

    def _look_into(self, name: str, container: Any, objects: int) -> None:
        if id(container) in self._seen:
            return
        self._seen.add(id(container))
        self.states.append(container_state(container))
        if isinstance(container, (list, dict, set, deque)):
            for number, item in enumerate(list(container.values() if isinstance(container, dict) else container)):
                self._look(name and f"{name}.{number}", item, objects=objects)

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


def is_trusted(module: nn.Module) -> bool:
    """Whether a module keeps no state in a forward but its buffers."""
    return type(module).__module__.startswith(TRUSTED)


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


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().reshape(-1).contiguous().view(torch.uint8)
