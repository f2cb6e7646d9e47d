"""Builds a model without memory from its name on the command line, and batches that the model may take."""

from __future__ import annotations

import difflib
import inspect
import json
import os
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.model.without_values import named_tensors
from sp_lightning.core.plan.choices import Packing
from sp_lightning.tools.planner.arguments import EXPECTED, DefaultSize, Question
from sp_lightning.tools.planner.images import USUAL_IMAGE, count_features, image_arguments, takes_images, usual_size
from sp_lightning.tools.planner.known_values import answered

# The names, in forwards of transformers, of the argument that marks the tokens of images.
_WHICH_ARE_IMAGES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids", "image_embeds_position_mask")
# The file of a pipeline of diffusers, and the key of the class in configs of diffusers. Configs of transformers do not have it.
_PIPELINE, _CLASS = "model_index.json", "_class_name"

Arguments = tuple[tuple[Any, ...], dict[str, Any]]
"""The positional and the keyword arguments of a forward."""


Batches = dict[str, Callable[[], Arguments]]
"""Functions that make the arguments of a forward. The keys describe the batch: ``1 × 4096 tokens``."""


@dataclass(frozen=True)
class ModelSource:
    """A model to estimate.

    Attributes:
        module: the model; its parameters have no memory.
        batches: the asked batch, then other batches with other dtypes or without images, which are tried if the model does not
            take the first one. Empty if the inputs of the model are not known.
        generation: takes the number of tokens to generate, and returns two functions. The first runs the prompts. The second
            runs the last token with the keys and values of all tokens before it. None if the model has no key-value cache.
        images: True if the model takes images. If the model also takes text, the last batch has no images.
        stored: the dtype of the stored weights, from the config; None if it is unknown.
        packed: the format of stacked experts in 4 bits, from the config; None if experts are not packed.
        notes: sentences on parts that are not counted.
    """

    module: nn.Module
    batches: Batches
    generation: Callable[[int], tuple[Callable[[], None], Callable[[], None]]] | None = None
    images: bool = False
    stored: torch.dtype | None = None
    packed: Packing | None = None
    notes: tuple[str, ...] = ()


def load_model(asked: Question) -> ModelSource:
    """Builds a model. Call this inside of :func:`~sp_lightning.tools.planner.fake.fake_tensors`.

    If ``asked.tokens`` is a default, this may change it to a number that the model takes.

    Args:
        asked: has the name of the model (:data:`~sp_lightning.tools.planner.arguments.WANTED`) and the sizes of its batch.

    Raises:
        ValueError: the model is unknown, its config needs code from a model hub, or a size does not apply to this kind of
            model.
        ImportError: the library of the model is not installed.
    """
    source, path = asked.model, Path(asked.model)
    factory = ":" in source and not path.exists()
    tokens = not isinstance(asked.tokens, DefaultSize)
    # The options that do not apply to this kind of model. A factory's model takes --batch-size only with --tokens.
    given: dict[str, Any] = {"--input": asked.input}
    if factory:
        given = {
            "--image": asked.image,
            "--batch-size": asked.batch_size > 1 and not tokens,
            "--tokens": asked.input and tokens,
        }
    if ignored := [option for option, value in given.items() if value]:
        instead = "--input 4 3 224 224 (batch first)" if factory else "--batch-size, --tokens and --image"
        raise ValueError(f"{' and '.join(ignored)} cannot be used with {source!r}. Use {instead}.")
    return _load_factory(asked) if factory else _load_named(asked)


def _load_named(asked: Question) -> ModelSource:
    file = find_config(asked.model)
    if file is None:
        return _load_torchvision(asked)
    return _load_transformers(asked, file, _read(file))


def find_config(source: str) -> Path | None:
    """Returns the config file of a model's name; None for a factory, and for a name that may be torchvision's.

    The function imports no slow libraries, and downloads nothing.

    Raises:
        ValueError: the file does not exist, or is not in the cache of the Hugging Face hub.
    """
    path = Path(source)
    if path.is_dir() or path.suffix == ".json":
        file = path / (_PIPELINE if (path / _PIPELINE).is_file() else "config.json") if path.is_dir() else path
        if not file.is_file():
            alike = difflib.get_close_matches(file.name, [each.name for each in file.parent.glob("*")], 1)
            hint = f" Did you mean {str(file.parent / alike[0])!r}?" if alike else ""
            raise ValueError(f"{str(file)!r} does not exist.{hint} {EXPECTED}.")
        return file
    if "/" not in source or ":" in source:
        return None
    if source.startswith((".", "/", "~")):  # not a name of the hub
        raise ValueError(f"{source!r} does not exist. {EXPECTED}.")
    try:
        from huggingface_hub import try_to_load_from_cache

        return Path(try_to_load_from_cache(source, "config.json"))  # type: ignore[arg-type]
    except (ImportError, TypeError, ValueError) as error:  # TypeError: a file that is not in the cache has no path
        raise ValueError(
            f"{source!r}: not a folder, and its config.json is not in the cache of the Hugging Face hub. `plan` downloads "
            f"nothing. Run first: hf download {source} config.json. A model of diffusers needs a factory "
            "(examples/guide/vision.md)."
        ) from error


