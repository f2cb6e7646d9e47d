"""Chooses the data on a disk: optimizer state first, then gradients and trained weights. Chooses weights that stay in files.

:class:`AccessPredictor` predicts which data is used next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Generic, TypeVar

from sp_lightning.capabilities.disk.host_budget import itself, remedy_for
from sp_lightning.core.plan.plan import Plan, PlannedLayer
from sp_lightning.core.plan.units import human_bytes

T = TypeVar("T")


@dataclass(frozen=True)
class StatePlacement:
    """Which layers' optimizer state is in host memory, and which is on a disk.

    Attributes:
        in_memory, on_disk: bytes of state, by layer.
        staging: bytes of host memory for state that is in memory for its update, or on its way.
        room: bytes of host memory for all state; None if the system does not report them.
    """

    in_memory: Mapping[str, int]
    on_disk: Mapping[str, int]
    staging: int
    room: int | None

    @property
    def memory_bytes(self) -> int:
        """The bytes of host memory for the state, with that in flight."""
        return sum(self.in_memory.values()) + self.staging

    @property
    def disk_bytes(self) -> int:
        """The bytes of state on the disk. Each step reads and writes all of them."""
        return sum(self.on_disk.values())

    @property
    def window(self) -> int:
        """The most bytes of mapped state in memory. The rest of ``staging`` is for new state that an optimizer makes."""
        return self.staging - max(self.on_disk.values(), default=0)

    def __str__(self) -> str:
        """One sentence for the user."""
        total = sum(self.in_memory.values()) + self.disk_bytes
        if not total:
            return "The optimizers have no state that could be on the disk."
        why = ""
        if self.room is not None:
            of = "both" if self.on_disk else "it"
            why = f", because {human_bytes(self.room)} of CPU memory are left for {of}"
        if not self.on_disk:
            return f"All {human_bytes(total)} of optimizer state are in CPU memory; nothing is on the disk{why}."
        return (
            f"{human_bytes(self.disk_bytes)} of optimizer state, of {len(self.on_disk)} layers, are on the disk and pass through "
            f"{human_bytes(self.staging)} of CPU memory; {human_bytes(total - self.disk_bytes)} stay in memory{why}."
        )


def staging_bytes(sizes: Mapping[str, int]) -> int:
    """Returns the host memory for state in flight, in bytes: three median layers or twice the largest layer, whichever is larger.

    Of three layers one is read, one is updated and one is written. The largest layer counts twice, because an optimizer makes a
    layer's first state in memory of its own, from which it is copied to the file.
    """
    return max(2 * max(sizes.values()), 3 * int(median(sizes.values()))) if sizes else 0


def least_room(sizes: Mapping[str, int]) -> int:
    """Returns the least host memory for state, in bytes: of all layers, or of some, with memory for the others' in flight."""
    return min(sum(sizes.values()), _fewest(sizes)[0])


def _fewest(sizes: Mapping[str, int]) -> tuple[int, list[str]]:
    """Returns the least memory if some state is on the disk, and the layers whose state is in memory in this case.

    These layers are the largest ones. The state in flight takes twice the size of the next layer.
    """
    names = sorted(sizes, key=sizes.__getitem__, reverse=True)
    taken = ((sum(sizes[each] for each in names[:i]) + 2 * sizes[names[i]], names[:i]) for i in range(len(names)))
    return min(taken, key=itemgetter(0), default=(0, []))


def place_state(sizes: Mapping[str, int], room: int | None, given: int | float | None = None) -> StatePlacement:
    """Chooses the layers whose state is in memory, as many as fit. The other layers' state is on the disk.

    Layers with the most state are chosen first. Then only smaller layers are on the disk, and need less memory in flight.

    Args:
        sizes: bytes of the state of each layer.
        room: bytes of host memory for state; None for no limit.
        given: ``host_memory``, for the error.

    Raises:
        MemoryError: not even the placement that takes the least memory fits.
    """
    if room is None or sum(sizes.values()) <= room:
        return StatePlacement(sizes, {}, 0, room)
    least, names = _fewest(sizes)
    if least > room:
        least = least_room(sizes)
        raise MemoryError(
            f"CPU memory is {human_bytes(least - room)} too small for {itself()}, for data that cannot be on the disk, and for "
            f"optimizer state in flight to and from it ({human_bytes(least)}): {remedy_for(least - room, given)}. Smaller "
            'layers (layers=), frozen weights and Trainer(precision="bf16-true") (small updates are lost) need less.'
        )
    below, above = dict(sizes), dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        rest = {other: nbytes for other, nbytes in below.items() if other != name}
        if sum(above.values()) + sizes[name] + staging_bytes(rest) <= room:
            below, above[name] = rest, sizes[name]
    # Three median layers do not fit. Twice the largest layer does, with the layers that `_fewest` chose in memory.
    if sum(above.values()) + 2 * max(below.values()) > room:
        above = {name: sizes[name] for name in names}
        below = {name: nbytes for name, nbytes in sizes.items() if name not in above}
    return StatePlacement(above, below, min(staging_bytes(below), room - sum(above.values())), room)


