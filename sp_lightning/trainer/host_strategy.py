"""A strategy of one device that leaves parameters, optimizer state and what is made anew on the host."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO, load
from sp_lightning.trainer.compat import given_checkpoint_io, set_inherited, wraps_another
from sp_lightning.trainer.precision import prepare

if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object  # the strategies that are registered add the SingleDeviceStrategy of their Lightning


class HostStrategy(_Base):
    """What a trainer hands to a strategy (devices, nodes, plugins), checked, and kept off the device.

    Args:
        device: where layers compute; None for the trainer's choice.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's ``SingleDeviceStrategy``.
    """

    strategy_name: str

    def __init__(
        self,
        device: str | int | torch.device | None,
        accelerator: pl.accelerators.Accelerator | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        self._device_given = device is not None
        self._device = torch.device("cpu" if device is None else device)
        super().__init__(self._device, accelerator, checkpoint_io, precision_plugin)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ------------------------------------------------------------------ devices

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The device that was given, if any. Lightning hands its choice to strategies that have this attribute."""
        return [self._device] if self._device_given else []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            raise ValueError(
                f"superpipeline runs on one device; the trainer chose {len(devices)}: {[str(d) for d in devices]}. "
                f"Pass Trainer(devices=1), or devices=[{devices[0].index or 0}] for a certain one."
            )
        self._device = devices[0]

    @property
    def root_device(self) -> torch.device:
        """The device that computes: the one that was given, else the trainer's choice."""
        return self._device

    @property
    def num_nodes(self) -> int:
        """One. Lightning hands the trainer's number to strategies that have this attribute."""
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            raise ValueError(
                f"superpipeline runs on one node; the trainer was given {number}. Pass Trainer(num_nodes=1)."
            )

    # ------------------------------------------------------------------ plugins

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The one that was given, or wrapped; else an :class:`~sp_lightning.trainer.checkpoint_io.AtomicCheckpointIO`."""
        given = given_checkpoint_io(self)
        if given is None:
            self.checkpoint_io = AtomicCheckpointIO()
        elif wraps_another(given):
            given.checkpoint_io = AtomicCheckpointIO()  # a wrapper that has one already keeps that
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_inherited(HostStrategy, self, "checkpoint_io", io)

    @property
    def precision_plugin(self) -> Precision:
        """The one that was given; else one for float32."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        prepare(plugin)
        set_inherited(HostStrategy, self, "precision_plugin", plugin)

    # ------------------------------------------------------------------ what stays on the host

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are made on the host: on the device they might not fit."""
        with super().tensor_init_context(empty_init), torch.device("cpu"):  # the device of the inner context counts
            yield

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Weights stay in the file until they are copied to where they belong."""
        return load(checkpoint_path, self.checkpoint_io, self.lightning_module, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The base class would move the state to the device."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=False):
            optimizer.load_state_dict(state)
