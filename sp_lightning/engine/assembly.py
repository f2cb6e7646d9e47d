"""Assembly: builds a module's layers, with their memory on the host, their device parameters and their tables."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.model.found import Found
from sp_lightning.model.wrapped import parts, stand_in
from sp_lightning.observe.messages import say_once
from sp_lightning.plan.plan import Plan
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import Allocate
from sp_lightning.store.gradient_memory import Staging
from sp_lightning.weights.casts import Casts
from sp_lightning.weights.embedding_rows import EmbeddingRows
from sp_lightning.weights.expert_rows import ExpertRows
from sp_lightning.weights.layer import Kind, StreamedLayer
from sp_lightning.weights.parameter_group import ParameterGroup


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
    """Makes the layers of a plan, in the order of :attr:`Plan.moving`; the residents come last.

    The module's parameters become views of the layers' memory on the host.

    Args:
        found: the layers of the module, for which the plan was made.
        plan: says where everything lies.
        device: allocates memory.
        staging: host memory for gradients.
        allocate: returns host memory for weights.
        make_block: makes a layer's block, as the class :class:`~sp_lightning.store.block.HostBlock` does.
        pin: whether host memory is page-locked.
    """
    kinds = list(_kinds(plan))
    found_layers = (*found.layers, *found.masters, *found.tables, found.residents)
    blocks = [
        make_block(
            layer, planned, device, staging, allocate, pin=pin, fetched_seldom=kind in (Kind.MASTERS, Kind.TABLE)
        )
        for layer, planned, kind in zip(found_layers, (*plan.moving, plan.residents), kinds, strict=True)
    ]
    if pin:
        _warn_unpinned(
            [block for block, kind in zip(blocks, kinds, strict=True) if kind in (Kind.BLOCK, Kind.RESIDENTS)]
        )
    layers: dict[int, StreamedLayer] = {}
    # Blocks come last, because masters have to exist before their owners.
    for index in sorted(range(len(blocks)), key=lambda index: kinds[index] is Kind.BLOCK):
        block, kind = blocks[index], kinds[index]
        masters = None if block.planned.masters is None else layers[block.planned.masters]
        autocast = found.autocast if kind is Kind.MASTERS else None
        layers[index] = StreamedLayer(
            index,
            kind,
            block.planned,
            block,
            ParameterGroup(block.planned.spans, block.parameters, device.device, autocast=autocast),
            casts=None if masters is None else Casts(block, masters.block, device),
            masters=masters,
            expert=index in plan.experts,
        )
    return [layers[index] for index in range(len(blocks))]


def make_tables(
    found: Found, layers: Sequence[StreamedLayer], device: Device, *, pin: bool, compacted: set[StreamedLayer]
) -> list[EmbeddingRows]:
    """Makes the tables, one for each embedding of which only rows travel, and gives them to their layers."""
    tables = []
    table_layers = [layer for layer in layers if layer.kind is Kind.TABLE]
    for layer, found_layer in zip(table_layers, found.tables, strict=True):
        embedding: Any = found.places[found_layer.parameters[0][1]][0].module
        table = layer.table = EmbeddingRows(embedding, layer, device, pin=pin, compacted=compacted)
        layer.parameters.look_up = table.look_up
        tables.append(table)
    return tables


def make_experts(layers: Sequence[StreamedLayer], log: logging.Logger | None) -> None:
    """Makes what knows the rows of each layer of stacked experts, and gives it to the layer."""
    said = set[str]()

    def say(layer: StreamedLayer, why: str) -> None:
        if why not in said:
            said.add(why)
            line = f"Superpipeline: all experts of {layer.name!r} come with each call, because {why}. "
            line += "Other layers for which the same holds are not named."
            say_once(log or logging.getLogger("lightning.pytorch"), line)

    for layer in layers:
        if layer.planned.rows:
            layer.experts = ExpertRows(layer, partial(say, layer))
            layer.parameters.come_by_rows(layer.experts)


def stand_ins_for_wrapped(found: Found, layers: Sequence[StreamedLayer]) -> dict[nn.Parameter, Any]:
    """Makes a stand-in for each wrapped parameter, whose parts are in the layers. Modules hold it during a step."""
    where = {
        id(part): (layer.parameters, index) for layer in layers for index, part in enumerate(layer.block.parameters)
    }
    made = {}
    for host in found.wrapped:
        members = [where[id(part)] for _, part in parts("", host)]
        away = iter([group.away[index] for group, index in members])
        made[host] = stand_in(host, away, partial(_bring, members), partial(_expose, members))
    return made


def _bring(members: Sequence[tuple[ParameterGroup, int]], use: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Returns the parts of a wrapped parameter on the device. Whoever holds them holds their slots."""
    experts = members[0][0].experts
    if experts is not None and experts.may_compute_with_wrapped(use, args, kwargs):
        return [group.alias(index) for group, index in members]
    with members[0][0].doors.on_demand([group.all[index] for group, index in members]):
        return [group.alias(index) for group, index in members]


def _expose(members: Sequence[tuple[ParameterGroup, int]]) -> None:
    """Notes that the parts of a wrapped parameter may be written at any time without a change of their versions."""
    for group, index in members:
        group.exposed.add(index)


def _kinds(plan: Plan) -> Iterator[Kind]:
    for kind, layers in ((Kind.BLOCK, plan.layers), (Kind.MASTERS, plan.masters), (Kind.TABLE, plan.tables)):
        yield from [kind] * len(layers)
    yield Kind.RESIDENTS


def _warn_unpinned(blocks: Sequence[HostBlock]) -> None:
    unpinned = sum(block.planned.nbytes for block in blocks if not block.pinned)
    if unpinned:
        warnings.warn(
            f"{unpinned / 2**30:.2f} GiB of host memory could not be page-locked (pinned): copies to the device are then "
            "synchronous and two to three times slower, results are the same. Raise the limit of locked memory, if there is "
            "one (ulimit -l), or pass pin_memory=False to go without and without this warning.",
            stacklevel=2,
        )
