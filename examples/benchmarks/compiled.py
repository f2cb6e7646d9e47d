"""``torch.compile`` of single layers: seconds of a training step with it and without, plain and streamed. One row.

A small Llama, trained by Lightning's Trainer on the machine's accelerator or CPU. Each layer is compiled by
``layer.compile()``, which the strategy leaves as it is: the engine stays outside of the graphs. The first steps, in which
graphs are made, are counted apart.

From the root of the repository::

    python -m examples.benchmarks.compiled --seconds 60 --out rows.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from examples.benchmarks import cli, rows
from sp_lightning import SuperpipelineStrategy

FIRST = 3  # steps in which graphs are made


class Model(pl.LightningModule):
    """A language model of eight blocks.

    Args:
        width: of the hidden states.
        compiled: whether each block is compiled.
    """

    def __init__(self, width: int, *, compiled: bool) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=256, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=8, num_attention_heads=8
        )
        self.net = LlamaForCausalLM(config)
        if compiled:
            for block in self.net.model.layers:
                block.compile()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(input_ids=batch, labels=batch, use_cache=False).loss
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Clock(pl.Callback):
    """Notes the seconds of each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._start = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        self.seconds.append(time.perf_counter() - self._start)


def measure(seconds: float, *, width: int = 256, tokens: int = 512) -> rows.Row:
    """Median seconds per step, for all four ways.

    Args:
        seconds: of measured steps, for all ways together; making the graphs comes on top.
        width: of the hidden states.
        tokens: per step.
    """
    pl.seed_everything(0, verbose=False)
    batch = torch.randint(0, 256, (1, tokens))
    ways: dict[str, Any] = {}
    for compiled in (False, True):
        for streamed in (False, True):
            found = _train(batch, width, seconds / 4, compiled=compiled, streamed=streamed)
            ways[f"{'streamed' if streamed else 'plain'}{' compiled' * compiled}"] = found
    return {"kind": "compiled", "status": "ok", "width": width, "tokens": tokens, "ways": ways}


def _train(batch: Tensor, width: int, seconds: float, *, compiled: bool, streamed: bool) -> dict[str, float]:
    clock = Clock()
    trainer = pl.Trainer(
        strategy=SuperpipelineStrategy(k=2, k_prime=1) if streamed else "auto",
        accelerator="auto", devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[clock],
    )  # fmt: skip
    torch._dynamo.reset()
    loader: Iterable[Any] = DataLoader(_Repeated(batch, clock, seconds), batch_size=None)
    trainer.fit(Model(width, compiled=compiled), loader)
    return {"step_seconds": statistics.median(clock.seconds[FIRST:]), "first_seconds": sum(clock.seconds[:FIRST])}


class _Repeated(torch.utils.data.IterableDataset[Tensor]):
    """The same batch until enough steps were measured."""

    def __init__(self, batch: Tensor, clock: Clock, seconds: float) -> None:
        self._batch = batch
        self._clock = clock
        self._seconds = seconds

    def __iter__(self) -> Any:
        while len(self._clock.seconds) < FIRST + 3 or sum(self._clock.seconds[FIRST:]) < self._seconds:
            yield self._batch


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=cli.positive, default=60, help="of measured steps (%(default)s)")
    parser.add_argument("--width", type=int, default=256, help="of the hidden states (%(default)s)")
    parser.add_argument("--tokens", type=int, default=512, help="per step (%(default)s)")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    with cli.orderly(options.out):
        row = {**rows.origin(), **measure(options.seconds, width=options.width, tokens=options.tokens)}
        rows.append(options.out, row)
    for way, found in row["ways"].items():
        print(f"{way}: {found['step_seconds']:.3f} s per step, {found['first_seconds']:.1f} s for the first {FIRST}")


if __name__ == "__main__":
    main()
