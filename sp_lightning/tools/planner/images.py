"""The image arguments of a transformers model, made by its image processor as in a run."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.private import disable_dispatch_modes, tree_leaves

USUAL_IMAGE = 448
"""The default number of pixels on each side of an image, for models that take images of any size."""
# The names of image arguments in the forwards of transformers.
_IMAGES = ("pixel_values", "pixel_values_images", "flattened_patches", "image_patches")
# The number of channels of an image. They are the dimension before height and width.
_CHANNELS = 3


def takes_images(config: Any, taken: Collection[str]) -> bool:
    """Returns True if the forward has an image argument, and the config is that of a vision model or has a vision tower.

    Args:
        config: the model's config. If its ``vision_config`` is None, the model was configured without its vision tower.
        taken: the names of the forward's arguments.
    """
    return any(name in taken for name in _IMAGES) and getattr(config, "vision_config", config) is not None


def usual_size(config: Any) -> int | None:
    """Returns the number of pixels on each side of a model's images or tiles; None if images may have any size."""
    vision = getattr(config, "vision_config", None) or config
    size = getattr(vision, "image_size", None)
    if isinstance(size, (list, tuple)) and len({*size}) == 1:
        size = size[0]
    return size if isinstance(size, int) else None


def image_arguments(config: Any, taken: Collection[str], batch: int, size: int) -> dict[str, Tensor]:
    """Returns the image arguments of a forward. Floating-point tensors have no memory; integers have values.

    Args:
        config: the model's config.
        taken: the names of the forward's arguments.
        batch: the number of images.
        size: the number of pixels on each side of an image.

    Raises:
        ValueError: transformers has no image processor for the model, or the processor does not take an image of this size, or
            returns no image argument.
    """
    usual = usual_size(config)
    arguments: dict[str, Tensor] = {}
    if usual is not None and not _processors(config):
        return {"pixel_values": torch.zeros(batch, _CHANNELS, size, size, device="cpu")}
    for name, value in _processed(config, size).items():
        if name not in taken:
            continue
        shape = [batch * value.shape[0], *value.shape[1:]]
        # The processor resizes images to the model's size, if the model has one. An image (four dimensions) gets the asked size
        # instead; tiles (more dimensions) and masks get the model's size.
        if usual is not None and value.dim() > _CHANNELS and value.shape[-3] == _CHANNELS:
            shape[-2:] = 2 * [size if value.dim() == _CHANNELS + 1 else usual]
        elif usual is not None and value.dim() >= _CHANNELS and "mask" in name:
            shape[-2:] = 2 * [usual]
        if value.is_floating_point():
            arguments[name] = torch.zeros(shape, device="cpu")
        elif shape[1:] == [*value.shape[1:]]:
            arguments[name] = torch.tensor(batch * value.tolist(), dtype=value.dtype, device="cpu")
        else:  # a mask of pixels whose size is not that of the processor's output: every pixel is valid
            arguments[name] = torch.ones(shape, dtype=value.dtype, device="cpu")
    if not takes_images(config, arguments):
        raise ValueError(f"it is not known which images a model of type {config.model_type!r} takes")
    return arguments


def count_features(module: nn.Module, arguments: dict[str, Tensor]) -> int:
    """Returns the number of text tokens that the images take, which is the number of outputs of the vision tower.

    Returns 0 if these outputs cannot be computed.
    """
    make: Any = getattr(module, "get_image_features", None)
    if make is None:
        return 0
    try:
        with torch.no_grad():
            made = make(**arguments, return_dict=True)
    # The tower may need other arguments. The tower may also need values. In that case, running the batch raises the same error.
    except Exception:
        return 0
    features = getattr(made, "pooler_output", made)
    return sum(leaf.numel() // leaf.shape[-1] for leaf in tree_leaves(features) if isinstance(leaf, Tensor))


def _processors(config: Any) -> list[str]:
    """Returns the names of the image processors for a model, one for each library (torchvision and PIL)."""
    from transformers.models.auto import image_processing_auto

    names: Any = image_processing_auto.IMAGE_PROCESSOR_MAPPING_NAMES.get(config.model_type, ())
    return [*names.values()] if isinstance(names, dict) else [name for name in names if name]


def _processed(config: Any, size: int) -> dict[str, Tensor]:
    """Returns the output of the first image processor that works, for one image of zeros.

    Args:
        config: the model's config.
        size: the number of pixels on each side of the image.
    """
    import transformers

    vision = getattr(config, "vision_config", None) or config
    sizes = {
        "patch_size": getattr(vision, "patch_size", None),
        "temporal_patch_size": getattr(vision, "temporal_patch_size", None),
        "merge_size": getattr(vision, "spatial_merge_size", None),
    }
    failed = "transformers has no image processor for it"
    # The processor needs values, so no mode replaces its tensors.
    with disable_dispatch_modes():
        for name in _processors(config):
            try:
                kind: Any = getattr(transformers, name)
                known = {key: value for key, value in sizes.items() if value and hasattr(kind, key)}
                processed = kind(**known)(
                    [torch.zeros(_CHANNELS, size, size, dtype=torch.uint8, device="cpu")], return_tensors="pt"
                )
                return {key: torch.as_tensor(value, device="cpu") for key, value in processed.items()}
            # The library of the processor may be missing, or the processor may not take this size.
            except Exception as error:
                failed = f"{name}: {type(error).__name__}: {error}"
    raise ValueError(
        f"no image of {size} × {size} could be prepared for a model of type {config.model_type!r} ({failed})"
    )
