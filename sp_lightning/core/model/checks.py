"""Finds modules and parameters that cannot be streamed: raises errors for them, and notes them for the plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from sp_lightning.core.model.blocks import ensemble, has_blocks
from sp_lightning.core.model.found import Layer, OverlappingPair, Unit, join_names, tensor_bytes
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.torch_compat.private import (
    FakeTensor,
    is_compiled,
    is_traceable_wrapper_subclass,
)


def refuse_cuda_graphs(module: nn.Module) -> None:
    """Checks that no module is compiled with CUDA graphs.

    A CUDA graph is recorded for weights at fixed addresses. torch would record a new graph for each slot that a layer uses.

    Raises:
        ValueError: a module with weights is compiled with CUDA graphs.
    """
    for name, child in module.named_modules():
        if _is_compiled_with(child, "triton.cudagraphs"):
            raise ValueError(
                f"{name or type(child).__name__!r} is compiled with CUDA graphs, as by torch.compile(mode="
                '"reduce-overhead") or (mode="max-autotune"): they hold the addresses of weights, and streamed weights '
                'change theirs. Compile it without them: torch.compile(mode="max-autotune-no-cudagraphs"), or no mode.'
            )


def refuse_inference_weights(module: nn.Module) -> None:
    """Checks that no weight was made in inference mode. Such a tensor has no version, so no write to it would be noticed.

    Raises:
        RuntimeError: a weight is an inference tensor.
    """
    for name, weight in module.named_parameters():
        if weight.is_inference():
            raise RuntimeError(
                f"{name!r} was made in inference mode, as in a hook of predict, test or validate. Writes to such a weight are "
                "not counted. Make it outside of inference mode: `with torch.inference_mode(False):`, or use "
                "Trainer(inference_mode=False)."
            )


def refuse_computed_weights(module: nn.Module) -> None:
    """Checks that no weight is a tensor with a graph of its own, as in ``functional_call(module, computed, …)``.

    The engine would stream such a tensor as a weight, and its graph would get no gradient.

    Raises:
        RuntimeError: a weight is not a leaf of autograd's graph.
    """
    for name, weight in module.named_parameters():
        if not weight.is_leaf:
            raise RuntimeError(
                f"{name!r} is a computed tensor in this call (torch.func.functional_call), and would get no gradient, because "
                "the streamed module begins a step inside of the call. Expected its own parameters. Write functional_call into "
                "the forward of a module, and stream that one."
            )


def tunes_products(module: nn.Module) -> bool:
    """Returns True if a module is compiled with the compiler's own kernels for matrix products (``mode="max-autotune…"``).

    These kernels may write a weight's gradient in float32 without rounding it to 16 bits. With an uploaded cast in the place of
    the weight, the gradient would be rounded. So the weights of such modules are not uploaded as casts.
    """
    return _is_compiled_with(module, "max_autotune", "max_autotune_gemm")


def _is_compiled_with(module: nn.Module, *options: str) -> bool:
    """Returns True if a module with weights, or a function in one of its attributes, is compiled with one of these options."""
    if not any(True for _ in module.parameters()):
        return False
    functions = [value for value in vars(module).values() if isinstance(value, (FunctionType, MethodType))]
    for compiled in (module, *functions):
        # Compiled modules and compiled functions have this method. It returns None if the backend has no options.
        config = getattr(compiled, "get_compiler_config", None)
        chosen = config() if config is not None else None
        if chosen and any(chosen.get(option) for option in options):
            return True
    return False


def modules_moved_whole(module: nn.Module, residents: set[nn.Parameter]) -> dict[nn.Module, str]:
    """Returns the modules that cannot be streamed and are moved to the device whole, with their names.

    These are ScriptModules, because they accept neither hooks nor other parameters, and modules with tensor subclasses whose
    memory torch cannot see. Modules inside a returned module are not returned.

    Args:
        module: the root.
        residents: the parameters that ``keep_on_gpu=`` chose.

    Raises:
        ValueError: a parameter is of an unsupported tensor subclass, and ``keep_on_gpu=`` does not name it; or the weights of a
            module are not parameters (transformers' MXFP4 experts).
    """
    whole: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, child in module.named_modules():
        if child in inside:
            continue
        if type(child).__name__ == "Mxfp4GptOssExperts":
            raise ValueError(
                f"{name!r} keeps its experts for transformers' MXFP4 kernels, outside of torch's parameters, so they cannot be "
                "streamed. Load the model by sp_lightning.load_mxfp4(model, folder), which leaves them packed, or by "
                "from_pretrained(folder, quantization_config=Mxfp4Config(dequantize=True))."
            )
        script = isinstance(child, torch.jit.ScriptModule)
        foreign = {key: p for key, p in child._parameters.items() if p is not None and _is_foreign(p)}
        for key, parameter in foreign.items():
            if not script and parameter not in residents:
                kind, full = type(parameter).__name__, join_names(name, key)
                raise ValueError(
                    f"Parameter {full!r} is of class {kind}, a tensor subclass that cannot be streamed: expected one that "
                    f"consists of plain tensors (__tensor_flatten__) and is frozen. "
                    f"{_how_to_stream(parameter)} Or keep it on the GPU: SuperpipelineStrategy(keep_on_gpu=[{full!r}])."
                )
        if script or foreign:
            whole[child] = name
            inside.update(child.modules())
    return whole


def _is_foreign(parameter: nn.Parameter) -> bool:
    """Returns True if a parameter is of a tensor subclass that cannot be streamed."""
    # A subclass without its own `__torch_dispatch__` has ordinary memory. A FakeTensor stands for a plain tensor (`plan`).
    if type(parameter).__torch_dispatch__ is Tensor.__torch_dispatch__ or isinstance(parameter, FakeTensor):
        return False
    return _how_to_stream(parameter) != ""


def _how_to_stream(parameter: nn.Parameter) -> str:
    """Returns what the user must change before a tensor subclass can be streamed; empty if it can be streamed."""
    if not is_traceable_wrapper_subclass(parameter):
        return "Exchange it for a plain parameter."
    if parameter.requires_grad:
        return "Freeze it (requires_grad_(False)) and train adapters."
    # The command ``plan`` builds models without memory, in which plain tensors are FakeTensors.
    if any(
        type(part) not in (Tensor, FakeTensor) or part.layout is not torch.strided for _, part in parts("", parameter)
    ):
        return "Exchange it for a plain parameter."
    return ""


def overlapping_pairs(module: nn.Module, whole: Mapping[nn.Module, str]) -> tuple[OverlappingPair, ...]:
    """Returns the pairs of frozen parameters that share memory.

    Args:
        module: the root.
        whole: the modules that are moved whole. Their parameters are not compared.

    Raises:
        ValueError: a parameter of a pair is trained, or a parameter is sparse.
    """
    excluded = {parameter for child in whole for parameter in child.parameters()}
    spans: list[tuple[int, int, str, Tensor]] = []  # first address, end (exclusive), name, tensor
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
    farthest = (0, 0, "", Tensor())  # the span with the highest end so far
    for span in spans:  # by address: a span overlaps an earlier span if it begins before that span ends
        if span[0] < farthest[1]:
            pairs.append(OverlappingPair((farthest[2], span[2]), (farthest[3], span[3])))
            pairs[-1].refuse_trained()
        farthest = max(farthest, span, key=lambda each: each[1])
    return tuple(pairs)


def overlap(one: Tensor, other: Tensor) -> bool:
    """Returns True if the bytes from the first to the last element of two tensors overlap."""
    return one.data_ptr() < other.data_ptr() + _extent(other) and other.data_ptr() < one.data_ptr() + _extent(one)


def _extent(tensor: Tensor) -> int:
    """Returns the bytes from a tensor's first element to the end of its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


# ---------------------------------------------------------------------- notes

# An ensemble of networks with fewer parts, and a list of fewer modules, are not worth a note.
_LEAST = 4
# Below this share of the parameter bytes, a note states how little is streamed.
_MOSTLY = 0.95


def notes_on(
    module: nn.Module, whole: Mapping[nn.Module, str], units: Sequence[Unit], streaming: Iterable[Layer]
) -> Iterator[str]:
    """Yields the notes on a model for the plan.

    Args:
        module: the root.
        whole: the modules that are moved whole, with their names.
        units: all units.
        streaming: the layers and the tables.
    """
    yield from (f"{name!r} stays on the GPU whole." for name in whole.values())
    for unit in units:
        if unit.module is not None and is_compiled(unit.module) and has_blocks(unit.module):
            yield f"{unit.name!r} is compiled as a whole, and is one layer. Compile its layers instead."
    if experts := sum(unit.expert and not unit.rows for unit in units):
        yield f"{experts} experts are layers of their own."
    kinds = {type(p).__name__ for unit in units for _, p in unit.parameters if is_traceable_wrapper_subclass(p)}
    yield from (f"parameters of class {kind} are uploaded as packed bytes." for kind in sorted(kinds))
    total, streamed = sum(map(tensor_bytes, module.parameters())), sum(layer.nbytes for layer in streaming)
    if streamed < _MOSTLY * total:
        yield f"only {streamed / total:.0%} of the parameter bytes are streamed."


def advice_to_divide(root: nn.Module, streamed: Sequence[Unit], name_of: Mapping[nn.Module, str]) -> str:
    """Returns a sentence on an ensemble whose networks are one layer each, because each is small; otherwise an empty text.

    Args:
        root: the root.
        streamed: the units that are layers.
        name_of: the names of all modules.
    """
    networks = ensemble(root, {unit.module for unit in streamed if not unit.chosen})
    if networks is None or len([each for each in networks[0].modules() if [*each.parameters(recurse=False)]]) < _LEAST:
        return ""
    return f"Each of the {len(networks)} networks in {name_of[networks]!r} is one layer: layers= can name smaller ones."


def advice_to_group(streamed: Sequence[Unit]) -> str:
    """Returns a sentence if all layers are modules without children; otherwise an empty text.

    With such layers, autograd saves most activations between the layers, where they cannot be offloaded or recomputed.
    """
    bare = {unit.module for unit in streamed}
    if len(bare) < _LEAST or any(each is None or next(each.children(), None) is not None for each in bare):
        return ""
    return (
        f"all {len(bare)} layers are bare modules, between which most of what backward needs is saved. Group some of them in a "
        "module (nn.Sequential), and name the groups in layers=."
    )
