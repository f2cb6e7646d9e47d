"""Digests of weights: SHA-256 of the values, the shape and the dtype."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

from torch import DisableTorchFunctionSubclass, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.core.model.wrapped import parts

known_digests: Any = WeakIdKeyDictionary()
"""For weights whose values need not be read each time: a function that returns the digest of the weight."""


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype."""
    known = known_digests.get(tensor)
    return digest_of_values(tensor) if known is None else known(tensor)


def digest_of_values(tensor: Tensor) -> str:
    """Returns :func:`digest` without :data:`known_digests`. It reads the weight's memory once."""
    result = hashlib.sha256(usedforsecurity=False)
    with DisableTorchFunctionSubclass():  # within a step, a host parameter would return the device's values
        detached = tensor.detach()
    for _, plain in parts("", detached):
        memory = plain.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()
