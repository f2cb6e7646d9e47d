"""A model from its name on the command line, without memory, and a batch for it."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sp_lightning.cli.model_with_batch import WANTED, Arguments, ModelWithBatch, count_patches, describe_images
from sp_lightning.cli.transformers_source import load_transformers
from sp_lightning.model.without_values import named_tensors


def load_model(
    source: str, *, batch: int, tokens: int, image: int | None, shape: Sequence[int] | None = None, whole: bool = False
) -> ModelWithBatch:
    """Makes a model. To be called inside :func:`~sp_lightning.tune.dry_run.on_paper`.

    Args:
        source: the model's name; see :data:`~sp_lightning.cli.model_with_batch.WANTED`.
        batch: sequences or images.
        tokens: tokens of each sequence.
        image: pixels on each side; None for the size that the model is made for.
        shape: the shape of what a factory's module takes; None for the module's own example.
        whole: whether that input has whole numbers, as token ids are.

    Raises:
        ValueError: the model is unknown, its config needs code from a model hub, or a size says nothing about this kind
            of model.
        ImportError: the library that the name stands for is not installed.
    """
    path = Path(source)
    if ":" in source and not path.exists():
        _refuse(source, {"--image": image, "--batch": batch if batch > 1 else None}, "--input SIZE SIZE …, batch first")
    else:
        _refuse(source, {"--input": shape}, "--batch, and --tokens or --image")
    if path.is_dir() or path.suffix == ".json":
        return load_transformers(source, path / "config.json" if path.is_dir() else path, batch, tokens, image)
    if ":" in source:
        return _load_factory(source, batch * tokens, shape, whole)
    return _load_torchvision(source, batch, image)


def _refuse(source: str, given: dict[str, Any], instead: str) -> None:
    """Refuses sizes that would be ignored."""
    wrong = [option for option, value in given.items() if value is not None]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} cannot be used with {source!r}. Use {instead}.")


# ---------------------------------------------------------------------- package.module:Factory


def _load_factory(source: str, uses: int, shape: Sequence[int] | None, whole: bool) -> ModelWithBatch:
    module = _call_factory(source, _import(source))
    # A LightningModule makes in configure_model what is large.
    if hasattr(module, "configure_model"):
        configure: Any = module.configure_model
        configure()
    if any(tensor.is_meta for _, tensor in named_tensors(module)):
        module.to_empty(device="cpu")  # a run takes its values from a file
    example, items = getattr(module, "example_input_array", None), "its example_input_array"
    if shape is not None:
        example = torch.zeros(*shape, dtype=torch.long if whole else None)
        items = f"a batch of {' × '.join(map(str, shape))}{' whole numbers' if whole else ''}"
    elif example is None:
        items = "no batch known"

    def batch() -> Arguments:
        if isinstance(example, dict):
            return (), example
        return (example if isinstance(example, (tuple, list)) else (example,)), {}  # type: ignore[return-value]

    return ModelWithBatch(source, module, batch if example is not None else None, items, uses)


def _import(source: str) -> Any:
    """What ``package.module:name`` names; modules beside the current directory are found, too."""
    where, _, name = source.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        named: Any = importlib.import_module(where)
        for part in name.split("."):
            named = getattr(named, part)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"{source!r}: {error}. Give {WANTED}.") from error
    finally:
        sys.path.remove(os.getcwd())
    return named


def _call_factory(source: str, factory: Any) -> nn.Module:
    grad_enabled = torch.is_grad_enabled()
    try:
        module = factory()
    except Exception as error:
        raise ValueError(f"{source!r} could not be made without arguments: {type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(grad_enabled)  # a factory may have switched gradients off
    if not isinstance(module, nn.Module):
        raise ValueError(f"{source!r} made a {type(module).__name__}, no nn.Module. Give {WANTED}.")
    return module


# ---------------------------------------------------------------------- torchvision


def _load_torchvision(source: str, batch: int, image: int | None) -> ModelWithBatch:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(f"{source!r} may be a torchvision model, and torchvision is not installed.") from error
    if source not in models.list_models():
        alike = " or ".join(map(repr, difflib.get_close_matches(source, models.list_models())))
        raise ValueError(f"Unknown model {source!r}.{f' Did you mean {alike}?' if alike else ''} Give {WANTED}.")
    try:
        # Without weights_backbone, detectors would download the weights of their backbone.
        module = models.get_model(source, weights=None, weights_backbone=None)
    except TypeError:
        module = models.get_model(source, weights=None)
    # A model of one size says so, and that is not always the size that its weights were trained with.
    size = image or getattr(module, "image_size", None) or _image_size(models.get_model_weights(source))
    shape = (batch, 3, size, size)
    items, uses = describe_images(batch, size), batch * count_patches(size)
    return ModelWithBatch(source, module, lambda: ((torch.zeros(shape),), {}), items, uses)


def _image_size(weights: Any) -> int:
    """The pixels on each side of the images that a torchvision model's weights were trained with."""
    size = getattr(next(iter(weights)).transforms(), "crop_size", [224])
    return int(size[0])
