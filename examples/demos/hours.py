"""A training that has so many hours: its clock, batches until a time is reached, losses over time, and what a checkpoint knows.

The clock decides what happens next, and it never guesses: what the end of a part takes (a validation and a checkpoint) is
known from the part before, what a step takes from the steps before.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from pickle import UnpicklingError
from statistics import median
from typing import Any

import torch
from torch import Tensor

from examples.demos.console import ConsoleLogger, Entry, say

PARTS = 4  # of the time for training, each of which ends with a validation and a checkpoint
AFTER = 0.005  # share of the budget for what comes after the last checkpoint: the end of the fit, the report
RECENT = 5  # steps whose median says how long the next one takes: one that was disturbed alone says nothing

now = time.monotonic  # tests put another one here


class Clock:
    """How much of a budget is used up, in seconds, from when the clock is made; runs that checkpoints join count as one.

    Attributes:
        seconds: the budget.
        ready: what was elapsed when training began; set by whoever begins it.
        closing: what the end of a part took last: its validation and its checkpoint.
    """

    def __init__(self) -> None:
        self.seconds = self.ready = self.closing = 0.0
        self._begun = now()

    def allot(self, seconds: float, *, elapsed: float = 0.0, ready: float = 0.0, closing: float = 0.0) -> None:
        """Gives it a budget, and the :meth:`state` of a run that is resumed."""
        self.seconds, self.ready, self.closing = seconds, ready, closing
        self._begun -= elapsed

    def elapsed(self) -> float:
        return now() - self._begun

    def end(self) -> float:
        """When training is to end: what comes after it takes as long as it took before."""
        return self.seconds * (1 - AFTER) - self.closing

    def share(self, ahead: float = 0.0) -> float:
        """Of the time for training that is over, from 0 to 1.

        Args:
            ahead: seconds from now on.
        """
        return min(1.0, max(0.0, (self.elapsed() + ahead - self.ready) / max(self.end() - self.ready, 1e-9)))

    def state(self) -> dict[str, float]:
        return {"elapsed": self.elapsed(), "ready": self.ready, "closing": self.closing}


def triangle(share: float, peak: float) -> float:
    """Cramming's learning rate, as a part of the highest: up from 0 until a share of the time, then down to 0 at its end."""
    return share / peak if share < peak else (1 - share) / (1 - peak)


def ends_of_parts(phase: str, pseudo: float) -> list[float]:
    """The shares of the time at which parts end: :data:`PARTS` equal ones, and where ``"pseudo"`` gives way to ``"real"``."""
    ends = [(part + 1) / PARTS for part in range(PARTS)]
    return (
        [*(end for end in ends if end < pseudo), pseudo] if phase == "pseudo" else [end for end in ends if end > pseudo]
    )


