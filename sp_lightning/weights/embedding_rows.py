"""Tables: embeddings of which only the rows that are looked up travel, and only those rows' gradients come back.

The host gathers a batch's rows, each once, and sends them; on the device they are a small embedding, looked up by
renumbered indices with torch's own functions. So values and gradients are summed as ever, in the same order. A table is
to the engine a further layer, without a slot and without visits: whatever else reads its weight brings all of it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning.device.device import Device
from sp_lightning.device.layout import part, strided
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.pinned import PinnedMemory
from sp_lightning.device.torch_private import coalesced, gradient_hooks, transforms_active, will_execute_node
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.weights.layer import StreamedLayer


class Table:
    """One embedding.

    Args:
        module: the embedding; whether its gradients are to be sparse may change.
        layer: its weight.
        device: the seam.
        pin: page-lock the memory that rows leave from.
        compacted: the layers whose gradients leave as rows where they would be dense; it is added to them in backward.
    """

    def __init__(
        self,
        module: nn.Embedding,
        layer: StreamedLayer,
        device: Device,
        *,
        pin: bool,
        compacted: set[StreamedLayer],
    ) -> None:
        self.layer = layer
        self._block = layer.block
        self._device = device
        self._pin = pin
        self._compacted = compacted
        self.module = module
        self.used_whole = False
        """Whether, in this step, anything has computed with the whole weight."""
        self._leaving = PinnedMemory(device, 0, pin=pin)  # one page
        self._left: Any = None
        self.sent_bytes = 0
        """Of all rows so far."""
        self.host_waits = 0
        """How often the host has waited for indices."""

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
        if odd or max_norm is not None or transforms_active():
            return None
        with self.layer.parameters.doors.reading_rows(self.layer) as possible:
            if not possible:
                return None
            self.host_waits += 1
            with no_dispatch_modes(), no_inference_mode():
                numbers, renumbered = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
                renumbered = renumbered.to(indices.device)
            for number in map(int, (numbers[:1], numbers[-1:]) if numbers.numel() else ()):
                if not 0 <= number < count:
                    name = self._block.planned.name
                    raise IndexError(f"index out of range: {name!r} has {count} rows and was asked for row {number}.")
            padding = -1 if padding_idx is None else padding_idx + count * (padding_idx < 0)
            return _LookUp.apply(weight, self, indices, renumbered, numbers, (padding, scale_grad_by_freq, sparse))

    def rows(self, numbers: Tensor) -> Tensor:
        """Gather rows on the host and send them.

        Args:
            numbers: on the host, int64, each once, ascending.
        """
        span = self._block.planned.spans[0]
        width = span.shape[1]
        nbytes = len(numbers) * width * span.dtype.itemsize
        device, source = self._device, self._block.weights
        # Compute has waited for the rows before, and look_up's blocking copy of indices for compute: this wait is needed
        # where that copy is none, or where another thread's stream asks for it.
        device.synchronize(self._left, Wait.GATHER_AFTER_SEND)
        with no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            if self._leaving.bytes.nbytes < nbytes:
                self._leaving = PinnedMemory(device, 2 * nbytes, pin=self._pin)
            leaving = self._leaving.bytes[:nbytes]
            device.access(source, None, write=False)
            device.access(leaving, None, write=True)
            torch.index_select(part(source, span), 0, numbers, out=leaving.view(span.dtype).view(len(numbers), width))
            arrived = device.send(leaving)
            self._left = device.record(Stream.UPLOAD)
            self.sent_bytes += nbytes
            return strided(arrived, 0, span.dtype, (len(numbers), width), (width, 1))

    def leaves_as_rows(self) -> None:
        """The gradient of this backward is sparse on the device, and dense once it is on the host."""
        self._compacted.add(self.layer)

    def unpin(self) -> None:
        """Give the page lock back."""
        self._leaving.unpin()


class _LookUp(torch.autograd.Function):
    """``embedding`` of the rows alone. Its gradient is sparse on its way to the host, which makes a dense one of it."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Any,
        table: Table,
        indices: Tensor,
        renumbered: Tensor,
        numbers: Tensor,
        how: tuple[int, bool, bool],
    ) -> Tensor:
        ctx.save_for_backward(indices)  # as embedding does: a second forward (a checkpoint's) may have the whole weight
        ctx.weight, ctx.table, ctx.numbers, ctx.how = weight._of.hosts[weight._index], table, numbers, how
        return F.embedding(renumbered, table.rows(numbers))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (indices,) = gradients, ctx.saved_tensors
        padding, by_frequency, sparse = ctx.how
        # With a gradient of another kind among them, sparse ones are summed in another order; some cannot be summed.
        unlike = ctx.table.used_whole or ctx.table.module.sparse
        unlike = unlike or (gradient.dtype is torch.float16 and gradient.device.type == "cpu")
        backward = torch.ops.aten.embedding_backward
        if unlike or _is_looked_at(ctx):
            found = backward(gradient, indices, len(ctx.weight), padding, by_frequency, sparse)
        else:
            ctx.table.leaves_as_rows()
            numbers = ctx.numbers.to(gradient.device)
            renumbered = torch.searchsorted(numbers, indices.to(numbers.dtype).contiguous())
            padding = int(torch.searchsorted(ctx.numbers, padding)) if padding in ctx.numbers else -1
            rows = backward(gradient, renumbered, len(numbers), padding, by_frequency, False)
            found = coalesced(numbers, rows, ctx.weight.shape)
        return found, None, None, None, None, None


def _is_looked_at(ctx: Any) -> bool:
    """Whether somebody but the engine will see the gradient: it has a graph, a hook, or is what was asked for."""
    if torch.is_grad_enabled() or gradient_hooks(ctx.weight):
        return True
    try:
        return not will_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # how torch says that torch.autograd.grad was called for this leaf
        return True
