"""One run of a comparison: makes new objects, trains, validates and predicts, and records the results."""

from __future__ import annotations

import logging
import os
import random
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, Literal

import lightning.pytorch as pl
import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan
from sp_lightning.tools.comparison.activations import CountingStrategy, HeldActivations
from sp_lightning.tools.comparison.record import Entry, Record, flatten, held
from sp_lightning.tools.comparison.reference import StepsOnHost, add_checkpoints
from sp_lightning.tools.comparison.subject import NotRunError, RunInputs, Subject, without_files
from sp_lightning.trainer.strategy import SuperpipelineStrategy
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS


@dataclass(frozen=True)
class RunVariant:
    """The settings of a run.

    Attributes:
        name: the name of the run.
        options: the options of the strategy; None for plain Lightning.
        fuse: True if plain Lightning's optimizers that step on the host run fused, if their ``fused`` is not set.
        on_device: True if all optimizers of plain Lightning step on the device, as the strategy's do (``optimizer_on="gpu"``).
        stay: the options with which the strategy chooses layers that stay on the device; empty if none stays.
        begins: a checkpoint from which one batch is trained; None for a whole run.
        only: the run only trains or only predicts, and records the outputs of steps alone; None for everything.
        counts: True to count activations on a CPU. Of plain Lightning this takes saved-tensor hooks, with which some programs do
            not run. Counting takes time.
        checkpoints: the names of modules around whose forward plain Lightning has torch's checkpoint.
    """

    name: str
    options: dict[str, Any] | None = None
    fuse: bool = False
    on_device: bool = False
    stay: Mapping[str, Any] = field(default_factory=dict)
    begins: Path | None = None
    only: Literal["training", "prediction"] | None = None
    counts: bool = False
    checkpoints: tuple[str, ...] = ()


@dataclass(frozen=True)
class RunResult:
    """The results of a run.

    Attributes:
        way: the settings of the run.
        record: the values that are compared.
        checkpoint: the checkpoint after training.
        times: the seconds of each training batch, without the first; of each predicted batch if the run only predicts.
        peak_bytes: the peak of allocated device memory in these batches; None if the device does not measure it.
        state_bytes: bytes of the optimizers' state after training: of plain Lightning, or of the strategy's layers that stay on
            the device.
        activation_bytes: the peak of bytes that autograd holds, if the run counts them; else 0.
        plan: the plan of the strategy; None for plain Lightning.
        stats: the stats of the strategy after training; None for plain Lightning.
        moved: True if plain Lightning's optimizers stepped on the host while the module was on the device.
        recomputed: the names of the layers whose activations the strategy has recomputed.
        trained: True if a training step of plain Lightning has returned a loss, or if an optimizer has stepped with a gradient.
    """

    way: RunVariant
    record: Record
    checkpoint: Path
    times: list[float]
    peak_bytes: int | None
    state_bytes: int
    activation_bytes: int
    plan: Plan | None = None
    stats: Stats | None = None
    moved: bool = False
    trained: bool = False
    recomputed: tuple[str, ...] = ()

    @property
    def seconds(self) -> float:
        """The median of :attr:`times`."""
        return median(self.times)


class Recorder(Callback):
    """Records the outputs of steps, logged values, the peak of device memory, and when batches end. It does not write weights.

    Args:
        record: receives the values.
        held: the count of plain Lightning's activations, which is told when a batch begins.
    """

    def __init__(self, record: Record, held: HeldActivations | None = None) -> None:
        self.record = record
        self._held = held
        self.ends: list[float] = []
        self.peak: int | None = None
        self._phases: Counter[str] = Counter()

    def _keep(self, trainer: pl.Trainer, phase: str, kind: str, outputs: Any) -> None:
        moment = f"{phase} batch {self._phases[phase]}"
        self._phases[phase] += 1
        # A step that returns an empty structure has run: it has a row. A training step that returns nothing trains nothing.
        self.record.add(kind, moment, outputs if kind == "losses" or [*flatten(outputs)] else None)
        self.record.add("logged values", moment, trainer.callback_metrics)

    def setup(self, trainer: Any, pl_module: pl.LightningModule, stage: str) -> None:
        trainer.callbacks = without_files(trainer.callbacks)  # the module may have its own callbacks

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._device = device_for(trainer.strategy.root_device)
        self._device.reset_peak()

    on_predict_start = on_fit_start

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if self._held is not None:
            self._held.begin((*pl_module.parameters(), *pl_module.buffers()))

    def _ended(self, trainer: Any, phase: str, kind: str, outputs: Any) -> None:
        peak = self._device.peak_bytes()  # read in each batch, because the choice of a window resets the peak
        self.peak = peak if self.peak is None or peak is None else max(peak, self.peak)
        self._keep(trainer, phase, kind, outputs)
        self.ends.append(perf_counter())

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._ended(trainer, "training", "losses", outputs)

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._keep(trainer, "validation", "validation", outputs)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.record.add("logged values", "after training", trainer.callback_metrics)

    def on_predict_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, *_: Any) -> None:
        self._ended(trainer, "prediction", "predictions", outputs)


