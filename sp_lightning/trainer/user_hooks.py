"""Which user code runs at a certain point and could write weights: where none does, copies stay valid.

A write through ``.data`` bumps no version, so a copy on the device is trusted only where no hook of the module, its
data module or any callback runs that is not known to leave weights alone. Likewise updates run in the background by
themselves only where no hook would have to wait for them.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    Callback,
    DeviceStatsMonitor,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelSummary,
    ProgressBar,
    RichModelSummary,
    RichProgressBar,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.utilities.model_helpers import is_overridden

from sp_lightning.device.torch_private import step_pre_hooks
from sp_lightning.trainer.compat import base_of, is_exactly

# Callbacks that were read and write no weights, in any of their hooks. Subclasses may, and do not count.
WRITE_NO_WEIGHTS: set[type[Callback]] = {
    DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar,
    RichModelSummary, RichProgressBar, Timer, TQDMProgressBar,
}  # fmt: skip

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = ("train_dataloader", "val_dataloader")
_HOOKS = {
    # between the end of a batch, as the callbacks hear of it, and the next step
    "train": (
        "on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start",
        "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
        "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad",
        "on_validation_batch_start", "on_validation_batch_end", "lr_scheduler_step", *_TRANSFER,
    ),
    # between forward and backward
    "backward": ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward"),
    # between two batches
    "validate": ("on_validation_batch_start", "on_validation_batch_end", *_TRANSFER),
    "test": ("on_test_batch_start", "on_test_batch_end", *_TRANSFER),
    "predict": ("on_predict_batch_start", "on_predict_batch_end", *_TRANSFER),
    # from backward to the optimizer's step: gradients are there, and could be written
    "gradients": ("backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    # around the optimizer's step, and before backward
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
}  # fmt: skip


def is_quiet(trainer: Any, phase: str) -> bool:
    """Whether no hook between two steps of a phase (``backward``: between forward and backward) can write weights."""
    return not hooks_of_users(trainer, phase)


def is_known(optimizer: Any) -> bool:
    """Whether an optimizer's step calls the closure before it writes weights: torch's does, without hooks before it."""
    hooks = step_pre_hooks(optimizer)
    step = getattr(type(optimizer), "step", None)
    if hooks is None or not getattr(step, "__module__", "").startswith("torch.optim."):
        return False
    return all(getattr(hook, "__module__", "").startswith("sp_lightning.") for hook in hooks)


def hooks_of_users(trainer: Any, phase: str) -> list[str]:
    """The hooks that run at a certain point, by name: ``EMA.on_train_batch_end``."""
    owners: list[tuple[object, type]] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule))
    owners += [(each, Callback) for each in trainer.callbacks if not is_exactly(each, WRITE_NO_WEIGHTS)]
    bases: list[tuple[object, type]] = [(owner, base_of(owner, kind)) for owner, kind in owners]
    hooks = (*_HOOKS[phase], *(_LOADERS if phase == "train" and trainer.reload_dataloaders_every_n_epochs else ()))
    found = [
        f"{type(owner).__name__}.{hook}"
        for owner, base in bases
        for hook in hooks
        if hasattr(base, hook) and is_overridden(hook, owner, parent=base)
    ]
    return found + (_late_schedulers(trainer) if phase == "train" else [])


def _late_schedulers(trainer: Any) -> list[str]:
    """Plateau schedulers of users; the other schedulers step before ``on_train_batch_end``."""
    late = [config.scheduler for config in trainer.strategy.lr_scheduler_configs if config.reduce_on_plateau]
    return [f"{type(each).__name__}.step" for each in late if not type(each).step.__module__.startswith("torch.")]
