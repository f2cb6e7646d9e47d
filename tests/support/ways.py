"""Ways to run the same thing: plain Lightning and a strategy of ours; and the comparison of all that is left."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
from lightning.pytorch.loggers.logger import Logger
from torch import nn

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for

Seen = dict[str, Any]
Overlaps = Sequence[str]
EVERY = ("off", "forward", "backward")
LATE = ("off", "forward")
"""Where code of users looks at gradients, which are gone where updates run under backward."""


# ---------------------------------------------------------------------- what is compared


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


class Net(Module):
    """Logs in all ways; its optimizer is fused, so that updates may run in the background."""

    def __init__(self, net: nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__(Stack(4) if net is None else net)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)
