"""Collects the facts from which ``plan.update_policy`` decides how layers are updated: options, hooks, optimizers."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins.precision import DoublePrecision, HalfPrecision, MixedPrecision, Precision
from torch import nn
from torch.optim import Optimizer

from sp_lightning import registry
from sp_lightning.core.model.found import Found, Layer
from sp_lightning.core.plan.update_policy import BatchFacts, OptimizerFacts, UpdateFacts
from sp_lightning.core.torch_compat.private import (
    global_step_hooks,
    gradient_hooks,
    has_accumulation_hooks,
    step_hooks,
    unscales_by_itself,
)
from sp_lightning.core.updates.fused import (
    PREVENT_FUSED,
    divide,
    has_fused_step,
    is_of_bitsandbytes,
    is_separable,
    loses_updates,
    runs_fused,
)
from sp_lightning.core.updates.step_context import compiles, reads_settings
from sp_lightning.trainer.compat import base_of, is_a, is_exactly, is_no_optimizer
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.scaler import HostGradScaler
from sp_lightning.trainer.user_hooks import hooks_of_users, is_of

CLIPPING = ("clip_grad_by_norm", "clip_grad_by_value")
"""The methods of a precision plugin that clip."""


def collect(
    of_run: UpdateFacts, trainer: Any, options: Options, optimizers: Sequence[Optimizer], found: Found
) -> UpdateFacts:
    """Collects the current facts. No update may be running, because an optimizer has another class while its updates run.

    Args:
        of_run: the facts of the run, already set: ``ranks``, ``tried`` and ``needed``.
        trainer: the trainer, with module, callbacks and precision plugin.
        options: the user's options.
        optimizers: the optimizers that step, as their users configured them.
        found: the layers of the run.
    """
    facts = replace(
        of_run,
        overlap=options.optimizer_overlap,
        place=options.optimizer_on,
        gpu_layers=options.gpu_layers,
        on_cpu=_computes_on_host(trainer),
        disk=options.disk is not None,
    )
    both = [each for each in optimizers if _trains_both(each, found.stay)]
    against_layers, instead = _against_layerwise_steps(optimizers, found.on_gpu)
    after, any_hook = _parameter_hooks(trainer.lightning_module)
    # True if user code runs between backward and the optimizer's step; and between the step and the reset of gradients to None.
    read_before_step = bool(any_hook or hooks_of_users(trainer, "gradients"))
    read_after_step = bool(hooks_of_users(trainer, "train", "optimizer", "end"))
    return replace(
        facts,
        optimizers=tuple(OptimizerFacts(identity=id(each)) for each in optimizers),
        against_both=registry.against_gpu(both) if both else "",
        batch=batch_facts(trainer),
        against_background=_against_background(trainer),
        against_layers=against_layers,
        instead=instead,
        against_forward=_against_beside_forward(optimizers),
        against_gpu=registry.against_gpu(optimizers) or _against_steps_on_gpu(trainer, optimizers),
        against_gpu_background=_against_background_on_gpu(trainer, optimizers),
        accumulation_hooks=after,
        step_hooks=_has_step_hooks(optimizers),
        unread_before_step=not read_before_step and scaler_of(trainer) is None,
        unread=not read_before_step and not read_after_step and not _may_scaler_read(trainer),
        read_after_step=read_after_step,
    )


def batch_facts(trainer: Any) -> BatchFacts:
    """Returns the current values of the facts that may change between two batches."""
    limit = trainer.gradient_clip_val
    return BatchFacts(
        automatic=trainer.lightning_module.automatic_optimization,
        clip=((trainer.gradient_clip_algorithm or "norm"), limit) if limit else None,
        clips_as_lightning=clips_as_lightning(trainer.precision_plugin),
        scales=scaler_of(trainer) is not None,
        averages=any(is_a(callback, StochasticWeightAveraging) for callback in trainer.callbacks),
        hook=next(iter(hooks_of_users(trainer, "gradients", "step")), ""),
    )


def real_optimizers(trainer: Any) -> list[Optimizer]:
    """Returns the trainer's optimizers, without Lightning's mock optimizer."""
    return [each for each in trainer.optimizers if not is_no_optimizer(each)]


def scaler_of(trainer: Any) -> Any:
    """Returns the gradient scaler of ``16-mixed``; None for other precisions."""
    return getattr(trainer.precision_plugin, "scaler", None)


def clips_as_lightning(plugin: Any) -> bool:
    """Returns True if a precision plugin clips by Lightning's own methods."""
    base, kind = base_of(plugin, Precision), type(plugin)
    own = any(getattr(kind, name) is not getattr(base, name) for name in CLIPPING)
    return not own and not any(name in vars(plugin) for name in CLIPPING)


# ---------------------------------------------------------------------- who reads gradients


def _parameter_hooks(module: nn.Module) -> tuple[bool, bool]:
    """Returns two values: True if parameters have post-accumulate hooks; True if they have any hooks on gradients."""
    accumulation = any(has_accumulation_hooks(p) for p in module.parameters())
    return accumulation, accumulation or any(gradient_hooks(p) for p in module.parameters())


def _may_scaler_read(trainer: Any) -> bool:
    """Returns True if other code than this package's scaler may read and write gradients to unscale them.

    This is a user's own scaler, or an optimizer that unscales by itself.
    """
    scaler = scaler_of(trainer)
    ours = type(scaler) is HostGradScaler and not any(map(unscales_by_itself, trainer.optimizers))
    return scaler is not None and not ours


