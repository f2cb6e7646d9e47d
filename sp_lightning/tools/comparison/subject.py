"""The subject of a check: factories of the module and its data, and settings of the trainer. Each run makes them anew."""

from __future__ import annotations

import copy
import inspect
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import lightning.pytorch as pl
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader

from sp_lightning.tools.comparison.options import STRATEGY_OPTIONS
from sp_lightning.trainer.callback import SuperpipelineCallback
from sp_lightning.trainer.compat import trainer_of
from sp_lightning.trainer.strategy import SuperpipelineStrategy

Factory = str | Callable[[], Any]
"""A callable without arguments, or its name as ``package.module:Name``."""

_SETTINGS = (
    "accelerator", "precision", "plugins", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm",
    "deterministic", "benchmark", "inference_mode", "detect_anomaly", "callbacks", "log_every_n_steps",
)  # fmt: skip
"""Arguments of ``Trainer`` that a check uses. It sets the length, the files and the devices itself."""
_MODULE = "package.module:Factory, which returns a LightningModule"
_DATA = "package.module:Name, which makes a LightningDataModule, or training batches"
# These callbacks write files, log times, or need another strategy. They do not change numbers.
_LEFT_OUT = (
    callbacks.Checkpoint, callbacks.DeviceStatsMonitor, callbacks.ModelSummary, callbacks.ProgressBar,
    callbacks.ThroughputMonitor, callbacks.Timer, SuperpipelineCallback,
)  # fmt: skip


class NotRunError(Exception):
    """Nothing could be compared. The message says why."""


@dataclass(frozen=True)
class RunInputs:
    """The inputs of one run.

    Attributes:
        module: the user's module, unchanged.
        data: arguments of ``Trainer.fit`` for the data.
        settings: further arguments of ``Trainer``.
    """

    module: pl.LightningModule
    data: dict[str, Any]
    settings: dict[str, Any]

    @property
    def to_predict(self) -> dict[str, Any] | None:
        """Arguments of ``Trainer.predict`` for the data, after training; None if nothing is predicted.

        If the module and the data module have no data for predictions, the training data is used. In this case nothing is
        predicted without a ``predict_step``, or if the training data is a collection of loaders.
        """
        datamodule, loaders = self.data.get("datamodule"), self.data.get("train_dataloaders")
        if is_overridden("predict_dataloader", self.module):
            return {}
        if datamodule is not None and is_overridden("predict_dataloader", datamodule):
            return {"datamodule": datamodule}
        if not is_overridden("predict_step", self.module):
            return None
        loaders = (datamodule or self.module).train_dataloader() if loaders is None else loaders
        # Lightning would build a DataLoader anew for predictions, which fails for some classes. It uses an iterator unchanged.
        return None if isinstance(loaders, (dict, list, tuple)) else {"dataloaders": iter(loaders)}


