"""What the user is told about a model: what moves otherwise than one might expect, and what to change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import nn

from sp_lightning.device.torch_private import is_compiled, is_traceable_wrapper_subclass
from sp_lightning.model.blocks import has_blocks
from sp_lightning.model.found import Layer, join_names, tensor_bytes
from sp_lightning.model.stacks import stacks_in
from sp_lightning.model.units import Unit

# A list of fewer bare modules has no two groups.
_LEAST_TO_GROUP = 4
# Below this share of the parameter bytes, the user is told how little is streamed.
_MOSTLY = 0.95


def notes_on(
    module: nn.Module, whole: Mapping[nn.Module, str], units: Sequence[Unit], streaming: Iterable[Layer]
) -> tuple[str, ...]:
    """The notes on a model.

    Args:
        module: the root.
        whole: the modules that are moved whole, with their names.
        units: all units.
        streaming: the layers and the tables.
    """
    return (*_notes_on_whole(whole), *_notes_on_units(units), *_note_on_share(module, streaming))


def why_nothing(whole: Mapping[nn.Module, str], streaming: Collection[Layer], others: Collection[nn.Parameter]) -> str:
    """Why nothing is streamed, as a clause; empty if something is.

    Args:
        whole: the modules that are moved whole, with their names.
        streaming: the layers and the tables.
        others: the parameters outside of ``whole``.
    """
    if streaming:
        return ""
    if not whole:
        return f"nothing is streamed: {'all weights are resident' if others else 'there are no weights'}"
    said = " and ".join(_why_whole(module, name) for module, name in list(whole.items())[:2])
    return f"nothing can be streamed: {said}{' and …' * (len(whole) > 2)}{', and the other weights are resident' * bool(others)}"


def _notes_on_whole(whole: Mapping[nn.Module, str]) -> list[str]:
    also = "; so do its gradients and its optimizer's state"
    return [
        f"{_why_whole(module, name)}: it stays on the device whole{also * any(p.requires_grad for p in module.parameters())}."
        for module, name in whole.items()
    ]


def _why_whole(module: nn.Module, name: str) -> str:
    script = isinstance(module, torch.jit.ScriptModule)
    return f"{name!r} {'is a ScriptModule' if script else 'has parameters of a class that cannot be streamed'}"


def _notes_on_units(units: Sequence[Unit]) -> list[str]:
    modules = [(unit.name, unit.module) for unit in units if unit.module is not None]
    compiled = [name for name, module in modules if is_compiled(module) and has_blocks(module)]
    notes = [f"{name!r} is compiled as a whole and moves as one. Compile its layers instead." for name in compiled]
    experts = sum(unit.expert and not unit.rows for unit in units)
    if experts:
        notes.append(f"{experts} experts are layers of their own: each comes only when something is routed to it.")
    apart = {unit.name for unit in units if unit.rows}
    inside = (
        join_names(name, key) if key else name
        for name, module in modules
        for key, child in module.named_modules()
        if stacks_in(child)
    )
    whole = [full for full in inside if full not in apart]
    if whole:
        notes.append(f"experts are stacked in {len(whole)} modules that move whole: {whole[0]!r} …")
    kinds = {type(p).__name__ for unit in units for _, p in unit.parameters if is_traceable_wrapper_subclass(p)}
    return notes + [f"parameters of class {kind} travel as their packed bytes." for kind in sorted(kinds)]


def _note_on_share(module: nn.Module, streaming: Iterable[Layer]) -> list[str]:
    total = sum(map(tensor_bytes, module.parameters()))
    streamed = sum(layer.nbytes for layer in streaming)
    if not total or streamed >= _MOSTLY * total:
        return []
    return [f"only {streamed / total:.0%} of the parameter bytes are streamed; the rest is resident."]


def advice_to_group(streamed: Sequence[Unit], above: Mapping[nn.Module, str]) -> str:
    """What to put together if no layer has parts, because then autograd saves most between the layers and not in them.

    Args:
        streamed: the units that are layers.
        above: the modules above them, with their names.
    """
    bare = {unit.module for unit in streamed}
    if len(bare) < _LEAST_TO_GROUP or any(each is None or next(each.children(), None) is not None for each in bare):
        return ""
    said = f"all {len(bare)} layers are bare modules, between which most of what backward needs is saved. "
    counts = {each: len(bare.intersection(each.children())) for each in above if type(each) is nn.Sequential}
    longest = max(counts, key=counts.__getitem__, default=None)
    if longest is None or counts[longest] < _LEAST_TO_GROUP:
        return f"{said}Group every few of them, with what is computed between them, in a module: such modules become the layers."
    name, length = above[longest], len([*longest.children()])
    step = -(-length // max(2, math.isqrt(counts[longest])))
    path = join_names("model", name)
    return (
        f"{said}Group them: {path} = nn.Sequential(*({path}[i : i + {step}] for i in range(0, {length}, {step}))), and name "
        f'the groups: SuperpipelineStrategy(layers=["{join_names(name, "*")}"], activations="recompute").'
    )
