"""Low-rank adapters (LoRA) for ``plan --lora``, in a model without adapters."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

from torch import Tensor, nn

from sp_lightning.core.model.found import is_stack


def add_adapters(module: nn.Module, rank: int) -> list[str]:
    """Freezes a module, and adds the adapters that PEFT's ``LoraConfig(r=rank, target_modules="all-linear")`` adds.

    All linear layers get an adapter, even layers that are never called, except the output head of a transformers model.

    Args:
        module: the model. The names of its modules do not change.
        rank: the rank of each adapter.

    Returns:
        A list with one sentence, which names the stacked experts whose adapters are not counted; an empty list if the module
        has no stacked experts.

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
        # Two products: with a matrix of rank × inputs, then with one of outputs × rank.
        adapted.lora_A = nn.Linear(inputs, rank, bias=False)
        adapted.lora_B = nn.Linear(rank, adapted.weight.numel() // inputs, bias=False)
        adapted.register_forward_hook(partial(_adapted, adapted.lora_A, adapted.lora_B))
    frozen = [(name, p) for name, p in module.named_parameters() if "expert" in name and not p.requires_grad]
    alike = Counter(re.sub(r"\d+", "*", name) for name, p in frozen if is_stack(p, len(p)))
    names = ", ".join(f"{name} ({count})" for name, count in alike.items())
    note = "adapters of stacked experts and of their routers are not counted; name a factory that adds them (target_parameters)"
    return [f"{note}: {names}"] if names else []


def _inputs(module: nn.Module) -> int | None:
    """Returns the number of input features of a linear layer; None for any other module.

    GPT-2's ``Conv1D`` is a linear layer with a weight of inputs × outputs. It is found by its name, without an import of
    transformers.
    """
    if isinstance(module, nn.Linear):
        return module.in_features
    weight: Any = module.weight if type(module).__name__ == "Conv1D" else None
    return None if weight is None else len(weight)


def _adapted(down: nn.Module, up: nn.Module, _: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Returns the output of a linear layer plus that of its adapter. This is a forward hook of the layer."""
    return output + up(down(inputs[0]))
