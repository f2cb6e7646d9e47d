"""Every decision, taken once: sizes and options become a frozen :class:`Plan`; the engine executes it.

Memory on the device for weights and gradients, which is the plan's promise::

    slots of every ring  +  (k' + 1) · largest layer's gradients  +  residents and their gradients
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch

from sp_lightning.device.layout import Span, lay_out, total_bytes
from sp_lightning.model.found import Found, Layer
from sp_lightning.plan.units import human_bytes

# Slots come in at most so many sizes, and one size more must save at least a tenth of their bytes.
_MOST_RINGS = 4
_WORTH = 9 / 10
# So many sizes are looked at; between them layers are put with the next larger ones.
_MOST_SIZES = 64
# So many lines of layers are printed.
_LONGEST = 12


@dataclass(frozen=True)
class PlannedLayer:
    """One layer as it lies in memory.

    Attributes:
        name: as :class:`~sp_lightning.model.found.Layer` has it.
        nbytes: bytes of its host block and of the part of a slot that it fills, alignment included: what a fetch copies.
        gradient_bytes: bytes of the gradients of its trainable parameters, its masters' included.
        ring: index of the ring whose slots it uses.
        spans: where each parameter lies.
        casts: where each cast lies, behind them.
        masters: the index, among :attr:`Plan.moving`, of what the casts are made of.
    """

    name: str
    nbytes: int
    gradient_bytes: int
    ring: int
    spans: tuple[Span, ...]
    casts: tuple[Span, ...] = ()
    masters: int | None = None


@dataclass(frozen=True)
class Ring:
    """Equal slots on the device: ``slots`` of ``nbytes`` bytes each.

    Layers far larger than the others have a ring of their own, so that they do not inflate every slot. A ring has as
    many slots as it has layers among any k + k' consecutive ones: those always fit, whatever their sizes, and equal
    layers share one ring of k + k' slots.
    """

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
        order: the layers as a forward is expected to use them; one that owns a tied weight comes again.
        notes: what a reader should know about this model.
        masters: float32 parameters that travel as casts, as further layers: they have no slots, and come on demand.
        tables: embeddings of which only rows travel, likewise.
        experts: indices of the layers that only come when something is routed to them.
        plain: weights, and gradients, which plain training has on the device, with the optimizer's state.
    """

    k: int
    k_prime: int
    layers: tuple[PlannedLayer, ...]
    rings: tuple[Ring, ...]
    residents: PlannedLayer
    order: tuple[int, ...]
    notes: tuple[str, ...] = ()
    masters: tuple[PlannedLayer, ...] = ()
    tables: tuple[PlannedLayer, ...] = ()
    experts: frozenset[int] = frozenset()
    plain: tuple[int, int] = (0, 0)

    @property
    def moving(self) -> tuple[PlannedLayer, ...]:
        """All that may be in a slot: the layers, then what comes on demand: the masters, the tables."""
        return (*self.layers, *self.masters, *self.tables)

    @property
    def trained(self) -> tuple[PlannedLayer, ...]:
        """All whose gradients the host takes and whose weights it updates; masters go with their layers."""
        return (*self.layers, *self.tables, self.residents)

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
        trained = (layer for layer in self.layers if layer.gradient_bytes)
        # A gradient that leaves in the casts' dtype is there in both for a moment.
        twice = max((cast.nbytes for layer in trained for cast in layer.casts), default=0)
        return flying + twice + self.residents.gradient_bytes

    @property
    def peak_device_bytes(self) -> int:
        """Device memory of weights and gradients, known before the first step."""
        return self.slot_bytes + self.resident_bytes + self.gradient_bytes

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and gradients; optimizer state comes on top."""
        blocks = sum(layer.nbytes + layer.gradient_bytes for layer in self.trained)
        return blocks + sum(masters.nbytes for masters in self.masters)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, training: bool = True, state: int | None = None) -> str:
        """A line for each layer, the middle ones left out if there are many, then the totals, with gradients in training.

        What plain training takes is known with the bytes of the optimizer's ``state``.
        """
        width = max([len(layer.name) for layer in self.layers] + [24])
        shown = [f"  {layer.name:<{width}} {human_bytes(layer.nbytes):>10}" for layer in self.layers]
        if len(shown) > _LONGEST:
            half = _LONGEST // 2
            shown[half:-half] = [f"  … {len(shown) - 2 * half} more"]
        slots = " + ".join(f"{r.slots} × {human_bytes(r.nbytes)}" for r in self.rings if r.slots) or "none"
        peak, host, what = self._compared(training)
        plain = self._plain(training, state)
        totals = {
            "slots": (self.slot_bytes, slots),
            "resident": (self.resident_bytes, ""),
            **({"gradients in flight": (self.gradient_bytes, "")} if training else {}),
            "peak on the device": (peak, f"{what}; plain {plain}" if plain else what),
            "host": (host, what),
        }
        return "\n".join(
            [
                self._heading(),
                *shown,
                *(f"  {name:<{width}} {human_bytes(n):>10}   {more}".rstrip() for name, (n, more) in totals.items()),
                *(f"  note: {note}" for note in self.notes),
            ]
        )

    def sentence(self, *, training: bool = True, state: int | None = None) -> str:
        """Layers, window, and what device memory is saved against plain Lightning, in one line."""
        peak, all_of_them, what = self._compared(training)
        plain = self._plain(training, state)
        saves = f"{what} take {human_bytes(peak)} of device memory"
        if plain:
            saves += f", plain Lightning {plain}"
        if peak >= all_of_them:
            saves += "; a lower k, or smaller layers, would take less"
        return f"{self._heading()}: {saves}."

    def _heading(self) -> str:
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        return f"Superpipeline: {count}, k = {self.k}, k' = {self.k_prime}"

    def _compared(self, training: bool) -> tuple[int, int, str]:
        """Bytes on the device, and on the host, of what."""
        if training:
            return self.peak_device_bytes, self.host_bytes, "weights and gradients"
        gradients = sum(layer.gradient_bytes for layer in self.trained)
        return self.peak_device_bytes - self.gradient_bytes, self.host_bytes - gradients, "weights"

    def _plain(self, training: bool, state: int | None) -> str:
        """What is on the device with plain Lightning, as far as that is known."""
        weights, gradients = self.plain
        if not training:
            return human_bytes(weights)
        return "" if state is None else f"{human_bytes(weights + gradients + state)} with optimizer state"


def make_plan(found: Found, *, k: int, k_prime: int) -> Plan:
    """Give every layer its place in memory and its ring."""
    masters, tables = ([_planned(layer, ring=-1) for layer in each] for each in (found.masters, found.tables))
    with_casts = [index for index, layer in enumerate(found.layers) if layer.lowered]
    masters_of = {layer: len(found.layers) + index for index, layer in enumerate(with_casts)}
    layers = [
        _planned(layer, ring=-1, autocast=found.autocast, masters=masters_of.get(index))
        for index, layer in enumerate(found.layers)
    ]
    sizes = [layer.nbytes for layer in layers]
    together = {used for used in found.visits.values() if len(used) > 1}
    rings, ring_of = _rings(sizes, k + k_prime, together)
    # What comes on demand has rings without slots, which say how large an extra one is to be.
    without_slots = [Ring(0, max(each.nbytes for each in group)) for group in (masters, tables) if group]
    plan = Plan(
        k=k,
        k_prime=k_prime,
        layers=tuple(replace(layer, ring=ring) for layer, ring in zip(layers, ring_of, strict=True)),
        rings=(*rings, *without_slots),
        residents=_planned(found.residents, ring=-1),
        order=_order(found),
        notes=(*found.notes, *_table_notes(tables), *_wire_notes(found)),
        masters=tuple(replace(each, ring=len(rings)) for each in masters),
        tables=tuple(replace(each, ring=len(rings) + bool(masters)) for each in tables),
        experts=found.experts,
        plain=found.plain_bytes,
    )
    if plan.host_bytes and plan.peak_device_bytes >= plan.host_bytes:
        saves_nothing = (
            "this takes no less device memory than all weights and gradients do: lower k, or choose smaller layers."
        )
        return replace(plan, notes=(*plan.notes, saves_nothing))
    return plan


def schedule(plan: Plan, *, training: bool) -> Iterator[int]:
    """The order of layers that is expected before a batch has shown the real one: forward, then backward.

    Nobody knows which experts will be used.
    """
    order = [layer for layer in plan.order if layer not in plan.experts]
    yield from order
    if training:
        yield from reversed(order)


def _order(found: Found) -> tuple[int, ...]:
    used = [layer for visits in found.visits.values() for layer in visits]
    without_module = [layer for layer in range(len(found.layers)) if layer not in used]
    return (*without_module, *used)


def _planned(
    layer: Layer, *, ring: int, autocast: torch.dtype | None = None, masters: int | None = None
) -> PlannedLayer:
    spans = lay_out(layer.parameters)
    casts = lay_out(
        ((name, torch.empty_like(p, dtype=autocast, device="meta")) for name, p in layer.lowered),
        begin=total_bytes(spans),
    )
    trained = [named for named in (*layer.parameters, *layer.lowered) if named[1].requires_grad]
    gradients = total_bytes(lay_out(trained))
    return PlannedLayer(layer.name, total_bytes(casts or spans), gradients, ring, spans, casts, masters)


def _table_notes(tables: Iterable[PlannedLayer]) -> list[str]:
    return [
        f"of {table.name!r} ({human_bytes(table.nbytes)}) only the rows that are looked up travel; "
        f"layers=[{table.name!r}] would move it whole."
        for table in tables
    ]


def _wire_notes(found: Found) -> tuple[str, ...]:
    lowered = sum(masters.nbytes for masters in found.masters)
    if not lowered:
        return ()
    share = lowered / sum(layer.nbytes for layer in found.layers)
    dtype = str(found.autocast).removeprefix("torch.")
    return (
        f"{share:.0%} of the layers' bytes travel as {dtype}, as autocast would cast them; float32 stays on the host.",
    )


def _rings(
    sizes: Sequence[int], window: int, together: Collection[Sequence[int]] = ()
) -> tuple[tuple[Ring, ...], list[int]]:
    """The rings with the fewest bytes, and which of them each layer uses.

    Args:
        sizes: bytes of each layer.
        window: consecutive layers that are to fit at once.
        together: layers that one module uses at once (its own and those of tied parameters), which must fit as well.
    """
    if not sizes:
        return (), []
    distinct = sorted(set(sizes))
    distinct = distinct[:: -(len(distinct) // _MOST_SIZES + 1)][::-1]  # from the largest down: a class's limit is kept
    best = _best_split(sizes, distinct, 1, window)
    for count in range(2, min(_MOST_RINGS, len(distinct)) + 1):
        split = _best_split(sizes, distinct, count, window)
        if split[0] <= _WORTH * best[0]:
            best = split
    _, limits = best
    ring_of = [next(ring for ring, limit in enumerate(limits) if size <= limit) for size in sizes]
    rings = []
    for index, limit in enumerate(limits):
        at_once = max((sum(ring_of[layer] == index for layer in used) for used in together), default=0)
        rings.append(Ring(max(_slots([ring == index for ring in ring_of], window), at_once), limit))
    return tuple(rings), ring_of


def _best_split(sizes: Sequence[int], distinct: Sequence[int], count: int, window: int) -> tuple[int, tuple[int, ...]]:
    """Cut the sizes into ``count`` classes: (bytes of all slots, largest size of each class), fewest bytes first."""

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
