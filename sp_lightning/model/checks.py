"""What cannot be streamed, or as a whole only: it is refused by name, or the user is told what to change."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from sp_lightning.model.blocks import has_blocks
from sp_lightning.model.found import Layer, OverlappingPair, Unit, join_names, tensor_bytes
from sp_lightning.model.wrapped import parts
from sp_lightning.torch_compat.private import FakeTensor, is_compiled, is_traceable_wrapper_subclass


def refuse_cuda_graphs(module: nn.Module) -> None:
    """Refuses modules that are compiled with CUDA graphs.

    A graph is recorded for weights at one address, and torch would record a new one for each slot that a layer comes to.

    Raises:
        ValueError: a module with weights is compiled so.
    """
    for name, child in module.named_modules():
        functions = [value for value in vars(child).values() if isinstance(value, (FunctionType, MethodType))]
        for compiled in (child, *functions) if any(True for _ in child.parameters()) else ():
            # Compiled modules and compiled functions have this method.
            config = getattr(compiled, "get_compiler_config", None)
            if config is not None and (config() or {}).get("triton.cudagraphs"):
                raise ValueError(
                    f"{name or type(child).__name__!r} is compiled with CUDA graphs, as by torch.compile(mode="
                    '"reduce-overhead") or (mode="max-autotune"): they hold the addresses of weights, and streamed weights '
                    'change theirs. Compile it without them: torch.compile(mode="max-autotune-no-cudagraphs"), or no mode.'
                )


def modules_moved_whole(module: nn.Module, residents: set[nn.Parameter]) -> dict[nn.Module, str]:
    """The modules that keep their parameters to themselves, with their names.

    A ScriptModule takes no hooks and no other parameters. Some tensor subclasses have memory that torch knows nothing of.

    Args:
        module: the root.
        residents: the parameters that the user wants to stay on the device.

    Raises:
        ValueError: a parameter is of such a subclass, and not to be resident.
    """
    whole: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child in inside:
            continue
        script = isinstance(child, torch.jit.ScriptModule)
        foreign = {key: p for key, p in child._parameters.items() if p is not None and _is_foreign(p)}
        for key, parameter in foreign.items():
            if not script and parameter not in residents:
                kind, full = type(parameter).__name__, join_names(name, key)
                raise ValueError(
                    f"Parameter {full!r} is of class {kind}, a tensor subclass that cannot be streamed: expected one that "
                    f"consists of plain tensors (__tensor_flatten__) and is frozen. "
                    f"{_how_to_stream(parameter)} Or keep it on the device: SuperpipelineStrategy(keep_on_gpu=[{full!r}])."
                )
        if script or foreign:
            whole[child] = name
            inside.update(child.modules())
    return whole


def _is_foreign(parameter: nn.Parameter) -> bool:
    """Whether it is of a tensor subclass that cannot be streamed."""
    if type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(parameter, FakeTensor):
        return False
    return _how_to_stream(parameter) != ""


def _how_to_stream(parameter: nn.Parameter) -> str:
    """What the user has to do before a tensor subclass can be streamed; empty if it can be."""
    if not is_traceable_wrapper_subclass(parameter):
        return "Exchange it for a plain parameter."
    if parameter.requires_grad:
        return "Freeze it (requires_grad_(False)) and train adapters."
    if any(type(part) is not Tensor or part.layout is not torch.strided for _, part in parts("", parameter)):
        return "Exchange it for a plain parameter."
    return ""


def parted_parameters(module: nn.Module, whole: Mapping[nn.Module, str]) -> tuple[OverlappingPair, ...]:
    """The pairs of frozen parameters that lie over one memory.

    Args:
        module: the root.
        whole: modules that are moved whole, whose parameters are not looked at.

    Raises:
        ValueError: a parameter of such a pair is trained, or a parameter is sparse.
    """
    excluded = {parameter for child in whole for parameter in child.parameters()}
    spans: list[tuple[int, int, str, Tensor]] = []  # first address, address behind the last, name, tensor
    for name, parameter in module.named_parameters():
        if parameter in excluded:
            continue
        if parameter.layout is not torch.strided:
            raise ValueError(
                f"Parameter {name!r} has layout {parameter.layout}; only strided (dense) parameters can be streamed. "
                f"Make it dense: parameter.to_dense()."
            )
        for part_name, part in parts(name, parameter):
            if part.numel() and not isinstance(part, FakeTensor):
                start = part.data_ptr()
                spans.append((start, start + _extent(part), part_name, part))
    spans.sort(key=lambda span: span[:3])
    pairs = []
    farthest = (0, 0, "", Tensor())  # the span that reaches farthest so far
    for span in spans:
        if span[0] < farthest[1]:
            pairs.append(OverlappingPair((farthest[2], span[2]), (farthest[3], span[3])))
            pairs[-1].refuse_trained()
        farthest = max(farthest, span, key=lambda each: each[1])
    return tuple(pairs)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# ---------------------------------------------------------------------- what the user is told

# A list of fewer bare modules has no two groups.
_LEAST_TO_GROUP = 4
# Below this share of the parameter bytes, the user is told how little is streamed.
_MOSTLY = 0.95


def notes_on(
    module: nn.Module,
    whole: Mapping[nn.Module, str],
    units: Sequence[Unit],
    streaming: Iterable[Layer],
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
