"""One layer's sum over the ranks: each sends a part of its gradients to each other one, and adds up what it receives.

What is sent is one flat tensor, cut into as many equal parts as there are ranks. So each rank has one part of the sum, which
may begin and end in the middle of a gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.layout import Span, aligned, lay_out, part, total_bytes
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.rank_order import sum_in_order
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.weights.gradient_places import Family, Place


@dataclass(frozen=True)
class _Run:
    """Neighbouring gradients of one dtype, in the tensor that is sent: where they begin and end, in bytes."""

    begin: int
    end: int
    dtype: torch.dtype


@dataclass(frozen=True)
class RankSum:
    """This rank's part of the sum of one layer's gradients, on the device.

    Attributes:
        own: the part, flat ``uint8``.
        begin: where it begins in the tensor that was sent, in bytes.
        spans: where each gradient lies there.
        device: the memory that it was made in, with itself. It has to stay until the part has left.
    """

    own: Tensor
    begin: int
    spans: Mapping[Place, Span]
    device: list[Tensor]

    def parts(self) -> Iterator[tuple[Place, int, Tensor]]:
        """For each gradient that has some of this part: where that begins in the gradient, in bytes, and the bytes."""
        for place, span in self.spans.items():
            begin = max(span.offset, self.begin)
            end = min(span.offset + span.nbytes, self.begin + self.own.nbytes)
            if begin < end:
                yield place, begin - span.offset, self.own[begin - self.begin : end - self.begin]


def sum_over_ranks(device: Device, ranks: Ranks, family: Family) -> RankSum:
    """Sums a layer's gradients over the ranks, on a stream of its own. Collective; the host may go on.

    Args:
        device: has the gradients.
        ranks: those who sum.
        family: the gradients. They are added to what is in ``param.grad``; where there is none, this rank adds zeros.
    """
    places = family.trainable()
    like = [(family.places[p].name, p[0].block.parameters[p[1]].detach()) for p in places]
    spans = dict(zip(places, lay_out(like), strict=True))
    nbytes = aligned(-(-total_bytes(tuple(spans.values())) // ranks.size))
    sent, received = (device.empty(nbytes * ranks.size) for _ in range(2))
    device.wait(Stream.REDUCE, device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
    begun = device.mark(Stream.REDUCE)
    with device.on(Stream.REDUCE), no_inference_mode(), torch.no_grad():
        _pack(device, family, spans, sent)
        ranks.exchange(received, sent)
        own = _own_part(device, ranks, spans.values(), received, nbytes)
        device.access(own, Stream.REDUCE, write=True)
    device.note("reduce", family.owner.index, begun, Stream.REDUCE, sent.nbytes)
    return RankSum(own, ranks.rank * nbytes, spans, [sent, received, own])


def _pack(device: Device, family: Family, spans: Mapping[Place, Span], sent: Tensor) -> None:
    """Writes this rank's gradients, added to what is in ``param.grad``, to the tensor that is sent."""
    sent.zero_()
    for place, span in spans.items():
        target = part(sent, span)
        before = place[0].block.parameters[place[1]].grad
        waiting = family.waiting.get(place)
        found = [each for each in (before, family.stashed.get(place), waiting) if each is not None]
        if found:
            target.copy_(found[0])
        for each in found[1:]:
            target.add_(each.to(target.device))
        if waiting is not None:
            device.access(waiting, Stream.REDUCE, write=False)


def _own_part(device: Device, ranks: Ranks, spans: Iterable[Span], received: Tensor, nbytes: int) -> Tensor:
    """Adds the parts of all ranks, in their order, each multiplied by one over their number as DistributedDataParallel does."""
    own = device.empty(nbytes)
    first = ranks.rank * nbytes
    for run in _runs(spans):
        begin, end = max(run.begin - first, 0), min(run.end - first, nbytes)
        if begin < end:
            parts = received.view(ranks.size, nbytes)[:, begin:end].view(run.dtype).mul_(1 / ranks.size)
            own[begin:end].view(run.dtype).copy_(sum_in_order(parts.unbind()))
    return own


def _runs(spans: Iterable[Span]) -> list[_Run]:
    """Puts neighbours of one dtype together, with the padding between them."""
    runs: list[_Run] = []
    for span in spans:
        end = span.offset + aligned(span.nbytes)
        if runs and runs[-1].dtype is span.dtype:
            runs[-1] = _Run(runs[-1].begin, end, span.dtype)
        else:
            runs.append(_Run(span.offset, end, span.dtype))
    return runs
