"""Train a causal language model from random weights in so many hours on one card (Cramming, arXiv 2212.14034).

    python examples/demos/cram_llm.py --hours 0.05                             # three minutes, no download
    python examples/demos/cram_llm.py --hours 0.05 --resume runs/cram_llm/checkpoint/last.ckpt  # one that was killed
    python examples/demos/cram_llm.py --hours 0.05 --pseudo 0.3                # Pseudo-to-Real (arXiv 2110.03888)
    python examples/demos/cram_llm.py --hours 24 --config examples/shapes/llama-3.2-3b.json --text my.txt \\
        --length 1024                                                          # not run

Time is what runs out, so the learning rate follows the time and not the steps. ``Trainer(max_time=…)`` ends the run. Its timer
says how much of the time is over, and goes on from a checkpoint. The hours are those of training: set-up and two validations
come on top.

With ``--pseudo`` one block takes the place of all for the first share of the time. It stays on the device, and nothing
streams. Then each block becomes one of its own and goes on from there: the loss is the same to the bit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM

from sp_lightning import SuperpipelineStrategy

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import ConsoleLogger, Entry, say, steps_per_second
from examples.demos.language import HEAD, LAYERS, WIDTH, CausalLM, causal_config, check_shape
from examples.demos.pseudo import delink, share_block
from examples.demos.recipe import add_run_options, check_file, check_least, check_positive, prepare_output, run
from examples.demos.text import VALIDATION_BATCHES, Batches, cut, in_order, read_text, split, train_tokenizer

CLIP, BETAS, EPS, DECAY = 0.5, (0.9, 0.98), 1e-12, 0.01  # the gradient's norm and AdamW's numbers are Cramming's
PARTS = 8  # of the time, each of which ends with a checkpoint


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        losses: of each step.
        validations: loss on text that was held out, before and after.
        delinked: with ``--pseudo``, the loss on one window before and after blocks became ones of their own.
        checkpoint: the last one; a run that is killed goes on from there.
    """

    losses: list[float]
    validations: list[float]
    delinked: tuple[float, float] | None
    checkpoint: Path


def triangle(share: float, peak: float) -> float:
    """Cramming's learning rate, as a part of the highest: up from 0 until a share of the time, then down to 0 at its end."""
    return share / peak if share < peak else max(0.0, 1 - share) / (1 - peak)


class Crammed(CausalLM):
    """A language model whose learning rate follows the time.

    Attributes:
        before: seconds of training before this trainer's.
        seconds: of all training.
        moments: by name of a parameter, the state that the optimizer begins with.
    """

    def __init__(self, model: Any, options: argparse.Namespace, before: float) -> None:
        super().__init__(model, options.lr)
        self.warmup, self.seconds, self.before = options.warmup, 3600 * options.hours, before
        self.moments: dict[str, dict[str, Tensor]] = {}

    def share(self) -> float:
        """Returns the share of the training time that is over, from 0 to 1."""
        trainer: Any = self.trainer
        (timer,) = (each for each in trainer.callbacks if isinstance(each, Timer))  # of max_time
        return (self.before + timer.time_elapsed()) / self.seconds

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for name, parameter in self.named_parameters():
            if name in self.moments:
                optimizer.state[parameter] = self.moments[name]
        # Lightning asks the schedule after each step. It looks at the time, and not at the step's number.
        by_time = LambdaLR(optimizer, lambda _: triangle(self.share(), self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_time, "interval": "step"}}


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        text = read_text(options.text)
        tokenizer = train_tokenizer(text)
        step = options.batch_size * options.accumulate_grad_batches
        windows = cut(tokenizer, text, length=options.length, batch_size=step)
        training, held_out = split(windows)
        config = causal_config(options.config, tokenizer, options.layers, options.hidden, options.length)
        if options.pseudo:
            with torch.device("meta"):
                share_block(AutoModelForCausalLM.from_config(config))
        checkpoints, folder = prepare_output(options.output, "checkpoint", "model")
        done = steps_done(options.resume)
        make_trainer(options, "real")
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        parser.error(str(error))

    say(f"Text: {len(text):,} characters = {len(windows):,} windows of {options.length} tokens")
    parts: list[list[Entry]] = []
    validation = in_order(held_out, batch_size=options.batch_size, most=VALIDATION_BATCHES)
    seconds, begun = 3600 * options.hours, 3600 * options.hours * options.pseudo

    def new_module(phase: str) -> Crammed:
        dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32  # whatever the config says
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        if phase == "pseudo":
            return Crammed(share_block(model), options, 0.0)
        return Crammed(model, options, begun)

    def loss_of(phase: str, module: Crammed, batches: Batches) -> float:
        (metrics,) = make_trainer(options, phase, logger=False).validate(module, batches, verbose=False)
        return metrics["val_loss"]

    def train(phase: str, module: Crammed, *, resume: Path | None = None) -> pl.Trainer:
        time = timedelta(seconds=begun if phase == "pseudo" else seconds - begun)
        keep = ModelCheckpoint(checkpoints, "last", train_time_interval=time / PARTS, enable_version_counter=False)
        callbacks = [keep] if phase == "real" else []
        console = ConsoleLogger(0)
        more = {"max_time": time, "max_epochs": -1, "limit_val_batches": 0, "logger": console}
        trainer = make_trainer(options, phase, callbacks=callbacks, **more)
        random = torch.Generator().manual_seed(options.seed + done)  # a resumed run reads in another order
        rows: Any = training
        batches = DataLoader(rows, options.batch_size, shuffle=True, drop_last=True, generator=random)
        trainer.fit(module, batches, ckpt_path=resume)
        if console.losses:  # none if all of the time was over
            parts.append(console.losses)
        return trainer

    pl.seed_everything(options.seed, verbose=False)
    phase = "pseudo" if options.pseudo and options.resume is None else "real"
    module, delinked = new_module(phase), None
    first = loss_of(phase, module, validation)
    trainer = train(phase, module, resume=options.resume)

    # One block becomes many, which does not change what the model says.
    if phase == "pseudo":
        shared, module, fixed = module, new_module("real"), in_order(held_out, batch_size=1, most=1)
        module.moments = delink(shared, module, trainer.optimizers[0])
        before, after = delinked = (loss_of("pseudo", shared, fixed), loss_of("real", module, fixed))
        say(f"The loss on one window is {before.hex()} with one block, and {after.hex()} with blocks of their own")
        if before != after:
            raise RuntimeError("The loss changed, and no weight did. This is a defect: please report it.")
        train("real", module)

    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    last = loss_of("real", module, validation)
    say(f"Loss on held-out text: {first:.3f} → {last:.3f}")
    losses = [each.loss for part in parts for each in part]
    rate = step * options.length * steps_per_second(*parts)
    say(f"{len(losses):,} steps of {step * options.length:,} tokens, {rate:,.0f} tokens/s: {folder}")
    return Result(losses, [first, last], delinked, checkpoints / "last.ckpt")


