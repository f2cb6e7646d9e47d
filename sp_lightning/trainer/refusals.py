"""What several devices cannot do yet, refused in one place and before work begins."""

from __future__ import annotations

from typing import Any

from torch import nn

from sp_lightning.device.torch_private import accumulation_hooks
from sp_lightning.trainer.options import Options

_ONE = "Pass Trainer(devices=1)"


def refuse_on_ranks(module: nn.Module, options: Options, plugin: Any) -> None:
    """Refuses what would differ from one device, or hang.

    Raises:
        ValueError: the module, an option or the precision is of such a kind.
    """
    if options.check_writes:
        raise ValueError(f"check_writes=True looks at the weights of one process. {_ONE} while you look.")
    if options.optimizer_overlap in ("forward", "backward"):
        raise ValueError(
            f'optimizer_overlap="{options.optimizer_overlap}" works on one device. With several, optimizers step after backward: '
            f'use SuperpipelineStrategy(optimizer_overlap="off"), or pass Trainer(devices=1).'
        )
    if getattr(plugin, "scaler", None) is not None:
        raise ValueError(
            f'precision="16-mixed" scales the loss, which several devices do not do together yet. {_ONE}, or '
            'precision="bf16-mixed".'
        )
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
