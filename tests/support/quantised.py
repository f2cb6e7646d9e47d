"""Trainable adapters on a frozen base whose weights are quantised by torchao."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import torch
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_

from sp_lightning.core.plan.plan import Plan
from tests.support.models import Transformer, llama
from tests.support.runs import Make

CONFIGS: dict[str, Callable[[], Any]] = {
    "int8": Int8WeightOnlyConfig,
    "int4": lambda: IntxWeightOnlyConfig(weight_dtype=torch.int4),
}


def adapted(config: Callable[[], Any], dtype: torch.dtype = torch.float32, **options: Any) -> Make:
    """A frozen quantised base with trainable adapters."""

    def make() -> Transformer:
        module = llama(vocab_size=200, tie_word_embeddings=False, **options)
        quantize_(module.net.to(dtype), config())
        module.net.requires_grad_(False)
        if options.get("checkpointing"):
            module.net.enable_input_require_grads()
        module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        return module

    return make


CASES: dict[str, Make] = {
    **{name: adapted(config) for name, config in CONFIGS.items()},
    "int8-checkpoint": adapted(Int8WeightOnlyConfig, checkpointing={"use_reentrant": False}),
}


def travels_packed(plan: Plan) -> bool:
    """All blocks are layers that are uploaded as packed bytes, which are fewer than those of their values."""
    blocks = [layer for layer in plan.layers if ".layers." in layer.name]
    smaller = [layer.nbytes < layer.gradient_bytes + sum(s.nbytes for s in layer.spans) * 2 for layer in blocks]
    packed = {span.dtype for span in blocks[0].spans} >= {torch.int8}
    return len(blocks) == 4 and all(smaller) and packed and "are uploaded as packed bytes" in str(plan)


class Opaque(Tensor):
    """A subclass with a dispatch of its own that says nothing of its memory."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C._DisableTorchDispatch():
            result = func(*args, **(kwargs or {}))
            return torch.Tensor._make_subclass(cls, result) if func is torch.ops.aten.detach.default else result


def opaque(weight: Tensor) -> nn.Parameter:
    """A frozen parameter of that class."""
    return nn.Parameter(Tensor._make_subclass(Opaque, weight.detach()), requires_grad=False)
