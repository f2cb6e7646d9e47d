"""Where user code runs, and whether it could write weights there: where it cannot, copies on the device stay valid.

A write through ``.data`` changes no version counter. So a copy on the device is trusted only where no hook runs, of the
module, its data module or a callback, that is not known to leave weights alone. For the same reason updates run in the
background by default only where no hook would have to wait for them.
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

from sp_lightning.device.patched import is_patched
from sp_lightning.device.torch_private import step_pre_hooks
from sp_lightning.trainer.compat import base_of, is_exactly

# The code of these callbacks was read: none of their hooks writes weights. A subclass may, and is not among them.
WRITE_NO_WEIGHTS: set[type[Callback]] = {
    DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar,
    RichModelSummary, RichProgressBar, Timer, TQDMProgressBar,
}  # fmt: skip

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = ("train_dataloader", "val_dataloader")
_HOOKS = {
    # Between the end of a batch, as callbacks are told of it, and the next training step.
    "train": (
        "on_train_batch_end", "on_train_epoch_end", "on_train_epoch_start", "on_train_batch_start",
        "on_validation_start", "on_validation_end", "on_validation_epoch_start", "on_validation_epoch_end",
        "on_validation_model_eval", "on_validation_model_train", "on_validation_model_zero_grad",
        "on_validation_batch_start", "on_validation_batch_end", "lr_scheduler_step", *_TRANSFER,
    ),
    # Between forward and backward.
    "backward": ("on_before_zero_grad", "optimizer_zero_grad", "on_before_backward", "backward"),
    # The part of it in which the last step's gradients are there.
    "zero_grad": ("on_before_zero_grad", "optimizer_zero_grad"),
    # Between two batches.
    "validate": ("on_validation_batch_start", "on_validation_batch_end", *_TRANSFER),
    "test": ("on_test_batch_start", "on_test_batch_end", *_TRANSFER),
    "predict": ("on_predict_batch_start", "on_predict_batch_end", *_TRANSFER),
    # From backward to the optimizer's step: the gradients are there and could be written.
    "gradients": ("backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    # Around the optimizer's step, and before backward.
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
    # After the last step of training.
    "end": ("on_train_end", "on_fit_end", "on_exception", "teardown"),
}  # fmt: skip


class UserHooks:
    """Answers where user code of a run could write weights. An answer holds until the next loop starts.

    Args:
        module: the LightningModule. Its trainer's callbacks may change between loops.
        check_writes: whether weights count as written at every point, because writes are being looked for.
    """

    def __init__(self, module: pl.LightningModule, *, check_writes: bool) -> None:
        self._module = module
        self._check_writes = check_writes
        self._answers: dict[str, bool] = {}
        self._last_phase = ""

    def loop_starts(self) -> None:
        """Forgets all answers: callbacks may have come and gone, and any hook may have run since the last step."""
        self._answers.clear()
        self._last_phase = ""

    def may_write_weights(self, point: str) -> bool:
        """Whether a hook that runs at a point could write weights.

        Args:
            point: ``"train"``, ``"validate"``, ``"test"`` or ``"predict"`` for what runs between two steps of such a
                loop; ``"backward"``, between forward and backward; ``"gradients"``, from backward to the optimizer's
                step; ``"optimizer"``, around that step.
        """
        if point not in self._answers:
            self._answers[point] = self._check_writes or bool(hooks_of_users(self._module.trainer, point))
        return self._answers[point]

    def may_look_at_gradients_before_backward(self) -> bool:
        """Whether a hook runs between forward and the moment when gradients are set to None."""
        if "zero_grad" not in self._answers:
            self._answers["zero_grad"] = bool(hooks_of_users(self._module.trainer, "zero_grad"))
        return self._answers["zero_grad"]

    def may_write_before_training_step(self) -> bool:
        """Whether somebody could write weights between the start of a batch and its training step.

        In automatic optimization an optimizer's step lies between them: it calls the training step as its closure.
        """
        if "step" not in self._answers:
            known = all(calls_closure_first(optimizer) for optimizer in self._module.trainer.optimizers)
            unsafe = not known or self.may_write_weights("optimizer")
            self._answers["step"] = self._check_writes or (self._module.automatic_optimization and unsafe)
        return self._answers["step"]

    def may_have_written(self, phase: str) -> bool:
        """Whether weights may have been written by the time a step begins, unless the engine was told of it.

        Before the first step of a loop hooks have run since the last step, whatever loop that was in.
        """
        first, self._last_phase = phase != self._last_phase, phase
        return self.may_write_before_training_step() if phase == "train" else first or self.may_write_weights(phase)

    def may_write_after(self, phase: str) -> bool:
        """Whether a hook after a batch of this phase could write weights. The batch may be the loop's last."""
        return self.may_write_weights(phase) or self.may_write_weights("train")


def calls_closure_first(optimizer: Any, replaced: Any = None) -> bool:
    """Whether an optimizer's step calls the closure before it writes weights: torch's do, without hooks before it.

    Args:
        optimizer: any.
        replaced: the step that it had on the object before ours took that place; None if it had none, or has it still.
    """
    if is_patched(optimizer, replaced or getattr(optimizer, "__dict__", {}).get("step")):
        return False
    hooks = step_pre_hooks(optimizer)
    step = getattr(type(optimizer), "step", None)
    if hooks is None or not getattr(step, "__module__", "").startswith("torch.optim."):
        return False
    return all(getattr(hook, "__module__", "").startswith("sp_lightning.") for hook in hooks)


def hooks_of_users(trainer: Any, point: str) -> list[str]:
    """Returns the hooks of users that run at a point, by name (``EMA.on_train_batch_end``).

    Args:
        trainer: with its module, its data module and its callbacks as they are now.
        point: as in :meth:`UserHooks.may_write_weights`.
    """
    owners: list[tuple[object, type]] = [(trainer.lightning_module, pl.LightningModule)]
    if trainer.datamodule is not None:
        owners.append((trainer.datamodule, pl.LightningDataModule))
    owners += [(callback, Callback) for callback in trainer.callbacks if not is_exactly(callback, WRITE_NO_WEIGHTS)]
    bases: list[tuple[object, type]] = [(owner, base_of(owner, kind)) for owner, kind in owners]
    hooks = (*_HOOKS[point], *(_LOADERS if point == "train" and trainer.reload_dataloaders_every_n_epochs else ()))
    overridden = [
        f"{type(owner).__name__}.{hook}"
        for owner, base in bases
        for hook in hooks
        if hasattr(base, hook) and is_overridden(hook, owner, parent=base)
    ]
    return overridden + (_late_schedulers(trainer) if point == "train" else [])


def _late_schedulers(trainer: Any) -> list[str]:
    """Returns the users' own plateau schedulers. All other schedulers step before ``on_train_batch_end``."""
    late = [config.scheduler for config in trainer.strategy.lr_scheduler_configs if config.reduce_on_plateau]
    return [
        f"{type(scheduler).__name__}.step"
        for scheduler in late
        if not type(scheduler).step.__module__.startswith("torch.")
    ]
