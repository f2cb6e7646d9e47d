"""Makes a frozen :class:`Plan` from sizes and options. The engine executes it.

The plan bounds the device memory of weights and gradients::

    slots of every ring  +  (k' + 1) · largest layer's gradients  +  resident parameters and their gradients

Modules that are moved whole instead of streamed, and all buffers, count as resident. Layers that stay on the device and optimizer
steps on the device need more memory (:attr:`Plan.peak_device_bytes`).

On several devices, an offloaded gradient takes more memory: for the parts that are sent to other devices and received from them,
and for the rank's own part of the sum.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from sp_lightning.core.device.layout import ALIGNMENT, Span, aligned, lay_out, total_bytes
from sp_lightning.core.model.found import Found, Layer
from sp_lightning.core.plan.rings import Ring, choose_rings_apart
from sp_lightning.core.plan.units import in_gib
from sp_lightning.core.plan.update_policy import UpdatePolicy
from sp_lightning.core.torch_compat.private import gradient_hooks

_LONGEST = 12
"""The most lines of layers in ``str(plan)``."""


@dataclass(frozen=True)
class PlannedLayer:
    """One layer's layout in memory.

    Attributes:
        name: the layer's name, as in :class:`~sp_lightning.core.model.found.Layer`.
        nbytes: bytes of an upload with alignment: the size of the layer's block in the host store, and of its part of a slot.
        gradient_bytes: bytes of the gradients of its trainable parameters, including those of its masters.
        ring: the index in :attr:`Plan.rings` of its ring.
        spans: the place of each parameter.
        casts: the place of each cast, behind the parameters.
        masters: the index in :attr:`Plan.moving` of its master weights, from which the casts are made.
        narrow_bytes: bytes of its casts' gradients in the casts' dtype, except of weights with hooks, which get float32.
        rows: the number of experts in its stacks if single experts are uploaded; otherwise 0.
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
    """The layout and the numbers of a run. All sizes are in bytes.

    Attributes:
        k, k_prime: the number of layers that are usable on the device at once, and the number of further layers that may be
            uploaded meanwhile, which is also the largest number of layers per transfer.
        layers: the layers, in the order of the module tree.
        rings: the rings of layers, by ascending size of their slots; then the rings of stacked experts, if they have their own;
            then a ring without slots for the masters, and one for the tables.
        residents: the parameters that stay on the device during a batch, as one more layer without a slot.
        order: the indices of the layers in the order in which a forward is expected to use them. The index of a layer that owns a
            tied weight occurs several times.
        notes: remarks for the user about the model.
        masters: the float32 parameters whose casts are uploaded instead, as further layers. They have no slots, and are uploaded
            on demand.
        tables: embeddings of which only rows are uploaded, as further layers without slots.
        experts: the indices of the layers that are used only by tokens routed to them.
        plain: bytes of the weights and of the gradients on the device in plain training, without optimizer state.
        ranks, nodes: the number of devices of a node, each with its own slots, and the number of nodes. All sum their gradients.
        staying: bytes of the weights that stay on the device and of buffers, and bytes of these weights' gradients.
        nothing: why nothing is streamed; empty if layers are streamed.
        steps_on_device: True if layers are stepped on the device.
        stay: the layers that stay on the device, with their gradients and their optimizer state: their names, with the bytes of
            their weights and of their gradients. They are not among ``layers``.
        training: True if batches are trained. Otherwise gradients and optimizer steps take no memory.
        updates: where, when and how layers are updated; None outside of training. Comparisons ignore it.
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
    nodes: int = 1
    staying: tuple[int, int] = (0, 0)
    nothing: str = ""
    steps_on_device: bool = False
    stay: tuple[tuple[str, int, int], ...] = ()
    training: bool = True
    updates: UpdatePolicy | None = field(default=None, compare=False)

    @property
    def alone(self) -> bool:
        """True if one device trains alone, so that gradients are not summed."""
        return self.ranks * self.nodes == 1

    @property
    def moving(self) -> tuple[PlannedLayer, ...]:
        """All layers with an index: the layers, and the further layers that are uploaded on demand (masters and tables)."""
        return (*self.layers, *self.masters, *self.tables)

    @property
    def never_evicted(self) -> frozenset[int]:
        """The indices of the layers that are never evicted, because their ring has a slot for each of its layers."""
        sharing = Counter(layer.ring for layer in self.layers)
        fits = {ring for ring, layers in sharing.items() if layers <= self.rings[ring].slots}
        # Without layers that are uploaded by rows: their slots do not have all rows, and are filled again.
        return frozenset(i for i, layer in enumerate(self.layers) if layer.ring in fits and not layer.rows)

    @property
    def trained(self) -> tuple[PlannedLayer, ...]:
        """The layers that can be trained: layers, tables and residents. Masters are left out: they are updated with a layer."""
        return (*self.layers, *self.tables, self.residents)

    @property
    def slot_bytes(self) -> int:
        """Device memory of all slots."""
        return sum(ring.slots * ring.nbytes for ring in self.rings)

    @property
    def resident_bytes(self) -> int:
        """Device memory of the resident parameters, of weights that stay on the device, and of buffers."""
        return self.residents.nbytes + self.staying[0]

    @property
    def gradient_bytes(self) -> int:
        """Device memory of gradients: of layers in flight, of residents, and of weights that stay on the device."""
        if not self.training:
            return 0
        if not self.alone:
            return self._reduced_bytes + self.staying[1]
        # Gradients of casts have the cast's dtype. A layer that a forward uses several times may send its gradients as often.
        often = Counter(self.order)
        sizes = [
            layer.gradient_bytes - layer.narrow_bytes
            for index, layer in enumerate(self.layers)
            for _ in range(max(often[index], 1))
        ]
        # While autograd computes gradients of experts, some gradients of the block around them may be on the device.
        in_flight = sum(sorted(sizes, reverse=True)[: self.k_prime + 1 + bool(self.experts)])
        trained = (layer for layer in self.layers if layer.gradient_bytes)
        # A cast's gradient is on the device twice for a short time: autograd's own is copied, or converted to float32 for a hook.
        twice = max((cast.nbytes for layer in trained for cast in layer.casts), default=0)
        return in_flight + twice + self.residents.gradient_bytes + self.staying[1]

    @property
    def _reduced_bytes(self) -> int:
        """Device memory of gradients on several devices, except of weights that stay there.

        It includes the buffers of :func:`~sp_lightning.experimental.ranks.rank_order.mean_in_order`.
        """
        residents = self.residents.gradient_bytes
        # Each layer is offloaded once. By then a table's gradient is dense, like a layer's.
        sizes = sorted((each.gradient_bytes for each in (*self.layers, *self.tables)), reverse=True)[: self.k_prime + 1]
        world = self.ranks * self.nodes
        parts = [aligned(-(-nbytes // world)) + ALIGNMENT for nbytes in (*sizes, residents)]
        # While a rank sums its own part of a layer, the sum needs memory, too; for half precision also in float32.
        adding = 3 * max(parts)
        half = any(span.dtype.itemsize == 2 for layer in (*self.layers, self.residents) for span in layer.spans)
        # Sent gradients, received gradients, the sums of the own part over each node, and their sum over all nodes.
        each = 2 * world + self.nodes * (1 + half) + 1
        return sum(sizes) + residents + sum(each * part for part in parts) + adding

    @property
    def step_slots(self) -> int:
        """The number of slots for steps on the GPU, each of the largest layer's size.

        The uploads of one layer should overlap with the step of another layer. Two layers of at most half the largest layer's
        size fit into one slot. So a second slot is needed only if larger layers have most of the bytes.
        """
        sizes = [layer.gradient_bytes for layer in self.trained]
        large = sum(size for size in sizes if 2 * size > max(sizes))
        return 2 if 2 * large > sum(sizes) else 1

    @property
    def update_bytes(self) -> int:
        """Device memory of steps: slots for weights, wide gradients and Adam's state; Adam's root; casts of three layers.

        Includes :attr:`staying_bytes`.
        """
        if not self.steps_on_device or not self.training:
            return self.staying_bytes
        largest = max(each.gradient_bytes for each in self.trained)
        narrow = max(each.narrow_bytes for each in self.trained)
        return (self.step_slots * 4 + 1) * largest + 3 * narrow + self.staying_bytes

    @property
    def staying_bytes(self) -> int:
        """Device memory of the optimizer steps of weights that stay there: Adam's state, and the root of its ``foreach`` step."""
        return 3 * self.staying[1] * self.training

    @property
    def stay_bytes(self) -> int:
        """Device memory of the layers :attr:`stay`: weights, and in training gradients, optimizer state and steps."""
        return sum(weights + 4 * gradients * self.training for _, weights, gradients in self.stay)

    @property
    def peak_device_bytes(self) -> int:
        """The peak device memory of weights, gradients and optimizer steps."""
        return self.slot_bytes + self.resident_bytes + self.gradient_bytes + self.update_bytes

    @property
    def allocated_bytes(self) -> int:
        """The part of :attr:`peak_device_bytes` that is allocated in addition to the module's memory if the device is the CPU."""
        return self.peak_device_bytes - self.staying[0]

    @property
    def stack_bytes(self) -> int:
        """Bytes of all stacked experts that are uploaded one by one."""
        return sum(layer.rows * layer.row_bytes for layer in self.layers if layer.rows)

    @property
    def host_bytes(self) -> int:
        """Host memory of weights and, in training, of gradients, without optimizer state."""
        blocks = sum(layer.nbytes for layer in self.trained) + sum(masters.nbytes for masters in self.masters)
        return blocks + sum(layer.gradient_bytes for layer in self.trained) * self.training

    @property
    def host_bytes_at_end(self) -> int:
        """The same when the run ends, with the layers :attr:`stay`, which return to the host."""
        return self.host_bytes + sum(weights + gradients * self.training for _, weights, gradients in self.stay)

    def __str__(self) -> str:
        layers = [(layer.name, in_gib(layer.nbytes)) for layer in self.layers]
        if len(layers) > _LONGEST:
            half = _LONGEST // 2
            layers[half:-half] = [(f"… {len(layers) - 2 * half} more", "")]
        totals = {
            "slots": self.slot_bytes, "stay on the GPU": sum(weights for _, weights, _ in self.stay),
            "resident": self.resident_bytes, "gradients in flight": self.gradient_bytes,
            "steps on the GPU": self.update_bytes, "peak on the GPU": self.peak_device_bytes, "host": self.host_bytes,
            "host, at the end": self.host_bytes_at_end if self.stay else 0,
        }  # fmt: skip
        lines = [*layers, *((name, in_gib(nbytes)) for name, nbytes in totals.items() if nbytes)]
        width = max(len(name) for name, _ in [*lines, ("", "")])
        rows = [f"  {name:<{width}} {size:>10}".rstrip() for name, size in lines]
        updates = [] if self.updates is None else [f"  updates: {self.updates}"]
        return "\n".join([self.heading, *rows, *updates, *(f"  note: {note}" for note in self.notes)])

    @property
    def heading(self) -> str:
        """The plan in a few words."""
        if self.nothing:
            return f"Superpipeline: {self.nothing}"
        plural = "" if len(self.layers) == 1 else "s"
        return f"Superpipeline: {len(self.layers)} layer{plural}, k = {self.k}, k' = {self.k_prime}"


