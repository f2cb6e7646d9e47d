"""What user code could see or write, and where: whether copies on the device stay valid, and when updates run.

A write through ``.data`` changes no version counter. So a copy on the device is trusted only where no hook runs, of the
module, its data module or a callback, that is not known to leave weights alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
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
    StochasticWeightAveraging,
    Timer,
    TQDMProgressBar,
)
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim import Optimizer

from sp_lightning.gpu_steps.alone import (
    DECLARES,
    depends_on_places,
    is_declared,
    is_of_bitsandbytes,
    is_torchs,
    steps_alone,
)
from sp_lightning.plan.choices import Overlap
from sp_lightning.torch_compat.patched import is_patched
from sp_lightning.torch_compat.private import (
    accumulation_hooks,
    global_step_hooks,
    gradient_hooks,
    step_hooks,
    step_pre_hooks,
    unscales_by_itself,
)
from sp_lightning.trainer.compat import base_of, is_a, is_exactly, is_no_optimizer
from sp_lightning.updates.fused import BARS_FUSED, has_fused_step, is_separable, loses_updates, runs_fused
from sp_lightning.updates.scaler import HostGradScaler
from sp_lightning.updates.step_context import compiles

# The code of these callbacks was read: none of their hooks writes weights. A subclass may, and is not among them.
WRITE_NO_WEIGHTS: set[type[Callback]] = {
    DeviceStatsMonitor, EarlyStopping, LearningRateMonitor, ModelCheckpoint, ModelSummary, ProgressBar,
    RichModelSummary, RichProgressBar, Timer, TQDMProgressBar,
}  # fmt: skip

_TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = ("train_dataloader", "val_dataloader")
_HOOKS = {
    # Between the end of a batch, as callbacks see it, and the next training step.
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
    # Around the optimizer's step: it may wrap the closure.
    "step": ("optimizer_step",),
    # Around the optimizer's step, and before backward.
    "optimizer": ("optimizer_step", "optimizer_zero_grad", "on_before_zero_grad"),
    # After the last step of training.
    "end": ("on_train_end", "on_fit_end", "on_exception", "teardown"),
}  # fmt: skip


class UserHooks:
    """Answers where user code of a run could write weights. An answer holds until the next loop starts.

    Args:
        module: the LightningModule. Its trainer's callbacks may change between loops.
        debug_writes: whether weights count as written at every point, because writes are being looked for.
    """

    def __init__(self, module: pl.LightningModule, *, debug_writes: bool) -> None:
        self._module = module
        self._check_writes = debug_writes
        self._answers: dict[str, bool] = {}
        self._last_phase = ""

    def loop_starts(self) -> None:
        """Forgets all answers: callbacks may have come and gone, and any hook may have run since the last step."""
        self._answers.clear()
        self._last_phase = ""

    def run_at(self, point: str) -> bool:
        """Whether a hook of a user's runs at a point: one of :data:`_HOOKS`."""
        if point not in self._answers:
            self._answers[point] = bool(hooks_of_users(self._module.trainer, point))
        return self._answers[point]

    def may_write_weights(self, point: str) -> bool:
        """Whether a hook that runs at a point could write weights."""
        return self._check_writes or self.run_at(point)

    def may_write_before_training_step(self) -> bool:
        """Whether user code could write weights between the start of a batch and its training step.

        In automatic optimization an optimizer's step lies between them: it calls the training step as its closure.
        """
        if "step" not in self._answers:
            unsafe = not all(map(calls_closure_first, self._module.trainer.optimizers)) or self.run_at("optimizer")
            self._answers["step"] = self._module.automatic_optimization and unsafe
        return self._check_writes or self._answers["step"]

    def may_have_written(self, phase: str) -> bool:
        """Whether weights may have been written by the time a step begins, unless the engine knows of it.

        Before the first step of a loop hooks have run since the last step, whatever loop that was in.
        """
        first, self._last_phase = phase != self._last_phase, phase
        return self.may_write_before_training_step() if phase == "train" else first or self.may_write_weights(phase)


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


def hooks_of_users(trainer: Any, *points: str) -> list[str]:
    """Returns the hooks of users that run at some points of :data:`_HOOKS`, by name (``EMA.on_train_batch_end``).

    Args:
        trainer: with its module, its data module and its callbacks as they are now.
        points: in the order in which their hooks are named.
    """
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
        if point == "train":  # all schedulers but those of plateaus step before on_train_batch_end
            late = [config.scheduler for config in trainer.strategy.lr_scheduler_configs if config.reduce_on_plateau]
            own = [type(each) for each in late if not type(each).step.__module__.startswith("torch.")]
            found += [f"{kind.__name__}.step" for kind in own]
    return found


def clips_in_its_own_way(module: pl.LightningModule) -> bool:
    """Returns True if a module overrides Lightning's clipping. It may then name a norm that the trainer does not know."""
    return is_overridden("configure_gradient_clipping", module, base_of(module, pl.LightningModule))


# ---------------------------------------------------------------------- whether updates may run in the background


