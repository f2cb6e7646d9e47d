"""The commands: ``plan``, ``convert``, and those of Lightning's CLI, which finds this strategy registered."""

from __future__ import annotations

import logging
import os
import pickle
import sys
from pathlib import Path

from sp_lightning.cli.answer import answer
from sp_lightning.cli.arguments import Question
from sp_lightning.cli.report import as_json, as_text
from sp_lightning.device.torch_private import FAKE_TENSOR_LOGGER
from sp_lightning.observe.messages import working
from sp_lightning.observe.plot import Point, draw_windows, require_matplotlib


def run_plan(question: Question) -> None:
    """Answers on the standard output.

    Raises:
        ValueError, ImportError: the question cannot be answered.
        SystemExit: with status 1, because the model does not fit, or with status 3, because its activations are not known.
    """
    question.predict = question.predict or question.generate is not None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    # Others, torchao among them, have torch warn its own developers.
    logging.getLogger("torch").setLevel(logging.ERROR)
    # torch logs every error under its FakeTensorMode, and a size that the model cannot take is one.
    logging.getLogger(FAKE_TENSOR_LOGGER).setLevel(logging.CRITICAL)
    if question.plot is not None:
        require_matplotlib()
        question.plot.parent.mkdir(parents=True, exist_ok=True)
    try:
        answered = answer(question)
    finally:
        working("")
    print(as_json(answered) if question.json else as_text(answered), flush=True)
    if question.plot is not None:
        points = [
            Point(row.plan.k, row.plan.k_prime, row.device_bytes, row.prediction.seconds) for row in answered.rows
        ]
        draw_windows(points, question.gpu_memory, question.plot, f"{question.model}, {question.precision}")
    if answered.best is None:
        raise SystemExit(1)
    if answered.estimate.guessed:
        raise SystemExit(3)


def run_lightning(arguments: list[str]) -> None:
    """Runs Lightning's CLI.

    Raises:
        SystemExit: jsonargparse is not installed, or a value in the configuration is refused; the message says why.
    """
    try:
        from lightning.pytorch.cli import LightningCLI

        # With arguments of its own, the CLI warns that sys.argv has others.
        LightningCLI(args=arguments) if arguments != sys.argv[1:] else LightningCLI()
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise SystemExit(f'{error} Install it: pip install "sp_lightning[cli]".') from error
    except ValueError as error:
        # jsonargparse lists every type that it tried, and the value in full. The user needs the reasons alone.
        tried = str(error).partition("\nErrors:\n  - ")[2].partition("\nGiven value type:")[0].split("\n  - ")
        reasons = [reason for reason in tried if reason and not reason.startswith("Expected a ")]
        if not reasons:
            raise
        raise SystemExit(f"python -m sp_lightning {arguments[0]}: {' '.join(reasons)}") from error


def run_convert(source: Path, target: Path, *, trust: bool) -> None:
    """Converts a checkpoint: a folder becomes a file of plain Lightning's, a file becomes a folder.

    Args:
        source: the checkpoint.
        target: what is written; it must not be there.
        trust: whether the checkpoint may hold other objects than tensors and plain values.

    Raises:
        ValueError, OSError: the checkpoint cannot be read, or cannot be written.
    """
    # These import Lightning, which takes longer than a plan.
    from sp_lightning.trainer.checkpoint_folder import write
    from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO

    io = AtomicCheckpointIO()
    if os.path.lexists(target):
        raise ValueError(f"{target} is there already. Name another target, or remove it.")
    try:
        checkpoint = io.load_checkpoint(source, weights_only=not trust)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"{source} holds more than tensors and plain values. If you trust it: --trust. ({error})"
        ) from error
    if not isinstance(checkpoint, dict):
        raise ValueError(f"{source} holds a {type(checkpoint).__name__}, and no checkpoint.")
    if source.is_dir():
        io.save_checkpoint(checkpoint, target)
    else:
        write(checkpoint, target, {})
