"""Models of diffusers: the trained part of a pipeline, the arguments of its forward, and the sizes of the other parts."""

from __future__ import annotations

import inspect
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.private import disable_dispatch_modes

INDEX = "model_index.json"
"""The file of a pipeline that lists its parts."""
# The names of the trained part in pipelines.
_TRAINED = ("transformer", "unet")
# The keys are the names of dtypes in the header of a safetensors file.
_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
# The image encoder of Wan is CLIP's: the first frame becomes 256 patches and a class token.
_IMAGE_TOKENS = 257
# SDXL is conditioned on three pairs of numbers: the original size, the corner of the crop, and the target size.
_TIME_IDS = 6


@dataclass(frozen=True)
class _Family:
    """The inputs of a diffusers model class. Sizes are the defaults of its pipeline.

    Attributes:
        layout: the dimensions of the latents.

            - ``image``: batch, channels, height, width
            - ``video``: batch, channels, frames, height, width
            - ``packed``: batch, tokens, channels
            - ``list``: a list of images
        text: the field of the config with the width of prompt embeddings.
        tokens: the number of tokens of a prompt.
        masked: True if the pipeline passes a mask of the prompt's tokens.
        scale: pixels on each side of a latent.
        pack: the latents on each side of a token, divided by the config's ``patch_size``. It is 2 if the pipeline packs latents
            into tokens and the config does not count this.
        size: height and width in pixels, for configs without ``sample_size``.
        frames: the number of frames of a video; 0 for images.
        frame_scale: frames per latent. The first latent has only one frame.
    """

    layout: Literal["image", "packed", "list", "video"]
    text: str
    tokens: int
    masked: bool = False
    scale: int = 8
    pack: int = 1
    size: tuple[int, int] = (1024, 1024)
    frames: int = 0
    frame_scale: int = 4


_FAMILIES = {
    "FluxTransformer2DModel": _Family("packed", "joint_attention_dim", 512, pack=2),
    "Flux2Transformer2DModel": _Family("packed", "joint_attention_dim", 512, pack=2),
    "ChromaTransformer2DModel": _Family("packed", "joint_attention_dim", 512, pack=2),
    "QwenImageTransformer2DModel": _Family("packed", "joint_attention_dim", 512),
    "SD3Transformer2DModel": _Family("image", "joint_attention_dim", 77 + 256),  # CLIP's and T5's
    "AuraFlowTransformer2DModel": _Family("image", "joint_attention_dim", 256),
    "ZImageTransformer2DModel": _Family("list", "cap_feat_dim", 512),
    "Lumina2Transformer2DModel": _Family("image", "cap_feat_dim", 256, masked=True),
    "SanaTransformer2DModel": _Family("image", "caption_channels", 300, masked=True, scale=32),
    "UNet2DConditionModel": _Family("image", "cross_attention_dim", 77),
    "WanTransformer3DModel": _Family("video", "text_dim", 512, size=(480, 832), frames=81),
    "HunyuanVideoTransformer3DModel": _Family(
        "video", "text_embed_dim", 256, masked=True, size=(720, 1280), frames=129
    ),
    "LTXVideoTransformer3DModel": _Family(
        "packed", "caption_channels", 128, masked=True, scale=32, size=(512, 704), frames=161, frame_scale=8
    ),
}

_INPUTS: dict[str, tuple[str, tuple[str | int, ...], torch.dtype | None]] = {
    "timestep": ("batch", ("batch",), None),
    "t": ("batch", ("batch",), None),
    "encoder_hidden_states": ("width", ("batch", "tokens", "width"), None),
    "encoder_attention_mask": ("masked", ("batch", "tokens"), torch.bool),
    "pooled_projections": ("pooled_projection_dim", ("batch", "pooled_projection_dim"), None),
    "guidance": ("guidance_embeds", ("batch",), None),
    "img_ids": ("axes", ("positions", "axes"), None),
    "txt_ids": ("axes", ("tokens", "axes"), None),
    "encoder_hidden_states_image": ("image_dim", ("batch", _IMAGE_TOKENS, "image_dim"), None),
    "additional_t_cond": ("use_additional_t_cond", ("batch",), torch.long),
}
"""The tensors that forwards take besides latents, by their names: a size that is not 0 if the input exists, the shape as names of
sizes, and the dtype (None: torch's default). Sizes are those of :meth:`LatentInputs.arguments`, and fields of the config."""


