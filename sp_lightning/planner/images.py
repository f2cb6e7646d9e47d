"""What a model of transformers takes for images, from what prepares them for it in a run, its image processor."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.torch_compat.private import disable_dispatch_modes, tree_leaves

USUAL_IMAGE = 448
"""Pixels on each side of an image of a model that takes images of any size."""
# How the forwards of transformers call an image.
_IMAGES = ("pixel_values", "pixel_values_images", "flattened_patches", "image_patches")
# How many channels an image has, in the dimension before its height and its width.
_CHANNELS = 3


def takes_images(config: Any, taken: Collection[str]) -> bool:
    """Whether a model takes images: its forward has arguments of these names, and its config does not leave the tower out."""
    return any(name in taken for name in _IMAGES) and getattr(config, "vision_config", config) is not None


def usual_size(config: Any) -> int | None:
    """Pixels on each side of the images, or of their tiles, that a model is made for. None if these may have any size."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None)
    if isinstance(size, (list, tuple)) and len({*size}) == 1:
        size = size[0]
    return size if isinstance(size, int) else None


def image_arguments(config: Any, taken: Collection[str], batch: int, size: int) -> dict[str, Tensor]:
    """The arguments of a forward for images: numbers with a fraction without memory, whole numbers with their values.

    Args:
        config: the model's.
        taken: the names of the arguments that its forward takes.
        batch: how many images.
        size: pixels on each side of them.

    Raises:
        ValueError: transformers has no image processor for the model, or it takes no such image.
    """
    usual, arguments = usual_size(config), dict[str, Tensor]()
    if usual is not None and not _processors(config):
        return {"pixel_values": torch.zeros(batch, _CHANNELS, size, size)}
    for name, value in _processed(config, size).items():
        if name not in taken:
            continue
        shape = [batch * value.shape[0], *value.shape[1:]]
        if usual is not None and value.dim() > _CHANNELS and value.shape[-3] == _CHANNELS:
            shape[-2:] = 2 * [size if value.dim() == _CHANNELS + 1 else usual]
        elif usual is not None and value.dim() >= _CHANNELS and "mask" in name:
            shape[-2:] = 2 * [usual]
        # A mask of pixels has another size than the processor's then, and says that all of them are there.
        arguments[name] = (
            torch.zeros(shape)
            if value.is_floating_point()
            else torch.tensor(batch * value.tolist(), dtype=value.dtype)
            if shape[1:] == [*value.shape[1:]]
            else torch.ones(shape, dtype=value.dtype)
        )
    if not takes_images(config, arguments):
        raise ValueError(f"it is not known which images a model of type {config.model_type!r} takes")
    return arguments


def count_features(module: nn.Module, arguments: dict[str, Tensor]) -> int:
    """How many tokens of the text the images take: as many as the vision tower makes of them. 0 if the model does not tell."""
    make: Any = getattr(module, "get_image_features", None)
    if make is None:
        return 0
    try:
        with torch.no_grad():
            made = make(**arguments, return_dict=True)
    except (
        Exception
    ):  # a tower that cannot be run without values, of which the batch itself tells, or one that wants more
        return 0
    features = getattr(made, "pooler_output", made)
    return sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(features) if isinstance(leaf, Tensor))


def _processors(config: Any) -> list[str]:
    """The names of the image processors for a model, one for each library."""
    from transformers.models.auto import image_processing_auto

    names: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, ())
    return [*names.values()] if isinstance(names, dict) else [name for name in names if name]


def _processed(config: Any, size: int) -> dict[str, Tensor]:
    """What the image processor makes of one image."""
    import transformers

    vision = getattr(config, "vision_config", None) or config
    sizes = {
        "patch_size": getattr(vision, "patch_size", None),
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
        "merge_size": getattr(vision, "spatial_merge_size", None),
    }
    failed = "transformers has no image processor for it"
    # With values, which an image has to have, and as in a run: in float32.
    with disable_dispatch_modes():
        for name in _processors(config):
            try:
                kind: Any = getattr(transformers, name)
                known = {key: value for key, value in sizes.items() if value and hasattr(kind, key)}
                processed = kind(**known)([torch.zeros(_CHANNELS, size, size, dtype=torch.uint8)], return_tensors="pt")
                return {key: torch.as_tensor(value) for key, value in processed.items()}
            except (
                Exception
            ) as error:  # one of a library that is not installed, or one that takes no image of this size
                failed = f"{name}: {type(error).__name__}: {error}"
    raise ValueError(
        f"no image of {size} × {size} could be prepared for a model of type {config.model_type!r} ({failed})"
    )
