"""Norms of gradients on the CPU that have the bits of torch's norms on a GPU.

Before plain Lightning clips, it computes the norm of every gradient on the GPU (``_foreach_norm``). torch's source shows how the
GPU rounds these sums. So offloaded gradients need not be copied to the GPU again for their norms. As with updates, a kernel is
used only if its norms equal the GPU's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial

import torch
from torch import Tensor

from sp_lightning.capabilities.kernels.jit import LOG, Compiled, address, find_kernel
from sp_lightning.capabilities.kernels.variants import CHUNK, EACH, THREADS, WARP, GpuNormArguments, GpuNormRecipe
from sp_lightning.core.device.layout import is_dense
from sp_lightning.core.layers.narrow_gradient import (
    Norms,
    exact_scale,
    is_unaligned,
    narrow_and_changes,
    note_unaligned,
)
from sp_lightning.core.observe.messages import degrading
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import foreach_norm

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_RECIPES = (GpuNormRecipe(fused=True), GpuNormRecipe(fused=False))


def has_norms_of(device: torch.device, largest: int) -> bool:
    """Returns True if norms on the CPU have a GPU's bits. The first call compiles kernels and compares their norms.

    Args:
        device: the GPU.
        largest: the number of elements of the largest gradient. If it has more chunks than a block has threads, a sample of
            135 MB is compared as well.
    """
    confirmed = all(_confirmed(device, dtype) is not None for dtype in DTYPES)
    return confirmed and (largest <= _FEW or _adds_up_many(device))


def norms_like(device: torch.device, gradients: Sequence[Tensor]) -> list[Tensor]:
    """Returns the norm of each gradient, computed in float32: float32 tensors without dimensions.

    Args:
        device: the GPU. The norms are bit-identical to those that torch computes on it. :func:`has_norms_of` must be True for it.
        gradients: on the host, in one of :data:`DTYPES`, without gaps in memory. Dimensions may be in any order: the GPU reads
            memory from its beginning to its end as well.
    """
    norms: dict[int, Tensor] = {}
    for dtype in {each.dtype for each in gradients}:
        found, same = _confirmed(device, dtype), [each for each in gradients if each.dtype is dtype]
        assert found is not None
        norms |= zip(map(id, same), _run(found, same), strict=True)
    return [norms[id(each)] for each in gradients]


class GpuNorms(Norms):
    """Computes norms of gradients on the CPU with the bits of norms on a GPU.

    Args:
        device: the GPU. :func:`has_norms_of` must be True for it.
    """

    dtypes = DTYPES

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device

    def replaces_torch(self, gradient: Tensor) -> bool:
        return gradient.layout is torch.strided and gradient.dtype in DTYPES and is_dense(gradient)

    def total(self, norms: Sequence[Tensor]) -> Tensor:
        # On the GPU, and with the operators of torch.nn.utils.get_total_norm. The host waits for each copy, so norms on the host
        # are copied together. Norms of layers that stay are on the GPU already.
        found, of_host = [*norms], [index for index, norm in enumerate(norms) if norm.is_cpu]
        if of_host:
            together = torch.stack([norms[index] for index in of_host]).to(self._device)
            for index, norm in zip(of_host, together, strict=True):
                found[index] = norm
        return torch.linalg.vector_norm(torch.stack(found), 2.0)

    def of(self, gradients: Sequence[Tensor]) -> list[Tensor]:
        made = [(gradient, *narrow_and_changes(gradient)) for gradient in gradients]
        scales = [1.0 if came is gradient else exact_scale(came, changes) for gradient, came, changes in made]
        read = [came for scale, (_, came, _) in zip(scales, made, strict=True) if scale]
        known = iter(norms_like(self._device, read))
        # `_widened` returns the same memory for each gradient, so the norms of widened gradients are computed one by one.
        norms = [
            next(known).mul_(scale) if scale else norms_like(self._device, [self._widened(*each)])[0]
            for scale, each in zip(scales, made, strict=True)
        ]
        return [norm.to(gradient.dtype) for norm, (gradient, _, _) in zip(norms, made, strict=True)]


def _run(kernel: Compiled, gradients: Sequence[Tensor]) -> list[Tensor]:
    # The tables are made by operators: a loop over the chunks, of which an 8B model has 120,000, would hold the interpreter's
    # lock for 0.2 s of backward.
    columns = list[tuple[Tensor, Tensor, Tensor]]()
    for each in gradients:
        begins = torch.arange(0, each.numel(), CHUNK, dtype=torch.int64, device="cpu")
        in_fours = torch.full_like(begins, each.numel() % EACH == 0 and not is_unaligned(each))
        places = begins * each.element_size() + address(each, "gradient")
        columns.append((places, (each.numel() - begins).clamp_(max=CHUNK), in_fours))
    places, counts, in_fours = map(torch.cat, zip(*columns, strict=True))
    sums = torch.empty(len(places), dtype=torch.float32, device="cpu")
    kernel.run(len(places), 1, GpuNormArguments(*(each.data_ptr() for each in (places, counts, in_fours, sums))))
    of_each = sums.split([len(begins) for begins, *_ in columns])
    # torch's square root of several numbers (MKL) is not always rounded to the nearest float32. A square root in double
    # precision that is then rounded to float32 always is.
    roots = [math.sqrt(each) for each in _added(of_each).tolist()]
    return list(torch.tensor(roots, dtype=torch.float32, device="cpu").unbind())


def _added(sums: Sequence[Tensor]) -> Tensor:
    """Returns the sum of each gradient: adds the sums of its chunks as torch's ``lpnorm_cleanup`` does."""
    of_threads = torch.zeros(len(sums), THREADS, dtype=torch.float32, device="cpu")
    for at, each in enumerate(sums):
        for some in each.split(THREADS):
            of_threads[at, : len(some)] += some
    of_warps = _tree(of_threads.view(len(sums), THREADS // WARP, WARP))
    return _tree(of_warps)


def _tree(values: Tensor) -> Tensor:
    """Adds up the last dimension as the threads of a warp do."""
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


@cache
def _confirmed(device: torch.device, dtype: torch.dtype) -> Compiled | None:
    """Returns the kernel whose norms of gradients in a dtype equal the GPU's; None if no kernel's do."""
    found = find_kernel(dtype, _RECIPES, partial(_agrees, device, dtype))
    return None if found is None else found[0]


_COUNTS = (1, 2, 3, 4, 5, 31, 2047, 2048, 2049, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 8, 1_000_003, *[8200] * 100)
"""The numbers of elements of the compared gradients: many, because few norms show whether squares are rounded."""
_FEW = THREADS * CHUNK
"""The most elements of a gradient with a chunk for each thread of a block."""
_MANY = (THREADS + 3) * CHUNK + 12
"""Elements of a gradient with more chunks than a block has threads: 135 MB."""


@cache
def _adds_up_many(device: torch.device) -> bool:
    """Returns True if the sums of more chunks than a block has threads are added as on the GPU. False if the GPU has no memory.

    One dtype is compared: the sums of chunks are float32 for gradients of any dtype.
    """
    kernel = _confirmed(device, torch.float32)
    assert kernel is not None
    what = "A comparison of norms with the GPU's"
    with (
        degrading(LOG, what, "Norms have the CPU's last bits"),
        no_inference_mode(),
        no_dispatch_modes(),
        torch.no_grad(),
        torch.DisableTorchFunctionSubclass(),
    ):
        gradient = torch.randn(
            _MANY, generator=torch.Generator("cpu").manual_seed(0), dtype=torch.float32, device="cpu"
        )
        (theirs,) = foreach_norm([gradient.to(device)])
        return torch.equal(_run(kernel, [gradient])[0], theirs.cpu())
    return False


def _agrees(device: torch.device, dtype: torch.dtype, kernel: Compiled, _: GpuNormRecipe) -> bool:
    with no_inference_mode(), no_dispatch_modes(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
        gradients = sample(dtype)
        ours = _run(kernel, gradients)
        # In mixed precision plain Lightning's gradients are float32 tensors with 16-bit values. With 16-bit weights they are
        # 16-bit tensors. Both are compared.
        for kept in {torch.float32, dtype}:
            theirs = foreach_norm([_placed(each, device, kept) for each in gradients])
            if not all(torch.equal(own.to(kept), each.cpu()) for own, each in zip(ours, theirs, strict=True)):
                return False
        return True


def _placed(gradient: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Returns a copy of a gradient on the GPU, at an odd offset if it is unaligned."""
    odd = int(is_unaligned(gradient))
    return torch.empty(odd + gradient.numel(), dtype=dtype, device=device)[odd:].copy_(gradient)


def sample(dtype: torch.dtype) -> list[Tensor]:
    """Returns gradients of many sizes, with usual, small and large numbers."""
    generator, gradients = torch.Generator("cpu").manual_seed(0), list[Tensor]()
    for count in _COUNTS:  # dtype and device are explicit: users may have set other defaults
        drawn = torch.randn(count, generator=generator, dtype=torch.float32, device="cpu")
        gradients += [(drawn * scale).to(dtype) for scale in (1.0, 1e-21, 3e-4, 1e15)]
    for each in gradients[-4:]:
        note_unaligned(each)
    return gradients