def import_diffusers(model: str, kind: str) -> Any:
    """Imports diffusers without fake tensors, because its modules may create tensors during the import.

    Args:
        model: the name of the model, for the error.
        kind: the class in the config, for the error.

    Raises:
        ImportError: diffusers is not installed.
    """
    try:
        with disable_dispatch_modes():
            import diffusers
    except ImportError as error:
        raise ImportError(
            f"{model!r} is a config of diffusers ({kind}), and diffusers is not installed: pip install diffusers"
        ) from error
    return diffusers


def trained_part(index: Path) -> str:
    """Returns the name of the trained part of a pipeline. Its folder has the same name.

    Raises:
        ValueError: no folder of a transformer or a UNet has a config.
    """
    for name in _TRAINED:
        if (index.parent / name / "config.json").is_file():
            return name
    expected = " or ".join(f"{name}/config.json" for name in _TRAINED)
    raise ValueError(
        f"{str(index)!r}: expected {expected} beside it. Copy the config there, or give the folder of the part that you train, "
        f"{str(index.parent / 'NAME')!r}."
    )


def stored_dtype(config: Path) -> torch.dtype | None:
    """Returns the dtype of a model's weights; None if it is unknown.

    The dtype is that of the config. If the config has none, it is the dtype of the first weight in a safetensors file of the
    same folder.
    """
    raw = json.loads(config.read_text())
    named = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype")), None)
    if isinstance(named, torch.dtype):
        return named
    for file in sorted(config.parent.glob("*.safetensors"))[:1]:
        with file.open("rb") as opened:
            # The file begins with the length of its header in 8 bytes, and the header in JSON.
            header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
        weights = [_DTYPES.get(value["dtype"]) for name, value in header.items() if name != "__metadata__"]
        return next(iter(weights), None)
    return None


def squared_error(outputs: Sequence[Tensor]) -> Tensor:
    """Returns the loss of diffusion: the mean squared error of the predicted noise or velocity, summed over the outputs."""
    return torch.stack(
        [(each.float() - torch.zeros_like(each, dtype=torch.float32)).square().mean() for each in outputs]
    ).sum()


