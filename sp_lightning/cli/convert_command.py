"""``convert``: a checkpoint that all ranks have written becomes Lightning's plain file, and the other way round."""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path

from sp_lightning.trainer.checkpoint_folder import write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO


def run_convert(arguments: list[str]) -> None:
    """Converts a checkpoint.

    Raises:
        SystemExit: the arguments are wrong, or the checkpoint cannot be read or written; the message says why.
    """
    parser = argparse.ArgumentParser(
        prog="python -m sp_lightning convert",
        description="A folder that SuperpipelineStrategy(save_distributed_checkpoint=True) has written becomes a file of "
        "plain Lightning's. A file becomes such a folder.",
    )
    parser.add_argument("source", type=Path, help="a checkpoint: a folder or a file")
    parser.add_argument("target", type=Path, help="what it becomes, a file or a folder; it must not be there")
    parser.add_argument(
        "--trust", action="store_true", help="read a checkpoint that holds other objects than tensors and plain values"
    )
    given = parser.parse_args(arguments)
    source, target, io = given.source, given.target, AtomicCheckpointIO()
    if os.path.lexists(target):
        parser.error(f"{target} is there already. Name another target, or remove it.")
    try:
        checkpoint = io.load_checkpoint(source, weights_only=not given.trust)
        if not isinstance(checkpoint, dict):
            raise ValueError(f"{source} holds a {type(checkpoint).__name__}, and no checkpoint.")
        if source.is_dir():
            io.save_checkpoint(checkpoint, target)
        else:
            write(checkpoint, target, {})
    except pickle.UnpicklingError as error:
        parser.exit(
            2,
            f"{parser.prog}: {source} holds more than tensors and plain values. If you trust it: --trust. ({error})\n",
        )
    except (OSError, ValueError) as error:
        parser.exit(2, f"{parser.prog}: {error}\n")