@dataclass(frozen=True)
class Subject:
    """The subject of a check.

    Args:
        factory: makes the LightningModule; None if the config names it.
        data: makes a LightningDataModule, or the training batches (a DataLoader, or any iterable); None for the data of the
            module or the config.
        config: a file of Lightning's CLI.
        steps: the number of trained batches, and the most validated and predicted batches.
        seed: the seed of all random states.
        settings: arguments of ``Trainer``.

    Raises:
        ValueError: there is neither a factory nor a config, a setting is not supported, or a name cannot be imported.
    """

    factory: Factory | None
    data: Factory | None
    config: str | Path | None
    steps: int
    seed: int
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        if self.factory is None and self.config is None:
            raise ValueError("Nothing to check. Expected a factory (package.module:Factory) or config=FILE.")
        if others := [name for name in self.settings if name not in _SETTINGS]:
            raise ValueError(f"trainer= has {', '.join(others)}. A check takes no other than {', '.join(_SETTINGS)}.")
        _resolved(self.factory)
        _resolved(self.data, _DATA)

    def make(self) -> RunInputs:
        """Makes the inputs of one run. The caller sets the seed.

        Raises:
            NotRunError: there is no LightningModule, or no data.
        """
        settings: dict[str, Any] = {}
        if self.config is None:
            module, data = _called(self.factory), _called(self.data, _DATA)
        else:
            made = self._from_config()
            module, data, settings = made.model, made.datamodule, _counting(made.settings)
        if not isinstance(module, pl.LightningModule):
            raise NotRunError(
                f"{self.factory!r} returned a {type(module).__qualname__}; expected a LightningModule of lightning.pytorch."
            )
        if trainer_of(module) is not None:
            raise NotRunError(f"{self.factory!r} returns a module that has been trained. Each run needs a new one.")
        if data is None and not is_overridden("train_dataloader", module):
            raise NotRunError(
                f"{type(module).__qualname__} has no train_dataloader of its own. Give data (--data package.module:Name), which "
                "makes a LightningDataModule, or training batches."
            )
        if isinstance(data, (list, tuple)):
            data = DataLoader(list(data), batch_size=None)  # type: ignore[arg-type]
        name = "datamodule" if isinstance(data, pl.LightningDataModule) else "train_dataloaders"
        if not (data is None or name == "datamodule" or hasattr(data, "__iter__") or hasattr(data, "__getitem__")):
            kind = "LightningModule" if isinstance(data, pl.LightningModule) else type(data).__qualname__
            raise NotRunError(f"--data is a {kind}. Expected a LightningDataModule, a DataLoader or batches.")
        settings |= copy.deepcopy(dict(self.settings))
        settings["callbacks"] = without_files(_callbacks(settings))
        return RunInputs(module, {} if data is None else {name: data}, settings)

    def described(self) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Returns arguments of ``Trainer``, the strategy's options in the config, and the names of unused settings.

        Raises:
            NotRunError: the config cannot be read.
        """
        settings, options, unused = dict(self.settings), dict[str, Any](), list[str]()
        if self.config is not None:
            made = self._from_config()
            settings = _counting(made.settings) | settings
            strategy = made.config["trainer"]["strategy"]
            unused += [name for name in _changed(made.settings, pl.Trainer) if name not in (*_SETTINGS, "strategy")]
            if getattr(strategy, "class_path", "").endswith("SuperpipelineStrategy"):
                options = {name: value for name, value in strategy.init_args.items() if name in STRATEGY_OPTIONS}
                unused += [
                    name for name in _changed(strategy.init_args, SuperpipelineStrategy) if name not in STRATEGY_OPTIONS
                ]
            elif strategy != "auto":
                unused.append("strategy")
            unused += [name for name in ("ckpt_path", "weights_only") if made.config.get(name) is not None]
        unused += [type(each).__name__ for each in _callbacks(settings) if isinstance(each, _LEFT_OUT)]
        return settings, options, unused

    def _from_config(self) -> Any:
        """Returns Lightning's CLI after it has read the config. Raises a NotRunError if the config cannot be read."""
        from sp_lightning.tools.comparison.configured import Configured  # imported on use: it needs jsonargparse

        try:
            return Configured.of(str(self.config), _resolved(self.factory), _resolved(self.data, _DATA), self.seed)
        except Exception as error:
            hint = "If it names no module, give its class beside it"
            if isinstance(error, ModuleNotFoundError):  # jsonargparse
                hint = 'pip install "jsonargparse[signatures]"'
            why = f"{type(error).__name__}: {error}. {hint}"
            raise NotRunError(f"The config {str(self.config)!r} could not be read. {why}.") from error


def without_files(given: Sequence[Any]) -> list[Any]:
    """Returns the callbacks without those of the classes that a check leaves out."""
    return [each for each in given if not isinstance(each, _LEFT_OUT)]


def _callbacks(settings: Mapping[str, Any]) -> list[Any]:
    given = settings.get("callbacks") or []
    return [given] if isinstance(given, callbacks.Callback) else list(given)


def _counting(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of ``Trainer`` that are set and that a check uses."""
    return {name: value for name, value in settings.items() if name in _SETTINGS and value is not None}


def _changed(arguments: Mapping[str, Any], of: Callable[..., Any]) -> list[str]:
    """Returns the names of the arguments that differ from their defaults."""
    defaults = inspect.signature(of).parameters
    return [name for name, value in arguments.items() if name in defaults and value != defaults[name].default]


def _resolved(given: Factory | None, wanted: str = _MODULE) -> Callable[[], Any] | None:
    """Returns a factory, which may be given by its name.

    Raises:
        ValueError: the name cannot be imported, or is a module's. The message has the text ``wanted``.
    """
    if not isinstance(given, str):
        return given
    try:
        found = pkgutil.resolve_name(given)
    except (ImportError, AttributeError, ValueError) as error:
        config = " `plan` takes a config; `check` needs your own module." if given.endswith(".json") else ""
        raise ValueError(f"{given!r}: {error}. Expected {wanted}.{config}") from error
    if isinstance(found, ModuleType):
        raise ValueError(f"{given!r} is a module. Expected {given}:Name, which makes it.")
    return cast(Callable[[], Any], found)


def _called(given: Factory | None, wanted: str = _MODULE) -> Any:
    """Returns the result of a factory; None without a factory.

    Raises:
        NotRunError: the factory raised an error.
    """
    factory = _resolved(given, wanted)
    try:
        return None if factory is None else factory()
    except Exception as error:
        why = f"{type(error).__name__}: {error}. Give a function of your own that calls it"
        raise NotRunError(f"{given!r} fails without arguments. {why}.") from error
