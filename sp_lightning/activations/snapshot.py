"""What a forward finds in its module, in the objects that it is given, and around it."""

from __future__ import annotations

import contextvars
import sys
import types
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import cuda as attention
from torch.nn.attention import SDPBackend

from sp_lightning.activations.containers import copy_container, is_container, own_attributes, without_graphs
from sp_lightning.activations.random_source import RandomSource, global_sources, sources_of
from sp_lightning.activations.tensor_copy import TensorCopy, can_be_copied, clone
from sp_lightning.activations.weight_state import WeightState, host_of, is_device_parameter, state_of
from sp_lightning.device.torch_private import NormBase
from sp_lightning.model.found import join_names

TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.")
"""A module of these packages keeps no state in a forward but its buffers."""
SMALL = 2**20
"""A tensor of at most so many bytes is kept as it was, in case that it is written where no version shows it."""

_PLAIN = frozenset({int, float, str, bool, bytes, complex, type(None)})
# Objects of these packages have no state that a forward changes, but lead to the whole run.
_OF_THE_RUN = ("lightning", "pytorch_lightning", "sp_lightning", "torch")
# Objects are looked into through so many others: a cache of keys and values has a list of objects, one for each layer, that
# have tensors.
_DEEP = 3
_CODE = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.ModuleType)
_KERNELS = {
    SDPBackend.FLASH_ATTENTION: attention.flash_sdp_enabled,
    SDPBackend.EFFICIENT_ATTENTION: attention.mem_efficient_sdp_enabled,
    SDPBackend.MATH: attention.math_sdp_enabled,
    SDPBackend.CUDNN_ATTENTION: attention.cudnn_sdp_enabled,
}


