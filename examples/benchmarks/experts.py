"""Stacked experts in generation: bytes and seconds per token, for two kinds of routing. One row.

A small Qwen3-MoE generates token by token. What is routed to is drawn from a seeded distribution in place of the router's
choice, uniform or Zipf (the share of the n-th expert of a layer is proportional to 1/n), the same for all contestants:

- ``plain``: Lightning alone, with all weights where they are computed with,
- ``whole blocks``: streamed, with the blocks as layers,
- ``by rows``: streamed, and only the routed experts are uploaded,
- ``accelerate``: its ``cpu_offload``.

The least possible is what is routed to, in bytes. From the root of the repository::

    python -m examples.benchmarks.experts --tokens 48 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import accelerate
import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from examples.benchmarks import cli, rows
from examples.benchmarks.report import by_routing
from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan

FIRST = 3  # batches that are not measured


class Model(pl.LightningModule):
    """A language model of sparse blocks, whose routing is drawn.

    Args:
        experts: in each block.
        routed: of them, for each token.
        zipf: whether some experts are drawn far more often than others.
        tokens: that are generated for each batch.
        width: of the hidden states.
    """

    def __init__(self, experts: int, routed: int, *, zipf: bool, tokens: int, width: int = 128) -> None:
        super().__init__()
        torch.manual_seed(0)
        config = Qwen3MoeConfig(
            vocab_size=256, hidden_size=width, moe_intermediate_size=width, num_hidden_layers=6, num_attention_heads=8,
            num_key_value_heads=2, head_dim=16, num_experts=experts, num_experts_per_tok=routed, eos_token_id=None,
        )  # fmt: skip
        self.net = Qwen3MoeForCausalLM(config)
        self.tokens = tokens
        self.batches: list[tuple[float, Any]] = []
        shares = 1 / torch.arange(1.0, experts + 1) if zipf else torch.ones(experts)
        for number, layer in enumerate(self.net.model.layers):
            order = torch.randperm(experts, generator=torch.Generator().manual_seed(number))
            layer.mlp.gate.register_forward_hook(_Drawn(shares[order], routed, number))

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        begun = time.perf_counter()
        output: Tensor = self.net.generate(batch, max_new_tokens=self.tokens, do_sample=False, pad_token_id=0)
        strategy: Any = self._trainer.strategy if self._trainer is not None else None
        stats = strategy.stats() if isinstance(strategy, SuperpipelineStrategy) else None
        self.batches.append((time.perf_counter() - begun, stats))
        return output


class _Drawn:
    """A hook on a router, which draws what is routed to."""

    def __init__(self, shares: Tensor, routed: int, seed: int) -> None:
        self._shares = shares
        self._routed = routed
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, router: nn.Module, args: Any, output: Any) -> Any:
        logits, weights, indices = output
        drawn = torch.multinomial(self._shares.expand(len(indices), -1), self._routed, generator=self._generator)
        return logits, weights, drawn.to(indices.device)


def measure(*, experts: int = 64, routed: int = 4, tokens: int = 48, width: int = 128, batches: int = 4) -> rows.Row:
    """Bytes and seconds per generated token, for both kinds of routing.

    Args:
        experts: in each block.
        routed: of them, for each token.
        tokens: that are generated for each batch.
        width: of the hidden states.
        batches: that are measured.
    """
    found: dict[str, Any] = {}
    for kind in ("uniform", "Zipf"):

        def make(zipf: bool = kind == "Zipf") -> Model:
            return Model(experts, routed, zipf=zipf, tokens=tokens, width=width)

        found[kind] = _contest(make, batches)
    return {"kind": "experts", "status": "ok", "experts": experts, "routed": routed, "tokens": tokens, "routing": found}


def _contest(make: Any, batches: int) -> dict[str, Any]:
    plan = make_plan(find_layers(make()), k=1, k_prime=1)
    stacks = [layer for layer in plan.layers if layer.rows]
    prompts = [
        torch.randint(0, 256, (1, 1), generator=torch.Generator().manual_seed(n)) for n in range(FIRST + batches)
    ]
    ways: dict[str, Any] = {"plain": "auto"}
    ways["whole blocks"] = SuperpipelineStrategy(k=1, k_prime=1, layers=["net.model.layers.*"])
    ways["by rows"] = SuperpipelineStrategy(k=1, k_prime=1)
    first: Any = None
    results: dict[str, Any] = {}
    for name, strategy in ways.items():
        model = make()
        trainer = pl.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        outputs = trainer.predict(model, DataLoader(prompts, batch_size=None))  # type: ignore[arg-type]
        first = first if first is not None else outputs
        assert all(map(torch.equal, outputs or [], first)), f"{name} generates other tokens"
        results[name] = _per_token(model)
    model = make()
    accelerate.cpu_offload(model.net, execution_device=torch.device("cpu"))
    outputs = [model.predict_step(prompt, 0) for prompt in prompts]
    assert all(map(torch.equal, outputs, first)), "accelerate generates other tokens"
    results["accelerate"] = _per_token(model)
    least = sum(layer.row_bytes for layer in stacks) * model.net.config.num_experts_per_tok
    return {"least": least, "stacks": plan.stack_bytes, "ways": results}


def _per_token(model: Model) -> dict[str, Any]:
    measured = model.batches[FIRST:]
    tokens = model.tokens * len(measured)
    result: dict[str, Any] = {"seconds": sum(seconds for seconds, _ in measured) / tokens}
    before, after = model.batches[FIRST - 1][1], measured[-1][1]
    if after is not None:
        result["bytes"] = (after.fetched_bytes - before.fetched_bytes) / tokens
        hits, misses = after.expert_hits - before.expert_hits, after.expert_misses - before.expert_misses
        result |= {"expert_bytes": (after.expert_bytes - before.expert_bytes) / tokens} if hits + misses else {}
        result |= {"hits": hits / (hits + misses)} if hits + misses else {}
    return result


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--experts", type=int, default=64, help="in each block (%(default)s)")
    parser.add_argument("--routed", type=int, default=4, help="experts for each token (%(default)s)")
    parser.add_argument("--tokens", type=int, default=48, help="generated for each batch (%(default)s)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    with cli.orderly(options.out):
        row = {**rows.origin(), **measure(experts=options.experts, routed=options.routed, tokens=options.tokens)}
        rows.append(options.out, row)
    print(by_routing(row))


if __name__ == "__main__":
    main()
