"""What a step takes where the update is most of it, beside plain Lightning, on the CPU: all of it, and the optimizer's part.

On the CPU copies are synchronous and the arithmetic is the same everywhere: the difference is copies, threads and Python. The
ways take turns in one process. From the root of the repository::

    python -m examples.benchmarks.step_overhead
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy

ROUNDS = 5


@dataclass
class RunVariant:
    """Arguments of the strategy; None for plain Lightning."""

    options: dict[str, Any] | None

    def strategy(self) -> Any:
        """Makes it."""
        return "auto" if self.options is None else SuperpipelineStrategy(k=2, **self.options)


@dataclass
class Workload:
    """Linear layers that are trained with one row a batch.

    Attributes:
        layers, width, batches: how many layers, how wide they are, and how many batches are trained.
        precision: the Trainer's.
        whole: whether all of a step is timed; otherwise what follows backward.
    """

    layers: int
    width: int
    batches: int
    precision: Any
    whole: bool

    def __str__(self) -> str:
        return f"{self.layers} layers of {self.width} × {self.width}, {self.precision}"


STEPS = {
    "plain": RunVariant(None),
    "host": RunVariant({"optimizer_overlap": "off"}),
    "device": RunVariant({"optimizer_on": "gpu", "optimizer_overlap": "off"}),
}
WHOLE = {
    "plain": RunVariant(None),
    "forward": RunVariant({"optimizer_overlap": "forward"}),
    "backward": RunVariant({"optimizer_overlap": "backward"}),
    "off": RunVariant({"optimizer_overlap": "off"}),
}
TABLES = {
    "The optimizer's step": (
        STEPS, [Workload(8, 2048, 6, "32-true", whole=False), Workload(32, 16, 60, "32-true", whole=False)],
    ),
    "A whole step": (
        WHOLE, [Workload(8, 3072, 20, precision, whole=True) for precision in ("bf16-mixed", "32-true")],
    ),
}  # fmt: skip


class Timed(pl.LightningModule):
    """Linear layers. It notes how long each step takes, with what the one before has left to be done.

    It has no hook for that: where one could read gradients, they are made float32 for it.
    """

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        width = workload.width
        self.net = nn.Sequential(*(nn.Linear(width, width) for _ in range(workload.layers)))
        self.seconds: list[float] = []
        self.begun = 0.0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        now = time.perf_counter()
        self.seconds.append(now - self.begun)
        self.begun = now
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4, fused=True)


class TimedUpdate(Timed):
    """It notes how long each step of its optimizer takes, without the closure."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.begun = time.perf_counter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.seconds.append(time.perf_counter() - self.begun)


def seconds(way: RunVariant, workload: Workload) -> float:
    """The median of a run's steps but the first quarter, in which memory is made: a machine may give it slowly."""
    module = (Timed if workload.whole else TimedUpdate)(workload)
    trainer = pl.Trainer(
        strategy=way.strategy(), accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, precision=workload.precision,
    )  # fmt: skip
    batches = torch.randn(workload.batches, workload.width)
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=1))  # type: ignore[arg-type]
    return statistics.median(module.seconds[workload.batches // 4 :])


def main() -> None:
    """Prints the tables."""
    for name, (ways, workloads) in TABLES.items():
        print(
            f"\n{name}, AdamW, fused, {torch.get_num_threads()} threads, milliseconds, the least and the median round's:\n"
        )
        print(f"| | {' | '.join(ways)} |\n|{'---|' * (len(ways) + 1)}")
        for workload in workloads:
            found = defaultdict[str, list[float]](list)
            for _ in range(ROUNDS):
                for title, way in ways.items():
                    found[title].append(seconds(way, workload))
            cells = (f"{1e3 * min(each):.3g}, {1e3 * statistics.median(each):.3g}" for each in found.values())
            print(f"| {workload} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
