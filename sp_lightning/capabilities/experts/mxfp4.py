"""Loads experts in MXFP4 from the files of a checkpoint: :func:`load_mxfp4`."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from sp_lightning.capabilities.experts.packed_stacks import PackedStack, is_flipped, named_stacks
from sp_lightning.core.model.without_values import compute_buffers, find_without_values, refuse_without_values
from sp_lightning.trainer.weight_files import fill, find_prefix, open_weights

_PARTS = ("blocks", "scales")


def load_mxfp4(model: nn.Module, folder: str | Path) -> None:
    """Loads a checkpoint whose experts are MXFP4, such as gpt-oss's, and leaves the experts packed, with the bytes of the files.

    On a computer without kernels for MXFP4, ``from_pretrained`` dequantises the experts, which takes four times the memory.
    ``load_mxfp4`` works with every strategy. Build the model without values::

        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        sp_lightning.load_mxfp4(model, folder)

    Args:
        model: the model. Parameters that have values already are overwritten. The experts are replaced, and frozen.
        folder: the folder with ``*.safetensors``, or a file as for ``load_weights_from``. For each stack ``NAME`` there is
            ``NAME_blocks``, ``uint8`` of shape ``(experts, out, in / 32, 16)``, two values in each byte, and ``NAME_scales``,
            ``uint8`` of shape ``(experts, out, in / 32)``: the exponents of two plus 127.

    Raises:
        ImportError: safetensors is missing.
        FileNotFoundError: a file is missing.
        ValueError: the files have no experts in MXFP4; their names or shapes are not those of the model; or a buffer of the model
            has no values and is not in the files.
    """
    path = Path(folder)
    shapes, read = open_weights(path, "load_mxfp4")
    packed = [name.removesuffix("_blocks") for name in shapes if name.endswith("_blocks")]
    packed = [name for name in packed if f"{name}_scales" in shapes]
    if not packed:
        raise ValueError(
            f"load_mxfp4={str(path)!r} has no experts in MXFP4: expected NAME_blocks and NAME_scales for each stack, as in "
            "gpt-oss's files. Load other models with from_pretrained, and quantise them with pack_experts."
        )
    others = {name: shapes[name] for name in shapes.keys() - {f"{name}_{part}" for name in packed for part in _PARTS}}
    stacks = {name: (owner, key) for name, owner, key in named_stacks(model)}
    in_mxfp4 = {
        id(owner._parameters[key])
        for full, (owner, key) in stacks.items()
        if any(f".{full}".endswith(f".{name}") for name in packed)  # the files may have only a part of the model
    }
    found = [each for each in find_without_values(model) if id(each.tensor) not in in_mxfp4]
    prefix = find_prefix(model, found, others, path, "load_mxfp4")
    for name in packed:
        if prefix + name not in stacks:
            raise ValueError(
                f"load_mxfp4={str(path)!r} has {name}_blocks, and {type(model).__name__} has no stacked experts of the name "
                f"{prefix + name!r}."
            )
    for name in packed:
        owner, key = stacks[prefix + name]
        weight: Tensor = owner._parameters[key]  # type: ignore[assignment]
        stack = _packed(name, [read(f"{name}_{part}") for part in _PARTS], weight, flipped=is_flipped(owner))
        owner._parameters[key] = nn.Parameter(stack, requires_grad=False)
    fill(model, found, prefix, others, read)
    compute_buffers(model)
    refuse_without_values(model)


def _packed(name: str, parts: list[Tensor], weight: Tensor, *, flipped: bool) -> PackedStack:
    """Returns the packed stack that replaces a weight.

    Args:
        name: the name of the stack in the files.
        parts: the two tensors in the files, in the order of :data:`_PARTS`.
        weight: the model's weight.
        flipped: True if the weight has the shape ``(experts, in, out)``.

    Raises:
        ValueError: a tensor in the files has another dtype or shape than expected for the weight.
    """
    experts, *matrix = weight.shape
    out, inputs = matrix[::-1] if flipped else matrix
    shapes = ((experts, out, inputs // 32, 16), (experts, out, inputs // 32))
    for part, each, expected in zip(_PARTS, parts, shapes, strict=True):
        if each.shape != expected or each.dtype != torch.uint8:
            raise ValueError(
                f"{name}_{part} is {each.dtype} of shape {tuple(each.shape)} in the files. Expected torch.uint8 of shape "
                f"{expected} for the model's {tuple(weight.shape)}."
            )
    values, scales = parts
    return PackedStack(values.flatten(2), scales.view(torch.float8_e8m0fnu), None, flipped, False, weight.dtype)
