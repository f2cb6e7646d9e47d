"""Fine-tune every weight of a causal language model whose training state is larger than the device's memory.

    python examples/finetune_llm.py                                            # no download, minutes on a CPU
    python examples/finetune_llm.py --model meta-llama/Llama-3.2-1B --text my.txt --precision bf16-mixed

Without ``--model`` a small Llama starts from random weights and reads the language reference that comes with Python.
The order of events: sample, train the first half, write a checkpoint, resume it with a fresh model and trainer, train
the second half, sample again, compare the memory. The module and the trainer are plain Lightning; the one change is
``strategy=``.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerFast

from sp_lightning import Plan, SuperpipelineStrategy
from sp_lightning.plan import human_bytes

HEAD = 32  # numbers per attention head of the default model
VOCABULARY = 1024  # tokens of the default model
HELD_OUT = 20  # one window in so many is for validation
VALIDATION_BATCHES = 8  # at most


@dataclass(frozen=True)
class Result:
    """What a run came to.

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


# ---------------------------------------------------------------------- the recipe


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        tokenizer, text = load_tokenizer_and_text(options)
        windows = cut(tokenizer, text, length=options.length, batch_size=options.batch_size)
        make_model = model_maker(options, tokenizer)
        checkpoint, folder = prepare_output(options.output)
        console = ConsoleLogger(options.steps)
        trainer, strategy = make_trainer(options, console, checkpoint.parent, epochs=1)
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    validation = in_order(windows[held_out], batch_size=options.batch_size, most=VALIDATION_BATCHES)
    first_part = options.steps // 2
    settings = {"temperature": 0.8, "top_k": 50, "max_new_tokens": options.new_tokens, **padding(tokenizer)}
    prompt = in_order(tokenizer(options.prompt, return_tensors="pt")["input_ids"], batch_size=1, most=1)

    def batches(steps: int, seed: int) -> Batches:
        return shuffled(windows[~held_out], batch_size=options.batch_size, steps=steps, seed=seed)

    def sample(trainer: pl.Trainer, module: CausalLM) -> str:
        (tokens,) = trainer.predict(module, prompt)  # type: ignore[misc]
        return tokenizer.decode(tokens[0], skip_special_tokens=True)

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

    # Resume: nothing of the first part is left but the file.
    del module, trainer, strategy
    module = CausalLM(make_model(), options.lr, settings)
    resumed = ConsoleLogger(options.steps)
    trainer, strategy = make_trainer(options, resumed, checkpoint.parent, epochs=2)
    trainer.fit(module, batches(options.steps - first_part, seed=2), validation, ckpt_path=checkpoint)
    peak, allocated = max(peak, strategy.stats().peak_device_bytes), max(allocated, cuda_peak(trainer))
    val_loss = float(trainer.callback_metrics["val_loss"])
    resumed_step = resumed.losses[0].step - 1
    after = sample(trainer, module)
    say(f"\nAfter training:\n{indent(after)}\n")
    module.model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    losses = [entry.loss for entry in console.losses + resumed.losses]
    tail = losses[-max(1, len(losses) // 10) :]
    result = Result(
        first_loss=losses[0],
        last_loss=sum(tail) / len(tail),
        val_loss=val_loss,
        steps=trainer.global_step,
        resumed_step=resumed_step,
        peak_device_bytes=peak,
        planned_device_bytes=strategy.plan.peak_device_bytes,
        plain_device_bytes=plain_device_bytes(module),
        tokens_per_second=options.batch_size * options.length * steps_per_second(console.losses, resumed.losses),
        before=before,
        after=after,
        checkpoint=checkpoint,
        model=folder,
    )
    report(result, strategy.plan, console.losses[-1], resumed.losses[0], allocated)
    return result


class CausalLM(pl.LightningModule):
    """Any causal language model of transformers. Nothing in here knows how its layers get to the device."""

    def __init__(self, model: Any, lr: float, generation: dict[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.generation = generation

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("val_loss", self.model(input_ids=batch, labels=batch, use_cache=False).loss)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.generate(batch, attention_mask=torch.ones_like(batch), do_sample=True, **self.generation)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


def make_trainer(
    options: argparse.Namespace, logger: Logger, checkpoints: Path, *, epochs: int
) -> tuple[pl.Trainer, SuperpipelineStrategy]:
    """A trainer as ever, but for ``strategy=``. An epoch is one part: a resumed run begins where an epoch ended."""
    strategy = SuperpipelineStrategy(k=options.k, k_prime=options.k_prime)  # plain training: strategy="auto"
    trainer = pl.Trainer(
        strategy=strategy,
        accelerator=options.accelerator,
        devices=1,
        precision=options.precision,
        max_epochs=epochs,
        logger=logger,
        log_every_n_steps=1,
        callbacks=[ModelCheckpoint(checkpoints, save_top_k=0, save_last=True, save_on_train_epoch_end=True)],
        num_sanity_val_steps=0,
        enable_progress_bar=False,  # ConsoleLogger's lines can be read in a file, too
        enable_model_summary=False,
    )
    return trainer, strategy


# ---------------------------------------------------------------------- text


def load_tokenizer_and_text(options: argparse.Namespace) -> tuple[Any, str]:
    """The model's own tokenizer, or one trained on the text."""
    text = read_text(options.text)
    if options.model is None:
        return train_tokenizer(text), text
    try:
        return AutoTokenizer.from_pretrained(options.model), text
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {options.model}: no tokenizer could be loaded from there. {error}") from error


def read_text(path: Path | None) -> str:
    """Real English that needs no download: the help texts of Python's ``help("for")``, half a million characters."""
    if path is not None:
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"--text {path}: is no UTF-8 text ({error}). Convert it: iconv -t utf-8.") from error
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise ValueError("This Python comes without its help texts (pydoc_data). Give a text: --text FILE.") from error
    return "\n\n".join(topics.values())


def train_tokenizer(text: str) -> PreTrainedTokenizerFast:
    """A byte-level BPE, as GPT-2's."""
    end = "<|endoftext|>"
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[end], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(text.splitlines(keepends=True), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token=end, pad_token=end)


def cut(tokenizer: Any, text: str, *, length: int, batch_size: int) -> Tensor:
    """The text as windows of tokens: int64, [windows, length]."""
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    count = len(tokens) // length
    training = count - -(-count // HELD_OUT)
    if training < batch_size:
        raise ValueError(
            f"The text is too short for one batch: its {len(tokens):,} tokens make {training} training windows of "
            f"--length {length} (and {count - training} for validation), a batch takes --batch-size {batch_size}. "
            "Give a longer --text, or lower --length or --batch-size."
        )
    return torch.tensor(tokens[: count * length]).view(count, length)


class Batches:
    """Rows of a tensor in memory, batch by batch: a DataLoader's worker processes would gain nothing here.

    Args:
        rows: [rows, length].
        picks: the rows of each batch.
    """

    def __init__(self, rows: Tensor, picks: Sequence[Tensor]) -> None:
        self.rows = rows
        self.picks = picks

    def __len__(self) -> int:
        return len(self.picks)

    def __iter__(self) -> Iterator[Tensor]:
        return (self.rows[pick] for pick in self.picks)


def shuffled(rows: Tensor, *, batch_size: int, steps: int, seed: int) -> Batches:
    """As many batches as there are steps; no row comes again before all have come."""
    random = torch.Generator().manual_seed(seed)
    rounds = -(-steps * batch_size // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=random) for _ in range(rounds)])
    return Batches(rows, order[: steps * batch_size].split(batch_size))


def in_order(rows: Tensor, *, batch_size: int, most: int) -> Batches:
    """At most ``most`` batches from the first row on."""
    return Batches(rows, torch.arange(len(rows)).split(batch_size)[:most])


# ---------------------------------------------------------------------- model


def model_maker(options: argparse.Namespace, tokenizer: Any) -> Callable[[], Any]:
    """What makes the model, on the host; called once before the checkpoint and once after."""
    if options.model is None:
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=options.hidden,
            intermediate_size=3 * options.hidden,
            num_hidden_layers=options.layers,
            num_attention_heads=options.hidden // HEAD,
            num_key_value_heads=options.hidden // HEAD,
            max_position_embeddings=max(options.length, 256),
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        return lambda: AutoModelForCausalLM.from_config(config)
    longest = getattr(AutoConfig.from_pretrained(options.model), "max_position_embeddings", None)
    if longest is not None and options.length > longest:
        raise ValueError(f"--length {options.length}: {options.model} reads {longest} tokens at most. Lower --length.")
    dtype = torch.bfloat16 if options.precision == "bf16-true" else torch.float32

    def load() -> Any:
        # from_pretrained leaves it in eval mode, and Lightning trains in the mode that it finds
        return AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).train()

    return load


def padding(tokenizer: Any) -> dict[str, int]:
    """``generate`` asks for a padding token though one prompt needs none."""
    token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {} if token is None else {"pad_token_id": token}


def plain_device_bytes(module: pl.LightningModule) -> int:
    """What plain training keeps on the device: every weight, and for trainable ones a gradient and two moments."""
    return sum(p.nbytes * (4 if p.requires_grad else 1) for p in module.parameters())


def cuda_peak(trainer: pl.Trainer) -> int:
    """Most bytes that torch allocated on a CUDA device so far, activations included; 0 on others."""
    device = trainer.strategy.root_device
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


# ---------------------------------------------------------------------- what is shown


@dataclass(frozen=True)
class Entry:
    """One training step: its number from 1 on, its loss, and when it was logged, in seconds."""

    step: int
    loss: float
    seconds: float


class ConsoleLogger(Logger):
    """Keeps every loss and prints one in ten.

    A logger and no callback: a callback that acts between two batches could write weights for all the strategy knows,
    so it would not fetch the next batch's layers ahead.
    """

    def __init__(self, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.losses: list[Entry] = []

    @property
    def name(self) -> str:
        return "console"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "loss" in metrics and step is not None:
            entry = Entry(step + 1, metrics["loss"], time.perf_counter())
            self.losses.append(entry)
            if len(self.losses) == 1 or entry.step % max(1, self.steps // 10) == 0 or entry.step == self.steps:
                say(f"step {entry.step:>{len(str(self.steps))}}/{self.steps}  loss {entry.loss:.3f}")
        if "val_loss" in metrics:
            say(f"validation loss {metrics['val_loss']:.3f}")


def steps_per_second(*parts: Sequence[Entry]) -> float:
    """The first step of each part left out: it sets up. 0 if no part has another."""
    steps = sum(part[-1].step - part[0].step for part in parts)
    seconds = sum(part[-1].seconds - part[0].seconds for part in parts)
    return steps / seconds if steps else 0.0


def report(result: Result, plan: Plan, last: Entry, first: Entry, allocated: int) -> None:
    """The comparison that the recipe is for."""
    plain = result.plain_device_bytes
    say(f"Loss: {result.first_loss:.3f} → {result.last_loss:.3f}, on held-out text {result.val_loss:.3f}")
    say(f"Resumed at step {result.resumed_step}: loss {last.loss:.3f} before the checkpoint, {first.loss:.3f} after it")
    if result.tokens_per_second:
        say(f"Speed: {result.tokens_per_second:,.0f} tokens/s")
    say("Peak on the device:")
    say(f"  superpipeline, planned  {human_bytes(plan.peak_device_bytes):>10}   weights and gradients")
    say(f"  superpipeline, counted  {human_bytes(result.peak_device_bytes):>10}   weights and gradients")
    say(f"  plain, computed         {human_bytes(plain):>10}   weights, gradients and AdamW's moments")
    if allocated:
        say(f"  CUDA allocator, peak    {human_bytes(allocated):>10}   superpipeline with activations, measured")
    say(f"Model: {result.model} (go on with --model {result.model})")


def say(line: str) -> None:
    print(line, flush=True)  # at once, in a pipe too


def indent(text: str) -> str:
    return "\n".join(f"  | {line}" for line in text.splitlines())


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model (default: a small Llama, from random weights)")
    add("--text", type=Path, help="UTF-8 file to train on (default: Python's own help texts)")
    add("--steps", type=int, default=400, help="optimizer steps, half of them before the checkpoint (%(default)s)")
    add("--batch-size", type=int, default=16, help="windows of text per step (%(default)s)")
    add("--length", type=int, default=64, help="tokens per window (%(default)s)")
    add("--lr", type=float, help="learning rate (default: 2e-3 from random weights, 2e-5 with --model)")
    add("--k", type=int, default=2, help="layers usable on the device at once; more is faster (%(default)s)")
    add("--k-prime", type=int, default=1, help="layers that move as one transfer (%(default)s)")
    add("--precision", default="32-true", choices=["32-true", "bf16-mixed", "bf16-true"], help="(%(default)s)")
    add("--accelerator", default="auto", help="cpu, gpu, ... as in Lightning (%(default)s)")
    add("--prompt", default="The value of", help="begins the samples of text (%(default)r)")
    add("--new-tokens", type=int, default=48, help="tokens per sample (%(default)s)")
    add("--layers", type=int, help="layers of the default model (6)")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} (128)")
    add("--seed", type=int, default=0, help="(%(default)s)")
    add(
        "--output",
        type=Path,
        default=Path("runs/finetune_llm"),
        help="folder for the checkpoint and the model; an earlier run's are replaced (%(default)s)",
    )
    return parser


def check(options: argparse.Namespace) -> None:
    """Fill in the defaults that depend on others.

    Raises:
        ValueError: an option that cannot be.
    """
    least = {"steps": 2, "batch_size": 1, "length": 2, "k": 1, "k_prime": 1, "new_tokens": 1, "layers": 1}
    for name, minimum in least.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            option = "--" + name.replace("_", "-")
            raise ValueError(f"{option} {value}: must be at least {minimum}. For example {option} {max(minimum, 2)}.")
    if options.text is not None and not options.text.is_file():
        raise ValueError(f"--text {options.text}: there is no such file. Give a UTF-8 text file, or leave --text out.")
    if not options.prompt:
        raise ValueError('--prompt is empty: a sample needs a beginning. For example --prompt "The".')
    if options.model is not None:
        check_model(options.model)
        if options.layers is not None or options.hidden is not None:
            raise ValueError("--layers and --hidden shape the default model. Leave them out, or leave --model out.")
    options.layers = options.layers or 6
    options.hidden = 128 if options.hidden is None else options.hidden
    if options.hidden < HEAD or options.hidden % HEAD:
        raise ValueError(f"--hidden {options.hidden}: must be a multiple of {HEAD}. For example --hidden {8 * HEAD}.")
    if options.lr is None:
        options.lr = 2e-3 if options.model is None else 2e-5
    if options.lr <= 0:
        raise ValueError(f"--lr {options.lr}: must be above 0. For example --lr 2e-5.")


def check_model(model: str) -> None:
    """A path that is none would be looked up on the hub, and the message would be about the hub."""
    folder = Path(model)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"--model {model}: the folder has no config.json. Give one that save_pretrained wrote.")
    path_like = folder.is_absolute() or model.startswith((".", "~")) or len(folder.parts) > 2
    if path_like and not folder.is_dir():
        raise ValueError(f"--model {model}: there is no such folder. Give a folder, or a hub name such as owner/model.")


def prepare_output(output: Path) -> tuple[Path, Path]:
    """The checkpoint's file and the model's folder; an earlier run's stay until this one trains."""
    if output.exists() and not output.is_dir():
        raise ValueError(f"--output {output}: is a file. Give a folder; it is made if there is none.")
    checkpoint = output / "checkpoint" / "last.ckpt"
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(checkpoint.parent, os.W_OK):
        raise ValueError(f"--output {output}: cannot be written to. Give another folder.")
    return checkpoint, output / "model"


if __name__ == "__main__":
    # The recipe prints the plan once; the strategy would show it again in each of the four runs.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    main()