class LatentInputs:
    """The arguments of the forward of a diffusion model.

    Attributes:
        tokens: the number of tokens of a prompt.
        usual: the default height and width of an image or a frame in pixels.
        unit: ``images`` or ``videos``.
    """

    def __init__(self, module: nn.Module, file: Path, batch: int, tokens: int | None, frames: int | None) -> None:
        """Reads the sizes from the config of a model.

        Args:
            module: a model of diffusers.
            file: the config of the model, for messages.
            batch: the number of images or videos.
            tokens: the number of tokens of a prompt; None for the default.
            frames: the number of frames of a video; None for the default.

        Raises:
            ValueError: the arguments of the model's forward are not known, or the model does not take videos, or this number of
                frames.
        """
        kind = type(module).__name__
        if kind not in _FAMILIES:
            raise ValueError(
                f"{str(file)!r}: `plan` does not know the inputs of {kind}. It reads {', '.join(_FAMILIES)}. For another model, "
                "give a function that returns it with example_input_array, plan my_file:make_model "
                "(examples/guide/diffusion.md), or compare your LightningModule: check my_file:Module. "
                "print(trainer.strategy.plan) lists the memory of a run."
            )
        self._kind, self._family, self._batch = kind, _FAMILIES[kind], batch
        self._config: Any = module.config
        self._taken = list(inspect.signature(module.forward).parameters)
        family = self._family
        if frames is not None and not family.frames:
            raise ValueError(f"--frames {frames}: {kind} takes images. Leave --frames out.")
        self.tokens = tokens or family.tokens
        self.unit = "videos" if family.frames else "images"
        self._frames = frames or family.frames
        if family.frames and (more := (self._frames - 1) % family.frame_scale):
            raise ValueError(
                f"--frames {self._frames}: {kind} takes 1 frame and a multiple of {family.frame_scale}. Use --frames "
                f"{self._frames - more}."
            )
        # A model with 3 channels takes pixels instead of latents. A latent of Wan's VAE with 48 channels has 16 × 16 pixels.
        self._scale = {3: 1, 48: 16}.get(self._of("in_channels"), family.scale)
        sample = self._of("sample_size")
        sides = [sample, sample] if isinstance(sample, int) else sample
        self.usual = (sides[0] * self._scale, sides[1] * self._scale) if sides else family.size

    def _of(self, name: str) -> Any:
        """Returns a field of the config; None if the config does not have it."""
        return getattr(self._config, name, None)

    @property
    def _patch(self) -> tuple[int, int, int] | None:
        """The size of a token in frames, rows and columns of latents; None for a UNet."""
        size = self._of("patch_size") or next(iter(self._of("all_patch_size") or ()), None)
        if size is None:
            return None
        if not isinstance(size, int):
            return tuple(size)
        side = size * self._family.pack
        return self._of("patch_size_t") or 1, side, side

    def _latents(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Returns the frames, rows and columns of latents of one image or video.

        Args:
            size: height and width in pixels.

        Raises:
            ValueError: the size is not a multiple of the pixels of a token, or for a UNet of a latent.
        """
        time, *sides = self._patch or (1, 1, 1)
        steps = [self._scale * side for side in sides]
        fit = [max(pixels - pixels % step, step) for pixels, step in zip(size, steps, strict=True)]
        if (*fit,) != size:
            asked, instead = ("x".join(map(str, each[:1] if size[0] == size[1] else each)) for each in (size, fit))
            pixels = " × ".join(str(step) for step in dict.fromkeys(steps))
            raise ValueError(
                f"--image {asked}: {self._kind} takes multiples of {pixels} pixels. Use --image {instead}."
            )
        frames = (max(self._frames, 1) - 1) // self._family.frame_scale + 1
        # Frames are rounded up to whole tokens.
        return -(-frames // time) * time, size[0] // self._scale, size[1] // self._scale

    def _grid(self, size: tuple[int, int]) -> tuple[int, int, int]:
        """Returns the frames, rows and columns of tokens; for a UNet, those of latents."""
        frames, rows, columns = self._latents(size)
        time, height, width = self._patch or (1, 1, 1)
        return frames // time, rows // height, columns // width

    def positions(self, size: tuple[int, int]) -> int:
        """Returns the number of tokens of an image or a video; for a UNet, the number of latents."""
        frames, rows, columns = self._grid(size)
        return frames * rows * columns

    def items(self, size: tuple[int, int]) -> str:
        """Returns a description of the batch, for images of ``size`` pixels (height and width)."""
        frames, rows, columns = self._latents(size)
        many = self._batch > 1
        one = "video" if self._family.frames else "image"
        pixels = f"{size[0]} × {size[1]}"
        latents = f"latents {rows} × {columns}"
        if frames > 1:
            pixels += f" × {self._frames} frames"
            latents += f" × {frames} frames"
        if self._patch is not None:
            latents += f", {self.positions(size)} tokens"
        batch = f"{self._batch} {one}{'s' if many else ''} of {pixels} ({latents})"
        return f"{batch}, {'prompts' if many else 'a prompt'} of {self.tokens} tokens"

    def arguments(self, size: tuple[int, int]) -> dict[str, Any]:
        """Returns the arguments of the forward. Floating-point tensors have torch's default dtype."""
        batch, tokens, family, grid = self._batch, self.tokens, self._family, self._grid(size)
        width = self._of("encoder_hid_dim") or self._of(family.text)
        sizes: dict[str, Any] = {
            "batch": batch,
            "tokens": tokens,
            "width": width if isinstance(width, int) else width[0],  # a UNet may have a width for each of its blocks
            "positions": self.positions(size),
            "axes": len(self._of("axes_dims_rope") or ()),
            "masked": family.masked,
        }
        # The latents are the first argument of the forward of every model.
        made: dict[str, Any] = {self._taken[0]: self._noise(size)}
        for name, (needed, shape, dtype) in _INPUTS.items():
            if name in self._taken and (sizes.get(needed) or self._of(needed)):
                lengths = [each if isinstance(each, int) else sizes.get(each) or self._of(each) for each in shape]
                made[name] = torch.ones(lengths, dtype=dtype)
        others: dict[str, Any] = {
            "cap_feats": [torch.zeros(tokens, sizes["width"]) for _ in range(batch)],
            "img_shapes": [[grid]] * batch,
        }
        if family.layout == "packed":
            others |= zip(("num_frames", "height", "width"), grid, strict=True)
        if self._of("addition_embed_type") == "text_time":
            pooled = self._of("projection_class_embeddings_input_dim") - _TIME_IDS * self._of("addition_time_embed_dim")
            others["added_cond_kwargs"] = {
                "text_embeds": torch.zeros(batch, pooled),
                "time_ids": torch.zeros(batch, _TIME_IDS),
            }
        return made | {name: value for name, value in others.items() if name in self._taken}

    def _noise(self, size: tuple[int, int]) -> Any:
        frames, *sides = self._latents(size)
        layout = self._family.layout
        channels = self._of("in_channels")
        if layout == "packed":
            return torch.zeros(self._batch, self.positions(size), channels)
        if layout == "list":
            return [torch.zeros(channels, frames, *sides) for _ in range(self._batch)]
        return torch.zeros(self._batch, channels, *[frames] * (layout == "video"), *sides)
