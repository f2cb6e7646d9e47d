"""Swaps what modules hold: the host's parameters between steps, the device's while a step runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import DisableTorchFunctionSubclass, nn
from torch.jit import ScriptModule

from sp_lightning.model.found import Place
from sp_lightning.model.wrapped import StandInForWrapped, parts
from sp_lightning.weights.buffers import AveragesOnDevice, PrunedWeights
from sp_lightning.weights.captured import Captured
from sp_lightning.weights.device_parameter import DeviceParameter
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.writes import WeightWatch

_Exchange = tuple[nn.Module, bool, str, Any, Any]
"""A module, whether its ``__setattr__`` is to be called, its attribute, what is put there and what is there before that."""


class Swap:
    """Swaps all streamed and resident parameters of a module, and buffers beside them. The caller holds the engine's lock.

    Args:
        module: the root.
        places: the places of each parameter in the module tree. A shared parameter has several.
        layers: the layers, whose host and device parameters are in the same order.
        wrapped: the stand-in of each wrapped parameter, which takes its place in the module.
        residents: the residents, which are up to date whenever modules hold the device's parameters.
        pruned: the masks, which are on the device only within a step.
        watch: looks for writes of the host's weights, if ``check_writes`` asks for it; otherwise None.

    Attributes:
        averages: the buffers that are on the device from their first use in a step until its end.
        captured: the host's parameters, as user code may have captured them.
    """

    def __init__(
        self,
        module: nn.Module,
        places: dict[nn.Parameter, tuple[Place, ...]],
        layers: Sequence[StreamedLayer],
        wrapped: Mapping[nn.Parameter, Any],
        residents: Residents,
        pruned: PrunedWeights,
        watch: WeightWatch | None,
    ) -> None:
        self._residents = residents
        self._pruned = pruned
        self._watch = watch
        self.averages: list[AveragesOnDevice] = []
        self.blocks = [layer.block for layer in layers]
        self._module = module
        # A ScriptModule, which is moved whole, has wrappers in place of dictionaries, and they equal nothing.
        self._modules = [each for each in module.modules() if not isinstance(each, ScriptModule)]
        plain = [pair for layer in layers for pair in zip(layer.block.parameters, layer.parameters.all, strict=True)]
        # nn.RNNBase keeps a list of its weights, which its __setattr__ renews.
        pairs = [
            ((place[0], isinstance(place[0], nn.RNNBase), place[1]), *pair)
            for pair in (*plain, *wrapped.items())
            for place in places.get(pair[0], ())
        ]
        self._to_device: list[_Exchange] = [(*place, device, host) for place, host, device in pairs]
        self._to_host: list[_Exchange] = [(*place, host, device) for place, host, device in pairs]
        self.captured = Captured(plain, lambda: self.on_device)
        self._wrapped = list(wrapped)
        # What changed() compares. It is asked before each batch, so it walks along lists, and calls no function of Python's own.
        self._children = [(each, dict(each._modules), len(each._parameters)) for each in self._modules]
        held = [(each, name, p) for each in self._modules for name, p in each._parameters.items()]
        self._held = [(each, name, p, p.dtype, p.shape, p.stride()) for each, name, p in held if p is not None]
        self._nothing = [(each, name) for each, name, p in held if p is None]
        self._parts = self._parts_of_wrapped()
        self.on_device = False
        """Whether the modules hold device parameters now."""

    def to_device(self) -> None:
        """Puts the device's parameters into the modules, which hold the host's."""
        self._residents.group.ask(before_use=False)
        self.on_device = True
        _swap(self._to_device)
        self._pruned.hold_device()

    def to_host(self) -> None:
        """Puts the host's parameters into the modules."""
        if not self.on_device:
            return
        self._residents.group.ask(before_use=True)
        self._pruned.hold_host()
        for average in self.averages:
            average.send_back()
        if self._watch is not None:
            self._watch.look_away()
        self.captured.watch(False)
        _swap(self._to_host)
        for module in self._modules:  # user code may have tied weights since (b.weight = a.weight)
            parameters: dict[str, Any] = module._parameters
            for attribute, parameter in parameters.items() if parameters else ():
                kind = type(parameter)
                # isinstance is slow: the metaclass of Parameter checks in Python.
                if kind is not nn.Parameter and issubclass(kind, (DeviceParameter, StandInForWrapped)):
                    parameters[attribute] = parameter.host
        self.on_device = False  # set last, so that a call that was interrupted is repeated

    def changed(self) -> bool:
        """Whether modules or parameters were replaced or renamed, or parameters changed their dtype, shape or strides."""
        # Updates may be under way. Neither weights nor gradients are read here, so nothing is to wait for them.
        with DisableTorchFunctionSubclass():
            for module, children, count in self._children:
                if module._modules != children or len(module._parameters) != count:
                    return True
            for module, name, p, dtype, shape, stride in self._held:
                if module._parameters.get(name) is not p or p.dtype is not dtype or p.shape != shape:
                    return True
                if p.stride() != stride:
                    return True
            missing = any(module._parameters.get(name, self) is not None for module, name in self._nothing)
            return missing or self._parts_of_wrapped() != self._parts

    def close(self) -> None:
        """Drops the device parameters. Buffers stay on the host for good."""
        self._to_device.clear()
        self._to_host.clear()
        for average in self.averages:
            average.close()

    def _parts_of_wrapped(self) -> list[object]:
        return [(p.requires_grad, *(id(part) for _, part in parts("", p))) for p in self._wrapped]


def _swap(exchanges: Iterable[_Exchange]) -> None:
    """Puts ``new`` into every place that holds ``old``. User code has put something else into the other places."""
    for module, keeps_list, attribute, new, old in exchanges:
        parameters = module._parameters
        if parameters.get(attribute) is old:
            parameters[attribute] = new
            if keeps_list:
                setattr(module, attribute, new)
