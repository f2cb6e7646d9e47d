"""Causal language models: a small Llama from random weights, or one that ``from_pretrained`` loads; and their module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from examples.demos.text import VOCABULARY

HEAD = 32  # numbers per attention head of the small Llama
WIDTH, LAYERS = 128, 6  # of the small Llama, where nothing else is said


class CausalLM(pl.LightningModule):
    """Any causal language model of transformers. Nothing in here knows how its layers get to the device.

    Args:
        model: of transformers.
        lr: learning rate of AdamW.
        generation: options of ``generate`` in ``predict_step``.
    """

    def __init__(self, model: nn.Module, lr: float, generation: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.model: Any = model
        self.lr = lr
        self.generation = generation or {}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        loss = self.model(input_ids=batch, labels=batch, use_cache=False).loss
        self.log("val_loss", loss, sync_dist=True)  # the mean over the devices, if there are several

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model.generate(
            input_ids=batch, attention_mask=torch.ones_like(batch), do_sample=True, **self.generation
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr)


def small_llama(
    layers: int = LAYERS, hidden: int = WIDTH, vocabulary: int = VOCABULARY, longest: int = 256, end: int = 0
) -> nn.Module:
    """A Llama from random weights.

    Args:
        layers: transformer blocks.
        hidden: width, a multiple of 32.
        vocabulary: tokens; ``examples.demos.text.load_tokenizer()`` has as many as the default.
        longest: tokens that it reads at most.
        end: the token that ends a text, and fills up short ones.
    """
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // HEAD,
        num_key_value_heads=hidden // HEAD,
        max_position_embeddings=longest,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end,
        pad_token_id=end,
    )
    return AutoModelForCausalLM.from_config(config)


def causal_config(config: str | None, tokenizer: Any, layers: int, hidden: int, length: int) -> Any:
    """Of a model that is to have random weights.

    Args:
        config: a folder, a ``config.json`` or a hub name; None for the small Llama.
        tokenizer: whose tokens it reads.
        layers, hidden: of the small Llama.
        length: tokens that it reads at most.

    Raises:
        ValueError: it cannot read them.
        OSError: there is no such config.
    """
    if config is None:
        return small_llama(layers, hidden, len(tokenizer), max(length, 256), tokenizer.eos_token_id).config
    found = AutoConfig.from_pretrained(config)
    for name, least in {"max_position_embeddings": length, "vocab_size": len(tokenizer)}.items():
        if getattr(found, name, least) < least:
            raise ValueError(f"--config {config}: {name} is {getattr(found, name)}, and at least {least} is needed.")
    return found


def load_language_model(model: str, precision: str = "32-true") -> nn.Module:
    """``from_pretrained``: a folder, or a name on a hub; half precision only where the trainer's is."""
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    # from_pretrained leaves it in eval mode, and Lightning trains in the mode that it finds
    return AutoModelForCausalLM.from_pretrained(model, dtype=dtype).train()


def check_model(model: str) -> None:
    """A path that is none would be looked up on the hub, and the message would be about the hub.

    Raises:
        ValueError: such a path.
    """
    folder = Path(model)
    if (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file():
        raise ValueError(f"--model {model}: the folder has adapters alone. Give the model that they are merged into.")
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise ValueError(f"--model {model}: the folder has no config.json. Give one that save_pretrained wrote.")
    path_like = folder.is_absolute() or model.startswith((".", "~")) or len(folder.parts) > 2
    if path_like and not folder.is_dir():
        raise ValueError(
            f"--model {model}: the folder does not exist. Give a folder, or a hub name such as owner/model."
        )


def check_length(model: str, length: int) -> None:
    """
    Raises:
        ValueError: the model reads fewer tokens.
        OSError: there is no such model.
    """
    longest = getattr(AutoConfig.from_pretrained(model), "max_position_embeddings", None)
    if longest is not None and length > longest:
        raise ValueError(f"--length {length}: {model} reads {longest} tokens at most. Lower --length.")


def check_shape(layers: int | None, hidden: int | None, model: str | None, option: str = "--model") -> tuple[int, int]:
    """Layers and width of the small Llama.

    Raises:
        ValueError: what it cannot be made of, or another model beside them, which ``option`` names.
    """
    if model is not None and (layers, hidden) != (None, None):
        raise ValueError(f"--layers and --hidden shape the default model. Leave them out, or leave {option} out.")
    hidden = WIDTH if hidden is None else hidden
    if hidden < HEAD or hidden % HEAD:
        raise ValueError(f"--hidden {hidden}: must be a multiple of {HEAD}. For example --hidden {8 * HEAD}.")
    return layers or LAYERS, hidden


def padding(tokenizer: Any) -> dict[str, int]:
    """``generate`` asks for a padding token though one prompt needs none."""
    token = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    return {} if token is None else {"pad_token_id": token}
