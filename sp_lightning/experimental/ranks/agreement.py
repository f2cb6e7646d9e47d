"""Checks before training: modules and options that several devices do not support, ranks that differ, and the number of ranks."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from torch import nn

from sp_lightning.core.layers.writes import digest
from sp_lightning.core.torch_compat.private import has_accumulation_hooks
from sp_lightning.core.updates.scaler import HostGradScaler
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.trainer.compat import trainer_of
from sp_lightning.trainer.options import Options

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
    if not isinstance(getattr(plugin, "scaler", None), HostGradScaler | None):
        raise ValueError(
            f"{type(plugin.scaler).__name__} scales gradients in a way of its own, which several devices cannot do once for all. "
            f"{_ONE}, or torch.amp.GradScaler."
        )
    # Sums of sparse gradients that are bit-identical to DDP's would be possible: gloo divides each row by the number of ranks,
    # adds up the rows of each rank, and then the rows of all ranks in rank order. But the number of rows is not known in advance.
    # So a sparse gradient has no place in the shared memory, and other ranks would not see the primary's unscaling and clipping.
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


def compare_models(ranks: Ranks, module: pl.LightningModule, options: Options) -> None:
    """Compares the module's parameters and buffers, the options of strategy and trainer, and versions. Collective.

    Only names, shapes and dtypes of tensors are compared, and whether they are frozen. For values see :func:`compare_weights`.

    Raises:
        ValueError: a rank differs from rank 0.
    """
    parameters = {name: f"{_shape(p)}{'' if p.requires_grad else ', frozen'}" for name, p in module.named_parameters()}
    remedy = "Build the same module in every process: its arguments and files must not depend on the rank."
    ranks.must_agree("parameters", parameters, remedy)
    buffers = {name: _shape(buffer) for name, buffer in module.named_buffers()}
    ranks.must_agree("buffers", buffers, remedy)
    chosen = {name: _said(value) for name, value in vars(options).items()}
    ranks.must_agree("options", chosen, "Make the strategy with the same options in every process.")
    trainer = trainer_of(module)
    settings = {name: _said(getattr(trainer, name, None)) for name in _SETTINGS}
    ranks.must_agree("trainer's settings", settings, "Make the trainer with the same settings in every process.")
    kernels = {"torch": torch.__version__, "CPU capability": torch.backends.cpu.get_cpu_capability()}
    ranks.must_agree("kernels", kernels, "Use the same versions and the same kind of CPU for all processes.")


_SETTINGS = (
    "precision", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm", "max_epochs", "max_steps",
    "limit_train_batches", "check_val_every_n_epoch", "val_check_interval", "fast_dev_run",
)  # fmt: skip


def compare_weights(ranks: Ranks, module: pl.LightningModule, when: str) -> None:
    """Compares the weights of all nodes, and the CPU capability that torch's kernels use. Collective.

    Args:
        ranks: the ranks. Only the primary of each node computes digests, because the ranks of a node share the weights.
        module: the module. It must have the host's parameters.
        when: the time in words, for the error.

    Raises:
        ValueError: a node differs from node 0.
    """
    mine = {"CPU capability": torch.backends.cpu.get_cpu_capability()}
    if ranks.primary:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            tensors = dict(module.named_parameters())
            digests = pool.map(digest, tensors.values())
            mine |= {name: f"{each[:16]}…" for name, each in zip(tensors, digests, strict=True)}
    ranks.must_agree(
        f"digests of the weights {when}",
        mine,
        "Every node updates a replica of its own: make the same weights on all of them (seed_everything before the module is "
        "made, the same files), and change them on all alike.",
        primaries=True,
    )


def compare_optimizers(ranks: Ranks, optimizers: Sequence[Any]) -> None:
    """Compares the optimizers' classes, options and shapes of parameters. Collective.

    Only the primary's optimizers step, so options that differ on other ranks would have no effect.

    Raises:
        ValueError: the optimizers of a rank differ from those of rank 0.
    """
    groups = {
        f"{type(optimizer).__name__} {number}, group {index}": _group(group)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
    }
    ranks.must_agree("optimizers", groups, "Make the same optimizers in every process: those of rank 0 step for all.")


def _group(group: Mapping[str, Any]) -> str:
    simple = {name: value for name, value in group.items() if isinstance(value, (bool, int, float, str, tuple))}
    shapes = [tuple(parameter.shape) for parameter in group["params"]]
    return ", ".join(f"{name} {value}" for name, value in {**simple, "parameters of shapes": shapes}.items())


def compare_batches(ranks: Ranks, trainer: Any) -> None:
    """Compares the numbers of training and validation batches. Collective.

    Raises:
        ValueError: the numbers of a rank differ from those of rank 0.
    """
    ranks.must_agree(
        "numbers of batches",
        {"training batches": trainer.num_training_batches, "validation batches": tuple(trainer.num_val_batches)},
        "Give every rank the same number of batches: with use_distributed_sampler=True Lightning does so for data sets that have "
        "a length; otherwise cut them (limit_train_batches, drop_last=True).",
    )


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


# ---------------------------------------------------------------------- the network interface

VARIABLE = "GLOO_SOCKET_IFNAME"
_ADDRESS_OF = 0x8915  # SIOCGIFADDR of Linux


def choose_interface(address: str) -> None:
    """If the user has not named a network interface for gloo, sets the variable to the interface that leads to an address.

    Without the variable, gloo uses the address of the machine's own name. On many systems that is 127.0.1.1 (``/etc/hosts``),
    which other nodes cannot reach.

    Args:
        address: the address or the name of the first node.
    """
    if VARIABLE not in os.environ and (name := interface_to(address)) is not None:
        os.environ[VARIABLE] = name


def interface_to(address: str) -> str | None:
    """Returns the name of the network interface that leads to an address (IPv4).

    Returns None if no interface is found, or if the address is this machine's loopback address.
    """
    with suppress(OSError, ImportError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        import fcntl  # not at the top: Windows has no fcntl, and does not support several devices

        probe.connect((address, 9))  # sets only the socket's own address: a datagram socket sends nothing in `connect`
        mine = probe.getsockname()[0]
        if mine.startswith("127."):
            return None
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # the interface has no IPv4 address
                found = fcntl.ioctl(probe, _ADDRESS_OF, struct.pack("256s", name.encode()))
                if socket.inet_ntoa(found[20:24]) == mine:
                    return name
    return None
