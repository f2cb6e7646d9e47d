"""Measures what k and k' do to a model: GPU memory and time of a batch, beside plain Lightning, for some windows."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from shutil import rmtree
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Literal

import torch

from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.observe.machine import machine_of, today
from sp_lightning.core.observe.plot import DialPoint
from sp_lightning.core.plan.plan import cap_remarks
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.tools.comparison.check import is_fused, is_refusal
from sp_lightning.tools.comparison.record import Compared, Difference, compare
from sp_lightning.tools.comparison.report import DIFFERENT, EQUAL, NOT_RUN
from sp_lightning.tools.comparison.runs import RunResult, RunVariant, root_device, run, undisturbed
from sp_lightning.tools.comparison.subject import Factory, NotRunError, Subject
from sp_lightning.trainer.strategy import SuperpipelineStrategy

_ON_CPU = "plain, optimizer on the CPU"
_KINDS = {"training": "losses", "prediction": "predictions"}


@dataclass(frozen=True)
class DialRow:
    """One line of the table.

    Attributes:
        name: "plain", "plain, optimizer on the CPU", or the window: ``k=1, k'=1``.
        counted: bytes of GPU memory that weights, gradients and optimizer state take; None if unknown.
        allocated: the peak of bytes that torch allocated on the device; None on the CPU.
        seconds: the median time of a batch; None if the run did not end, or if the row was not run.
        equal: "yes" if losses or predictions are bitwise those of the reference, "no", "not run", or empty for plain rows.
    """

    name: str
    counted: int | None = None
    allocated: int | None = None
    seconds: float | None = None
    equal: str = ""


@dataclass
class Dial:
    """The result of :func:`dial`. ``print`` shows it as a table.

    Attributes:
        model: the name of the model.
        task: what was measured.
        rows: the lines of the table.
        machine: sentences on the machine and on the figures.
        notes: sentences on single rows.
    """

    model: str
    task: Literal["training", "prediction"]
    rows: list[DialRow] = field(default_factory=list)
    machine: str = ""
    notes: list[str] = field(default_factory=list)

    @property
    def status(self) -> int:
        """0: all windows that ran are equal to the reference. 1: a window differs or stopped. 2: no window ran."""
        found = {row.equal for row in self.rows}
        return DIFFERENT if "no" in found else EQUAL if found - {"", "not run"} else NOT_RUN

    @property
    def title(self) -> str:
        """The model and the task."""
        return f"{self.model}, {self.task}"

    @property
    def points(self) -> list[DialPoint]:
        """The rows that have a time, for a picture. The row of an optimizer on the CPU has plain's time if it has none."""
        plain = self.rows[0].seconds
        times = [(row, plain if row.name == _ON_CPU and row.seconds is None else row.seconds) for row in self.rows]
        sizes = [(row.name, row.allocated or row.counted, seconds) for row, seconds in times]
        return [DialPoint(name, size, seconds) for name, size, seconds in sizes if size and seconds]

    def __str__(self) -> str:
        return f"{self.title}. {self.text}"

    @property
    def text(self) -> str:
        """The machine, the table and the notes."""
        on_gpu = any(row.allocated is not None for row in self.rows)
        head = ["", "GPU memory", "of plain", *["torch's peak"] * on_gpu, "s per batch", "of plain"]
        lines = [[*head, f"{_KINDS[self.task]} equal"], *([self._cells(row, on_gpu=on_gpu) for row in self.rows])]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * (width - 1) + ":" * (at > 0) + "-" * (at == 0) for at, width in enumerate(widths)])
        table = [
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        ]
        return "\n".join([self.machine, "", *table, *(["", *self.notes] if self.notes else [])])

    def _cells(self, row: DialRow, *, on_gpu: bool) -> list[str]:
        plain = self.rows[0]
        size = "" if row.counted is None else human_bytes(row.counted)
        share = f"{row.counted / plain.counted:.0%}" if row.counted and plain.counted else ""
        peak = [human_bytes(row.allocated) if row.allocated else ""] * on_gpu
        times = ["", ""] if row.seconds is None else [f"{row.seconds:.3g}", ""]
        if row.seconds and plain.seconds:
            times[1] = f"{row.seconds / plain.seconds:.2f}"
        if row.name == _ON_CPU and row.seconds is None and plain.seconds:
            times = ["as plain", ""]
        return [row.name, size, share, *peak, *times, row.equal]


