"""Recognises modules: repeated blocks, groups of single modules, lists of experts, and code that uses TorchScript."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from functools import cache
from types import CodeType, ModuleType
from typing import Any

import torch
from torch import nn

from sp_lightning.core.model.found import join_names, tensor_bytes
from sp_lightning.core.model.rows import RowFinder
from sp_lightning.core.torch_compat.private import is_compiled

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)


def has_parts(module: nn.Module) -> bool:
    """Returns True if a child of the module has parameters."""
    return any(True for child in module.children() for _ in child.parameters())


def is_repeated(module: nn.Module) -> bool:
    """Returns True for a container of repeated blocks, and for a ``ModuleList`` of one block that is not only a wrapper.

    A container has repeated blocks if at least two children with parts have the same class and do not share their weights
    (:func:`not_shared`), or if at least two groups of single modules (:func:`groups_in`) have parameters of the same shapes.
    """
    if not isinstance(module, CONTAINERS):
        return False
    if type(module) is nn.ModuleList and len(module) == 1:
        # `children()`, and not `module[0]`: a list may hold None, as in diffusers' VAEs without attention.
        return any(has_parts(child) and not is_wrapper(child) for child in module.children())
    kinds = Counter(type(child) for child in not_shared(module) if has_parts(child))
    shapes = Counter(tuple(p.shape for p in group.parameters()) for group in groups_in(module))
    alike = any(count >= 2 for kind, count in kinds.items() if kind not in CONTAINERS)
    return alike or max(shapes.values(), default=0) > 1


def not_shared(container: nn.Module) -> list[nn.Module]:
    """Returns the children of a container that have most of their bytes to themselves: no other child has the same parameters.

    The other children are not blocks. They are losses, heads or tasks around one network, and the network has the blocks.
    """
    children = {child: [*child.parameters()] for child in container.children()}
    holders = Counter(parameter for parameters in children.values() for parameter in parameters)
    if len(holders) == holders.total():
        return [*children]

    def nbytes(parameters: list[nn.Parameter], *, shared: bool) -> int:
        return sum(tensor_bytes(parameter) for parameter in parameters if (holders[parameter] > 1) is shared)

    return [child for child, each in children.items() if nbytes(each, shared=True) <= nbytes(each, shared=False)]


def is_wrapper(module: nn.Module) -> bool:
    """Returns True if all parameters are in one child that has parts itself.

    Such a module only calls a network, and is not a block.
    """
    own = any(parameter is not None for parameter in module._parameters.values())
    children = [child for child in module.children() if any(True for _ in child.parameters())]
    return not own and len(children) == 1 and has_parts(children[0])


def has_blocks(module: nn.Module) -> bool:
    """Returns True if the module or a submodule is a container of repeated blocks. Lists of experts do not count."""
    return any(holds_blocks(name, child) for name, child in module.named_modules())


def holds_blocks(name: str, module: nn.Module) -> bool:
    """Returns True if a module with this name is a container of repeated blocks, and not a list of experts."""
    return is_repeated(module) and not are_experts(name, module)


def groups_in(module: nn.Module) -> list[nn.Module]:
    """Returns the blocks that a user has grouped by hand: ``nn.Sequential`` modules of single modules, in one container.

    If the container also holds an ``nn.Sequential`` with blocks in it (a stage), returns an empty list: in this case an
    ``nn.Sequential`` of single modules connects two stages.
    """
    if not isinstance(module, CONTAINERS):
        return []
    sequences: list[nn.Module] = [
        child for child in not_shared(module) if type(child) is nn.Sequential and has_parts(child)
    ]
    bare = [child for child in sequences if _is_bare(child)]
    groups = [child for child in bare if sum(bool(inner._parameters) for inner in child.modules()) > 1]
    has_stages = len(bare) < len(sequences)  # sequences with blocks in them
    return groups if len(groups) > 1 and not has_stages else []


def _is_bare(sequence: nn.Module) -> bool:
    """Returns True if a sequence contains no blocks, but only modules without children, or nested sequences of such modules."""
    inside = [*sequence.modules()]
    leaves = all(type(inner) is nn.Sequential or next(inner.children(), None) is None for inner in inside)
    return leaves and not any(map(groups_in, inside))


def are_experts(name: str, module: nn.Module) -> bool:
    """Returns True for a list of experts, among which a router chooses. A list is recognised by its name only."""
    is_list = isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
    return is_list and "expert" in name.rpartition(".")[2]


def ensemble(root: nn.Module, layers: Collection[nn.Module | None]) -> nn.ModuleList | None:
    """Returns the list of an ensemble: separate networks of one class that are one layer each; None if there is no such list.

    A list of blocks looks alike. But a module that has blocks also has weights outside of them, as a rule.

    Args:
        root: the root.
        layers: the modules that are layers.
    """
    weights = {*root.parameters()}
    for networks in root.modules():
        if (
            type(networks) is not nn.ModuleList
            or len({*networks.children()}) < 2
            or {*layers} != {*networks.children()}
        ):
            continue
        alike = len({type(each) for each in networks}) == 1
        if alike and weights == {*networks.parameters()} and not any(map(has_blocks, networks)):
            return networks
    return None


def experts_in(module: nn.Module, name: str, finder: RowFinder) -> Iterator[tuple[str, nn.Module]]:
    """Yields the names and modules of the experts in a block that can be uploaded one by one.

    Args:
        module: the block.
        name: its name.
        finder: finds modules that hold experts in stacks.
    """
    for key, child in module.named_children():
        full = join_names(name, key)
        if is_compiled(child):  # one graph uses all weights of the module, so its experts cannot be uploaded one by one
            continue
        if finder.stacked(child):
            yield full, child
            continue
        if not are_experts(key, child):
            yield from experts_in(child, full, finder)
            continue
        for inner, expert in child.named_children():
            if any(True for _ in expert.parameters()):
                yield join_names(full, inner), expert


def uses_torchscript(module: nn.Module) -> bool:
    """Returns True if the code of a module's class names a TorchScript function, or if an attribute is a TorchScript function.

    A TorchScript function reads the memory of its arguments without calling Python. So a stand-in could not fetch its weight, and
    the weights must be on the device before the call.
    """
    kind: Any = type(module)
    return _class_uses_torchscript(kind) or any(
        isinstance(value, torch.jit.ScriptFunction) for value in vars(module).values()
    )


@cache
def _class_uses_torchscript(kind: Any) -> bool:
    return any(_is_named_in(value) for base in kind.__mro__ for value in vars(base).values())


def _is_named_in(value: Any) -> bool:
    """Returns True if a class attribute is a TorchScript function, or a function whose code names one."""
    code = getattr(value, "__code__", None)
    known = getattr(value, "__globals__", {})
    names = [*code_names(code)] if code is not None else []
    named = [value, *(known.get(name) for name in names)]
    named += [vars(each).get(name) for each in named if isinstance(each, ModuleType) for name in names]
    return any(isinstance(each, torch.jit.ScriptFunction) for each in named)


def code_names(code: CodeType) -> Iterator[str]:
    """Yields the names in a function's code, and in the functions and comprehensions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from code_names(constant)
