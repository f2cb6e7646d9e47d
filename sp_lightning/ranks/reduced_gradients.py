"""Gradients of several ranks: each layer's are summed over the ranks once in a backward, and each rank drains its part.

Ranks match what they send by its order alone, so all of them send the layers in one agreed order: that in which those of rank 0
were complete in the last backward. A layer that is complete before its turn waits on the device; if more than
``in_flight`` wait, the oldest goes to this rank's host memory until then. At the end of backward every rank sends what is left,
with zeros for what it lacks, so ranks that took different paths stay together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.layers.gradient_sink import GradientSink, Wanted
from sp_lightning.layers.gradients import each_row_once
from sp_lightning.layers.layer import Kind, StreamedLayer
from sp_lightning.ranks.gradient_places import Family, GradientPlaces, Place, compare_trained, gradient_of, present
from sp_lightning.ranks.rank_sum import is_narrow, sum_over_ranks
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.store.block_memory import Staging
from sp_lightning.torch_compat.modes import no_inference_mode

_NARROW, _EARLY = 1, 2
"""What holds of a layer's gradients on all ranks: they may be sent in the dtype of casts; they are complete, and a step waits."""


class ReducedGradients(GradientSink[None]):
    """The :class:`~sp_lightning.layers.gradient_sink.GradientSink` of several ranks.

    Args:
        device: copies the gradients.
        ranks: those that gradients are summed over.
        layers: all layers.
        staging: page-locks the memory that gradients come to.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).

    Attributes:
        places: where gradients are that all ranks see.
    """

    def __init__(
        self, device: Device, ranks: Ranks, layers: Sequence[StreamedLayer], staging: Staging, *, in_flight: int
    ) -> None:
        super().__init__(device, in_flight, lambda _: None)
        self._ranks = ranks
        self._staging = staging
        self.places = GradientPlaces(ranks, layers)
        self._families = self.places.families
        self._order = sorted(self._families, key=lambda owner: (owner.kind is Kind.RESIDENTS, -owner.index))
        self._turn = 0
        # In this backward, in the order in which they were complete here.
        self._completed: dict[StreamedLayer, None] = {}
        # Those with gradients on the device that wait for their turn. Of those in ``arriving`` others are still to come.
        self._ready: dict[Family, None] = {}
        self._begun = False  # whether gradients have come in this backward
        self._wanted: Wanted | None = None  # in this backward

    # ------------------------------------------------------------------ gradients arrive

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes a gradient that autograd has finished. Returns whether all of its layer's have arrived.

        Raises:
            RuntimeError: it cannot be summed over ranks, or its layer's gradients have left already.
        """
        name = layer.planned.spans[index].name
        self.expect()
        family, place = self._families[layer.owner], (layer, index)
        if family.reduced:
            raise RuntimeError(
                f"The gradient of {name!r} has come in two parts, and the first has been summed over the ranks already. With "
                "several devices each parameter may get one gradient in a backward: use checkpoints with "
                "use_reentrant=False, or Trainer(devices=1)."
            )
        if place in family.waiting:
            self._stash(family)
        if gradient.layout is not torch.strided:
            gradient = self._to_dense(layer, name, gradient)
        family.waiting[place] = gradient
        (self._ready if layer.owner in self._completed else self.arriving)[family] = None
        family.came.add(place)
        self.device.access(gradient, Stream.COMPUTE, write=True)
        self.device_bytes += gradient.nbytes
        # A layer that forward has used several times may get its gradients in parts, so none of them is known to be the last.
        once = all(member.visits <= 1 for member in layer.owner.family)
        return once and len(family.waiting) == len(family.trainable()) and layer.owner.kind is not Kind.RESIDENTS

    def _to_dense(self, layer: StreamedLayer, name: str, gradient: Tensor) -> Tensor:
        """Rows of a table, summed on the host in the order of their uses, as one dense gradient on the device."""
        if not layer.rows.sparse_on_device:
            raise RuntimeError(
                f"The gradient of {name!r} is sparse, and those of several devices are not summed. Use sparse=False, or "
                "Trainer(devices=1)."
            )
        self.host_waits += 1
        return each_row_once(gradient.to("cpu")).to_dense().to(self.device.device)

    def drain(self, layer: StreamedLayer) -> None:
        """Notes that a layer's gradients are complete: they leave when it is their turn."""
        owner = layer.owner
        family = self._families.get(owner)
        if family is None or family.reduced or not (family.waiting or family.stashed):
            return
        owner.rows.sparse_on_device = False
        self._completed[owner] = None
        if family.waiting:
            self.arriving.pop(family, None)
            self._ready[family] = None
        while self._turn < len(self._order) and self._order[self._turn] in self._completed:
            self._next()
        for each in list(self._ready)[: -self.in_flight]:
            self._stash(each)
        self._make_way()

    def _make_way(self) -> None:
        """Lets as many transfers end as layers wait for their turn: together they keep to what the plan counts."""
        self.retire(max(0, self.in_flight - 1 - len(self._ready)))
        self.finish()

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Moves what is left of other layers' gradients to the host, because the backward of ``layers`` begins."""
        owners = [layer.owner for layer in layers]
        for family in list(self.arriving):
            if family.owner not in owners and family.owner.kind is not Kind.RESIDENTS:
                self._stash(family)

    def _stash(self, family: Family) -> None:
        """Moves gradients to this rank's host memory, because there is no turn for them yet. The host waits for it."""
        for place, gradient in family.waiting.items():
            there = self.device.receive(gradient)
            with no_inference_mode(), torch.no_grad():
                if place in family.stashed:  # a sum is one in the parameter's own dtype
                    there = family.stashed[place].to(family.places[place].dtype).add_(there)
                family.stashed[place] = there
            self.device_bytes -= gradient.nbytes
            self.host_waits += 1
        self._gone(family)

    def _gone(self, family: Family) -> None:
        """Its gradients are not on the device any more."""
        family.waiting.clear()
        self.arriving.pop(family, None)
        self._ready.pop(family, None)

    # ------------------------------------------------------------------ a layer is summed

    def expect(self, wanted: Wanted | None = None) -> None:
        """The backward of a loss begins: all ranks will sum their gradients, whether this one has any or not."""
        if self._begun:
            return
        self._wanted = wanted
        compare_trained(self._ranks, self._families.values())
        if wanted is not None and not self.places.slots:
            # For those of k' + 1 transfers, of one that has landed, and of one whose update is under way.
            self.places.make_slots(self.in_flight + 2, self._staging)
        self.places.lock(self._staging)
        self._begun = True

    def _next(self) -> None:
        """Sends the layer whose turn it is, and receives this rank's part of all ranks' gradients of it."""
        family = self._families[self._order[self._turn]]
        self._turn += 1
        if not family.trainable():
            return
        family.reduced = True
        self._ready.pop(family, None)
        self._make_way()
        self.places.keep_others(family)
        self.places.keep_held(family)
        agreed = self._agree_on(family)
        if agreed & _EARLY:
            self.places.take_slot(family)
        self._drain(family, *sum_over_ranks(self.device, self._ranks, family, narrow=bool(agreed & _NARROW)))
        self._gone(family)
        family.stashed.clear()
        if family.slot is not None:
            self._hand_over(family)

    def _agree_on(self, family: Family) -> int:
        """Asks what holds of a layer's gradients on all ranks, where anything of it might."""
        casts = family.owner.masters is not None  # such a layer's gradients mostly come in 16 bits
        if not casts and self._wanted is None:
            return 0
        mine = _NARROW * (casts and is_narrow(family)) | _EARLY * self._may_be_early(family)
        return self._ranks.all_have(mine, "what holds of a layer's gradients")

    def _may_be_early(self, family: Family) -> bool:
        """Whether a step waits for a layer all of whose gradients are here, and none of which is added to another one."""
        if self._wanted is None or family.owner.kind is Kind.RESIDENTS:
            return False
        places = family.trainable()
        there = all(place in family.came and gradient_of(place) is None for place in places)
        return there and self._wanted(family.owner)

    def _hand_over(self, family: Family) -> None:
        """Gives a layer to the optimizer's step, which waits until all ranks' parts of its gradients have landed."""
        family.landed = self.device.record(Stream.DOWNLOAD)
        if self._ranks.primary:
            with no_inference_mode():
                for layer, index in family.trainable():
                    layer.block.parameters[index].grad = self.places.whole(family, (layer, index))
        family.owner.parameters.doors.gradients_complete(family.owner)

    def landing(self, owner: StreamedLayer) -> Callable[[], None] | None:
        """Waits until this rank's part of the gradients has landed, of a layer that is updated in backward.

        None for any other layer, whose gradients are all there.
        """
        family = self._families.get(owner)
        if family is None or family.slot is None:
            return None
        return partial(self.device.synchronize, family.landed, Wait.APPLY_AFTER_DRAIN)

    def _drain(self, family: Family, parts: list[tuple[Place, int, Tensor]], used: list[Tensor]) -> None:
        """Copies this rank's part of a sum to where all ranks see it. ``used``: the memory that it was made in."""
        self.device_bytes += sum(each.nbytes for each in used)
        device, targets, sources = self.device, [], []
        for place, begin, source in parts:
            targets.append(self.places.common(family, place, begin, source.nbytes))
            sources.append(source)
            if place not in family.came and gradient_of(place) is not None:
                family.overwritten.append((place, targets[-1], present(family, place, begin, source.nbytes)))
        device.wait(Stream.DOWNLOAD, device.record(Stream.REDUCE), Wait.DRAIN_AFTER_REDUCE)
        self.send(family.owner.index, targets, sources, [*family.waiting.values(), *used], None)

    # ------------------------------------------------------------------ backward ends

    def end(self, *, last: bool) -> None:
        """Sends what is left, and lets ``param.grad`` show the sums once all ranks' parts are there."""
        if not (self._begun and last):
            return
        try:
            self._sum_the_others()
        finally:
            self.drop()

    def _sum_the_others(self) -> None:
        while self._turn < len(self._order):
            self._next()
        self.retire(0)
        self.finish(0)
        late = [family for family in self._families.values() if family.slot is None]
        places = [(family, place) for family in late for place in family.places]
        bits = self._agree_at_end(places)
        self.places.forget_writes()
        for (family, place), (gradient, _) in zip(places, bits, strict=True):
            if gradient:
                self.device.access(family.of(place), None, write=True)
                self.places.show(family, place)

    def _agree_at_end(self, places: list[tuple[Family, Place]]) -> list[list[int]]:
        """At the end of backward, tells all ranks which parameters have a gradient on any, and takes over rank 0's order.

        A ``param.grad`` that no rank has added to gets its bytes back: the sum has added zeros to it.

        Returns:
            For each place whether any rank has a gradient, and whether any had a ``param.grad`` before.
        """
        count, indices = len(places), {owner: index for index, owner in enumerate(self._families)}
        came = [place in family.came for family, place in places]
        before = [gradient_of(place) is not None for _, place in places]
        order = [0] * len(indices)
        if self._ranks.first:
            # As layers were complete in this backward. Which experts get tokens differs from rank to rank.
            complete = dict.fromkeys([*self._completed, *self._order])
            order = [indices[owner] for owner in sorted(complete, key=lambda owner: owner.expert)]
        words = torch.tensor([*came, *before, *order], dtype=torch.int32)
        self._ranks.largest(words)
        bits = words[: 2 * count].view(2, count).t().tolist()
        if any(before and not gradient for gradient, before in bits):
            unused = {place for (_, place), (gradient, _) in zip(places, bits, strict=True) if not gradient}
            for family in self._families.values():
                for place, target, value in family.overwritten:
                    if place in unused:
                        target.copy_(value)
            self._ranks.barrier(Wait.SHOW_AFTER_LANDING)
        owners = list(indices)
        self._order = [owners[index] for index in words[2 * count :].tolist()]
        return bits

    def drop(self) -> None:
        """Drops the gradients that did not reach ``param.grad``, after a backward that failed."""
        self.drop_drains()
        self._turn, self._begun = 0, False
        self._completed.clear()
        self.arriving.clear()
        self._ready.clear()
        self.places.end_backward()
