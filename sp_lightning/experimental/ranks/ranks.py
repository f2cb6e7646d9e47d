"""The ranks: the processes that train one model together. Each rank has its own device. The ranks of a node share one host store.

All communication goes through torch.distributed: tensors and barriers through collectives (``collectives``), errors through its
store (``failures``). Nodes are replicas: each node has its own host store, in which its processes step their layers.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import monotonic, sleep
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.core.device.device import Wait
from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.device.pages import create, supported
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.placement import Placement
from sp_lightning.experimental.ranks import collectives
from sp_lightning.experimental.ranks.agreement import compare_models, compare_optimizers, refuse_on_ranks
from sp_lightning.experimental.ranks.collectives import Collectives, in_words
from sp_lightning.experimental.ranks.failures import RankError
from sp_lightning.experimental.ranks.placement import RankPlacement
from sp_lightning.experimental.ranks.shared_memory import SharedMemory
from sp_lightning.experimental.ranks.steps import RankSteps, owned_state
from sp_lightning.trainer.group import Group
from sp_lightning.trainer.options import Options


class Ranks(Collectives, Group):
    """The processes of this node, and their collectives with those of other nodes.

    Every process of every node makes an object of this class at the same time, and calls its collective methods in the same
    order. The new object closes earlier objects whose run has ended.

    Args:
        device: the device on which this rank computes.
        per_node: the number of ranks of each node; None if there is one node.

    Raises:
        RuntimeError: memory cannot be shared on this system.

    Attributes:
        over: True if the last run has ended. The next object of this class then closes this object.
        closed: True if this object is closed.
        stepped: the number of optimizer steps so far.
    """

    def __init__(self, device: torch.device, per_node: int | None = None) -> None:
        why = supported()
        if why:
            raise RuntimeError(
                f"superpipeline shares CPU memory between the processes of several devices, and cannot do so here: {why}. "
                "Pass Trainer(devices=1)."
            )
        former = [each for each in _open if each.over]
        for each in former:  # here, in all processes at the same time, and not when Python's garbage collector runs
            each.close()
        super().__init__(device, per_node)
        for each in former:  # of failed runs: now all processes have connected anew, so none is in a collective of them
            each.end_groups()
        self.over: bool = False
        self.closed = False
        self.stepped = 0
        _open.append(self)

    # ------------------------------------------------------------------ the interface of the trainer

    alone = False

    def check_model(self, module: pl.LightningModule, options: Options, plugin: Any) -> None:
        refuse_on_ranks(module, options, plugin)
        compare_models(self, module, options)

    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        compare_optimizers(self, optimizers)

    def placement(self) -> Placement:
        return RankPlacement(self)

    def steps(self, engine: Callable[[], Engine]) -> RankSteps:
        return RankSteps(self, engine)

    def owned_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return owned_state(optimizer, state)

    def note_place(self, place: str) -> None:
        self.place = place

    def gather(self, number: int, what: str) -> list[int]:
        first = self.node * self.size
        return [int(each) for each in self.barrier(what, number)[first : first + self.size]]

    def send_buffers(self, module: pl.LightningModule) -> None:
        self.broadcast([buffer for buffer in module.buffers() if buffer.numel()])

    # ------------------------------------------------------------------ memory

    def share(self, nbytes: int, name: str) -> SharedMemory:
        """Makes memory that all ranks of the node share, filled with zeros. Collective.

        Args:
            nbytes: the size in bytes. It is rounded up to whole pages.
            name: the purpose of the memory, for errors.

        Raises:
            RuntimeError: the system has not enough memory.
        """
        nbytes = whole_pages(nbytes)
        descriptor = self._file(nbytes, name)
        try:
            with self._for_memory(nbytes, name):
                return SharedMemory(descriptor, nbytes)
        finally:
            os.close(descriptor)

    def _file(self, nbytes: int, name: str) -> int:
        """Makes a file in memory that all ranks of the node share, and returns a descriptor of it. Collective.

        The other ranks open the first rank's descriptor through ``/proc``, where only processes of the same user may open it.
        So the processes need no common file system, and the memory has no name that other users could find.
        """
        made = -1
        with self._for_memory(nbytes, name):
            if self.rank == 0:
                made = create(nbytes, f"superpipeline {name}")
        path = self._broadcast_object(f"/proc/{os.getpid()}/fd/{made}", name)
        with self._for_memory(nbytes, name):
            if self.rank:
                made = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.barrier(f"access to memory for {name}")  # until here the first rank's descriptor must stay open
        return made

    @contextmanager
    def _for_memory(self, nbytes: int, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RuntimeError(
                f"The system does not give {self.name} {nbytes / 2**30:.2f} GiB of CPU memory for {name}, which all "
                f"processes of the node share: {error}. Raise the limits of processes (ulimit -v, ulimit -f), or train less: "
                "freeze layers, or train adapters."
            ) from error

    def wait_until(self, counter: Tensor, number: int, why: Wait) -> None:
        """Waits until another rank of the node has set a counter in shared memory to at least a number.

        Raises:
            RankError: another rank has failed or ended.
            RankInterrupt: another rank was interrupted.
        """
        looks, late = 0, monotonic() + collectives.TIMEOUT.total_seconds()
        while int(counter) < number:
            looks += 1
            if monotonic() > late:
                raise RankError(f"{self.name} has lost other ranks while it waited for {in_words(why)}.")
            sleep(min(1e-5 * looks, 1e-3))
            if looks % 200 == 0 and (error := self.error(why)) is not None:
                raise error

    # ------------------------------------------------------------------ runs and failures

    def fail(self, error: BaseException) -> None:
        """Records an error of this rank, and reports it to all ranks. Does nothing after the first error of this rank."""
        if self.failure:
            return
        self.failure = f"{type(error).__name__}: {error}"
        self.failures.report(error)

    def run_begins(self) -> None:
        """Called when a run begins. Starts the thread that reads errors of other ranks."""
        self.over = False
        self.failures.begin()

    def run_ends(self) -> None:
        """Called when this rank's run ends. If this rank has not failed, waits for all ranks. Then ends the reading thread."""
        self.over = True
        self.place = ""
        try:
            if not self.failure:
                self.barrier("the end of its run")
        finally:
            self.failures.end()

    def close(self) -> None:
        """Ends the thread and the process groups. Not collective, but all ranks call it.

        After an error of this rank, other ranks may still be in a collective. In this case the groups end later, when all ranks
        have connected anew.
        """
        self.closed = True
        _open.remove(self)
        self.failures.end()
        if not self.failure:
            self.end_groups()


_open: list[Ranks] = []
"""The objects of this process that are not closed: usually one, because a new object closes those whose run has ended."""