def make_plan(
    found: Found, *, k: int, k_prime: int, ranks: int = 1, nodes: int = 1, training: bool = True,
    contents: Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """Returns the plan that gives every layer its place in memory and its ring.

    Args:
        found: the model's layers.
        k: the number of layers that are usable on the device at once, at least 1.
        k_prime: the number of further layers that may be uploaded meanwhile, at least 1.
        ranks, nodes: the number of devices of a node, and the number of nodes. All devices sum their gradients.
        training: True if batches are trained. Otherwise gradients take no memory, few stacked experts are uploaded, and k and k'
            count the other layers.
        contents: :func:`plan_contents` of ``found``, if it is known.
    """
    contents = contents or plan_contents(found)
    layers, masters, tables = contents["layers"], contents["masters"], contents["tables"]
    sizes = [layer.nbytes for layer in layers]
    together = {used for used in found.visits.values() if len(used) > 1}
    by_rows = [index for index, layer in enumerate(layers) if layer.rows and not training]
    rings, ring_of = choose_rings_apart(sizes, k + k_prime, together, by_rows)
    # Masters and tables have rings without slots. Such a ring only tells the size of a slot that is allocated on demand.
    without_slots = [Ring(0, max(each.nbytes for each in group)) for group in (masters, tables) if group]
    placed: dict[str, Any] = {
        "layers": tuple(replace(layer, ring=ring) for layer, ring in zip(layers, ring_of, strict=True)),
        "masters": tuple(replace(each, ring=len(rings)) for each in masters),
        "tables": tuple(replace(each, ring=len(rings) + bool(masters)) for each in tables),
    }
    plan = Plan(
        k=k, k_prime=k_prime, rings=(*rings, *without_slots), ranks=ranks, nodes=nodes, training=training,
        **{**contents, **placed},
    )  # fmt: skip
    if plan.host_bytes and not plan.stay and plan.peak_device_bytes >= plan.host_bytes + sum(plan.staying):
        saves_nothing = (
            "this takes no less GPU memory than all weights and gradients: lower k, or name smaller layers (layers=)."
        )
        return replace(plan, notes=(*plan.notes, saves_nothing))
    return plan


def plan_contents(found: Found) -> dict[str, Any]:
    """Returns the fields of a :class:`Plan` that do not depend on the window. Layers, masters and tables have no rings yet."""
    with_casts = [index for index, layer in enumerate(found.layers) if layer.lowered]
    masters_of = {layer: len(found.layers) + index for index, layer in enumerate(with_casts)}
    return {
        "layers": [
            _planned(layer, autocast=found.autocast, masters=masters_of.get(index))
            for index, layer in enumerate(found.layers)
        ],
        "masters": [_planned(layer) for layer in found.masters],
        "tables": [_planned(layer) for layer in found.tables],
        "residents": _planned(found.residents),
        "order": _order(found), "notes": found.notes, "experts": found.experts,
        "plain": found.plain_bytes, "staying": found.staying, "stay": found.stay_bytes,
        "nothing": found.nothing,
    }  # fmt: skip


def schedule(plan: Plan, *, training: bool) -> Iterator[int]:
    """Yields the layers in the expected order of their calls: forward, then backward. The first batch shows the real order.

    Experts are left out, because routing decides which experts are used.
    """
    order = [layer for layer in plan.order if layer not in plan.experts]
    yield from order
    if training:
        yield from reversed(order)


def _order(found: Found) -> tuple[int, ...]:
    """Returns the layers in the order in which a forward is expected to use them.

    Layers without a module are first: a single parameter is not in ``found.visits``.
    """
    used = [layer for visits in found.visits.values() for layer in visits]
    without_module = [layer for layer in range(len(found.layers)) if layer not in used]
    return (*without_module, *used)


def _planned(layer: Layer, *, autocast: torch.dtype | None = None, masters: int | None = None) -> PlannedLayer:
    """Lays out one layer's weights, and behind them its casts, if there are any. The layer has no ring yet.

    Args:
        layer: the layer.
        autocast: the dtype of its casts.
        masters: the index of its master weights; None if it has none.
    """
    spans = lay_out(layer.parameters)
    casts = lay_out(layer.lowered, begin=total_bytes(spans), dtype=autocast)
    trained = [named for named in (*layer.parameters, *layer.lowered) if named[1].requires_grad]
    gradients = total_bytes(lay_out(trained))
    lowered = zip(casts, (p for _, p in layer.lowered), strict=True)
    narrow = sum(cast.nbytes for cast, p in lowered if p.requires_grad and not gradient_hooks(p))
    nbytes = total_bytes(casts or spans)
    return PlannedLayer(layer.name, nbytes, gradients, -1, spans, casts, masters, narrow, layer.rows)
