"""Sets up a run with ``disk=``: chooses the data on the disk, and has the store of optimizer state.

Optimizer state is put on the disk first, then gradients and trained weights. Frozen weights, and all weights outside of training,
may stay in the user's files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sp_lightning.capabilities.disk import state_on_disk
from sp_lightning.capabilities.disk.away import leave_files
from sp_lightning.capabilities.disk.file_source import WINDOW as STAGED
from sp_lightning.capabilities.disk.host_budget import room_for
from sp_lightning.capabilities.disk.mapped_file import MappedFile, is_on_disk, supported
from sp_lightning.capabilities.disk.placements import FilePlacement, ScratchPlacement, on_disk
from sp_lightning.capabilities.disk.scratch_file import file_system, refuse_full
from sp_lightning.capabilities.disk.state_on_disk import StateOnDisk
from sp_lightning.capabilities.disk.state_placement import (
    WINDOW,
    StatePlacement,
    choose_in_files,
    choose_on_disk,
    place_state,
)
from sp_lightning.capabilities.disk.weights_in_files import FilePlace, Mappings
from sp_lightning.core.device.host_memory import free_garbage, return_free_memory, return_large_blocks
from sp_lightning.core.device.layout import PAGE, whole_pages
from sp_lightning.core.engine.placement import ONE_DEVICE, Placement
from sp_lightning.core.messages import say_once
from sp_lightning.core.model.found import Found, Layer
from sp_lightning.core.plan.ledger import Ledger, Steps, has_known_state, make_ledger, state_tensors
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.updates.state_store import Key, StateStore
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.trainer.host_memory import anonymous_bytes
from sp_lightning.trainer.options import Options


class DiskTier(StateStore):
    """The state store of one run with a disk.

    Args:
        folder: the folder of the scratch file.
        host_memory: the limit of host memory in bytes, or a share of the free memory; None for all free memory.
        log: the logger for messages to the user.

    Attributes:
        placement: which state is in memory and which is on the disk, from :meth:`place`.
        state: the optimizer state on the disk; None if all state is in memory.
        steps: the number of optimizer steps so far.
    """

    option = "disk="
    placement: StatePlacement
    _file: MappedFile

    def __init__(self, folder: Path, host_memory: int | float | None, log: logging.Logger) -> None:
        return_large_blocks()
        self._folder, self._host_memory = folder, host_memory
        self.state: StateOnDisk | None = None
        self.steps = 0
        self._moved_first = 0  # bytes before the second step, which the average leaves out: the first reads no state
        if file_system(folder) in ("tmpfs", "ramfs"):
            tmpfs = "is on a tmpfs, which is CPU memory and no disk. It saves none: name a folder on a drive."
            say_once(log, f"Superpipeline: disk={str(folder)!r} {tmpfs}")

    def place(
        self,
        optimizers: Sequence[Any],
        layer_of: Callable[[nn.Parameter], StreamedLayer | None],
        others: int,
        elsewhere: int,
        beside: int,
        *,
        among: int = 1,
    ) -> None:
        """Chooses the layers whose state is on the disk, and reserves disk space for it.

        Args:
            optimizers: the optimizers.
            layer_of: the layer that a parameter is updated with.
            others: bytes of host memory for gradients, and for the memory of a device that computes on the host.
            elsewhere: bytes that other processes have taken of ``host_memory``.
            beside: bytes of weights and gradients on the disk, for the error.
            among: the number of processes that share the memory, each with a part of the state.

        Raises:
            ValueError: the size of an optimizer's state is unknown before the first step.
            MemoryError: host memory is too small even with a disk.
            OSError: the folder can have no mapped file, or the disk has no room.
        """
        small, large = _state_bytes(optimizers, layer_of)
        return_free_memory()
        room = room_for(self._host_memory, elsewhere)
        self.placement = place_state(
            large, None if room is None else (room - others) // among - small, self._host_memory
        )
        self._file = MappedFile(self._folder, "optimizer state", self.placement.window)
        if self.placement.on_disk:
            self._file.reserve(self.placement.disk_bytes + PAGE, beside)
            self._file.allocate(PAGE, pin=False)  # if files cannot be mapped, the error is raised now and not in a step
            self.state = StateOnDisk(self._file, self.placement.in_memory)

    # ------------------------------------------------------------------ the state of a layer

    @property
    def elsewhere(self) -> bool:  # type: ignore[override]
        return self.state is not None

    @property
    def remark(self) -> str:  # type: ignore[override]
        return str(self.placement)

    def load(self, key: Key, part: Any) -> None:
        if self.state is not None:
            self.state.load(key)

    def store(self, key: Key, part: Any) -> None:
        if self.state is not None:
            self.state.store(key, part)

    def complete_pending(self) -> None:
        self._file.sync()

    def absorb(self, optimizers: Iterable[Any], layer_of: Callable[[nn.Parameter], StreamedLayer | None]) -> None:
        if self.state is not None:
            self.state.absorb(optimizers, layer_of)

    def loaded(self, optimizers: Iterable[Any]) -> None:
        for optimizer in optimizers:
            leave_files(optimizer)

    # ------------------------------------------------------------------ figures

    def step_begins(self, placement: Placement) -> None:
        self.steps += 1
        if self.steps == 2:
            self._moved_first = self._moved(placement)

    def _moved(self, placement: Placement) -> int:
        """Returns the bytes that were read and written so far."""
        moved = placement.moved if isinstance(placement, ScratchPlacement) else 0
        return self._file.read_bytes + self._file.written_bytes + moved

    def count(self, ledger: Ledger, placement: Placement) -> Ledger:
        each = (self._moved(placement) - self._moved_first) / (self.steps - 1) if self.steps > 1 else 0
        below = min(self.placement.disk_bytes, ledger.state or 0)
        staging = self.placement.staging + on_disk(placement).window
        return replace(ledger, on_disk=below, staging=staging, disk_traffic=each)


def open_store(
    run: Any,
    options: Options,
    optimizers: Sequence[Any],
    ledger: Ledger,
    log: logging.Logger,
) -> tuple[StateStore, int]:
    """Opens the state store of a run with a disk.

    With several devices each process opens one, for the layers that it steps. The memory of all processes counts. All processes
    call this together.

    Args:
        run: the run, with its engine.
        options: the user's options.
        optimizers: the optimizers.
        ledger: host memory without the store.
        log: the logger for messages to the user.

    Returns:
        The store of this process, and the bytes of host memory that the state of all processes of the node takes.

    Raises:
        ValueError: the size of an optimizer's state is unknown before the first step.
        MemoryError: host memory is too small even with a disk.
        OSError: the disk has no room.
    """
    free_garbage()
    own = anonymous_bytes()
    elsewhere = sum(run.group.gather(own, "what processes have taken of CPU memory")) - own
    assert options.disk is not None
    tier = DiskTier(options.disk, options.host_memory, log)
    run.placement.leave()  # weights on the disk must not count in the memory that is measured next
    engine, below = run.engine, on_disk(run.placement)
    on_host = engine.plan.allocated_bytes * ledger.ranks * engine.device.computes_on_host
    others = ledger.gradients + on_host + below.window
    beside = below.weight_bytes + below.gradient_bytes
    tier.place(optimizers, engine.updating.layer_of, others, elsewhere, beside, among=run.group.size)
    return tier, sum(run.group.gather(tier.placement.memory_bytes, "where optimizers' state is"))


def _state_bytes(
    optimizers: Sequence[Any], layer_of: Callable[[nn.Parameter], StreamedLayer | None]
) -> tuple[int, Counter[str]]:
    """Returns the bytes of the state of small parameters, which must stay in host memory, and the other bytes of state by layer.

    Raises:
        ValueError: the size of an optimizer's state is unknown before the first step.
    """
    size, on_disk = 0, Counter[str]()
    for optimizer in optimizers:
        if not has_known_state(optimizer):
            raise ValueError(
                f"disk= needs to know the size of the state before the first step, and {type(optimizer).__name__}'s is not "
                "known. Use one of torch's (Adam, AdamW, SGD, Adagrad, RMSprop, NAdam, RAdam, Adamax, Adadelta, Muon), or "
                "leave disk= out."
            )
        for group in optimizer.param_groups:
            count = state_tensors(optimizer, group)
            for parameter in group["params"]:
                layer = layer_of(parameter)
                if layer is not None and parameter.requires_grad:
                    size += count * parameter.nbytes
                    if parameter.nbytes >= state_on_disk.LEAST:
                        on_disk[layer.name] += count * whole_pages(parameter.nbytes)
    return max(0, size - on_disk.total()), on_disk


# ---------------------------------------------------------------------- where weights and gradients are

_STATE = 2
"""The number of state tensors for each parameter that is assumed before the optimizer is made: Adam's."""

