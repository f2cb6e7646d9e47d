"""Adapt a mixture of experts with LoRA (PEFT), then generate: of its stacked experts only those travel that are routed to.

    python examples/finetune_moe.py                                       # no download, a minute on a CPU
    python examples/finetune_moe.py --experts 64 --kept 0.5               # half of the experts may stay on the device

A small Qwen3-MoE from random weights first learns English from Python's help texts, with all its weights: with many tokens in a
batch nearly all experts are hit, and whole stacks travel. Then adapters train over frozen experts, and at last the model
generates token by token, with a memory budget that leaves room for some experts. The same is generated with whole blocks as
layers, and what both have fetched for a token is shown, and how much of that are experts, beside what is routed to.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from sp_lightning.plan.units import human_bytes

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.console import ConsoleLogger, indent, last_loss, say
from examples.language import CausalLM
from examples.recipe import add_run_options, check_file, check_least, check_positive, make_trainer, prepare_output, run
from examples.text import cut, load_tokenizer, read_text, shuffled
from sp_lightning.model.find import find_layers
from sp_lightning.plan.plan import make_plan

PROMPTS = 5  # the first ones are generated while the window is chosen, and are not counted
COUNTED = 2
WIDTH, LAYERS, ROUTED = 128, 4, 2


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        base_losses, losses: first and last loss of the base model, and of the adapters.
        bytes_per_token, whole_bytes_per_token: what was fetched for a token, by rows and with whole blocks.
        expert_bytes_per_token: how much of it are experts that came by rows.
        least_bytes_per_token: the experts that are routed to for a token, without any that are kept.
        hits: the share of the experts asked for that was on the device.
        tokens_per_second: of the generation by rows.
        text: generated, prompt included.
    """

    base_losses: tuple[float, float]
    losses: tuple[float, float]
    bytes_per_token: float
    whole_bytes_per_token: float
    expert_bytes_per_token: float
    least_bytes_per_token: int
    hits: float
    tokens_per_second: float
    text: str


class Generator(CausalLM):
    """Generates without chance, and notes what the strategy had fetched after each prompt."""

    def __init__(self, model: Any, tokens: int, end: int) -> None:
        super().__init__(model, lr=0.0)
        self.tokens = tokens
        self.end = end
        self.seen: list[tuple[float, Any]] = []

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        written: Tensor = self.model.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), do_sample=False, max_new_tokens=self.tokens,
            min_new_tokens=self.tokens, pad_token_id=self.end,
        )  # fmt: skip
        self.seen.append((time.perf_counter(), self.trainer.strategy.stats()))  # type: ignore[attr-defined]
        return written