def has_forward(module: nn.Module) -> bool:
    """Returns True if a module has its own forward. The forwards of torch's and Lightning's base classes raise an error."""
    forward = getattr(module.forward, "__func__", module.forward)
    where = getattr(forward, "__module__", None) or ""
    return where != nn.Module.__module__ and not where.startswith(("lightning.pytorch.", "pytorch_lightning."))


def _images(batch: int, size: int) -> str:
    """Returns a batch of square images in words; ``size`` is the number of pixels on each side."""
    return f"{batch} image{'' if batch == 1 else 's'} of {size} × {size}"


# ---------------------------------------------------------------------- package.module:Factory


def _load_factory(asked: Question) -> ModelSource:
    """Calls the user's factory without memory for weights."""
    source = asked.model
    try:
        factory = pkgutil.resolve_name(source)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{source!r}: {error}. {EXPECTED}.") from error
    try:
        with torch.enable_grad():  # the end of this context enables gradients again if the factory has disabled them
            module = answered(factory)
    except Exception as error:
        raise ValueError(f"{source!r}() failed: {type(error).__name__}: {error}") from error
    if not isinstance(module, nn.Module):
        raise ValueError(f"{source!r} returned a {type(module).__name__}; expected an nn.Module.")
    if hasattr(module, "configure_model"):  # a LightningModule builds its large parts in this hook
        configure: Any = module.configure_model
        configure()
    if any(tensor.is_meta for _, tensor in named_tensors(module)):
        module.to_empty(device="cpu")  # a run gives such weights memory, and loads their values from a file
    return ModelSource(module, _examples(module, asked))


def _arguments(example: Any) -> Arguments:
    """Returns the arguments with which Lightning calls the forward for an ``example_input_array``."""
    if isinstance(example, dict):
        return (), example
    return tuple(example) if isinstance(example, (tuple, list)) else (example,), {}


def _examples(module: nn.Module, asked: Question) -> Batches:
    """Returns the batches that are tried.

    - With ``--input``: floating-point numbers of this shape, then integers.
    - With ``--tokens``: integers of shape ``(--batch-size, --tokens)``.
    - Otherwise the module's ``example_input_array``; no batches without one.

    In training, integers are first tried with labels (the same integers) if the forward takes labels.
    """
    shape = asked.input
    if shape is None and not isinstance(asked.tokens, DefaultSize):
        shape = [asked.batch_size, asked.tokens]
    if shape is None:
        given = getattr(module, "example_input_array", None)
        return {} if given is None else {"its example_input_array": partial(_arguments, given)}
    items = f"a batch of {' × '.join(map(str, shape))}"
    whole = torch.zeros(*shape, dtype=torch.long, device="cpu")
    batches: Batches = {}
    if asked.input is not None:
        batches[items] = partial(_arguments, torch.zeros(*shape, device="cpu"))
    if not asked.predict and "labels" in inspect.signature(module.forward).parameters:
        batches[f"{items} integers, which are also the labels"] = lambda: ((whole,), {"labels": whole})
    batches[f"{items} integers"] = partial(_arguments, whole)
    return batches


# ---------------------------------------------------------------------- torchvision


def _load_torchvision(asked: Question) -> ModelSource:
    source = asked.model
    try:
        from torchvision import models
    except ImportError as error:
        raise ImportError(
            f"{source!r} may be a torchvision model, and torchvision is not installed: pip install torchvision"
        ) from error
    if source not in models.list_models():
        alike = " or ".join(map(repr, difflib.get_close_matches(source, models.list_models())))
        raise ValueError(f"Unknown model {source!r}.{f' Did you mean {alike}?' if alike else ''} {EXPECTED}.")
    try:
        # With the default of weights_backbone, detectors would download the weights of their backbone.
        module = models.get_model(source, weights=None, weights_backbone=None)
    except TypeError:  # this model has no weights_backbone
        module = models.get_model(source, weights=None)
    # A model that takes only one size of images has this size as an attribute. Its weights may be trained with another size.
    trained = next(iter(models.get_model_weights(source))).transforms()
    usual = int(getattr(module, "image_size", None) or getattr(trained, "crop_size", [224])[0])

    def arguments(size: int) -> Arguments:
        return (torch.zeros(asked.batch_size, 3, size, size, device="cpu"),), {}

    size = asked.image or usual
    return ModelSource(module, {_images(asked.batch_size, size): partial(arguments, size)})


