"""One layer's sum over the ranks: each sends a part of its gradients to each other one, and adds up what it receives.

What is sent is one flat tensor, cut into as many equal parts as the node has ranks. So each rank has one part of the sum, which
may begin and end in the middle of a gradient. On several nodes the peers, which have the same part, then do the same with it,
and send each other what they have summed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import Span, aligned, lay_out, part, total_bytes
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.rank_order import added_in, sum_in_order
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.weights.gradient_places import Family, Place


@dataclass(frozen=True)
class _Run:
    """Neighbouring gradients in the tensor that is sent.

    Attributes:
        begin, end: where they begin and end, in bytes.
        sent: the dtype in which they are sent.
        summed: the dtype in which they are multiplied and added up: their parameters'.
    """

    begin: int
    end: int
    sent: torch.dtype
    summed: torch.dtype


@dataclass(frozen=True)
class _Total:
    """This rank's part of the sum of one run.

    Attributes:
        begin, end: where it begins and ends in the tensor that is sent, in bytes.
        dtype: of the sum.
        wider: how many bytes a byte of what is sent has become.
        at: where it begins in the memory of all sums of this part, in bytes.
        memory: the sum, flat ``uint8``.
    """

    begin: int
    end: int
    dtype: torch.dtype
    wider: int
    at: int
    memory: Tensor


@dataclass(frozen=True)
class RankSum:
    """This rank's part of the sum of one layer's gradients, on the device.

    Attributes:
        totals: the part, run by run.
        spans: where each gradient lies in the tensor that was sent.
        device: the memory that the part was made in, with its own. It has to stay until the part has left.
    """

    totals: list[_Total]
    spans: Mapping[Place, Span]
    device: list[Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the part."""
        return sum(total.memory.nbytes for total in self.totals)

    def parts(self) -> Iterator[tuple[Place, int, Tensor]]:
        """For each gradient that has some of this part: where that begins in the gradient, in bytes, and the bytes."""
        for place, span in self.spans.items():
            for total in self.totals:
                begin, end = max(span.offset, total.begin), min(span.offset + span.nbytes, total.end)
                if begin < end:
                    first, last = ((each - total.begin) * total.wider for each in (begin, end))
                    yield place, (begin - span.offset) * total.wider, total.memory[first:last]


def is_narrow(family: Family) -> bool:
    """Whether what this rank adds of each master's gradient is one tensor in the dtype of the casts, or nothing."""
    narrow = True
    for place in family.trainable():
        cast, found = place[0].parameters.autocast, _found(family, place)
        narrow &= cast is None or not found or (len(found) == 1 and found[0].dtype is cast)
    return narrow


