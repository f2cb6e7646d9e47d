"""What ``fit_llm.yaml`` and ``predict_llm.yaml`` name beside the recipes: a small Llama, its tokenizer, texts and prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from examples.finetune_llm import common
from examples.generate_llm import PROMPTS


def small_llama(layers: int = 6, hidden: int = 96) -> nn.Module:
    """A Llama from random weights.

    Args:
        layers: transformer blocks.
        hidden: width, a multiple of 4.
    """
    config = common.small_llama(tokenizer())
    config.update({"num_hidden_layers": layers, "hidden_size": hidden, "head_dim": hidden // 4})
    return AutoModelForCausalLM.from_config(config)


def load_language_model(model: str) -> nn.Module:
    """Loads a model in float32 from a folder or a hub, in training mode: Lightning does not change the mode."""
    return AutoModelForCausalLM.from_pretrained(model, dtype="float32").train()


def tokenizer() -> PreTrainedTokenizerBase:
    return common.small_tokenizer()


class Texts(pl.LightningDataModule):
    """Rows of text as windows of tokens, as in ``finetune_llm.py``.

    Args:
        rows: a .jsonl, .parquet or .txt file, or a dataset on the hub; None for docstrings of Python.
        tokenizer: folder or hub name; None for one that is made from the docstrings.
        length: tokens per window.
        batch_size: windows per step and device.
    """

    def __init__(
        self,
        rows: str | None = None,
        tokenizer: str | None = None,
        length: int = 64,
        batch_size: int = 16,
    ) -> None:
        super().__init__()
        self.rows, self.tokenizer, self.length, self.batch_size = rows, tokenizer, length, batch_size

    def setup(self, stage: str) -> None:
        made = AutoTokenizer.from_pretrained(self.tokenizer) if self.tokenizer else common.small_tokenizer()
        self.held_out, self.training = common.pack(common.read_rows(self.rows), made, self.length)

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.training, self.batch_size, shuffle=True, drop_last=True)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.held_out, self.batch_size)


class Prompts(pl.LightningDataModule):
    """Prompts for ``generate_llm.py``'s module.

    Args:
        file: UTF-8, one prompt per line; None for those of ``generate_llm.py``.
        batch_size: prompts at once.
    """

    def __init__(self, file: Path | None = None, batch_size: int = 4) -> None:
        super().__init__()
        self.file, self.batch_size = file, batch_size

    def predict_dataloader(self) -> DataLoader[Any]:
        lines = PROMPTS if self.file is None else self.file.read_text(encoding="utf-8").splitlines()
        rows: Any = [{"prompt": line} for line in lines if line.strip()]
        return DataLoader(rows, batch_size=self.batch_size, collate_fn=list)
