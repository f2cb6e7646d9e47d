"""Embedding tables of which only the rows that are looked up travel, and only the gradients of those rows come back.

The host gathers the rows that a batch looks up, each once, and sends them. On the device they are a small embedding, in which
torch's own functions look up renumbered indices, so values and gradients are summed in the same order as with the whole
table. To the engine a table is a further layer without planned slots and visits: whatever else reads its weight brings all
of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.host_memory import PinnedMemory
from sp_lightning.device.layout import aligned, part, strided
from sp_lightning.layers.layer import AllRows, StreamedLayer
from sp_lightning.layers.slots import Staged
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.private import (
    gradient_hooks,
    sparse_rows,
    transforms_active,
    will_execute_node,
)


class EmbeddingRows(AllRows):
    """Looks up one embedding by its rows.

    Args:
        module: the embedding. The user may change at any time whether its gradients are to be sparse.
        layer: the layer of its weight.
        device: sends the rows.
        pin: whether the memory that rows are sent from is page-locked.
    """

    def __init__(self, module: nn.Embedding, layer: StreamedLayer, device: Device, *, pin: bool) -> None:
        self.layer = layer
        layer.parameters.compute = self.compute
        self._block = layer.block
        self._device = device
        self._pin = pin
        self.module = module
        self.used_whole = False
        """Whether anything has computed with the whole weight in this step."""
        self._leaving = PinnedMemory(device, 0, pin=pin)  # one page
        self._left: Any = None

    def begin_step(self, *, training: bool) -> None:
        """Nothing has computed with the whole weight yet."""
        self.used_whole = self.sparse_on_device = False

    def read_whole(self) -> None:
        """Something computes with the whole weight."""
        self.used_whole = True

    def compute(self, weight: Any, func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Looks up rows, if that is what the function does."""
        return self._look_up(*args, **kwargs) if func is F.embedding else NotImplemented

    def _look_up(
        self,
        input: Tensor,  # noqa: A002  torch's own name
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        """Returns ``torch.nn.functional.embedding(input, weight, …)``; NotImplemented if that needs the whole weight.

        Raises:
            IndexError: an index is not that of a row.
        """
        count, indices = weight.shape[0], input
        unusual = indices.dtype not in (torch.int32, torch.int64) or not -count <= (padding_idx or 0) < count
        unusual = unusual or (sparse and not self.module.sparse)  # the module's own gradients are dense beside it
        if unusual or max_norm is not None or transforms_active():
            return NotImplemented
        with self.layer.parameters.doors.reading_rows(self.layer) as staged:
            if staged is None:
                return NotImplemented
            self.host_waits += 1
            with no_dispatch_modes(), no_inference_mode():
                numbers, renumbered = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
                renumbered = renumbered.to(indices.device)
            for number in map(int, (numbers[:1], numbers[-1:]) if numbers.numel() else ()):
                if not 0 <= number < count:
                    name = self._block.planned.name
                    raise IndexError(f"index out of range: {name!r} has {count} rows and was asked for row {number}.")
            padding = -1 if padding_idx is None else padding_idx + count * (padding_idx < 0)
            how = padding, scale_grad_by_freq, sparse
            backward = torch.is_grad_enabled() and weight.requires_grad
            return _LookUp.apply(weight, self, staged, indices, renumbered, numbers, how, backward)

    def rows(self, staged: Staged, numbers: Tensor, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Gathers rows on the host and sends them.

        Args:
            staged: the weight's bytes on the host, and the event after which they may be read.
            numbers: the numbers of the rows: int64 on the host, each once, ascending.
            backward: whether a backward may follow, which needs the numbers on the device: a copy of pageable memory there
                would block the host until the device has done all that was issued before.

        Returns:
            The rows on the device, of shape ``(len(numbers), width)``, and their numbers there, for a backward. The compute
            stream waits for them.
        """
        span = self._block.planned.spans[0]
        width = span.shape[1]
        nbytes = len(numbers) * width * span.dtype.itemsize
        device, (source, ready) = self._device, staged
        if ready is not None:
            device.synchronize(ready, Wait.FETCH_AFTER_UPDATE)
        # Compute has waited for the rows that were sent before, and the blocking copy of indices in _look_up for compute.
        # This wait is needed if the indices are on the host already, or if the stream of another thread copies them.
        device.synchronize(self._left, Wait.GATHER_AFTER_SEND)
        with no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            begin = aligned(nbytes)  # of the numbers
            end = begin + numbers.nbytes * backward
            if self._leaving.bytes.nbytes < end:
                self._leaving = PinnedMemory(device, 2 * end, pin=self._pin)
            leaving = self._leaving.bytes[:nbytes]
            device.access(source, None, write=False)
            device.access(self._leaving.bytes[:end], None, write=True)
            torch.index_select(part(source, span), 0, numbers, out=leaving.view(span.dtype).view(len(numbers), width))
            arrived = device.send(leaving)
            there = None
            if backward:
                listed = self._leaving.bytes[begin:end]
                listed.view(numbers.dtype).copy_(numbers)
                there = device.send(listed).view(numbers.dtype)
            self._left = device.record(Stream.UPLOAD)
            self.looked_up_bytes += nbytes
            return strided(arrived, 0, span.dtype, (len(numbers), width), (width, 1)), there

    def unpin(self) -> None:
        """Releases the page lock."""
        self._leaving.unpin()


class _LookUp(torch.autograd.Function):
    """``embedding`` with the rows alone. Its gradient is sparse on the way to the host, where it becomes dense."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Any,
        table: EmbeddingRows,
        staged: Staged,
        indices: Tensor,
        renumbered: Tensor,
        numbers: Tensor,
        how: tuple[int, bool, bool],
        backward: bool,
    ) -> Tensor:
        # embedding saves the indices, too. A checkpoint's second forward may run that in place of this function, because
        # the whole weight is there, and has to save the same tensors.
        ctx.save_for_backward(indices)
        ctx.weight, ctx.table, ctx.numbers, ctx.how = weight._of.hosts[weight._index], table, numbers, how
        rows, ctx.there = table.rows(staged, numbers, backward=backward)
        return F.embedding(renumbered, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (indices,) = gradients, ctx.saved_tensors
        padding, by_frequency, sparse = ctx.how
        # Sparse gradients are summed in another order if there is a gradient of another layout among them, and those in
        # float16 cannot be summed on the CPU.
        needs_whole = ctx.table.used_whole or ctx.table.module.sparse
        needs_whole = needs_whole or (gradient.dtype is torch.float16 and gradient.device.type == "cpu")
        backward = torch.ops.aten.embedding_backward
        ctx.table.sparse_on_device = not (needs_whole or _is_looked_at(ctx))
        if not ctx.table.sparse_on_device:
            result = backward(gradient, indices, len(ctx.weight), padding, by_frequency, sparse)
        else:
            numbers = ctx.there
            renumbered = torch.searchsorted(numbers, indices.to(numbers.dtype).contiguous())
            padding = int(torch.searchsorted(ctx.numbers, padding)) if padding in ctx.numbers else -1
            rows = backward(gradient, renumbered, len(numbers), padding, by_frequency, False)
            result = sparse_rows(numbers[None], rows, ctx.weight.shape)
        return result, None, None, None, None, None, None, None


def _is_looked_at(ctx: Any) -> bool:
    """Whether user code will see the gradient: it has a graph of its own, a hook, or autograd was asked for it."""
    if torch.is_grad_enabled() or gradient_hooks(ctx.weight):
        return True
    try:
        return not will_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # torch raises this if torch.autograd.grad was called for this leaf
        return True
