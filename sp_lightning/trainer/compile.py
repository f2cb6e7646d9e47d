"""``torch.compile`` for the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from torch import nn

from sp_lightning.core.model.blocks import are_experts, experts_in, holds_blocks
from sp_lightning.core.model.found import join_names
from sp_lightning.core.model.rows import RowFinder, row_finder
from sp_lightning.core.torch_compat.private import is_compiled


def compile_blocks(module: nn.Module, **options: Any) -> list[str]:
    """Compiles each repeated block of a model with ``block.compile(**options)``. Works with every strategy.

    Equal blocks share one graph, so compilation takes seconds and not minutes. Call the function in ``configure_model``, or at
    the end of ``__init__``::

        self.model = AutoModelForCausalLM.from_pretrained(...)
        sp_lightning.compile_blocks(self.model)

    In a block with a mixture of experts, the other parts of the block are compiled. Experts are not compiled, because each is
    uploaded only if a batch needs it, and one graph would need all of them.

    Args:
        module: the model, or a part of it.
        options: options of ``torch.compile``, for example ``dynamic=True``.

    Returns:
        The names of the compiled modules. Modules that were compiled before are included, and are not compiled again.

    Raises:
        ValueError: no repeated blocks were found.
    """
    blocks = expect_blocks(module)
    for _, block in blocks:
        if not is_compiled(block):
            block.compile(**options)
    return [name for name, _ in blocks]


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules that :func:`compile_blocks` compiles."""
    finder = row_finder()
    callers = set(finder.callers(module).values())  # adapters that call experts with their own arguments
    return [each for name, block in _blocks(module, "") for each in _without_experts(block, name, finder, callers)]


def expect_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the result of :func:`find_blocks`, which is not empty.

    Raises:
        ValueError: no repeated blocks were found.
    """
    blocks = find_blocks(module)
    if not blocks:
        raise ValueError(
            f"No repeated blocks found in {type(module).__name__}: expected an nn.ModuleList or nn.Sequential of modules of one "
            "class. Compile parts of the model by name instead: module.part.compile()."
        )
    return blocks


def _blocks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost repeated blocks below a module. Does not search inside compiled modules."""
    repeated = holds_blocks(name, module)
    for key, child in module.named_children():
        full = join_names(name, key)
        if repeated and any(True for _ in child.parameters()):
            yield full, child
        elif not is_compiled(child):
            yield from _blocks(child, full)


def _without_experts(
    module: nn.Module, name: str, finder: RowFinder, callers: Set[nn.Module]
) -> Iterator[tuple[str, nn.Module]]:
    """Yields a module if it has no experts; otherwise its largest parts that have no experts.

    Args:
        module: a repeated block, or a part of one.
        name: its name.
        finder: finds modules that hold experts in stacks.
        callers: the adapters that call experts.
    """
    if module in callers or finder.stacked(module) or are_experts(name, module):
        return
    if not any(True for _ in experts_in(module, name, finder)):
        yield name, module
        return
    for key, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield from _without_experts(child, join_names(name, key), finder, callers)
