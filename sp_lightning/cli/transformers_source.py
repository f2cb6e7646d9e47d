"""A model of transformers from its config, with random weights that have no memory, and a batch for it."""

from __future__ import annotations

import inspect
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.cli.model_with_batch import WANTED, Arguments, ModelWithBatch, count_patches, describe_images


def load_transformers(source: str, file: Path, batch: int, tokens: int, image: int | None) -> ModelWithBatch:
    """Makes the model of a config.

    Args:
        source: what the user named.
        file: its config.
        batch: sequences or images.
        tokens: tokens of each sequence.
        image: pixels on each side; None for the size that the config says.

    Raises:
        ImportError: transformers is not installed.
        ValueError: the file is no config that this transformers knows, it needs code from a model hub, or its model
            cannot take such a batch.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{source!r} is a transformers config, and transformers is not installed.") from error
    raw = _read(file)
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{str(file)!r}: transformers {transformers.__version__} has no model_type {raw['model_type']!r}."
        )
    config = transformers.AutoConfig.for_model(**raw)
    names = raw.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    # transformers compares the counts of image tokens and image features by value, and here are no values.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    module = kind(config) if kind is not None else transformers.AutoModel.from_config(config)
    inputs = _Inputs(module, config, batch, tokens, _image_size(source, config, image))
    inputs.check_tokens(file)
    generation = inputs.generation if inputs.has_cache else None
    return ModelWithBatch(source, module, inputs.batch_arguments, inputs.items, inputs.uses, generation)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ValueError(f"{str(file)!r} does not exist. Give {WANTED}.")
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON: {error}.") from error
    if "auto_map" in raw:
        raise ValueError(
            f"{str(file)!r} needs code from a model hub (auto_map: {raw['auto_map']}), which is not run here."
        )
    if "model_type" not in raw:
        raise ValueError(f"{str(file)!r} is no transformers config: it has no model_type. Give {WANTED}.")
    return raw


def _image_size(source: str, config: Any, image: int | None) -> Any:
    """The pixels on each side of an image; None if the model takes no images."""
    known = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    if image is not None and known is None:
        raise ValueError(f"--image {image} cannot be used with {source!r}, which takes no images. Leave it out.")
    return image or known


@dataclass(frozen=True)
class _Inputs:
    """What a model's forward is called with.

    Attributes:
        image_size: pixels on each side. None if the model takes no images; some configs have a pair here, and then the
            model is given no images.
    """

    module: nn.Module
    config: Any
    batch: int
    tokens: int
    image_size: Any

    @property
    def _taken(self) -> set[str]:
        return set(inspect.signature(self.module.forward).parameters)

    @property
    def _with_text(self) -> bool:
        return getattr(self.config.get_text_config(), "vocab_size", None) is not None

    @property
    def _cache(self) -> str | None:
        """The name of the cache of keys and values, as an argument and in what a forward returns."""
        names = ("past_key_values", "cache")  # the second since 5.24
        return next((name for name in names if name in self._taken), None)

    @property
    def has_cache(self) -> bool:
        """Whether the model is a language model with a cache of keys and values."""
        return self._with_text and self._cache is not None and "input_ids" in self._taken

    @property
    def items(self) -> str:
        """What the batch consists of, in words."""
        items = [f"{self.batch} × {self.tokens} tokens"] if self._with_text else []
        if isinstance(self.image_size, int):
            items.append(describe_images(self.batch, self.image_size))
        return ", ".join(items)

    @property
    def uses(self) -> int:
        """How often a forward uses a weight, as a guess."""
        if self._with_text:
            return self.batch * self.tokens
        return self.batch * (count_patches(self.image_size) if isinstance(self.image_size, int) else 1)

    def check_tokens(self, file: Path) -> None:
        """Refuses sequences that are longer than the model has positions.

        Raises:
            ValueError: they are.
        """
        text = self.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
        if self._with_text and isinstance(most, int) and self.tokens > most:
            raise ValueError(
                f"{self.tokens} tokens are more than the {most} positions of {str(file)!r}. Say --tokens {most}."
            )

    def batch_arguments(self) -> Arguments:
        """The arguments of a forward."""
        inputs: dict[str, Any] = {}
        taken, with_text = self._taken, self._with_text
        if with_text and "input_ids" in taken:
            inputs["input_ids"] = self._ids(self.tokens)
        if isinstance(self.image_size, int):
            inputs["pixel_values"] = _zeros(self.batch, 3, self.image_size, self.image_size)
        if "input_features" in taken:
            # Speech: the encoder's first convolution halves the number of frames to the number of its positions.
            frames = 2 * getattr(self.config, "max_source_positions", 1500)
            inputs["input_features"] = _zeros(self.batch, getattr(self.config, "num_mel_bins", 80), frames)
        if "labels" in taken:
            inputs["labels"] = self._ids(self.tokens) if with_text else torch.zeros(self.batch, dtype=torch.long)
        elif "decoder_input_ids" in taken:
            inputs["decoder_input_ids"] = self._ids(self.tokens)
        if with_text and "use_cache" in taken:
            inputs["use_cache"] = False
        return (), inputs

    def generation(self, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """What runs the prompts, and what runs the last of ``count`` generated tokens."""
        prompts: dict[str, Any] = {**self.batch_arguments()[1], "use_cache": True}
        if "logits_to_keep" in self._taken:
            prompts["logits_to_keep"] = 1
        prompts.pop("labels", None)
        if self.config.is_encoder_decoder:
            # The prompt is the encoder's input, and the decoder needs nothing of it but the encoder's output.
            prompts["decoder_input_ids"] = self._ids(1)
            before = self._ids(max(count - 1, 1))
            written = self.module(**{**prompts, "decoder_input_ids": before})
            last = {"encoder_outputs": (written.encoder_last_hidden_state,), "decoder_input_ids": before[:, :1]}
        else:
            before = self._ids(self.tokens + count - 1)
            written = self.module(**{**prompts, "input_ids": before})
            last = {"input_ids": before[:, :1]}
        assert self._cache is not None
        last |= {self._cache: getattr(written, self._cache), "use_cache": True}
        return lambda: self.module(**prompts) and None, lambda: self.module(**last) and None

    def _ids(self, length: int) -> Tensor:
        return torch.zeros(self.batch, length, dtype=torch.long)


def _zeros(*shape: int) -> Tensor:
    """Inputs in the dtype of the model, which is torch's default dtype while the model is estimated."""
    return torch.zeros(*shape, dtype=torch.get_default_dtype())
