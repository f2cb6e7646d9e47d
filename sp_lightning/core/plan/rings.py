"""Chooses slots on the device in a few sizes: layers of similar size share a ring."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

_MOST_RINGS = 4
"""The most sizes of slots."""
_WORTH = 9 / 10
"""One more size of slots is chosen only if it reduces the bytes of all slots to this share or less."""
LEAST_SHARE = _WORTH**2
"""A larger window takes at least this share of a smaller one's bytes. It may take less than all of them: with the same sizes of
slots it takes no less, but other sizes, and separate slots, are chosen only if they are worth it."""
_MOST_SIZES = 64
"""The most sizes that are tried. A layer of another size uses slots of the next larger size."""


@dataclass(frozen=True)
class Ring:
    """Equal slots on the device: ``slots`` of ``nbytes`` bytes each.

    Layers far larger than the others have their own ring, so that they do not inflate every slot. The number of a ring's slots
    is the largest number of its layers among k + k' consecutive layers. So any k + k' consecutive layers fit, whatever their
    sizes, and layers of one size share one ring of k + k' slots. A ring has more slots if one module uses more layers at once.
    """

    slots: int
    nbytes: int


def choose_rings(
    sizes: Sequence[int], window: int, together: Collection[Sequence[int]] = ()
) -> tuple[tuple[Ring, ...], list[int]]:
    """Divides layers of different sizes among rings, so that all slots together take few bytes.

    The sizes of rings are chosen for windows of consecutive layers. ``together`` then only adds slots.

    Rings help if a large layer is alone: VGG16 with one matrix of 74% of its weights needs slots of 98% instead of 148%. They do
    not help networks that double their channels from stage to stage, because their largest layers are neighbours, and any
    ``window`` consecutive layers must fit. Each further ring also needs its own ``window`` slots. The two last blocks of
    ResNet-18 have 31% and 40% of its weights: one ring of two slots takes 80%, three rings (40%, 31%, twice 10%) take 91%. So the
    search for layers divides such blocks (``core/model/uneven.py``).

    Args:
        sizes: bytes of each layer.
        window: the number of consecutive layers that must fit at once.
        together: groups of layers that one module uses at once: its own layer, and the layers of tied parameters. The layers of
            each group must fit at once, too.

    Returns:
        The rings, by ascending size, and the index of each layer's ring.
    """
    if not sizes:
        return (), []
    limits = _choose_limits(sizes, window)
    ring_of = [next(ring for ring, limit in enumerate(limits) if size <= limit) for size in sizes]
    rings = []
    for index, limit in enumerate(limits):
        at_once = max((sum(ring_of[layer] == index for layer in used) for used in together), default=0)
        rings.append(Ring(max(_slots([ring == index for ring in ring_of], window), at_once), limit))
    return tuple(rings), ring_of


def choose_rings_apart(
    sizes: Sequence[int],
    window: int,
    together: Collection[Sequence[int]],
    by_rows: Collection[int],
) -> tuple[tuple[Ring, ...], list[int]]:
    """As :func:`choose_rings`, but with separate slots for layers that are uploaded by rows.

    - Layers by rows have two slots: one in use, one for the next upload. The window then counts the other layers only, so that
      its size does not depend on the layers by rows.
    - If one set of slots for all layers takes more than a tenth less memory than separate ones, all layers share it. This is so
      with the smallest window, for example.
    - If the window is larger than the number of layers, all layers share the slots, too: each layer has one.

    Args:
        sizes, window, together: as for :func:`choose_rings`.
        by_rows: the indices of the layers that are uploaded by rows.
    """
    common = choose_rings(sizes, window, together)
    if not by_rows or window > len(sizes):
        return common
    rings: list[Ring] = []
    ring_of = [0] * len(sizes)
    others = [layer for layer in range(len(sizes)) if layer not in by_rows]
    for members, consecutive in ((others, window), (sorted(by_rows), 2)):
        number = {layer: at for at, layer in enumerate(members)}  # choose_rings counts only these members
        used = [[number[layer] for layer in each if layer in number] for each in together]
        chosen, places = choose_rings([sizes[layer] for layer in members], consecutive, used)
        for layer, place in zip(members, places, strict=True):
            ring_of[layer] = len(rings) + place
        rings += chosen
    return common if _bytes(common[0]) < _WORTH * _bytes(rings) else (tuple(rings), ring_of)


def _bytes(rings: Iterable[Ring]) -> int:
    return sum(ring.slots * ring.nbytes for ring in rings)


def _choose_limits(sizes: Sequence[int], window: int) -> tuple[int, ...]:
    """Chooses the rings. Returns the size of the largest layer of each, in bytes."""
    distinct = sorted(set(sizes))
    # Every n-th size, counted from the largest size down, so that the largest size remains.
    distinct = distinct[:: -(len(distinct) // _MOST_SIZES + 1)][::-1]
    best = _best_split(sizes, distinct, 1, window)
    for count in range(2, min(_MOST_RINGS, len(distinct)) + 1):
        split = _best_split(sizes, distinct, count, window)
        if split[0] <= _WORTH * best[0]:
            best = split
    return best[1]


def _best_split(sizes: Sequence[int], distinct: Sequence[int], count: int, window: int) -> tuple[int, tuple[int, ...]]:
    """Splits the sizes into ``count`` classes. Returns the fewest bytes of all slots, and the largest size of each class."""

    @cache
    def cost(first: int, last: int) -> int:
        """Returns the bytes of the slots of one class: the sizes ``distinct[first]`` to ``distinct[last]``."""
        below = distinct[first - 1] if first else -1
        members = [below < size <= distinct[last] for size in sizes]
        return _slots(members, window) * distinct[last]

    @cache
    def best(last: int, classes: int) -> tuple[int, tuple[int, ...]]:
        """Returns the best split of the sizes up to ``distinct[last]`` into this number of classes."""
        if classes == 1:
            return cost(0, last), (distinct[last],)
        splits = []
        for cut in range(classes - 2, last):
            before, limits = best(cut, classes - 1)
            splits.append((before + cost(cut + 1, last), (*limits, distinct[last])))
        return min(splits)

    return best(len(distinct) - 1, count)


def _slots(members: Sequence[bool], window: int) -> int:
    """Returns the largest number of members among ``window`` consecutive layers."""
    inside = most = sum(members[:window])
    for leaving, entering in zip(members, members[window:], strict=False):  # the window moves by one layer
        inside += entering - leaving
        most = max(most, inside)
    return most
