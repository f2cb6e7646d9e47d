"""Every decision, taken once: sizes and options become a frozen :class:`Plan`, which the engine executes.

The plan promises how much memory of the device weights and gradients take at most::

    slots of every ring  +  (k' + 1) · largest layer's gradients  +  residents and their gradients

What streaming does not move counts with the residents: modules that are moved whole, and all buffers.

On several devices a gradient that leaves takes more: what is sent to the others, what is received, and the own part of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch

from sp_lightning.device.layout import ALIGNMENT, Span, aligned, lay_out, total_bytes
from sp_lightning.model.found import Found, Layer
from sp_lightning.plan.rings import Ring, choose_rings_apart
from sp_lightning.plan.units import in_gib
from sp_lightning.plan.update_policy import UpdatePolicy

# At most so many lines of layers are printed.
_LONGEST = 12


@dataclass(frozen=True)
class PlannedLayer:
    """One layer as it lies in memory.

    Attributes:
        name: the layer's name, as :class:`~sp_lightning.model.found.Layer` has it.
        nbytes: bytes that a fetch copies: those of its host block and of the part of a slot that it fills, alignment
            included.
        gradient_bytes: bytes of the gradients of its trainable parameters, including those of its masters.
        ring: the index, in :attr:`Plan.rings`, of the ring whose slots it uses.
        spans: where each parameter lies.
        casts: where each cast lies, behind the parameters.
        masters: the index, in :attr:`Plan.moving`, of the parameters that the casts are made of.
        narrow_bytes: bytes, in the casts' dtype, of those gradients that may come in it.
        rows: the number of experts that its stacks hold, if single experts are uploaded; otherwise 0.
    """

    name: str
    nbytes: int
    gradient_bytes: int
    ring: int
    spans: tuple[Span, ...]
    casts: tuple[Span, ...] = ()
    masters: int | None = None
    narrow_bytes: int = 0
    rows: int = 0

    @property
    def stacks(self) -> tuple[int, ...]:
        """The indices of the stacks among its spans."""
        return tuple(
            i for i, span in enumerate(self.spans) if self.rows and len(span.shape) == 3 and span.shape[0] == self.rows
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert."""
        return sum(self.spans[index].nbytes // self.rows for index in self.stacks)


@dataclass(frozen=True)
class Plan:
    """What will happen, in numbers. All sizes are in bytes.

    Attributes:
        k, k_prime: how many layers are usable on the device at once, and how many move as one transfer.
        layers: the layers, in the order of the module tree.
        rings: the slots, in ascending size. If stacked experts have their own slots, these follow. Then come a ring without
            slots for the masters, and one for the tables.
        residents: the parameters that stay on the device during a batch, as one more layer, which has no slot.
        order: the indices of the layers in the order in which a forward is expected to use them. A layer that owns a tied
            weight is in it several times.
        notes: what a user should know about this model.
        masters: the float32 parameters that travel as casts, as further layers. They have no slots, and come on demand.
        tables: embeddings of which only rows are uploaded, as further layers without slots.
        experts: the indices of the layers that are used only by tokens routed to them.
        plain: bytes of the weights, and of the gradients, that plain training has on the device; the optimizer's state
            comes on top.
        ranks, nodes: how many devices of a node sum their gradients, each with slots of its own, and how many nodes do.
        cache_bytes: bytes of device memory for a cache of used experts.
        staying: bytes of modules that are moved whole and of buffers, and bytes of those modules' gradients.
        nothing: why nothing is streamed; empty if something is.
        steps_on_device: whether layers are stepped on the device.
        stay: the indices of the layers that stay on the device, with their gradients and their optimizer state.
        updates: where, when and how layers are updated; None outside of training. It does not count in comparisons.
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
    ranks: int = 1
    cache_bytes: int = 0
    nodes: int = 1
    staying: tuple[int, int] = (0, 0)
    nothing: str = ""
    steps_on_device: bool = False
    stay: frozenset[int] = frozenset()
    updates: UpdatePolicy | None = field(default=None, compare=False)

    @property
    def alone(self) -> bool:
        """Whether there is one device, which sums its gradients with nobody."""
        return self.ranks * self.nodes == 1

    @property
    def moving(self) -> tuple[PlannedLayer, ...]:
        """All that may be in a slot: the layers, and behind them what comes on demand, the masters and the tables."""
        return (*self.layers, *self.masters, *self.tables)

    @property
    def settled(self) -> frozenset[int]:
        """The indices of the layers whose ring has a slot for each of its layers, so that none makes room for another."""
        sharing = Counter(layer.ring for layer in self.layers)
        fits = {ring for ring, layers in sharing.items() if layers <= self.rings[ring].slots}
        return frozenset(i for i, layer in enumerate(self.layers) if layer.ring in fits and not layer.rows)

    @property
    def main_ring(self) -> int:
        """The index of the ring through which most bytes pass."""
        passing = Counter[int]()
        for layer in self.layers:
            passing[layer.ring] += layer.nbytes
        return max(passing, key=passing.__getitem__, default=0)

    @property
    def trained(self) -> tuple[PlannedLayer, ...]:
        """All whose gradients go to the host and whose weights are updated there. Masters go with their layers."""
        return (*self.layers, *self.tables, self.residents)

    @property
    def offloaded(self) -> tuple[PlannedLayer, ...]:
        """Of :attr:`trained`, those in host memory: all but the layers that stay on the device."""
        layers = [layer for index, layer in enumerate(self.layers) if index not in self.stay]
        return (*layers, *self.tables, self.residents)

    @property
    def offloaded_masters(self) -> tuple[PlannedLayer, ...]:
        """The masters of these layers."""
        staying = {self.layers[index].masters for index in self.stay}
        return tuple(each for at, each in enumerate(self.masters, len(self.layers)) if at not in staying)

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(ring.slots * ring.nbytes for ring in self.rings)

    @property
    def resident_bytes(self) -> int:
        """Device memory of the resident parameters, of modules that are moved whole, and of buffers."""
        return self.residents.nbytes + self.staying[0]

    @property
    def gradient_bytes(self) -> int:
        """Device memory of gradients: on their way those of at most k' + 1 layers and of the residents; those that stay."""
        if not self.alone:
            return self._reduced_bytes + self.staying[1]
        largest = max((layer.gradient_bytes for layer in self.layers), default=0)
        # While gradients of experts arrive, some gradients of the block around them may be on the device.
        flying = min(self.k_prime + 1 + bool(self.experts), len(self.layers)) * largest
        trained = (layer for layer in self.layers if layer.gradient_bytes)
        # A cast's gradient is on the device twice for a moment: autograd's own is copied, or is made float32 for a hook.
        twice = max((cast.nbytes for layer in trained for cast in layer.casts), default=0)
        return flying + twice + self.residents.gradient_bytes + self.staying[1]

    @property
    def _reduced_bytes(self) -> int:
        """As :attr:`gradient_bytes`, with what :class:`~sp_lightning.ranks.reduced_gradients.ReducedGradients` adds."""
        residents = self.residents.gradient_bytes
        # Each layer leaves once. The gradient of a table is dense by then, as that of a layer is.
        sizes = sorted((each.gradient_bytes for each in (*self.layers, *self.tables)), reverse=True)[: self.k_prime + 1]
        parts = [aligned(-(-nbytes // self.ranks)) for nbytes in (*sizes, residents)]
        # While the own part of one of them is added up, its sum is there beside it: of half precision in float32, too.
        adding = 3 * max(parts)
        each = 2 * self.ranks + 1
        if self.nodes > 1:
            # What other nodes send, and the sum of a part of it; of half precision in float32, and rounded beside that.
            half = any(span.dtype.itemsize == 2 for layer in (*self.layers, self.residents) for span in layer.spans)
            parts = [part + ALIGNMENT * self.nodes for part in parts]
            each += 5 if half else 2
        return sum(sizes) + residents + sum(each * part for part in parts) + adding

    @property
    def step_slots(self) -> int:
        """How many slots of the largest layer's size layers are stepped in: one, if two of most other layers fit into it."""
        sizes = [layer.gradient_bytes for layer in self.trained]
        return 2 if 2 * sum(size for size in sizes if 2 * size > max(sizes)) > sum(sizes) else 1

    @property
    def update_bytes(self) -> int:
        """Device memory of steps: slots of weights, gradients, and a state as Adam's; wide gradients; casts of three layers."""
        largest, narrow = (
            max(each) for each in zip(*((e.gradient_bytes, e.narrow_bytes) for e in self.trained), strict=True)
        )
        return self.steps_on_device * (self.step_slots * 4 * largest + 3 * narrow) + self.staying_bytes

    @property
    def staying_bytes(self) -> int:
        """Device memory of layers that stay beside their slots: gradients, a state as Adam's, and the masters of casts."""
        total = 0
        for layer in (self.layers[index] for index in self.stay):
            masters = 0 if layer.masters is None else self.moving[layer.masters].nbytes
            total += 3 * layer.gradient_bytes - layer.narrow_bytes + masters
        return total

    @property
    def peak_device_bytes(self) -> int:
        """The most device memory that weights and gradients take, with that in which layers are stepped."""
        return self.slot_bytes + self.resident_bytes + self.gradient_bytes + self.cache_bytes + self.update_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of these, what is allocated beside the module's own memory, where the device is the CPU."""
        return self.peak_device_bytes - self.staying[0]

    @property
    def stack_bytes(self) -> int:
        """Bytes of all stacked experts that are uploaded one by one."""
        return sum(layer.rows * layer.row_bytes for layer in self.layers if layer.rows)

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and gradients. Optimizer state comes on top.

        Weights of layers that stay on the device are there until the first step, and while a checkpoint is written; their
        gradients never are.
        """
        blocks = sum(layer.nbytes for layer in self.trained) + sum(masters.nbytes for masters in self.masters)
        return blocks + sum(layer.gradient_bytes for layer in self.offloaded)

    def __str__(self) -> str:
        return self.table()

    def table(self, *, training: bool = True, state: int | None = None) -> str:
        """The plan as text: a line for each layer, without the middle ones if there are many, and the totals.

        Args:
            training: whether gradients are counted.
            state: bytes of the optimizer's state. What plain training takes is known with it only.
        """
        width = max([len(layer.name) for layer in self.layers] + [24])
        shown = [f"  {layer.name:<{width}} {in_gib(layer.nbytes):>10}" for layer in self.layers]
        if len(shown) > _LONGEST:
            half = _LONGEST // 2
            shown[half:-half] = [f"  … {len(shown) - 2 * half} more"]
        slots = " + ".join(f"{r.slots} × {in_gib(r.nbytes)}" for r in self.rings if r.slots) or "none"
        peak, host = self.taken(training=training)
        what = "weights and gradients" if training else "weights"
        plain, stay, kept = self._plain(training, state), self.staying[0], self.cache_bytes
        moved_whole = f"of them {in_gib(stay)} of buffers and modules that are moved whole" if stay else ""
        steps = self.update_bytes - self.staying_bytes
        stays = f"{len(self.stay)} of {len(self.layers)}: gradients, optimizer state and float32 weights, beside their slots"
        of_stacks = f"{kept / self.stack_bytes:.0%} of {in_gib(self.stack_bytes)}" if kept else ""
        totals = {
            "slots": (self.slot_bytes, slots),
            "resident": (self.resident_bytes, moved_whole),
            **({"experts kept": (kept, of_stacks)} if kept else {}),
            **({"gradients in flight": (self.gradient_bytes, "")} if training else {}),
            **({"steps on the device": (steps, "")} if training and self.steps_on_device else {}),
            **({"layers that stay": (self.staying_bytes, stays)} if training and self.stay else {}),
            "peak on the device": (peak, f"{what}; plain {plain}" if plain else what),
            "host": (host, what),
        }
        return "\n".join(
            [
                self._heading(),
                *shown,
                *(f"  {name:<{width}} {in_gib(n):>10}   {more}".rstrip() for name, (n, more) in totals.items()),
                *([] if self.updates is None else [f"  updates: {self.updates}"]),
                *(f"  note: {note}" for note in self.notes),
            ]
        )

    def sentence(self, *, training: bool = True, state: int | None = None) -> str:
        """The plan in one line: layers, window, and device memory beside that of plain Lightning.

        The arguments are those of :meth:`table`.
        """
        peak, on_host = self.taken(training=training)
        what = "weights, gradients and steps" if self.steps_on_device else "weights and gradients"
        what += f" (with the optimizer state of the {len(self.stay)} that stay)" * bool(self.stay)
        what, plain = what if training else "weights", self._plain(training, state)
        saves = f"take {in_gib(peak)} of device memory"
        if plain:
            saves += f", plain Lightning {plain}"
        if self.nothing:
            return f"{self._heading()}. {what.capitalize()} {saves}."
        if not self.stay and peak >= on_host + self.staying[0] + self.staying[1] * training:
            saves += "; a lower k, or smaller layers, would take less"
        return f"{self._heading()}: {what} {saves}."

    def _heading(self) -> str:
        if self.nothing:
            return f"Superpipeline: {self.nothing}"
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        return f"Superpipeline: {count}, k = {self.k}, k' = {self.k_prime}"

    def taken(self, *, training: bool) -> tuple[int, int]:
        """Bytes that weights, and in training gradients, take on the device and on the host."""
        if training:
            return self.peak_device_bytes, self.host_bytes
        gradients = sum(layer.gradient_bytes for layer in self.offloaded)
        return self.peak_device_bytes - self.gradient_bytes - self.update_bytes, self.host_bytes - gradients

    def _plain(self, training: bool, state: int | None) -> str:
        """What plain Lightning has on the device; empty if that is not known."""
        weights, gradients = self.plain
        if not training:
            return in_gib(weights)
        return "" if state is None else f"{in_gib(weights + gradients + state)} with optimizer state"


def make_plan(
    found: Found, *, k: int, k_prime: int, ranks: int = 1, nodes: int = 1, training: bool = True, stay: int = 0
) -> Plan:
    """Gives every layer its place in memory and its ring.

    Args:
        found: the model's layers.
        k: how many layers are to be usable on the device at once, at least 1.
        k_prime: how many layers are to move as one transfer, at least 1.
        ranks, nodes: how many devices of a node sum their gradients, and how many nodes add up their sums.
        training: whether batches are trained. Otherwise nearly nothing of stacked experts travels, and k and k' count the
            other layers.
        stay: how many layers stay on the device with their optimizer state, in the order in which a forward uses them: the
            first ones, whose updates are awaited first.
    """
    masters, tables = ([_planned(layer, ring=-1) for layer in each] for each in (found.masters, found.tables))
    with_casts = [index for index, layer in enumerate(found.layers) if layer.lowered]
    masters_of = {layer: len(found.layers) + index for index, layer in enumerate(with_casts)}
    layers = [
        _planned(layer, ring=-1, autocast=found.autocast, masters=masters_of.get(index))
        for index, layer in enumerate(found.layers)
    ]
    sizes = [layer.nbytes for layer in layers]
    together = {used for used in found.visits.values() if len(used) > 1}
    on_demand = [index for index, layer in enumerate(layers) if layer.rows and not training]
    order = _order(found)
    may_stay = [index for index in dict.fromkeys(order) if not layers[index].rows and index not in found.experts]
    staying = frozenset(may_stay[:stay])
    rings, ring_of = choose_rings_apart(sizes, k + k_prime, together, on_demand, staying)
    # What comes on demand has rings without slots, which say how large an extra slot has to be.
    without_slots = [Ring(0, max(each.nbytes for each in group)) for group in (masters, tables) if group]
    plan = Plan(
        k=k,
        k_prime=k_prime,
        layers=tuple(replace(layer, ring=ring) for layer, ring in zip(layers, ring_of, strict=True)),
        rings=(*rings, *without_slots),
        residents=_planned(found.residents, ring=-1),
        order=order,
        notes=(*found.notes, *_wire_notes(found)),
        masters=tuple(replace(each, ring=len(rings)) for each in masters),
        tables=tuple(replace(each, ring=len(rings) + bool(masters)) for each in tables),
        experts=found.experts,
        plain=found.plain_bytes,
        ranks=ranks,
        nodes=nodes,
        staying=found.staying,
        nothing=found.nothing,
        stay=staying,
    )
    if plan.host_bytes and not plan.stay and plan.peak_device_bytes >= plan.host_bytes + sum(plan.staying):
        remedy = "nothing is streamed." if plan.nothing else "lower k, or choose smaller layers."
        saves_nothing = f"this takes no less device memory than all weights and gradients do: {remedy}"
        return replace(plan, notes=(*plan.notes, saves_nothing))
    return plan


def schedule(plan: Plan, *, training: bool) -> Iterator[int]:
    """The order of layers that is expected before a batch has shown the real one: forward, then backward.

    Experts are not in it, because nobody knows which ones will be used.
    """
    order = [layer for layer in plan.order if layer not in plan.experts]
    yield from order
    if training:
        yield from reversed(order)


def _order(found: Found) -> tuple[int, ...]:
    """The layers as a forward is expected to use them; parameters that belong to no layer's module come first."""
    used = [layer for visits in found.visits.values() for layer in visits]
    without_module = [layer for layer in range(len(found.layers)) if layer not in used]
    return (*without_module, *used)


def _planned(
    layer: Layer, *, ring: int, autocast: torch.dtype | None = None, masters: int | None = None
) -> PlannedLayer:
    spans = lay_out(layer.parameters)
    casts = lay_out(layer.lowered, begin=total_bytes(spans), dtype=autocast)
    trained = [named for named in (*layer.parameters, *layer.lowered) if named[1].requires_grad]
    gradients = total_bytes(lay_out(trained))
    narrow = sum(cast.nbytes for cast, (_, p) in zip(casts, layer.lowered, strict=True) if p.requires_grad)
    nbytes = total_bytes(casts or spans)
    return PlannedLayer(layer.name, nbytes, gradients, ring, spans, casts, masters, narrow, layer.rows)


def _wire_notes(found: Found) -> tuple[str, ...]:
    lowered = sum(masters.nbytes for masters in found.masters)
    if not lowered:
        return ()
    share = lowered / sum(layer.nbytes for layer in found.layers)
    dtype = str(found.autocast).removeprefix("torch.")
    return (
        f"{share:.0%} of the layers' bytes travel as {dtype}, as autocast would cast them; float32 stays on the host.",
    )
