"""``save_distributed_checkpoint=True``: all ranks write a checkpoint together, as a folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from sp_lightning.device.pages import was_written
from sp_lightning.ranks.agreement import own_state
from sp_lightning.ranks.checkpoint_folder import write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO, CheckpointFormat, local_path


class FolderFormat(CheckpointFormat):
    """A folder that all ranks write."""

    compares_state = True

    def check(self, io: Any) -> None:
        if type(io) is not AtomicCheckpointIO:
            raise ValueError(
                "With save_distributed_checkpoint=True all ranks write checkpoints by torch.distributed.checkpoint, and not by a "
                f"{type(io).__name__}. Leave one of them out."
            )

    def save(
        self, strategy: Any, checkpoint: Mapping[str, Any], path: Any, storage_options: Any, by_io: Callable[..., None]
    ) -> None:
        """Writes the folder. Collective, except after an error on this rank.

        After an error rank 0 writes alone, because other ranks may not reach the collectives. On other ranks it then does
        nothing. Outside of a run, all ranks take part, but only rank 0 writes tensors.
        """
        folder, run, group = _folder_for(path, storage_options), strategy._run, strategy._group
        with nullcontext() if run is None else run.host_parameters():
            own = {} if run is None or group.alone else common_tensors(strategy.lightning_module, strategy.optimizers)
            if not group.failure:
                try:
                    # If another rank has failed in a hook, the barrier raises an error that names the failed rank.
                    strategy.barrier("save_checkpoint")
                except BaseException as error:
                    # If user code saves a checkpoint because of this error, rank 0 then does not wait for other ranks.
                    group.fail(error)
                    raise
                write(checkpoint, folder, own)
            elif group.first:
                write(checkpoint, folder, own, alone=True)


def common_tensors(module: nn.Module, optimizers: Sequence[Any]) -> dict[str, Tensor]:
    """Returns the tensors that may be equal on several processes, by the names of their entries in a checkpoint folder.

    These are the optimizers' state of this process, and the weights to which this process has not written since the last update.
    """
    weights = module.named_parameters(remove_duplicate=False)
    return {f"state_dict.{name}": each for name, each in weights if not was_written(each)} | own_state(optimizers)


def _folder_for(path: Any, storage_options: Any | None) -> Path:
    """Returns the folder to which all ranks write a checkpoint.

    Raises:
        ValueError: the path is not on a file system of this machine.
        TypeError: there are options for another storage.
    """
    if storage_options is not None:
        raise TypeError(
            f"storage_options= is not supported with save_distributed_checkpoint=True, found {storage_options!r}. Leave it out."
        )
    folder = local_path(path)
    if folder is None:
        raise ValueError(
            f"With save_distributed_checkpoint=True ranks write to a file system that all nodes see, and {str(path)!r} is "
            "elsewhere. Name a folder, or leave the option out."
        )
    return folder
