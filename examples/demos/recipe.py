"""Common parts of the demonstrations: options of a run, checks of them, the trainer, the output folder, plain memory."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import Logger
from transformers.utils.logging import disable_progress_bar

from examples.demos.console import ConsoleLogger, steps_per_second
from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.plan.choices import ActivationChoice

HOLDS_TRAINING = "weights, gradients and the optimizer's state (AdamW's moments)"
PLAIN_STEPS = 5


def add_run_options(parser: argparse.ArgumentParser, name: str, *, training: bool = True) -> None:
    """Adds the common options; ``name`` is of the default output."""
    add = parser.add_argument
    add("--k", type=int, help="layers usable on the device at once; more is faster (default: what fits and is fastest)")
    add("--k-prime", type=int, help="layers that move as one transfer (default: as k)")
    if training:
        add(
            "--activations",
            default="auto",
            choices=["keep", "recompute", "offload", "auto"],
            help="what becomes of what autograd saves in each layer (%(default)s)",
        )
    add("--precision", default="32-true", choices=["32-true", "bf16-mixed", "bf16-true"], help="(%(default)s)")
    add("--accelerator", default="auto", help="cpu, gpu, ... as in Lightning (%(default)s)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("runs") / name,
        help="folder for results; an earlier run's are replaced (%(default)s)",
    )


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Whole numbers have a least value; k and k' have one everywhere.

    Raises:
        ValueError: one is below it.
    """
    for name, minimum in {"k": 1, "k_prime": 1, **least}.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {value}: must be at least {minimum}. For example {option} {max(minimum, 2)}.")


def check_positive(options: argparse.Namespace, *names: str) -> None:
    """
    Raises:
        ValueError: a number that is not above 0.
    """
    for name in names:
        value = getattr(options, name)
        if not value > 0:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {value}: must be above 0. For example {option} 2e-5.")


def check_file(option: str, path: Path | None, wanted: str) -> None:
    """
    Raises:
        ValueError: a file that was named and is not there.
    """
    if path is not None and not path.is_file():
        raise ValueError(f"{option} {path}: there is no such file. Give {wanted}, or leave {option} out.")


def prepare_output(output: Path, *folders: str) -> list[Path]:
    """Folders below the output; what an earlier run left in them stays until this one writes.

    Raises:
        ValueError: the output is a file, or cannot be written to.
    """
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output}: is a file. Give a folder; it is made if there is none.")
    output.mkdir(parents=True, exist_ok=True)
    for folder in [output, *(output / name for name in folders)]:
        if folder.exists() and not os.access(folder, os.W_OK):
            raise ValueError(f"--output {output}: {folder} cannot be written to. Give another folder.")
    return [output / name for name in folders]


def devices(options: argparse.Namespace) -> int:
    """How many devices train together; one, in demonstrations without that option."""
    return getattr(options, "devices", 1)


def make_trainer(
    options: argparse.Namespace,
    *,
    epochs: int = 1,
    logger: Logger | None = None,
    callbacks: Sequence[Callback] = (),
    bar: bool = True,
    **more: Any,
) -> tuple[pl.Trainer, SuperpipelineStrategy]:
    """A trainer as ever, but for ``strategy=``; ``bar`` allows a progress bar, ``more`` are further options of the strategy."""
    activations: ActivationChoice = getattr(options, "activations", "auto")
    window: dict[str, Any] = {name: getattr(options, name) for name in ("k", "k_prime") if getattr(options, name)}
    strategy = SuperpipelineStrategy(**window, activations=activations, **more)
    bar = bar and sys.stdout.isatty()  # ConsoleLogger's lines can be read in a file, too
    trainer = pl.Trainer(
        strategy=strategy,  # plain Lightning: strategy="auto"
        accelerator=options.accelerator,
        devices=devices(options),
        precision=options.precision,
        max_epochs=epochs,
        logger=logger or False,
        log_every_n_steps=1,
        callbacks=[*callbacks, *([TQDMProgressBar()] if bar else [])],
        enable_checkpointing=any(isinstance(each, ModelCheckpoint) for each in callbacks),
        num_sanity_val_steps=0,
        enable_progress_bar=bar,
        enable_model_summary=False,
    )
    return trainer, strategy


def plain_trainer(options: argparse.Namespace, **more: Any) -> pl.Trainer:
    """For some batches under plain Lightning, which print nothing."""
    quiet: dict[str, Any] = dict.fromkeys(
        ("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    return pl.Trainer(
        strategy="ddp" if devices(options) > 1 else "auto",
        accelerator=options.accelerator,
        devices=devices(options),
        precision=options.precision,
        **{"logger": False, **quiet, **more},
    )


def plain_steps_per_second(options: argparse.Namespace, module: pl.LightningModule, batches: Any) -> float:
    """A few steps more under plain Lightning, which train ``module`` on; 0 where it does not fit."""
    console = ConsoleLogger(PLAIN_STEPS + 1, silent=True)
    trainer = plain_trainer(
        options, max_steps=PLAIN_STEPS + 1, max_epochs=-1, logger=console, log_every_n_steps=1, limit_val_batches=0
    )
    try:
        with warnings.catch_warnings(action="ignore"):  # said of the run itself already, or of what is left out here
            trainer.fit(module, batches)
    except torch.OutOfMemoryError:
        return 0.0
    return steps_per_second(console.losses)


def keep_last(folder: Path) -> ModelCheckpoint:
    """Writes ``last.ckpt`` where training ends, in the place of an earlier run's."""
    return ModelCheckpoint(
        folder, save_top_k=0, save_last=True, save_on_train_epoch_end=True, enable_version_counter=False
    )


def plain_training_bytes(module: pl.LightningModule) -> int:
    """What plain training keeps on the device: every weight, and for trainable ones a gradient and two moments."""
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in module.parameters())


def cuda_peak(trainer: pl.Trainer) -> int:
    """Most bytes that torch allocated on a CUDA device so far, activations included; 0 on others."""
    strategy: Any = trainer.strategy
    return strategy.stats().peak_allocated_bytes if strategy.root_device.type == "cuda" else 0


def run(main: Callable[[], Any]) -> None:
    """From the command line. A demonstration prints its plan once; the strategy would show it in each of its runs."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    disable_progress_bar()  # of loading weights
    main()
