"""Whether the optimizers' steps may run in the background: the option, against what users could see of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch.optim import Optimizer

from sp_lightning.device.torch_private import (
    accumulation_hooks,
    global_step_hooks,
    gradient_hooks,
    step_hooks,
    unscales_by_itself,
)
from sp_lightning.optim.fused import BARS_FUSED, FusedStep, is_separable, loses_updates
from sp_lightning.optim.scaler import HostGradScaler
from sp_lightning.plan.options import Overlap
from sp_lightning.trainer.compat import is_a, is_exactly, is_no_optimizer
from sp_lightning.trainer.user_hooks import hooks_of_users


def choose_overlap(asked: Overlap, trainer: Any, optimizers: Sequence[Optimizer]) -> tuple[Overlap, str]:
    """Returns the mode in which updates run, and, for ``"auto"``, why it is not ``"forward"`` (else an empty string).

    Args:
        asked: the option ``optimizer_overlap``.
        trainer: with its module, its callbacks and its precision plugin as they are now.
        optimizers: with their groups as a step will find them, fused where they will be.

    Raises:
        ValueError: a mode was asked for by name that is not possible.
    """
    if asked == "off":
        return "off", ""
    if all(is_no_optimizer(optimizer) for optimizer in optimizers):
        return "off", "there is no optimizer"
    never = _against_layerwise_steps(optimizers)
    if asked == "auto":
        why = _against_background(trainer, optimizers) or never
        return ("off" if why else "forward"), why
    why = never or (_against_early_updates(trainer, optimizers) if asked == "backward" else "")
    if why:
        raise ValueError(
            f'optimizer_overlap="{asked}" cannot be used: {why}. '
            f'Use SuperpipelineStrategy(optimizer_overlap="{"off" if never else "forward"}").'
        )
    return asked, ""


def nobody_looks_at_gradients(trainer: Any) -> bool:
    """Whether no user code and no scaler reads or writes gradients between backward and the optimizer's step.

    Then their norms may be computed while backward goes on.
    """
    return not hooks_of_users(trainer, "gradients") and not _parameter_hooks(trainer) and scaler_of(trainer) is None


def nobody_sees_gradients(trainer: Any) -> bool:
    """Whether no hook runs between backward and the moment when gradients are set to None, so that none need be widened.

    A scaler of the user's, or an optimizer that unscales by itself, may read and write them there.
    """
    hooks = (hooks_of_users(trainer, point) for point in ("gradients", "train", "optimizer", "end"))
    scaler = scaler_of(trainer)
    ours = type(scaler) is HostGradScaler and not any(map(unscales_by_itself, trainer.optimizers))
    return not any(hooks) and not _parameter_hooks(trainer) and (scaler is None or ours)


def scaler_of(trainer: Any) -> Any:
    """Returns the gradient scaler of ``16-mixed``; None for other precisions."""
    return getattr(trainer.precision_plugin, "scaler", None)


def _against_layerwise_steps(optimizers: Sequence[Optimizer]) -> str:
    """Returns why an optimizer's step cannot be taken apart by layers; an empty string if all can."""
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if is_separable(optimizer):
            continue
        if not FusedStep.suits(optimizer):
            if getattr(optimizer, "bf16_stochastic_round", False):
                return f"{name}(bf16_stochastic_round=True) draws random numbers in the order of all parameters"
            return (
                f"{name} is none of torch's Adam, AdamW, SGD and Adagrad, whose fused steps can be taken apart by layers, and "
                "none of torchao's with a state of few bits"
            )
        for group in optimizer.param_groups:
            if not group.get("fused"):
                chosen = {key: group[key] for key in ("fused", *BARS_FUSED) if group.get(key) not in (None, False)}
                by = ", ".join(f"{key}={value}" for key, value in chosen.items())
                if not by and loses_updates(optimizer, group):
                    by = f"torch {torch.__version__} would leave its 16-bit weights as they are"
                by = by or "fused=False or fused_optimizer=False"
                return f"only fused steps can be taken apart by layers, and {name} does not run fused ({by})"
    return ""


def _against_early_updates(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    """Returns why gradients cannot be used and freed while backward goes on; an empty string if they can."""
    module = trainer.lightning_module
    hooks = [*hooks_of_users(trainer, "gradients"), *hooks_of_users(trainer, "optimizer")]
    if not module.automatic_optimization:
        return "optimization is manual"
    if trainer.gradient_clip_val:
        return f"clipping (gradient_clip_val={trainer.gradient_clip_val}) needs all gradients at once"
    if scaler_of(trainer) is not None:
        return "the gradient scaler of 16-mixed needs all gradients at once"
    if any(is_a(callback, StochasticWeightAveraging) for callback in trainer.callbacks):
        return (
            "StochasticWeightAveraging steps without a backward to adapt BatchNorm, and gradients are freed before that"
        )
    if any(accumulation_hooks(p) for p in module.parameters()):
        return "parameters have post-accumulate hooks, which may write other gradients than their own"
    if _step_hooks(optimizers):
        return "the optimizer has step hooks, and gradients are freed before they run"
    return f"gradients are freed before {hooks[0]} could see them" if hooks else ""


def _against_background(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    """Returns which user code would wait for the updates, or why else they gain nothing; an empty string if they do."""
    if _computes_on_host(trainer):
        return "they would compete with the model for the CPU"
    if not trainer.lightning_module.automatic_optimization:
        return "optimization is manual"
    if not is_exactly(trainer.precision_plugin, (Precision, MixedPrecision, HalfPrecision, DoublePrecision)):
        return f"{type(trainer.precision_plugin).__name__} is not among the precision plugins that were tried"
    hooks = [hook for point in ("train", "gradients", "optimizer") for hook in hooks_of_users(trainer, point)]
    if hooks:
        return f"{hooks[0]} may look at weights or gradients"
    if _parameter_hooks(trainer):
        return "parameters have hooks"
    return "the optimizer has step hooks" if _step_hooks(optimizers) else ""


def _computes_on_host(trainer: Any) -> bool:
    return bool(trainer.strategy.root_device.type == "cpu")


def _parameter_hooks(trainer: Any) -> bool:
    """Whether anybody has hooks on the gradients of parameters."""
    return any(gradient_hooks(p) or accumulation_hooks(p) for p in trainer.lightning_module.parameters())


def _step_hooks(optimizers: Sequence[Optimizer]) -> bool:
    """Whether anybody but this package has hooks on optimizers' steps."""
    hooks = [*global_step_hooks(), *(hook for optimizer in optimizers for hook in step_hooks(optimizer))]
    return any(not getattr(hook, "__module__", "").startswith("sp_lightning.") for hook in hooks)
