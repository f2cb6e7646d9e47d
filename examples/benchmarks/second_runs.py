"""What it costs to compare the two runs of a forward that is computed again, beside torch's own checkpoint on plain Lightning.

The ways take turns in one process, on the accelerator if there is one. From the root of the repository::

    python -m examples.benchmarks.second_runs --width 512 --tokens 2048
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from examples.benchmarks import cli, rows
from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.activations.fingerprints import SavedRun

BATCHES, ROUNDS, LAYERS = 8, 5, 8


class Timed(pl.LightningModule):
    """A Llama that notes how long each step takes."""

    def __init__(self, width: int, checkpointing: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            hidden_size=width, intermediate_size=8 * width // 3 // 16 * 16, num_hidden_layers=LAYERS, vocab_size=256,
            num_attention_heads=max(width // 128, 1), use_cache=False,
        )  # fmt: skip
        self.net = LlamaForCausalLM(config)
        if checkpointing:
            self.net.gradient_checkpointing_enable()
        self.seconds: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter())
        loss: Tensor = self.net(input_ids=batch, labels=batch).loss
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


@contextmanager
def uncompared() -> Iterator[None]:
    """A context in which nothing is noted of what autograd saves, so that there is nothing to compare."""
    with mock.patch.object(SavedRun, "_note", return_value=None):
        yield


WAYS: dict[str, tuple[str, Callable[[], Any]]] = {
    "plain, checkpointing": ("plain", nullcontext),
    "recompute": ("recompute", nullcontext),
    "recompute, not compared": ("recompute", uncompared),
}


def seconds(way: str, options: argparse.Namespace) -> float:
    """The median time of a run's steps but the first quarter, in which memory is made."""
    name, context = WAYS[way]
    pl.seed_everything(0, verbose=False)
    module = Timed(options.width, checkpointing=name == "plain")
    trainer = pl.Trainer(
        strategy="auto" if name == "plain" else SuperpipelineStrategy(k=2, activations=name),  # type: ignore[arg-type]
        devices=1, max_epochs=1, precision=options.precision, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    batches = torch.randint(0, 256, (BATCHES + 1, options.tokens))
    with context():
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=1))  # type: ignore[arg-type]
    steps = [after - before for before, after in zip(module.seconds, module.seconds[1:], strict=False)]
    return statistics.median(steps[BATCHES // 4 :])


def measure(options: argparse.Namespace) -> rows.Row:
    """Seconds per step of each way, in each round."""
    found = defaultdict[str, list[float]](list)
    for _ in range(ROUNDS):
        for way in WAYS:
            found[way].append(seconds(way, options))
    shape = {"width": options.width, "tokens": options.tokens, "precision": options.precision}
    return {"kind": "second-runs", "status": "ok", **shape, "seconds": dict(found)}


def main(argv: Sequence[str] | None = None) -> None:
    """Appends a row, and prints it as a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--width", type=int, default=512, help="of the hidden states (%(default)s)")
    parser.add_argument("--tokens", type=int, default=2048, help="in a batch (%(default)s)")
    parser.add_argument("--precision", default="32-true", help="of the Trainer (%(default)s)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    with cli.orderly(options.out):
        row = {**rows.origin(), **measure(options)}
        rows.append(options.out, row)
    print(f"{LAYERS} layers, {options}: milliseconds per step, the least and the median round's\n")
    print(f"| {' | '.join(WAYS)} |\n|{'---|' * len(WAYS)}")
    cells = (f"{1e3 * min(each):.4g}, {1e3 * statistics.median(each):.4g}" for each in row["seconds"].values())
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
