"""What is checked: a factory of a module, its data, and what the trainer is to be like. All of it is made anew for each run."""

from __future__ import annotations

import copy
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from sp_lightning.trainer.callback import SuperpipelineCallback

Factory = str | Callable[[], Any]
"""What makes something when it is called: a callable, or its name as ``package.module:Name``."""
OPTIONS = (
    "k", "k_prime", "memory_budget", "activations", "layers", "resident", "pin_memory", "fused_optimizer",
    "optimizer_overlap", "weights", "disk", "host_memory",
)  # fmt: skip
"""The options of the strategy that a config or a command gives to a check; the others are for several devices, or its own."""

# What counts of a config's trainer: the rest is its length, its files and its devices.
_SETTINGS = {
    "accelerator", "precision", "plugins", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "deterministic", "benchmark", "inference_mode", "detect_anomaly", "callbacks",
}  # fmt: skip
# These write files, or need a logger, or another strategy. They change no number.
_LEFT_OUT = (
    callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.LearningRateMonitor, callbacks.ModelSummary,
    callbacks.ProgressBar, SuperpipelineCallback,
)  # fmt: skip


class NotRunError(Exception):
    """Nothing could be compared. The message says why."""


@dataclass(frozen=True)
class Made:
    """What one run needs.

    Attributes:
        module: the user's, unchanged.
        data: arguments of ``Trainer.fit`` for the data.
        settings: further arguments of ``Trainer``.
    """

    module: pl.LightningModule
    data: dict[str, Any]
    settings: dict[str, Any]

    @property
    def to_predict(self) -> dict[str, Any] | None:
        """Arguments of ``Trainer.predict`` for the data, once the module was trained; None if nothing predicts.

        Where there is no data for it, it is that of training.
        """
        datamodule, loaders = self.data.get("datamodule"), self.data.get("train_dataloaders")
        if is_overridden("predict_dataloader", self.module):
            return {}
        if datamodule is not None and is_overridden("predict_dataloader", datamodule):
            return {"datamodule": datamodule}
        if not is_overridden("predict_step", self.module):
            return None
        loaders = (datamodule or self.module).train_dataloader() if loaders is None else loaders
        # For predictions Lightning makes a DataLoader anew, which not all can be. It takes the batches of one as they are.
        return None if isinstance(loaders, (dict, list, tuple)) else {"dataloaders": iter(loaders)}


@dataclass(frozen=True)
class Subject:
    """What is checked.

    Args:
        factory: makes the LightningModule; None if the config names it.
        data: makes a LightningDataModule, or the training batches (a DataLoader, or any iterable); None for what the module or
            the config has.
        config: a file of Lightning's CLI.
        steps: how many batches are trained, and at most validated and predicted.
        seed: what all randomness begins with.
        settings: arguments of ``Trainer``.

    Raises:
        ValueError: there is no module, or a name leads nowhere.
    """

    factory: Factory | None
    data: Factory | None
    config: str | Path | None
    steps: int
    seed: int
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.factory is None and self.config is None:
            raise ValueError("There is nothing to check. Name a factory (package.module:Factory), or give config=.")
        for given in (self.factory, self.data):
            _resolved(given)

    def make(self) -> Made:
        """Makes everything for one run. The caller has seeded.

        Raises:
            NotRunError: there is no LightningModule, or no data.
        """
        settings: dict[str, Any] = {}
        if self.config is None:
            module, data = _called(self.factory), _called(self.data)
        else:
            module, data, settings, _ = self._from_config()
        if not isinstance(module, pl.LightningModule):
            raise NotRunError(
                f"{self.factory!r} made a {type(module).__qualname__}, and no LightningModule of lightning.pytorch. Give a "
                "factory of one."
            )
        if data is None and not is_overridden("train_dataloader", module):
            raise NotRunError(
                f"{type(module).__qualname__} has no train_dataloader of its own. Give data (--data package.module:Name), which "
                "makes a LightningDataModule, or training batches."
            )
        if isinstance(data, (list, tuple)):
            data = DataLoader(list(data), batch_size=None)  # type: ignore[arg-type]
        name = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
        return Made(module, {} if data is None else {name: data}, settings | copy.deepcopy(dict(self.settings)))

    def described(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Arguments of ``Trainer``, and what the config gives of the strategy's options, if it names this strategy.

        Raises:
            NotRunError: the config cannot be read.
        """
        if self.config is None:
            return dict(self.settings), {}
        _, _, settings, strategy = self._from_config()
        ours = getattr(strategy, "class_path", "").endswith("SuperpipelineStrategy")
        given = dict(strategy.init_args) if ours else {}
        return settings | dict(self.settings), {name: given[name] for name in OPTIONS if name in given}

    def _from_config(self) -> tuple[Any, Any, dict[str, Any], Any]:
        """Module, data, the trainer's settings as far as they count here, and what the config says of the strategy."""
        from sp_lightning.comparison.configured import Configured  # which needs jsonargparse

        try:
            made = Configured.of(str(self.config), _resolved(self.factory), _resolved(self.data), self.seed)
        except (ModuleNotFoundError, SystemExit) as error:
            missing = f'{error}. Install it: pip install "sp_lightning[cli]"'
            why = missing if isinstance(error, ModuleNotFoundError) else "Lightning's CLI has said why"
            raise NotRunError(f"The config {str(self.config)!r} could not be read: {why}.") from error
        settings = {name: value for name, value in made.settings.items() if name in _SETTINGS}
        given = settings.get("callbacks") or []
        given = [given] if isinstance(given, callbacks.Callback) else given
        settings["callbacks"] = [each for each in given if not isinstance(each, _LEFT_OUT)]
        return made.model, made.datamodule, settings, made.config["trainer"]["strategy"]


def resolve(name: str, wanted: str) -> Any:
    """What a name like ``package.module:Name`` leads to.

    Raises:
        ValueError: it leads nowhere. The message says what is ``wanted``.
    """
    try:
        return pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{name!r}: {error}. Give {wanted}.") from error


def _resolved(given: Factory | None) -> Callable[[], Any] | None:
    return resolve(given, "package.module:Factory") if isinstance(given, str) else given


def _called(given: Factory | None) -> Any:
    """What a factory makes.

    Raises:
        NotRunError: it fails.
    """
    factory = _resolved(given)
    try:
        return None if factory is None else factory()
    except Exception as error:
        raise NotRunError(f"{given!r} could not be made without arguments: {type(error).__name__}: {error}") from error
