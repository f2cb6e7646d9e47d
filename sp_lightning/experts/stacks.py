"""Stacked experts: modules that hold all their experts in parameters of one more dimension, of which a call uses some rows.

transformers 5 has its experts so, in classes that ``use_experts_implementation`` has decorated.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Collection, Iterator, Sequence
from dis import get_instructions
from functools import cache
from inspect import Parameter, getattr_static, signature
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.model.found import STACK_DIMENSIONS, is_stack
from sp_lightning.model.wrapped import parts

# A forward takes hidden states, the indices of the experts, and their weights.
_ARGUMENTS = 3
# Words in the names of arguments that say what is routed where, and words beside them of which that is not so.
_OF_INDICES = frozenset((
    "assignment", "assignments", "expert", "experts", "idx", "index", "indices", "inds", "router", "routes", "routing",
    "selected", "topk",
))  # fmt: skip
_OF_OTHERS = frozenset(["batch", "block", "head", "layer", "position", "step"])
NEARLY_ALL = 3 / 4
"""From this share of the experts on the layer moves whole, in one piece, and ahead of time if its last call was like that."""
# The module of transformers in which ``use_experts_implementation`` is.
_INTERFACE = "transformers.integrations.moe"
_TORCH = ("torch", "math", "builtins", "typing")


def stacked_rows(module: nn.Module) -> int:
    """How many experts a module holds in stacks that lie expert by expert; 0 if it holds none."""
    stacks = stacks_in(module)
    return len(stacks[0]) if stacks and all(map(_lies_by_rows, stacks)) else 0


def stacks_in(module: nn.Module) -> list[Tensor]:
    """A module's stacks of experts: its own parameters of three dimensions, which begin with the number of experts."""
    stacks: list[Tensor] = [p for p in module._parameters.values() if p is not None and p.dim() == STACK_DIMENSIONS]
    one_count = len({len(stack) for stack in stacks}) == 1 and len(stacks[0]) > 1
    return stacks if one_count and _is_routed(module) else []


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


def _is_routed(module: nn.Module) -> bool:
    """Whether the module's forward has places for hidden states, indices and weights, and says which the indices are.

    The names alone tell a module of experts from an attention whose heads are in one parameter, and which takes a mask.
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
    """What is known of how a module's forward reads its stacks."""

    ROUTED_ROWS = enum.auto()
    """It reads the rows that it is given the indices of, and no others, whatever views it makes."""
    BY_TORCH = enum.auto()
    """It reads stacks by functions of torch alone, so that each of them can be looked at."""
    UNKNOWN = enum.auto()
    """It may hand stacks to what torch does not see: a kernel that takes pointers."""


def how_it_reads(module: nn.Module) -> StackReading:
    """What is known of how the forward of a module of stacked experts reads them; it may be another one in each call."""
    owner: Any = type(module)
    forward = owner.forward
    if "forward" in vars(module):
        return StackReading.UNKNOWN
    original = getattr(forward, "__wrapped__", None)
    if original is None:
        names = _names_beside_torch(owner)
        if names is None:
            return StackReading.UNKNOWN
        alone = all(_is_of_torch(type(child)) for child in module.children())
        # A launcher of a kernel may be kept on the module, or on an object there, and not in its class.
        alone = alone and all(_is_data(value, names) for name, value in vars(module).items() if name in names)
        return StackReading.BY_TORCH if alone else StackReading.UNKNOWN
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
        return StackReading.BY_TORCH if original.__module__.startswith("transformers.models.") else StackReading.UNKNOWN
    return StackReading.ROUTED_ROWS if function in known else StackReading.UNKNOWN


@cache
def _names_beside_torch(owner: Any) -> frozenset[str] | None:
    """The names that a class's forward uses; None unless that is Python that uses nothing but torch and its own functions.

    Those are functions beside the class, and methods, of which the same is true.
    """
    seen: set[Any] = set()
    functions: list[Any] = [owner.forward]
    of_all: set[str] = set()
    while functions:
        function = functions.pop()
        if not isinstance(function, FunctionType) or {*function.__code__.co_freevars} - {"__class__"}:
            return None
        seen.add(function)
        codes = [*_codes(function.__code__)]
        names = {name for code in codes for name in code.co_names}
        of_all |= names
        imported = [each.argval for code in codes for each in get_instructions(code) if each.opname == "IMPORT_NAME"]
        used = [function.__globals__[name] for name in names if name in function.__globals__]
        methods = [_unbound(vars(each)[name]) for name in names for each in owner.__mro__ if name in vars(each)]
        beside = [each for each in used if isinstance(each, FunctionType) and each.__module__ == function.__module__]
        others = [each for each in used if each not in beside] + [each for each in methods if _is_foreign(each, names)]
        if not all(map(_is_of_torch, others)) or not all(name.split(".")[0] in _TORCH for name in imported):
            return None
        mine = [each for each in (*beside, *methods) if isinstance(each, FunctionType)]
        functions += [each for each in mine if each not in seen and not _is_of_torch(each)]
    return frozenset(of_all)


def _unbound(attribute: Any) -> Any:
    """The function behind a class's attribute, if it is a method of any kind or a property."""
    function = attribute.fget if isinstance(attribute, property) else attribute
    return getattr(function, "__func__", function)


def _is_foreign(attribute: Any, names: Collection[str]) -> bool:
    """Whether a class's attribute is neither a function of Python, which is looked at, nor data."""
    return not isinstance(attribute, FunctionType) and not _is_data(attribute, names)


def _is_data(value: Any, names: Collection[str]) -> bool:
    """Whether a value is torch's, or has nothing that may be called under one of these names."""
    if isinstance(value, (list, tuple, set, dict)):
        return all(_is_data(each, names) for each in (value.values() if isinstance(value, dict) else value))
    if isinstance(value, Tensor) or _is_of_torch(value):
        return True
    inside = (getattr_static(value, name, None) for name in names)
    return not callable(value) and all(_is_of_torch(each) or not callable(_unbound(each)) for each in inside)


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_torch(value: Any) -> bool:
    if isinstance(value, (int, float, str, bool, type(None))):
        return True
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
    return name.split(".")[0] in _TORCH or name == "transformers.activations"
