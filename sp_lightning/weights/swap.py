"""The places where parameters sit in the module tree, which hold the host's or the device's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import DisableTorchFunctionSubclass, nn

from sp_lightning.model.found import Place
from sp_lightning.model.wrapped import StandInForWrapped, parts
from sp_lightning.weights.device_parameter import DeviceParameter
from sp_lightning.weights.layer import StreamedLayer


class Places:
    """All places of all streamed and resident parameters of a module.

    Args:
        module: the root.
        places: parameter → where it sits; a shared parameter has several places.
        layers: with host's and device's parameters in the same order.
        wrapped: of parameters that consist of several, which sit in the module's places: the host's and its stand-in.
    """

    def __init__(
        self,
        module: nn.Module,
        places: dict[nn.Parameter, tuple[Place, ...]],
        layers: Sequence[StreamedLayer],
        wrapped: Mapping[nn.Parameter, Any],
    ) -> None:
        self.blocks = [layer.block for layer in layers]
        self._module = module
        self._modules = list(module.modules())
        plain = [pair for layer in layers for pair in zip(layer.block.parameters, layer.parameters.all, strict=True)]
        self._swaps: list[tuple[Place, Any, nn.Parameter]] = [
            (place, device, host) for host, device in (*plain, *wrapped.items()) for place in places.get(host, ())
        ]
        self._wrapped = list(wrapped)
        self._fingerprint = self._take_fingerprint()
        self.on_device = False
        """Whether the modules hold device parameters now."""

    def hold_device(self) -> None:
        """Device parameters into the modules."""
        self.on_device = True
        _swap(self._swaps)

    def hold_host(self) -> None:
        """The host's parameters into the modules."""
        _swap((place, host, device) for place, device, host in self._swaps)
        for module in self._modules:  # user code may have tied weights meanwhile: b.weight = a.weight
            parameters: dict[str, Any] = module._parameters
            for attribute, parameter in parameters.items():
                # Not isinstance, which is slow for a Parameter: its metaclass asks in Python.
                if issubclass(type(parameter), (DeviceParameter, StandInForWrapped)):
                    parameters[attribute] = parameter.host
        self.on_device = False  # now: who was interrupted before this does it again

    def changed(self) -> bool:
        """Whether modules or parameters were exchanged or renamed, or parameters changed their dtype, shape or strides."""
        return self._take_fingerprint() != self._fingerprint

    def close(self) -> None:
        """Let go of the device parameters."""
        self._swaps.clear()

    def _take_fingerprint(self) -> list[tuple[object, ...]]:
        with DisableTorchFunctionSubclass():  # neither weights nor gradients are read: no update need be waited for
            return [
                (
                    id(module),
                    *((n, id(p), p.dtype, p.shape, p.stride()) for n, p in module._parameters.items() if p is not None),
                )
                for module in self._module.modules()
            ] + [(p.requires_grad, *(id(part) for _, part in parts("", p))) for p in self._wrapped]


def _swap(swaps: Iterable[tuple[Place, nn.Parameter, nn.Parameter]]) -> None:
    """Put ``new`` wherever ``old`` sits; a place that holds something else belongs to somebody else."""
    for (module, attribute), new, old in swaps:
        parameters = module._parameters
        if parameters.get(attribute) is old:
            parameters[attribute] = new
            if isinstance(module, nn.RNNBase):  # it keeps a list beside them
                setattr(module, attribute, new)
