"""What cannot be streamed and is refused by name; and what can be moved as a whole only."""

from __future__ import annotations

from collections.abc import Mapping
from types import FunctionType, MethodType

import torch
from torch import Tensor, nn

from sp_lightning.device.layout import Elsewhere
from sp_lightning.device.torch_private import FakeTensor, is_traceable_wrapper_subclass
from sp_lightning.model.found import Parted, join_names
from sp_lightning.model.without_values import refuse_without_values
from sp_lightning.model.wrapped import parts


def check_values(module: nn.Module) -> None:
    """Refuses parameters and buffers without values.

    Raises:
        ValueError: a parameter is lazy, or something is on the meta device.
    """
    for name, parameter in module.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise ValueError(
                f"Parameter {name!r} has no shape yet (a lazy module). Run one batch through the module before "
                "fit, or give the module its sizes."
            )
    refuse_without_values(module)


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
                    f"{_how_to_stream(parameter)} Or keep it on the device: SuperpipelineStrategy(resident=[{full!r}])."
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


def parted_parameters(module: nn.Module, whole: Mapping[nn.Module, str]) -> tuple[Parted, ...]:
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
            if part.numel() and not isinstance(part, (FakeTensor, Elsewhere)):
                start = part.data_ptr()
                spans.append((start, start + _extent(part), part_name, part))
    spans.sort(key=lambda span: span[:3])
    pairs = []
    farthest = (0, 0, "", Tensor())  # the span that reaches farthest so far
    for span in spans:
        if span[0] < farthest[1]:
            pairs.append(Parted((farthest[2], span[2]), (farthest[3], span[3])))
            pairs[-1].refuse_trained()
        farthest = max(farthest, span, key=lambda each: each[1])
    return tuple(pairs)


def _extent(tensor: Tensor) -> int:
    """Bytes from a tensor's first element to behind its last."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
