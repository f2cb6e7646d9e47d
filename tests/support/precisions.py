"""Restores how precisely torch computes in float32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from sp_lightning.core.torch_compat.private import _FLOAT32, float32_precisions


@contextmanager
def restored_precisions() -> Iterator[None]:
    """Inside, tests may set precisions in any way. The public setters cannot set all of them."""
    before = float32_precisions()
    try:
        yield
    finally:
        torch.set_float32_matmul_precision("highest")  # the legacy setting
        for place, precision in zip(_FLOAT32.values(), before.values(), strict=True):
            torch._C._set_fp32_precision_setter(*place, precision)
