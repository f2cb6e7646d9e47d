"""Small checkpoints in MXFP4, in the layout of gpt-oss."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sp_lightning.capabilities.experts.packed_stacks import named_stacks
from tests.support import stacked


def dense(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False, **more: Any) -> Any:
    """A small gpt-oss with values."""
    torch.manual_seed(0)
    return stacked.transformer("gpt-oss", intermediate_size=64, tie_word_embeddings=tied, **more).net.to(dtype)


def files_of(model: Any) -> dict[str, Tensor]:
    """The tensors of a checkpoint like gpt-oss's: random experts in MXFP4, the other weights of the model."""
    tensors = {name: value.clone() for name, value in model.state_dict().items() if "experts.gate" not in name}
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    generator = torch.Generator().manual_seed(3)
    for name, owner, key in named_stacks(model):
        experts, inputs, out = getattr(owner, key).shape
        tensors.pop(name, None)
        shape = (experts, out, inputs // 32)
        tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        tensors[f"{name}_scales"] = torch.randint(115, 124, shape, dtype=torch.uint8, generator=generator)
        tensors[f"{name}_bias"] = torch.randn(experts, out, generator=generator).bfloat16()
    return tensors


def write(folder: Path, tensors: dict[str, Tensor], shards: int = 1) -> Path:
    """Writes ``*.safetensors``, of which the index of several names all but one."""
    folder.mkdir(exist_ok=True)
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return folder
    names = sorted(tensors)  # so that blocks and scales of a stack are in different files
    files = {name: f"model-{number % shards:05}.safetensors" for number, name in enumerate(names)}
    for file in {*files.values()}:
        save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    save_file({"unused": torch.ones(1)}, folder / "other.safetensors")
    return folder
