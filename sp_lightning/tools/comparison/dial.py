"""Measures what k and k' do to a model: GPU memory and time of a batch, beside plain Lightning, for some windows."""

from __future__ import annotations

import gc
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
from sp_lightning.tools.comparison.check import is_refusal
from sp_lightning.tools.comparison.runs import RunResult, RunVariant, root_device, run, undisturbed
from sp_lightning.tools.comparison.subject import Factory, NotRunError, Subject
from sp_lightning.trainer.strategy import SuperpipelineStrategy


@dataclass(frozen=True)
class DialRow:
    """One line of the table.

    Attributes:
        name: "plain", or the window: ``k=1, k'=1``.
        counted: bytes of GPU memory that weights, gradients and optimizer state take; None if unknown.
        allocated: the peak of bytes that torch allocated on the device; None on the CPU.
        seconds: the median time of a batch; None if the run did not end.
    """

    name: str
    counted: int | None = None
    allocated: int | None = None
    seconds: float | None = None


@dataclass
class Dial:
    """The result of :func:`dial`. ``print`` shows it as a table.

    Attributes:
        model: the name of the model.
        task: what was measured.
        rows: the lines of the table.
        machine: sentences on the machine and on the figures.
        notes: sentences on single rows.
        stopped: True if the run of a window ended with an error other than too little memory or an option that cannot be used.
    """

    model: str
    task: Literal["training", "prediction"]
    rows: list[DialRow] = field(default_factory=list)
    machine: str = ""
    notes: list[str] = field(default_factory=list)
    stopped: bool = False

    @property
    def status(self) -> int:
        """0: a window ran. 1: a window stopped with an error. 2: no window ran."""
        return 1 if self.stopped else 0 if any(row.seconds for row in self.rows[1:]) else 2

    @property
    def title(self) -> str:
        """The model and the task."""
        return f"{self.model}, {self.task}"

    @property
    def points(self) -> list[DialPoint]:
        """The rows that have a size and a time, for a picture."""
        sizes = [(row.name, row.allocated or row.counted, row.seconds) for row in self.rows]
        return [DialPoint(name, size, seconds) for name, size, seconds in sizes if size and seconds]

    def __str__(self) -> str:
        on_gpu = any(row.allocated is not None for row in self.rows)
        head = ["", "GPU memory", "of plain", *["torch's peak"] * on_gpu, "s per batch", "of plain"]
        lines = [head, *(self._cells(row, on_gpu=on_gpu) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * (width - 1) + ":" * (at > 0) + "-" * (at == 0) for at, width in enumerate(widths)])
        table = [
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        ]
        return "\n".join([f"{self.title}. {self.machine}", "", *table, *(["", *self.notes] if self.notes else [])])

    def _cells(self, row: DialRow, *, on_gpu: bool) -> list[str]:
        plain = self.rows[0]
        size = "" if row.counted is None else human_bytes(row.counted)
        share = f"{row.counted / plain.counted:.0%}" if row.counted and plain.counted else ""
        peak = [human_bytes(row.allocated) if row.allocated else ""] * on_gpu
        time = "" if row.seconds is None else f"{row.seconds:.3g}"
        slower = f"{row.seconds / plain.seconds:.2f}" if row.seconds and plain.seconds else ""
        return [row.name, size, share, *peak, time, slower]


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

    Module and data are made anew for each run, from the same seed, as by :func:`~sp_lightning.check`, which compares results.
    Random states are restored.

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
        _Measuring(subject, found, Path(folder)).measure(list(product(k, k_prime)), options)
    return found


class _Measuring:
    """The runs of one dial.

    Args:
        subject: the module, its data and the trainer's settings.
        found: receives rows and sentences.
        folder: the folder for all files.
    """

    def __init__(self, subject: Subject, found: Dial, folder: Path) -> None:
        self._subject, self._found, self._folder = subject, found, folder

    def measure(self, windows: list[tuple[int, int]], options: dict[str, Any]) -> None:
        """Runs plain Lightning and all windows, and fills the rows."""
        settings, given, _ = self._subject.described()
        task = self._found.task
        ways = [RunVariant("plain", on_device=True, only=task)]
        for k, k_prime in windows:
            options = {**given, **options, "k": k, "k_prime": k_prime}
            ways.append(RunVariant(f"k={k}, k'={k_prime}", options, only=task))
        found = [self._run(way, f"{number} of {len(ways)}") for number, way in enumerate(ways, 1)]
        for way, done in zip(ways, found, strict=True):
            counted = _plain_bytes(found, task) if way.options is None else None
            if done is None:
                self._found.rows.append(DialRow(way.name, counted))
                continue
            counted = counted if done.stats is None else done.stats.peak_device_bytes
            self._found.rows.append(DialRow(way.name, counted, done.peak_bytes, median(done.times[1:] or done.times)))
            if done.plan is not None and way.options is not None:
                remarks = cap_remarks(way.options["k"], way.options["k_prime"], done.plan)
                self._found.notes += [each for each in remarks if each not in self._found.notes]
        self._found.machine = self._machine(root_device(settings))

    def _run(self, way: RunVariant, count: str) -> RunResult | None:
        """Runs a variant; None if it does not fit or stops, with a note on the reason.

        Raises:
            NotRunError: nothing can be run, because plain Lightning stopped, except for too little memory.
        """
        print(f"dial: {self._found.title}: run {count}, {way.name}", file=sys.stderr, flush=True)
        gc.collect()  # a trainer and its module refer to each other, and models of several runs may fill the memory
        folder = self._folder / way.name
        try:
            return run(self._subject, way, folder)
        except NotRunError:
            raise
        except Exception as error:
            expected = isinstance(error, torch.OutOfMemoryError) or (way.options is not None and is_refusal(error))
            if not expected and way.options is None:
                raise NotRunError(f"The run {way.name!r} stopped. {type(error).__name__}: {error}") from error
            self._found.stopped |= not expected
            self._found.notes.append(
                f"{way.name}: {error if is_refusal(error) else f'{type(error).__name__}: {error}'}"
            )
            return None
        finally:
            rmtree(folder, ignore_errors=True)

    def _machine(self, device: torch.device) -> str:
        machine = machine_of(device_for(device))
        versions = ", ".join(f"{name} {at}" for name, at in machine["versions"].items())
        what = "weights, gradients and optimizer state" if self._found.task == "training" else "weights"
        return (
            f"{machine['accelerator'] or 'CPU'}; {machine['processor']}, {machine['cores']} cores, torch's threads: "
            f"{machine['threads']}; {versions}; {today()}. GPU memory: {what}, counted"
            f"{', as a GPU would need' if device.type == 'cpu' else ''}; activations do not count. "
            f"Times: median of up to {self._subject.steps - 2} batches after two."
        )


def _plain_bytes(found: Sequence[RunResult | None], task: str) -> int | None:
    """Returns the bytes that plain Lightning has on the GPU: a plan counts weights and gradients. None if they are unknown.

    Args:
        found: the run of plain Lightning, which has the size of the optimizers' state, and those of the windows.
        task: "training" or "prediction".
    """
    plain, *windows = found
    plan = next((done.plan for done in windows if done is not None), None)
    if plan is None or (plain is None and task == "training"):
        return None
    weights, gradients = plan.plain
    return weights + gradients + plain.state_bytes if plain is not None and task == "training" else weights