# ---------------------------------------------------------------------- transformers


def _load_transformers(asked: Question, file: Path, raw: dict[str, Any]) -> ModelSource:
    """Builds a model from a transformers config. Lowers a default ``asked.tokens`` to the model's positions."""
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"{asked.model!r} is a transformers config, and transformers is not installed: pip install transformers"
        ) from error
    if raw.get("model_type") not in transformers.CONFIG_MAPPING:
        raise ValueError(
            f"{str(file)!r}: expected a model_type that transformers {transformers.__version__} knows, got "
            f"{raw.get('model_type')!r}. For any other model, give a factory: package.module:Factory"
        )
    # In a run, the precision determines the dtype of trained weights. So the config of the plan must not have a dtype.
    older = raw.pop("torch_dtype", None)  # the name of this field before transformers 5
    stored = getattr(torch, str(raw.pop("dtype", None) or older), None)
    notes = tuple(_quantised(raw, file))
    packed: Packing | None = "mxfp4" if _quantisation(raw) == "mxfp4" else None
    config = transformers.AutoConfig.for_model(**raw)
    kind = getattr(transformers, next(iter(raw.get("architectures") or []), ""), None)
    # Disables transformers' comparison of the numbers of image tokens and image features, which reads values.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    make = transformers.AutoModel.from_config if kind is None else kind
    module = _make(make, config, file)
    text = config.get_text_config()
    most = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if isinstance(most, int) and isinstance(asked.tokens, DefaultSize):
        asked.tokens = DefaultSize(min(asked.tokens, most))
    inputs = _Inputs(module, config, asked.batch_size, asked.tokens)
    if asked.image is not None and not inputs.with_images:
        raise ValueError(f"--image {asked.image}: {asked.model!r} takes no images. Leave --image out.")
    if inputs.with_text and isinstance(most, int) and asked.tokens > most:
        raise ValueError(f"--tokens {asked.tokens}: {str(file)!r} has {most} positions. Use --tokens {most}.")
    size = asked.image or (usual_size(config) or USUAL_IMAGE if inputs.with_images else None)
    sizes = (size, None) if inputs.with_text and asked.image is None else (size,)
    batches: Batches = {inputs.items(image): partial(inputs.arguments, image) for image in sizes}
    generation = partial(inputs.generation, size) if inputs.cache else None
    return ModelSource(
        module, batches, generation, images=inputs.with_images, stored=stored, packed=packed, notes=notes
    )


def _quantised(raw: dict[str, Any], file: Path) -> list[str]:
    """Returns a sentence on the quantisation in a config; an empty list if the config has none.

    MXFP4 experts are planned in 4 bits. Other quantisation is not counted.
    """
    method = _quantisation(raw)
    if method is None:
        return []
    if method == "mxfp4":
        return [
            "Experts are planned in 4 bits, as they are stored (MXFP4): load them with sp_lightning.load_mxfp4(model, folder)."
        ]
    return [
        f"{file} has a quantization_config ({method}), which is not counted: weights are planned in the precision of the run. "
        "A factory that loads the quantised model is planned with its quantised weights."
    ]


def _quantisation(raw: dict[str, Any]) -> str | None:
    method: str | None = (raw.get("quantization_config") or {}).get("quant_method")
    return method


def _make(kind: Callable[[Any], nn.Module], config: Any, file: Path) -> nn.Module:
    try:
        return answered(partial(kind, config))
    except Exception as error:
        raise ValueError(
            f"transformers cannot make a model from {str(file)!r}: {type(error).__name__}: {error}. Is the config complete?"
        ) from error


def _read(file: Path) -> dict[str, Any]:
    try:
        raw: dict[str, Any] = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{str(file)!r} is not JSON: {error}.") from error
    if _CLASS in raw:
        raise ValueError(
            f"{str(file)!r} is of diffusers ({raw[_CLASS]}), and `plan` does not know its inputs. Expected a factory: a function "
            "that returns the model with example_input_array, plan my_file:make_model. examples/guide/vision.md has one for "
            "Flux."
        )
    if "auto_map" in raw:
        raise ValueError(
            f"{str(file)!r} needs code from a model hub (auto_map: {raw['auto_map']}), which `plan` does not run."
        )
    return raw


