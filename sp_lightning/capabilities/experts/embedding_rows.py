"""Embeddings (tables) of which only the rows in a batch are uploaded, and only their gradients are copied back.

The host gathers the rows that a batch looks up, each once, and uploads them. On the device these rows form a small embedding.
torch's functions look up renumbered indices in this embedding, so values and gradients are added in the same order as with the
whole table.

For the engine a table is a layer without planned slots and without planned layer calls. An operation that reads the weight in any
other way uploads the whole weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import aligned, part, strided
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.private import (
    gradient_hooks,
    sparse_rows,
    transforms_active,
    will_execute_node,
)
from sp_lightning.core.weights.layer import AllRows, StreamedLayer
from sp_lightning.core.weights.ring import Staged


class EmbeddingRows(AllRows):
    """The rows of one embedding.

    Args:
        module: the embedding. The user may change its ``sparse`` at any time.
        layer: the layer of its weight.
        device: the device that rows are uploaded to.
        pin: whether the memory from which rows are uploaded is page-locked.
    """

    def __init__(self, module: nn.Embedding, layer: StreamedLayer, device: Device, *, pin: bool) -> None:
        self.layer = layer
        layer.parameters.compute = self.compute
        self._block = layer.block
        self._device = device
        self._pin = pin
        self.module = module
        self.used_whole = False
        """Whether an operation has used the whole weight in this step."""
        self._gathered = PinnedMemory(device, 0, pin=pin)  # one page, until rows are looked up
        self._sent: Any = None  # the event after the last upload of rows

    def begin_step(self, *, training: bool) -> None:
        """Called when a step begins. Resets :attr:`used_whole` and ``sparse_on_device``."""
        self.used_whole = False
        self.sparse_on_device = False

    def read_whole(self) -> None:
        """Records that an operation uses the whole weight."""
        self.used_whole = True

    def compute(self, weight: Any, func: Callable[..., Any], types: Any, args: Sequence[Any], kwargs: Any) -> Any:
        """Runs ``F.embedding`` with the rows. Returns NotImplemented for other functions."""
        return self._look_up(*args, **kwargs) if func is F.embedding else NotImplemented

    def _look_up(
        self,
        input: Tensor,  # noqa: A002  torch's name
        weight: Any,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        """Returns ``torch.nn.functional.embedding(input, weight, …)``; NotImplemented if it needs the whole weight.

        Raises:
            IndexError: an index is out of range.
        """
        count = weight.shape[0]
        indices = input
        unusual = indices.dtype not in (torch.int32, torch.int64) or not -count <= (padding_idx or 0) < count
        unusual = unusual or (sparse and not self.module.sparse)  # autograd may add the module's dense gradients
        if unusual or max_norm is not None or transforms_active():
            return NotImplemented
        with self.layer.parameters.engine.reading_rows(self.layer) as staged:
            if staged is None:
                return NotImplemented
            self._device.stats.host_waits += 1
            with no_dispatch_modes(), no_inference_mode():
                numbers, renumbered = torch.unique(indices.detach().to("cpu", torch.int64), return_inverse=True)
                renumbered = renumbered.to(indices.device)
            # The numbers ascend, so only the first and the last can be out of range.
            for number in map(int, (numbers[:1], numbers[-1:]) if numbers.numel() else ()):
                if not 0 <= number < count:
                    name = self._block.planned.name
                    raise IndexError(f"index out of range: {name!r} has {count} rows and was asked for row {number}.")
            padding = -1 if padding_idx is None else padding_idx + count * (padding_idx < 0)
            how = padding, scale_grad_by_freq, sparse
            backward = torch.is_grad_enabled() and weight.requires_grad
            return _LookUp.apply(weight, self, staged, indices, renumbered, numbers, how, backward)

    def rows(self, staged: Staged, numbers: Tensor, *, backward: bool) -> tuple[Tensor, Tensor | None]:
        """Gathers rows on the host and uploads them.

        Args:
            staged: the weight's bytes on the host, and the event after which they may be read.
            numbers: the numbers of the rows: int64 on the host, each once, ascending.
            backward: True if a backward may follow. A backward needs the numbers on the device. They are uploaded now, from
                pinned memory, because a copy from pageable memory in backward would block the host until the device is idle.

        Returns:
            The rows on the device, of shape ``(len(numbers), width)``, and if ``backward`` their numbers on the device. The
            compute stream waits for both uploads.
        """
        span = self._block.planned.spans[0]
        width = span.shape[1]
        nbytes = len(numbers) * width * span.dtype.itemsize
        device = self._device
        source, ready = staged
        if ready is not None:
            device.synchronize(ready, Wait.FETCH_AFTER_UPDATE)
        # The last upload of rows must have read `_gathered` before the host writes it. If the indices were on the device, that
        # is certain: the compute stream has waited for that upload, and the copy of the indices in `_look_up` has blocked the
        # host until the compute stream was done. If they were on the host, or if another thread's stream has copied them, this
        # wait is necessary.
        device.synchronize(self._sent, Wait.GATHER_AFTER_SEND)
        with no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            begin = aligned(nbytes)  # the row numbers are behind the rows
            end = begin + numbers.nbytes * backward
            if self._gathered.bytes.nbytes < end:
                self._gathered = PinnedMemory(device, 2 * end, pin=self._pin)
            gathered = self._gathered.bytes[:nbytes]
            device.access(source, None, write=False)
            device.access(self._gathered.bytes[:end], None, write=True)
            torch.index_select(part(source, span), 0, numbers, out=gathered.view(span.dtype).view(len(numbers), width))
            uploaded = device.send(gathered)
            numbers_on_device = None
            if backward:
                listed = self._gathered.bytes[begin:end]
                listed.view(numbers.dtype).copy_(numbers)
                numbers_on_device = device.send(listed).view(numbers.dtype)
            self._sent = device.record(Stream.UPLOAD)
            device.stats.fetched_bytes += nbytes
            device.stats.fetched_bytes_by_layer[self.layer.name] += nbytes
            return strided(uploaded, 0, span.dtype, (len(numbers), width), (width, 1)), numbers_on_device

    def unpin(self) -> None:
        """Releases the page lock."""
        self._gathered.unpin()


class _LookUp(torch.autograd.Function):
    """``F.embedding`` of the uploaded rows.

    Usually the gradient is a sparse tensor on the device. It is offloaded, and the host makes it dense. In the cases that
    ``backward`` tests, the gradient is made on the device as in ``F.embedding`` of the whole weight.
    """

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
        # F.embedding saves the indices as well. If the whole weight is on the device when a checkpoint runs the forward again,
        # that forward calls F.embedding instead of this function, and both must save the same tensors.
        ctx.save_for_backward(indices)
        ctx.weight = weight._of.hosts[weight._index]
        ctx.table = table
        ctx.numbers = numbers
        ctx.how = how
        rows, ctx.numbers_on_device = table.rows(staged, numbers, backward=backward)
        return F.embedding(renumbered, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,) = gradients
        (indices,) = ctx.saved_tensors
        padding, by_frequency, sparse = ctx.how
        # Autograd adds sparse and dense gradients in another order than dense ones, and the CPU cannot add sparse gradients
        # in float16.
        needs_whole = ctx.table.used_whole or ctx.table.module.sparse
        needs_whole = needs_whole or (gradient.dtype is torch.float16 and gradient.device.type == "cpu")
        backward = torch.ops.aten.embedding_backward
        ctx.table.sparse_on_device = not (needs_whole or _is_looked_at(ctx))
        if not ctx.table.sparse_on_device:
            result = backward(gradient, indices, len(ctx.weight), padding, by_frequency, sparse)
        else:
            numbers = ctx.numbers_on_device
            renumbered = torch.searchsorted(numbers, indices.to(numbers.dtype).contiguous())
            padding = int(torch.searchsorted(ctx.numbers, padding)) if padding in ctx.numbers else -1
            rows = backward(gradient, renumbered, len(numbers), padding, by_frequency, False)
            result = sparse_rows(numbers[None], rows, ctx.weight.shape)
        return result, None, None, None, None, None, None, None


def _is_looked_at(ctx: Any) -> bool:
    """Returns True if user code may see the gradient.

    That is the case with ``create_graph=True``, if the weight has a hook, and if the gradient is a result of ``autograd.grad``.
    """
    if torch.is_grad_enabled() or gradient_hooks(ctx.weight):
        return True
    try:
        return not will_execute_node(ctx.next_functions[0][0])
    except RuntimeError:  # torch raises this if torch.autograd.grad was called for this leaf
        return True
