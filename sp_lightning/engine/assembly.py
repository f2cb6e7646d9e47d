"""Assembly: builds a module's layers, with their memory on the host, their device parameters and their rows, and hooks on it."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from sp_lightning.device.device import Device
from sp_lightning.engine.access import Access
from sp_lightning.engine.module_hooks import ModuleHooks, Visits, attach_module_hooks, hook_on
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
    found_layers = (*found.layers, *found.masters, *found.tables, found.residents)
    blocks = [
        make_block(
            layer, planned, device, staging, allocate, pin=pin, fetched_seldom=kind in (Kind.MASTERS, Kind.TABLE)
        )
        for layer, planned, kind in zip(found_layers, (*plan.moving, plan.residents), kinds(plan), strict=True)
    ]
    if pin:
        _warn_unpinned(
            [block for block, kind in zip(blocks, kinds(plan), strict=True) if kind in (Kind.BLOCK, Kind.RESIDENTS)]
        )
    layers: dict[int, StreamedLayer] = {}
    for index, kind in reversed([*enumerate(kinds(plan))]):  # masters have to exist before their owners
        block = blocks[index]
        masters = None if block.planned.masters is None else layers[block.planned.masters]
        autocast = found.autocast if kind is Kind.MASTERS else None
        layers[index] = StreamedLayer(
            index,
            kind,
            block.planned,
            block,
            ParameterGroup(block.planned.spans, block.parameters, device.device, autocast=autocast),
            casts=None if masters is None else Casts(block, masters, device),
            masters=masters,
            expert=index in plan.experts,
        )
    return [layers[index] for index in range(len(blocks))]


def make_rows(
    found: Found, layers: Sequence[StreamedLayer], device: Device, log: logging.Logger | None, *, pin: bool
) -> dict[nn.Module, tuple[StreamedLayer, ...]]:
    """Gives layers of which only rows travel their rows. Returns the embeddings among them, with their layers."""
    embeddings: dict[nn.Module, tuple[StreamedLayer, ...]] = {}
    table_layers = [layer for layer in layers if layer.kind is Kind.TABLE]
    for layer, found_layer in zip(table_layers, found.tables, strict=True):
        embedding: Any = found.places[found_layer.parameters[0][1]][0].module
        layer.rows = EmbeddingRows(embedding, layer, device, pin=pin)
        embeddings[embedding] = (layer,)
    said = set[str]()

    def say(layer: StreamedLayer, why: str) -> None:
        if why not in said:
            said.add(why)
            line = f"Superpipeline: all experts of {layer.name!r} come with each call, because {why}. "
            line += "Other layers for which the same holds are not named."
            say_once(log or logging.getLogger("lightning.pytorch"), line)

    for layer in layers:
        if layer.planned.rows:
            layer.rows = ExpertRows(layer, device, partial(say, layer))
            layer.parameters.come_by_rows(layer.rows.stacks)
    return embeddings


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
    if members[0][0].layer.rows.may_compute_with_wrapped(use, args, kwargs):
        return [group.alias(index) for group, index in members]
    with members[0][0].doors.on_demand([group.all[index] for group, index in members]):
        return [group.alias(index) for group, index in members]


def _expose(members: Sequence[tuple[ParameterGroup, int]]) -> None:
    """Notes that the parts of a wrapped parameter may be written at any time without a change of their versions."""
    for group, index in members:
        group.exposed.add(index)


class RoutedCalls:
    """Is told of the calls of one module of stacked experts, and tells its rows of them before the engine.

    Args:
        access: the engine.
        module: the module.
        experts: the rows of its layer.

    Attributes:
        pre_hooks: return the hooks that see, and may change, what the module's call is given.
    """

    def __init__(self, access: Access, module: nn.Module, experts: ExpertRows) -> None:
        self._access = access
        self._module = module
        self._experts = experts
        self.pre_hooks: list[Callable[[], Any]] = []

    def enter(self, visits: Visits, inputs: Any) -> Visits:
        """Brings what something is routed to. Returns the layers that :meth:`leave` is to release."""
        hooks = [len(hooks() or ()) for hooks in self.pre_hooks]
        self._experts.begin_call(self._module, *inputs, hooked=sum(hooks) > 1)
        try:
            return self._access.enter(visits, inputs)
        except BaseException:
            self._experts.end_call()
            raise

    def leave(self, visits: Visits, output: Any) -> None:
        """Releases the layers."""
        self._experts.end_call()
        self._access.leave(visits, output)


def attach_hooks(access: Access, visits: dict[nn.Module, tuple[StreamedLayer, ...]]) -> list[RemovableHandle]:
    """Attaches hooks to every module, to those of stacked experts such that see what something is routed to."""
    routed = {
        module: each.rows for module, used in visits.items() for each in used if isinstance(each.rows, ExpertRows)
    }
    handles = attach_module_hooks(access, {module: used for module, used in visits.items() if module not in routed})
    for module, experts in routed.items():
        calls = RoutedCalls(access, module, experts)
        hooks = ModuleHooks(calls, module, visits[module])
        handles.append(hook_on(module.register_forward_pre_hook, hooks.before, prepend=True, with_kwargs=True))
        everywhere = register_module_forward_pre_hook(lambda *_: None)
        everywhere.remove()
        calls.pre_hooks += [handles[-1].hooks_dict_ref, everywhere.hooks_dict_ref]
        handles.append(hook_on(module.register_forward_hook, hooks.after, always_call=True))
    return handles


def kinds(plan: Plan) -> list[Kind]:
    """How each layer comes to the device, in the order of :attr:`Plan.moving`; the residents come last."""
    counts = {
        Kind.BLOCK: plan.layers,
        Kind.MASTERS: plan.masters,
        Kind.TABLE: plan.tables,
        Kind.RESIDENTS: [plan.residents],
    }
    return [kind for kind, layers in counts.items() for _ in layers]


def _warn_unpinned(blocks: Sequence[HostBlock]) -> None:
    unpinned = sum(block.planned.nbytes for block in blocks if not block.pinned)
    if unpinned:
        warnings.warn(
            f"{unpinned / 2**30:.2f} GiB of host memory could not be page-locked (pinned): copies to the device are then "
            "synchronous and two to three times slower, results are the same. Raise the limit of locked memory, if there is "
            "one (ulimit -l), or pass pin_memory=False to go without and without this warning.",
            stacklevel=2,
        )