def dial(
    factory: Factory | None = None,
    data: Factory | None = None,
    *,
    config: str | Path | None = None,
    k: Sequence[int] = (1, 2, 4),
    k_prime: Sequence[int] = (1, 2),
    predict: bool = False,
    steps: int = 10,
    seed: int = 0,
    name: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    **options: Any,
) -> Dial:
    """Trains or predicts some batches with plain Lightning and with each k and k', and measures memory and time.

    Module and data are made anew for each run, from the same seed, as by :func:`~sp_lightning.check`. Random states are restored.

    Args:
        factory: makes the LightningModule when it is called: a callable, or ``"package.module:Name"``.
        data: makes a LightningDataModule or batches in the same way. By default the module's own data is used.
        config: a config of Lightning's CLI, in place of factory and data.
        k: the numbers of layers that are usable on the device at once.
        k_prime: the numbers of layers per transfer. Each is measured with each k.
        predict: True to predict instead of training.
        steps: batches of each run, at least 3. The first two are not timed.
        seed: the seed of all random states.
        name: the name of the model in the table.
        trainer: arguments of ``Trainer`` that change numbers or the device, for example ``{"precision": "bf16-mixed"}``.
        options: other options of :class:`~sp_lightning.SuperpipelineStrategy`.

    Raises:
        ValueError, TypeError: a name cannot be imported, or an option or an argument of ``Trainer`` is invalid.
        NotRunError: no batch could be trained or predicted, neither with plain Lightning nor with any window.
    """
    if steps < 3:
        raise ValueError(f"steps={steps}: the first two batches are not timed. Expected at least 3.")
    for option, values in (("k", k), ("k_prime", k_prime)):
        if not values or any(not isinstance(value, int) or value < 1 for value in values):
            raise ValueError(f"{option}={values!r}: expected whole numbers of at least 1. For example {option}=(1, 2).")
    SuperpipelineStrategy(**options)  # invalid options raise an error before the first run
    subject = Subject(factory, data, config, steps, seed, dict(trainer or {}))
    found = Dial(
        name or str(getattr(factory, "__qualname__", factory or config)), "prediction" if predict else "training"
    )
    with undisturbed(subject.settings), TemporaryDirectory(prefix="sp_lightning-") as folder:
        measuring = _Measuring(subject, found, Path(folder), 1 + len(k) * len(k_prime))
        measuring.measure(list(product(k, k_prime)), options)
    return found


