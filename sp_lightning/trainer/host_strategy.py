"""A strategy that leaves parameters, optimizer state and what is made anew on the host, on one device or several."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import SingleDeviceStrategy

from sp_lightning.ranks.agreement import choose_interface, refuse_other_places, refuse_processes_alone
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.sharing.shared_base import refuse_several_devices
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from sp_lightning.trainer.compat import (
    given_checkpoint_io,
    is_interactive,
    meet_before_batches,
    set_inherited,
    wraps_another,
)
from sp_lightning.trainer.options import prepare_precision

if TYPE_CHECKING:
    _Base = SingleDeviceStrategy
else:
    _Base = object  # the strategies that are registered add those of their Lightning


class HostStrategy(_Base):
    """What a trainer hands to a strategy (devices, nodes, plugins), checked, and kept off the device.

    Args:
        device: where layers compute; None for the trainer's choice.
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
        self._of_trainer: dict[str, Any] = {}
        self._made_ranks: Ranks | None = None
        self._devices = [torch.device("cpu" if device is None else device)]
        self._nodes = 1
        super().__init__(self._devices[0], accelerator, checkpoint_io, precision_plugin)

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        if cls.strategy_name not in strategy_registry:
            strategy_registry.register(cls.strategy_name, cls, description=cls.__name__)

    # ------------------------------------------------------------------ one trainer

    # What a trainer gives is kept apart from what the user gave. Otherwise Lightning takes it for the user's when the strategy is
    # given to a second trainer: "accelerator set through both strategy class and accelerator flag, choose one".

    @property
    def accelerator(self) -> pl.accelerators.Accelerator | None:
        """The trainer's accelerator; before there is a trainer, the one that was given."""
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
    """Lightning's strategy of one device, which this one derives from unless it is given several."""

    _several_devices: Any
    """Lightning's strategy of several devices, which this one derives from once it is given some."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        return object.__new__(_derived(cls, cls._one_device))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A class that was made here has no name under which pickle would find it."""
        return _unpickled, type(self).__bases__, self.__getstate__()

    cluster_environment: Any = None
    """How the processes of several devices find each other. Lightning hands its choice to strategies that have this."""

    @property
    def parallel_devices(self) -> list[torch.device]:
        """The devices that were given, if any. Lightning hands its choice to strategies that have this attribute."""
        return self._devices if self._device_given or self._several else []

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        self._devices = list(devices or [])
        if self._several:
            refuse_several_devices()
        if self._devices:
            self._derive_from(self._several_devices if self._several else self._one_device)

    @property
    def _several(self) -> bool:
        """Whether there are several devices, of this node or of all."""
        return len(self._devices) * self._nodes > 1

    @property
    def num_nodes(self) -> int:
        """How many nodes there are. Lightning hands the trainer's number to strategies that have this attribute."""
        return self._nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._nodes = number
        self.parallel_devices = self._devices

    def _derive_from(self, base: Any) -> None:
        """Lightning says how many devices there are when the strategy is made already, so it changes its class then."""
        if issubclass(type(self), base):
            return
        devices, environment = self._devices, self.cluster_environment
        self.__class__ = _derived(type(self).__bases__[0], base)
        common = {"checkpoint_io": given_checkpoint_io(self), "precision_plugin": self.precision_plugin}
        if base is self._one_device:
            base.__init__(self, devices[0], super().accelerator, **common)
        else:
            base.__init__(
                self,
                super().accelerator,
                cluster_environment=environment,
                start_method="fork" if is_interactive() else "popen",
                **common,
            )
        self._devices = devices

    @property
    def _all_ranks(self) -> Ranks | None:
        """The processes that train together, once they are connected; None for one device."""
        if self._several and (self._ranks is None or self._ranks.failure):  # a run may follow one that failed
            if self._ranks is not None:
                self._ranks.close()
            refuse_other_places(self)
            again = self._made_ranks is not None
            self._made_ranks = made = Ranks(self.root_device, len(self._devices))
            if not made.first and not again:  # what rank 0 says is true of all; warnings may be of one alone
                self.log = self.log.getChild(f"rank{self.global_rank}")
                self.log.setLevel(logging.WARNING)
        return self._ranks if self._several else None

    @property
    def _ranks(self) -> Ranks | None:
        """The processes that are connected, unless another strategy has trained since."""
        return None if self._made_ranks is None or self._made_ranks.closed else self._made_ranks

    def _note_failure(self, error: BaseException) -> None:
        """Announces an error of this process to the others, so that they stop waiting for it."""
        if self._ranks is not None:
            self._ranks.fail(error)

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Waits for the other processes. After an error it does not: they may never come."""
        if self._ranks is None:
            super().barrier(name, *args, **kwargs)
        elif not self._ranks.failure:
            self._ranks.meet_everybody(f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's")

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        with self._together("Lightning's broadcast"):
            return super().broadcast(obj, src)

    def reduce(self, tensor: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._together("Lightning's sum over ranks", group):
            return super().reduce(tensor, group, *args, **kwargs)

    def all_gather(self, tensor: Any, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        with self._together("Lightning's gathering of a tensor", group):
            return super().all_gather(tensor, group, *args, **kwargs)

    def _together(self, what: str, group: Any = None) -> AbstractContextManager[None]:
        """Around what all processes do together: it begins once all of them have come to it."""
        ranks = self._ranks
        if ranks is None or ranks.failure or group not in (None, dist.group.WORLD):
            return nullcontext()
        return ranks.together(what, ranks.meet_everybody)

    def setup_environment(self) -> None:
        """The processes are connected before anything of the user's can fail in one of them."""
        refuse_processes_alone(self)
        if self._nodes > 1:
            choose_interface(self.cluster_environment.main_address)
        super().setup_environment()
        ranks = self._all_ranks
        if ranks is not None and self.lightning_module is not None:
            ranks.run_begins()
            meet_before_batches(self.lightning_module.trainer, lambda: ranks.meet("the beginning of the next batch"))

    def teardown(self) -> None:
        try:
            if self._ranks is not None:
                self._ranks.run_ends()
                if self.lightning_module is not None:
                    meet_before_batches(self.lightning_module.trainer, None)
        finally:
            super().teardown()

    @property
    def root_device(self) -> torch.device:
        """The device on which this process computes: the one that was given, else the trainer's choice."""
        return self._devices[self.local_rank if len(self._devices) > 1 else 0]

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
        """The trainer's; before there is a trainer, the one that was given, else one for float32."""
        return self._of_trainer.get("precision_plugin") or super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        prepare_precision(plugin)
        if self._of_trainer:
            self._of_trainer["precision_plugin"] = plugin
        else:
            set_inherited(HostStrategy, self, "precision_plugin", plugin)

    # ------------------------------------------------------------------ what stays on the host

    @contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        """Modules are made on the host: on the device they might not fit."""
        with super().tensor_init_context(empty_init), torch.device("cpu"):  # the device of the inner context counts
            yield


@cache
def _derived(users: type, base: type) -> Any:
    """The class of a strategy: the public one, or a user's that derives from it, and Lightning's for its devices."""
    return type(users.__name__, (users, base), {"__module__": users.__module__, "__doc__": users.__doc__})


def _unpickled(users: type, base: type) -> Any:
    return object.__new__(_derived(users, base))
