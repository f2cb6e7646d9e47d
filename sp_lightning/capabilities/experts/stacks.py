"""Recognises stacked experts: modules that hold all experts in parameters with one more dimension.

An expert is a row of each stack, and a call uses only some rows. transformers 5 stacks its experts, in classes with the
decorator ``use_experts_implementation``.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Sequence
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.model.found import STACK_DIMENSIONS, is_stack
from sp_lightning.core.model.wrapped import parts

# A forward of experts takes hidden states, the indices of the experts, and their weights.
_ARGUMENTS = 3
# Words in the names of arguments that hold indices of experts, and words that show that an argument holds other indices.
_OF_INDICES = frozenset((
    "assignment", "assignments", "expert", "experts", "idx", "index", "indices", "inds", "router", "routes", "routing",
    "selected", "topk",
))  # fmt: skip
_OF_OTHERS = frozenset(["batch", "block", "head", "layer", "position", "step"])
NEARLY_ALL = 3 / 4
"""If a call uses at least this share of the experts, the whole layer is uploaded, and prefetched for the next call."""
# The module of transformers that defines ``use_experts_implementation``.
_INTERFACE = "transformers.integrations.moe"


def stacked_rows(module: nn.Module) -> int:
    """Returns the number of experts that a module holds in stacks, if each expert is contiguous; otherwise 0."""
    stacks = stacks_in(module)
    return len(stacks[0]) if stacks and all(map(_lies_by_rows, stacks)) else 0


def stacks_in(module: nn.Module) -> list[Tensor]:
    """Returns a module's stacks of experts: its own parameters with three dimensions, of which the first counts the experts."""
    stacks: list[Tensor] = [p for p in module._parameters.values() if p is not None and p.dim() == STACK_DIMENSIONS]
    one_count = len({len(stack) for stack in stacks}) == 1 and len(stacks[0]) > 1
    return stacks if one_count and _is_routed(module) else []


def own_stacks(module: nn.Module, name: str, outputs: Collection[int]) -> dict[str, Tensor]:
    """Returns a user module's stacks of experts by name, if each call uploads them whole.

    If the forward does not take the indices of experts, two signs distinguish experts from the heads of an attention: a name with
    "expert" or "moe", or a linear layer with one output for each expert (a router).

    Args:
        module: the module. Classes of torch and transformers have no stacks that a user could replace.
        name: its name.
        outputs: the numbers of outputs of the linear layers in the module and beside it.
    """
    kinds = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    if any(kind.__module__.partition(".")[0] in ("torch", "transformers") for kind in kinds):
        return {}
    if stacks_in(module) and how_it_reads(module) is not StackReading.UNKNOWN:
        return {}
    stacks: dict[str, Tensor] = {
        key: p for key, p in module._parameters.items() if p is not None and p.dim() == STACK_DIMENSIONS and len(p) > 1
    }
    names = " ".join([type(module).__name__, name.rpartition(".")[2], *stacks]).lower()
    signs = "expert" in names or "moe" in names or any(len(stack) in outputs for stack in stacks.values())
    return stacks if signs and len({len(stack) for stack in stacks.values()}) == 1 else {}


def adapting_modules(root: nn.Module) -> dict[nn.Module, nn.Module]:
    """Returns the modules of stacked experts with PEFT's adapters on their stacks (``target_parameters``), by module of experts.

    PEFT puts a ``ParamWrapper`` around the experts for each adapted stack. The outermost one is returned.
    """
    found: dict[nn.Module, nn.Module] = {}
    for module in root.modules():
        if _adapts(module) and stacked_rows(around := with_adapters(module)[-1]):
            found.setdefault(around, module)
    return found


def with_adapters(module: nn.Module) -> list[nn.Module]:
    """Returns PEFT's modules around a module of experts, from outside, and the module of experts as the last one."""
    found = [module]
    while _adapts(found[-1]):
        found.append(found[-1].base_layer)  # type: ignore[arg-type]
    return found


