"""Device memory that keeps used experts, so that they need not be uploaded again."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.device.layout import aligned
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode

Expert = tuple[StreamedLayer, int]

HALF_LIFE = 8.0
"""After this number of calls of its layer, a use of an expert counts half."""
# The most entries of the heap per kept expert. Of an expert's entries, all except one are out of date.
_MOST_ENTRIES = 8


class ExpertCache:
    """Device memory for experts of all layers.

    If this memory has a needed expert, the expert is copied within the device to its position in its layer's slot. Kernels only
    read the slot.
    If the memory is full, the expert with the lowest score is evicted. The score counts the uses of an expert, and each use
    counts half after :data:`HALF_LIFE` calls of its layer. This is a compromise between least frequently used, which is better
    if routing has favourites, and least recently used, which is better if a token is routed like the one before it.
    All accesses of this memory are on the compute stream, so they need no further waits.

    Args:
        device: allocates the memory.
        layers: the layers of stacked experts.
    """

    def __init__(self, device: Device, layers: Sequence[StreamedLayer]) -> None:
        self._device = device
        rows = [
            [layer.planned.spans[at].nbytes // layer.planned.rows for at in layer.planned.stacks] for layer in layers
        ]
        self._size = max((sum(map(aligned, each)) for each in rows), default=0)
        self._experts = sum(layer.planned.rows for layer in layers)
        self._count = 0
        self._memory = device.empty(0)
        self._vacant: list[int] = []
        # The position of each kept expert.
        self._at: dict[StreamedLayer, dict[int, int]] = {layer: {} for layer in layers}
        self._scores: dict[Expert, float] = {}
        self._calls: dict[StreamedLayer, int] = {}
        self._least: list[tuple[float, int, int, Expert]] = []  # a heap of scores, some of them out of date

    @property
    def has_room(self) -> bool:
        """True if memory for at least one expert is allocated."""
        return self._count > 0

    def allocate(self, nbytes: int) -> int:
        """Allocates memory for the experts that fit into ``nbytes``, if none is allocated. Returns the new bytes."""
        count = min(nbytes // self._size, self._experts)
        if self._count or not count:
            return 0
        self._memory = self._device.empty(count * self._size)
        self._count = count
        self._vacant = list(range(count))
        return self._memory.nbytes

    def rows(self, layer: StreamedLayer) -> frozenset[int]:
        """Returns the kept experts of a layer."""
        return frozenset(self._at[layer])

    def use(self, layer: StreamedLayer, rows: Iterable[int]) -> None:
        """Counts a use of experts by a call of their layer."""
        calls = self._calls[layer] = self._calls.get(layer, 0) + 1
        for row in rows:
            expert, now = (layer, row), calls / HALF_LIFE
            before = self._scores.get(expert)
            # A score is log2 of the sum of 2 ** (calls / HALF_LIFE) over all uses. So new uses count more, and the scores of
            # other experts need not be reduced.
            self._scores[expert] = now if before is None else now + math.log2(1 + 2 ** (before - now))
            if row in self._at[layer]:
                self._push(expert)

    def bring(self, layer: StreamedLayer, rows: Iterable[int], slot: Tensor) -> None:
        """Copies kept experts to their positions in a slot. The compute stream must have waited until it may write the slot."""
        for row in rows:
            self._copy(layer, row, self._at[layer][row], slot, into_slot=True)

    def keep(self, layer: StreamedLayer, rows: Iterable[int], slot: Tensor) -> None:
        """Copies experts from a slot to this memory. If it is full, evicts the experts with the lowest scores.

        The compute stream must have waited for the upload of the experts.
        """
        for row in rows:
            if row in self._at[layer]:
                continue
            if not self._vacant:
                self._evict_least()
            at = self._at[layer][row] = self._vacant.pop()
            self._push((layer, row))
            self._copy(layer, row, at, slot, into_slot=False)

    def drop(self, layer: StreamedLayer) -> None:
        """Evicts all experts of a layer, because their weights on the host were or may have been written."""
        self._vacant += self._at[layer].values()
        self._at[layer].clear()

    def free(self) -> None:
        """Evicts all experts, frees the memory and resets all scores."""
        if not self._count:
            return
        self._device.access(self._memory, Stream.COMPUTE, write=True)
        self._memory = self._device.empty(0)
        self._count = 0
        self._vacant.clear()
        for rows in self._at.values():
            rows.clear()
        self._scores.clear()
        self._calls.clear()
        self._least.clear()

    def _push(self, expert: Expert) -> None:
        """Adds an entry with an expert's present score to the heap. Makes the heap anew if it has too many entries."""
        layer, row = expert
        heappush(self._least, (self._scores.get(expert, -math.inf), layer.index, row, expert))
        if len(self._least) > _MOST_ENTRIES * (self._count - len(self._vacant) + 1):
            here = [(layer, row) for layer, rows in self._at.items() for row in rows]
            self._least = [(self._scores.get(each, -math.inf), each[0].index, each[1], each) for each in here]
            heapify(self._least)

    def _evict_least(self) -> None:
        """Evicts the expert with the lowest score, and removes entries of the heap that are out of date on the way."""
        while True:
            score, _, _, expert = heappop(self._least)
            layer, row = expert
            if row in self._at[layer] and score == self._scores.get(expert, -math.inf):
                self._vacant.append(self._at[layer].pop(row))
                return

    def _copy(self, layer: StreamedLayer, row: int, at: int, slot: Tensor, *, into_slot: bool) -> None:
        """Copies one expert between position ``at`` of this memory and a slot."""
        offset = at * self._size
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
