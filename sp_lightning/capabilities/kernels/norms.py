"""Norms of 16-bit gradients, with the bits of torch's norms of the widened gradients. Several norms are computed in parallel.

torch adds squares in the order of the elements: first in the lanes of one vector, then lane by lane, then the elements that are
left at the end. Therefore one thread reads a whole gradient. Squares of 16-bit numbers between 1e-19 and 1e19 are exact in
float32.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from sp_lightning.capabilities.kernels.jit import Compiled, address, find_kernel
from sp_lightning.capabilities.kernels.variants import NORM_RECIPES, NormArguments, NormRecipe
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode

_DTYPES = (torch.bfloat16, torch.float16)


def norms_of(gradients: Sequence[Tensor]) -> dict[int, Tensor]:
    """Returns the norms of 16-bit gradients, computed in float32.

    Args:
        gradients: gradients of any dtype and layout, on the host.

    Returns:
        By the ``id`` of each gradient that a kernel can read, its norm: a float32 tensor without dimensions.
    """
    found = dict[int, Tensor]()
    for dtype in _DTYPES:
        # torch computes the norm of a single element without a square, so kernels do not have its bits.
        dense = [each for each in gradients if each.dtype is dtype and each.is_contiguous() and each.numel() > 1]
        if dense and (kernel := _checked(dtype)) is not None:
            found |= zip(map(id, dense), _run(kernel, dense), strict=True)
    return found


def _run(kernel: Compiled, gradients: Sequence[Tensor]) -> list[Tensor]:
    found, many = torch.empty(len(gradients), dtype=torch.float32, device="cpu"), ctypes.c_int64 * len(gradients)
    places, counts = (
        many(*(address(each, "gradient") for each in gradients)),
        many(*(each.numel() for each in gradients)),
    )
    kernel.run(len(gradients), 1, NormArguments(ctypes.addressof(places), ctypes.addressof(counts), found.data_ptr()))
    return list(found.unbind())


@cache
def _checked(dtype: torch.dtype) -> Compiled | None:
    """Returns the kernel that has torch's bits for gradients of a dtype; None if no kernel has them."""
    found = find_kernel(dtype, NORM_RECIPES, partial(_agrees, dtype))
    return None if found is None else found[0]


def _agrees(dtype: torch.dtype, kernel: Compiled, _: NormRecipe) -> bool:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        generator, gradients = torch.Generator("cpu").manual_seed(0), list[Tensor]()
        for count in (4099, 100_000, *range(2, 40)):  # dtype and device are explicit: users may have set other defaults
            drawn = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
            gradients += [(drawn * scale).to(dtype) for scale in (1.0, 1e-21, 1e-23, 1e15)]
        theirs = [torch.linalg.vector_norm(each.to(torch.float32)) for each in gradients]
        return all(map(torch.equal, _run(kernel, gradients), theirs))