def _adapts(module: nn.Module) -> bool:
    return type(module).__name__ == "ParamWrapper" and type(module).__module__.startswith("peft.")


def routed_share(module: nn.Module, args: Sequence[Any]) -> float:
    """Returns the share of a module's stacked experts that a call is expected to upload, if all are equally likely.

    The last dimension of the indices holds the experts of one token, which are distinct. If the indices have one dimension,
    each is for one token. The share is 1 if the call is expected to use :data:`NEARLY_ALL` experts or more, or if the positional
    arguments do not have exactly one tensor of integers.
    """
    count = stacked_rows(with_adapters(module)[-1])
    indices = [each for each in args if isinstance(each, Tensor) and each.dtype in (torch.int32, torch.int64)]
    if not count or len(indices) != 1:
        return 1.0
    *tokens, routed = indices[0].shape if indices[0].dim() > 1 else (indices[0].numel(), 1)
    share = 1 - max(0.0, 1 - routed / count) ** math.prod(tokens)
    return share if share < NEARLY_ALL else 1.0


def _lies_by_rows(stack: Tensor) -> bool:
    """Returns True if each expert is contiguous in a stack. A wrapped stack must fulfil this in each of its plain tensors."""
    return all(is_stack(part, len(stack)) and _are_together(part) for _, part in parts("", stack))


def _are_together(stack: Tensor) -> bool:
    """Returns True if the elements of a row fill its memory without gaps, and the rows follow each other."""
    row = stack.numel() // len(stack)
    extent = sum((n - 1) * s for n, s in zip(stack.shape[1:], stack.stride()[1:], strict=True)) + 1
    return stack.stride(0) == row == extent


def _is_routed(module: nn.Module) -> bool:
    """Returns True if the module's forward takes hidden states, indices and weights.

    The name of the class, or of an argument after the hidden states, must say so. Only names distinguish a module of experts from
    an attention with its heads in one parameter, whose forward takes a mask.
    """
    try:
        parameters = signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    words = [{*p.name.lower().split("_")} for p in positional[2:]]
    named = "expert" in type(module).__name__.lower() or any(
        each & _OF_INDICES and not each & _OF_OTHERS for each in words
    )
    return len(positional) > _ARGUMENTS and named


class StackReading(enum.Enum):
    """Describes how a module's forward reads its stacks."""

    ROUTED_ROWS = enum.auto()
    """The forward reads only the rows whose indices it takes, also through views."""
    BY_TORCH = enum.auto()
    """The forward reads stacks only through torch functions, so each of these calls can be checked."""
    UNKNOWN = enum.auto()
    """The forward may pass stacks to code that torch does not see, for example a kernel that takes pointers."""


def how_it_reads(module: nn.Module) -> StackReading:
    """Returns how the forward of a module of stacked experts reads them.

    Called before each call of the module, because the forward and the configuration may have changed.
    """
    forward: Any = type(module).forward
    if "forward" in vars(module):
        return StackReading.UNKNOWN
    original = getattr(forward, "__wrapped__", None)
    if original is None:
        return _reading_by(forward)
    if forward.__globals__["__name__"] != _INTERFACE:
        return StackReading.UNKNOWN
    known = {forward.__globals__.get(name) for name in ("batched_mm_experts_forward", "grouped_mm_experts_forward")} - {
        None
    }
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    variables = dict(
        zip(forward.__code__.co_freevars, (cell.cell_contents for cell in forward.__closure__ or ()), strict=False)
    )
    function = variables["experts_interface"].get_interface(chosen, original)
    if function is original:
        return _reading_by(original)
    return StackReading.ROUTED_ROWS if function in known else StackReading.UNKNOWN


def _reading_by(forward: Any) -> StackReading:
    """Returns how a class's own forward reads stacks. Classes of transformers read them only through torch functions."""
    return StackReading.BY_TORCH if forward.__module__.startswith("transformers.models.") else StackReading.UNKNOWN
