"""What ``plan`` puts on a disk: optimizer state and more in training, weights in inference: what host memory does not hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from sp_lightning.plan.host_memory import limit_for
from sp_lightning.plan.ledger import Ledger
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.state_placement import StatePlacement, choose_on_disk, least_room, place_state
from sp_lightning.plan.units import enough_bytes, human_bytes

_DAY = 24 * 60 * 60


@dataclass(frozen=True)
class BelowMemory:
    """What is where.

    Attributes:
        placement: by the names of layers; None if host memory does not suffice even with a disk.
        others: bytes of host memory that cannot be on the disk.
        training: whether it is optimizer state, which is written, too.
        why_not: the reason if there is no placement.
        weights, gradients: bytes of trained weights and of gradients on the disk, by the names of layers.
        window: bytes of host memory that they pass through.
        batches: how many a step has. Gradients are written and read in each.
    """

    placement: StatePlacement | None
    others: int
    training: bool
    why_not: str = ""
    weights: Mapping[str, int] = field(default_factory=dict)
    gradients: Mapping[str, int] = field(default_factory=dict)
    window: int = 0
    batches: int = 1

    @property
    def host_bytes(self) -> int:
        """Host memory of everything."""
        return self.others + (0 if self.placement is None else self.placement.memory_bytes)

    def by_index(self, plan: Plan) -> Mapping[int, int]:
        """Bytes that a layer's update reads, and as many that it writes, by the layer's index; or that a fetch reads.

        Gradients are written when they come, and read once, in each batch of a step. Trained weights are written once and read up
        to three times, twice by fetches. All of that counts as the update's.
        """
        if self.placement is None:
            return {}
        weights = Counter({name: 2 * size for name, size in self.weights.items()})
        gradients = Counter({name: self.batches * size for name, size in self.gradients.items()})
        below = Counter(self.placement.on_disk) + gradients + weights
        layers = (*plan.layers, *plan.tables, plan.residents)
        first = len(plan.layers) + len(plan.masters)
        indices = (*range(len(plan.layers)), *range(first, first + len(plan.tables) + 1))
        return {index: below[layer.name] for index, layer in zip(indices, layers, strict=True) if layer.name in below}

    def lines(self, parameters: int, seconds: float | None) -> list[str]:
        """What a reader should know of it.

        Args:
            parameters: how many the model has.
            seconds: what a batch takes; None if nothing fits.
        """
        if self.placement is None:
            return [f"disk: {self.why_not}"]
        nbytes = self.placement.disk_bytes
        if not nbytes:
            limit = "" if self.placement.room is not None else ", to which --host-memory sets no limit"
            return [f"disk: nothing, because everything is in host memory{limit}"]
        what = "optimizer state" if self.training else "weights"
        each = nbytes / max(parameters, 1)
        moved = (
            f"each step reads and writes {each:.3g} bytes per parameter each way, which is the least possible"
            if self.training
            else f"each batch reads {each:.3g} bytes per parameter, which is the least possible, and writes nothing"
        )
        line = (
            f"disk: {human_bytes(nbytes)} of {what}, of {len(self.placement.on_disk)} layers, through "
            f"{human_bytes(self.placement.staging)} of host memory; {moved}"
        )
        lines = [line]
        trained, gradients = sum(self.weights.values()), sum(self.gradients.values())
        if trained or gradients:
            ways = {
                f"{human_bytes(gradients)} of gradients, which each batch writes and reads once": gradients,
                f"{human_bytes(trained)} of trained weights, which it writes once and reads up to three times": trained,
            }
            too = ", and ".join(what for what, size in ways.items() if size)
            lines.append(f"disk: {too}, through {human_bytes(self.window)} of host memory")
        if not self.training or not seconds:
            return lines
        daily = ((nbytes + trained) / self.batches + gradients) / seconds * _DAY
        return [*lines, f"disk: {daily / 1e12:.3g} TB are written in a day of training; look up what the drive endures"]


def place_training(
    plan: Plan, ledger: Ledger, wide: int, more: int, host_memory: int | None, *, early: bool
) -> BelowMemory:
    """Places optimizer state, and gradients and trained weights if that is not enough.

    Args:
        plan: the layers.
        ledger: the host's memory.
        wide: bytes of gradients in the parameters' dtypes, which they have on a disk.
        more: bytes of other host memory: activations.
        host_memory: bytes that there are; None for no limit.
        early: whether layers are updated in backward, so that few gradients are there.
    """
    state, gradients = ledger.state or 0, sum(layer.gradient_bytes for layer in plan.trained)
    sizes = {layer.name: layer.gradient_bytes * state // max(gradients, 1) for layer in plan.trained}
    others = ledger.nbytes - state + more
    sizes = {name: nbytes for name, nbytes in sizes.items() if nbytes}
    placed = _place(sizes, others, host_memory, ledger.ranks, training=True)
    if placed.placement is not None or host_memory is None or not plan.alone:
        return placed  # with several devices nothing but state goes to the disk
    missing = others + wide - ledger.gradients + 2 * max(sizes.values(), default=0) - host_memory
    chosen = choose_on_disk(plan, missing, gradients=not early)
    weights = Counter[str]()
    for planned in chosen.weights:
        weights[planned.name] += planned.nbytes
    others += (wide - ledger.gradients) * bool(chosen.gradients) - chosen.spared
    placed = _place(sizes, others, host_memory, ledger.ranks, training=True)
    by_layer = {planned.name: planned.gradient_bytes for planned in chosen.gradients}
    return replace(placed, weights=weights, gradients=by_layer, window=chosen.window)


def place_inference(plan: Plan, host_bytes: int, host_memory: int | None) -> BelowMemory:
    """Places weights. Those that travel as casts, tables and residents stay in memory.

    Args:
        plan: the layers.
        host_bytes: host memory of everything.
        host_memory: bytes that there are; None for no limit.
    """
    sizes = {layer.name: layer.nbytes for layer in plan.layers if not layer.casts}
    return _place(sizes, host_bytes - sum(sizes.values()), host_memory, 1, training=False)


def _place(
    sizes: Mapping[str, int], others: int, host_memory: int | None, devices: int, *, training: bool
) -> BelowMemory:
    try:
        placement = place_state(sizes, None if host_memory is None else host_memory - others)
    except MemoryError:
        kept = "weights and gradients" if training else "weights that cannot be read in place"
        least = others + least_room(sizes)
        why = f"{kept} are in host memory ({human_bytes(others)}), with one layer of the rest {human_bytes(least)}; "
        who = "a process takes" if devices == 1 else "processes take"
        why += (
            f"--host-memory {enough_bytes(limit_for(least, devices, disk=True))} is enough, because {who} memory, too"
        )
        return BelowMemory(None, least, training, why)
    return BelowMemory(placement, others, training)