_UNTIL_STATE = 16 * 2**20
"""Bytes that the process may take until the optimizers' state is placed: the engine's objects, stacks of threads (3 MiB were
measured). Without this reserve, some sizes of host_memory would be an error only because one layer too few is on the disk."""


Places = Sequence[FilePlace | None]


@dataclass
class WeightsInFiles:
    """The weights of a model that are in files.

    Attributes:
        places: by layer, for layers with weights that can stay in files: the place of each weight; None for a weight that cannot.
        sizes: the bytes of the weights that can stay in files, by layer.
        others: the bytes that are copied to memory in any case: casts, and mapped weights that cannot stay in files.
        resident: bytes of mapped files that are in memory now, and will be evicted.
    """

    places: dict[str, Places] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    others: int = 0
    resident: int = 0


def place(found: Found, plan: Plan, options: Options, device: torch.device, *, accumulate: int) -> Placement:
    """Chooses where weights and gradients are.

    Args:
        found, plan: the layers.
        options: the user's options.
        device: the device of the layers.
        accumulate: the micro-batches of a step; 0 if nothing is trained.

    Raises:
        MemoryError: host memory is too small for the parts that cannot stay in files.
        OSError: no file can be created in the folder.
    """
    assert options.disk is not None
    return_large_blocks()
    free_garbage()
    files = WeightsInFiles()
    with suppress(FileNotFoundError, PermissionError):  # not every system lists the mapped files
        files = _in_files(found, plan, training=accumulate > 0)
    inner = _place_in_files(files, found, plan, options.host_memory, device, training=accumulate > 0)
    if not accumulate or not supported():
        return inner
    missing = missing_bytes(inner, files, found, plan, options, device, accumulate)
    at_once = accumulate > 1 or options.optimizer_overlap != "backward"
    but = inner.places if isinstance(inner, FilePlacement) else ()
    chosen = choose_on_disk(plan, missing, but, gradients=at_once)
    if not chosen.any:
        return inner
    sizes = {"trained weights": chosen.weight_bytes, "gradients": chosen.gradient_bytes}
    with suppress(FileNotFoundError):  # without the folder, creating the scratch files raises a better error
        refuse_full(options.disk, sizes)
    what = " and ".join(f"{human_bytes(nbytes)} of {name}" for name, nbytes in sizes.items() if nbytes)
    remark = (
        f"{what} are on the disk, and those of {WINDOW} layers in memory at a time, because "
        f"{human_bytes(missing)} of CPU memory would be missing even with all optimizer state on the disk."
    )
    return ScratchPlacement(inner, options.disk, chosen, remark)


