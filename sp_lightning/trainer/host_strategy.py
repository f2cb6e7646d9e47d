"""The base of the strategy: keeps modules in host memory, and takes devices and plugins from the trainer.

The class of a strategy object is made at run time, with three bases:

1. ``SuperpipelineStrategy``, or a user's subclass of it;
2. on several devices, the part that ``ranks`` adds (``registry.part_of_several_devices``);
3. Lightning's strategy for the number of devices (``SingleDeviceStrategy`` or ``DDPStrategy``).

Lightning sets the devices after the strategy was made. So the object is made for one device, and if there are several devices,
:meth:`HostStrategy._change_class` changes the class of the object.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from sp_lightning.core.messages import about_gpu
from sp_lightning.registry import part_of_several_devices
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from sp_lightning.trainer.compat import given_checkpoint_io, set_inherited, wraps_another
from sp_lightning.trainer.group import ALONE, Group
from sp_lightning.trainer.options import prepare_precision

if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object  # Lightning's strategy is the last base of each object's class, see above


class HostStrategy(_Base):
    """A strategy that checks what the trainer gives it (devices, nodes, plugins), and keeps parameters in host memory.

    Args:
        device: the device that computes; None for the trainer's choice.
        accelerator, checkpoint_io, precision_plugin: as in Lightning's ``SingleDeviceStrategy``.
    """

    strategy_name: str
    log: logging.Logger

    def __init__(
        self,
        device: str | int | torch.device | None,
        accelerator: pl.accelerators.Accelerator | None,
        checkpoint_io: CheckpointIO | None,
        precision_plugin: Precision | None,
    ) -> None:
        self._device_given = device is not None
        self._of_trainer: dict[str, Any] = {}  # the trainer's plugins, by attribute
        self._connected = ALONE  # the group of processes. With several devices, ``ranks`` replaces it
        self._devices = [torch.device("cpu" if device is None else device)]
        self._nodes = 1
        super().__init__(self._devices[0], accelerator, checkpoint_io, precision_plugin)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ------------------------------------------------------------------ one trainer

    # The trainer's plugins are kept apart from the user's. Otherwise Lightning would take them for the user's when the strategy
    # is given to a second trainer: "accelerator set through both strategy class and accelerator flag, choose one".

    @property
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        """The trainer's accelerator. Before the strategy has a trainer, the user's."""
        return self._of_trainer.get("accelerator", super().accelerator)

    @accelerator.setter
    def accelerator(self, accelerator: pl.accelerators.Accelerator) -> None:
        if self._of_trainer:
            raise RuntimeError(
                f"{type(self).__name__} was given to a second Trainer. Expected a new strategy: one strategy object belongs to "
                f"one Trainer. Use Trainer(strategy={self!r})."
            )
        self._of_trainer["accelerator"] = accelerator

    # ------------------------------------------------------------------ one device or several

    _one_device: Any
    """Lightning's strategy for one device."""

    _several_devices: Any
    """Lightning's strategy for several devices."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_class_for_devices(cls, cls._one_device))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the base classes: the class is made at run time, so pickle would find its public base under its name."""
        return _object_for_devices, type(self).__bases__, self.__getstate__()

    def _change_class(self) -> None:
        """Changes the object's class to the one for the present number of devices. Does nothing if it has this class."""
        public = type(self).__bases__[0]
        for_devices: tuple[Any, ...] = (self._one_device,)
        if self._several:
            for_devices = (part_of_several_devices(len(self._devices), self._nodes), self._several_devices)
        if type(self).__bases__ == (public, *for_devices):
            return
        devices = self._devices
        self.__class__ = _class_for_devices(public, *for_devices)
        # Lightning's constructor sets the attributes that the new base needs.
        for_devices[0].__init__(self, devices[0], super().accelerator, given_checkpoint_io(self), self.precision_plugin)
        self._devices = devices  # Lightning's constructor has reset them

    cluster_environment: Any = None
    """Lightning's object with which processes find each other. Lightning sets this attribute of strategies that have it."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices of this node. Empty if there is only one device in all, and the user has not named it (``device=``).

        Lightning reads and sets this attribute of strategies that have it. Setting it may change the class of the object.
        """
        return self._devices if self._device_given or self._several else []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        self._devices = list(devices or [])
        if self._devices:
            self._change_class()

    @property
    def _several(self) -> bool:
        """True if there are several devices on all nodes together."""
        return len(self._devices) * self._nodes > 1

    @property
    def num_nodes(self) -> int:
        """The number of nodes. Lightning sets this attribute of strategies that have it. Setting it may change the class."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._nodes = number
        self.parallel_devices = self._devices

    @property
    def _group(self) -> Group:
        """The processes that train together. :data:`ALONE` before they are connected, and after the group has ended."""
        return ALONE if self._connected.closed else self._connected

    def setup_environment(self) -> None:
        _refuse_processes_alone(self)
        try:
            super().setup_environment()  # the first call of a GPU
        except RuntimeError as error:
            if (step := about_gpu(error)) is not None:
                error.add_note(step)
            raise

    @property
    def root_device(self) -> torch.device:
        """The device on which this process computes: the user's, otherwise the trainer's choice."""
        return self._devices[self.local_rank if len(self._devices) > 1 else 0]

    # ------------------------------------------------------------------ plugins

    @property
    def checkpoint_io(self) -> CheckpointIO:
        """The user's ``CheckpointIO``.

        If there is none, reading this property creates an :class:`~sp_lightning.trainer.checkpoint_io.AtomicCheckpointIO`. A
        user's wrapper without an inner ``CheckpointIO`` gets one as well.
        """
        given = given_checkpoint_io(self)
        if given is None:
            self.checkpoint_io = AtomicCheckpointIO()
        elif wraps_another(given):
            given.checkpoint_io = AtomicCheckpointIO()  # no effect if the wrapper has an inner one already
        return super().checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO | None) -> None:
        set_inherited(HostStrategy, self, "checkpoint_io", io)

    @property
    def precision_plugin(self) -> Precision:
        """The trainer's plugin. Before the strategy has a trainer: the user's; without one, Lightning's plugin for float32."""
        return self._of_trainer.get("precision_plugin") or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        prepare_precision(plugin)
        if self._of_trainer:  # the trainer sets its plugin after its accelerator, so this one is the trainer's
            self._of_trainer["precision_plugin"] = plugin
        else:  # the user's
            set_inherited(HostStrategy, self, "precision_plugin", plugin)

    # ------------------------------------------------------------------ host memory

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Makes modules in host memory, because they may not fit on the device."""
        with super().tensor_init_context(empty_init), torch.device("cpu"):  # the inner context determines the device
            yield


@cache
def _class_for_devices(public: type, *for_devices: type) -> Any:
    """Returns the class of a strategy object.

    Args:
        public: ``SuperpipelineStrategy``, or a user's subclass of it.
        for_devices: Lightning's strategy for the number of devices, after the part of ``ranks`` if there is one.
    """
    return type(public.__name__, (public, *for_devices), {"__module__": public.__module__, "__doc__": public.__doc__})


def _object_for_devices(public: type, *for_devices: type) -> Any:
    """Returns an object without attributes. ``pickle`` calls it."""
    return object.__new__(_class_for_devices(public, *for_devices))


def _refuse_processes_alone(strategy: Any) -> None:
    """Raises an error if a program such as torchrun has started several processes with one device each.

    Raises:
        ValueError: each process would train alone.
    """
    environment = strategy.cluster_environment
    if environment is None or not environment.creates_processes_externally:
        return
    if strategy.num_nodes * len(strategy.parallel_devices) > 1:
        return
    try:
        number = environment.world_size()
    except Exception:
        # For example SLURM without SLURM_NTASKS. On one device, plain Lightning does not call world_size().
        return
    if number > 1:
        raise ValueError(
            f"{number} processes were started (found by {type(environment).__name__}), and each has Trainer(devices=1): each "
            f"would train alone. Expected one process, or all devices. Pass Trainer(devices={number}) on one node; on several "
            "nodes, num_nodes= and the devices of each node."
        )
