"""Means over ranks whose bits depend on the order of ranks alone.

A library's own sum depends on where an element lies in the buffer, so from three ranks on it gives other bits for other
buffers (``bucket_cap_mb``). Here every rank receives the same part of everybody's tensor and adds in the order of ranks.
"""

# Annotations are evaluated in this file, because DistributedDataParallel checks those of a hook.
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def sum_in_order(parts: Iterable[Tensor], out: Tensor) -> None:
    """Writes the sum of tensors, added one after the other. Half precision is added in float32 and rounded once."""
    others = iter(parts)
    first = next(others)
    total = first.float() if first.dtype in _HALF else out.copy_(first)
    for each in others:
        total += each
    if total is not out:
        out.copy_(total)


def rank_order_hook(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for PyTorch's DistributedDataParallel, with which it gives the bits that superpipeline gives.

    Each rank multiplies its gradients by one over the number of ranks, as DistributedDataParallel does, and they are added
    in the order of ranks. It works with every backend that has ``all_to_all_single``, on the CPU too::

        ddp_model.register_comm_hook(None, sp_lightning.rank_order_hook)

    Args:
        state: the process group; None for the default one.
        bucket: the gradients.
    """
    group: Any = state
    size, flat = dist.get_world_size(group), bucket.buffer()
    step = -(-flat.numel() // size)
    sent = flat.new_zeros(step * size)
    torch.mul(flat, 1 / size, out=sent[: flat.numel()])
    received = torch.empty_like(sent)
    dist.all_to_all_single(_bytes(received), _bytes(sent), group=group)
    own = flat.new_empty(step)
    sum_in_order(received.view(size, step).unbind(), own)
    dist.all_gather_into_tensor(_bytes(sent), _bytes(own), group=group)
    flat.copy_(sent[: flat.numel()])
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory. gloo does not know all dtypes, and nothing is computed with what is sent."""
    return tensor.view(torch.uint8)