def _place_in_files(
    files: WeightsInFiles,
    found: Found,
    plan: Plan,
    host_memory: int | float | None,
    device: torch.device,
    *,
    training: bool,
) -> Placement:
    """Returns the placement that leaves weights in their files if they do not fit into host memory.

    Raises:
        MemoryError: host memory is too small for the parts that cannot stay in files.
    """
    room = room_for(host_memory)
    if room is None:
        return ONE_DEVICE
    if device.type == "cpu":  # the slots are host memory, too
        room -= plan.slot_bytes + plan.residents.nbytes
    if training:  # gradients, and two tensors of Adam's state
        room -= 3 * sum(p.nbytes for layer in _layers(found) for _, p in layer.parameters if p.requires_grad)
    room += files.resident
    if not files.places:
        if room >= 0 or training or not isinstance(host_memory, int):
            return ONE_DEVICE
        return Placement(
            f"The process takes {human_bytes(-room)} more than host_memory leaves it, and no weights can be read in place, "
            "because none are in memory that is mapped from a file. Build the module on the meta device, and give its weights "
            "with ckpt_path= or SuperpipelineStrategy(load_weights_from=FILE)."
        )
    largest = max(layer.nbytes for layer in plan.layers if layer.name in files.places)
    names = choose_in_files(files.sizes, files.others, room, STAGED * whole_pages(largest), host_memory)
    if not names:
        return ONE_DEVICE
    stay, nbytes = {name: files.places[name] for name in names}, sum(files.sizes[name] for name in names)
    paths = sorted({place.path for each in stay.values() for place in each if place is not None})
    others = f" and {len(paths) - 1} other files" if len(paths) > 1 else ""
    remark = (
        f"The weights of {len(stay)} layers ({human_bytes(nbytes)}) are read in place from {paths[0]}{others}, because "
        f"{human_bytes(max(room, 0))} of CPU memory are left for weights."
    )
    return FilePlacement(stay, remark, nbytes)