class _Measuring:
    """The runs of one dial.

    Args:
        subject: the module, its data and the trainer's settings.
        found: receives rows and sentences.
        folder: the folder for all files.
        count: the number of runs, for the progress lines.
    """

    def __init__(self, subject: Subject, found: Dial, folder: Path, count: int) -> None:
        self._subject, self._found, self._folder, self._count = subject, found, folder, count
        self._kind = _KINDS[found.task]
        self._runs = 0
        self._references: list[tuple[RunResult, str]] = []  # what rows are compared with, and the word for an equal one

    def measure(self, windows: list[tuple[int, int]], options: dict[str, Any]) -> None:
        """Runs plain Lightning and all windows, and fills the rows."""
        settings, given, _ = self._subject.described()
        options = {**given, **options}
        device = root_device(settings)
        on_cpu, trains = device.type == "cpu", self._found.task == "training"
        fuse = is_fused(options, [options], device)
        self._count += 1 + (trains and not on_cpu)
        plain = self._run(RunVariant("plain", on_device=not on_cpu, fuse=fuse, only=self._found.task))
        aside = None
        if trains and not on_cpu:
            aside = self._run(RunVariant(_ON_CPU, fuse=fuse, only=self._found.task))
        self._references += [
            (each, word) for each, word in ((plain, "yes"), (aside, "yes, of steps on the CPU")) if each
        ]
        plan, streamed = None, list[DialRow]()
        for k, k_prime in windows:
            way = RunVariant(f"k={k}, k'={k_prime}", {**options, "k": k, "k_prime": k_prime}, only=self._found.task)
            done = self._run(way, streamed)
            if done is None:
                continue
            assert done.plan is not None
            assert done.stats is not None
            plan = plan or done.plan
            self._found.notes += [each for each in cap_remarks(k, k_prime, done.plan) if each not in self._found.notes]
            size = done.stats.peak_device_bytes
            streamed.append(DialRow(way.name, size, done.peak_bytes, self._seconds(done), self._equal(done)))
            rmtree(done.checkpoint.parent)
        weights, gradients = (0, 0) if plan is None else plan.plain
        state = max((done.state_bytes for done in (plain, aside) if done), default=None)
        moving = (weights + gradients if trains else weights) or None
        whole = None if moving is None or (trains and state is None) else moving + (state or 0)
        self._found.rows.append(self._plain_row("plain", whole, plain))
        if trains:
            self._found.rows.append(self._plain_row(_ON_CPU, moving, aside))
        self._found.rows += streamed
        again = plain and self._run(RunVariant("plain again", on_device=not on_cpu, fuse=fuse, only=self._found.task))
        self._describe(device, again, trains=trains)

    def _plain_row(self, name: str, counted: int | None, done: RunResult | None) -> DialRow:
        if done is None:
            return DialRow(name, counted)
        return DialRow(name, counted, done.peak_bytes, self._seconds(done))

    def _run(self, way: RunVariant, rows: list[DialRow] | None = None) -> RunResult | None:
        """Runs a variant; None if it does not fit or stops. Adds a note on the reason, and for a window a row.

        Raises:
            NotRunError: nothing can be run, because plain Lightning stopped, except for too little memory.
        """
        self._runs += 1
        print(f"dial: {self._found.title}: run {self._runs} of {self._count}, {way.name}", file=sys.stderr, flush=True)
        gc.collect()  # a trainer and its module refer to each other, and models of several runs may fill the memory
        try:
            return run(self._subject, way, self._folder / str(self._runs))
        except NotRunError:
            raise
        except Exception as error:
            too_large = isinstance(error, torch.OutOfMemoryError)
            if rows is None and not too_large:
                raise NotRunError(f"The run {way.name!r} stopped. {type(error).__name__}: {error}") from error
            self._found.notes.append(
                f"{way.name}: {error if is_refusal(error) else f'{type(error).__name__}: {error}'}"
            )
            if rows is not None:
                rows.append(DialRow(way.name, equal="not run" if too_large or is_refusal(error) else "no"))
            return None

    def _seconds(self, done: RunResult) -> float:
        """Returns the median time of a batch. The first two batches are left out if there are more."""
        return median(done.times[1:] or done.times)

    def _equal(self, done: RunResult) -> str:
        """Compares a run with the references. Returns the word for the first equal one, or "no" with a note.

        If plain Lightning does not fit, the first window that fits is the reference.
        """
        if not self._references:
            self._references.append((done, "yes"))
            self._found.notes.append(
                f"Plain Lightning does not fit, so {self._kind} are compared with those of {done.way.name}."
            )
            return ""
        differences: list[Difference] = []
        for reference, word in self._references:
            compared = compare(done.record, reference.record).get(self._kind, Compared())
            if compared.first is None:
                return word if compared.values else "no"
            differences.append(compared.first)
        first = differences[0]
        self._found.notes.append(f"{done.way.name}: {first.name or self._kind}, {first.moment}: {first.how}")
        return "no"

    def _describe(self, device: torch.device, again: RunResult | None, *, trains: bool) -> None:
        machine = machine_of(device_for(device))
        what = "weights, gradients and optimizer state" if trains else "weights"
        where = machine["accelerator"] or "CPU"
        sentences = [
            f"{where}; {machine['processor']}, {machine['cores']} cores, torch's threads: {machine['threads']}.",
            f"GPU memory: {what}, counted{', as a GPU would need' if device.type == 'cpu' else ''}; activations do not count.",
            f"Times: median of up to {self._subject.steps - 2} batches after two.",
        ]
        if trains:
            how = (
                "its time on this CPU is plain's"
                if device.type == "cpu"
                else "its steps copy unpinned memory, and do not overlap"
            )
            sentences.append(
                f"With its optimizer on the CPU, plain Lightning has no optimizer state on the GPU; {how}."
            )
        if again is not None:
            sentences.append(f"Plain Lightning, run again after all windows: {self._seconds(again):.3g} s per batch.")
        self._found.machine = " ".join(sentences)


def page(dials: Sequence[Dial], command: str, picture: str) -> str:
    """Returns a page in Markdown with the tables, the machine, the versions and the command.

    Args:
        dials: the results.
        command: the command line.
        picture: the name of the picture's file; empty if there is none.
    """
    machine = machine_of(device_for(torch.device("cpu")))
    versions = ", ".join([f"Python {machine['python']}", *(f"{name} {at}" for name, at in machine["versions"].items())])
    load = (
        f"Load of the machine at the end: {os.getloadavg()[0]:.1f} on {machine['cores']} cores."
        if hasattr(os, "getloadavg")
        else ""
    )
    image = [f"![Time of a batch against GPU memory]({picture})", ""] if picture else []
    commit = f" Commit {_commit()}." if _commit() else ""
    parts = [f"## {each.title}\n\n{each.text}\n" for each in dials]
    return "\n".join(
        [
            "# The dial: k and k', measured",
            "",
            *image,
            f"Command: `{command}`. {versions}.{commit} {today()}. {load}",
            "",
            *parts,
        ]
    )


def _commit() -> str:
    """Returns the commit of the package's repository; empty if it has none."""
    asked = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
