"""A weight before a forward, by its place among the device parameters."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor


class WeightState(NamedTuple):
    """A weight before a forward.

    It does not hold the device parameter: who holds one keeps its layer on the device.

    Attributes:
        name: its name in the unit.
        group: the device parameters of its layer.
        position: its position among them.
        writes: how often it had been written.
        gradient: which gradient its host parameter had, and the version of that.
        trained: whether it required a gradient.
    """

    name: str
    group: Any
    position: int
    writes: int
    gradient: tuple[int, int] | None
    trained: bool

    @property
    def is_trained(self) -> bool:
        """Whether it requires a gradient now."""
        return bool(self.group.hosts[self.position].requires_grad)

    def train(self, trained: bool) -> None:
        """Sets whether it requires a gradient."""
        if trained != self.is_trained:
            self.group.all[self.position].requires_grad = trained

    @property
    def is_written(self) -> bool:
        """Whether anybody has written it since."""
        return int(self.group.writes(self.position)) != self.writes

    @property
    def has_other_gradient(self) -> bool:
        """Whether it has been given a gradient since. That updates in the background take its gradient away does not count."""
        return _gradient(self.group.hosts[self.position]) not in (None, self.gradient)


def state_of(name: str, parameter: Any) -> WeightState:
    """A device parameter now."""
    group, index = parameter._of, parameter._index
    host = group.hosts[index]
    return WeightState(name, group, index, group.writes(index), _gradient(host), host.requires_grad)


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
