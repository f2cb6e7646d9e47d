"""Which trained weights and gradients are on a disk: what host memory does not hold although all optimizer state is there."""

from __future__ import annotations

from contextlib import suppress

import torch

from sp_lightning.device.host_allocator import free_garbage, return_large_blocks
from sp_lightning.engine.placement import ONE_DEVICE, OnFiles, OnScratch, Placement
from sp_lightning.model.found import Found
from sp_lightning.plan.host_memory import room_for
from sp_lightning.plan.ledger import make_ledger
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.state_placement import WINDOW, choose_on_disk
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.mapped_file import is_on_disk, supported
from sp_lightning.store.scratch import refuse_full
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.weights_in_place import InFiles, in_files, place_weights

_STATE = 2
"""Tensors of state that an optimizer has for a parameter, as Adam has, before there is one."""

_UNTIL_STATE = 16 * 2**20
"""What the process itself may take until the optimizers' state is placed: the engine's objects, stacks of threads (3 MiB were
measured). Without it, sizes of host_memory just above those at which one layer less goes to the disk would be refused."""


def place(found: Found, plan: Plan, options: Options, device: torch.device, *, accumulate: int) -> Placement:
    """Decides where weights are.

    Args:
        found, plan: the layers.
        options: the user's.
        device: where layers compute.
        accumulate: how many micro-batches a step has; 0 if no weights are trained.

    Returns:
        The engine's parts for it.

    Raises:
        MemoryError: there is not even room for what does not stay in files.
        OSError: no file can be created in the folder.
    """
    if options.disk is None:
        return ONE_DEVICE
    return_large_blocks()
    free_garbage()
    inner = place_weights(found, plan, options.host_memory, device, training=accumulate > 0)
    if not accumulate or not supported():
        return inner
    missing = missing_bytes(inner, found, plan, options, device, accumulate)
    at_once = accumulate > 1 or options.optimizer_overlap != "backward"
    but = inner.places if isinstance(inner, OnFiles) else ()
    chosen = choose_on_disk(plan, missing, but, gradients=at_once)
    if not chosen.any:
        return inner
    sizes = {"trained weights": chosen.weight_bytes, "gradients": chosen.gradient_bytes}
    with suppress(FileNotFoundError):  # there is an error of its own for that
        refuse_full(options.disk, sizes)
    what = " and ".join(f"{human_bytes(nbytes)} of {name}" for name, nbytes in sizes.items() if nbytes)
    remark = (
        f"{what} are on the disk, and those of {WINDOW} layers in memory at a time, because "
        f"{human_bytes(missing)} of host memory would be missing even with all optimizer state on the disk."
    )
    return OnScratch(inner, options.disk, chosen, remark)


def missing_bytes(
    inner: Placement, found: Found, plan: Plan, options: Options, device: torch.device, accumulate: int
) -> int:
    """Returns how much host memory is missing for weights, gradients, and the state of layers on its way."""
    room = room_for(options.host_memory)
    if room is None:
        return 0
    files, stay = InFiles(), inner.places if isinstance(inner, OnFiles) else {}
    with suppress(FileNotFoundError, PermissionError):  # not every system says what is mapped
        files = in_files(found, plan, training=True)
    needed = files.others + sum(nbytes for name, nbytes in files.sizes.items() if name not in stay) - files.resident
    layers = (*found.layers, *found.masters, *found.tables, found.residents)
    needed += sum(p.nbytes for layer in layers for _, p in layer.parameters if is_on_disk(p))
    early = options.optimizer_overlap == "backward"
    needed += make_ledger(plan, (), early=early, accumulate=accumulate, clips=None, scales=False).gradients
    needed += 2 * _STATE * max(layer.gradient_bytes for layer in plan.trained) + _UNTIL_STATE
    return needed + plan.allocated_bytes * (device.type == "cpu") - room  # there, device memory is host memory
