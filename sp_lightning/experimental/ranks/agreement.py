"""Checks before training: modules and options that several devices do not support, ranks that differ, and the number of ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from sp_lightning.core.torch_compat.private import has_accumulation_hooks
from sp_lightning.experimental.ranks.collectives import Collectives
from sp_lightning.trainer.compat import trainer_of
from sp_lightning.trainer.options import Options
from sp_lightning.trainer.scaler import HostGradScaler
from sp_lightning.trainer.update_facts import clips_as_lightning

_ONE = "Pass Trainer(devices=1)"


def refuse_on_ranks(module: pl.LightningModule, options: Options, plugin: Any) -> None:
    """Raises an error for options and modules that do not work with several devices.

    With several devices they would give other results than on one device, make ranks hang, or concern one rank only.

    Args:
        module: the module.
        options: the strategy's options.
        plugin: the precision plugin, which may have a gradient scaler.

    Raises:
        ValueError: several devices do not support the module, an option or the precision plugin.
    """
    if options.gpu_layers:
        raise ValueError(f"gpu_layers={options.gpu_layers} keeps layers on one device. {_ONE}, or leave it out.")
    if options.optimizer_on == "gpu":
        raise ValueError(f'optimizer_on="gpu" steps layers of one device. {_ONE}, or leave it out.')
    if not clips_as_lightning(plugin):
        raise ValueError(
            f"{type(plugin).__name__} clips gradients in a way of its own, but each device has the gradients of some layers. "
            f"{_ONE}, or clip by Trainer(gradient_clip_val=)."
        )
    if not isinstance(getattr(plugin, "scaler", None), HostGradScaler | None):
        raise ValueError(
            f"{type(plugin.scaler).__name__} scales gradients in a way of its own, which several devices cannot do once for all. "
            f"{_ONE}, or torch.amp.GradScaler."
        )
    # Sums of sparse gradients that are bit-identical to DDP's would be possible: gloo divides each row by the number of ranks,
    # adds up the rows of each rank, and then the rows of all ranks in rank order. But the number of rows is not known in advance.
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{name!r} has sparse gradients, which several devices do not sum. Make it with sparse=False, or pass "
                "Trainer(devices=1)."
            )
    for name, parameter in module.named_parameters():
        if has_accumulation_hooks(parameter):
            raise ValueError(
                f"{name!r} has a hook that runs after its gradient was accumulated (register_post_accumulate_grad_hook, or a "
                f"hook on its node); with several devices gradients are summed after that. {_ONE}, or use the hook "
                "on_before_optimizer_step."
            )


def compare_models(ranks: Collectives, module: pl.LightningModule, options: Options) -> None:
    """Compares the module's parameters and buffers, the options of strategy and trainer, and versions. Collective.

    Only names, shapes and dtypes of tensors are compared, and whether they are frozen.

    Raises:
        ValueError: a rank differs from rank 0.
    """
    trainer = trainer_of(module)
    found: dict[str, dict[str, Any]] = {
        "parameters": {n: f"{_shape(p)}{'' if p.requires_grad else ', frozen'}" for n, p in module.named_parameters()},
        "buffers": {name: _shape(buffer) for name, buffer in module.named_buffers()},
        "options": {name: _said(value) for name, value in vars(options).items()},
        "trainer's settings": {name: _said(getattr(trainer, name, None)) for name in _SETTINGS},
        "kernels": {"torch": torch.__version__, "CPU capability": torch.backends.cpu.get_cpu_capability()},
    }
    ranks.compare(
        "a comparison of the ranks' modules and options",
        {(kind, name): value for kind, values in found.items() for name, value in values.items()},
        "Make the same module, strategy and trainer in every process: they must not depend on the rank. Use the same versions "
        "and the same kind of CPU.",
    )


_SETTINGS = (
    "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_epochs", "max_steps",
    "limit_train_batches", "check_val_every_n_epoch", "val_check_interval", "fast_dev_run",
)  # fmt: skip


def compare_optimizers(ranks: Collectives, optimizers: Sequence[Any]) -> None:
    """Compares the optimizers' classes, options and shapes of parameters. Collective.

    Raises:
        ValueError: the optimizers of a rank differ from those of rank 0.
    """
    groups = {
        key: text for number, optimizer in enumerate(optimizers) for key, text in settings(optimizer, number).items()
    }
    ranks.compare("a comparison of optimizers", groups, "Make the same optimizers in every process.")


def settings(optimizer: Any, number: int | None = None) -> dict[tuple[str, str], str]:
    """Returns the settings of an optimizer's groups, for comparisons: with a number, also the shapes of parameters."""
    found = {}
    for index, group in enumerate(optimizer.param_groups):
        simple: dict[str, Any] = {
            name: value.item() if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if isinstance(value, (bool, int, float, str, tuple))
            or (isinstance(value, torch.Tensor) and value.numel() == 1)
        }
        if number is not None:
            simple["parameters of shapes"] = [tuple(parameter.shape) for parameter in group["params"]]
        name = type(optimizer).__name__ + ("" if number is None else f" {number}")
        found["optimizers", f"{name}, group {index}"] = ", ".join(f"{key} {value}" for key, value in simple.items())
    return found


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _said(value: Any) -> str:
    return type(value).__name__ if callable(value) else repr(value)


# ---------------------------------------------------------------------- the number and the places of processes


def refuse_restart_with_old_store() -> None:
    """If torchrun has started the processes again, checks that its store is new.

    With the earlier processes' addresses in the store (pytorch/pytorch#135712), gloo may wait for half an hour.

    Raises:
        RuntimeError: torchrun has started the processes again, and they use the store of the earlier processes.
    """
    again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
    if again and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        raise RuntimeError(
            "torchrun has started the processes again (--max-restarts), but its store has the addresses of the earlier ones "
            "(pytorch/pytorch#135712). Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun: each start then has a new store."
        )


def refuse_other_places(strategy: Any) -> None:
    """Checks that the number of processes is the trainer's, and, on several nodes, that they are numbered node by node.

    Collective on several nodes.

    Args:
        strategy: the strategy, with the trainer's number of nodes and devices.

    Raises:
        ValueError: the processes have another number, or are numbered in another way.
    """
    nodes, devices = strategy.num_nodes, len(strategy.parallel_devices)
    expected = [(node, local) for node in range(nodes) for local in range(devices)]
    found: list[Any] = [None] * dist.get_world_size()
    if nodes > 1:
        group: Any = dist.new_group(backend="gloo")
        try:
            dist.all_gather_object(found, (strategy.node_rank, strategy.local_rank), group=group)
        finally:
            dist.destroy_process_group(group)
    if len(found) != len(expected) or (nodes > 1 and found != expected):
        places = "; ".join(
            f"rank {rank} is number {each[1]} on node {each[0]}" for rank, each in enumerate(found) if each
        )
        launch = "--standalone" if nodes == 1 else f"--nnodes {nodes} --rdzv-backend c10d --rdzv-endpoint HOST:PORT"
        raise ValueError(
            f"The trainer needs {len(expected)} processes, {devices} on each node, numbered node by node, and {len(found)} were "
            f"started: {places or 'on one node'}. Start them by torchrun {launch} --nproc-per-node {devices} on each node, or "
            f"under SLURM with --ntasks-per-node={devices} --distribution=block."
        )