class UntilTime:
    """Batches of shuffled rows; each epoch of a trainer is a *part* of the time, so that a validation and a checkpoint end it.

    Lightning asks for a batch while the one before is still to be computed. So a part ends with that one underway, and
    what it takes is in ``clock.closing``. A batch is determined by its number: a resumed run goes on where one ended.

    Args:
        rows: [rows, length].
        clock: says when a part is over.
        ends: share of the time at which each part ends; a step that would end later belongs to the next part.
        batch, accumulate: rows of a batch, batches of a step.
        seed: of the order.
        part, number: parts and batches that a resumed run has done.
    """

    def __init__(
        self, rows: Tensor, clock: Clock, ends: Sequence[float], *, batch: int, accumulate: int, seed: int,
        part: int = 0, number: int = 0,
    ) -> None:  # fmt: skip
        self.rows, self.clock, self.ends = rows, clock, ends
        self.batch, self.accumulate, self.seed = batch, accumulate, seed
        self.part, self.number = part, number
        self._took: deque[float] = deque(maxlen=RECENT)
        self._ended: float | None = None
        self._order = (-1, torch.empty(0))

    def __iter__(self) -> Iterator[Tensor]:
        if self._ended is not None:
            self.clock.closing = self.clock.elapsed() - self._ended
        if self.part == len(self.ends):  # of a checkpoint that the last part wrote
            return
        end, begun = self.ends[self.part], self.clock.elapsed()
        while self.clock.share(ahead=median(self._took or [0.0])) < end:
            for _ in range(self.accumulate):
                yield self._rows_of(self.number)
                self.number += 1  # when the next one is asked for: an iterator that Lightning drops has done nothing
            self._took.append(self.clock.elapsed() - begun)
            begun = self.clock.elapsed()
        self.part += 1
        self._ended = self.clock.elapsed()

    def _rows_of(self, number: int) -> Tensor:
        epoch, place = divmod(number, len(self.rows) // self.batch)
        if epoch != self._order[0]:
            random = torch.Generator().manual_seed(self.seed + epoch)
            self._order = (epoch, torch.randperm(len(self.rows), generator=random))
        return self.rows[self._order[1][place * self.batch : (place + 1) * self.batch]]


class Curve(ConsoleLogger):
    """Keeps every loss with its time in the budget, and prints one in each tenth of the time.

    Args:
        clock: of the budget.
        parts, validations: the :meth:`state` of a run that is resumed.

    Attributes:
        parts: the losses between two validations each; steps count on over several trainers.
        validations: seconds and loss of each.
    """

    def __init__(
        self,
        clock: Clock,
        parts: Sequence[Sequence[tuple[int, float, float]]] = (),
        validations: Sequence[tuple[float, float]] = (),
    ) -> None:
        super().__init__(0, silent=True)
        self.clock = clock
        self.parts = [[Entry(*each) for each in part] for part in parts]
        self.validations = list(validations)
        self._said_tenth = -1

    @property
    def steps_done(self) -> int:
        return sum(map(len, self.parts))

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        seconds = self.clock.elapsed()
        if "val_loss" in metrics:
            self.validated(metrics["val_loss"])
        if "loss" in metrics:
            entry = Entry(self.steps_done + 1, metrics["loss"], seconds)
            self.parts[-1].append(entry)
            if (tenth := int(10 * seconds / self.clock.seconds)) != self._said_tenth:
                self._said_tenth = tenth
                say(f"{seconds:>8.1f} s  step {entry.step:>6}  loss {entry.loss:.3f}")

    def validated(self, loss: float) -> None:
        """A new part begins after it."""
        seconds = self.clock.elapsed()
        self.validations.append((seconds, loss))
        self.parts.append([])
        say(f"{seconds:>8.1f} s  validation loss {loss:.3f}")

    def state(self) -> dict[str, Any]:
        parts = [[(each.step, each.loss, each.seconds) for each in part] for part in self.parts]
        return {"parts": parts, "validations": self.validations}

    def entries(self) -> list[Entry]:
        return [entry for part in self.parts for entry in part]


# ---------------------------------------------------------------------- checkpoints


def read_note(file: Path) -> dict[str, Any]:
    """What the recipe has put into a checkpoint, and ``"guard"``, the seconds that Lightning's Timer has counted.

    Raises:
        ValueError: it is no such checkpoint.
    """
    try:
        checkpoint = torch.load(file, weights_only=True, mmap=True)  # weights are not read
        return checkpoint["cram"] | {"guard": checkpoint["callbacks"]["Timer"]["time_elapsed"]["train"]}
    except (RuntimeError, LookupError, TypeError, UnpicklingError) as error:
        raise ValueError(f"{file} is no checkpoint of this recipe. Give a last.ckpt that it wrote.") from error


def read_checkpoint(file: Path | None, identity: Mapping[str, Any]) -> dict[str, Any]:
    """The note of the run that is resumed; empty if none is.

    Raises:
        ValueError: the run was another one, or its time is over.
    """
    if file is None:
        return {}
    note = read_note(file)
    for name, value in identity.items():
        if note["identity"].get(name) != value:
            was, here = note["identity"].get(name), value
            differ = f"{name} was {was} and is {here}" if isinstance(value, (int, float)) else f"{name} was another one"
            raise ValueError(f"--resume {file}: {differ}. Resume with the options that the run began with.")
    if note["is_over"]:
        raise ValueError(f"--resume {file}: all of its time is used up. Begin a new run, with more --hours.")
    return note


def draw_curves(file: Path, curves: Mapping[str, Sequence[Entry]], *, seconds: float) -> None:
    """Losses over time, smoothed over a fiftieth of each run's steps; needs matplotlib."""
    from matplotlib.figure import Figure  # no pyplot: nothing here is shown in a window

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="seconds of the budget", ylabel="training loss", xlim=(0, seconds))
    for name, entries in curves.items():
        width = max(1, len(entries) // 50)
        losses = torch.tensor([entry.loss for entry in entries], dtype=torch.float64)
        smooth = losses.unfold(0, width, 1).mean(-1).tolist()
        axes.plot([entry.seconds for entry in entries[width - 1 :]], smooth, label=name, linewidth=1)
    axes.legend()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=100)
