"""A model from a word on the command line, without memory, and a batch for it."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

# Pixels on each side of a patch, of most transformers that see.
_PATCH = 16
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
        uses: how often a forward uses a weight, at a guess: once for each token, or patch of an image.
        generation: given how many tokens are generated, what runs the prompts, and what runs the last of the tokens with
            the keys and values of all before it. None where the model has no such cache.
    """

    name: str
    module: nn.Module
    batch: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]] | None
    items: str
    uses: int
    generation: Callable[[int], tuple[Callable[[], None], Callable[[], None]]] | None = None

    def run(self, *, training: bool, autocast: torch.dtype | None) -> Tensor | None:
        """One forward. Returns the loss in training: the model's own, or the mean of its first output.

        Raises:
            ValueError: there is no batch.
        """
        if self.batch is None:
            raise ValueError("it is not known what the model takes: say --input SIZE …, or set its example_input_array")
        args, kwargs = self.batch()
        with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            output = self.module(*args, **kwargs)
            return _loss(output) if training else None


def load(
    spec: str, *, batch: int, tokens: int, image: int | None, shape: Sequence[int] | None = None, whole: bool = False
) -> Subject:
    """Make the model. To be called in :func:`~sp_lightning.tune.dry_run.on_paper`.

    Args:
        spec: see :data:`WANTED`.
        batch: sequences, or images.
        tokens: per sequence.
        image: pixels on each side; None for what the model is made for.
        shape: of what a factory's module takes; None for its example.
        whole: whether that is whole numbers, as token ids are.

    Raises:
        ValueError: unknown, a config that needs code from a model hub, or a size that says nothing about this kind of model.
        ImportError: the library that it names is not installed.
    """
    path = Path(spec)
    if ":" in spec and not path.exists():
        _refuse(spec, {"--image": image, "--batch": batch if batch > 1 else None}, "--input SIZE SIZE …, batch first")
    else:
        _refuse(spec, {"--input": shape}, "--batch, and --tokens or --image")
    if path.is_dir() or path.suffix == ".json":
        return _transformers(spec, path / "config.json" if path.is_dir() else path, batch, tokens, image)
    if ":" in spec:
        return _factory(spec, batch * tokens, shape, whole)
    return _torchvision(spec, batch, image)


def _refuse(what: str, given: dict[str, Any], instead: str) -> None:
    """Sizes that would be ignored."""
    wrong = [option for option, value in given.items() if value is not None]
    if wrong:
        raise ValueError(f"{' and '.join(wrong)} cannot be used with {what!r}. Use {instead}.")


