"""Ways to train the same thing: on plain Lightning and with a strategy of ours; and the comparison of all that is left.

For tests that are no rows of ``tests/equality``: they run several trainers, or look at files, events or counts.
:func:`tests.support.runs.fit` trains once, and notes losses and gradients. Here are trainings without callbacks of the tests',
which is the path that users take, with copies kept and the next batch's layers fetched early (:func:`bare`); and functions that
run with several trainers (:func:`compare`).
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Net
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated

MIXED: dict[str, Any] = {"precision": "bf16-mixed"}
WINDOWS: Sequence[Mapping[str, Any]] = ({"k": 1, "k_prime": 1}, {"k": 2, "k_prime": 2}, {"k": 99, "k_prime": 1})


# ---------------------------------------------------------------------- without callbacks


def bare(make: Callable[[], pl.LightningModule], strategy: Any, batches: Any = None, **options: Any) -> list[Any]:
    """Train without callbacks; what is left, and what the module noted in ``seen``."""
    found = fit(make, vectors() if batches is None else batches, strategy, recorded="nothing", **options)
    return [dict(found.module.state_dict()), found.optimizers, getattr(found.module, "seen", None)]


def start(strategy: Any, module: pl.LightningModule | None = None, **options: Any) -> None:
    """The beginning of a run, for what is refused there."""
    trainer_for(strategy, **options).fit(module or Module(Stack()), loader(vectors()))


def assert_like_plain(
    make: Callable[[], pl.LightningModule],
    batches: Any = None,
    *,
    windows: Sequence[Mapping[str, Any]] = WINDOWS,
    around: Sequence[Callable[[], Any]] = (nullcontext,),
    **options: Any,
) -> None:
    plain = bare(make, "auto", batches, **options)
    for context in around:
        for window in windows:
            with context():
                ours = bare(make, superpipeline(**window), batches, **options)
            assert_equal(ours, plain, f"{context.__name__}, {window}")


def mixed(make: Any, strategy: Any, **options: Any) -> list[Any]:
    """The same in mixed precision."""
    return bare(make, strategy, vectors(4), **{**MIXED, **options})


def assert_mixed_like_plain(make: Any, **options: Any) -> None:
    contexts, windows = (nullcontext, poisoned, simulated), ({"k": 1}, {"k": 99})
    assert_like_plain(make, vectors(4), windows=windows, around=contexts, **{**MIXED, **options})


def scaled(kind: type[torch.amp.GradScaler] = torch.amp.GradScaler, init_scale: float = 2.0**8) -> dict[str, Any]:
    """Options of a trainer that trains in 16-mixed on the CPU, where Lightning would take bf16-mixed by itself."""
    scaler = kind("cpu", init_scale=init_scale, growth_interval=2, backoff_factor=2.0**-14)
    return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


# ---------------------------------------------------------------------- with updates in the background

OVERLAP = ("forward", "backward")


def overlapping(mode: Any, **options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "optimizer_overlap": mode, **options})


# ---------------------------------------------------------------------- functions that run with several trainers

Seen = dict[str, Any]
Overlaps = Sequence[str]
EVERY = ("off", "forward", "backward")
LATE = ("off", "forward")
"""Where code of users looks at gradients, which are gone where updates run under backward."""


class RunVariant:
    """One way to run: plain Lightning, or a strategy of ours for each trainer."""

    def __init__(self, folder: Path, overlap: str | None, **options: Any) -> None:
        self.overlap = overlap
        self.folder = folder / (overlap or "plain")
        self.folder.mkdir(parents=True)
        self.strategies: list[Any] = []
        self._options = options

    def strategy(self) -> Any:
        if self.overlap is None:
            return "auto"
        self.strategies.append(superpipeline(k=2, k_prime=1, optimizer_overlap=self.overlap, **self._options))
        return self.strategies[-1]

    def trainer(self, **options: Any) -> pl.Trainer:
        """Seeded, with a logger that keeps what it gets."""
        pl.seed_everything(7, verbose=False)
        options = {"logger": Notes(), "log_every_n_steps": 1, "default_root_dir": self.folder, **options}
        return trainer_for(self.strategy(), **options)

    def fit(
        self,
        make: Callable[[], pl.LightningModule] | None = None,
        batches: int | Sequence[Any] = 6,
        val: int | Sequence[Any] = 2,
        ckpt_path: Any = None,
        **options: Any,
    ) -> Seen:
        """Train a module; everything that is left."""
        trainer = self.trainer(**options)
        module = (make or Net)()
        before = copy.deepcopy(module.state_dict())
        training, validation = (vectors(each) if isinstance(each, int) else each for each in (batches, val))
        trainer.fit(module, loader(training), loader(validation), ckpt_path=ckpt_path)
        after = module.state_dict()
        assert any(not torch.equal(before[name], after[name]) for name in before if name in after), "nothing trained"
        return left(trainer)


def compare(run: Callable[[RunVariant], Seen], folder: Path, overlaps: Overlaps = EVERY, **options: Any) -> Seen:
    """Run under plain Lightning and in each of our ways; returns what plain left."""
    way = RunVariant(folder, None)
    plain = scrubbed(run(way), way.folder)
    assert plain, "there is nothing to compare"
    for overlap in overlaps:
        way = RunVariant(folder, overlap, **options)
        ours = scrubbed(run(way), way.folder)
        assert way.strategies
        for strategy in way.strategies:
            assert strategy.stats().fetched_layers, "nothing was streamed"
        assert_equal(ours, plain, overlap)
    return plain


def scrubbed(value: Any, folder: Path) -> Any:
    """Without the folder in paths, and in types that ``==`` compares."""
    if isinstance(value, dict):
        return {scrubbed(key, folder): scrubbed(each, folder) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [scrubbed(each, folder) for each in value]
    if isinstance(value, (str, Path)):
        return str(value).replace(str(folder), "…")
    return value.tolist() if isinstance(value, np.ndarray) else value


def left(trainer: pl.Trainer, *more: pl.LightningModule) -> Seen:
    """Everything that a run leaves behind."""
    module = trainer.lightning_module
    notes = [logger for logger in trainer.loggers if isinstance(logger, Notes)]
    return {
        "state": {key: copy.deepcopy(value) for key, value in module.state_dict().items()},
        "more": [copy.deepcopy(dict(each.state_dict())) for each in more],
        "optimizers": [copy.deepcopy(each.state_dict()) for each in trainer.optimizers],
        "schedulers": [copy.deepcopy(each.scheduler.state_dict()) for each in trainer.lr_scheduler_configs],
        "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
        "logged": [(each.lines, each.hparams) for each in notes],
        "loops": [copy.deepcopy(each.state_dict()) for each in (trainer.fit_loop, trainer.validate_loop)],
        "progress": [trainer.global_step, trainer.current_epoch, trainer.should_stop, str(trainer.state.status)],
        "frozen": {name: not p.requires_grad for name, p in module.named_parameters()},
        "modes": {name: each.training for name, each in module.named_modules()},
        "device": [str(module.device), str(module.dtype)],
        "random state": [torch.get_rng_state(), random.getstate(), np.random.get_state()],
    }


def files(folder: Path) -> Seen:
    """The checkpoints in a folder, and where links lead."""
    return {
        str(path.relative_to(folder)): str(path.readlink())
        if path.is_symlink()
        else torch.load(path, weights_only=False, map_location="cpu")
        for path in sorted(folder.rglob("*.ckpt"))
    }


class Notes(Logger):
    """Keeps what it gets, but for what the partner callback adds."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[int | None, dict[str, Any]]] = []
        self.hparams: list[Any] = []

    name = "notes"
    version = 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.lines.append((step, dict(metrics)))

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams.append(copy.deepcopy(dict(params)))
