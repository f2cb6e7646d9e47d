"""Digests of weights, by which equal values are known."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import replace

import torch
from torch import DisableTorchFunctionSubclass, Tensor

from sp_lightning.device.layout import part
from sp_lightning.model.wrapped import parts
from sp_lightning.store.file_block import home_of
from sp_lightning.store.weights_in_files import FilePlace

_in_files: dict[tuple[FilePlace, torch.dtype, torch.Size], str] = {}
"""The digests of weights that are in files, each of which is read once."""


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype. It reads the weight's memory, or its file, once."""
    home = home_of(tensor)
    if home is None:
        return _of_values(tensor)
    key = home.place, tensor.dtype, tensor.shape
    if key not in _in_files:
        _in_files[key] = _of_values(part(home.block.contents(home.index), replace(home.span, offset=0)))
    return _in_files[key]


def _of_values(tensor: Tensor) -> str:
    result = hashlib.sha256(usedforsecurity=False)
    with DisableTorchFunctionSubclass():  # within a step a host parameter would give the device's values
        detached = tensor.detach()
    for _, plain in parts("", detached):
        memory = plain.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()
