"""Adapters of low rank (LoRA) for ``plan --lora``, in a model that has none."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.model.find import find_layers
from sp_lightning.model.stacks import is_stack


def add_adapters(module: nn.Module, rank: int, *, layers: list[str] | None) -> list[str]:
    """Freezes a module, and adds to all linear layers of its blocks what PEFT's adapters add.

    Args:
        module: it keeps the names of its modules, so that ``layers`` finds the same blocks afterwards.
        rank: the rank of each adapter.
        layers: patterns that name the blocks; None to find them.

    Returns:
        A sentence on the experts that get none, if there are some.

    Raises:
        ValueError: no block has a linear layer.
    """
    linear = _linear_layers(module, layers)
    if not linear:
        raise ValueError(
            f"--lora: the blocks of {type(module).__name__} have no linear layers (nn.Linear). Name a factory that adds "
            "adapters as you do."
        )
    module.requires_grad_(False)
    for name in linear:
        adapted: Any = module.get_submodule(name)
        # A product with rank × inputs numbers, and one of that with outputs × rank.
        adapted.lora_A = nn.Linear(adapted.in_features, rank, bias=False)
        adapted.lora_B = nn.Linear(rank, adapted.out_features, bias=False)
        adapted.register_forward_hook(partial(_adapted, adapted.lora_A, adapted.lora_B))
    frozen = [(name, p) for name, p in module.named_parameters() if "expert" in name and not p.requires_grad]
    alike = Counter(re.sub(r"\d+", "*", name) for name, p in frozen if is_stack(p, len(p)))
    names = ", ".join(f"{name} ({count})" for name, count in alike.items())
    return [f"stacked experts get no adapters, only linear layers do: {names}"] if names else []


def _linear_layers(module: nn.Module, layers: list[str] | None) -> list[str]:
    """The names of the linear layers within blocks. A head that is a layer by itself is not within one."""
    modules, found = dict(module.named_modules()), dict[str, None]()
    for layer in find_layers(module, layers=layers).layers:
        if layer.name not in modules:
            continue  # a parameter
        for name, inner in modules[layer.name].named_modules(prefix=layer.name):
            around = modules[name.rpartition(".")[0]]
            # Attention of torch reads the weight of its projection without calling it.
            if name != layer.name and isinstance(inner, nn.Linear) and not isinstance(around, nn.MultiheadAttention):
                found[name] = None
    return list(found)


def _adapted(down: nn.Module, up: nn.Module, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + up(down(inputs[0]))
