"""Text for language models, without a download: Python's help texts and sources, a tokenizer made from them, windows."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from examples.generate_llm import PROMPTS

VOCABULARY = 1024  # tokens of a tokenizer that is made here
HELD_OUT = 20  # one window in so many is for validation
VALIDATION_BATCHES = 8  # at most
SOURCES = 500_000  # characters of Python's sources, about


# ---------------------------------------------------------------------- where it comes from


def read_text(path: Path | None) -> str:
    """A UTF-8 file, or the help texts of Python's ``help("for")``: real English, half a million characters.

    Raises:
        ValueError: no such text.
    """
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


def read_sources() -> str:
    """The first modules of Python's standard library: another kind of text than :func:`read_text`'s.

    Raises:
        ValueError: this Python has no source files.
    """
    text = ""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("[a-z]*.py")):
        text += path.read_text(encoding="utf-8") + "\n\n"
        if len(text) > SOURCES:
            return text
    raise ValueError("This Python comes without the sources of its standard library. Give a text: --text FILE.")


# ---------------------------------------------------------------------- tokens


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


def load_tokenizer(model: str | None = None) -> PreTrainedTokenizerBase:
    """A model's own tokenizer (a folder, or a name on a hub), or one that is made from the help texts.

    Raises:
        ValueError: there is none.
    """
    if model is None:
        return train_tokenizer(read_text(None))
    try:
        return AutoTokenizer.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ValueError(f"--model {model}: no tokenizer could be loaded from there. {error}") from error


def cut(tokenizer: PreTrainedTokenizerBase, text: str, *, length: int, batch_size: int) -> Tensor:
    """The text as windows of tokens: int64, [windows, length].

    Raises:
        ValueError: the text is too short for one batch.
    """
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


def split(windows: Tensor) -> tuple[Tensor, Tensor]:
    """For training, and held out for validation."""
    held_out = torch.arange(len(windows)) % HELD_OUT == 0
    return windows[~held_out], windows[held_out]


# ---------------------------------------------------------------------- batches


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

    def of(self, trainer: pl.Trainer | None) -> Batches:
        """The share of one device: every so many batches. Lightning gives a DataLoader's samples out likewise, with a sampler;
        what is no DataLoader it leaves alone. All devices have as many batches: the first ones come again where some lack.
        """
        devices, rank = (trainer.world_size, trainer.global_rank) if trainer is not None else (1, 0)
        most = -(-len(self.picks) // devices) * devices
        return Batches(self.rows, [self.picks[i % len(self.picks)] for i in range(rank, most, devices)])


def shuffled(rows: Tensor, *, batch_size: int, steps: int, seed: int) -> Batches:
    """As many batches as there are steps; no row comes again before all have come."""
    random = torch.Generator().manual_seed(seed)
    rounds = -(-steps * batch_size // len(rows))
    order = torch.cat([torch.randperm(len(rows), generator=random) for _ in range(rounds)])
    return Batches(rows, order[: steps * batch_size].split(batch_size))


def in_order(rows: Tensor, *, batch_size: int, most: int) -> Batches:
    """At most ``most`` batches from the first row on."""
    return Batches(rows, torch.arange(len(rows)).split(batch_size)[:most])


class TextData(pl.LightningDataModule):
    """A text as batches of windows, for Lightning's CLI (``examples/configs/fit_llm.yaml``).

    Args:
        text: a UTF-8 file; None for Python's help texts.
        tokenizer: folder or hub name; None for one that is made from the help texts.
        length: tokens per window.
        batch_size: windows per step and device.
        steps: of training, each with a batch on every device.
        seed: of the order.
    """

    def __init__(
        self,
        text: Path | None = None,
        tokenizer: str | None = None,
        length: int = 64,
        batch_size: int = 16,
        steps: int = 100,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.text, self.tokenizer, self.length = text, tokenizer, length
        self.batch_size, self.steps, self.seed = batch_size, steps, seed

    def setup(self, stage: str) -> None:
        windows = cut(
            load_tokenizer(self.tokenizer), read_text(self.text), length=self.length, batch_size=self.batch_size
        )
        self.training, self.held_out = split(windows)

    def train_dataloader(self) -> Batches:
        batches = self.steps * (self.trainer.world_size if self.trainer else 1)
        return shuffled(self.training, batch_size=self.batch_size, steps=batches, seed=self.seed).of(self.trainer)

    def val_dataloader(self) -> Batches:
        return in_order(self.held_out, batch_size=self.batch_size, most=VALIDATION_BATCHES).of(self.trainer)


class PromptData(pl.LightningDataModule):
    """Prompts for Lightning's CLI (``examples/configs/predict_llm.yaml``).

    Args:
        file: UTF-8, one prompt per line; None for those of ``generate_llm.py``.
        batch_size: prompts at once.
    """

    def __init__(self, file: Path | None = None, batch_size: int = 4) -> None:
        super().__init__()
        self.file, self.batch_size = file, batch_size

    def predict_dataloader(self) -> Any:
        lines = PROMPTS if self.file is None else self.file.read_text(encoding="utf-8").splitlines()
        rows: Any = [{"prompt": line} for line in lines if line.strip()]
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=list)