def _has_step_hooks(optimizers: Sequence[Optimizer]) -> bool:
    """Returns True if code outside this package has registered hooks on the steps of optimizers."""
    hooks = [*global_step_hooks(), *(hook for optimizer in optimizers for hook in step_hooks(optimizer))]
    return any(not is_of(hook, "sp_lightning.") for hook in hooks)


# ---------------------------------------------------------------------- reasons against a place or a mode


def _computes_on_host(trainer: Any) -> bool:
    return bool(trainer.strategy.root_device.type == "cpu")


def _against_background(trainer: Any) -> str:
    """Returns why ``optimizer_overlap="auto"`` updates nothing in the background; empty if it may."""
    if _computes_on_host(trainer):
        return "they would compete with the model for the CPU"
    plugin = trainer.precision_plugin
    if not is_exactly(plugin, (Precision, MixedPrecision, HalfPrecision, DoublePrecision)):
        return f"{type(plugin).__name__} is not among the tested precision plugins"
    return ""


def _trains_both(optimizer: Optimizer, stay: Sequence[Layer]) -> bool:
    """Returns True if an optimizer has trained parameters of layers that stay on the GPU, and others."""
    chosen = {p for layer in stay for _, p in layer.parameters}
    return len({p in chosen for group in optimizer.param_groups for p in group["params"] if p.requires_grad}) > 1


def _against_layerwise_steps(optimizers: Sequence[Optimizer], on_gpu: Container[nn.Parameter]) -> tuple[str, str]:
    """Returns why the steps on the CPU cannot run layer by layer; empty if the steps of all optimizers can.

    The second text begins a sentence with a remedy, which the caller ends with another mode; empty if there is no such remedy.
    """
    for optimizer in [each for each in optimizers if not is_separable(each)]:
        name = type(optimizer).__name__
        if not has_fused_step(optimizer):
            if getattr(optimizer, "bf16_stochastic_round", False):
                return f"{name}(bf16_stochastic_round=True) draws random numbers in the order of all parameters", ""
            instead = 'Step on the GPU (optimizer_on="gpu"), or use' if is_of_bitsandbytes(optimizer) else ""
            return (
                f"{name} is not one of torch's Adam, AdamW, SGD and Adagrad, whose fused steps can run layer by layer, nor one "
                "of torchao's optimizers with a state of few bits"
            ), instead
        parts = [divide(group, on_gpu)[0] for group in optimizer.param_groups]
        for group in [each for each in parts if each["params"] and not runs_fused(optimizer, each, fuse=True)]:
            chosen = {key: group[key] for key in ("fused", *PREVENT_FUSED) if group.get(key) not in (None, False)}
            by = ", ".join(f"{key}={value}" for key, value in chosen.items())
            if not by and loses_updates(optimizer, group):
                by = f"torch {torch.__version__} would leave its 16-bit weights as they are"
            by = by or "fused=False"
            left_open = {
                **group,
                **dict.fromkeys(("fused", *PREVENT_FUSED)),
            }  # as if the user had left these settings out
            better = ""
            if runs_fused(optimizer, left_open, fuse=True):
                better = f"Leave that out, and {name} runs fused, as with fused=True, or use"
            return f"only fused steps can run layer by layer, and {name} does not run fused ({by})", better
    return "", ""


def _against_beside_forward(optimizers: Sequence[Optimizer]) -> str:
    """Returns why updates cannot overlap with the next forward; empty if they can."""
    names = " and ".join(sorted({type(each).__name__ for each in optimizers if compiles(each)}))
    if not names:
        return ""
    return (
        f"{names} compiles its step, and torch.compile restores torch's random state afterwards, so the next forward would draw "
        "some random numbers twice"
    )


def _against_steps_on_gpu(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    """Returns why, with this trainer, steps on the GPU would differ from plain Lightning's; empty if they would not."""
    if not trainer.lightning_module.automatic_optimization:
        return "optimization is manual, and norms of gradients that you take yourself would be computed on the CPU"
    plugin = trainer.precision_plugin
    if type(plugin).clip_grad_by_norm is not base_of(plugin, Precision).clip_grad_by_norm:
        return f"{type(plugin).__name__}.clip_grad_by_norm would compute norms on the CPU"
    if scaler_of(trainer) is not None and any(map(unscales_by_itself, optimizers)):
        return f"the fused step of {type(optimizers[0]).__name__} unscales gradients by itself"
    return ""


def _against_background_on_gpu(trainer: Any, optimizers: Sequence[Optimizer]) -> str:
    """Returns why steps on the GPU cannot run in the background; empty if they can."""
    plugin = trainer.precision_plugin
    if not is_exactly(plugin, (Precision, MixedPrecision)):
        return f"with {type(plugin).__name__}, tensors that an optimizer creates in the background would have another dtype"
    if declared := [type(each).__name__ for each in optimizers if registry.is_declared(each)]:
        return f"{' and '.join(declared)} may draw random numbers, which Superpipeline cannot detect"
    if name := next((type(each).__name__ for each in optimizers if reads_settings(each)), ""):
        return f"{name} reads torch's default dtype or precision of products in each step, and the next forward may set them"
    return ""
