"""Sums one layer's gradients over the ranks: each rank sends a part to each other rank, and adds up the parts that it receives.

The gradients are sent as one flat tensor, cut into equal parts, one for each rank of the node. So each rank has one part of the
sum, which may begin and end within a gradient. On several nodes, the peers, which have the same part, then sum it in the same
way, and gather the result.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.layout import Span, aligned, lay_out, part, total_bytes
from sp_lightning.ranks.gradient_places import Family, Place, gradient_of
from sp_lightning.ranks.rank_order import added_in, sum_in_order
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.torch_compat.modes import no_inference_mode


@dataclass
class _Run:
    """Adjacent gradients of one dtype in the flat tensor.

    Attributes:
        begin, end: their first and last byte (exclusive) there; once they are summed, those of this rank's part.
        sent: the dtype in which they are sent.
        summed: the dtype in which they are scaled and added: that of their parameters.
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
- The memory that was used. It must stay until the part has been offloaded.
"""


def is_narrow(family: Family) -> bool:
    """Returns True if this rank adds at most one tensor to each master's gradient, in the dtype of the casts."""
    narrow = True
    for place in family.trainable():
        cast, found = place[0].parameters.autocast, _found(family, place)
        narrow &= cast is None or not found or (len(found) == 1 and found[0].dtype is cast)
    return narrow


def sum_over_ranks(device: Device, ranks: Ranks, family: Family, *, narrow: bool) -> RankSum:
    """Sums a layer's gradients over the ranks on a separate stream. Collective; the host does not wait for the device.

    Args:
        device: the device of the gradients.
        ranks: the ranks to sum over.
        family: the gradients. They are added to ``param.grad``; this rank adds zeros for a gradient that it does not have.
        narrow: gradients of masters are sent in the dtype of the casts, because :func:`is_narrow` holds on all ranks.
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
    sent, received = (device.empty(nbytes * ranks.size) for _ in range(2))
    device.wait(Stream.REDUCE, device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
    begun = device.mark(Stream.REDUCE)
    what = f"the gradients of {family.owner.name!r}"
    with device.on(Stream.REDUCE), no_inference_mode(), torch.no_grad():
        _pack(device, family, spans, sent)
        ranks.exchange(received, sent, what)
        runs, memory = _own_part(device, ranks, _runs(spans.values(), own), received.view(ranks.size, nbytes))
        used = [sent, received, memory]
        device.note("reduce", family.owner.index, begun, Stream.REDUCE, sent.nbytes)
        if ranks.nodes > 1:
            begun = device.mark(Stream.REDUCE)
            used += [*_over_nodes(device, ranks, runs, memory, what), *(run.total for run in runs)]
            device.note("network", family.owner.index, begun, Stream.REDUCE, memory.nbytes)
    return list(_parts(spans, runs)), used


def _parts(spans: Mapping[Place, Span], runs: Sequence[_Run]) -> Iterator[tuple[Place, int, Tensor]]:
    for place, span in spans.items():
        for run in runs:
            begin, end = max(span.offset, run.begin), min(span.offset + span.nbytes, run.end)
            if begin < end:
                first, last, before = (
                    each // run.sent.itemsize for each in (begin - run.begin, end - run.begin, begin - span.offset)
                )
                yield place, before * run.total.itemsize, run.total[first:last].view(torch.uint8)


def _found(family: Family, place: Place) -> list[Tensor]:
    """Returns what this rank adds to a gradient, in order: ``param.grad``, the part on the host, the part on the device."""
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


def _own_part(device: Device, ranks: Ranks, runs: Sequence[_Run], received: Tensor) -> tuple[list[_Run], Tensor]:
    """Adds the parts of all ranks, in their order, each multiplied by 1 / ranks, as DistributedDataParallel does.

    Args:
        device: allocates memory.
        ranks: the ranks to sum over.
        runs: the gradients in the flat tensor.
        received: a row of bytes from each rank of the node.

    Returns:
        The runs of this rank's part with their sums, and the memory of these sums, padded to equal parts for all nodes.
    """
    nbytes = received.shape[1]
    first = ranks.rank * nbytes
    own = [replace(run, begin=max(run.begin, first), end=min(run.end, first + nbytes)) for run in runs]
    own = [run for run in own if run.begin < run.end]
    # With several nodes, a sum in half precision is rounded only after those of all nodes are added.
    dtypes = [run.summed if ranks.nodes == 1 else added_in(run.summed) for run in own]
    sizes = [(run.end - run.begin) // run.sent.itemsize * each.itemsize for run, each in zip(own, dtypes, strict=True)]
    memory = device.empty(aligned(-(-sum(sizes) // ranks.nodes)) * ranks.nodes)
    for run, dtype, size, end in zip(own, dtypes, sizes, accumulate(sizes), strict=True):
        run.total = memory[end - size : end].view(dtype)
        rows = received[:, run.begin - first : run.end - first].view(run.sent).unbind()
        sum_in_order((row.to(run.summed).mul_(1 / ranks.world) for row in rows), run.total)
    device.access(memory, Stream.REDUCE, write=True)
    return own, memory


def _over_nodes(device: Device, ranks: Ranks, runs: Sequence[_Run], own: Tensor, what: str) -> list[Tensor]:
    """Adds the sums of all nodes, in their order: each peer adds one part, and then gathers those of the other peers.

    Args:
        device: allocates memory.
        ranks: the ranks to sum over.
        runs: this node's sums, which are replaced.
        own: the memory of these sums, which is overwritten.
        what: the name of the data, for errors.

    Returns:
        The memory that was used beside ``own``.
    """
    if not runs:  # then the peers have none either
        return []
    received = device.empty(own.nbytes)
    nbytes = own.nbytes // ranks.nodes
    ranks.exchange_between_nodes(received, own, what)
    rows = received.view(ranks.nodes, nbytes)
    first = ranks.node * nbytes
    part = device.empty(nbytes)
    for run in runs:
        at = run.total.data_ptr() - own.data_ptr()
        begin, end = max(at, first), min(at + run.total.nbytes, first + nbytes)
        if begin < end:
            dtype, within = run.total.dtype, slice(begin - first, end - first)
            sum_in_order((row[within].view(dtype) for row in rows), part[within].view(dtype))
    ranks.gather_between_nodes(own, part, what)
    for run in runs:
        run.total = run.total.to(run.summed)
        device.access(run.total, Stream.REDUCE, write=True)
    return [received, part]


def _runs(spans: Iterable[Span], summed: Iterable[torch.dtype]) -> list[_Run]:
    """Joins adjacent gradients of the same dtypes, with the padding between them."""
    runs: list[_Run] = []
    for span, dtype in zip(spans, summed, strict=True):
        end = span.offset + aligned(span.nbytes)
        if runs and (runs[-1].sent, runs[-1].summed) == (span.dtype, dtype):
            runs[-1] = replace(runs[-1], end=end)
        else:
            runs.append(_Run(span.offset, end, span.dtype, dtype))
    return runs
