"""Sums one layer's gradients over the ranks: each rank sends a part to each other rank, and adds up the parts that it receives.

The gradients are sent as one flat tensor, which is cut into equal parts, one for each rank of the node. So each rank has one part
of the sum, which may begin and end within a gradient. On several nodes, peers have the same part. They then sum their parts over
the nodes in the same way, and gather the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.layout import Span, aligned, lay_out, part, total_bytes
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.experimental.ranks.gradient_places import Family, Place, gradient_of
from sp_lightning.experimental.ranks.rank_order import added_in, sum_in_order
from sp_lightning.experimental.ranks.ranks import Ranks


@dataclass
class _Run:
    """Adjacent gradients in the flat tensor that have the same two dtypes.

    Attributes:
        begin, end: the first and last byte (exclusive) of the gradients in the flat tensor. After :func:`_own_runs`, only of the
            bytes that are in this rank's part.
        sent: the dtype in which the gradients are sent.
        summed: the dtype of the sum, which is the dtype of the parameters. Gradients are scaled in this dtype. Half precision is
            added in float32.
        total: this rank's part of the sum, flat. With several nodes, half precision is in float32 until all nodes are added.
    """

    begin: int
    end: int
    sent: torch.dtype
    summed: torch.dtype
    total: Tensor = field(init=False)


RankSum = tuple[list[tuple[Place, int, Tensor]], list[Tensor]]
"""This rank's part of the sum of one layer's gradients, on the device.

- For each gradient in the part: the place, the offset in the gradient in bytes, and the bytes.
- The device memory that the sum has used. It must not be freed until the part has been offloaded.
"""


def is_narrow(family: Family) -> bool:
    """Returns True if this rank adds at most one tensor to each master's gradient, and the tensor has the dtype of the casts.

    If this holds on all ranks, gradients can be sent in the dtype of the casts without loss.
    """
    narrow = True
    for place in family.trainable():
        cast, found = place[0].parameters.autocast, _found(family, place)
        narrow &= cast is None or not found or (len(found) == 1 and found[0].dtype is cast)
    return narrow


def sum_over_ranks(device: Device, ranks: Ranks, family: Family, *, narrow: bool) -> RankSum:
    """Sums a layer's gradients over the ranks on the stream ``REDUCE``. Collective. The host does not wait for an accelerator.

    Args:
        device: the device of the gradients.
        ranks: the ranks to sum over.
        family: the layer's gradients. An earlier ``param.grad`` is part of the sum. If this rank has no gradient for a parameter,
            it sends zeros.
        narrow: True to send gradients of masters in the dtype of the casts, because :func:`is_narrow` holds on all ranks.
    """
    places = family.trainable()
    own = [layer.block.parameters[index].dtype for layer, index in places]
    sent_as = [(narrow and layer.parameters.autocast) or dtype for (layer, _), dtype in zip(places, own, strict=True)]
    like = [
        (family.places[place].name, torch.empty_like(place[0].block.parameters[place[1]], dtype=dtype, device="meta"))
        for place, dtype in zip(places, sent_as, strict=True)
    ]
    spans = dict(zip(places, lay_out(like), strict=True))
    nbytes = aligned(-(-total_bytes(tuple(spans.values())) // ranks.size))
    runs = _own_runs(_runs(spans.values(), own), ranks.rank * nbytes, nbytes)
    # All memory that is used after this function is of compute's pool, because it is compute that waits before it is freed.
    sent, received = (device.empty(nbytes * ranks.size) for _ in range(2))
    memory = device.empty(aligned(-(-sum(_sizes(ranks, runs)) // ranks.nodes)) * ranks.nodes)
    used, between = [sent, received, memory], list[Tensor]()
    if ranks.nodes > 1 and runs:
        rounds = any(_dtype_of_sum(ranks, run) is not run.summed for run in runs)
        between = [device.empty(memory.nbytes // by) for by in (1, ranks.nodes, *([2] if rounds else []))]
        used += between
    device.wait(Stream.REDUCE, device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
    what = f"the gradients of {family.owner.name!r}"
    with device.on(Stream.REDUCE), no_inference_mode(), torch.no_grad():
        with device.timed("reduce", family.owner.index, Stream.REDUCE, sent.nbytes):
            _pack(device, family, spans, sent)
            ranks.exchange(received, sent, what)
            _add_own(ranks, runs, received.view(ranks.size, nbytes), memory)
            device.access(memory, Stream.REDUCE, write=True)
        # Without `between`, this rank's part has no gradients, and neither have the peers' parts: no peer is in a collective.
        if between:
            with device.timed("network", family.owner.index, Stream.REDUCE, memory.nbytes):
                _over_nodes(ranks, runs, memory, between, what)
                device.access(between, Stream.REDUCE, write=True)
    return list(_parts(spans, runs)), used


def _parts(spans: Mapping[Place, Span], runs: Sequence[_Run]) -> Iterator[tuple[Place, int, Tensor]]:
    """Yields this rank's part of the sum, gradient by gradient, as in :data:`RankSum`."""
    for place, span in spans.items():
        for run in runs:
            begin, end = max(span.offset, run.begin), min(span.offset + span.nbytes, run.end)
            if begin < end:
                first, last, before = (
                    each // run.sent.itemsize for each in (begin - run.begin, end - run.begin, begin - span.offset)
                )
                yield place, before * run.total.itemsize, run.total[first:last].view(torch.uint8)


