"""Code that calls TorchScript. A TorchScript function reads the memory of its arguments and asks no Python object for it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn


def uses_torchscript(module: nn.Module) -> bool:
    """Whether the code of a module names a TorchScript function, or an attribute of it is one."""
    kind: Any = type(module)
    return _class_uses_torchscript(kind) or any(map(_is_script, vars(module).values()))


@cache
def _class_uses_torchscript(kind: Any) -> bool:
    return any(_is_named_in(value) for base in kind.__mro__ for value in vars(base).values())


def _is_named_in(value: Any) -> bool:
    """Whether a class's attribute is a TorchScript function, or a function that names one."""
    code, known = getattr(value, "__code__", None), getattr(value, "__globals__", {})
    names = [*_names(code)] if code is not None else []
    named = [value, *(known.get(name) for name in names)]
    named += [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in names]
    return any(map(_is_script, named))


def _is_script(value: Any) -> bool:
    return isinstance(value, torch.jit.ScriptFunction)


def _names(code: CodeType) -> Iterator[str]:
    """The names in a function's code, and in the code of the functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
