"""Output of the demonstrations: the loss during training, and at the end memory use next to plain training's."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from tqdm import tqdm

from sp_lightning import Plan
from sp_lightning.core.plan.units import human_bytes

SILENCE = 10.0  # seconds between two lines of a step, at most


@rank_zero_only
def say(line: str) -> None:
    tqdm.write(line)  # above a progress bar, if there is one
    sys.stdout.flush()  # at once, in a pipe too


def indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


@dataclass(frozen=True)
class Entry:
    """One training step: its number from 1 on, its loss, and when it was logged, in seconds."""

    step: int
    loss: float
    seconds: float


class ConsoleLogger(Logger):
    """Keeps every ``loss`` and prints one in ten, and one every ten seconds; of what else is logged, it prints all.

    A logger and no callback: a callback that acts between two batches could write weights for all the strategy knows,
    so it would not fetch the next batch's layers ahead.

    Args:
        steps: optimizer steps of the whole run; 0 if a time ends it.
        silent: whether to print nothing.
    """

    def __init__(self, steps: int, *, silent: bool = False) -> None:
        super().__init__()
        self.steps = steps
        self.silent = silent
        self.losses: list[Entry] = []
        self._said = 0.0

    @property
    def name(self) -> str:
        return "console"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics and step is not None:
            entry = Entry(step + 1, metrics["loss"], time.perf_counter())
            self.losses.append(entry)
            tenth = self.steps and (entry.step % max(1, self.steps // 10) == 0 or entry.step == self.steps)
            if not self.silent and (len(self.losses) == 1 or tenth or entry.seconds - self._said > SILENCE):
                self._said = entry.seconds
                number = f"{entry.step:>{len(str(self.steps))}}/{self.steps}" if self.steps else f"{entry.step:>6}"
                say(f"step {number}  loss {entry.loss:.3f}{self._pace(entry)}")
        named = {} if self.silent else {"val_loss": "validation loss", "accuracy": "accuracy"}
        if shown := [f"{said} {metrics[name]:.3f}" for name, said in named.items() if name in metrics]:
            say(", ".join(shown))

    def _pace(self, now: Entry) -> str:
        rate = steps_per_second(self.losses)
        left = f", {(self.steps - now.step) / rate:.0f} s left" if self.steps and rate else ""
        return f"  {rate:.3g} steps/s{left}" if rate else ""


def last_loss(losses: Sequence[Entry]) -> float:
    """The mean over the last tenth of the steps."""
    tail = [entry.loss for entry in losses[-max(1, len(losses) // 10) :]]
    return sum(tail) / len(tail)


def steps_per_second(*parts: Sequence[Entry]) -> float:
    """The first step of each part left out: it sets up. 0 if no part has another."""
    steps = sum(part[-1].step - part[0].step for part in parts)
    seconds = sum(part[-1].seconds - part[0].seconds for part in parts)
    return steps / seconds if steps else 0.0


def say_speed(ours: float, plain: float, unit: str) -> None:
    """Beside plain Lightning's speed; 0 is unknown."""
    beside = f"plain Lightning, on a few batches of the same: {plain:,.0f}" if plain else "plain Lightning does not fit"
    if ours:
        say(f"Speed: {ours:,.0f} {unit}/s ({beside})")


def say_memory(plan: Plan, *, counted: int, plain: int, holds: str, allocated: int = 0) -> None:
    """Prints the comparison of peak memory; all in bytes.

    Args:
        plan: what the strategy decided.
        counted: most that weights and gradients took on the device.
        plain: what plain Lightning keeps there.
        holds: what that is.
        allocated: CUDA's peak, if there is one.
    """
    ours = "weights and gradients" if "gradients" in holds else "weights"
    say("Peak on the device, without activations:")
    say(f"  superpipeline, planned  {human_bytes(plan.peak_device_bytes):>10}   {ours}")
    say(f"  superpipeline, counted  {human_bytes(counted):>10}   {ours}")
    say(f"  plain, computed         {human_bytes(plain):>10}   {holds}")
    if allocated:
        say(f"  CUDA allocator, peak    {human_bytes(allocated):>10}   superpipeline with activations, measured")