WRITE_NO_WEIGHTS.add(Recorder)  # so the engine works as without this callback; subclasses are not included


class NoLogger(DummyLogger):
    """A logger that logs nothing. User code may call any method of it and of its experiment, and write to its folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._experiment = _Anything()  # type: ignore[assignment]
        self._folder = folder

    @property
    def save_dir(self) -> str:
        return str(self._folder)

    log_dir = save_dir


class _Anything:
    """Takes any call and any item. Each attribute and each result is this object."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self

    __getitem__ = __setitem__ = __call__

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)  # Python asks for these
        return self


STOPPED = "Prediction stopped."
"""The beginning of the text that replaces predictions in a record, if an error ended the prediction."""


def run(subject: Subject, way: RunVariant, folder: Path) -> RunResult:
    """Makes all objects from the same seed, and trains, validates and predicts. Changes random states of the process.

    Args:
        subject: the checked module and its data.
        way: the settings of the run.
        folder: a new folder for the files of this run. It is created.

    Raises:
        NotRunError: no batch was trained, or predicted if the run only predicts.
        Exception: any error of user code or the strategy, except in predictions: those errors are recorded.
    """
    folder.mkdir()
    record = Record(folder / "record")
    pl.seed_everything(subject.seed, workers=True, verbose=False)
    made = subject.make()
    add_checkpoints(made.module, way.checkpoints)
    held = HeldActivations() if way.counts and way.options is None else None
    recorder = Recorder(record, held)
    trainer = _trainer(made, way, folder, subject.steps, recorder)
    start = perf_counter()
    with _gradients_seen() if way.options is None else nullcontext(list[bool]()) as seen:
        if way.only == "prediction":
            data = made.to_predict
            if data is None:
                raise NotRunError(f"{type(made.module).__qualname__} has no predict_step, or no data for it.")
            trainer.predict(made.module, return_predictions=False, **data)
        else:
            with nullcontext() if held is None else held.hooks():
                trainer.fit(made.module, **made.data, ckpt_path=way.begins, weights_only=False)
    if not recorder.ends:
        does = "predicted" if way.only == "prediction" else "trained"
        raise NotRunError(f"The run {way.name!r} has {does} no batch: the data has none, or each was skipped.")
    ends, peak = [*recorder.ends], recorder.peak
    strategy: Any = trainer.strategy
    plan, stats = (None, None) if way.options is None else (strategy.plan, strategy.stats())
    stay = None if plan is None else tuple(f"{name}." for name, _, _ in plan.stay)
    on_device = {each for name, each in made.module.named_parameters() if stay is None or name.startswith(stay)}
    states = [values for each in trainer.optimizers for p, values in each.state.items() if p in on_device]
    state_bytes = sum(value.nbytes for _, value in flatten(states) if isinstance(value, Tensor))
    trained = any(seen) or any(entry.kind == "losses" for entry in record.entries)
    checkpoint = folder / "checkpoint.ckpt"
    if way.only is None:
        _keep_state(record, trainer, made.module, checkpoint)
    data = None if way.begins or way.only else made.to_predict
    if data is not None:
        try:
            trainer.predict(made.module, **data)
        except Exception as error:  # recorded, because the same error in both runs counts as equal
            record.add("predictions", "prediction", f"{STOPPED} {type(error).__name__}: {error}")
    times = [after - before for before, after in pairwise(ends if len(ends) > 1 else [start, *ends])]
    moved = getattr(trainer.strategy, "moved", False)
    counted = strategy.held if isinstance(strategy, CountingStrategy) else held
    activations = 0 if counted is None else counted.peak
    modes = {} if way.options is None else strategy.activations
    recomputed = tuple(name for name, mode in modes.items() if mode == "recompute")
    return RunResult(
        way, record, checkpoint, times, peak, state_bytes, activations, plan, stats, moved, trained, recomputed
    )


