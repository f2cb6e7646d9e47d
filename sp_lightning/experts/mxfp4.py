"""Loads experts in MXFP4 from the files of a checkpoint: :func:`load_mxfp4`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.experts.packed_stacks import PackedStack, is_flipped, named_stacks


def load_mxfp4(model: nn.Module, folder: str | Path) -> None:
    """Loads a checkpoint whose experts are MXFP4, such as gpt-oss's, and leaves the experts packed, with the bytes of the files.

    ``from_pretrained`` dequantises them on a computer without kernels for MXFP4, which takes four times the memory. Build the
    model without values::

        config = AutoConfig.from_pretrained(folder)
        with accelerate.init_empty_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        sp_lightning.load_mxfp4(model, folder)

    Args:
        model: the model. Its parameters may be on the ``meta`` device. All are replaced, and its experts are frozen.
        folder: the folder with ``*.safetensors``. For each stack ``NAME`` there is ``NAME_blocks``, ``uint8`` of shape
            ``(experts, out, in / 32, 16)``, two values in each byte, and ``NAME_scales``, ``uint8`` of shape
            ``(experts, out, in / 32)``: the exponents of two plus 127.

    Raises:
        ImportError: safetensors is missing.
        ValueError: the folder has no such files, the names or shapes of parameters in the files are not those of the model, or
            the model has buffers without values.
    """
    from safetensors import safe_open  # transformers depends on it

    files = _safetensors(Path(folder))
    tie = getattr(model, "tie_weights", None)
    if tie is not None:
        tie()  # accelerate.init_empty_weights() has made two parameters of tied ones
    stacks = {name: (owner, key) for name, owner, key in named_stacks(model)}
    expected = {*model.state_dict()}
    found: dict[str, Path] = {}
    for file in files:
        with safe_open(file, framework="pt") as opened:
            found |= dict.fromkeys(opened.keys(), file)

    def load(name: str) -> Tensor:
        with safe_open(found[name], framework="pt") as opened:
            loaded: Tensor = opened.get_tensor(name)
            return loaded

    packed = {name for name in stacks if f"{name}_blocks" in found and f"{name}_scales" in found}
    names = dict(model.named_parameters(remove_duplicate=False))
    loaded = {id(parameter) for name, parameter in names.items() if name in found}
    tied = {name for name, parameter in names.items() if name not in found and id(parameter) in loaded}
    missing = expected - packed - tied - {*found}
    extra = {*found} - expected - {f"{name}_{part}" for name in packed for part in ("blocks", "scales")}
    if missing or extra or not packed:
        raise ValueError(
            f"{folder} and {type(model).__name__} do not fit. Stacks in MXFP4: {len(packed)}; "
            f"missing in the files: {_few(missing)}; not in the model: {_few(extra)}."
        )
    for name in expected - packed - tied:
        _assign(model, name, load(name))
    for name in packed:
        owner, key = stacks[name]
        before: Any = owner._parameters[key]
        flipped = is_flipped(owner)
        packed_stack = _mxfp4(name, load(f"{name}_blocks"), load(f"{name}_scales"), before, flipped)
        owner._parameters[key] = nn.Parameter(packed_stack, requires_grad=False)
    if tie is not None:
        tie()
    empty = [name for name, each in (*model.named_parameters(), *model.named_buffers()) if each.is_meta]
    if empty:
        raise ValueError(
            f"{_few(empty)} have no values, and are not in the files. Build the model in accelerate.init_empty_weights(), "
            "which gives buffers their values."
        )


def _mxfp4(name: str, values: Tensor, scales: Tensor, weight: Tensor, flipped: bool) -> PackedStack:
    """Makes a packed stack from the values and the bytes of scales in the files."""
    experts, *matrix = weight.shape
    out, inputs = matrix[::-1] if flipped else matrix
    expected = {"blocks": (experts, out, inputs // 32, 16), "scales": (experts, out, inputs // 32)}
    for part, each in (("blocks", values), ("scales", scales)):
        if tuple(each.shape) != expected[part] or each.dtype != torch.uint8:
            raise ValueError(
                f"{name}_{part} is {each.dtype} of shape {tuple(each.shape)} in the files. Expected torch.uint8 of shape "
                f"{expected[part]} for the model's {tuple(weight.shape)}."
            )
    return PackedStack(values.flatten(2), scales.view(torch.float8_e8m0fnu), None, flipped, False, weight.dtype)


def _safetensors(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return sorted({folder / file for file in json.loads(index.read_text())["weight_map"].values()})
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"No *.safetensors in {folder}.")
    return files


def _assign(model: nn.Module, name: str, value: Tensor) -> None:
    prefix, _, key = name.rpartition(".")
    owner = model.get_submodule(prefix)
    before: Any = getattr(owner, key)
    if before.shape != value.shape:
        raise ValueError(
            f"{name!r} has the shape {tuple(value.shape)} in the files and {tuple(before.shape)} in the model."
        )
    value = value.to(before.dtype)
    if isinstance(before, nn.Parameter):
        owner._parameters[key] = nn.Parameter(value, before.requires_grad)
    else:
        owner._buffers[key] = value


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} others" if len(listed) > 3 else "") or "none"