def missing_bytes(
    inner: Placement,
    files: WeightsInFiles,
    found: Found,
    plan: Plan,
    options: Options,
    device: torch.device,
    accumulate: int,
) -> int:
    """Returns the bytes of host memory that are missing for weights, gradients, and state in flight."""
    room = room_for(options.host_memory)
    if room is None:
        return 0
    stay = inner.places if isinstance(inner, FilePlacement) else {}
    needed = files.others + sum(nbytes for name, nbytes in files.sizes.items() if name not in stay) - files.resident
    # Weights in the scratch file of an earlier run take no memory until this run copies them.
    needed += sum(p.nbytes for layer in _layers(found) for _, p in layer.parameters if is_on_disk(p))
    early = options.optimizer_overlap == "backward"
    needed += make_ledger(plan, (), Steps(early, accumulate, clips=None)).gradients
    needed += 2 * _STATE * max(layer.gradient_bytes for layer in plan.trained) + _UNTIL_STATE
    return needed + plan.allocated_bytes * (device.type == "cpu") - room  # device memory is host memory, too


def _layers(found: Found) -> Sequence[Layer]:
    return *found.layers, *found.masters, *found.tables, found.residents


def _in_files(found: Found, plan: Plan, *, training: bool) -> WeightsInFiles:
    """Finds the weights that are mapped from files. Trained weights, masters, tables and residents cannot stay in files."""
    mappings, files = Mappings(), WeightsInFiles()

    def place(parameter: nn.Parameter) -> FilePlace | None:
        ordinary = type(parameter) is nn.Parameter and parameter.is_contiguous()
        return mappings.place(parameter) if ordinary else None

    for layer, planned in zip(found.layers, plan.layers, strict=True):
        places = [place(parameter) for _, parameter in layer.parameters]
        files.others += sum(cast.nbytes for cast in planned.casts) + _nbytes(layer, places)
        if training:
            places = [
                None if p.requires_grad or p.grad is not None else each
                for each, (_, p) in zip(places, layer.parameters, strict=True)
            ]
        if stays := _nbytes(layer, places):
            files.others -= stays
            files.places[planned.name], files.sizes[planned.name] = places, stays
    for layer in (*found.masters, *found.tables, found.residents):
        files.others += _nbytes(layer, [place(parameter) for _, parameter in layer.parameters])
    files.resident = mappings.resident_bytes
    return files


def _nbytes(layer: Layer, places: Places) -> int:
    """Returns the bytes of a layer's weights that have a place in a file."""
    pairs = zip(layer.parameters, places, strict=True)
    return sum(parameter.nbytes for (_, parameter), place in pairs if place is not None)