@contextmanager
def _gradients_seen() -> Iterator[list[bool]]:
    """Lists, for each step of an optimizer, whether a parameter has a gradient."""
    seen: list[bool] = []

    def stepped(optimizer: Optimizer, *_: Any) -> None:
        seen.append(any(each.grad is not None for group in optimizer.param_groups for each in group["params"]))

    handle = register_optimizer_step_post_hook(stepped)
    try:
        yield seen
    finally:
        handle.remove()


def _trainer(made: RunInputs, way: RunVariant, folder: Path, steps: int, recorder: Recorder) -> pl.Trainer:
    settings = {
        "limit_train_batches": 1 if way.begins else steps,
        "limit_val_batches": 0 if way.only else steps,
        "limit_predict_batches": steps,
        "max_epochs": 2 if way.begins else 1,
        "logger": NoLogger(folder),
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        "devices": 1,
        "callbacks": [*made.settings["callbacks"], recorder],
    }
    return pl.Trainer(strategy=_strategy(made, way), **{"log_every_n_steps": 1, **made.settings, **settings})


def _strategy(made: RunInputs, way: RunVariant) -> Any:
    if way.options is not None:
        return (CountingStrategy if way.counts else SuperpipelineStrategy)(**way.options)
    device = root_device(made.settings)
    plainly = way.on_device or (device.type == "cpu" and not way.fuse)
    return "auto" if plainly else StepsOnHost(device, fuse=way.fuse, stay=partial(_staying, way.stay))


def _staying(options: Mapping[str, Any], module: nn.Module) -> Iterable[nn.Parameter]:
    """Returns the parameters of the layers that ``gpu_layers=`` chooses."""
    if not options:
        return ()
    given = SuperpipelineStrategy(**options)._options
    found = find_layers(module, layers=given.layers, keep_on_gpu=given.keep_on_gpu, gpu_layers=given.gpu_layers)
    return [parameter for layer in found.stay for _, parameter in layer.parameters]


def root_device(settings: Mapping[str, Any]) -> torch.device:
    """Returns the device of a trainer with these settings."""
    chosen = {"accelerator": settings.get("accelerator", "auto"), "devices": 1, "logger": False}
    return pl.Trainer(enable_checkpointing=False, enable_progress_bar=False, **chosen).strategy.root_device


def _keep_state(record: Record, trainer: pl.Trainer, module: pl.LightningModule, checkpoint: Path) -> None:
    moment = "after training"
    record.add("weights", moment, dict(module.named_parameters()))
    record.add("buffers", moment, dict(module.named_buffers()))
    record.add("attributes", moment, held(module))
    record.add("random state", moment, _random_state(trainer.strategy.root_device))
    trainer.save_checkpoint(checkpoint)
    for kind, key in (
        ("optimizer state", "optimizer_states"),
        ("scheduler state", "lr_schedulers"),
        ("checkpoints", None),
    ):
        if trainer.lr_scheduler_configs or kind != "scheduler state":
            record.entries.append(Entry(kind, moment, checkpoint, key))


# ---------------------------------------------------------------------- the environment of a run


def _random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": torch.tensor(random.getstate()[1], device="cpu")}
    state["numpy"] = np.random.get_state()
    if device.type != "cpu":
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


@contextmanager
def undisturbed(settings: Mapping[str, Any]) -> Iterator[None]:
    """Hides messages, and restores random states, environment variables and torch's choice of kernels at the end.

    Args:
        settings: arguments of ``Trainer``, which determine the device.
    """
    python = random.getstate()
    numpy = np.random.get_state()
    variables = dict(os.environ)
    disabled = logging.root.manager.disable
    benchmark = torch.backends.cudnn.benchmark
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    try:
        logging.disable(logging.INFO)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # each run would repeat the warnings
            device = root_device(settings)
            others, kind = ([], "cuda") if device.type == "cpu" else ([device], device.type)
            with torch.random.fork_rng(others, device_type=kind):
                yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        logging.disable(disabled)
        torch.use_deterministic_algorithms(deterministic[0], warn_only=deterministic[1])
        torch.backends.cudnn.benchmark = benchmark
        for name in set(os.environ) - set(variables):
            del os.environ[name]
        os.environ.update(variables)
