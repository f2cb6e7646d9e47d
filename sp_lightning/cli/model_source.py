"""A model from its name on the command line, without memory, and a batch that it can take."""

from __future__ import annotations

import difflib
import importlib
import inspect
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

from sp_lightning.cli.arguments import WANTED, Question
from sp_lightning.device.torch_private import tree_leaves
from sp_lightning.model.without_values import named_tensors

# Most of transformers' vision models have patches of so many pixels on each side.
_PATCH = 16

FORWARD_WANTED = (
    "define one that calls the network as training_step does, or give what makes the network itself "
    "(package.module:make_network)"
)
"""What helps where a module has no forward."""

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a forward."""


@dataclass(frozen=True)
class ModelWithBatch:
    """A model that is to be estimated.

    Attributes:
        module: the model; its parameters have no memory.
        batch: makes the arguments of a forward. None if it is not known what the model takes.
        items: what a batch consists of, in words: ``4096 tokens``.
        uses: how often a forward uses a weight, as a guess: once for each token, or each patch of an image.
        generation: takes the number of tokens to generate, and returns two functions: one runs the prompts, the other
            runs the last of those tokens with the keys and values of all tokens before it. None if the model has no
            cache of keys and values.
    """

    module: nn.Module
    batch: Callable[[], Arguments] | None
    items: str
    uses: int
    generation: Callable[[int], tuple[Callable[[], None], Callable[[], None]]] | None = None

    def run(self, *, training: bool, autocast: torch.dtype | None) -> Tensor | None:
        """Runs one forward. Returns the loss in training: the model's own, or the mean of its first output.

        Raises:
            ValueError: it is not known what the model takes.
        """
        if self.batch is None:
            raise ValueError("it is not known what the model takes: say --input SIZE …, or set its example_input_array")
        args, kwargs = self.batch()
        with torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            output = self.module(*args, **kwargs)
            return _loss(output) if training else None


def has_forward(module: nn.Module) -> bool:
    """Whether a module, or one of its classes, has a forward of its own. Lightning's calls the one of torch, which raises."""
    forward = getattr(module.forward, "__func__", module.forward)
    where = getattr(forward, "__module__", None) or ""
    return where != nn.Module.__module__ and not where.startswith(("lightning.pytorch.", "pytorch_lightning."))


def describe_images(batch: int, size: int) -> str:
    """A batch of square images in words; ``size`` is in pixels."""
    return f"{batch} image{'' if batch == 1 else 's'} of {size} × {size}"


def count_patches(size: int) -> int:
    """How many patches a vision model cuts a square image into; ``size`` is in pixels."""
    return max(1, size // _PATCH) ** 2


def _loss(output: Any) -> Tensor:
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        return loss
    # A subclass of dict is a leaf to torch, unless its library has registered it.
    leaves = tree_leaves(dict(output) if isinstance(output, dict) else output)
    outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not outputs:
        raise ValueError("nothing that the model returns has a gradient")
    return outputs[0].float().mean()


def load_model(asked: Question, *, image: int | None = None, whole: bool = False) -> ModelWithBatch:
    """Makes a model. To be called inside :func:`~sp_lightning.tune.dry_run.on_paper`.

    Args:
        asked: names the model (:data:`~sp_lightning.cli.arguments.WANTED`) and the sizes of its batch.
        image: pixels on each side; None for the size that the model is made for.
        whole: whether an input by its shape has whole numbers, as token ids are.

    Raises:
        ValueError: the model is unknown, its config needs code from a model hub, or a size says nothing about this kind
            of model.
        ImportError: the library that the name stands for is not installed.
    """
    source, path = asked.model, Path(asked.model)
    given: dict[str, object] = {"--input": asked.input}
    instead = "--batch, and --tokens or --image"
    if ":" in source and not path.exists():
        given = {"--image": image, "--batch": asked.batch if asked.batch > 1 else None}
        instead = "--input SIZE SIZE …, batch first"
    ignored = [option for option, value in given.items() if value is not None]
    if ignored:
        raise ValueError(f"{' and '.join(ignored)} cannot be used with {source!r}. Use {instead}.")
    if path.is_dir() or path.suffix == ".json":
        return _load_transformers(asked, path / "config.json" if path.is_dir() else path, image)
    if ":" in source:
        return _load_factory(source, asked.batch * asked.tokens, asked.input, whole)
    return _load_torchvision(source, asked.batch, image)


# ---------------------------------------------------------------------- package.module:Factory


def _load_factory(source: str, uses: int, shape: list[int] | None, whole: bool) -> ModelWithBatch:
    factory, grad_enabled = _import(source), torch.is_grad_enabled()
    try:
        module = factory()
    except Exception as error:
        raise ValueError(f"{source!r} could not be made without arguments: {type(error).__name__}: {error}") from error
    finally:
        torch.set_grad_enabled(grad_enabled)  # a factory may have switched gradients off
    if not isinstance(module, nn.Module):
        raise ValueError(f"{source!r} made a {type(module).__name__}, no nn.Module. Give {WANTED}.")
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

    return ModelWithBatch(module, batch if example is not None else None, items, uses)


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
    trained = next(iter(models.get_model_weights(source))).transforms()
    size = int(image or getattr(module, "image_size", None) or getattr(trained, "crop_size", [224])[0])
    shape = (batch, 3, size, size)
    items, uses = describe_images(batch, size), batch * count_patches(size)
    return ModelWithBatch(module, lambda: ((torch.zeros(shape),), {}), items, uses)


# ---------------------------------------------------------------------- transformers


def _load_transformers(asked: Question, file: Path, image: int | None) -> ModelWithBatch:
    """Makes the model of a config file; without ``image``, for images of the size that the config says."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(f"{asked.model!r} is a transformers config, and transformers is not installed.") from error
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
    known = getattr(getattr(config, "vision_config", None) or config, "image_size", None)
    if image is not None and known is None:
        raise ValueError(f"--image {image} cannot be used with {asked.model!r}, which takes no images. Leave it out.")
    inputs = _Inputs(module, config, asked.batch, asked.tokens, image or known)
    inputs.check_tokens(file)
    generation = inputs.generation if inputs.has_cache else None
    return ModelWithBatch(module, inputs.batch_arguments, inputs.items, inputs.uses, generation)


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
