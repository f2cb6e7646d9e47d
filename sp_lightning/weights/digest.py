"""What tells the values of one weight from those of another."""

from __future__ import annotations

import ctypes
import hashlib

from torch import Tensor

from sp_lightning.model.wrapped import parts


def digest(tensor: Tensor) -> str:
    """Returns what tells a weight's values, shape and dtype from others. It reads the weight's memory once."""
    found = hashlib.sha256(usedforsecurity=False)
    for _, part in parts("", tensor.detach()):
        memory = part.cpu().resolve_conj().resolve_neg().contiguous()
        found.update(repr((part.dtype, tuple(part.shape))).encode())
        if memory.nbytes:
            found.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return found.hexdigest()
