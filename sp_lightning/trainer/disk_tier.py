"""What of a run is on a disk: the state of its optimizers, as far as host memory does not hold it."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from sp_lightning.device.host_allocator import return_free_memory, return_large_blocks
from sp_lightning.device.layout import whole_pages
from sp_lightning.engine.placement import Placement
from sp_lightning.observe.messages import say_once
from sp_lightning.optim import state_on_disk
from sp_lightning.optim.state_on_disk import StateOnDisk
from sp_lightning.plan.host_memory import room_for
from sp_lightning.plan.ledger import Ledger, has_known_state, state_tensors
from sp_lightning.plan.state_placement import StatePlacement, place_state
from sp_lightning.store.scratch import ScratchFile, file_system
from sp_lightning.store.staging_ring import StagingRing
from sp_lightning.trainer.compat import is_no_optimizer
from sp_lightning.weights.layer import StreamedLayer


class DiskTier:
    """The disk of one run.

    Args:
        folder: where the scratch file is.
        host_memory: bytes that the process may take, or a share of what is free; None for all that is free.
        still: a context in which no update is under way.
        log: where a user's messages go.

    Raises:
        OSError: no file can be created in the folder.

    Attributes:
        placement: what is where, once :meth:`place` has decided it.
        steps: how many steps optimizers have taken.
    """

    def __init__(
        self,
        folder: Path,
        host_memory: int | float | None,
        still: Callable[[], AbstractContextManager[None]],
        log: logging.Logger,
    ) -> None:
        self._file = ScratchFile(folder)
        return_large_blocks()
        self._host_memory = host_memory
        self._still = still
        self._states: dict[Optimizer, StateOnDisk] = {}
        self._ring = StagingRing(0)
        self.placement: StatePlacement | None = None
        self.steps = 0
        self._moved_first = 0  # bytes, in the first step, in which there is no state to be read
        if file_system(folder) in ("tmpfs", "ramfs"):
            say_once(
                log,
                f"Superpipeline: disk={str(folder)!r} is on a tmpfs, which is host memory and no disk. It saves none: "
                "name a folder on a drive.",
            )
        elif not self._file.direct:
            say_once(
                log,
                f"Superpipeline: the file system of disk={str(folder)!r} has no direct I/O: bytes are copied once more.",
            )

    def place(
        self,
        optimizers: Sequence[Any],
        layer_of: Callable[[nn.Parameter], StreamedLayer | None],
        others: int,
        elsewhere: int = 0,
        beside: int = 0,
    ) -> StatePlacement:
        """Decides which layers' state is on the disk, and reserves room for it there.

        Args:
            optimizers: whose state it is.
            layer_of: the layer that a parameter is updated with.
            others: bytes of host memory that gradients will take, and the device's own memory if it computes on the host.
            elsewhere: bytes that other processes have taken, if several have ``host_memory`` in common.
            beside: bytes of weights and gradients that are on the disk.

        Raises:
            ValueError: an optimizer's step cannot be taken apart by layers.
            MemoryError: host memory does not suffice even so.
            OSError: the disk has no room.
        """
        refuse(optimizers)
        sizes, on_disk = Counter[str](), Counter[str]()
        for optimizer in [each for each in optimizers if not is_no_optimizer(each)]:
            for group in optimizer.param_groups:
                count = state_tensors(optimizer, group)
                for parameter in group["params"]:
                    layer = layer_of(parameter)
                    if layer is not None and parameter.requires_grad:
                        sizes[layer.name] += count * parameter.nbytes
                        if parameter.nbytes >= state_on_disk.LEAST:
                            on_disk[layer.name] += count * whole_pages(parameter.nbytes)
        others += max(0, sum(sizes.values()) - sum(on_disk.values()))
        self.placement = place_state(on_disk, self._room(others, elsewhere), self._host_memory)
        self._file.reserve(self.placement.disk_bytes, beside)
        self._ring.limit = self.placement.staging
        return self.placement

    def _room(self, others: int, elsewhere: int) -> int | None:
        """Bytes of host memory for state that may go to the disk, beside gradients and state that may not."""
        return_free_memory()
        room = room_for(self._host_memory, elsewhere)
        return None if room is None else room - others

    def count_step(self, where: Placement) -> None:
        """Counts a step that an optimizer begins. ``where`` is where weights and gradients are."""
        self.steps += 1
        if self.steps == 2:
            self._moved_first = self._moved(where)

    def _moved(self, where: Placement) -> int:
        """Bytes that were read and written so far."""
        return self._file.read_bytes + self._file.written_bytes + where.moved

    def of(self, optimizer: Any) -> StateOnDisk | None:
        """What brings an optimizer's state; None if all of it is in memory."""
        if self.placement is None or not self.placement.on_disk or is_no_optimizer(optimizer):
            return None
        if optimizer not in self._states:
            self._states[optimizer] = StateOnDisk(self._file, self._ring, self.placement.in_memory, self._still)
        return self._states[optimizer]

    def absorb(self, optimizers: Sequence[Any], layer_of: Callable[[nn.Parameter], StreamedLayer | None]) -> None:
        """Writes the state that optimizers have now: layers are new, or a checkpoint has given it."""
        for optimizer in [each for each in optimizers if not is_no_optimizer(each)]:
            state = self.of(optimizer)
            if state is not None:
                state.absorb(optimizer, _by_layer(optimizer, layer_of))

    def note_in(self, ledger: Ledger, where: Placement) -> Ledger:
        """Returns a ledger with the state on the disk, with the memory that all passes through, and with traffic.

        Args:
            ledger: as :func:`without` returns it.
            where: where weights and gradients are.
        """
        if self.placement is None:
            return ledger
        each = (self._moved(where) - self._moved_first) / (self.steps - 1) if self.steps > 1 else 0
        below = min(self.placement.disk_bytes, ledger.state or 0)
        return replace(ledger, on_disk=below, staging=self.placement.staging + where.on_disk.window, disk_traffic=each)


def _by_layer(
    optimizer: Any, layer_of: Callable[[nn.Parameter], StreamedLayer | None]
) -> Mapping[StreamedLayer, Sequence[nn.Parameter]]:
    found = defaultdict(list)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            layer = layer_of(parameter)
            if layer is not None:
                found[layer].append(parameter)
    return found


def without(ledger: Ledger, where: Placement) -> Ledger:
    """Returns a ledger of what is in memory: without weights that are in files, and weights and gradients on the disk."""
    weights, gradients = where.on_disk.weight_bytes, where.on_disk.gradient_bytes
    return replace(
        ledger,
        weights=ledger.weights - where.bytes_in_files - weights,
        gradients=max(0, ledger.gradients - gradients),  # fewer, if the mode was chosen after what is on the disk
        weights_on_disk=weights,
        gradients_on_disk=gradients,
    )


def refuse(optimizers: Sequence[Any]) -> None:
    """Refuses optimizers of which it is not known that they step each parameter by itself.

    Raises:
        ValueError: there is one.
    """
    for optimizer in optimizers:
        if not is_no_optimizer(optimizer) and not has_known_state(optimizer):
            raise ValueError(
                f"disk= has the state of one layer in memory at a time, and {type(optimizer).__name__} is not known to step each "
                "layer by itself. Use one of torch's (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta), or "
                "leave disk= out."
            )
