"""What is on a disk because host memory does not hold it: optimizer state first, then what is trained; and weights in files.

:class:`AccessPredictor` guesses which of it is used next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Generic, TypeVar

from sp_lightning.disk.host_budget import itself, remedy_for
from sp_lightning.plan.plan import Plan, PlannedLayer
from sp_lightning.plan.units import human_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class StatePlacement:
    """Which layers' state is in host memory, and which is on a disk.

    Attributes:
        in_memory, on_disk: bytes of state, by the layer.
        staging: bytes of host memory that the state on the disk passes through.
        room: bytes of host memory that there are for all of it; None if nobody knows.
    """

    in_memory: Mapping[str, int]
    on_disk: Mapping[str, int]
    staging: int
    room: int | None

    @property
    def memory_bytes(self) -> int:
        """Host memory that the state takes."""
        return sum(self.in_memory.values()) + self.staging

    @property
    def disk_bytes(self) -> int:
        """Bytes on the disk, which each step reads and writes."""
        return sum(self.on_disk.values())

    def __str__(self) -> str:
        """One sentence: what is where, and why."""
        total = sum(self.in_memory.values()) + self.disk_bytes
        if not total:
            return "The optimizers have no state that could be on the disk."
        below, of = human_bytes(self.disk_bytes), "it" if not self.on_disk else "both"
        why = "" if self.room is None else f", because {human_bytes(self.room)} of host memory are left for {of}"
        if not self.on_disk:
            return f"All {human_bytes(total)} of optimizer state are in host memory; nothing is on the disk{why}."
        return (
            f"{below} of optimizer state, of {len(self.on_disk)} layers, are on the disk and pass through "
            f"{human_bytes(self.staging)} of host memory; {human_bytes(total - self.disk_bytes)} stay in memory{why}."
        )


def staging_bytes(sizes: Mapping[str, int]) -> int:
    """Host memory for state on its way: of three usual layers (read, updated, written), or twice that of the largest.

    An optimizer makes a layer's state in memory of its own at first, from which it is copied. Less than three is slower.
    """
    return max(2 * max(sizes.values()), 3 * int(median(sizes.values()))) if sizes else 0


def least_room(sizes: Mapping[str, int]) -> int:
    """Host memory without which state cannot be placed: some layers' whole, and the largest of the others' on its way."""
    return min(sum(sizes.values()), _fewest(sizes)[0])


def _fewest(sizes: Mapping[str, int]) -> tuple[int, list[str]]:
    """The least that layers take of which some are on the disk; and which are in memory then, the largest ones."""
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    taken = ((sum(sizes[each] for each in names[:i]) + 2 * sizes[names[i]], names[:i]) for i in range(len(names)))
    return min(taken, key=itemgetter(0), default=(0, []))


def place_state(sizes: Mapping[str, int], room: int | None, given: int | float | None = None) -> StatePlacement:
    """Leaves in memory as much state as there is room for, that of the largest layers first: so less is staged.

    Args:
        sizes: bytes of the state of each layer.
        room: bytes of host memory for it; None for no limit.
        given: ``host_memory``, for the error.

    Raises:
        MemoryError: there is not even room for what is staged.
    """
    if room is None or sum(sizes.values()) <= room:
        return StatePlacement(sizes, {}, 0, room)
    least, names = _fewest(sizes)
    if least > room:
        least = least_room(sizes)
        raise MemoryError(
            f"Host memory is {human_bytes(least - room)} too small for {itself()}, for data that cannot be on the disk, and for "
            f"optimizer state in flight to and from it ({human_bytes(least)}): {remedy_for(least - room, given)}. Smaller "
            'layers (layers=), Trainer(precision="bf16-true") and frozen weights need less.'
        )
    below, above = dict(sizes), dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rest = {other: nbytes for other, nbytes in below.items() if other != name}
        if sum(above.values()) + sizes[name] + staging_bytes(rest) <= room:
            below, above[name] = rest, sizes[name]
    if sum(above.values()) + 2 * max(below.values()) > room:  # there is not room for three usual layers
        above = {name: sizes[name] for name in names}
        below = {name: nbytes for name, nbytes in sizes.items() if name not in above}
    return StatePlacement(above, below, min(staging_bytes(below), room - sum(above.values())), room)


WINDOW = 4
"""Layers whose trained weights on a disk are in memory at a time: fetched, updated, and written out. So with gradients."""


@dataclass(frozen=True)
class OnDisk:
    """What of trained layers is on a disk, beside the optimizers' state.

    Attributes:
        weights: the layers and masters whose weights are there.
        gradients: the layers whose gradients, and those of their masters, are there.
    """

    weights: tuple[PlannedLayer, ...] = ()
    gradients: tuple[PlannedLayer, ...] = ()

    @property
    def any(self) -> bool:
        """Whether anything is there."""
        return bool(self.weights or self.gradients)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that are there."""
        return sum(layer.nbytes for layer in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients that are there."""
        return sum(layer.gradient_bytes for layer in self.gradients)

    @property
    def window(self) -> int:
        """Bytes of memory that all of it passes through."""
        weights = max((layer.nbytes for layer in self.weights), default=0)
        return WINDOW * (weights + max((layer.gradient_bytes for layer in self.gradients), default=0))

    @property
    def spared(self) -> int:
        """Bytes of memory that it leaves to others."""
        return self.weight_bytes + self.gradient_bytes - self.window


def choose_on_disk(plan: Plan, missing: int, but: Collection[str] = (), *, gradients: bool) -> OnDisk:
    """Returns what of trained layers is on a disk, because so many bytes of host memory are missing.

    Masters go first, because nothing but their update reads them; then gradients, which are written and read once in a step;
    then layers, in their order, whose weights are read three times.

    Args:
        plan: the layers.
        missing: bytes, although all state is on the disk.
        but: the names of layers whose weights are not asked.
        gradients: whether all layers' gradients are in memory at once, so that some may be on the disk.
    """
    chosen = OnDisk()
    trained = [layer for layer in plan.layers if layer.gradient_bytes and not layer.rows and layer.name not in but]
    names = {layer.name for layer in trained}
    with_gradients = [layer for layer in plan.trained if layer.gradient_bytes and layer is not plan.residents]
    candidates: list[OnDisk] = [OnDisk(weights=(each,)) for each in plan.masters if each.name in names]
    if gradients and OnDisk(gradients=tuple(with_gradients)).spared > 0:
        candidates += [OnDisk(gradients=(each,)) for each in with_gradients]
    candidates += [OnDisk(weights=(each,)) for each in trained]
    for each in candidates:
        if missing <= 0 or chosen.spared >= missing:
            break
        chosen = OnDisk((*chosen.weights, *each.weights), (*chosen.gradients, *each.gradients))
    return chosen


def choose_in_files(
    sizes: Mapping[str, int], others: int, room: int, staging: int, given: int | float | None = None
) -> list[str]:
    """Returns which layers leave weights in the files that they are in: as few as there is room for the others.

    Args:
        sizes: bytes of those weights, by the layer.
        others: bytes that come to memory whatever stays.
        room: bytes of host memory.
        staging: bytes of it for layers on their way, if there are any.
        given: ``host_memory``, for the error.

    Raises:
        MemoryError: there is not even room for what does not stay.
    """
    if others + sum(sizes.values()) <= room:
        return []
    kept, stay = others + staging, list[str]()
    for name, nbytes in sizes.items():
        if kept + nbytes <= room:
            kept += nbytes
        else:
            stay.append(name)
    if kept > room:
        raise MemoryError(
            f"Host memory is {human_bytes(kept - room)} too small for {itself()}, for weights that are not read in place, and "
            f"for layers in flight ({human_bytes(kept)}): {remedy_for(kept - room, given)}. Smaller layers (layers=) need less."
        )
    return stay


# ---------------------------------------------------------------------- what is used next


class AccessPredictor(Generic[T]):
    """Guesses what comes next: what came the last time after the same one, or the same few. A wrong guess costs a read.

    Args:
        depth: how many of the last ones decide. With two, layers that come forwards and then backwards are told apart.
    """

    def __init__(self, depth: int) -> None:
        self._last: deque[T] = deque(maxlen=depth)
        self._next: dict[tuple[T, ...], T] = {}

    def note(self, used: T) -> None:
        """Something is used now."""
        self._next[tuple(self._last)] = used
        self._last.append(used)

    def coming(self, *, itself: bool = False) -> Iterator[T]:
        """What is used next, in that order, until it comes round to what is used now.

        Args:
            itself: whether what is used now is the last of them, for who needs it anew each time.
        """
        last = self._last.copy()
        while (following := self._next.get(tuple(last))) is not None:
            last.append(following)
            round_again = last == self._last
            if not round_again or itself:
                yield following
            if round_again:
                return