class Snapshot:
    """The state that a forward can read or change, as it is now.

    Args:
        module: it and the modules inside it are looked at.
        given: the forward's arguments. Objects among them that are no tensors are looked at, and what they hold.

    Attributes:
        containers: dicts, lists and the like by their identity, each with a copy.
        tensors: tensors by name, each with its value.
        random: sources of random numbers.
        weights: the weights.
        held: weights and modules: the name, the dict that holds them, their key in it, and what is held.
        foreign: what stands in the place of weights: the dict, the key and the value.
        inputs: tensors among the arguments, with their versions.
        training: the modules, with their training flags.
        context: a copy of the context variables.
        kernels: the kernels of attention that are enabled.
        dtype: the default dtype.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        self.containers: dict[int, tuple[Any, Any]] = {}
        self.tensors: dict[str, TensorCopy] = {}
        self.random: list[RandomSource] = []
        self.weights: list[WeightState] = []
        self.held: list[tuple[str, dict[str, Any], str, Any]] = []
        self.foreign: list[tuple[dict[str, Any], str, Any]] = []
        self.inputs = [(each, each._version) for each in given if isinstance(each, Tensor) and not each.is_inference()]
        self.training: list[tuple[nn.Module, bool]] = []
        self._modules: set[nn.Module] = set()
        self._look_around()
        self.add("", module)
        for value in given:
            if not isinstance(value, Tensor):
                self._look("", value, objects=_DEEP)
        self.context = contextvars.copy_context()
        self.kernels = [kernel for kernel, enabled in _KERNELS.items() if enabled()]
        self.dtype = torch.get_default_dtype()

    def add(self, name: str, module: nn.Module) -> None:
        """Looks at a module and at the modules inside it, but for those that were looked at before.

        Args:
            name: its name in the messages; empty for the one that the forward is of.
            module: a module that the forward calls.
        """
        for inner, child in module.named_modules():
            if child not in self._modules:
                self._modules.add(child)
                self.training.append((child, child.training))
                self._look_at_module(join_names(name, inner), child)

    def _look_around(self) -> None:
        self.random += global_sources()
        pyro = sys.modules.get("pyro.poutine.runtime")
        if pyro is not None:
            # The handlers around a forward are gone in backward, and without them the forward would sample anew.
            self._look("Pyro's handlers", pyro._PYRO_STACK, objects=_DEEP)

    def _look_at_module(self, name: str, module: nn.Module) -> None:
        self._look_at_buffers(name, module)
        if isinstance(module, torch.jit.ScriptModule):
            return
        for key, parameter in module._parameters.items():
            if is_device_parameter(parameter):
                full = join_names(name, key)
                self.held.append((full, module._parameters, key, host_of(parameter)))
                self.weights.append(state_of(full, parameter))
            elif parameter is not None:  # functional_call puts tensors here, for example
                self.foreign.append((module._parameters, key, parameter))
        self.held += [(join_names(name, key), module._modules, key, child) for key, child in module._modules.items()]
        self._look_at_attributes(name, module)

    def _look_at_attributes(self, name: str, module: nn.Module) -> None:
        attributes = vars(module)
        if is_trusted(module):
            # Hooks set tensors here, as torch.nn.utils.spectral_norm sets the weight.
            tensors = [(key, value) for key, value in attributes.items() if isinstance(value, Tensor)]
            self.foreign += [(attributes, key, value) for key, value in tensors]
            return
        own = own_attributes(attributes)
        self.containers[id(attributes)] = attributes, without_graphs(own)
        for key, value in own.items():
            self._look(join_names(name, key), value, objects=_DEEP - 1)

    def _look_at_buffers(self, name: str, module: nn.Module) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            # Its dicts cannot be copied, and it may write its buffers in kernels that raise no version.
            for key, buffer in module.named_buffers(recurse=False):
                self._copy(join_names(name, key), buffer, uncounted=True)
            return
        self.containers[id(module._buffers)] = module._buffers, module._buffers.copy()
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
        if isinstance(value, Tensor):
            if value.is_leaf and not isinstance(value, nn.Parameter):
                self._copy(name or str(id(value)), value)
        elif is_container(value):
            self._look_into(name, value, objects)
        elif isinstance(value, tuple):
            for number, item in enumerate(value):
                self._look(name and f"{name}.{number}", item, objects=objects)
        elif (sources := sources_of(value)) is not None:
            self.random += sources
        elif isinstance(value, nn.Module):
            self._look_at_attribute(value, objects)
        elif objects and not isinstance(value, _CODE) and not _is_of_the_run(value):
            attributes = _attributes(value)
            if attributes is not None:
                self._look_into(name, attributes, objects - 1)

    def _look_at_attribute(self, module: nn.Module, objects: int) -> None:
        """Looks at a module outside of the tree. Such an attribute may lead to the whole model."""
        if objects == _DEEP or not any(True for _ in module.parameters()):
            for inner in module.modules():
                if id(inner._buffers) not in self.containers:
                    self._look_at_module(str(id(inner)), inner)
        elif id(module._buffers) not in self.containers:
            self._look_at_buffers(str(id(module)), module)

    def _look_into(self, name: str, container: Any, objects: int) -> None:
        if id(container) in self.containers:
            return
        self.containers[id(container)] = container, without_graphs(copy_container(container))
        if isinstance(container, (list, dict, set, deque)):
            items = list(container.values() if isinstance(container, dict) else container)
            for number, item in enumerate(items):
                if type(item) not in _PLAIN:
                    self._look(name and f"{name}.{number}", item, objects=objects)

    def _copy(self, name: str, tensor: Tensor, *, trusted: bool = False, uncounted: bool = False) -> None:
        """Keeps a tensor's value.

        Args:
            name: its name, under which it is kept once.
            tensor: the tensor.
            trusted: whether its module is known to write it in no way that its version does not show.
            uncounted: whether kernels write it all the same.
        """
        if name not in self.tensors and can_be_copied(tensor):
            stays = uncounted or not (trusted or tensor.nbytes > SMALL)
            self.tensors[name] = TensorCopy(tensor, clone(tensor), tensor._version, stays, trusted)


def is_trusted(module: nn.Module) -> bool:
    """Whether a module keeps no state in a forward but its buffers."""
    return type(module).__module__.startswith(TRUSTED)


def _is_of_the_run(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in _OF_THE_RUN


def _attributes(value: Any) -> dict[str, Any] | None:
    """An object's own attributes, past whatever its class does when it is asked for them."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # it has none, or a property of that name that raises
        return None
    return attributes if type(attributes) is dict else None