def _found(family: Family, place: Place) -> list[Tensor]:
    """Returns the tensors whose sum this rank sends, in order: ``param.grad``, the gradient on the host, that on the device.

    Each of them may be missing.
    """
    return [
        each for each in (gradient_of(place), family.stashed.get(place), family.waiting.get(place)) if each is not None
    ]


def _pack(device: Device, family: Family, spans: Mapping[Place, Span], sent: Tensor) -> None:
    """Writes this rank's gradients to the flat tensor."""
    for place, span in spans.items():
        target, found = part(sent, span), _found(family, place)
        if found:
            target.copy_(found[0])
        else:
            target.zero_()
        for each in found[1:]:
            target.add_(each.to(target.device))
        if place in family.waiting:
            device.access(family.waiting[place], Stream.REDUCE, write=False)


def _own_runs(runs: Sequence[_Run], first: int, nbytes: int) -> list[_Run]:
    """Returns this rank's part of the runs: ``nbytes`` of the flat tensor from ``first`` on."""
    own = [replace(run, begin=max(run.begin, first), end=min(run.end, first + nbytes)) for run in runs]
    return [run for run in own if run.begin < run.end]


def _dtype_of_sum(ranks: Ranks, run: _Run) -> torch.dtype:
    """With several nodes, a sum in half precision is rounded only after those of all nodes are added."""
    return run.summed if ranks.nodes == 1 else added_in(run.summed)


def _sizes(ranks: Ranks, runs: Sequence[_Run]) -> list[int]:
    """Returns the bytes of the sum of each run."""
    return [(run.end - run.begin) // run.sent.itemsize * _dtype_of_sum(ranks, run).itemsize for run in runs]


def _add_own(ranks: Ranks, runs: Sequence[_Run], received: Tensor, memory: Tensor) -> None:
    """Adds this rank's part of the gradients of all ranks of the node, in rank order, and sets the totals of ``runs``.

    Each gradient is multiplied by 1 / (number of all ranks), as DistributedDataParallel does.

    Args:
        ranks: the ranks to sum over.
        runs: this rank's part.
        received: the bytes from each rank of the node, one row per rank.
        memory: the memory for the sums. Its size is a multiple of the number of nodes.
    """
    first = ranks.rank * received.shape[1]
    sizes = _sizes(ranks, runs)
    for run, size, end in zip(runs, sizes, accumulate(sizes), strict=True):
        run.total = memory[end - size : end].view(_dtype_of_sum(ranks, run))
        rows = received[:, run.begin - first : run.end - first].view(run.sent).unbind()
        sum_in_order((row.to(run.summed).mul_(1 / ranks.world) for row in rows), run.total)


def _over_nodes(ranks: Ranks, runs: Sequence[_Run], own: Tensor, between: Sequence[Tensor], what: str) -> None:
    """Adds the sums of all nodes, in the order of nodes: each peer adds one part, and then gathers the parts of the other peers.

    Args:
        ranks: the ranks to sum over.
        runs: this node's sums. The sums of all nodes replace them.
        own: the memory of these sums. It is overwritten.
        between: memory for what other nodes send, for this peer's part, and for sums that are rounded, if any are.
        what: the name of the data, for errors.
    """
    received, part, *rounded = between
    nbytes = part.nbytes
    ranks.exchange_between_nodes(received, own, what)
    rows = received.view(ranks.nodes, nbytes)
    first = ranks.node * nbytes
    for run in runs:
        at = run.total.data_ptr() - own.data_ptr()
        begin, end = max(at, first), min(at + run.total.nbytes, first + nbytes)
        if begin < end:
            dtype, within = run.total.dtype, slice(begin - first, end - first)
            sum_in_order((row[within].view(dtype) for row in rows), part[within].view(dtype))
    ranks.gather_between_nodes(own, part, what)
    for run in runs:
        if run.total.dtype is not run.summed:
            at, nbytes = (run.total.data_ptr() - own.data_ptr()) // 2, run.total.nbytes // 2  # float32 becomes 16 bits
            run.total = rounded[0][at : at + nbytes].view(run.summed).copy_(run.total)


def _runs(spans: Iterable[Span], summed: Iterable[torch.dtype]) -> list[_Run]:
    """Joins adjacent gradients of the same dtypes to runs, with the padding between them.

    Args:
        spans: the places of the gradients in the flat tensor, with the dtypes in which they are sent.
        summed: the dtype of each parameter.
    """
    runs: list[_Run] = []
    for span, dtype in zip(spans, summed, strict=True):
        end = span.offset + aligned(span.nbytes)
        if runs and (runs[-1].sent, runs[-1].summed) == (span.dtype, dtype):
            runs[-1] = replace(runs[-1], end=end)
        else:
            runs.append(_Run(span.offset, end, span.dtype, dtype))
    return runs