def _factory(spec: str, uses: int, shape: Sequence[int] | None, whole: bool) -> Subject:
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
    before = torch.is_grad_enabled()
    try:
        module = found()
    except Exception as error:
        raise ValueError(f"{spec!r} could not be made without arguments: {type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(before)
    if not isinstance(module, nn.Module):
        raise ValueError(f"{spec!r} made a {type(module).__name__}, no nn.Module. Give {WANTED}.")
    if hasattr(module, "configure_model"):  # where a LightningModule makes what is large
        make: Any = module.configure_model
        make()
    example, items = getattr(module, "example_input_array", None), "its example_input_array"
    if shape is not None:
        example = torch.zeros(*shape, dtype=torch.long if whole else None)
        items = f"a batch of {' × '.join(map(str, shape))}{' whole numbers' if whole else ''}"
    elif example is None:
        items = "no batch known"

    def batch() -> tuple[tuple[Any, ...], dict[str, Any]]:
        if isinstance(example, dict):
            return (), example
        return (example if isinstance(example, (tuple, list)) else (example,)), {}  # type: ignore[return-value]

    return Subject(spec, module, batch if example is not None else None, items, uses)


def _torchvision(spec: str, batch: int, image: int | None) -> Subject:
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(f"{spec!r} may be a torchvision model, and torchvision is not installed.") from error
    if spec not in models.list_models():
        raise ValueError(f"Unknown model {spec!r}. Give {WANTED}.")
    try:
        module = models.get_model(spec, weights=None, weights_backbone=None)  # detectors would load their backbone's
    except TypeError:
        module = models.get_model(spec, weights=None)
    size = image or _image_size_of_weights(models.get_model_weights(spec))
    shape = (batch, 3, size, size)
    return Subject(spec, module, lambda: ((torch.zeros(shape),), {}), _images(batch, size), batch * _patches(size))


def _images(batch: int, size: int) -> str:
    return f"{batch} image{'' if batch == 1 else 's'} of {size} × {size}"


def _patches(size: int) -> int:
    return max(1, size // _PATCH) ** 2


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
    try:
        raw = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is no JSON: {error}.") from error
    if "auto_map" in raw:
        raise ValueError(
            f"{str(file)!r} needs code from a model hub (auto_map: {raw['auto_map']}), which is not run here."
        )
    if "model_type" not in raw:
        raise ValueError(f"{str(file)!r} is no transformers config: it has no model_type. Give {WANTED}.")
    if raw["model_type"] not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{str(file)!r}: transformers {transformers.__version__} has no model_type {raw['model_type']!r}."
        )
    config = transformers.AutoConfig.for_model(**raw)
    names = raw.get("architectures") or []
    kind = getattr(transformers, names[0], None) if names else None
    # Counts of placeholders are compared by value, and there are none.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    module = kind(config) if kind is not None else transformers.AutoModel.from_config(config)
    vision, text = getattr(config, "vision_config", None), config.get_text_config()
    pixels = getattr(vision or config, "image_size", None)
    if image is not None and pixels is None:
        raise ValueError(f"--image {image} cannot be used with {spec!r}, which takes no images. Leave it out.")
    pixels = image or pixels
    with_text = getattr(text, "vocab_size", None) is not None
    taken = set(inspect.signature(module.forward).parameters)
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if with_text and isinstance(most, int) and tokens > most:
        raise ValueError(f"{tokens} tokens are more than the {most} positions of {str(file)!r}. Say --tokens {most}.")

    def text_ids() -> Tensor:
        return torch.zeros(batch, tokens, dtype=torch.long)

    def make() -> tuple[tuple[Any, ...], dict[str, Any]]:
        inputs: dict[str, Any] = {}
        if with_text and "input_ids" in taken:
            inputs["input_ids"] = text_ids()
        if isinstance(pixels, int):
            inputs["pixel_values"] = torch.zeros(batch, 3, pixels, pixels, dtype=torch.get_default_dtype())
        if "input_features" in taken:  # speech: as many frames as the encoder has positions, before its stride
            frames = 2 * getattr(config, "max_source_positions", 1500)
            bins = getattr(config, "num_mel_bins", 80)
            inputs["input_features"] = torch.zeros(batch, bins, frames, dtype=torch.get_default_dtype())
        if "labels" in taken:
            inputs["labels"] = text_ids() if with_text else torch.zeros(batch, dtype=torch.long)
        elif "decoder_input_ids" in taken:
            inputs["decoder_input_ids"] = text_ids()
        if with_text and "use_cache" in taken:
            inputs["use_cache"] = False
        return (), inputs

    def generation(count: int) -> tuple[Callable[[], None], Callable[[], None]]:
        kept = {"logits_to_keep": 1} if "logits_to_keep" in taken else {}
        prompts: dict[str, Any] = {**make()[1], "use_cache": True, **kept}
        prompts.pop("labels", None)
        if config.is_encoder_decoder:  # the prompt is the encoder's, and its output all that the decoder needs of it
            prompts["decoder_input_ids"] = torch.zeros(batch, 1, dtype=torch.long)
            before = torch.zeros(batch, max(count - 1, 1), dtype=torch.long)
            written = module(**{**prompts, "decoder_input_ids": before})
            last = {"encoder_outputs": (written.encoder_last_hidden_state,), "decoder_input_ids": before[:, :1]}
        else:
            before = torch.zeros(batch, tokens + count - 1, dtype=torch.long)
            written = module(**{**prompts, "input_ids": before})
            last = {"input_ids": before[:, :1]}
        last |= {"past_key_values": written.past_key_values, "use_cache": True}
        return lambda: module(**prompts) and None, lambda: module(**last) and None

    caches = with_text and {"past_key_values", "input_ids"} <= taken
    items = [f"{batch} × {tokens} tokens"] if with_text else []
    if isinstance(pixels, int):
        items.append(_images(batch, pixels))
    uses = batch * (tokens if with_text else _patches(pixels) if isinstance(pixels, int) else 1)
    return Subject(spec, module, make, ", ".join(items), uses, generation if caches else None)


def _loss(output: Any) -> Tensor:
    own = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
    outputs = [each for each in leaves if isinstance(each, Tensor) and each.requires_grad]
    if not outputs:
        raise ValueError("nothing that the model returns has a gradient")
    return outputs[0].float().mean()