def make_trainer(options: argparse.Namespace, phase: str, **more: Any) -> pl.Trainer:
    """As ever, but for ``strategy=``; one block alone stays on the device."""
    window = {name: getattr(options, name) for name in ("k", "k_prime") if getattr(options, name)}
    how: dict[str, Any] = window | {"activations": options.activations}
    return pl.Trainer(
        strategy=SuperpipelineStrategy(**({"keep_on_gpu": ["**"]} if phase == "pseudo" else how)),  # plain: "auto"
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        accumulate_grad_batches=options.accumulate_grad_batches,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing=bool(more.get("callbacks")),
        enable_progress_bar=False,  # ConsoleLogger's lines can be read in a file, too
        enable_model_summary=False,
        **more,
    )


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--hours", type=float, default=0.05, help="of training (%(default)s)")
    add("--config", help="of a causal language model: a folder, a config.json, or a hub name (default: a small Llama)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's own help texts)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows at once (%(default)s)")
    add("--accumulate-grad-batches", type=int, default=1, help="batches per step (%(default)s)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    add("--warmup", type=float, default=0.1, help="share of the time in which the learning rate rises (%(default)s)")
    add("--pseudo", type=float, default=0.0, help="share of the time with one block in place of all (%(default)s)")
    add("--resume", type=Path, help="checkpoint of a run with the same options, to use what is left of its time")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add_run_options(parser, "cram_llm")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on others.

    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, batch_size=1, accumulate_grad_batches=1, length=2, layers=1)
    check_positive(options, "hours", "lr", "warmup")
    for name, most in {"hours": math.inf, "lr": math.inf, "warmup": 1, "pseudo": 1}.items():
        if not 0 <= (value := getattr(options, name)) < most:
            raise ValueError(f"--{name} {value}: must be at least 0 and below {most}. For example --{name} 0.05.")
    check_file("--text", options.text, "a UTF-8 text file")
    check_file("--resume", options.resume, "a last.ckpt that this recipe wrote")
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.config, "--config")


def steps_done(file: Path | None) -> int:
    """The optimizer steps of the run that is resumed; 0 if none is.

    Raises:
        ValueError: it is no checkpoint.
    """
    try:
        return 0 if file is None else int(torch.load(file, weights_only=True, mmap=True)["global_step"])
    except (RuntimeError, LookupError, TypeError, UnpicklingError) as error:
        raise ValueError(
            f"--resume {file}: this is not a checkpoint of this recipe. Give a last.ckpt that the recipe wrote."
        ) from error


if __name__ == "__main__":
    run(main)
