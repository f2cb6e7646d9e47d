"""A model from a word on the command line, without memory, and a batch for it."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

WANTED = (
    "a factory (package.module:Factory), a transformers config (a folder with config.json, or such a file), or the name of "
    "a torchvision model (vit_h_14)"
)


@dataclass(frozen=True)
class Subject:
    """What is to be estimated.

    Attributes:
        name: as it was asked for.
        module: its parameters have no memory.
        batch: makes the keyword or positional arguments of a forward; None if nobody knows what it takes.
        items: what a batch consists of: ``4096 tokens``.
    """

    name: str
    module: nn.Module
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None
    items: str

    def run(self, *, training: bool, autocast: torch.dtype | None) -> Tensor | None:
        """One forward. Returns the loss in training: the model's own, or the mean of its first output.

        Raises:
            ValueError: there is no batch.
        """
        if self.batch is None:
            raise ValueError(
                f"{self.name} does not say what it takes: set its example_input_array (LightningModule's)."
            )
        args, kwargs = self.batch()
        with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            output = self.module(*args, **kwargs)
            return _loss(output) if training else None


def load(spec: str, *, batch: int, tokens: int, image: int | None) -> Subject:
    """Make the model. To be called in :func:`~sp_lightning.estimate.on_paper`.

    Args:
        spec: see :data:`WANTED`.
        batch: sequences, or images.
        tokens: per sequence.
        image: pixels on each side; None for what the model is made for.

    Raises:
        ValueError: unknown, or a config that needs code from a model hub.
        ImportError: the library that it names is not installed.
    """
    path = Path(spec)
    if path.is_dir() or path.suffix == ".json":
        return _transformers(spec, path / "config.json" if path.is_dir() else path, batch, tokens, image)
    if ":" in spec:
        return _factory(spec)
    return _torchvision(spec, batch, image)


def _factory(spec: str) -> Subject:
    where, _, name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(where)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{spec!r}: {error}. Give {WANTED}.") from error
    finally:
        sys.path.remove(os.getcwd())
    module = found()
    if not isinstance(module, nn.Module):
        raise ValueError(f"{spec!r} made a {type(module).__name__}, no nn.Module. Give {WANTED}.")
    example = getattr(module, "example_input_array", None)

    def batch() -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(example, dict):
            return (), example
        return (example if isinstance(example, (tuple, list)) else (example,)), {}  # type: ignore[return-value]

    return Subject(spec, module, batch if example is not None else None, "its example_input_array")


def _torchvision(spec: str, batch: int, image: int | None) -> Subject:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(f"{spec!r} may be a torchvision model, and torchvision is not installed.") from error
    if spec not in models.list_models():
        raise ValueError(f"Unknown model {spec!r}. Give {WANTED}.")
    module = models.get_model(spec, weights=None)
    size = image or _image_size_of_weights(models.get_model_weights(spec))
    shape = (batch, 3, size, size)
    return Subject(spec, module, lambda: ((torch.zeros(shape),), {}), f"{batch} images of {size} × {size}")


def _image_size_of_weights(weights: Any) -> int:
    size = getattr(next(iter(weights)).transforms(), "crop_size", [224])
    return int(size[0])


def _transformers(spec: str, file: Path, batch: int, tokens: int, image: int | None) -> Subject:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{spec!r} is a transformers config, and transformers is not installed.") from error
    if not file.is_file():
        raise ValueError(f"{str(file)!r} does not exist. Give {WANTED}.")
    raw = json.loads(file.read_text())
    if "auto_map" in raw:
        raise ValueError(
            f"{str(file)!r} needs code from a model hub (auto_map: {raw['auto_map']}), which is not run here."
        )
    if "model_type" not in raw:
        raise ValueError(f"{str(file)!r} is no transformers config: it has no model_type. Give {WANTED}.")
    config = transformers.AutoConfig.for_model(**raw)
    names = raw.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    # Counts of placeholders are compared by value, and there are none.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    module = kind(config) if kind is not None else transformers.AutoModel.from_config(config)
    vision, text = getattr(config, "vision_config", None), config.get_text_config()
    pixels = image or getattr(vision or config, "image_size", None)
    with_text = getattr(text, "vocab_size", None) is not None
    labels = "labels" in module.forward.__code__.co_varnames

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: dict[str, Any] = {}
        if with_text:
            inputs["input_ids"] = torch.zeros(batch, tokens, dtype=torch.long)
        if isinstance(pixels, int):
            inputs["pixel_values"] = torch.zeros(batch, 3, pixels, pixels, dtype=torch.get_default_dtype())
        if labels:
            inputs["labels"] = inputs["input_ids"] if with_text else torch.zeros(batch, dtype=torch.long)
        if with_text and "use_cache" in module.forward.__code__.co_varnames:
            inputs["use_cache"] = False
        return (), inputs

    items = [f"{batch} × {tokens} tokens"] if with_text else []
    if isinstance(pixels, int):
        items.append(f"{batch} images of {pixels} × {pixels}")
    return Subject(spec, module, make, ", ".join(items))


def _loss(output: Any) -> Tensor:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    from torch.utils._pytree import tree_leaves

    leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
    return next(each for each in leaves if isinstance(each, Tensor) and each.requires_grad).float().mean()
