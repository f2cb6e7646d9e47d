"""Digests of weights, by which equal values are known."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor

from sp_lightning.model.wrapped import parts


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype. It reads the weight's memory once."""
    result = hashlib.sha256(usedforsecurity=False)
    for _, part in parts("", tensor.detach()):
        memory = part.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((part.dtype, tuple(part.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()
