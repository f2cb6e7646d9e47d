"""Builds the layers of a module, with their host memory and their device parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.layers.host_casts import Casts
from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.layers.parameter_group import ParameterGroup
from sp_lightning.core.model.found import Found
from sp_lightning.core.model.wrapped import parts, stand_in
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import Allocate, BlockMemory, Staging


def make_layers(
    found: Found,
    plan: Plan,
    device: Device,
    staging: Staging,
    allocate: Allocate,
    make_block: Callable[..., HostBlock],
    *,
    pin: bool,
) -> list[StreamedLayer]:
    """Makes the layers of a plan, in the order of :attr:`Plan.moving`. The residents are last.

    The module's parameters become views of the layers' memory on the host.

    Args:
        found: the layers of the module, for which the plan was made.
        plan: the layout of the layers.
        device: allocates memory.
        staging: host memory for gradients.
        allocate: returns host memory for weights.
        make_block: makes a layer's block, as the class :class:`~sp_lightning.core.store.block.HostBlock` does.
        pin: True if host memory is page-locked.
    """
    found_layers = (*found.layers, *found.masters, *found.tables, found.residents)
    layers: list[StreamedLayer] = []
    for kind, found_layer, planned in zip(kinds(plan), found_layers, (*plan.moving, plan.residents), strict=True):
        seldom = kind in (Kind.MASTERS, Kind.TABLE)
        memory = partial(_allocate_locked, allocate, pin) if plan.steps_on_device else allocate
        block = make_block(found_layer, planned, device, staging, memory, pin=pin, fetched_seldom=seldom)
        autocast = found.autocast if kind is Kind.MASTERS else None
        group = ParameterGroup(planned.spans, block.parameters, device.device, autocast=autocast)
        layers.append(StreamedLayer(len(layers), kind, planned, block, group, expert=len(layers) in plan.experts))
    for layer in layers:
        if layer.planned.masters is not None:
            layer.masters = layers[layer.planned.masters]
            layer.with_masters = (layer, layer.masters)
            layer.masters.owner = layer
            layer.casts = Casts(layer.block, layer.masters, device)
    if pin:
        _warn_of_unpinned(layers)
    return layers


def _warn_of_unpinned(layers: Sequence[StreamedLayer]) -> None:
    """Warns if the system has refused to page-lock memory of layers that are uploaded often."""
    blocks = [layer.block for layer in layers if layer.kind in (Kind.BLOCK, Kind.RESIDENTS)]
    unpinned = sum(block.planned.nbytes for block in blocks if not block.memory.pinned)
    if unpinned:
        warnings.warn(
            f"{unpinned / 2**30:.2f} GiB of CPU memory could not be page-locked (pinned): copies to the device are then "
            "synchronous and two to three times slower, results are the same. Raise the limit of locked memory, if there is "
            "one (ulimit -l), or pass pin_memory=False to go without and without this warning.",
            stacklevel=3,
        )


def _allocate_locked(allocate: Allocate, pin: bool, nbytes: int, seldom: bool) -> BlockMemory:
    """Allocates page-locked memory for a block that the device updates, even if it is rarely uploaded."""
    return allocate(nbytes, pin)


def stand_ins_for_wrapped(found: Found, layers: Sequence[StreamedLayer]) -> dict[nn.Parameter, Any]:
    """Makes a stand-in for each wrapped parameter (a tensor subclass of plain tensors; see ``model.wrapped``).

    Modules hold the stand-in during a step. The layers hold the parameter's plain tensors.
    """
    where = {
        id(part): (layer.parameters, index) for layer in layers for index, part in enumerate(layer.block.parameters)
    }
    made = {}
    for host in found.wrapped:
        members = [where[id(part)] for _, part in parts("", host)]
        (group, index), (part_name, _) = members[0], next(parts("", host))
        name = group.spans[index].name.removesuffix(part_name)
        data = iter([group.stand_in_data[index] for group, index in members])
        made[host] = stand_in(
            host, data, partial(_bring, name, members), partial(_expose, members), members[0][0].layer.rows.computed
        )
    return made


def _bring(name: str, members: Sequence[tuple[ParameterGroup, int]], use: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the plain tensors of a wrapped parameter on the device. Their slots are not reused while they are referenced.

    Args:
        name: the parameter's name.
        members: the parameter group and the index of each plain tensor.
        use, args, kwargs: the function that uses the wrapped parameter, and its arguments.
    """
    group, _ = members[0]
    group.engine.refuse_over(name)
    if group.layer.rows.may_compute_with_wrapped(use, args, kwargs):
        return [group.alias(index) for group, index in members]
    with group.engine.operation_on([group.all[index] for group, index in members]):
        return [group.alias(index) for group, index in members]


def _expose(members: Sequence[tuple[ParameterGroup, int]]) -> None:
    """Records that a wrapped parameter may be written at any time without a change of its versions."""
    for group, index in members:
        group.expose(index)


def kinds(plan: Plan) -> list[Kind]:
    """Returns the kind of each layer, in the order of :attr:`Plan.moving`. The residents are last."""
    counts = {
        Kind.BLOCK: plan.layers,
        Kind.MASTERS: plan.masters,
        Kind.TABLE: plan.tables,
        Kind.RESIDENTS: [plan.residents],
    }
    return [kind for kind, layers in counts.items() for _ in layers]
