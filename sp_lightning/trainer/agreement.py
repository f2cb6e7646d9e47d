"""What must be the same on all ranks, compared before work begins. Otherwise they would wait for each other, or part.

Buffers differ, and the primary's count, as under DistributedDataParallel.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn

from sp_lightning.device.ranks import Ranks
from sp_lightning.trainer.checkpoint_folder import own_state
from sp_lightning.trainer.compat import trainer_of
from sp_lightning.trainer.options import Options
from sp_lightning.weights.writes import digest


def compare_models(ranks: Ranks, module: pl.LightningModule, options: Options) -> None:
    """Compares modules, options of strategy and trainer, and versions. Collective.

    Raises:
        ValueError: some rank has others than rank 0.
    """
    parameters = {name: f"{_shape(p)}{'' if p.requires_grad else ', frozen'}" for name, p in module.named_parameters()}
    remedy = (
        "Build the same module in every process: what it depends on (arguments, files) must not depend on the rank."
    )
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


def compare_weights(ranks: Ranks, module: pl.LightningModule, when: str, optimizers: Sequence[Any] = ()) -> None:
    """Compares the weights of all nodes, each of which updates its own, and the kernels that do. Collective.

    Args:
        ranks: the ranks.
        module: has the host's parameters now.
        when: it is, in words.
        optimizers: whose state is compared, too.

    Raises:
        ValueError: some node has others than node 0.
    """
    mine = {"CPU capability": torch.backends.cpu.get_cpu_capability()}
    if ranks.primary:
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            tensors: dict[str, torch.Tensor] = dict(module.named_parameters())
            tensors |= {" ".join(map(str, path)): each for path, each in own_state(optimizers).items()}
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
    """Compares optimizers, of which only rank 0's step. Collective.

    Raises:
        ValueError: some rank has others than rank 0.
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
    """Compares how many batches the ranks will train and validate on. Collective.

    Raises:
        ValueError: some rank has fewer or more than rank 0.
    """
    counts = {"training": trainer.num_training_batches, "validation": tuple(trainer.num_val_batches)}
    ranks.must_agree(
        "numbers of batches",
        {f"{name} batches": count for name, count in counts.items()},
        "Give every rank the same number of batches: with use_distributed_sampler=True Lightning does so for data sets that have "
        "a length; otherwise cut them (limit_train_batches, drop_last=True).",
    )


def _shape(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)}"


def _said(value: Any) -> str:
    return type(value).__name__ if callable(value) else repr(value)


class Buffers:
    """Sends the primary's buffers to the others when DistributedDataParallel would: before a step, unless the last one was of
    validation; in manual optimization before the first step alone.

    Args:
        ranks: the ranks.
        module: whose buffers they are.
        phase: of the trainer. Outside of training the buffers are sent once.
    """

    def __init__(self, ranks: Ranks, module: pl.LightningModule, phase: TrainerFn | None) -> None:
        self._ranks = ranks
        self._module = module
        self._training = phase == TrainerFn.FITTING
        self._due = self._training
        self.send()

    def send(self) -> None:
        """Overwrites everybody's buffers by the primary's. Collective."""
        self._ranks.broadcast([buffer for buffer in self._module.buffers() if buffer.numel()])

    def step_begins(self) -> None:
        """A step of a loop begins on all ranks."""
        if self._due:
            self.send()
        # In manual optimization Lightning's ddp has them sent once: its forward ends without a backward that sums.
        self._due = self._training and torch.is_grad_enabled() and self._module.automatic_optimization
