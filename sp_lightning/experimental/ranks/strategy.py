"""The strategy's part for several devices: starts and connects processes, and ends waits for processes that have failed."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from sp_lightning.experimental.ranks.agreement import (
    refuse_other_places,
    refuse_restart_with_old_store,
)
from sp_lightning.experimental.ranks.failures import RankError
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.experimental.ranks.steps import DividedState
from sp_lightning.trainer.compat import barrier_before_batches, is_interactive
from sp_lightning.trainer.group import Group

if TYPE_CHECKING:
    _Base = DDPStrategy
else:
    _Base = object  # each object's class adds the DDPStrategy of its package (lightning or pytorch_lightning) as a base


class RankStrategy(_Base):
    """The methods of a :class:`~sp_lightning.trainer.host_strategy.HostStrategy` with several devices.

    An object's class has three bases: the public strategy, or a user's that derives from it; this class; and ``DDPStrategy``.
    The arguments are those of ``SingleDeviceStrategy``.
    """

    log: logging.Logger
    _devices: list[torch.device]
    _nodes: int
    _group: Group
    _connected: Group

    def __init__(self, device: torch.device, accelerator: Any, checkpoint_io: Any, precision_plugin: Any) -> None:
        super().__init__(
            accelerator,
            cluster_environment=self.cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            start_method="fork" if is_interactive() else "popen",
        )

    @property
    def _ranks(self) -> Ranks | None:
        """The connected processes; None before they are connected, and after another object has closed them."""
        group = self._group
        return group if isinstance(group, Ranks) else None

    # ------------------------------------------------------------------ a run begins and ends

    def setup_environment(self) -> None:
        """Connects the processes, before user code can fail in one of them. Reads errors of other ranks from now on.

        From now on each training batch also begins with a barrier.

        Raises:
            RuntimeError: torchrun has started the processes again, with the store of the earlier processes.
            ValueError: the number or the order of the processes is not the trainer's.
            RankError: the other ranks cannot be reached.
        """
        refuse_restart_with_old_store()
        super().setup_environment()
        ranks = self._connect()
        if self.lightning_module is not None:
            ranks.run_begins()
            barrier_before_batches(
                self.lightning_module.trainer, lambda: ranks.barrier("the beginning of the next batch")
            )

    def _connect(self) -> Ranks:
        """Returns the connected processes. Connects them in the first run, and again after a run that failed.

        If this rank is connected for the first time and is not rank 0 of all, limits its log to warnings.
        """
        if (former := self._ranks) is not None:
            if not former.failure:
                return former
            if former.aborted:
                raise RankError(
                    f"an error in an earlier run ({former.failure}) has ended the collectives of the devices, which are those of "
                    "torch.distributed's default group. Start the processes again."
                )
            former.over = True
        refuse_other_places(self)
        again = not self._connected.alone
        try:
            ranks = Ranks(self.root_device, len(self._devices))
        except dist.DistError as error:
            raise RankError(
                f"rank {self.global_rank} cannot connect to the other ranks ({error}). Their processes may have ended since the "
                "last run. All ranks must call trainer.fit and the like in the same order."
            ) from error
        self._connected = ranks
        # Messages of rank 0 hold for all ranks, but a warning may concern only one rank.
        if not ranks.first and not again:
            self.log = self.log.getChild(f"rank{self.global_rank}")
            self.log.setLevel(logging.WARNING)
        return ranks

    def teardown(self) -> None:
        try:
            if self._ranks is not None:
                self._ranks.run_ends()
                if self.lightning_module is not None:
                    barrier_before_batches(self.lightning_module.trainer, None)
        finally:
            # Lightning would read all state to move it to the host, where it is already.
            optimizers, self.optimizers = self.optimizers, []
            try:
                super().teardown()
            finally:
                self.optimizers = optimizers

    def optimizer_state(self, optimizer: Any) -> Any:
        """Returns an optimizer's state dictionary. Rank 0's has the whole state. Collective."""
        state = vars(getattr(optimizer, "_optimizer", optimizer)).get("state")
        return state.gathered() if isinstance(state, DividedState) else super().optimizer_state(optimizer)

    # ------------------------------------------------------------------ collectives

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> None:
        """Waits for the other processes. After an error of this rank, returns at once: other ranks may never call the barrier."""
        if self._ranks is None:
            super().barrier(name, *args, **kwargs)
        elif not self._ranks.failure:
            self._ranks.barrier(f"Lightning's barrier {name!r}" if name else "a barrier of Lightning's")

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
        """Returns a context for a collective. It begins once all processes have reached it.

        The context does nothing before processes are connected, after an error of this rank, and for groups of user code.

        Args:
            what: the name of the collective, for errors.
            group: the process group of the collective; None for the default group.
        """
        ranks = self._ranks
        if ranks is None or ranks.failure or group not in (None, dist.group.WORLD):
            return nullcontext()
        return ranks.together(what)
