"""Stacked experts: modules that hold all their experts in parameters of one more dimension, of which a call uses some rows.

transformers 5 has its experts so, in classes that ``use_experts_implementation`` has decorated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Sequence
from functools import cache
from inspect import Parameter, signature
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.model.wrapped import parts

# One parameter of each expert is a matrix, so that of a stack has so many dimensions.
_DIMENSIONS = 3
# A forward takes hidden states, the indices of the experts, and their weights.
_ARGUMENTS = 3
NEARLY_ALL = 3 / 4
"""From this share of the experts on the layer moves whole, in one piece, and ahead of time if its last call was like that."""
# The module of transformers in which ``use_experts_implementation`` is.
_INTERFACE = "transformers.integrations.moe"


def stacked_rows(module: nn.Module) -> int:
    """How many experts a module holds in stacks that lie expert by expert; 0 if it holds none."""
    stacks = stacks_in(module)
    return len(stacks[0]) if stacks and all(map(_lies_by_rows, stacks)) else 0


def stacks_in(module: nn.Module) -> list[Tensor]:
    """A module's stacks of experts: its own parameters of three dimensions, which begin with the number of experts."""
    stacks: list[Tensor] = [p for p in module._parameters.values() if p is not None and p.dim() == _DIMENSIONS]
    one_count = len({len(stack) for stack in stacks}) == 1 and len(stacks[0]) > 1
    return stacks if one_count and _takes_indices(module) else []


def is_stack(tensor: Tensor | None, count: int) -> bool:
    """Whether a parameter of a module with ``count`` stacked experts is one of its stacks."""
    return tensor is not None and tensor.dim() == _DIMENSIONS and len(tensor) == count


def routed_share(module: nn.Module, args: Sequence[Any]) -> float:
    """The share of a module's stacked experts that a call is expected to use, if each is as likely as the others.

    The last dimension of the indices is taken for the experts of one token, which are distinct. Indices of one dimension
    are taken for those of a token each. Of a call without indices among its positional arguments all experts are expected.
    """
    count = stacked_rows(module)
    indices = [each for each in args if isinstance(each, Tensor) and each.dtype in (torch.int32, torch.int64)]
    if not count or len(indices) != 1:
        return 1.0
    *tokens, routed = indices[0].shape if indices[0].dim() > 1 else (indices[0].numel(), 1)
    share = 1 - max(0.0, 1 - routed / count) ** math.prod(tokens)
    return share if share < NEARLY_ALL else 1.0


def _lies_by_rows(stack: Tensor) -> bool:
    """Whether each expert's elements lie together in a stack; if it is wrapped, in each of the tensors that it consists of."""
    return all(is_stack(part, len(stack)) and _are_together(part) for _, part in parts("", stack))


def _are_together(stack: Tensor) -> bool:
    row = stack.numel() // len(stack)
    extent = sum((n - 1) * s for n, s in zip(stack.shape[1:], stack.stride()[1:], strict=True)) + 1
    return stack.stride(0) == row == extent


def _takes_indices(module: nn.Module) -> bool:
    """Whether the module's forward has places for hidden states, indices and weights."""
    try:
        parameters = signature(type(module).forward).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = [p for p in parameters if p.kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)]
    return len(positional) > _ARGUMENTS


class Reading(enum.Enum):
    """What is known of how a module's forward reads its stacks."""

    ROUTED_ROWS = enum.auto()
    """It reads the rows that it is given the indices of, and no others, whatever views it makes."""
    BY_TORCH = enum.auto()
    """It reads stacks by functions of torch alone, so that each of them can be looked at."""
    UNKNOWN = enum.auto()
    """It may hand stacks to what torch does not see: a kernel that takes pointers."""


def how_it_reads(module: nn.Module) -> Reading:
    """What is known of how the forward of a module of stacked experts reads them; it may be another one in each call."""
    owner: Any = type(module)
    forward = owner.forward
    if "forward" in vars(module):
        return Reading.UNKNOWN
    original = getattr(forward, "__wrapped__", None)
    if original is None:
        alone = _uses_torch_alone(owner) and all(_is_of_torch(type(child)) for child in module.children())
        return Reading.BY_TORCH if alone else Reading.UNKNOWN
    if forward.__globals__["__name__"] != _INTERFACE:
        return Reading.UNKNOWN
    known = {forward.__globals__.get(name) for name in ("batched_mm_experts_forward", "grouped_mm_experts_forward")} - {
        None
    }
    chosen = getattr(getattr(module, "config", None), "_experts_implementation", None)
    variables = dict(
        zip(forward.__code__.co_freevars, (cell.cell_contents for cell in forward.__closure__ or ()), strict=False)
    )
    function = variables["experts_interface"].get_interface(chosen, original)
    if function is original:
        return Reading.BY_TORCH if original.__module__.startswith("transformers.models.") else Reading.UNKNOWN
    return Reading.ROUTED_ROWS if function in known else Reading.UNKNOWN


@cache
def _uses_torch_alone(owner: Any) -> bool:
    """Whether a class's forward is Python that uses nothing but torch, and functions beside it of which the same is true."""
    seen: set[Any] = set()
    functions: list[Any] = [owner.forward]
    while functions:
        function = functions.pop()
        if not isinstance(function, FunctionType) or {*function.__code__.co_freevars} - {"__class__"}:
            return False
        seen.add(function)
        names = {name for code in _codes(function.__code__) for name in code.co_names}
        used = [function.__globals__[name] for name in names if name in function.__globals__]
        methods = [vars(each).get(name) for name in names for each in owner.__mro__]
        methods = [each for each in methods if isinstance(each, FunctionType)]
        beside = [each for each in used if isinstance(each, FunctionType) and each.__module__ == function.__module__]
        if not all(map(_is_of_torch, (each for each in used if each not in beside))):
            return False
        functions += [each for each in (*beside, *methods) if each not in seen and not _is_of_torch(each)]
    return True


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, (int, float, str, bool, type(None))):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name.split(".")[0] in ("torch", "math", "builtins", "typing") or name == "transformers.activations"
