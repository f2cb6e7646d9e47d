"""What several devices cannot do yet, refused in one place and before work begins."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from torch import nn

from sp_lightning.device.torch_private import accumulation_hooks
from sp_lightning.optim.scaler import HostGradScaler
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from sp_lightning.trainer.options import Options

_ONE = "Pass Trainer(devices=1)"


def refuse_on_ranks(module: pl.LightningModule, options: Options, plugin: Any) -> None:
    """Refuses what would differ from one device, or hang.

    Raises:
        ValueError: the module, an option or the precision is of such a kind.
    """
    if options.check_writes:
        raise ValueError(f"check_writes=True looks at the weights of one process. {_ONE} while you look.")
    if not isinstance(getattr(plugin, "scaler", None), HostGradScaler | None):
        raise ValueError(
            f"{type(plugin.scaler).__name__} scales gradients in a way of its own, which several devices cannot do once for all. "
            f"{_ONE}, or torch.amp.GradScaler."
        )
    # The bits of ddp could be had: with gloo each row is divided by the number of ranks, a rank's rows are added up, and then
    # those of the ranks in their order. But how many rows there are is not known before, so such a gradient has no place in the
    # memory that all ranks have, and the others would not see what the primary's unscaling and clipping make of it.
    for name, child in module.named_modules():
        if getattr(child, "sparse", False) and isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            raise ValueError(
                f"{name!r} has sparse gradients, which several devices do not sum. Make it with sparse=False, or pass "
                "Trainer(devices=1)."
            )
    for name, parameter in module.named_parameters():
        if accumulation_hooks(parameter):
            raise ValueError(
                f"{name!r} has a hook that runs after its gradient was accumulated (register_post_accumulate_grad_hook); with "
                f"several devices gradients are summed after that. {_ONE}, or use the hook on_before_optimizer_step."
            )


def refuse_checkpoint_io(io: Any) -> None:
    """Refuses what would write a file where all ranks write a folder.

    Raises:
        ValueError: it is no :class:`~sp_lightning.trainer.checkpoint_io.AtomicCheckpointIO`.
    """
    if type(io) is not AtomicCheckpointIO:
        raise ValueError(
            f"With save_distributed_checkpoint=True all ranks write checkpoints by torch.distributed.checkpoint, and not by a "
            f"{type(io).__name__}. Leave one of them out."
        )
