"""Every decision, taken once: sizes and options become a frozen :class:`Plan`; the engine executes it.

Memory on the device for weights and gradients, which is the plan's promise::

    slots of every ring  +  (k' + 1) · largest layer's gradients  +  residents and their gradients
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sp_lightning.layers import Found, Layer
from sp_lightning.memory import Span, lay_out, total_bytes

# Larger layers get a ring of their own if they are few (one in eight) and the ring shrinks by a quarter or more.
_FEW = 8
_WORTH = 3 / 4


@dataclass(frozen=True)
class PlannedLayer:
    """One layer as it lies in memory.

    Attributes:
        name: as :class:`~sp_lightning.layers.Layer` has it.
        nbytes: bytes of its host block and of the part of a slot that it fills, alignment included.
        gradient_bytes: bytes of the gradients of its trainable parameters.
        ring: index of the ring whose slots it uses.
        spans: where each parameter lies.
    """

    name: str
    nbytes: int
    gradient_bytes: int
    ring: int
    spans: tuple[Span, ...]


@dataclass(frozen=True)
class Ring:
    """Equal slots on the device: ``slots`` of ``nbytes`` bytes each."""

    slots: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    """What will happen, in numbers. All sizes in bytes.

    Attributes:
        k: layers that are usable on the device at once.
        k_prime: layers that move as one transfer.
        layers: in the order of the module tree.
        rings: slots by size class; the first is the one that most layers pass through.
        residents: the parameters that stay on the device during a batch, as one more layer without a slot.
        notes: what a reader should know about this model.
    """

    k: int
    k_prime: int
    layers: tuple[PlannedLayer, ...]
    rings: tuple[Ring, ...]
    residents: PlannedLayer
    notes: tuple[str, ...] = ()

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(ring.slots * ring.nbytes for ring in self.rings)

    @property
    def resident_bytes(self) -> int:
        """Device memory of the resident parameters."""
        return self.residents.nbytes

    @property
    def gradient_bytes(self) -> int:
        """Device memory of gradients on their way to the host: those of at most k' + 1 layers, and the residents'."""
        largest = max((layer.gradient_bytes for layer in self.layers), default=0)
        flying = min(self.k_prime + 1, len(self.layers)) * largest
        return flying + self.residents.gradient_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Device memory of weights and gradients, known before the first step."""
        return self.slot_bytes + self.resident_bytes + self.gradient_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and gradients (optimizer state comes on top)."""
        return sum(layer.nbytes + layer.gradient_bytes for layer in (*self.layers, self.residents))


def make_plan(found: Found, *, k: int, k_prime: int) -> Plan:
    """Give every layer its place in memory and its ring."""
    sizes = [total_bytes(lay_out(layer.parameters)) for layer in found.layers]
    limit = _split(sizes, k, k_prime)
    return Plan(
        k=k,
        k_prime=k_prime,
        layers=tuple(_planned(layer, ring=int(size > limit)) for layer, size in zip(found.layers, sizes, strict=True)),
        rings=tuple(_rings(sizes, limit, k, k_prime)),
        residents=_planned(found.residents, ring=-1),
        notes=found.notes,
    )


def schedule(plan: Plan, *, training: bool) -> Iterator[int]:
    """The order of layers that is expected before a batch has shown the real one: forward, then backward."""
    yield from range(len(plan.layers))
    if training:
        yield from reversed(range(len(plan.layers)))


def _planned(layer: Layer, *, ring: int) -> PlannedLayer:
    spans = lay_out(layer.parameters)
    gradients = total_bytes(lay_out(named for named in layer.parameters if named[1].requires_grad))
    return PlannedLayer(layer.name, total_bytes(spans), gradients, ring, spans)


def _rings(sizes: Sequence[int], limit: int, k: int, k_prime: int) -> Iterator[Ring]:
    common = [size for size in sizes if size <= limit]
    large = [size for size in sizes if size > limit]
    if common:
        yield Ring(min(k + k_prime, len(common)), max(common))
    if large:
        yield Ring(_large_slots(len(large), len(sizes), k), max(large))


def _split(sizes: Sequence[int], k: int, k_prime: int) -> int:
    """The largest size that still uses the common ring, chosen for the fewest bytes."""
    if not sizes:
        return 0
    ordered = sorted(sizes)
    candidates = ordered[len(ordered) - len(ordered) // _FEW - 1 :]

    def slot_bytes(limit: int) -> int:
        return sum(ring.slots * ring.nbytes for ring in _rings(sizes, limit, k, k_prime))

    best = min(candidates, key=slot_bytes)
    return best if slot_bytes(best) <= _WORTH * slot_bytes(ordered[-1]) else ordered[-1]


def _large_slots(large: int, total: int, k: int) -> int:
    # As k/n is the share of the model that the device may hold: all of them once k reaches n, at least one.
    return min(large, max(1, large * k // total))
