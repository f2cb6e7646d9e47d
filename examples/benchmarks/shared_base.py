"""What it takes that trials over one frozen base train at once, beside the same trials one after the other.

On the CPU a copy takes part of the same memory's and processors' time, and the arithmetic is the same both ways. So there is
nothing to gain in seconds, and the difference is what turns cost: threads that wait, the process's state that is exchanged, one
more copy of each layer. What there is to gain where transfers are slow shows in the bytes, and with ``--accelerator gpu`` in the
seconds. Both ways take turns in one process, and have to have the same losses. From the root of the repository::

    python -m examples.benchmarks.shared_base
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import statistics
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from examples.demos.language import CausalLM, small_llama
from examples.demos.text import VOCABULARY
from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.core.plan.units import human_bytes

MOST_COST = 1.10
"""The aim: trials at once take at most so many times the seconds of the same one after the other."""


@dataclass(frozen=True)
class Workload:
    """LoRA on a Llama from random weights.

    Attributes:
        layers, hidden: transformer blocks, and their width.
        tokens: of each batch, in windows of 64.
        steps: of each trial.
        dtype: of the base.
    """

    layers: int
    hidden: int
    tokens: int
    steps: int
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        return f"{self.layers} layers of width {self.hidden}, {self.tokens} tokens"


# Where arithmetic is most of a step, as in training that is worth it; and where Python is, which shows what a turn costs.
WORKLOADS = [Workload(8, 512, 256, 6), Workload(8, 64, 64, 20)]
TINY = Workload(3, 32, 64, 2)
# For a GPU: a layer has 400 MB, and travels for longer than it computes.
WIDE = Workload(8, 4096, 512, 8, torch.bfloat16)


class Timed(CausalLM):
    """Keeps its losses, and notes when its second step begins and its last one ends: set-up is in the first."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__(model, lr)
        self.losses: list[Any] = []  # on the device until the end: to read one, the host would wait for all kernels
        self.begun = self.ended = 0.0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.begun = time.perf_counter()

    def on_train_end(self) -> None:
        self.losses = [each.item() for each in self.losses]
        self.ended = time.perf_counter()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.losses.append(loss.detach())
        return loss


@dataclass(frozen=True)
class Trained:
    """What a trial came to.

    Attributes:
        losses: of each step.
        seconds: from the second step on.
        slot_bytes: what filled its slots.
    """

    losses: list[float]
    seconds: float
    slot_bytes: int


@dataclass(frozen=True)
class Figures:
    """One way's.

    Attributes:
        seconds: of all trials, with the making of their modules and set-up.
        steps: seconds of their steps but the first ones. Trials at once are in the same step, so that each of them takes as
            long as all together.
        wire_bytes: of the base to the device, for all trials.
        trained: what each trial came to.
    """

    seconds: float
    steps: float
    wire_bytes: int
    trained: list[Trained]


def trial_of(workload: Workload, rank: int = 8, accelerator: str = "cpu") -> Callable[[int], Trained]:
    """A trial with adapters of a rank: its number says the learning rate and the seed."""
    torch.manual_seed(0)
    base = small_llama(workload.layers, workload.hidden).to(workload.dtype)
    batches = torch.randint(VOCABULARY, (workload.steps, workload.tokens // 64, 64))
    lora = LoraConfig(task_type="CAUSAL_LM", r=rank, lora_dropout=0.05, target_modules="all-linear")

    def trial(number: int) -> Trained:
        torch.manual_seed(number)
        module = Timed(get_peft_model(copy.deepcopy(base), lora), 1e-4 * (1 + number))
        strategy = SuperpipelineStrategy(k=2)
        trainer = pl.Trainer(
            strategy=strategy, accelerator=accelerator, devices=1, max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
        return Trained(module.losses, module.ended - module.begun, strategy.stats().fetched_bytes)

    return trial


def at_once(trial: Callable[[int], Trained], count: int) -> Figures:
    """Trials of one base."""
    gc.collect()  # the trials of before are not this way's work
    begun = time.perf_counter()
    base = SharedBase(max_trials=count)
    trained = base.map(trial, range(count))
    seconds = time.perf_counter() - begun
    return Figures(seconds, statistics.mean(each.seconds for each in trained), base.fetched_bytes, trained)


def one_after_the_other(trial: Callable[[int], Trained], count: int) -> Figures:
    """The same trials, each by itself."""
    gc.collect()
    begun = time.perf_counter()
    trained = [trial(number) for number in range(count)]
    seconds = time.perf_counter() - begun
    slots = sum(each.slot_bytes for each in trained)
    return Figures(seconds, sum(each.seconds for each in trained), slots, trained)


def measure(workload: Workload, counts: Sequence[int], rounds: int, accelerator: str = "cpu") -> list[list[str]]:
    """The rows of the table, a cell for each of its columns.

    Raises:
        RuntimeError: a trial has other losses than alone.
    """
    trial = trial_of(workload, accelerator=accelerator)
    found = defaultdict[Any, list[Figures]](list)
    for number in range(rounds):
        for count in counts:
            ways = [at_once, one_after_the_other]
            for way in ways if number % 2 else reversed(ways):
                found[count, way].append(way(trial, count))
            ours, theirs = ([each.losses for each in found[count, way][-1].trained] for way in ways)
            if ours != theirs:
                raise RuntimeError(f"{count} trials at once have other losses than one after the other.")
    rows = []
    for count in counts:
        shared, alone = (found[count, way] for way in (at_once, one_after_the_other))
        whole, steps = (
            [min(getattr(each, name) for each in way) for way in (alone, shared)] for name in ("seconds", "steps")
        )
        slots = sum(each.slot_bytes for each in shared[0].trained)
        # What nobody shares goes into the slots as ever, and is not counted for all.
        wire = human_bytes(shared[0].wire_bytes if count > 1 else slots)
        rows.append([
            str(workload), str(count), f"{whole[0]:.2f}", f"{whole[1]:.2f}", f"{whole[1] / whole[0]:.2f}",
            f"{steps[1] / steps[0]:.2f}", human_bytes(alone[0].wire_bytes), human_bytes(slots), wire,
        ])  # fmt: skip
    return rows


COLUMNS = (
    "", "trials", "seconds, one after the other", "at once", "ratio", "ratio of steps, without set-up",
    "bytes to the device, one after the other", "into slots at once", "of the base to the device at once",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> list[list[str]]:
    """Prints the table, and returns its rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="of which the least is taken (%(default)s)")
    parser.add_argument(
        "--tiny", action="store_true", help="one small workload: whether it works. Its figures say nothing"
    )
    parser.add_argument(
        "--accelerator",
        choices=["cpu", "gpu"],
        default="cpu",
        help="gpu: one wide workload, with 16 GiB on the host (%(default)s)",
    )
    options = parser.parse_args(argv)
    print(f"\nLoRA, AdamW, {torch.get_num_threads()} threads, least of {options.rounds} rounds; "
          f"the aim is a ratio of at most {MOST_COST:.2f}:\n")  # fmt: skip
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    rows = []
    for workload in [TINY] if options.tiny else [WIDE] if options.accelerator == "gpu" else WORKLOADS:
        for row in measure(workload, options.trials, options.rounds, options.accelerator):
            print(f"| {' | '.join(row)} |", flush=True)
            rows.append(row)
    return rows


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)  # each trial would say what devices there are
    warnings.filterwarnings("ignore")  # about few workers, and of libraries
    main()
