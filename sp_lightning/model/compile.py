"""``torch.compile`` for the repeated blocks of a model."""

from __future__ import annotations

from collections.abc import Iterator, Set
from typing import Any

from torch import nn

from sp_lightning.model.blocks import are_experts, experts_in, holds_blocks
from sp_lightning.model.found import join_names
from sp_lightning.model.rows import RowFinder
from sp_lightning.registry import row_finder
from sp_lightning.torch_compat.private import is_compiled


def compile_blocks(module: nn.Module, **options: Any) -> list[str]:
    """Compiles each repeated block of a model: ``block.compile(**options)``. It works with every strategy.

    Equal blocks share one graph, so compilation takes seconds and not minutes. Call it in ``configure_model``, or at the end of
    ``__init__``::

        self.model = AutoModelForCausalLM.from_pretrained(...)
        sp_lightning.compile_blocks(self.model)

    In a block with a mixture of experts, the parts beside the experts are compiled. The experts themselves are not: they are
    uploaded one by one, as batches need them, and a graph would need them all.

    Args:
        module: the model, or a part of it.
        options: options of ``torch.compile``, for example ``dynamic=True``.

    Returns:
        The names of the compiled modules.

    Raises:
        ValueError: the model has no repeated blocks.
    """
    blocks = expect_blocks(module)
    for _, block in blocks:
        if not is_compiled(block):
            block.compile(**options)
    return [name for name, _ in blocks]


def find_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns the names and modules that :func:`compile_blocks` compiles."""
    finder = row_finder()
    callers = set(finder.callers(module).values())  # adapters of experts, whose own modules are not called
    return [each for name, block in _blocks(module, "") for each in _without_experts(block, name, finder, callers)]


def expect_blocks(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """Returns :func:`find_blocks`.

    Raises:
        ValueError: there are none.
    """
    blocks = find_blocks(module)
    if not blocks:
        raise ValueError(
            f"No repeated blocks found in {type(module).__name__}: expected an nn.ModuleList or nn.Sequential of modules of one "
            "class. Compile parts of the model by name instead: module.part.compile()."
        )
    return blocks


def _blocks(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost repeated blocks below a module."""
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
    """Yields a module if it has no experts, and otherwise its largest parts that have none."""
    if module in callers or finder.stacked(module) or are_experts(name, module):
        return
    if not any(True for _ in experts_in(module, name, finder)):
        yield name, module
        return
    for key, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield from _without_experts(child, join_names(name, key), finder, callers)
