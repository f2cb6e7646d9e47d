"""Try several learning rates of LoRA (PEFT) at once: the trainings share the transfers of the frozen model.

    python examples/demos/sweep_lora.py                                         # no download, half a minute on a CPU
    python examples/demos/sweep_lora.py --compare                               # and the same one after the other
    python examples/demos/sweep_lora.py --model runs/finetune_llm/model --rates 1e-4 1e-3
    python examples/demos/sweep_lora.py --model meta-llama/Llama-3.1-70B --text my.txt --precision bf16-true \\
        --batch-size 1 --length 512 --activations recompute --k 1               # not run

Without ``--model`` a small Llama first learns English. Each learning rate is a *trial*: an ordinary
function that loads the model, adds adapters and fits them with a trainer of its own. ``SharedBase.map`` runs all of them in
threads of this process. A layer of the frozen model comes to the device once, and all trials use it before the next one comes.

The losses are bitwise those of trainings one after the other, which ``--compare`` checks.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sp_lightning import SharedBase
from sp_lightning.core.plan.units import human_bytes

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import ConsoleLogger, last_loss, say
from examples.demos.language import (
    HEAD,
    LAYERS,
    WIDTH,
    CausalLM,
    check_length,
    check_model,
    check_shape,
    load_language_model,
    small_llama,
)
from examples.demos.recipe import add_run_options, check_file, check_least, make_trainer, prepare_output, run
from examples.demos.text import (
    VALIDATION_BATCHES,
    cut,
    in_order,
    load_tokenizer,
    read_sources,
    read_text,
    shuffled,
    split,
)

RATES = [1e-3, 3e-3, 1e-2, 3e-2]
MODEL_RATES = [5e-5, 1e-4, 2e-4, 4e-4]  # with --model, which has learned more than a minute long


@dataclass(frozen=True)
class Trial:
    """What one learning rate came to.

    Attributes:
        rate: the learning rate.
        losses: of each step.
        last_loss: the mean over the last tenth of the steps.
        val_loss: on text that was held out, at the end.
        fetched_bytes: what came into the trial's own slots.
    """

    rate: float
    losses: list[float]
    last_loss: float
    val_loss: float
    fetched_bytes: int

    @property
    def bits(self) -> list[str]:
        """The losses in a form that is equal if and only if all bits are, where a loss is no number, too."""
        return [loss.hex() for loss in (*self.losses, self.val_loss)]


@dataclass(frozen=True)
class Result:
    """What the trials came to.

    Attributes:
        trials: in the order of the learning rates.
        seconds: of all trials at once, the loading of the model included.
        base_bytes: what came of the frozen model to the device, once for all trials.
        alone: the same trials one after the other; None without ``--compare``.
        alone_seconds: of these; None without ``--compare``.
    """

    trials: list[Trial]
    seconds: float
    base_bytes: int
    alone: list[Trial] | None = None
    alone_seconds: float | None = None


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        tokenizer, windows, lora = read_input(options)
        (base_folder,) = prepare_output(options.output, "base")
        make_trainer(options)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    pl.seed_everything(options.seed, verbose=False)
    if options.model is None:
        train_base(options, tokenizer, base_folder)
    source = options.model or str(base_folder)
    training, held_out = split(windows)

    def trial(rate: float) -> Trial:
        """One training, as one would write it for itself."""
        pl.seed_everything(options.seed, verbose=False)  # this trial's own: the others' random state is not touched
        # Under bf16-mixed, float32 weights would travel as casts, which trials do not share; the adapters are float32 there.
        model = load_language_model(source, "bf16-true" if options.precision == "bf16-mixed" else options.precision)
        module = CausalLM(get_peft_model(model, lora), rate)
        console = ConsoleLogger(options.steps, silent=True)
        trainer, strategy = make_trainer(options, logger=console, bar=False)  # bars of several trials would mix
        batches = shuffled(training, batch_size=options.batch_size, steps=options.steps, seed=1)
        trainer.fit(module, batches, in_order(held_out, batch_size=options.batch_size, most=VALIDATION_BATCHES))
        say(f"Learning rate {rate:g}: {trainer.global_step} steps are done")
        return Trial(
            rate=rate,
            losses=[entry.loss for entry in console.losses],
            last_loss=last_loss(console.losses),
            val_loss=float(trainer.callback_metrics["val_loss"]),
            fetched_bytes=strategy.stats().fetched_bytes,
        )

    say(f"{len(options.rates)} learning rates at once, {options.steps} steps each")
    base = SharedBase(options.max_trials)
    begun = time.perf_counter()
    result = Result(base.map(trial, options.rates), time.perf_counter() - begun, base.fetched_bytes)
    say_losses(result.trials)
    if options.compare:
        say("The same learning rates, one after the other")
        begun = time.perf_counter()
        alone = [trial(rate) for rate in options.rates]
        result = replace(result, alone=alone, alone_seconds=time.perf_counter() - begun)
        compare(result)
    return result


def say_losses(trials: Sequence[Trial]) -> None:
    """The table, with the best of the learning rates marked."""
    best = min(trials, key=lambda each: math.inf if math.isnan(each.val_loss) else each.val_loss)
    say(f"\n{'learning rate':>13}  {'first loss':>10}  {'last loss':>9}  {'held-out loss':>13}")
    for each in trials:
        figures = f"{each.rate:>13g}  {each.losses[0]:>10.3f}  {each.last_loss:>9.3f}  {each.val_loss:>13.3f}"
        say(figures + ("  (best)" if each is best else ""))
    say("")


def compare(result: Result) -> None:
    """Time and bytes of trials at once beside the same one after the other.

    Raises:
        RuntimeError: a loss differs in a bit.
    """
    assert result.alone is not None
    assert result.alone_seconds is not None
    for ours, alone in zip(result.trials, result.alone, strict=True):
        if ours.bits != alone.bits:
            step = next(i for i, pair in enumerate(zip(ours.bits, alone.bits, strict=True)) if pair[0] != pair[1])
            raise RuntimeError(
                f"The trial of learning rate {ours.rate:g} has other losses than alone, from number {step} on. This is a defect "
                "of SharedBase: please report it."
            )
    fetched = sum(each.fetched_bytes for each in result.alone)
    say(f"\n{'':>20}  {'seconds':>7}  bytes to the device")
    say(f"{'one after the other':>20}  {result.alone_seconds:>7.1f}  {human_bytes(fetched)}")
    say(f"{'at once':>20}  {result.seconds:>7.1f}  {human_bytes(result.base_bytes)} for all, and each one's adapters")
    say("All losses are bitwise the same.")


def read_input(options: argparse.Namespace) -> tuple[Any, Tensor, LoraConfig]:
    """The tokenizer, windows of text, int64 ``(windows, length)``, and the adapters.

    Raises:
        ValueError, OSError: the text, the model or a target does not exist.
    """
    text = read_sources() if options.text is None else read_text(options.text)
    tokenizer = load_tokenizer(options.model)
    windows = cut(tokenizer, text, length=options.length, batch_size=options.batch_size)
    targets = "all-linear" if options.targets is None else options.targets
    size = {"r": options.rank, "lora_alpha": 2 * options.rank, "lora_dropout": 0.05}
    lora = LoraConfig(task_type="CAUSAL_LM", target_modules=targets, **size)
    with torch.device("meta"):  # raises an error if the model has no such modules; without values, any size is cheap
        if options.model is None:
            model: Any = small_llama(options.layers, options.hidden)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
        get_peft_model(model, lora)
    return tokenizer, windows, lora


def train_base(options: argparse.Namespace, tokenizer: Any, folder: Path) -> None:
    """Trains and saves a small model, so that there is something to adapt."""
    windows, _ = split(cut(tokenizer, read_text(None), length=options.length, batch_size=options.batch_size))
    longest = max(options.length, 256)
    module = CausalLM(
        small_llama(options.layers, options.hidden, len(tokenizer), longest, tokenizer.eos_token_id), lr=2e-3
    )
    trainer, _ = make_trainer(options, logger=ConsoleLogger(options.base_steps))
    say(f"No --model: a small Llama learns English for {options.base_steps} steps, with all its weights")
    trainer.fit(module, shuffled(windows, batch_size=options.batch_size, steps=options.base_steps, seed=0))
    module.model.save_pretrained(folder)


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model (default: a small Llama, trained here first)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's standard library)")
    given, with_model = (" ".join(f"{rate:g}" for rate in rates) for rates in (RATES, MODEL_RATES))
    add("--rates", type=float, nargs="+", help=f"learning rates (default: {given}; with --model {with_model})")
    add("--max-trials", type=int, help="how many train at once at most; each takes memory (default: all)")
    add("--compare", action="store_true", help="train the same one after the other, too, and compare")
    add("--steps", type=int, default=40, help="of each trial (%(default)s)")
    add("--base-steps", type=int, default=60, help="of the default model's own training, before (%(default)s)")
    add("--batch-size", type=int, default=4, help="windows of text per step (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--rank", type=int, default=8, help="of the adapters (%(default)s)")
    add("--targets", nargs="+", help="names of linear modules that get adapters (all but the output head)")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add_run_options(parser, "sweep_lora")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on others.

    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, max_trials=1, steps=1, base_steps=1, batch_size=1, length=2, rank=1, layers=1)
    check_file("--text", options.text, "a UTF-8 text file")
    if options.model is not None:
        check_model(options.model)
        check_length(options.model, options.length)
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.model)
    if options.rates is None:
        options.rates = RATES if options.model is None else MODEL_RATES
    for rate in options.rates:
        if not rate > 0:
            raise ValueError(f"--rates {rate:g}: must be above 0. For example --rates 1e-4 3e-4.")


if __name__ == "__main__":
    run(main)
