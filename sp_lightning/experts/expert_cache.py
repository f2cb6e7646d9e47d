"""The device memory that keeps experts which were used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream
from sp_lightning.device.layout import aligned
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode

Expert = tuple[StreamedLayer, int]

HALF_LIFE = 8.0
"""After so many calls of its layer a use of an expert counts half."""
# The heap may hold so many entries for each expert, all but one of them out of date.
_MOST_ENTRIES = 8


class ExpertCache:
    """Device memory that keeps experts of any layers, so that they need not travel when something is routed to them again.

    An expert that is needed goes from here to its place in its layer's slot, which is a copy within the device. Kernels see
    the slot alone. When there is no place for another expert, the one goes whose uses count least: each use counts half
    after :data:`HALF_LIFE` calls of its layer. That lies between forgetting what was used least often, which is better where
    routing has favourites, and what was not used for longest, which is better where a token is routed as the one before it.
    Every access is in the order of compute, so that nothing has to wait.

    Args:
        device: allocates the memory.
        layers: the layers of stacked experts.
    """

    def __init__(self, device: Device, layers: Sequence[StreamedLayer]) -> None:
        self._device = device
        rows = [
            [layer.planned.spans[at].nbytes // layer.planned.rows for at in layer.planned.stacks] for layer in layers
        ]
        self._place = max((sum(map(aligned, each)) for each in rows), default=0)
        self._experts = sum(layer.planned.rows for layer in layers)
        self._count = 0
        self._memory = device.empty(0)
        self._free: list[int] = []
        self._at: dict[StreamedLayer, dict[int, int]] = {layer: {} for layer in layers}  # the place of each expert
        self._scores: dict[Expert, float] = {}
        self._calls: dict[StreamedLayer, int] = {}
        self._least: list[tuple[float, int, int, Expert]] = []  # a heap of scores, also of those that have risen since

    @property
    def has_room(self) -> bool:
        """Whether any expert can be kept."""
        return self._count > 0

    def allocate(self, nbytes: int) -> int:
        """Allocates memory for as many experts as fit, unless it has some. Returns the bytes that it allocated."""
        count = min(nbytes // self._place, self._experts)
        if self._count or not count:
            return 0
        self._memory = self._device.empty(count * self._place)
        self._count = count
        self._free = list(range(count))
        return self._memory.nbytes

    def rows(self, layer: StreamedLayer) -> frozenset[int]:
        """The experts of a layer that are here."""
        return frozenset(self._at[layer])

    def use(self, layer: StreamedLayer, rows: Iterable[int]) -> None:
        """Counts a use of experts by a call of their layer."""
        calls = self._calls[layer] = self._calls.get(layer, 0) + 1
        for row in rows:
            expert, now = (layer, row), calls / HALF_LIFE
            before = self._scores.get(expert)
            self._scores[expert] = now if before is None else now + math.log2(1 + 2 ** (before - now))
            if row in self._at[layer]:
                self._push(expert)

    def bring(self, layer: StreamedLayer, rows: Iterable[int], slot: Tensor) -> None:
        """Copies experts that are here to their places in a slot, which compute may write."""
        for row in rows:
            self._copy(layer, row, self._at[layer][row], slot, into_slot=True)

    def keep(self, layer: StreamedLayer, rows: Iterable[int], slot: Tensor) -> None:
        """Copies experts that a slot has, and compute may read, to where they stay."""
        for row in rows:
            if row in self._at[layer]:
                continue
            if not self._free:
                self._forget_least()
            at = self._at[layer][row] = self._free.pop()
            self._push((layer, row))
            self._copy(layer, row, at, slot, into_slot=False)

    def drop(self, layer: StreamedLayer) -> None:
        """Forgets the experts of a layer, because the host's were or may have been written."""
        self._free += self._at[layer].values()
        self._at[layer].clear()

    def free(self) -> None:
        """Frees the memory. Nothing is kept any more, and no use is remembered."""
        self._device.access(self._memory, Stream.COMPUTE, write=True)
        self._memory = self._device.empty(0)
        self._count = 0
        self._free.clear()
        for rows in self._at.values():
            rows.clear()
        self._scores.clear()
        self._calls.clear()
        self._least.clear()

    def _push(self, expert: Expert) -> None:
        layer, row = expert
        heappush(self._least, (self._scores.get(expert, -math.inf), layer.index, row, expert))
        if len(self._least) > _MOST_ENTRIES * (self._count - len(self._free) + 1):
            here = [(layer, row) for layer, rows in self._at.items() for row in rows]
            self._least = [(self._scores.get(each, -math.inf), each[0].index, each[1], each) for each in here]
            heapify(self._least)

    def _forget_least(self) -> None:
        while True:
            score, _, _, expert = heappop(self._least)
            layer, row = expert
            if row in self._at[layer] and score == self._scores.get(expert, -math.inf):
                self._free.append(self._at[layer].pop(row))
                return

    def _copy(self, layer: StreamedLayer, row: int, at: int, slot: Tensor, *, into_slot: bool) -> None:
        offset = at * self._place
        with no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            for index in layer.planned.stacks:
                span = layer.planned.spans[index]
                nbytes = span.nbytes // layer.planned.rows
                here = self._memory[offset : offset + nbytes]
                there = slot[span.offset + row * nbytes : span.offset + (row + 1) * nbytes]
                target, source = (there, here) if into_slot else (here, there)
                self._device.access(source, Stream.COMPUTE, write=False)
                self._device.access(target, Stream.COMPUTE, write=True)
                target.copy_(source)
                offset += aligned(nbytes)
