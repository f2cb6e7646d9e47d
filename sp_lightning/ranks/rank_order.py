"""Means over ranks whose bits depend on the order of ranks alone.

A library's own sum depends on where an element lies in the buffer, so from three ranks on it gives other bits for other
buffers (``bucket_cap_mb``). Here every rank receives the same part of everybody's tensor and adds in the order of ranks:
on several nodes first the ranks of each node, then the nodes.
"""

# Annotations are evaluated in this file, because DistributedDataParallel checks those of a hook.
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)


def added_in(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which tensors of a dtype are added: half precision in float32."""
    return torch.float32 if dtype in _HALF else dtype


def sum_in_order(parts: Iterable[Tensor], out: Tensor) -> None:
    """Writes the sum of tensors, added one after the other. A sum in half precision is rounded once, at its end."""
    others = iter(parts)
    first = next(others)
    total = out.copy_(first) if added_in(out.dtype) is out.dtype else first.to(torch.float32, copy=True)
    for each in others:
        total += each
    if total is not out:
        out.copy_(total)


def rank_order_hook(state: dist.ProcessGroup | int | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for PyTorch's DistributedDataParallel, with which it gives the bits that superpipeline gives.

    Each rank multiplies its gradients by one over the number of ranks, as DistributedDataParallel does, and they are added
    in the order of ranks. It works with every backend that has ``all_to_all_single``, on the CPU too::

        ddp_model.register_comm_hook(None, sp_lightning.rank_order_hook)

    On several nodes superpipeline adds up the ranks of each node and then the nodes. The hook does so if it is told how many
    ranks each node has, as ``trainer.num_devices`` is::

        ddp_model.register_comm_hook(trainer.num_devices, sp_lightning.rank_order_hook)

    Args:
        state: the process group; None for the default one; or the number of ranks on each node of the default one.
        bucket: the gradients.

    Raises:
        ValueError: nodes with so many ranks do not make up the ranks that there are.
    """
    group: Any = None if isinstance(state, int) else state
    size, flat = dist.get_world_size(group), bucket.buffer()
    per_node = state if isinstance(state, int) else size
    if per_node < 1 or size % per_node:
        raise ValueError(
            f"rank_order_hook was told that each node has {per_node} ranks, but there are {size} in all. Give it the number of "
            "devices that each node has (trainer.num_devices)."
        )
    step = -(-flat.numel() // size)
    sent = flat.new_zeros(step * size)
    torch.mul(flat, 1 / size, out=sent[: flat.numel()])
    received = torch.empty_like(sent)
    dist.all_to_all_single(_bytes(received), _bytes(sent), group=group)
    own = flat.new_empty(step)
    sums = [torch.empty_like(own, dtype=added_in(own.dtype)) for _ in range(size // per_node)]
    for node, total in zip(received.view(-1, per_node, step).unbind(), sums, strict=True):
        sum_in_order(node.unbind(), total)
    sum_in_order(sums, own)
    dist.all_gather_into_tensor(_bytes(sent), _bytes(own), group=group)
    flat.copy_(sent[: flat.numel()])
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's memory. gloo does not know all dtypes, and nothing is computed with what is sent."""
    return tensor.view(torch.uint8)
