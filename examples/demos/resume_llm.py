"""Fine-tune every weight of a causal language model whose training state is larger than the device's memory.

    python examples/demos/resume_llm.py                                      # no download, minutes on a CPU
    python examples/demos/resume_llm.py --model meta-llama/Llama-3.2-1B --text my.txt --precision bf16-mixed
    python examples/demos/resume_llm.py --devices 2 --accelerator cpu        # two processes, one host store

Without ``--model`` a small Llama starts from random weights and reads the language reference that comes with Python.
The order of events: sample, train the first half, write a checkpoint, resume it with a fresh model and trainer, train
the second half, sample again, compare the memory. The module and the trainer are plain Lightning; the one change is
``strategy=``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from sp_lightning import Plan
from sp_lightning.core.plan.units import human_bytes

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[2]))

from examples.demos.console import ConsoleLogger, Entry, indent, last_loss, say, say_memory, say_speed, steps_per_second
from examples.demos.language import (
    HEAD,
    LAYERS,
    WIDTH,
    CausalLM,
    check_length,
    check_model,
    check_shape,
    load_language_model,
    padding,
    small_llama,
)
from examples.demos.recipe import (
    HOLDS_TRAINING,
    PLAIN_STEPS,
    add_run_options,
    check_file,
    check_least,
    check_positive,
    cuda_peak,
    keep_last,
    make_trainer,
    plain_steps_per_second,
    plain_training_bytes,
    prepare_output,
    run,
)
from examples.demos.text import (
    VALIDATION_BATCHES,
    Batches,
    cut,
    in_order,
    load_tokenizer,
    read_text,
    shuffled,
    split,
    train_tokenizer,
)


@dataclass(frozen=True)
class Result:
    """The results of a run.

    Attributes:
        first_loss, last_loss: of the first training step, and the mean over the last tenth of the steps.
        val_loss: on text that was held out, at the end.
        steps: optimizer steps in total.
        resumed_step: steps that the resumed trainer found done when it began.
        peak_device_bytes: most memory that weights and gradients took on the device, counted by the strategy.
        planned_device_bytes: the same, as the plan said before the first step.
        plain_device_bytes: computed: weights, gradients and AdamW's moments, which plain training keeps there.
        tokens_per_second: of training alone; 0 where neither half has two steps.
        before, after: text generated before and after training, prompt included.
        checkpoint: the file that was resumed; now it holds the end.
        model: folder for ``--model`` or ``from_pretrained``.
    """

    first_loss: float
    last_loss: float
    val_loss: float
    steps: int
    resumed_step: int
    peak_device_bytes: int
    planned_device_bytes: int
    plain_device_bytes: int
    tokens_per_second: float
    before: str
    after: str
    checkpoint: Path
    model: Path


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        text = read_text(options.text)
        tokenizer = train_tokenizer(text) if options.model is None else load_tokenizer(options.model)
        windows = cut(tokenizer, text, length=options.length, batch_size=options.batch_size)
        make_model = model_maker(options, tokenizer)
        checkpoints, folder = prepare_output(options.output, "checkpoint", "model")
        console = ConsoleLogger(options.steps)
        trainer, strategy = make_trainer(options, epochs=1, logger=console, callbacks=[keep_last(checkpoints)])
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    training, held_out = split(windows)
    validation = in_order(held_out, batch_size=options.batch_size, most=VALIDATION_BATCHES).of(trainer)
    checkpoint = checkpoints / "last.ckpt"
    first_part = options.steps // 2
    settings = {"temperature": 0.8, "top_k": 50, "max_new_tokens": options.new_tokens, **padding(tokenizer)}
    prompt = in_order(tokenizer(options.prompt, return_tensors="pt")["input_ids"], batch_size=1, most=1)

    def batches(steps: int, seed: int) -> Batches:
        every = steps * options.devices
        return shuffled(training, batch_size=options.batch_size, steps=every, seed=seed).of(trainer)

    def sample(trainer: pl.Trainer, module: CausalLM) -> str:
        (written,) = trainer.predict(module, prompt)  # type: ignore[misc]
        return tokenizer.decode(written[0], skip_special_tokens=True)

    # Sample, train the first part, write a checkpoint.
    say(f"Text: {len(text):,} characters = {len(windows):,} windows of {options.length} tokens")
    pl.seed_everything(options.seed, verbose=False)
    module = CausalLM(make_model(), options.lr, settings)
    before = sample(trainer, module)
    checkpoint.unlink(missing_ok=True)
    say(f"\n{strategy.plan}\n\nBefore training:\n{indent(before)}\n")
    trainer.fit(module, batches(first_part, seed=1), validation)
    peak, allocated = strategy.stats().peak_device_bytes, cuda_peak(trainer)
    say(f"Checkpoint after step {trainer.global_step}: {checkpoint} ({human_bytes(checkpoint.stat().st_size)})")

    # Resume: nothing of the first part is left but the file. An epoch is one part: a resumed run begins where one ended.
    del module, trainer, strategy
    module = CausalLM(make_model(), options.lr, settings)
    resumed = ConsoleLogger(options.steps)
    trainer, strategy = make_trainer(options, epochs=2, logger=resumed, callbacks=[keep_last(checkpoints)])
    trainer.fit(module, batches(options.steps - first_part, seed=2), validation, ckpt_path=checkpoint)
    peak, allocated = max(peak, strategy.stats().peak_device_bytes), max(allocated, cuda_peak(trainer))
    val_loss = float(trainer.callback_metrics["val_loss"])
    resumed_step, plan = resumed.losses[0].step - 1, strategy.plan  # generation has a plan of its own
    after = sample(trainer, module)
    say(f"\nAfter training:\n{indent(after)}\n")
    if trainer.is_global_zero:
        module.model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    losses, tokens = console.losses + resumed.losses, options.batch_size * options.length * options.devices
    result = Result(
        first_loss=losses[0].loss,
        last_loss=last_loss(losses),
        val_loss=val_loss,
        steps=trainer.global_step,
        resumed_step=resumed_step,
        peak_device_bytes=peak,
        planned_device_bytes=plan.peak_device_bytes,
        plain_device_bytes=plain_training_bytes(module),
        tokens_per_second=tokens * steps_per_second(console.losses, resumed.losses),
        before=before,
        after=after,
        checkpoint=checkpoint,
        model=folder,
    )
    plain = plain_steps_per_second(options, module, batches(PLAIN_STEPS + 1, seed=3))
    report(result, plan, console.losses[-1], resumed.losses[0], allocated, plain * tokens)
    return result


def model_maker(options: argparse.Namespace, tokenizer: Any) -> Callable[[], Any]:
    """What makes the model, on the host; called once before the checkpoint and once after."""
    if options.model is None:
        return lambda: small_llama(
            options.layers, options.hidden, len(tokenizer), max(options.length, 256), tokenizer.eos_token_id
        )
    check_length(options.model, options.length)
    return lambda: load_language_model(options.model, options.precision)


def report(result: Result, plan: Plan, last: Entry, first: Entry, allocated: int, plain: float) -> None:
    """The comparison that the recipe is for."""
    say(f"Loss: {result.first_loss:.3f} → {result.last_loss:.3f}, on held-out text {result.val_loss:.3f}")
    say(f"Resumed at step {result.resumed_step}: loss {last.loss:.3f} before the checkpoint, {first.loss:.3f} after it")
    say_speed(result.tokens_per_second, plain, "tokens")
    say_memory(
        plan,
        counted=result.peak_device_bytes,
        plain=result.plain_device_bytes,
        holds=HOLDS_TRAINING,
        allocated=allocated,
    )
    say(f"Model: {result.model} (go on with --model {result.model})")


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model (default: a small Llama, from random weights)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's own help texts)")
    add("--steps", type=int, default=400, help="optimizer steps, half of them before the checkpoint (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows of text per step and device (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--lr", type=float, help="learning rate (default: 2e-3 from random weights, 2e-5 with --model)")
    add("--prompt", default="The value of", help="begins the samples of text (%(default)r)")
    add("--new-tokens", type=int, default=48, help="tokens per sample (%(default)s)")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add("--devices", type=int, default=1, help="devices that train together, a process each (%(default)s)")
    add_run_options(parser, "resume_llm")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on others.

    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, steps=2, batch_size=1, length=2, new_tokens=1, layers=1, devices=1)
    check_file("--text", options.text, "a UTF-8 text file")
    if not options.prompt:
        raise ValueError('--prompt is empty: a sample needs a beginning. For example --prompt "The".')
    if options.model is not None:
        check_model(options.model)
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.model)
    if options.lr is None:
        options.lr = 2e-3 if options.model is None else 2e-5
    check_positive(options, "lr")


if __name__ == "__main__":
    run(main)
