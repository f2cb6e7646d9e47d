"""The walk through the module tree that cuts it into units, the candidates for layers.

A container of like blocks is cut into its blocks, and a large module beside them into its parts. Cutting at another place
never changes a result, because a weight comes wherever it is read; it costs time alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from sp_lightning.device.torch_private import is_compiled
from sp_lightning.model.blocks import (
    CONTAINERS,
    are_experts,
    experts_in,
    groups_in,
    has_blocks,
    has_parts,
    is_repeated,
)
from sp_lightning.model.found import NamedParameter, join_names, tensor_bytes
from sp_lightning.model.stacks import stacked_rows
from sp_lightning.model.torchscript import uses_torchscript

# These read their children's weights without calling the children, so the children cannot come one by one.
_UNDIVIDED = (nn.MultiheadAttention, nn.RNNBase, torch.jit.ScriptModule)
# A unit that is not one of several like blocks is cut further while it holds more than this share of the model.
_LARGE_SHARE = 1 / 4


@dataclass(eq=False)
class Unit:
    """A candidate for a layer: a whole module, or one parameter of a module that was cut.

    Attributes:
        name: the name of the module, or of the parameter.
        module: None for a parameter.
        parameters: what it owns. A parameter that several units share belongs to the first.
        chosen: whether the user has chosen it.
        expert: whether it is used only when something is routed to it.
        within: whether another unit is around it.
        rows: how many experts it holds in stacks, of which only those travel that something is routed to; otherwise 0.
    """

    name: str
    module: nn.Module | None
    parameters: list[NamedParameter]
    chosen: bool = False
    expert: bool = False
    within: bool = False
    rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(tensor_bytes(parameter) for _, parameter in self.parameters)


class Walk:
    """One walk through a module tree.

    Args:
        module: the root.
        chosen: the modules that the user wants to be layers.
        whole: the modules that are moved whole, which have no units.
        whole_blocks: whether blocks move with those experts that are modules.

    Attributes:
        above: the modules that were cut, in the order of the tree.
    """

    def __init__(
        self, module: nn.Module, *, chosen: set[nn.Module], whole: Mapping[nn.Module, str], whole_blocks: bool
    ) -> None:
        self.above: list[nn.Module] = []
        self._total = sum(map(tensor_bytes, module.parameters()))
        self._chosen = chosen
        self._whole = whole
        self._whole_blocks = whole_blocks
        self._owned: set[nn.Parameter] = set()
        self._seen: set[nn.Module] = set()
        self._groups: set[nn.Module] = set()

    def units(self, module: nn.Module, name: str, *, is_block: bool = False, is_expert: bool = False) -> Iterator[Unit]:
        """The units of a module and of all below it, in the order of the tree.

        Args:
            module: where the walk goes on.
            name: its name.
            is_block: whether it is one of several like blocks.
            is_expert: whether it is one of a list of experts.
        """
        if module in self._seen:
            return
        self._seen.add(module)
        if module in self._whole or not any(True for _ in module.parameters()):
            return
        if module in self._chosen or not self._is_cut(module, is_block=is_block):
            yield from self._uncut(module, name, is_expert)
            return
        self.above.append(module)
        for key, parameter in module.named_parameters(recurse=False):
            if parameter not in self._owned:
                self._owned.add(parameter)
                full = join_names(name, key)
                yield Unit(full, None, [(full, parameter)])
        repeated, routed = is_repeated(module), are_experts(name, module)
        self._groups.update(groups_in(module))
        for key, child in module.named_children():
            yield from self.units(child, join_names(name, key), is_block=repeated, is_expert=routed)

    def _uncut(self, module: nn.Module, name: str, is_expert: bool) -> Iterator[Unit]:
        """A module that is not cut, then the experts inside it."""
        chosen = module in self._chosen
        closed = chosen or is_compiled(module)
        experts = {} if closed else {expert: key for key, expert in experts_in(module, name)}
        if not closed and stacked_rows(module):
            experts = {module: name}
        if self._whole_blocks:
            experts = {expert: key for expert, key in experts.items() if stacked_rows(expert)}
        if experts and any(map(uses_torchscript, module.modules())):
            experts = {}  # TorchScript reads memory without asking, so all weights have to be there
        within = [self._expert(expert, key, within=expert is not module) for expert, key in experts.items()]
        if module not in experts:
            yield Unit(name, module, self._own(module, name), chosen, is_expert)
        yield from within

    def _expert(self, module: nn.Module, name: str, *, within: bool) -> Unit:
        return Unit(name, module, self._own(module, name), expert=True, within=within, rows=stacked_rows(module))

    def _is_cut(self, module: nn.Module, *, is_block: bool) -> bool:
        if is_compiled(module):
            return False  # a compiled module is one graph: nothing can come and go inside
        if any(child in self._chosen for child in module.modules()):
            return True
        if isinstance(module, _UNDIVIDED) or not has_parts(module):
            return False
        is_root = not self.above
        if is_root or (type(module) in CONTAINERS and module not in self._groups):
            return True
        large = sum(map(tensor_bytes, module.parameters())) > _LARGE_SHARE * self._total
        if has_blocks(module):
            return large or not is_block
        return large and not is_block

    def _own(self, module: nn.Module, name: str) -> list[NamedParameter]:
        """The parameters of a module that belong to no other unit; they belong to its unit from now on."""
        excluded = {p for child in module.modules() if child in self._whole for p in child.parameters()}
        own = [
            (join_names(name, key), parameter)
            for key, parameter in module.named_parameters()
            if parameter not in self._owned and parameter not in excluded
        ]
        self._owned.update(parameter for _, parameter in own)
        self._seen.update(module.modules())
        return own
