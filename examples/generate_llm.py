"""Answer a file of prompts in batches, with a causal language model that is larger than the device's memory.

    python examples/generate_llm.py                                              # random weights, seconds on a CPU
    python examples/generate_llm.py --model runs/finetune_llm/model              # what finetune_llm.py wrote
    python examples/generate_llm.py --model meta-llama/Llama-3.1-70B --prompts prompts.txt --precision bf16-true \\
        --batch-size 16 --new-tokens 256                                         # 24 GiB on the GPU, 160 on the host *

Each token passes all layers through the device, so the larger the batch, the more tokens per second. Prompts of
different lengths are filled up on the left, where the attention mask hides it. Answers go to a file, one JSON object per line.
(* On paper, by ``python -m sp_lightning plan --predict``; it was not run.)
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from transformers import AutoConfig, PreTrainedTokenizerBase

if not __package__:  # started as a file: what lies beside it is found from the repository's root
    sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.console import indent, say, say_memory, say_speed
from examples.language import (
    HEAD,
    LAYERS,
    WIDTH,
    check_model,
    check_shape,
    load_language_model,
    small_llama,
)
from examples.recipe import (
    HOLDS_PREDICTION,
    add_run_options,
    check_file,
    check_least,
    check_positive,
    cuda_peak,
    make_trainer,
    plain_trainer,
    prepare_output,
    run,
)
from examples.text import load_tokenizer

PROMPTS = (
    "The value of",
    "If the class",
    "A function that is called with two arguments",
    "Changed in version 3.11:",
    "Names",
    "This statement raises an exception",
    "See also the section",
    "In Python, a generator is a function which",
)
SHOWN = 3  # answers on the screen


@dataclass(frozen=True)
class Result:
    """What a run came to.

    Attributes:
        prompts: that were answered.
        new_tokens: that were written, padding after an end left out.
        tokens_per_second: of these.
        peak_device_bytes, planned_device_bytes: weights on the device, counted and planned.
        plain_device_bytes: all weights, which plain prediction keeps there.
        answers: as in the file: ``prompt``, ``text`` (what follows it), ``tokens`` (how many).
        file: one JSON object per line.
    """

    prompts: int
    new_tokens: int
    tokens_per_second: float
    peak_device_bytes: int
    planned_device_bytes: int
    plain_device_bytes: int
    answers: list[dict[str, Any]]
    file: Path


def main(argv: Sequence[str] | None = None) -> Result:
    """Run the recipe; ``argv`` as on the command line."""
    parser = make_parser()
    options = parser.parse_args(argv)
    try:  # all that can be wrong with the input shows here, before any work
        check(options)
        tokenizer = load_tokenizer(options.model)
        prompts = Prompts(options.prompts, options.batch_size)
        check_room(prompts.lines, tokenizer, options)
        (folder,) = prepare_output(options.output, "")
        writer = JsonLines(folder / "answers.jsonl")
        trainer, strategy = make_trainer(options, callbacks=[writer])
    except (ValueError, OSError, MisconfigurationException) as error:
        parser.error(str(error))

    pl.seed_everything(options.seed, verbose=False)
    if options.model is None:
        say("No --model: weights are random, and so is the text. Take --model runs/finetune_llm/model, for example.")
        length = longest(prompts.lines, tokenizer) + options.new_tokens
        model = small_llama(options.layers, options.hidden, len(tokenizer), length, tokenizer.eos_token_id)
    else:
        model = load_language_model(options.model, options.precision)
    module = Writer(model, tokenizer, how(options))
    say(f"{len(prompts.lines)} prompts in batches of {options.batch_size}, {options.new_tokens} new tokens at most")

    batches = trainer.predict(module, datamodule=prompts)
    say(f"\n{strategy.plan}\n")
    answers = [answer for batch in batches or () for answer in batch]
    for answer in answers[:SHOWN]:
        say(f"{indent(answer['prompt'] + answer['text'])}\n")

    result = Result(
        prompts=len(answers),
        new_tokens=sum(answer["tokens"] for answer in answers),
        tokens_per_second=sum(answer["tokens"] for answer in answers) / module.seconds,
        peak_device_bytes=strategy.stats().peak_device_bytes,
        planned_device_bytes=strategy.plan.peak_device_bytes,
        plain_device_bytes=sum(p.nbytes for p in module.parameters()),
        answers=answers,
        file=writer.file,
    )
    say(f"{result.new_tokens:,} tokens in {module.seconds:.1f} s")
    say_speed(result.tokens_per_second, plain_tokens_per_second(options, module, prompts), "tokens")
    say_memory(
        strategy.plan,
        counted=result.peak_device_bytes,
        plain=result.plain_device_bytes,
        holds=HOLDS_PREDICTION,
        allocated=cuda_peak(trainer),
    )
    say(f"Answers: {result.file}")
    return result


def plain_tokens_per_second(options: argparse.Namespace, module: Writer, prompts: Prompts) -> float:
    """Of the first batch under plain Lightning; 0 where it does not fit."""
    module.seconds = 0.0
    try:
        batches = plain_trainer(options, limit_predict_batches=1).predict(module, datamodule=prompts)
    except torch.OutOfMemoryError:
        return 0.0
    return sum(answer["tokens"] for batch in batches or () for answer in batch) / module.seconds


class Writer(pl.LightningModule):
    """Writes on from each prompt of a batch, by Hugging Face's ``generate``.

    Args:
        model: a causal language model of transformers.
        tokenizer: its own.
        generation: options of ``generate``: ``max_new_tokens``, ``num_beams``, ``do_sample``, ...
    """

    def __init__(self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, generation: dict[str, Any]) -> None:
        super().__init__()
        self.model: Any = model.requires_grad_(False)  # the plan counts gradients of what could be trained
        self.tokenizer: Any = tokenizer
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.generation = generation
        self.seconds = 0.0  # in generate

    def predict_step(self, batch: list[str], batch_idx: int) -> list[dict[str, Any]]:
        # On the left: a model writes on from the last position, which must be the prompt's last token.
        asked = self.tokenizer(batch, return_tensors="pt", padding=True, padding_side="left").to(self.device)
        began = time.perf_counter()
        written = self.model.generate(
            input_ids=asked["input_ids"],
            attention_mask=asked["attention_mask"],
            pad_token_id=self.tokenizer.pad_token_id,
            **self.generation,
        )
        new = written[:, asked["input_ids"].shape[1] :].tolist()  # on the host: generate has ended by now
        self.seconds += time.perf_counter() - began
        kept = [self._until_end(row) for row in new]
        return [
            {"prompt": prompt, "text": self.tokenizer.decode(row, skip_special_tokens=True), "tokens": len(row)}
            for prompt, row in zip(batch, kept, strict=True)
        ]

    def _until_end(self, row: list[int]) -> list[int]:
        """The end token is written, padding after it is not."""
        ends = self.model.generation_config.eos_token_id
        ends = set(ends) if isinstance(ends, list) else {ends}
        return next((row[: at + 1] for at, token in enumerate(row) if token in ends), row)


class Prompts(pl.LightningDataModule):
    """Prompts in batches.

    Args:
        file: UTF-8, one prompt per line; None for some that end in the middle of a sentence.
        batch_size: prompts at once.

    Raises:
        ValueError: there is no prompt in the file, or it is no text.
    """

    def __init__(self, file: Path | None = None, batch_size: int = 4) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.lines = list(PROMPTS)
        if file is not None:
            try:
                self.lines = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
            except UnicodeDecodeError as error:
                raise ValueError(
                    f"--prompts {file}: is no UTF-8 text ({error}). Convert it: iconv -t utf-8."
                ) from error
            if not self.lines:
                raise ValueError(f"--prompts {file}: is empty. Write one prompt per line.")

    def predict_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.lines, batch_size=self.batch_size, collate_fn=list)  # type: ignore[arg-type]


class JsonLines(pl.Callback):
    """Writes what ``predict_step`` returned, an object per line.

    At the end and not batch by batch: a callback that acts between two batches could write weights for all the
    strategy knows, so it would fetch the layers that are on the device again.

    Args:
        file: an earlier one is replaced.
    """

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_predict_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.file.parent.mkdir(parents=True, exist_ok=True)
        with self.file.open("w", encoding="utf-8") as out:
            for batch in trainer.predict_loop.predictions:
                out.writelines(json.dumps(answer, ensure_ascii=False) + "\n" for answer in batch)


def how(options: argparse.Namespace) -> dict[str, Any]:
    """The options of ``generate``."""
    chosen: dict[str, Any] = {"max_new_tokens": options.new_tokens, "num_beams": options.beams, "do_sample": False}
    if options.sample:
        chosen |= {
            "do_sample": True,
            "temperature": options.temperature,
            "top_k": options.top_k,
            "top_p": options.top_p,
        }
    if options.static_cache:  # its memory is made once; what is compiled as a whole could not be streamed
        chosen |= {"cache_implementation": "static", "disable_compile": True}
    return chosen


# ---------------------------------------------------------------------- the command line


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("--model", help="folder or hub name of a causal language model (default: a small Llama, from random weights)")
    add("--prompts", type=Path, help="UTF-8 file, one prompt per line (default: eight beginnings of sentences)")
    add("--batch-size", type=int, default=4, help="prompts at once (%(default)s)")
    add("--new-tokens", type=int, default=32, help="per prompt, at most (%(default)s)")
    add("--beams", type=int, default=1, help="beam search with so many (%(default)s: greedy)")
    add("--sample", action="store_true", help="draw tokens instead of taking the likeliest")
    add("--temperature", type=float, default=0.8, help="of --sample (%(default)s)")
    add("--top-k", type=int, default=50, help="of --sample (%(default)s)")
    add("--top-p", type=float, default=0.95, help="of --sample (%(default)s)")
    add("--static-cache", action="store_true", help="keys and values in memory of a fixed size")
    add("--layers", type=int, help=f"layers of the default model ({LAYERS})")
    add("--hidden", type=int, help=f"width of the default model, a multiple of {HEAD} ({WIDTH})")
    add_run_options(parser, "generate_llm", training=False)
    return parser


def check(options: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: an option that cannot be.
    """
    check_least(options, batch_size=1, new_tokens=1, beams=1, top_k=1, layers=1)
    check_positive(options, "temperature", "top_p")
    if options.top_p > 1:
        raise ValueError(f"--top-p {options.top_p}: is a share of 1. For example --top-p 0.95.")
    check_file("--prompts", options.prompts, "a UTF-8 text file with a prompt per line")
    if options.model is not None:
        check_model(options.model)
    options.layers, options.hidden = check_shape(options.layers, options.hidden, options.model)


def longest(prompts: Sequence[str], tokenizer: Any) -> int:
    """Tokens of the longest prompt."""
    return max(len(tokens) for tokens in tokenizer(list(prompts))["input_ids"])


def check_room(prompts: Sequence[str], tokenizer: Any, options: argparse.Namespace) -> None:
    """
    Raises:
        ValueError: the longest prompt and its answer are more than the model reads.
    """
    if options.model is None:
        return
    room = getattr(AutoConfig.from_pretrained(options.model), "max_position_embeddings", None)
    needed = longest(prompts, tokenizer) + options.new_tokens
    if room is not None and needed > room:
        raise ValueError(
            f"The longest prompt and --new-tokens {options.new_tokens} are {needed} tokens; {options.model} reads {room} "
            "at most. Lower --new-tokens, or shorten the prompt."
        )


if __name__ == "__main__":
    run(main)
