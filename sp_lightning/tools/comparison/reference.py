"""Plain Lightning on one device, whose gradients are moved to the CPU, and unscaled, clipped and stepped there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.torch_compat.patched import in_place_of
from sp_lightning.core.updates.fused import divide, has_fused_step, runs_fused
from sp_lightning.trainer.scaler import HostGradScaler


def add_checkpoints(module: nn.Module, names: Iterable[str]) -> None:
    """Puts torch's checkpoint around the forward of modules: the reference of ``activations="recompute"``.

    Args:
        module: the root.
        names: the names of these modules in the root.
    """
    for name in names:
        unit = module.get_submodule(name)
        vars(unit)["forward"] = partial(checkpoint, unit.forward, use_reentrant=False)


class StepsOnHost(SingleDeviceStrategy):
    """Lightning's strategy for one device. Optimizers step copies of the parameters on the CPU.

    The last bits of an optimizer's steps, and of norms, on a GPU and on the CPU differ, and a fused step has yet other bits. For
    a module on the CPU nothing is copied; only ``fuse`` matters.

    Args:
        device: the device of the module.
        fuse: True if optimizers run fused that support it and whose users have not decided.
        stay: returns the parameters that are stepped on the device, as ``gpu_layers=`` steps them. They are not copied, and steps
            are divided by place.

    Attributes:
        moved: True after a step on the CPU with parameters on another device.
    """

    host = torch.device("cpu")
    """Parameters on this device are not copied."""

    def __init__(
        self, device: torch.device, *, fuse: bool, stay: Callable[[nn.Module], Iterable[nn.Parameter]] = lambda _: ()
    ) -> None:
        super().__init__(device)
        self._find = stay
        self._stay: frozenset[Tensor] = frozenset()
        self._fuse = fuse
        self.moved = False
        self._originals: dict[Tensor, nn.Parameter] = {}
        self._fused: list[dict[str, Any]] = []
        self._whole: list[dict[str, Any]] = []  # the user's groups while they are divided

    def setup(self, trainer: pl.Trainer) -> None:
        super().setup(trainer)
        assert self.lightning_module is not None
        self._stay = frozenset(self._find(self.lightning_module))

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

        own = optimizer.step

        def step(closure: Callable[[], Any] | None = None) -> Any:
            def divided() -> Any:
                result = None if closure is None else closure()
                self._divide(optimizer)  # after clipping, which has the user's groups
                return result

            return own(divided) if closure is not None else (divided(), own())[1]

        try:
            with in_place_of(optimizer, {"step": step}) if self._stay else nullcontext():
                return super().optimizer_step(optimizer, closed, model, **kwargs)
        finally:
            self._leave_host(optimizer)

    def _divide(self, optimizer: Optimizer) -> None:
        """Divides the groups of an optimizer by place, until its step is over."""
        if not self._whole:
            self._whole = optimizer.param_groups
            parts = [divide(group, self._stay) for group in optimizer.param_groups]
            groups = [group for here, there in parts for group in (here, there) if group["params"]]
            for group in groups:
                if group["params"][0] not in self._stay:
                    self._fuse_group(optimizer, group)
            optimizer.param_groups = groups

    def _enter_host(self, optimizer: Optimizer) -> None:
        """Replaces an optimizer's parameters by copies on the CPU, with their gradients and state, and lets groups run fused."""
        for group in optimizer.param_groups:
            group["params"][:] = [self._on_host(optimizer, parameter) for parameter in group["params"]]
            if not self._stay:
                self._fuse_group(optimizer, group)

    def _fuse_group(self, optimizer: Optimizer, group: dict[str, Any]) -> None:
        fuse = self._fuse and has_fused_step(optimizer)
        if not group.get("fused") and runs_fused(optimizer, group, fuse=fuse):
            group["fused"] = True
            self._fused.append(group)

    def _on_host(self, optimizer: Optimizer, parameter: nn.Parameter) -> nn.Parameter:
        if parameter.device == self.host or parameter in self._stay:
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
        if self._whole:
            optimizer.param_groups, self._whole = self._whole, []
        for group in optimizer.param_groups:
            for index, copy in enumerate(group["params"]):
                original = self._originals.pop(copy, None)
                if original is not None:
                    with torch.no_grad():
                        original.copy_(copy)
                    if copy in optimizer.state:
                        optimizer.state[original] = optimizer.state.pop(copy)
                    group["params"][index] = original
        if self._stay:  # state is in the order of the parameters
            for p in [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state]:
                optimizer.state[p] = optimizer.state.pop(p)
        for group in self._fused:
            group["fused"] = None
        self._fused.clear()
