"""Train a causal language model from random weights in so many hours on one card (Cramming, arXiv 2212.14034).

    python -m sp_lightning rates > rates.json                                  # a minute: what this machine computes
    python examples/demos/cram_llm.py --hours 0.05 --rates rates.json          # three minutes, no download
    python examples/demos/cram_llm.py --hours 0.05 --resume runs/cram_llm/checkpoint/last.ckpt  # one that was killed
    python examples/demos/cram_llm.py --hours 0.05 --pseudo 0.3 --plot curves.png  # Pseudo-to-Real (arXiv 2110.03888)
    python examples/demos/cram_llm.py --hours 24 --config examples/shapes/llama-3.2-3b.json --text my.txt \\
        --length 1024                                                          # not run

Time is what runs out, so everything follows the clock: the learning rate, the validations, the checkpoints and the end.
``python -m sp_lightning plan --hours`` chooses the batch. The order of events: plan, validate, train a part of the time,
validate, write a checkpoint, and so on; at the end what was planned beside what was reached.

With ``--pseudo`` one block takes the place of all for the first share of the time. It stays on the device, and nothing
streams. Then each block becomes one of its own and goes on from there: the loss is the same to the bit.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from hashlib import sha256
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.observe.plot import supported_formats

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import say, steps_per_second
from examples.demos.hours import (
    Clock,
    Curve,
    UntilTime,
    draw_curves,
    ends_of_parts,
    read_checkpoint,
    read_note,
    triangle,
)
from examples.demos.language import HEAD, LAYERS, WIDTH, CausalLM, causal_config, check_shape
from examples.demos.planned import Planned, ask_plan, read_plan, say_reached
from examples.demos.pseudo import delink, share_block
from examples.demos.recipe import add_run_options, check_file, check_least, check_positive, prepare_output, run
from examples.demos.text import VALIDATION_BATCHES, Batches, cut, in_order, read_text, split, train_tokenizer

CLIP, BETAS, EPS, DECAY = 0.5, (0.9, 0.98), 1e-12, 0.01  # the gradient's norm and AdamW's numbers are Cramming's
# a resumed run has the same
IDENTITY = ("hours", "batch_size", "accumulate_grad_batches", "length", "pseudo", "lr", "warmup", "precision", "seed")


@dataclass(frozen=True)
class Result:
    """What a run came to, together with those that it resumed.

    Attributes:
        losses: of each step.
        validations: loss on text that was held out: at the start, and after each part of the time, so at the end, too.
        tokens: trained.
        delinked: with ``--pseudo``, the loss on one window before and after blocks became ones of their own.
        seconds: of the budget, when the last lines were printed.
        checkpoint: of the end.
    """

    losses: list[float]
    validations: list[float]
    tokens: int
    delinked: tuple[float, float] | None
    seconds: float
    checkpoint: Path


class Crammed(CausalLM):
    """A language model whose learning rate follows the clock.

    Attributes:
        moments: by name of a parameter, the state that the optimizer begins with.
        note: what goes into a checkpoint.
    """

    def __init__(self, model: Any, options: argparse.Namespace, clock: Clock) -> None:
        super().__init__(model, options.lr)
        self.warmup, self.clock = options.warmup, clock
        self.moments: dict[str, dict[str, Tensor]] = {}
        self.note: Callable[[], dict[str, Any]] = dict

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.lr, betas=BETAS, eps=EPS, weight_decay=DECAY)
        for name, parameter in self.named_parameters():
            if name in self.moments:
                optimizer.state[parameter] = self.moments[name]
        # Lightning asks the schedule after each step. It looks at the clock, and not at the step's number.
        by_time = LambdaLR(optimizer, lambda _: triangle(self.clock.share(), self.warmup))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": by_time, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["cram"] = self.note()


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    clock = Clock()  # from here on, all time counts
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        text = read_text(options.text)
        tokenizer = train_tokenizer(text)
        windows = cut(tokenizer, text, length=options.length, batch_size=0)  # check_step says what is too short
        training, held_out = split(windows)
        check_step(training, options.batch_size or 1, options.accumulate_grad_batches or 1)
        config = causal_config(options.config, tokenizer, options.layers, options.hidden, options.length)
        if options.pseudo:
            with torch.device("meta"):
                share_block(AutoModelForCausalLM.from_config(config))
        identity = {name: getattr(options, name) for name in IDENTITY}
        identity["model"] = config.to_dict() | {"transformers_version": None}
        identity["text"] = sha256(text.encode()).hexdigest()
        saved = read_checkpoint(options.resume, identity)
        beside = {file.resolve().parent.parent.name: read_note(file)["curve"] for file in options.beside}
        clock.allot(3600 * options.hours, **saved.get("clock", {}))
        checkpoints, folder = prepare_output(options.output, "checkpoint", "model")
        config.save_pretrained(folder)
        planned = Planned(**saved["planned"]) if saved else choose_batch(options, folder, clock, training.numel())
        check_step(training, planned.batch, planned.accumulate)
        if clock.share() == 1:
            raise ValueError(
                f"Set-up took {clock.elapsed():.1f} of {clock.seconds:.1f} s. Give more --hours, or a --plan that was made."
            )
        make_trainer(options, planned, "real")
    except (ValueError, OSError, ImportError, MisconfigurationException) as error:
        parser.error(str(error))

    say(f"Text: {len(text):,} characters = {len(windows):,} windows of {options.length} tokens")
    say(f"A step: {planned.accumulate} × {planned.batch} windows, {planned.precision}, {planned.strategy}")
    curve = Curve(clock, **saved.get("curve", {}))
    validation = in_order(held_out, batch_size=planned.batch, most=VALIDATION_BATCHES)

    def new_module(phase: str) -> Crammed:
        dtype = torch.bfloat16 if planned.precision == "bf16-true" else torch.float32  # whatever the config says
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        return Crammed(share_block(model) if phase == "pseudo" else model, options, clock)

    def loss_of(phase: str, module: Crammed, batches: Batches) -> float:
        (metrics,) = make_trainer(options, planned, phase, logger=False).validate(module, batches, verbose=False)
        return metrics["val_loss"]

    def train(phase: str, module: Crammed) -> pl.Trainer:
        """All parts of a phase; those that the checkpoint has are done."""
        done: dict[str, Any] = saved if saved.get("phase") == phase else {"part": 0, "guard": 0.0}
        ends = ends_of_parts(phase, options.pseudo)
        size = {"batch": planned.batch, "accumulate": planned.accumulate}
        number = curve.steps_done * planned.accumulate
        batches = UntilTime(training, clock, ends, **size, seed=options.seed, part=done["part"], number=number)

        def note() -> dict[str, Any]:
            over = phase == "real" and (batches.part == len(ends) or clock.share() == 1)
            about = {"identity": identity, "planned": asdict(planned), "phase": phase, "is_over": over}
            return {**about, "part": batches.part, "clock": clock.state(), "curve": curve.state()}

        module.note = note
        # The batches end in time by themselves. The guard is for a step that takes far longer than those before it.
        left = max(0.0, clock.end() - clock.elapsed())
        guard = Timer(timedelta(seconds=done["guard"] + left), verbose=False)
        # keep_last writes at the end of all parts alone
        keep = ModelCheckpoint(checkpoints, "last", enable_version_counter=False, save_on_train_epoch_end=True)
        trainer = make_trainer(options, planned, phase, max_epochs=len(ends), logger=curve, callbacks=[guard, keep])
        trainer.fit(module, batches, validation, ckpt_path=options.resume if done is saved else None)
        return trainer

    # Validate, then train; or go on.
    pl.seed_everything(options.seed, verbose=False)
    phase = saved.get("phase", "pseudo" if options.pseudo else "real")
    module, delinked = new_module(phase), None
    if not saved:
        begun = clock.elapsed()
        curve.validated(loss_of(phase, module, validation))
        clock.ready = clock.elapsed()
        clock.closing = clock.ready - begun  # until the first part has ended
    trainer = train(phase, module)

    # One block becomes many, which does not change what the model says.
    if phase == "pseudo":
        shared, module, fixed = module, new_module("real"), in_order(held_out, batch_size=1, most=1)
        module.moments = delink(shared, module, trainer.optimizers[0])
        before, after = delinked = (loss_of("pseudo", shared, fixed), loss_of("real", module, fixed))
        say(f"The loss on one window is {before.hex()} with one block, and {after.hex()} with blocks of their own")
        if before != after:
            raise RuntimeError("The loss changed, and no weight did. This is a defect: please report it.")
        train("real", module)

    # The model, the picture, and what was planned beside what was reached.
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    losses, rate = curve.entries(), steps_per_second(*filter(None, curve.parts))
    if options.plot is not None:
        others = {name: Curve(clock, **curve_of).entries() for name, curve_of in beside.items()}
        draw_curves(options.plot, {options.output.resolve().name: losses, **others}, seconds=clock.seconds)
    result = Result(
        losses=[entry.loss for entry in losses],
        validations=[loss for _, loss in curve.validations],
        tokens=len(losses) * planned.accumulate * planned.batch * options.length,
        delinked=delinked,
        seconds=clock.elapsed(),
        checkpoint=checkpoints / "last.ckpt",
    )
    say(f"Loss on held-out text: {result.validations[0]:.3f} → {result.validations[-1]:.3f}")
    seconds = len(losses) / rate if rate else 0.0
    say_reached(planned, seconds=seconds, steps=len(losses), tokens=result.tokens)
    rest = result.seconds - clock.ready - seconds
    say(f"Set-up took {clock.ready:.1f} s; validations, checkpoints and the end took {rest:.1f} s")
    say(f"In all {result.seconds:.1f} of {clock.seconds:.1f} s, {result.seconds / clock.seconds:.1%} of the budget")
    return result


def choose_batch(options: argparse.Namespace, config: Path, clock: Clock, tokens: int) -> Planned:
    """Asks ``plan``, or reads what it answered before.

    Raises:
        ValueError: there is no plan.
    """
    given = {name: getattr(options, name) for name in ("k", "k_prime", "activations")}
    if options.plan is not None:
        return read_plan(options.plan.read_text(), f"--plan {options.plan}")
    if (
        options.batch_size and options.accumulate_grad_batches and options.rates is None
    ):  # the prediction would be of any machine
        strategy = {name: value for name, value in given.items() if value is not None}
        return Planned(options.batch_size, options.accumulate_grad_batches, strategy, options.precision or "32-true")
    given |= {name: getattr(options, name) for name in ("batch_size", "accumulate_grad_batches", "precision", "rates")}
    if torch.cuda.is_available() and options.accelerator != "cpu":
        given["gpu_memory"] = f"{torch.cuda.mem_get_info()[0]}B"
    elif options.rates is None:
        say(
            "The plan assumes a GPU (100 TFLOP/s), and this run computes on the CPU: it plans far too many steps, so the "
            "learning rate falls too late. Measure first: python -m sp_lightning rates > rates.json, then add --rates rates.json"
        )
    hours = (clock.end() - clock.elapsed()) / 3600
    return ask_plan(config, hours=hours, tokens=options.length, dataset_tokens=tokens, gradient_clip="norm", **given)


def make_trainer(options: argparse.Namespace, planned: Planned, phase: str, **more: Any) -> pl.Trainer:
    """As ever, but for ``strategy=``; one block alone stays on the device."""
    how: Mapping[str, Any] = {"keep_on_gpu": ["**"]} if phase == "pseudo" else planned.strategy
    return pl.Trainer(
        strategy=SuperpipelineStrategy(**how),  # plain Lightning: strategy="auto"
        accelerator=options.accelerator,
        devices=1,
        precision=planned.precision,  # type: ignore[arg-type]
        accumulate_grad_batches=planned.accumulate,
        gradient_clip_val=CLIP,
        log_every_n_steps=1,
        num_sanity_val_steps=0,
        enable_checkpointing="callbacks" in more,
        enable_progress_bar=False,  # Curve's lines say where the run is in its time
        enable_model_summary=False,
        **more,
    )


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--hours", type=float, default=0.05, help="from the start to the last line, set-up included (%(default)s)")
    add("--config", help="of a causal language model: a folder, a config.json, or a hub name (default: a small Llama)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's own help texts)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--rates", type=Path, help="for the plan, what `python -m sp_lightning rates` printed (default: assumed ones)")
    add(
        "--batch-size",
        type=int,
        help="windows at once (as planned; with --accumulate-grad-batches and without --rates nothing is planned)",
    )
    add("--accumulate-grad-batches", type=int, help="batches per step (as planned)")
    add("--plan", type=Path, help="what `python -m sp_lightning plan --hours … --json` printed (default: it is asked)")
    add("--lr", type=float, default=2e-3, help="highest learning rate (%(default)s)")
    add("--warmup", type=float, default=0.1, help="share of the time in which the learning rate rises (%(default)s)")
    add("--pseudo", type=float, default=0.0, help="share of the time with one block in place of all (%(default)s)")
    add("--resume", type=Path, help="checkpoint of a run with the same options, to use what is left of its time")
    add("--plot", type=Path, help="picture to draw of the losses over time; needs matplotlib")
    add("--beside", type=Path, nargs="+", default=[], help="checkpoints of other runs to draw in it")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add_run_options(parser, "cram_llm", planned=True)
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
    for name in ("batch_size", "accumulate_grad_batches", "rates", "k", "k_prime", "activations", "precision"):
        if options.plan is not None and getattr(options, name) is not None:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"--plan {options.plan} says all that {option} is for. Leave one of them out.")
    check_file("--text", options.text, "a UTF-8 text file")
    check_file("--rates", options.rates, "what `python -m sp_lightning rates` printed")
    check_file("--plan", options.plan, "what `python -m sp_lightning plan --hours … --json` printed")
    for option, files in (("--resume", [options.resume]), ("--beside", options.beside)):
        for file in files:
            check_file(option, file, "a last.ckpt that this recipe wrote")
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.config, "--config")
    if options.plot is not None and options.plot.suffix[1:] not in (formats := supported_formats()):
        raise ValueError(f"--plot {options.plot}: must end in one of {sorted(formats)}. For example --plot curves.png.")


def check_step(training: Tensor, batch: int, accumulate: int) -> None:
    """
    Raises:
        ValueError: the text is shorter than one step.
    """
    if len(training) < batch * accumulate:
        raise ValueError(
            f"The text is too short for one step: it has {len(training)} training windows, and --batch-size {batch} times "
            f"--accumulate-grad-batches {accumulate} are {batch * accumulate}. Give a longer --text, or lower these, or --length."
        )


if __name__ == "__main__":
    run(main)
