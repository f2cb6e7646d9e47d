"""Slots on the device in few sizes: layers of like size share a ring."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cache

# Slots come in at most so many sizes, and one size more must save at least a tenth of their bytes.
_MOST_RINGS = 4
_WORTH = 9 / 10
# At most so many sizes are looked at. Layers of a size between them go with the next larger one.
_MOST_SIZES = 64


@dataclass(frozen=True)
class Ring:
    """Equal slots on the device: ``slots`` of ``nbytes`` bytes each.

    Layers far larger than the others have a ring of their own, so that they do not inflate every slot. A ring has as
    many slots as it has layers among any k + k' consecutive ones: those always fit, whatever their sizes, and equal
    layers share one ring of k + k' slots.
    """

    slots: int
    nbytes: int


def choose_rings(
    sizes: Sequence[int], window: int, together: Collection[Sequence[int]] = ()
) -> tuple[tuple[Ring, ...], list[int]]:
    """The rings with the fewest bytes.

    Args:
        sizes: bytes of each layer.
        window: how many consecutive layers have to fit at once.
        together: layers that one module uses at once (its own and those of tied parameters), which have to fit as well.

    Returns:
        The rings, the smallest slots first, and for each layer the index of its ring.
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
    on_demand: Collection[int],
    staying: Collection[int] = (),
) -> tuple[tuple[Ring, ...], list[int]]:
    """As :func:`choose_rings`, but layers that come on demand have two slots of their own: one in use, and one that fills.

    The window is one of the other layers then: as many of them are on the device, however large those on demand are. Where
    common slots take a tenth less, as with the smallest window, all share them. A window of all layers has a slot for each.

    Layers that stay have a slot each in rings of their own; the window is one of the others then, too.
    """
    if staying:
        moving = [layer for layer in range(len(sizes)) if layer not in staying]
        number = {layer: at for at, layer in enumerate(moving)}
        moved, places = choose_rings_apart(
            [sizes[layer] for layer in moving],
            window,
            [[number[layer] for layer in each if layer in number] for each in together],
            [number[layer] for layer in on_demand],
        )
        own, own_places = choose_rings([sizes[layer] for layer in sorted(staying)], len(staying))
        at = dict(zip(moving, places, strict=True))
        at |= {layer: len(moved) + place for layer, place in zip(sorted(staying), own_places, strict=True)}
        return (*moved, *own), [at[layer] for layer in range(len(sizes))]
    common = choose_rings(sizes, window, together)
    if not on_demand or window > len(sizes):
        return common
    rings: list[Ring] = []
    ring_of = [0] * len(sizes)
    others = [layer for layer in range(len(sizes)) if layer not in on_demand]
    for members, consecutive in ((others, window), (sorted(on_demand), 2)):
        number = {layer: at for at, layer in enumerate(members)}
        used = [[number[layer] for layer in each if layer in number] for each in together]
        chosen, places = choose_rings([sizes[layer] for layer in members], consecutive, used)
        for layer, place in zip(members, places, strict=True):
            ring_of[layer] = len(rings) + place
        rings += chosen
    return common if _bytes(common[0]) < _WORTH * _bytes(rings) else (tuple(rings), ring_of)


def _bytes(rings: Iterable[Ring]) -> int:
    return sum(ring.slots * ring.nbytes for ring in rings)


def _choose_limits(sizes: Sequence[int], window: int) -> tuple[int, ...]:
    """The largest size of each ring, in bytes."""
    distinct = sorted(set(sizes))
    # Sizes are left out from the largest down, so that the largest one is always there.
    distinct = distinct[:: -(len(distinct) // _MOST_SIZES + 1)][::-1]
    best = _best_split(sizes, distinct, 1, window)
    for count in range(2, min(_MOST_RINGS, len(distinct)) + 1):
        split = _best_split(sizes, distinct, count, window)
        if split[0] <= _WORTH * best[0]:
            best = split
    return best[1]


def _best_split(sizes: Sequence[int], distinct: Sequence[int], count: int, window: int) -> tuple[int, tuple[int, ...]]:
    """Cuts the sizes into ``count`` classes. Returns the fewest bytes of all slots, and each class's largest size."""

    @cache
    def cost(first: int, last: int) -> int:
        below = distinct[first - 1] if first else -1
        members = [below < size <= distinct[last] for size in sizes]
        return _slots(members, window) * distinct[last]

    @cache
    def best(last: int, classes: int) -> tuple[int, tuple[int, ...]]:
        if classes == 1:
            return cost(0, last), (distinct[last],)
        splits = []
        for cut in range(classes - 2, last):
            before, limits = best(cut, classes - 1)
            splits.append((before + cost(cut + 1, last), (*limits, distinct[last])))
        return min(splits)

    return best(len(distinct) - 1, count)


def _slots(members: Sequence[bool], window: int) -> int:
    """The most members among any ``window`` consecutive layers."""
    inside = most = sum(members[:window])
    for leaving, entering in zip(members, members[window:], strict=False):
        inside += entering - leaving
        most = max(most, inside)
    return most