def choose_overlap(
    asked: Overlap, trainer: Any, optimizers: Sequence[Optimizer], *, fuse: bool, on_device: bool
) -> tuple[Overlap, str]:
    """Returns the mode in which updates run, and, for ``"auto"``, what prevents a faster mode (else an empty string).

    The first step shows if the module's backward allows ``"backward"``.

    Args:
        asked: the option ``optimizer_overlap``.
        trainer: with its module, its callbacks and its precision plugin as they are now.
        optimizers: as their users configured them.
        fuse: whether they are to run fused where their users left that open.
        on_device: whether they step on the device.

    Raises:
        ValueError: a mode was asked for by name that is not possible.
    """
    if asked == "off":
        return "off", ""
    if all(is_no_optimizer(optimizer) for optimizer in optimizers):
        return "off", "there is no optimizer"
    never, better = _against_layerwise_steps(optimizers, fuse)
    if on_device:
        never, better = against_background_on_device(trainer, optimizers), ""
    beside = _against_beside_forward(optimizers)
    if asked == "auto":
        why = _against_background(trainer) or never or beside
        if why:
            return "off", why
        why = _against_backward(trainer, optimizers, on_device=on_device)
        return ("forward" if why else "backward"), why
    why = never or (_against_backward(trainer, optimizers, on_device=on_device) if asked == "backward" else beside)
    there = 'optimizer_on="gpu", ' if on_device else ""
    if why:
        raise ValueError(
            f'optimizer_overlap="{asked}" cannot be used: {why}. '
            f'{better or "Use"} SuperpipelineStrategy({there}optimizer_overlap="{"off" if never or beside else "forward"}").'
        )
    return asked, ""


def are_gradients_unread_before_step(trainer: Any) -> bool:
    """Whether no user code and no scaler reads or writes gradients between backward and the optimizer's step.

    Then their norms may be computed while backward goes on.
    """
    return not hooks_of_users(trainer, "gradients") and not _parameter_hooks(trainer) and scaler_of(trainer) is None


def are_gradients_unread(trainer: Any) -> bool:
    """Whether no hook runs between backward and the moment when gradients are set to None, so that none need be widened.

    A scaler of the user's, or an optimizer that unscales by itself, may read and write them there.
    """
    hooks = hooks_of_users(trainer, "gradients", "train", "optimizer", "end")
    scaler = scaler_of(trainer)
    ours = type(scaler) is HostGradScaler and not any(map(unscales_by_itself, trainer.optimizers))
    return not hooks and not _parameter_hooks(trainer) and (scaler is None or ours)


