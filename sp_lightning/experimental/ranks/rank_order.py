"""Means over processes whose bits depend only on the order of processes.

In the sum of a communication library, the order of addition depends on the position of an element in the buffer. So with three or
more processes the bits of the sum depend on the size of the buffer (``bucket_cap_mb``). In this file each process receives one
part of every process's tensor, and adds the parts in the order of processes: on several nodes first the processes of each node,
then the nodes.
"""

# This file evaluates its annotations (no `from __future__ import annotations`), because DistributedDataParallel checks the
# annotations of a hook.
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""The all-gather of flat tensors. Newer versions of torch have renamed the function."""

_HALF = (torch.float16, torch.bfloat16)


def added_in(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype in which tensors of ``dtype`` are added: float32 for half precision, otherwise ``dtype``."""
    return torch.float32 if dtype in _HALF else dtype


def sum_in_order(parts: Iterable[Tensor], out: Tensor) -> None:
    """Writes the sum of tensors to ``out``. Half precision is added in float32, and rounded once, at the end.

    Args:
        parts: the tensors, in the order in which they are added. At least one.
        out: the memory for the sum. Its dtype is the dtype of the sum.
    """
    others = iter(parts)
    first = next(others)
    total = out.copy_(first) if added_in(out.dtype) is out.dtype else first.to(torch.float32, copy=True)
    for each in others:
        total += each
    if total is not out:
        out.copy_(total)


def mean_in_order(
    flat: Tensor,
    per_node: int,
    group: Any = None,
    wait: Callable[[Any], None] = lambda work: work.wait(),
    to: int | None = None,
) -> list[Tensor]:
    """Replaces a flat tensor by its mean over all processes of a group. Collective.

    Each process multiplies its tensor by 1 / processes, as DistributedDataParallel does. The products are added in order.

    Args:
        flat: the tensor. Its number of elements is a multiple of the number of processes.
        per_node: the number of processes of each node.
        group: the process group; None for the default group.
        wait: waits for a collective.
        to: the process whose tensor is replaced; None for all. The tensors of other processes have no use afterwards.

    Returns:
        The memory that was used, which must exist until the present stream has computed the mean.
    """
    size = dist.get_world_size(group)
    flat.mul_(1 / size)
    received = torch.empty_like(flat)
    wait(dist.all_to_all_single(_bytes(received), _bytes(flat), group=group, async_op=True))
    own = flat.new_empty(flat.numel() // size)
    sums = [torch.empty_like(own, dtype=added_in(own.dtype)) for _ in range(size // per_node)]
    for node, total in zip(received.view(-1, per_node, own.numel()).unbind(), sums, strict=True):
        sum_in_order(node.unbind(), total)
    sum_in_order(sums, own)
    if to is None:
        wait(all_gather_single(_bytes(flat), _bytes(own), group=group, async_op=True))
    else:
        parts = list(_bytes(flat).chunk(size)) if dist.get_rank() == to else None
        wait(dist.gather(_bytes(own), parts, to, group=group, async_op=True))
    return [received, own, *sums]


def rank_order_hook(state: dist.ProcessGroup | int | None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """A communication hook for PyTorch's DistributedDataParallel. Its gradients are then bit-identical to superpipeline's.

    Each rank multiplies its gradients by 1 / ranks, as DistributedDataParallel does. The products are added in rank order.
    The hook works with each backend that has ``all_to_all_single``, also on the CPU::

        ddp_model.register_comm_hook(None, sp_lightning.rank_order_hook)

    On several nodes superpipeline adds the gradients of the ranks of each node, and then the sums of the nodes. To make the hook
    add in this order, pass the number of ranks of each node (``trainer.num_devices``)::

        ddp_model.register_comm_hook(trainer.num_devices, sp_lightning.rank_order_hook)

    Args:
        state: the process group; None for the default group; or the number of ranks of each node, with the default group.
        bucket: the gradients. They are overwritten with the result.

    Raises:
        ValueError: the number of ranks is not a multiple of the ranks per node.
    """
    group: Any = None if isinstance(state, int) else state
    size, flat = dist.get_world_size(group), bucket.buffer()
    per_node = state if isinstance(state, int) else size
    if per_node < 1 or size % per_node:
        raise ValueError(
            f"rank_order_hook was told that each node has {per_node} ranks, but there are {size} in all. Give it the number of "
            "devices that each node has (trainer.num_devices)."
        )
    padded = flat.new_zeros(-(-flat.numel() // size) * size)
    padded[: flat.numel()] = flat
    mean_in_order(padded, per_node, group)
    flat.copy_(padded[: flat.numel()])
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(flat)
    return future


def _bytes(tensor: Tensor) -> Tensor:
    """Returns a view of the tensor as ``uint8``, because gloo does not support all dtypes. The data is only copied."""
    return tensor.view(torch.uint8)