def main(argv: Sequence[str] | None = None) -> Result:
    """Trains the base, then the adapters, then generates twice."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:
        check(options)
        prepare_output(options.output)
    except ValueError as error:
        parser.error(str(error))
    pl.seed_everything(options.seed, verbose=False)
    tokenizer = load_tokenizer()
    windows = cut(tokenizer, read_text(options.text), length=options.length, batch_size=options.batch_size)
    model = small_mixture(options.experts, len(tokenizer), tokenizer.eos_token_id)

    say(
        f"A mixture of {options.experts} experts in each of {LAYERS} blocks learns English for {options.base_steps} steps"
    )
    base = train(options, model, windows, options.base_steps, lr=2e-3)
    lora = LoraConfig(r=8, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    say(f"\nLoRA beside frozen experts, {options.steps} steps")
    adapted: Any = get_peft_model(model, lora)
    losses = train(options, adapted, windows, options.steps, lr=options.lr)

    prompts = [windows[n % len(windows)][None, : options.length // 4] for n in range(PROMPTS)]
    plan = make_plan(find_layers(Generator(adapted, options.new_tokens, 0)), k=1, k_prime=1)
    budget = plan.peak_device_bytes + int(options.kept * plan.stack_bytes)
    by_rows, fetched, experts, hits, speed = generate(options, adapted, prompts, tokenizer, gpu_memory=budget)
    whole, fetched_whole, *_ = generate(options, adapted, prompts, tokenizer, layers=["**.layers.*"])
    if not all(map(torch.equal, by_rows, whole)):
        raise RuntimeError("What was generated by rows is not what was generated with whole blocks.")
    text = tokenizer.decode(by_rows[0][0], skip_special_tokens=True)
    least = ROUTED * sum(layer.row_bytes for layer in plan.layers if layer.rows)
    result = Result(base, losses, fetched, fetched_whole, experts, least, hits, speed, text)
    say(f"\nGenerated:\n{indent(text)}\n")
    say(f"Loss of the base: {base[0]:.3f} → {base[1]:.3f}, of the adapters: {losses[0]:.3f} → {losses[1]:.3f}")
    say(
        f"Fetched per token: {human_bytes(fetched)} by rows, of that experts {human_bytes(experts)}; "
        f"{human_bytes(fetched_whole)} with whole blocks. Of {human_bytes(least)} that are routed to, "
        f"{hits:.0%} were on the device. {speed:.1f} tokens/s"
    )
    return result


def small_mixture(experts: int, vocabulary: int, end: int) -> Any:
    """A Qwen3-MoE from random weights."""
    config = Qwen3MoeConfig(
        vocab_size=vocabulary, hidden_size=WIDTH, moe_intermediate_size=WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, head_dim=32, num_experts=experts, num_experts_per_tok=ROUTED,
        max_position_embeddings=512, bos_token_id=None, eos_token_id=end, pad_token_id=end,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


def train(options: argparse.Namespace, model: Any, windows: Tensor, steps: int, *, lr: float) -> tuple[float, float]:
    """Trains what is trainable of a model. Returns its first loss, and the mean over the last tenth of its steps."""
    console = ConsoleLogger(steps)
    trainer, strategy = make_trainer(options, logger=console)
    trainer.fit(CausalLM(model, lr), shuffled(windows, batch_size=options.batch_size, steps=steps, seed=steps))
    say(f"{strategy.plan}")
    return console.losses[0].loss, last_loss(console.losses)


def generate(
    options: argparse.Namespace, model: Any, prompts: list[Tensor], tokenizer: Any, **more: Any
) -> tuple[list[Tensor], float, float, float, float]:
    """Generates. Returns what was written, bytes and experts' bytes fetched per token, the share of hits, and tokens/s."""
    module = Generator(model, options.new_tokens, tokenizer.eos_token_id)
    options = argparse.Namespace(**{**vars(options), "k": 1, "k_prime": 1})
    trainer, strategy = make_trainer(options, **more)
    written: Any = trainer.predict(module, DataLoader(prompts, batch_size=None))  # type: ignore[arg-type]
    (begun, before), (ended, after) = module.seen[-1 - COUNTED], module.seen[-1]
    tokens = COUNTED * options.new_tokens
    hits, misses = after.expert_hits - before.expert_hits, after.expert_misses - before.expert_misses
    say(f"{strategy.plan}")
    fetched = (after.fetched_bytes - before.fetched_bytes) / tokens
    experts = (after.expert_bytes - before.expert_bytes) / tokens
    return written, fetched, experts, hits / max(hits + misses, 1), tokens / (ended - begun)


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's help texts)")
    add("--experts", type=int, default=32, help="in each block (%(default)s)")
    add("--kept", type=float, default=0.25, help="the share of them that the device has room for (%(default)s)")
    add("--base-steps", type=int, default=40, help="of the base model's own training (%(default)s)")
    add("--steps", type=int, default=20, help="of the adapters (%(default)s)")
    add("--batch-size", type=int, default=8, help="windows of text per step (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--lr", type=float, default=5e-3, help="learning rate of the adapters (%(default)s)")
    add("--new-tokens", type=int, default=24, help="tokens per sample (%(default)s)")
    add_run_options(parser, "finetune_moe")
    return parser


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, steps=2, base_steps=2, batch_size=1, length=4, new_tokens=1, experts=ROUTED + 1)
    check_file("--text", options.text, "a UTF-8 text file")
    check_positive(options, "lr")
    if not 0 <= options.kept <= 1:
        raise ValueError(f"--kept {options.kept}: must be a share between 0 and 1. For example --kept 0.5.")


if __name__ == "__main__":
    run(main)