class _Inputs:
    """The arguments of the forward of a transformers model.

    Attributes:
        with_text: True if the model takes tokens.
        with_images: True if the model takes images.
        cache: the name of the key-value cache in the forward's arguments and outputs. None if the model is not a language model
            with a key-value cache.
    """

    def __init__(self, module: nn.Module, config: Any, batch: int, tokens: int) -> None:
        self._module, self._config, self._batch, self._tokens = module, config, batch, tokens
        self._taken = set(inspect.signature(module.forward).parameters)
        self.with_images = takes_images(config, self._taken)
        self.with_text = getattr(config.get_text_config(), "vocab_size", None) is not None
        # The second name is that of transformers 5.24 and newer.
        names = ("past_key_values", "cache") if self.with_text and "input_ids" in self._taken else ()
        self.cache = next((name for name in names if name in self._taken), None)

    def items(self, image: int | None) -> str:
        """Returns a batch in words. ``image`` is the number of pixels on each side; None for no images."""
        items = [f"{self._batch} × {self._tokens} tokens"] * self.with_text
        if image is not None:
            items.append(_images(self._batch, image))
        return ", ".join(items)

    def arguments(self, image: int | None) -> Arguments:
        """Returns the arguments of the forward for the batch that :meth:`items` describes."""
        inputs: dict[str, Any] = {}
        if image is not None and not self.with_text and usual_size(self._config):
            inputs["pixel_values"] = self._numbers(3, image, image)
        elif image is not None:
            inputs.update(image_arguments(self._config, self._taken, self._batch, image))
        if self.with_text and "input_ids" in self._taken:
            inputs.update(self._text(inputs))
        if "input_features" in self._taken:
            # Speech: the encoder has a position for every second frame, because a convolution halves the number of frames.
            frames = 2 * getattr(self._config, "max_source_positions", 1500)
            inputs["input_features"] = self._numbers(getattr(self._config, "num_mel_bins", 80), frames)
        if "labels" in self._taken:
            # A label for each token; without text, for each item of the batch.
            inputs["labels"] = self._ids(*[self._tokens] * self.with_text)
        elif "decoder_input_ids" in self._taken:
            inputs["decoder_input_ids"] = self._ids(self._tokens)
        if self.with_text and "use_cache" in self._taken:
            inputs["use_cache"] = False
        return (), inputs

    def _text(self, images: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the tokens, and for models with images the arguments that mark which tokens are images.

        The first tokens of a sequence are its image. InstructBLIP's Q-Former gets the same tokens as its own text, as far
        as it has positions.

        Raises:
            ValueError: an image takes more tokens than a sequence has. The advised length has as much text as image.
        """
        ids = self._ids(self._tokens)
        count = count_features(self._module, images) // self._batch if images else 0
        if count > self._tokens:
            raise ValueError(
                f"an image takes {count} tokens, but a sequence has {self._tokens}. Use --tokens {2 * count}"
            )
        image_id = getattr(self._config, "image_token_id", None) or getattr(self._config, "image_token_index", None)
        ids[:, :count] = image_id or 0
        which = (torch.arange(self._tokens, device="cpu") < count).repeat(self._batch, 1)
        others = {name: which.long() for name in _WHICH_ARE_IMAGES if name in self._taken and images}
        if "qformer_input_ids" in self._taken:
            others["qformer_input_ids"] = ids[:, : self._config.qformer_config.max_position_embeddings]
        return {"input_ids": ids, **others}

    def generation(self, image: int | None, count: int) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns a function that runs the prompts, and one that runs the last of ``count`` generated tokens.

        To fill the key-value cache for the last token, this runs a forward of all tokens before the last one.

        Args:
            image: the number of pixels on each side of an image in the prompts; None for no images.
            count: the number of generated tokens.
        """
        assert self.cache is not None  # otherwise :attr:`ModelSource.generation` is None
        cached: dict[str, Any] = {
            "use_cache": True,
            **({"logits_to_keep": 1} if "logits_to_keep" in self._taken else {}),
        }
        prompts: dict[str, Any] = {**self.arguments(image)[1], **cached}
        prompts.pop("labels", None)
        name, length = "input_ids", self._tokens + count - 1
        if self._config.is_encoder_decoder:
            # The prompt is the encoder's input. The decoder uses only the encoder's output.
            prompts["decoder_input_ids"] = cached["decoder_input_ids"] = self._ids(1)
            name, length = "decoder_input_ids", max(count - 1, 1)
        before = self._ids(length)
        # This forward has no images: the keys and values of image tokens are as large as those of other tokens.
        text = self.arguments(None)[1]
        text.pop("labels", None)
        written = self._module(**{**text, **cached, name: before})
        last = {name: before[:, :1], self.cache: getattr(written, self.cache), "use_cache": True}
        if self._config.is_encoder_decoder:
            last["encoder_outputs"] = (written.encoder_last_hidden_state,)
        return lambda: self._module(**prompts) and None, lambda: self._module(**last) and None

    def _ids(self, *shape: int) -> Tensor:
        return torch.zeros(self._batch, *shape, dtype=torch.long, device="cpu")

    def _numbers(self, *shape: int) -> Tensor:
        """Returns floating-point inputs in torch's default dtype, which is the model's dtype in an estimate."""
        return torch.zeros(self._batch, *shape, device="cpu")
