"""Tables: embeddings of which only the rows that are looked up travel, and only those rows' gradients come back.

The host gathers a batch's rows, each once, and sends them; on the device they are a small embedding, looked up by
renumbered indices with torch's own functions. So values and gradients are summed as ever, in the same order. A table is
to the engine a further layer, without a slot and without visits: whatever else reads its weight brings all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning.device import Device, PinnedMemory, Stream, Wait
from sp_lightning.host import HostBlock
from sp_lightning.memory import normal_mode, strided, unseen


class Table:
    """One embedding.

    Args:
        module: the embedding; whether its gradients are to be sparse may change.
        block: its weight on the host.
        device: the seam.
        pin: page-lock the memory that rows leave from.
        reading: a context in which the host's weight is up to date and nobody writes it; what it gives says whether rows
            will do, which is so unless the whole weight is on the device.
        compacted: called in backward where a gradient that would be dense leaves as rows.
    """

    def __init__(
        self,
        module: nn.Embedding,
        block: HostBlock,
        device: Device,
        *,
        pin: bool,
        reading: Callable[[], AbstractContextManager[bool]],
        compacted: Callable[[], None],
    ) -> None:
        self._block = block
        self._device = device
        self._pin = pin
        self._reading = reading
        self.compacted = compacted
        self.module = module
        self.used_whole = False
        """Whether, in this step, anything has computed with the whole weight."""
        self._leaving = PinnedMemory(device, 0, pin=False)
        self._left: Any = None
        self.sent_bytes = 0
        """Of all rows so far."""

    def look_up(
        self,
        weight: Any,
        indices: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Tensor | None:
        """As ``torch.nn.functional.embedding(indices, weight, …)``; None where that needs the whole weight.

        Raises:
            IndexError: there is no such row.
        """
        count = weight.shape[0]
        odd = indices.dtype not in (torch.int32, torch.int64) or not -count <= (padding_idx or 0) < count
        odd = odd or (sparse and not self.module.sparse)  # beside dense ones of the module's own
        if odd or max_norm is not None or torch._C._are_functorch_transforms_active():
            return None
        with self._reading() as possible:
            if not possible:
                return None
            with unseen(), normal_mode():
                numbers, renumbered = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
                renumbered = renumbered.to(indices.device)
            for number in map(int, (numbers[:1], numbers[-1:]) if numbers.numel() else ()):
                if not 0 <= number < count:
                    name = self._block.planned.name
                    raise IndexError(f"index out of range: {name!r} has {count} rows and was asked for row {number}.")
            rows = _Rows.apply(weight, self, numbers)
        padding = None
        if padding_idx is not None:
            (found,) = torch.where(numbers == (padding_idx + count if padding_idx < 0 else padding_idx))
            padding = int(found[0]) if len(found) else None
        return F.embedding(renumbered, rows, padding, None, norm_type, scale_grad_by_freq, sparse)

    def rows(self, numbers: Tensor) -> Tensor:
        """Gather rows on the host and send them.

        Args:
            numbers: on the host, int64, each once, ascending.
        """
        span = self._block.planned.spans[0]
        width = span.shape[1]
        nbytes = len(numbers) * width * span.dtype.itemsize
        device, source = self._device, self._block.weights
        device.synchronize(self._left, Wait.GATHER_AFTER_SEND)
        with unseen(), normal_mode(), torch.no_grad():
            if self._leaving.bytes.nbytes < nbytes:
                self._leaving = PinnedMemory(device, 2 * nbytes, pin=self._pin)
            leaving = self._leaving.bytes[:nbytes]
            device.access(source, None, write=False)
            device.access(leaving, None, write=True)
            weight = (
                source[span.offset : span.offset + span.nbytes].view(span.dtype).as_strided(span.shape, span.stride)
            )
            torch.index_select(weight, 0, numbers, out=leaving.view(span.dtype).view(len(numbers), width))
            arrived = device.send(leaving)
            self._left = device.record(Stream.UPLOAD)
            self.sent_bytes += nbytes
            return strided(arrived, 0, span.dtype, (len(numbers), width), (width, 1))


class _Rows(torch.autograd.Function):
    """Some rows of a weight. Its gradient is sparse on its way to the host, which makes a dense one of it."""

    @staticmethod
    def forward(ctx: Any, weight: Any, table: Table, numbers: Tensor) -> Tensor:
        ctx.weight, ctx.table, ctx.numbers = weight._of.hosts[weight._index], table, numbers
        return table.rows(numbers)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        shape = ctx.weight.shape
        if gradient.is_sparse:  # nn.Embedding(sparse=True): as it would be, but for the numbers
            numbers = ctx.numbers.to(gradient.device)[gradient._indices()[0]]
            return torch.sparse_coo_tensor(numbers[None], gradient._values(), shape, check_invariants=False), None, None
        numbers = ctx.numbers.to(gradient.device)
        # With a gradient of another kind among them, sparse ones are summed in another order; some cannot be summed.
        unlike = ctx.table.used_whole or ctx.table.module.sparse
        unlike = unlike or (gradient.dtype is torch.float16 and gradient.device.type == "cpu")
        if unlike or _is_looked_at(ctx):
            return gradient.new_zeros(shape).index_copy(0, numbers, gradient), None, None
        ctx.table.compacted()
        rows = torch.sparse_coo_tensor(numbers[None], gradient, shape, is_coalesced=True, check_invariants=False)
        return rows, None, None


def _is_looked_at(ctx: Any) -> bool:
    """Whether somebody but the engine will see the gradient: it has a graph, a hook, or is what was asked for."""
    if torch.is_grad_enabled() or ctx.weight._backward_hooks:
        return True
    try:
        return not torch._C._will_engine_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # how torch says that torch.autograd.grad was called for this leaf
        return True
