"""Models with experts that are modules."""

from __future__ import annotations

from typing import Any

import torch
import torch._dynamo
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from tests.support.models import Block, Module, Transformer, tokens, vectors

EXPERTS = 4


class Routed(nn.Module):
    """A block: what all inputs pass through, and experts of which each row is sent to one."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.gate = nn.Linear(16, EXPERTS)
        self.experts = nn.ModuleList(Block() for _ in range(EXPERTS))

    def forward(self, x: Tensor, only: int | None = None) -> Tensor:
        x = torch.tanh(self.before(x))
        scores = F.softmax(self.gate(x), dim=-1)
        choice = scores.argmax(dim=-1) if only is None else torch.full(x.shape[:-1], only)
        out = torch.zeros_like(x)
        for number in choice.unique().tolist():
            rows = choice == number
            out[rows] = (scores[rows][:, number, None] * self.experts[number](x[rows])).to(out.dtype)
        return x + out


class Mixture(nn.Module):
    def __init__(self, only: int | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Routed() for _ in range(3))
        self.only = only

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, self.only)
        return x


def switch() -> Transformer:
    config = transformers.SwitchTransformersConfig(
        vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4, num_experts=4,
        decoder_start_token_id=0, use_cache=False, num_sparse_encoder_layers=2, num_sparse_decoder_layers=2,
    )  # fmt: skip
    return Transformer(transformers.SwitchTransformersForConditionalGeneration(config))


CASES: dict[str, tuple[Any, Any]] = {
    "mixture": (lambda: Module(Mixture()), vectors),
    "one-expert": (lambda: Module(Mixture(only=1)), vectors),
    "switch": (switch, tokens),
}