def sum_over_ranks(device: Device, ranks: Ranks, family: Family, *, narrow: bool) -> RankSum:
    """Sums a layer's gradients over the ranks, on a stream of its own. Collective; the host may go on.

    Args:
        device: has the gradients.
        ranks: those who sum.
        family: the gradients. They are added to what is in ``param.grad``; where there is none, this rank adds zeros.
        narrow: whether those of masters are sent in the dtype of the casts: whether :func:`is_narrow` holds on all ranks.
    """
    places = family.trainable()
    own = [layer.block.parameters[index].dtype for layer, index in places]
    sent_as = [(narrow and layer.parameters.autocast) or dtype for (layer, _), dtype in zip(places, own, strict=True)]
    spans = dict(zip(places, _laid_out(family, places, sent_as), strict=True))
    nbytes = aligned(-(-total_bytes(tuple(spans.values())) // ranks.size))
    sent, received = (device.empty(nbytes * ranks.size) for _ in range(2))
    device.wait(Stream.REDUCE, device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
    begun = device.mark(Stream.REDUCE)
    what = f"the gradients of {family.owner.name!r}"
    with device.on(Stream.REDUCE), no_inference_mode(), torch.no_grad():
        _pack(device, family, spans, sent)
        ranks.exchange(received, sent, what)
        totals, memory = _own_part(device, ranks, _runs(spans.values(), own), received.view(ranks.size, nbytes))
        used = [sent, received, memory]
        device.note("reduce", family.owner.index, begun, Stream.REDUCE, sent.nbytes)
        if ranks.nodes > 1:
            begun = device.mark(Stream.REDUCE)
            totals, more = _over_nodes(device, ranks, totals, memory, what)
            used += [*more, *(total.memory for total in totals)]
            device.note("network", family.owner.index, begun, Stream.REDUCE, memory.nbytes)
    return RankSum(totals, spans, used)


def _laid_out(family: Family, places: Sequence[Place], dtypes: Sequence[torch.dtype]) -> tuple[Span, ...]:
    """Where gradients lie in the tensor that is sent, in these dtypes."""
    like = (
        (family.places[place].name, torch.empty_like(place[0].block.parameters[place[1]], dtype=dtype, device="meta"))
        for place, dtype in zip(places, dtypes, strict=True)
    )
    return lay_out(like)


def _found(family: Family, place: Place) -> list[Tensor]:
    """What this rank adds of a gradient, in order: ``param.grad``, what is on the host, and what is on the device."""
    present = place[0].block.parameters[place[1]].grad
    return [each for each in (present, family.stashed.get(place), family.waiting.get(place)) if each is not None]


def _pack(device: Device, family: Family, spans: Mapping[Place, Span], sent: Tensor) -> None:
    """Writes what this rank adds to the tensor that is sent."""
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


def _own_part(device: Device, ranks: Ranks, runs: Sequence[_Run], received: Tensor) -> tuple[list[_Total], Tensor]:
    """Adds the parts of all ranks, in their order, each multiplied by one over their number as DistributedDataParallel does.

    Args:
        device: allocates memory.
        ranks: those who sum.
        runs: what was sent.
        received: a row of bytes from each rank of the node.

    Returns:
        The sums of the runs, and the memory in which they lie one behind the other, for as many equal parts as there are nodes.
    """
    nbytes = received.shape[1]
    first = ranks.rank * nbytes
    parts = [(run, max(run.begin, first), min(run.end, first + nbytes)) for run in runs]
    parts = [(run, begin, end) for run, begin, end in parts if begin < end]
    # What other nodes' sums are added to is rounded after that alone.
    dtypes = [run.summed if ranks.nodes == 1 else added_in(run.summed) for run, _, _ in parts]
    wider = [dtype.itemsize // run.sent.itemsize for dtype, (run, _, _) in zip(dtypes, parts, strict=True)]
    ends = list(accumulate((end - begin) * wide for (_, begin, end), wide in zip(parts, wider, strict=True)))
    memory = device.empty(aligned(-(-ends[-1] // ranks.nodes)) * ranks.nodes if ends else 0)
    totals = []
    for (run, begin, end), dtype, wide, last in zip(parts, dtypes, wider, ends, strict=True):
        at = last - (end - begin) * wide
        total = memory[at:last]
        rows = received[:, begin - first : end - first].view(run.sent).unbind()
        sum_in_order((row.to(run.summed).mul_(1 / ranks.world) for row in rows), total.view(dtype))
        totals.append(_Total(begin, end, run.summed, wide, at, total))
    device.access(memory, Stream.REDUCE, write=True)
    return totals, memory


def _over_nodes(
    device: Device, ranks: Ranks, totals: Sequence[_Total], own: Tensor, what: str
) -> tuple[list[_Total], list[Tensor]]:
    """Adds the sums of all nodes, in their order: each peer those of one part, which it sends to the others.

    Args:
        device: allocates memory.
        ranks: those who sum.
        totals: this node's.
        own: the memory in which they lie. It is overwritten.
        what: what is sent, in words.

    Returns:
        The sums over all nodes, and the memory that was used beside ``own``.
    """
    if not totals:  # nor have the peers anything
        return [], []
    received, nbytes = device.empty(own.nbytes), own.nbytes // ranks.nodes
    ranks.exchange_between_nodes(received, own, what)
    rows = received.view(ranks.nodes, nbytes)
    first = ranks.node * nbytes
    part = device.empty(nbytes)
    for total in totals:
        begin, end = max(total.at, first), min(total.at + total.memory.nbytes, first + nbytes)
        if begin < end:
            dtype, within = added_in(total.dtype), slice(begin - first, end - first)
            sum_in_order((row[within].view(dtype) for row in rows), part[within].view(dtype))
    ranks.gather_between_nodes(own, part, what)
    rounded = [_rounded(total) for total in totals]
    for total in rounded:
        device.access(total.memory, Stream.REDUCE, write=True)
    return rounded, [received, part]


def _rounded(total: _Total) -> _Total:
    """A sum in the dtype that it is to have."""
    wide = added_in(total.dtype)
    if wide is total.dtype:
        return total
    memory = total.memory.view(wide).to(total.dtype).view(torch.uint8)
    return replace(total, wider=total.wider * total.dtype.itemsize // wide.itemsize, memory=memory)


def _runs(spans: Iterable[Span], summed: Iterable[torch.dtype]) -> list[_Run]:
    """Puts neighbours of the same dtypes together, with the padding between them."""
    runs: list[_Run] = []
    for span, dtype in zip(spans, summed, strict=True):
        end = span.offset + aligned(span.nbytes)
        if runs and (runs[-1].sent, runs[-1].summed) == (span.dtype, dtype):
            runs[-1] = replace(runs[-1], end=end)
        else:
            runs.append(_Run(span.offset, end, span.dtype, dtype))
    return runs
