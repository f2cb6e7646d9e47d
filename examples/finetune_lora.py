"""Adapt a causal language model with LoRA (PEFT): the frozen weights stream, and are left out of the checkpoint.

    python examples/finetune_lora.py                                            # no download, a minute on a CPU
    python examples/finetune_lora.py --model runs/finetune_llm/model            # what finetune_llm.py wrote
    python examples/finetune_lora.py --model meta-llama/Llama-3.1-70B --text my.txt --precision bf16-true \\
        --batch-size 4 --length 1024 --activations recompute --k 1              # 24 GiB on the GPU, 160 on the host *

Without ``--model`` a small Llama first learns English from Python's help texts, with all its weights, and LoRA then
adapts it to Python code, the sources of the standard library. The order of events: sample, train half of the adapters'
steps, write a checkpoint of the adapters alone, resume it with a fresh model and trainer, train the other half, sample
again, save the adapters (``save_pretrained``), merge them into the model, compare what the two say, compare the memory.
(* On paper, by ``python -m sp_lightning plan``; it was not run.)
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from sp_lightning.plan.units import human_bytes

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.console import ConsoleLogger, indent, last_loss, say, say_memory, say_speed, steps_per_second
from examples.language import (
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
from examples.recipe import (
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
from examples.text import VALIDATION_BATCHES, cut, in_order, load_tokenizer, read_sources, read_text, shuffled, split

# Merged weights are rounded once more: what logits may differ by, as a share of the largest.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2}


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        base_losses: first and last loss of the default model's own training, all weights; None with ``--model``.
        first_loss, last_loss: of the adapters' first step, and the mean over the last tenth of their steps.
        val_before, val_loss: on text that was held out, before the adapters and with them.
        steps: optimizer steps of the adapters.
        resumed_step: steps that the resumed trainer found done when it began.
        trained, parameters: numbers in the adapters, and in model and adapters.
        checkpoint_bytes, full_checkpoint_bytes: of the file, and with the frozen weights in it (computed).
        merged_difference: largest difference of the merged model's logits, as a share of the largest logit.
        peak_device_bytes, planned_device_bytes: weights and gradients on the device, counted and planned.
        plain_device_bytes: computed: what plain training keeps there.
        before, after: text generated before and after training, prompt included.
        checkpoint: the file that was resumed; now it holds the end.
        adapter, merged: folders for ``PeftModel.from_pretrained``, and for ``from_pretrained`` or ``--model``.
    """

    base_losses: tuple[float, float] | None
    first_loss: float
    last_loss: float
    val_before: float
    val_loss: float
    steps: int
    resumed_step: int
    trained: int
    parameters: int
    checkpoint_bytes: int
    full_checkpoint_bytes: int
    merged_difference: float
    peak_device_bytes: int
    planned_device_bytes: int
    plain_device_bytes: int
    before: str
    after: str
    checkpoint: Path
    adapter: Path
    merged: Path


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        text, tokenizer, windows, lora = read_input(options)
        base, checkpoints, adapter, merged = prepare_output(options.output, "base", "checkpoint", "adapter", "merged")
        console = ConsoleLogger(options.steps)
        trainer, strategy = make_trainer(
            options, epochs=1, logger=console, callbacks=[keep_last(checkpoints)], save_frozen=False
        )
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    pl.seed_everything(options.seed, verbose=False)
    base_losses = None if options.model else train_base(options, tokenizer, base)
    source = options.model or str(base)
    training, held_out = split(windows)
    validation = in_order(held_out, batch_size=options.batch_size, most=VALIDATION_BATCHES)
    checkpoint = checkpoints / "last.ckpt"
    settings = {"temperature": 0.8, "top_k": 50, "max_new_tokens": options.new_tokens, **padding(tokenizer)}
    tokens = tokenizer(options.prompt, return_tensors="pt")["input_ids"]
    prompt = in_order(tokens, batch_size=1, most=1)

    def make_module() -> CausalLM:
        """The same base each time, with new adapters; plain PEFT."""
        return CausalLM(get_peft_model(load_language_model(source, options.precision), lora), options.lr, settings)

    def sample(trainer: pl.Trainer, module: CausalLM) -> str:
        (written,) = trainer.predict(module, prompt)  # type: ignore[misc]
        return tokenizer.decode(written[0], skip_special_tokens=True)

    # Sample, train the first part of the adapters' steps, write a checkpoint.
    say(f"Text: {len(text):,} characters = {len(windows):,} windows of {options.length} tokens")
    module = make_module()
    trained, parameters = module.model.get_nb_trainable_parameters()
    before = sample(trainer, module)
    say(f"\n{strategy.plan}\n\nLoRA trains {trained:,} of {parameters:,} parameters.")
    say(f"Before training:\n{indent(before)}\n")
    val_before = trainer.validate(module, validation, verbose=False)[0]["val_loss"]
    first_part = options.steps // 2
    checkpoint.unlink(missing_ok=True)
    trainer.fit(module, shuffled(training, batch_size=options.batch_size, steps=first_part, seed=1), validation)
    peak, allocated = strategy.stats().peak_device_bytes, cuda_peak(trainer)
    checkpoint_bytes = checkpoint.stat().st_size
    full_bytes = checkpoint_bytes + sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    say(
        f"Checkpoint after step {trainer.global_step}: {checkpoint} ({human_bytes(checkpoint_bytes)}; "
        f"{human_bytes(full_bytes)} with the frozen weights)"
    )

    # Resume: nothing of the first part is left but the file, and the base model.
    del module, trainer, strategy
    module = make_module()
    resumed = ConsoleLogger(options.steps)
    trainer, strategy = make_trainer(
        options, epochs=2, logger=resumed, callbacks=[keep_last(checkpoints)], save_frozen=False
    )
    second = shuffled(training, batch_size=options.batch_size, steps=options.steps - first_part, seed=2)
    trainer.fit(module, second, validation, ckpt_path=checkpoint)
    peak, allocated = max(peak, strategy.stats().peak_device_bytes), max(allocated, cuda_peak(trainer))
    val_loss = float(trainer.callback_metrics["val_loss"])
    plain = plain_training_bytes(module)
    after = sample(trainer, module)
    say(f"\nAfter training:\n{indent(after)}\n")

    # Save the adapters, merge them, see that the merged model says the same.
    module.model.save_pretrained(adapter)
    difference = merge(module, tokens, merged)
    tokenizer.save_pretrained(merged)

    losses = console.losses + resumed.losses
    result = Result(
        base_losses=base_losses,
        first_loss=losses[0].loss,
        last_loss=last_loss(losses),
        val_before=val_before,
        val_loss=val_loss,
        steps=trainer.global_step,
        resumed_step=resumed.losses[0].step - 1,
        trained=trained,
        parameters=parameters,
        checkpoint_bytes=checkpoint_bytes,
        full_checkpoint_bytes=full_bytes,
        merged_difference=difference,
        peak_device_bytes=peak,
        planned_device_bytes=strategy.plan.peak_device_bytes,
        plain_device_bytes=plain,
        before=before,
        after=after,
        checkpoint=checkpoint,
        adapter=adapter,
        merged=merged,
    )
    say(f"Loss: {result.first_loss:.3f} → {result.last_loss:.3f}, on held-out text {val_before:.3f} → {val_loss:.3f}")
    say(f"Resumed at step {result.resumed_step}")
    more = shuffled(training, batch_size=options.batch_size, steps=PLAIN_STEPS + 1, seed=3)
    seen = options.batch_size * options.length
    speed = plain_steps_per_second(options, make_module(), more)
    say_speed(seen * steps_per_second(console.losses, resumed.losses), seen * speed, "tokens")
    say_memory(strategy.plan, counted=peak, plain=plain, holds=HOLDS_TRAINING, allocated=allocated)
    say(f"Adapters: {adapter}")
    say(f"Merged model: {merged} (go on with examples/generate_llm.py --model {merged})")
    return result


