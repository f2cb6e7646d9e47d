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
from typing import Any, Literal, NamedTuple

import torch

from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.plan.units import in_one_unit
from sp_lightning.tools.comparison.check import is_refusal
from sp_lightning.tools.comparison.runs import RunResult, RunVariant, root_device, run, undisturbed
from sp_lightning.tools.comparison.subject import Factory, NotRunError, Subject
from sp_lightning.tools.machine import machine_of, today
from sp_lightning.trainer.plan_text import cap_remarks
from sp_lightning.trainer.plot import DialPoint
from sp_lightning.trainer.strategy import SuperpipelineStrategy

PARTS = ("weights", "gradients", "optimizer state", "activations")
"""The names of the parts of :class:`Memory`, in a table."""


class Memory(NamedTuple):
    """Bytes of GPU memory, by what takes them. Each is at its peak.

    On a GPU, ``activations`` are all of the peak of allocated memory that is not in the other parts.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of the parts, which is the same sum for plain Lightning and the strategy."""
        return sum(self)


@dataclass(frozen=True)
class DialRow:
    """One line of the table.

    Attributes:
        name: "plain", or the window: ``k=1, k'=1``.
        memory: the parts of GPU memory; None if they are unknown.
        seconds: the median time of a batch; None if the run did not end.
    """

    name: str
    memory: Memory | None = None
    seconds: float | None = None

    @property
    def total(self) -> int | None:
        """The bytes of all parts; None if they are unknown."""
        return None if self.memory is None else self.memory.total


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
        sizes = [(row.name, row.total, row.seconds) for row in self.rows]
        return [DialPoint(name, size, seconds) for name, size, seconds in sizes if size and seconds]

    def __str__(self) -> str:
        known = [row.memory for row in self.rows if row.memory is not None]
        unit = in_one_unit(*(memory.total for memory in known), 0)[0].rpartition(" ")[2]
        # Prediction has weights only, so the total says it all.
        shown = [at for at in range(len(PARTS)) if any(memory[at] for memory in known)]
        shown = shown if len(shown) > 1 else []
        head = [unit, *(PARTS[at] for at in shown), "total", "of plain", "s per batch", "of plain"]
        lines = [head, *(self._cells(row, shown) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        lines.insert(1, ["-" * (width - 1) + ":" * (at > 0) + "-" * (at == 0) for at, width in enumerate(widths)])
        table = [
            "| " + " | ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]) + " |"
            for line in lines
        ]
        return "\n".join([f"{self.title}. {self.machine}", "", *table, *(["", *self.notes] if self.notes else [])])

    def _cells(self, row: DialRow, shown: Sequence[int]) -> list[str]:
        """Returns the cells of a row. All sizes of the table are in the unit of the largest one. ``shown``: indices of parts."""
        plain, largest = self.rows[0], max(each.total or 0 for each in self.rows)
        sizes = [""] * (len(shown) + 1)
        if row.memory is not None:
            parts = (*(row.memory[at] for at in shown), row.memory.total)
            sizes = [in_one_unit(largest, part)[1].rpartition(" ")[0] for part in parts]
        share = f"{row.total / plain.total:.0%}" if row.total and plain.total else ""
        time = "" if row.seconds is None else f"{row.seconds:.3g}"
        slower = f"{row.seconds / plain.seconds:.2f}" if row.seconds and plain.seconds else ""
        return [row.name, *sizes, share, time, slower]


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
    Random states are restored. Memory is the sum of weights, gradients, optimizer state and activations.

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
        options: other options of :class:`~sp_lightning.SuperpipelineStrategy`. With ``activations="recompute"``, the table shows
            what k and recomputed activations save together.

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
        counts = task == "training" and root_device(settings).type == "cpu"
        ways = [RunVariant("plain", on_device=True, only=task)]
        for k, k_prime in windows:
            options = {**given, **options, "k": k, "k_prime": k_prime}
            mode = options.get("activations")
            mode = f", {mode}" if isinstance(mode, str) and mode not in ("auto", "keep") else ""
            ways.append(RunVariant(f"k={k}, k'={k_prime}{mode}", options, only=task, counts=counts))
        runs = len(ways) + counts
        found = [self._run(way, f"{number} of {runs}") for number, way in enumerate(ways, 1)]
        activations = self._count(f"{runs} of {runs}") if counts and found[0] is not None else 0
        plain = _plain_memory(found, task, activations)
        for way, done in zip(ways, found, strict=True):
            memory = plain if way.options is None else None if done is None else _memory(done)
            if memory is not None and done is not None and done.plan is not None and done.plan.nothing and counts:
                memory = memory._replace(
                    activations=activations or 0
                )  # the strategy counts only if it streams something
            if memory is not None and activations is None:
                memory = memory._replace(activations=0)  # the same sum for all rows
            seconds = None if done is None else median(done.times[1:] or done.times)
            self._found.rows.append(DialRow(way.name, memory, seconds))
            if done is not None and done.plan is not None and way.options is not None:
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

    def _count(self, count: str) -> int | None:
        """Trains once more with plain Lightning, and counts the bytes of activations. None, with a note, if that stops."""
        print(f"dial: {self._found.title}: run {count}, plain, to count its activations", file=sys.stderr, flush=True)
        gc.collect()
        way = RunVariant("plain, counted", on_device=True, only="training", counts=True)
        try:
            return run(self._subject, way, self._folder / way.name).activation_bytes
        except Exception as error:
            self._found.notes.append(
                f"No row has activations: plain Lightning does not train while they are counted. {type(error).__name__}: {error}"
            )
            return None
        finally:
            rmtree(self._folder / way.name, ignore_errors=True)

    def _machine(self, device: torch.device) -> str:
        machine = machine_of(device_for(device))
        versions = ", ".join(f"{name} {at}" for name, at in machine["versions"].items())
        return (
            f"{machine['accelerator'] or 'CPU'}; {machine['processor']}, {machine['cores']} cores, torch's threads: "
            f"{machine['threads']}; {versions}; {today()}. GPU memory: {_meaning(device, self._found.task)}. "
            f"Times: median of up to {self._subject.steps - 2} batches after two."
        )


def _meaning(device: torch.device, task: str) -> str:
    """Returns what the sizes of a table are, for its heading."""
    if device.type != "cpu":
        return (
            "total: torch's peak of allocated memory; activations: all of it that is not in the other parts, with the temporary "
            "memory of operators"
        )
    if task == "prediction":
        return "weights, counted as a GPU would need; the temporary memory of operators is not in it"
    return (
        "counted, as a GPU would need, each part at its peak; activations: tensors that autograd holds. Not in it: temporary "
        "memory of operators, and tensors that the model's own gradient checkpointing computes again"
    )


def _memory(done: RunResult) -> Memory:
    """Returns the memory of a run of the strategy."""
    assert done.stats is not None
    stats = done.stats
    counted = stats.peak_weight_bytes, stats.peak_gradient_bytes, stats.peak_optimizer_bytes + done.state_bytes
    return with_activations(counted, done.peak_bytes, done.activation_bytes)


def _plain_memory(found: Sequence[RunResult | None], task: str, activations: int | None) -> Memory | None:
    """Returns the memory of plain Lightning on the GPU: a plan counts weights and gradients. None if it is unknown.

    Args:
        found: the run of plain Lightning, which has the size of the optimizers' state, and those of the windows.
        task: "training" or "prediction".
        activations: their bytes, if they were counted; not used on a GPU.
    """
    plain, *windows = found
    plan = next((done.plan for done in windows if done is not None), None)
    if plan is None or (plain is None and task == "training"):
        return None
    weights, gradients = plan.plain
    if plain is None:
        return Memory(weights, 0, 0, 0)
    counted = (weights, gradients, plain.state_bytes) if task == "training" else (weights, 0, 0)
    return with_activations(counted, plain.peak_bytes, activations or 0)


def with_activations(counted: tuple[int, int, int], allocated: int | None, activations: int) -> Memory:
    """Adds activations to the other parts: the counted ones, or the rest of the allocated bytes if the device measures them."""
    return Memory(*counted, activations if allocated is None else max(allocated - sum(counted), 0))