WINDOW = 4
"""The number of layers whose trained weights, or gradients, are in memory at a time if they are on a disk."""


@dataclass(frozen=True)
class OnDisk:
    """The trained weights and gradients that are on a disk.

    Attributes:
        weights: the layers and masters whose weights are on the disk.
        gradients: the layers whose gradients, and whose masters' gradients, are on the disk.
    """

    weights: tuple[PlannedLayer, ...] = ()
    gradients: tuple[PlannedLayer, ...] = ()

    @property
    def any(self) -> bool:
        """True if anything is on the disk."""
        return bool(self.weights or self.gradients)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights on the disk."""
        return sum(layer.nbytes for layer in self.weights)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of gradients on the disk."""
        return sum(layer.gradient_bytes for layer in self.gradients)

    @property
    def window(self) -> int:
        """The bytes of host memory through which weights and gradients on the disk pass."""
        weights = max((layer.nbytes for layer in self.weights), default=0)
        return WINDOW * (weights + max((layer.gradient_bytes for layer in self.gradients), default=0))

    @property
    def spared(self) -> int:
        """The bytes of host memory that the disk saves."""
        return self.weight_bytes + self.gradient_bytes - self.window


def choose_on_disk(plan: Plan, missing: int, but: Collection[str] = (), *, gradients: bool) -> OnDisk:
    """Chooses the trained weights and gradients that are on the disk, until no memory is missing.

    Masters are chosen first, because only their update reads them. Gradients follow, which are written and read once in a step.
    The last are the weights of layers, in the order of the layers: they are read three times in a step.

    Args:
        plan: the layers.
        missing: bytes of host memory that are missing although all state is on the disk.
        but: the names of layers whose weights are not moved, because they stay in the user's files.
        gradients: True if all gradients are in memory at once. Otherwise none of them is put on the disk.
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
    """Chooses the layers whose weights stay in their files. In their order, layers that fit into host memory are copied there.

    Args:
        sizes: bytes of the weights that can stay in files, by layer.
        others: bytes of mapped weights and casts that must be in memory.
        room: bytes of host memory that can be taken.
        staging: bytes of host memory for layers in flight, if any layer stays in a file.
        given: ``host_memory``, for the error.

    Raises:
        MemoryError: ``others`` and ``staging`` do not fit.
    """
    if others + sum(sizes.values()) <= room:
        return []
    kept = others + staging
    stay: list[str] = []
    for name, nbytes in sizes.items():
        if kept + nbytes <= room:
            kept += nbytes
        else:
            stay.append(name)
    if kept > room:
        raise MemoryError(
            f"CPU memory is {human_bytes(kept - room)} too small for {itself()}, for weights that are not read in place, and "
            f"for layers in flight ({human_bytes(kept)}): {remedy_for(kept - room, given)}. Smaller layers (layers=) need less."
        )
    return stay


# ---------------------------------------------------------------------- the next access


class AccessPredictor(Generic[T]):
    """Predicts the next access: the access that followed the same last accesses before. A wrong prediction costs a read.

    Args:
        depth: the number of last accesses that are compared. With two, forward and backward have separate predictions.
    """

    def __init__(self, depth: int) -> None:
        self._last: deque[T] = deque(maxlen=depth)
        self._next: dict[tuple[T, ...], T] = {}

    def note(self, used: T) -> None:
        """Records an access."""
        self._next[tuple(self._last)] = used
        self._last.append(used)

    def coming(self, *, itself: bool = False) -> Iterator[T]:
        """Yields the predicted accesses in order, for one round: until the last accesses are the recorded ones again.

        Args:
            itself: True to yield the access that closes the round, too.
        """
        last = self._last.copy()
        while (following := self._next.get(tuple(last))) is not None:
            last.append(following)
            round_again = last == self._last
            if not round_again or itself:
                yield following
            if round_again:
                return
