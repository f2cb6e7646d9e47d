"""Adapters of low rank (LoRA) for ``plan --lora``, in a model that has none."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.model.found import is_stack


def add_adapters(module: nn.Module, rank: int) -> list[str]:
    """Freezes a module, and adds what PEFT's ``LoraConfig(r=rank, target_modules="all-linear")`` adds to its linear layers.

    That is to all of them, whether they are called or not, but to the output head of a model of transformers.

    Args:
        module: it keeps the names of its modules.
        rank: the rank of each adapter.

    Returns:
        A sentence on the experts whose adapters are not counted, if there are some.

    Raises:
        ValueError: the module has no linear layers, or has adapters already.
    """
    if adapters := [name for name, _ in module.named_parameters() if "lora_" in name]:
        raise ValueError(f"--lora: {type(module).__name__} has adapters already ({adapters[0]}, …). Leave --lora out.")
    head = getattr(module, "get_output_embeddings", lambda: None)()
    linear: list[Any] = [each for each in module.modules() if _inputs(each) is not None and each is not head]
    if not linear:
        raise ValueError(
            f"--lora: {type(module).__name__} has no linear layers (nn.Linear). Name a factory that adds adapters as you do."
        )
    module.requires_grad_(False)
    for adapted in linear:
        inputs = _inputs(adapted) or 0
        # A product with rank × inputs numbers, and one of that with outputs × rank.
        adapted.lora_A = nn.Linear(inputs, rank, bias=False)
        adapted.lora_B = nn.Linear(rank, adapted.weight.numel() // inputs, bias=False)
        adapted.register_forward_hook(partial(_adapted, adapted.lora_A, adapted.lora_B))
    frozen = [(name, p) for name, p in module.named_parameters() if "expert" in name and not p.requires_grad]
    alike = Counter(re.sub(r"\d+", "*", name) for name, p in frozen if is_stack(p, len(p)))
    names = ", ".join(f"{name} ({count})" for name, count in alike.items())
    note = "adapters of stacked experts and of their routers, which PEFT adds for some models, are not counted"
    return [f"{note}: {names}"] if names else []


def _inputs(module: nn.Module) -> int | None:
    """How many numbers a linear layer takes; None if a module is none. That of GPT-2 has the transposed weight."""
    if isinstance(module, nn.Linear):
        return module.in_features
    weight: Any = module.weight if type(module).__name__ == "Conv1D" else None
    return None if weight is None else len(weight)


def _adapted(down: nn.Module, up: nn.Module, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + up(down(inputs[0]))
