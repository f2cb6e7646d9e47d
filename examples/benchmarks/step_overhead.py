"""What steps on the device take beside their copies: an optimizer's step by this path, by the host's, and by plain Lightning.

All on the CPU, where copies are synchronous and the arithmetic is the same: the difference is copies and Python. The three take
turns in one process. From the root of the repository::

    python -m examples.benchmarks.step_overhead
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy

SHAPES = {"8 layers of 2048 × 2048": (8, 2048, 6), "32 layers of 16 × 16": (32, 16, 60)}
"""For each: how many linear layers, how wide they are, and how many batches are trained."""
ROUNDS = 5
STRATEGIES: dict[str, Any] = {
    "plain": lambda: "auto",
    "host": lambda: SuperpipelineStrategy(k=2, optimizer_overlap="off"),
    "device": lambda: SuperpipelineStrategy(k=2, optimizer_on="device", optimizer_overlap="off"),
}


class Timed(pl.LightningModule):
    """Linear layers. It notes how long each step of its optimizer takes, without the closure."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
        self.seconds: list[float] = []
        self.begun = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


def seconds(strategy: str, layers: int, width: int, batches: int) -> float:
    """The median of a run's steps but the first two, in which memory is made."""
    module = Timed(layers, width)
    trainer = pl.Trainer(
        strategy=STRATEGIES[strategy](), accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(batches, width), batch_size=1))  # type: ignore[arg-type]
    return statistics.median(module.seconds[2:])


def main() -> None:
    """Prints a row for each shape."""
    print(f"| AdamW, fused, {torch.get_num_threads()} threads | {' | '.join(STRATEGIES)} | more per layer |")
    print(f"|{'---|' * (len(STRATEGIES) + 2)}")
    for name, (layers, width, batches) in SHAPES.items():
        found = defaultdict[str, list[float]](list)
        for _ in range(ROUNDS):
            for strategy in STRATEGIES:
                found[strategy].append(seconds(strategy, layers, width, batches))
        least = {strategy: min(times) for strategy, times in found.items()}
        more = (least["device"] - least["host"]) / layers
        print(f"| {name} | {' | '.join(f'{1e3 * each:.3g} ms' for each in least.values())} | {1e3 * more:.3g} ms |")


if __name__ == "__main__":
    main()