def train_base(options: argparse.Namespace, tokenizer: Any, folder: Path) -> tuple[float, float]:
    """A model that knows some English, so that there is something to adapt; its first and last loss."""
    windows, held_out = split(cut(tokenizer, read_text(None), length=options.length, batch_size=options.batch_size))
    validation = in_order(held_out, batch_size=options.batch_size, most=VALIDATION_BATCHES)
    longest = max(options.length, 256)
    module = CausalLM(
        small_llama(options.layers, options.hidden, len(tokenizer), longest, tokenizer.eos_token_id), lr=2e-3
    )
    console = ConsoleLogger(options.base_steps)
    trainer, _ = make_trainer(options, logger=console)
    say(f"No --model: a small Llama learns English for {options.base_steps} steps, with all its weights")
    batches = shuffled(windows, batch_size=options.batch_size, steps=options.base_steps, seed=0)
    trainer.fit(module, batches, validation)
    module.model.save_pretrained(folder)
    return console.losses[0].loss, last_loss(console.losses)


def merge(module: CausalLM, tokens: Tensor, folder: Path) -> float:
    """Adapters into the weights they belong to, on the host; how far the logits of a prompt move, of the largest.

    Raises:
        RuntimeError: farther than rounding explains.
    """
    with torch.inference_mode():
        logits = module.model.cpu().eval()(input_ids=tokens).logits
        model = module.model.merge_and_unload()
        difference = float((model(input_ids=tokens).logits - logits).abs().max() / logits.abs().max())
    tolerance = TOLERANCE[logits.dtype]
    said = (
        f"the merged model's logits differ by {difference:.1e} of the largest (rounding; {tolerance:.0e} is tolerated)"
    )
    if not difference <= tolerance:
        raise RuntimeError(said)
    say(said[0].upper() + said[1:])
    model.save_pretrained(folder)
    return difference


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model (default: a small Llama, trained here first)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's standard library)")
    add("--steps", type=int, default=150, help="of the adapters, half of them before the checkpoint (%(default)s)")
    add("--base-steps", type=int, default=150, help="of the default model's own training, before (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows of text per step (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--lr", type=float, help="learning rate (default: 5e-3 without --model, 2e-4 with it)")
    add("--rank", type=int, default=8, help="of the adapters (%(default)s)")
    add("--targets", nargs="+", help="names of linear modules that get adapters (all but the output head)")
    add("--prompt", default="def ", help="begins the samples of text (%(default)r)")
    add("--new-tokens", type=int, default=48, help="tokens per sample (%(default)s)")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add_run_options(parser, "finetune_lora")
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on others.

    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, steps=2, base_steps=1, batch_size=1, length=2, rank=1, new_tokens=1, layers=1)
    check_file("--text", options.text, "a UTF-8 text file")
    if not options.prompt:
        raise ValueError('--prompt is empty: a sample needs a beginning. For example --prompt "def ".')
    if options.model is not None:
        check_model(options.model)
        check_length(options.model, options.length)
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.model)
    if options.lr is None:
        options.lr = 5e-3 if options.model is None else 2e-4
    check_positive(options, "lr")


def read_input(options: argparse.Namespace) -> tuple[str, Any, Tensor, LoraConfig]:
    """The text, the tokenizer, windows of text, int64 ``(windows, length)``, and the adapters that the model can have.

    Raises:
        ValueError, OSError: there is no such text, model or target.
    """
    text = read_sources() if options.text is None else read_text(options.text)
    tokenizer = load_tokenizer(options.model)
    windows = cut(tokenizer, text, length=options.length, batch_size=options.batch_size)
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.05,
        target_modules="all-linear" if options.targets is None else options.targets,
    )
    check_targets(options, lora)
    return text, tokenizer, windows, lora


def check_targets(options: argparse.Namespace, lora: LoraConfig) -> None:
    """Adapters on a model without values, which costs nothing at any size.

    Raises:
        ValueError: there are no such modules, or they take no adapters.
    """
    with torch.device("meta"):
        if options.model is None:
            model: Any = small_llama(options.layers, options.hidden)
        else:
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(options.model))
        get_peft_model(model, lora)


if __name__ == "__main__":
    run(main)
