"""Finds the hooks of user code that could read or write weights and gradients, by the point at which they run.

A write through ``.data`` changes no version counter. So a copy on the device is trusted without more ado only if no hook runs
that may write weights: hooks of the module, of its data module, and of callbacks that are not in :data:`WRITE_NO_WEIGHTS`.
Otherwise the engine looks for the layers that hooks touch (loops without training), or distrusts all copies.
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

from sp_lightning.core.torch_compat.patched import attributes_of, is_patched
from sp_lightning.core.torch_compat.private import step_pre_hooks
from sp_lightning.trainer.compat import base_of, is_exactly

# Callbacks whose hooks write no weights, as their code shows. A subclass of them may write weights, so its hooks count.
WRITE_NO_WEIGHTS: set[type[Callback]] = {
    DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar,
    RichModelSummary, RichProgressBar, Timer, TQDMProgressBar,
}  # fmt: skip

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = ("train_dataloader", "val_dataloader")
_HOOKS = {
    # Between the end of a training batch (on_train_batch_end is included) and the next training step.
    "train": (
        "on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start",
        "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
        "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad",
        "on_validation_batch_start", "on_validation_batch_end", "lr_scheduler_step", *_TRANSFER,
    ),
    # Between forward and backward.
    "backward": ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward"),
    # The hooks of "backward" that run before the last step's gradients are reset.
    "zero_grad": ("on_before_zero_grad", "optimizer_zero_grad"),
    # Between two batches.
    "validate": ("on_validation_batch_start", "on_validation_batch_end", *_TRANSFER),
    "test": ("on_test_batch_start", "on_test_batch_end", *_TRANSFER),
    "predict": ("on_predict_batch_start", "on_predict_batch_end", *_TRANSFER),
    # From backward to the optimizer's step, when gradients could be written.
    "gradients": ("backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    # Around the optimizer's step. It may wrap the closure.
    "step": ("optimizer_step",),
    # Around the optimizer's step, and before backward.
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
    # After the last step of training.
    "end": ("on_train_end", "on_fit_end", "on_exception", "teardown"),
}  # fmt: skip


_BEFORE_STEP = "before the training step"
"""A key of the cache, in addition to the points of :data:`_HOOKS`: the result of ``may_write_before_training_step``."""


class UserHooks:
    """The points of a run at which user code could write weights. Results are cached until the next loop starts.

    Args:
        trainer: the trainer, whose callbacks may change between loops.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._answers: dict[str, bool] = {}
        self._last_phase = ""

    def loop_starts(self) -> None:
        """Clears the cache, because callbacks may have changed, and any hook may have run since the last step."""
        self._answers.clear()
        self._last_phase = ""

    def may_write_weights(self, point: str) -> bool:
        """Returns True if a user's hook runs at a point of :data:`_HOOKS`: it could read gradients, or write weights."""
        if point not in self._answers:
            self._answers[point] = bool(hooks_of_users(self._trainer, point))
        return self._answers[point]

    def may_write_before_training_step(self) -> bool:
        """Returns True if user code could write weights between the start of a batch and its training step.

        In automatic optimization, the optimizer's step runs in between: its closure calls the training step.
        """
        if _BEFORE_STEP not in self._answers:
            unsafe = not all(map(calls_closure_first, self._trainer.optimizers)) or self.may_write_weights("optimizer")
            self._answers[_BEFORE_STEP] = self._trainer.lightning_module.automatic_optimization and unsafe
        return self._answers[_BEFORE_STEP]

    def may_have_written(self, phase: str) -> bool:
        """Returns True if user code may have written weights since the last step. The engine may have noticed which.

        Records the phase. Outside of training, True before the first step of a loop: other hooks have run since the last step of
        the previous loop.

        Args:
            phase: the loop of the step that begins: "train", "validate", "test" or "predict".
        """
        first = phase != self._last_phase
        self._last_phase = phase
        if phase == "train":  # for earlier hooks, ``Run.batch_starts`` has marked the copies as out of date
            return self.may_write_before_training_step()
        return first or self.may_write_weights(phase)


def calls_closure_first(optimizer: Any, replaced: Any = None) -> bool:
    """Returns True if an optimizer's step certainly calls the closure before any code writes weights.

    True for the unchanged steps of torch's optimizers without hooks of users before the step.

    Args:
        optimizer: any optimizer.
        replaced: the ``step`` attribute that the object had before the package replaced it. None if the object had none, or if
            the attribute was not replaced.
    """
    if is_patched(optimizer, replaced or attributes_of(optimizer).get("step")):
        return False
    hooks = step_pre_hooks(optimizer)
    step = getattr(type(optimizer), "step", None)
    if hooks is None or not is_of(step, "torch.optim."):
        return False
    return all(is_of(hook, "sp_lightning.") for hook in hooks)


def is_of(function: Any, package: str) -> bool:
    """Returns True if a function is defined in a package, or in a module whose name begins so. None is `exec`'s module."""
    return (getattr(function, "__module__", None) or "").startswith(package)


def hooks_of_users(trainer: Any, *points: str) -> list[str]:
    """Returns the names of users' hooks that run at some points of :data:`_HOOKS`, for example ``EMA.on_train_batch_end``.

    Args:
        trainer: the trainer, with its current module, data module and callbacks.
        points: the points. The result has their hooks in this order.
    """
    if (code_at := getattr(trainer, "code_at", None)) is not None:  # a loop without a Trainer
        return [name for point in points for name in code_at(point)]
    owners: list[tuple[object, type]] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule))
    owners += [(callback, Callback) for callback in trainer.callbacks if not is_exactly(callback, WRITE_NO_WEIGHTS)]
    found = []
    for point in points:
        hooks = (*_HOOKS[point], *(_LOADERS if point == "train" and trainer.reload_dataloaders_every_n_epochs else ()))
        for owner, kind in owners:
            base: Any = base_of(owner, kind)
            name = type(owner).__name__
            found += [f"{name}.{hook}" for hook in hooks if hasattr(base, hook) and is_overridden(hook, owner, base)]
        if point == "train":  # after on_train_batch_end, Lightning steps only the schedulers that reduce on plateaus
            late = [config.scheduler for config in trainer.strategy.lr_scheduler_configs if config.reduce_on_plateau]
            own = [type(each) for each in late if not type(each).step.__module__.startswith("torch.")]
            found += [f"{kind.__name__}.step" for kind in own]
    return found