def scaler_of(trainer: Any) -> Any:
    """Returns the gradient scaler of ``16-mixed``; None for other precisions."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _first(*reasons: tuple[Any, str]) -> str:
    """The first of the reasons that holds."""
    return next((why for holds, why in reasons if holds), "")


def _against_layerwise_steps(optimizers: Sequence[Optimizer], fuse: bool) -> tuple[str, str]:
    """Returns why an optimizer's step cannot be taken apart by layers; an empty string if all can.

    The second text is how it could be, as the beginning of a sentence that goes on with another way; empty if there is none.
    """
    for optimizer in [each for each in optimizers if not is_separable(each)]:
        name = type(optimizer).__name__
        if not has_fused_step(optimizer):
            if getattr(optimizer, "bf16_stochastic_round", False):
                return f"{name}(bf16_stochastic_round=True) draws random numbers in the order of all parameters", ""
            return (
                f"{name} is not one of torch's Adam, AdamW, SGD and Adagrad, whose fused steps can be taken apart by layers, nor "
                "one of torchao's with a state of few bits"
            ), 'Step on the GPU (optimizer_on="gpu"), or use' * is_of_bitsandbytes(optimizer)
        for group in [each for each in optimizer.param_groups if not runs_fused(optimizer, each, fuse=fuse)]:
            chosen = {key: group[key] for key in ("fused", *BARS_FUSED) if group.get(key) not in (None, False)}
            by = ", ".join(f"{key}={value}" for key, value in chosen.items())
            if not by and loses_updates(optimizer, group):
                by = f"torch {torch.__version__} would leave its 16-bit weights as they are"
            by = by or "fused=False or fused_optimizer=False"
            left_open = {**group, **dict.fromkeys(("fused", *BARS_FUSED))}
            better = f"Leave that out, and {name} runs fused, as with fused=True, or use"
            better *= runs_fused(optimizer, left_open, fuse=True)
            return f"only fused steps can be taken apart by layers, and {name} does not run fused ({by})", better
    return "", ""


def _against_beside_forward(optimizers: Sequence[Optimizer]) -> str:
    """Returns why updates cannot run beside the next forward; an empty string if they can."""
    names = " and ".join(sorted({type(each).__name__ for each in optimizers if compiles(each)}))
    return names and (
        f"{names} compiles its step, and torch.compile restores torch's random state afterwards, so that the next forward would "
        "draw some numbers twice"
    )


def against_background_on_device(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    plugin, declared = trainer.precision_plugin, [type(each).__name__ for each in optimizers if is_declared(each)]
    of_one_dtype = not is_exactly(plugin, (Precision, MixedPrecision))
    return _first(
        (
            of_one_dtype,
            f"with {type(plugin).__name__}, tensors that an optimizer makes meanwhile would have another dtype",
        ),
        (declared, f"{' and '.join(declared)} may draw random numbers, of which nobody but its user knows"),
    )


def against_steps_on_device(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    """Returns what steps on the device would do otherwise than plain Lightning, and why; an empty string if nothing."""
    plugin, others = trainer.precision_plugin, [each for each in optimizers if not steps_alone(each)]
    name = type(others[0]).__name__ if others else ""
    base, kind = base_of(plugin, Precision), type(plugin)
    own = kind.clip_grad_by_norm is not base.clip_grad_by_norm
    together = any(map(is_torchs, others[:1]))
    return _first(
        (together, f"{name} steps all parameters together"),
        (
            others,
            f"{name} is not known to step each parameter by itself. If it does, say so in its class: "
            f"{name}.{DECLARES} = True",
        ),
        (
            not trainer.lightning_module.automatic_optimization,
            "optimization is manual, and norms of gradients that you take yourself would be the host's",
        ),
        *((why, why) for why in map(depends_on_places, optimizers)),
        (own, f"{kind.__name__}.clip_grad_by_norm would take norms on the host"),
        (
            scaler_of(trainer) is not None and any(map(unscales_by_itself, optimizers)),
            f"the fused step of {type(optimizers[0]).__name__ if optimizers else ''} unscales gradients by itself",
        ),
    )


def _against_backward(trainer: Any, optimizers: Sequence[Optimizer], *, on_device: bool) -> str:
    """Returns why updates cannot begin in backward; an empty string if they can."""
    hooks = _first(
        (
            any(accumulation_hooks(p) for p in trainer.lightning_module.parameters()),
            "parameters have post-accumulate hooks, which may write other gradients than their own",
        ),
        (_step_hooks(optimizers), "the optimizer has step hooks, which run after backward"),
    )
    return hooks or against_early_updates(trainer, on_device=on_device)


def against_early_updates(trainer: Any, *, on_device: bool) -> str:
    """Returns why a layer's gradients cannot be used before all gradients are there; an empty string if they can.

    This may change between two batches. Two things that may, too, need no other mode then: a layer whose parameters have got
    post-accumulate hooks is updated after backward, and the closure's ``zero_grad`` undoes what a step hook does to gradients.
    """
    module, clip = trainer.lightning_module, trainer.gradient_clip_val
    hook = next(iter(hooks_of_users(trainer, "gradients", "step")), None)
    clips_each = trainer.gradient_clip_algorithm == "value" and clips_as_lightning(trainer.precision_plugin)
    return _first(
        (not module.automatic_optimization, "optimization is manual"),
        (
            clip and (on_device or not clips_each),
            f"gradient_clip_val={clip} needs all gradients before the first update",
        ),
        (scaler_of(trainer) is not None, "the gradient scaler of 16-mixed needs all gradients before the first update"),
        (
            any(is_a(callback, StochasticWeightAveraging) for callback in trainer.callbacks),
            "StochasticWeightAveraging steps without a backward to adapt BatchNorm",
        ),
        (hook, f"{hook} may look at gradients or weights before the step"),
    )


CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")
"""The methods of a precision plugin that clip."""


def clips_as_lightning(plugin: Any) -> bool:
    """Returns True if a precision plugin clips by Lightning's own methods."""
    base, kind = base_of(plugin, Precision), type(plugin)
    own = any(getattr(kind, name) is not getattr(base, name) for name in CLIPPING)
    return not own and not any(name in vars(plugin) for name in CLIPPING)


def _against_background(trainer: Any) -> str:
    """Returns why updates run in ``optimizer.step()``; an empty string if they may run in the background."""
    plugin, tried = trainer.precision_plugin, (Precision, MixedPrecision, HalfPrecision, DoublePrecision)
    return _first(
        (_computes_on_host(trainer), "they would compete with the model for the CPU"),
        (not is_exactly(plugin, tried), f"{type(plugin).__name__} is not among the precision plugins that were tried"),
    )


def may_look_after_step(trainer: Any) -> bool:
    """Returns True if user code has hooks between the optimizer's step and ``zero_grad``, or after the last step."""
    return bool(hooks_of_users(trainer, "train", "optimizer", "end"))


def _computes_on_host(trainer: Any) -> bool:
    return bool(trainer.strategy.root_device.type == "cpu")


def _parameter_hooks(trainer: Any) -> bool:
    """Whether there are hooks on the gradients of parameters."""
    return any(gradient_hooks(p) or accumulation_hooks(p) for p in trainer.lightning_module.parameters())


def _step_hooks(optimizers: Sequence[Optimizer]) -> bool:
    """Whether other code than this package has hooks on optimizers' steps."""
    hooks = [*global_step_hooks(), *(hook for optimizer in optimizers for hook in step_hooks(optimizer))]
    return any(not getattr(hook, "__module__", "").startswith("sp_lightning.") for hook in hooks)
