"""The command ``convert``, and Lightning's commands ``fit``, ``validate``, ``test`` and ``predict``."""

from __future__ import annotations

import os
import pickle
import sys
from pathlib import Path

from sp_lightning.planner.arguments import PROGRAM
from sp_lightning.registry import needed_for
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO


def run_lightning(arguments: list[str]) -> None:
    """Runs Lightning's CLI.

    Args:
        arguments: the arguments of the command line. The first one is the command, for example ``fit``.

    Raises:
        ValueError, ImportError: the arguments name no model, a value in the configuration is invalid, or jsonargparse is missing.
    """
    named = [word.partition("=")[0] for word in arguments]
    if not {"--model", "--config", "-c", "--help", "-h", "--print_config"} & set(named):
        raise ValueError(
            f"no model. Expected --config FILE or --model package.Class. For example {PROGRAM} {arguments[0]} --config "
            "examples/configs/fit_llm.yaml"
        )
    from sp_lightning.planner.lightning_cli import SuperpipelineCLI, in_one_line

    try:
        # The CLI warns if it gets arguments while sys.argv has arguments, too. So it reads sys.argv if both are the same.
        SuperpipelineCLI(**({} if arguments == sys.argv[1:] else {"args": arguments}))
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise ImportError(f'{error} Install it: pip install "jsonargparse[signatures]".') from error
    except ValueError as error:
        raise ValueError(in_one_line(str(error))) from error


def run_convert(source: Path, target: Path, *, trust: bool) -> None:
    """Converts a checkpoint folder to a file of plain Lightning, or a file to a folder.

    Args:
        source: the checkpoint.
        target: the new checkpoint; it must not exist.
        trust: True if the checkpoint may contain other objects than tensors and plain values.

    Raises:
        ValueError, OSError: the checkpoint cannot be read or written, or the target exists.
    """
    io = AtomicCheckpointIO()
    if os.path.lexists(target):
        raise ValueError(f"{target} exists already. Name another target, or remove it.")
    try:
        checkpoint = io.load_checkpoint(source, weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source} contains more than tensors and plain values. If you trust it, add --trust. ({error})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{source} contains a {type(checkpoint).__name__}; expected a checkpoint.")
    if source.is_dir():
        io.save_checkpoint(checkpoint, target)
    else:
        with needed_for("A checkpoint folder", can_leave_out=False):
            from sp_lightning.ranks.checkpoint_folder import write
        write(checkpoint, target, {})
