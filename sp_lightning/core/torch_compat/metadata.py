"""The functions of a tensor that read its metadata (shape, dtype, device, hooks) and never its values.

These functions work on a weight that is not on the GPU. Every other function uploads the weight first.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.torch_compat.private import TENSOR_METADATA


def _metadata() -> frozenset[Any]:
    attributes = (
        "shape", "dtype", "device", "layout", "ndim", "is_leaf", "grad_fn", "is_cuda", "is_cpu", "is_xpu",
        "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn", "is_mps", "itemsize", "nbytes",
        "names", "output_nr", "retains_grad", *TENSOR_METADATA,
    )  # fmt: skip
    methods = (
        "size", "dim", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_inference", "get_device",
        "ndimension", "is_signed", "__len__", "has_names",
    )  # fmt: skip
    functions = ("numel", "is_floating_point", "is_complex", "is_inference", "is_signed")
    found = [getattr(Tensor, name).__get__ for name in attributes if hasattr(getattr(Tensor, name, None), "__get__")]
    found += [getattr(Tensor, name) for name in methods if hasattr(Tensor, name)]
    found += [getattr(torch, name) for name in functions]
    return frozenset(found)


PLACE = frozenset(
    [getattr(Tensor, name).__get__ for name in ("device", "is_cuda", "is_cpu", "is_xpu")] + [Tensor.get_device]
)
"""The functions that tell on which device a tensor is."""

METADATA = _metadata()
"""The functions that read a tensor's metadata and never its memory, as ``__torch_function__`` receives them."""

UNCHANGED_BY_UPDATES = METADATA - {Tensor._version.__get__} | {Tensor.requires_grad.__get__}  # type: ignore[attr-defined]
"""The functions of a tensor whose results an optimizer step does not change."""
