"""Plain Lightning on one device, whose gradients are moved to the CPU, and unscaled, clipped and stepped there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.core.updates.fused import has_fused_step, runs_fused
from sp_lightning.core.updates.scaler import HostGradScaler


class StepsOnHost(SingleDeviceStrategy):
    """Lightning's strategy for one device. Optimizers step copies of the parameters on the CPU.

    The last bits of an optimizer's steps, and of norms, on a GPU and on the CPU differ, and a fused step has yet other bits. For
    a module on the CPU nothing is copied; only ``fuse`` matters.

    Args:
        device: the device of the module.
        fuse: True if optimizers run fused that support it and whose users have not decided.

    Attributes:
        moved: True after a step on the CPU with parameters on another device.
    """

    host = torch.device("cpu")
    """Parameters on this device are not copied."""

    def __init__(self, device: torch.device, *, fuse: bool) -> None:
        super().__init__(device)
        self._fuse = fuse
        self.moved = False
        self._originals: dict[Tensor, nn.Parameter] = {}
        self._fused: list[dict[str, Any]] = []

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        plugin: Any = self.precision_plugin
        scaler = getattr(plugin, "scaler", None)
        if type(scaler) is torch.amp.GradScaler and self.root_device != self.host:
            # torch's own scaler copies its numbers to the CPU without blocking, and would read them before they have arrived.
            plugin.scaler = HostGradScaler.like(scaler)

        def closed() -> Any:
            self._leave_host(optimizer)  # some optimizers call the closure again
            result = closure()
            self._enter_host(optimizer)
            return result

        try:
            return super().optimizer_step(optimizer, closed, model, **kwargs)
        finally:
            self._leave_host(optimizer)

    def _enter_host(self, optimizer: Optimizer) -> None:
        """Replaces an optimizer's parameters by copies on the CPU, with their gradients and state, and lets groups run fused."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._on_host(optimizer, parameter) for parameter in group["params"]]
            fuse = self._fuse and has_fused_step(optimizer)
            if not group.get("fused") and runs_fused(optimizer, group, fuse=fuse):
                group["fused"] = True
                self._fused.append(group)

    def _on_host(self, optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device == self.host:
            return parameter
        self.moved = True
        copy = nn.Parameter(parameter.detach().to("cpu", copy=True), requires_grad=parameter.requires_grad)
        copy.grad = None if parameter.grad is None else parameter.grad.to("cpu", copy=True)
        if parameter in optimizer.state:  # the same object, which the optimizer may refer to
            state = optimizer.state[copy] = optimizer.state.pop(parameter)
            state.update({name: value.cpu() for name, value in state.items() if isinstance(value, Tensor)})
        self._originals[copy] = parameter
        return copy

    def _leave_host(self, optimizer: Optimizer) -> None:
        """Copies the new values to the optimizer's own parameters, and undoes :meth:`_enter_host`. State stays on the CPU."""
        for group in optimizer.param_groups:
            for index, copy in enumerate(group["params"]):
                original = self._originals.pop(copy, None)
                if original is not None:
                    with torch.no_grad():
                        original.copy_(copy)
                    if copy in optimizer.state:
                        optimizer.state[original] = optimizer.state.pop(copy)
                    group["params"][index] = original
        for group in self._fused:
            group["fused"] = None
        self._fused.clear()
