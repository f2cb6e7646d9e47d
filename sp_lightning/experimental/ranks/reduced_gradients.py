"""Gradients of several ranks: each layer's gradients are summed once per backward. Each rank offloads its part of the sum.

Collectives match by their order alone, so all ranks sum the layers in one agreed order. It is the order in which the layers'
gradients were complete on rank 0 in the last backward, with experts last. If a layer is complete before its turn, its gradients
wait on the device. If more than ``in_flight`` layers wait, the gradients of the oldest are moved to this rank's host memory until
its turn. At the end of backward every rank sums the remaining layers, with zeros for gradients that the rank does not have. So
ranks may take different paths through the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.layers.gradients import GradientSink, Transfers, Wanted, each_row_once
from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.store.block_memory import Staging
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.experimental.ranks.gradient_places import (
    Family,
    GradientPlaces,
    Place,
    compare_trained,
    gradient_of,
    present,
)
from sp_lightning.experimental.ranks.rank_sum import is_narrow, sum_over_ranks
from sp_lightning.experimental.ranks.ranks import Ranks

_NARROW, _EARLY = 1, 2
"""Bits on which the ranks agree before they sum a layer's gradients.

``_NARROW``: the gradients can be sent in the dtype of the casts. ``_EARLY``: they are complete, and an optimizer step waits for
them.
"""


class ReducedGradients(GradientSink):
    """The :class:`~sp_lightning.core.layers.gradients.GradientSink` of several ranks.

    Args:
        device: copies the gradients.
        ranks: the ranks to sum over.
        layers: all layers.
        staging: page-locks the memory for gradients.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).

    Attributes:
        places: the shared memory of the gradients.
    """

    def __init__(
        self, device: Device, ranks: Ranks, layers: Sequence[StreamedLayer], staging: Staging, *, in_flight: int
    ) -> None:
        super().__init__(device, Transfers(device, in_flight, lambda _: None))
        self._ranks = ranks
        self._staging = staging
        self.places = GradientPlaces(ranks, layers)
        self._families = self.places.families
        self._order = sorted(self._families, key=lambda owner: (owner.kind is Kind.RESIDENTS, -owner.index))
        self._turn = 0
        # The layers whose gradients are complete in this backward, in the order of completion.
        self._completed: dict[StreamedLayer, None] = {}
        # Complete layers whose gradients wait on the device for the layers' turns. Layers in ``arriving`` are not complete yet.
        self._ready: dict[Family, None] = {}
        self._begun = False  # True after `expect`, until the backward ends
        self._wanted: Wanted | None = None  # of this backward

    # ------------------------------------------------------------------ gradients arrive

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes a gradient from autograd. Returns True if it is certain that all gradients of its layer have arrived.

        Raises:
            RuntimeError: the gradient is sparse and cannot be summed over ranks, or its layer has been summed already.
        """
        name = layer.planned.spans[index].name
        self.expect()
        family = self._families[layer.owner]
        place = (layer, index)
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
        self.transfers.device_bytes += gradient.nbytes
        # If forward has called a layer several times, each gradient may arrive in parts, and the number of parts is not known.
        once = all(member.visits <= 1 for member in layer.owner.with_masters)
        return once and len(family.waiting) == len(family.trainable()) and layer.owner.kind is not Kind.RESIDENTS

    def _to_dense(self, layer: StreamedLayer, name: str, gradient: Tensor) -> Tensor:
        """Converts the sparse gradient of an embedding table to a dense one on the device.

        The host sums the rows in the order in which autograd adds dense gradients, and waits for the device. Gradients that are
        sparse for another reason raise a RuntimeError.
        """
        if not layer.rows.sparse_on_device:
            raise RuntimeError(
                f"The gradient of {name!r} is sparse, and those of several devices are not summed. Use sparse=False, or "
                "Trainer(devices=1)."
            )
        self.device.stats.host_waits += 1
        return each_row_once(gradient.to("cpu")).to_dense().to(self.device.device)

    def drain(self, layer: StreamedLayer) -> None:
        """Records that a layer's gradients are complete, and sums the layers whose turn has come.

        If more than ``in_flight`` complete layers wait for their turns, the oldest are moved to the host.
        """
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
        for each in list(self._ready)[: -self.transfers.in_flight]:
            self._stash(each)
        self._make_way()

    def _make_way(self) -> None:
        """Waits for transfers until transfers and waiting layers together use at most the memory that the plan counts."""
        self.transfers.retire(max(0, self.transfers.in_flight - 1 - len(self._ready)))
        self.transfers.finish()

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Moves incomplete gradients of other layers to the host, because the backward of ``layers`` begins."""
        owners = [layer.owner for layer in layers]
        for family in list(self.arriving):
            if family.owner not in owners and family.owner.kind is not Kind.RESIDENTS:
                self._stash(family)

    def _stash(self, family: Family) -> None:
        """Moves a layer's gradients from the device to this rank's host memory until their turn. The host waits for the copies.

        Gradients that were moved before are added.
        """
        for place, gradient in family.waiting.items():
            there = self.device.receive(gradient)
            with no_inference_mode(), torch.no_grad():
                if place in family.stashed:  # parts are added in the parameter's own dtype, even if each part is narrow
                    there = family.stashed[place].to(family.places[place].dtype).add_(there)
                family.stashed[place] = there
            self.transfers.device_bytes -= gradient.nbytes
            self.device.stats.host_waits += 1
        self._gone(family)

    def _gone(self, family: Family) -> None:
        """Records that a layer's gradients are no longer on the device."""
        family.waiting.clear()
        self.arriving.pop(family, None)
        self._ready.pop(family, None)

    # ------------------------------------------------------------------ a layer is summed

    def expect(self, wanted: Wanted | None = None) -> None:
        """Called when the backward of a loss begins, on all ranks. A rank that gets no gradients takes part in the sums as well.

        Checks that ranks train the same parameters (collective), and makes and page-locks memory for the gradients. Only the
        first call in a backward has an effect.
        """
        if self._begun:
            return
        self._wanted = wanted
        compare_trained(self._ranks, self._families.values())
        if wanted is not None and not self.places.slots:
            # One slot for each of k' + 1 transfers, one for a layer whose gradients have arrived, and one for a running update.
            self.places.make_slots(self.transfers.in_flight + 2, self._staging)
        self.places.lock(self._staging)
        self._begun = True

    def _next(self) -> None:
        """Sums the gradients of the next layer in the agreed order over all ranks, and offloads this rank's part of the sum.

        If an optimizer step waits for the layer, its update is submitted.
        """
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
        """Returns the bits ``_NARROW`` and ``_EARLY`` that are set on all ranks. Collective, if a bit may be set on any rank."""
        casts = family.owner.masters is not None  # if so, the layer's gradients usually have 16 bits
        if not casts and self._wanted is None:
            return 0
        mine = _NARROW * (casts and is_narrow(family)) | _EARLY * self._may_be_early(family)
        return self._ranks.all_have(mine, "what holds of a layer's gradients")

    def _may_be_early(self, family: Family) -> bool:
        """Returns True if a step waits for the layer, and all its gradients have arrived and are not added to earlier ones."""
        if self._wanted is None or family.owner.kind is Kind.RESIDENTS:
            return False
        places = family.trainable()
        there = all(place in family.came and gradient_of(place) is None for place in places)
        return there and self._wanted(family.owner)

    def _hand_over(self, family: Family) -> None:
        """Passes a layer to the optimizer step, which waits until the parts of all ranks have arrived.

        On the primary, ``param.grad`` becomes the shared memory with the sum.
        """
        family.downloaded = self.device.record(Stream.DOWNLOAD)
        if self._ranks.primary:
            with no_inference_mode():
                for layer, index in family.trainable():
                    layer.block.parameters[index].grad = self.places.whole(family, (layer, index))
        family.owner.parameters.engine.gradients_complete(family.owner)

    def arrival(self, owner: StreamedLayer) -> Callable[[], None] | None:
        """Returns a function that waits until this rank's part of the sum of a layer's gradients has arrived.

        Returns None for a layer that is not updated in backward: the gradients have arrived before its update.
        """
        family = self._families.get(owner)
        if family is None or family.slot is None:
            return None
        return partial(self.device.synchronize, family.downloaded, Wait.APPLY_AFTER_DRAIN)

    def _drain(self, family: Family, parts: list[tuple[Place, int, Tensor]], used: list[Tensor]) -> None:
        """Issues the copy of this rank's part of a sum to shared memory.

        If this rank has no gradient for a ``param.grad``, saves its bytes: perhaps no other rank has a gradient for it either.

        Args:
            family: the layer's gradients.
            parts, used: as in :data:`~sp_lightning.experimental.ranks.rank_sum.RankSum`.
        """
        self.transfers.device_bytes += sum(each.nbytes for each in used)
        targets, sources = [], []
        for place, begin, source in parts:
            targets.append(self.places.common(family, place, begin, source.nbytes))
            sources.append(source)
            if place not in family.came and gradient_of(place) is not None:
                family.overwritten.append((place, targets[-1], present(family, place, begin, source.nbytes)))
        self.device.wait(Stream.DOWNLOAD, self.device.record(Stream.REDUCE), Wait.DRAIN_AFTER_REDUCE)
        self.transfers.send(family.owner.index, targets, sources, [*family.waiting.values(), *used], None)

    def settle(self, arrivals: AbstractContextManager[Any]) -> None:
        """Raises a RuntimeError: gradients are summed over the ranks until the backward ends, and are not in ``param.grad``."""
        raise RuntimeError(
            "A hook of backward used p.grad, or stepped an optimizer. With several devices, gradients are summed over them until "
            "the backward ends. Do it after backward(), or use Trainer(devices=1)."
        )

    # ------------------------------------------------------------------ backward ends

    def end(self, *, last: bool) -> None:
        """Sums the remaining layers, waits until the parts of all ranks have arrived, and sets ``param.grad``.

        Does nothing if a graph task inside another one ends (``last`` is False), or if :meth:`expect` was not called.
        """
        if not (self._begun and last):
            return
        try:
            self._sum_the_others()
        finally:
            self.drop()

    def _sum_the_others(self) -> None:
        while self._turn < len(self._order):
            self._next()
        self.transfers.retire(0)
        self.transfers.finish(0)
        late = [family for family in self._families.values() if family.slot is None]
        places = [(family, place) for family in late for place in family.places]
        bits = self._agree_at_end(places)
        self.places.forget_writes()
        for (family, place), (gradient, _) in zip(places, bits, strict=True):
            if gradient:
                self.device.access(family.of(place), None, write=True)
                self.places.show(family, place)

    def _agree_at_end(self, places: list[tuple[Family, Place]]) -> list[list[int]]:
        """At the end of backward, finds the parameters with a gradient on any rank, and adopts rank 0's order. Collective.

        If no rank has a gradient for a parameter, the former bytes of its ``param.grad`` are restored, because the ranks have
        written a sum to its place.

        Args:
            places: the parameters of all layers that were not updated in this backward.

        Returns:
            For each parameter two numbers, 0 or 1: whether a rank has a gradient for it, and whether a rank had a ``param.grad``
            before.
        """
        count = len(places)
        indices = {owner: index for index, owner in enumerate(self._families)}
        came = [place in family.came for family, place in places]
        before = [gradient_of(place) is not None for _, place in places]
        order = [0] * len(indices)
        if self._ranks.first:
            # In the order of completion. Experts are last, because each rank routes tokens to different experts.
            complete = dict.fromkeys([*self._completed, *self._order])
            order = [indices[owner] for owner in sorted(complete, key=lambda owner: owner.expert)]
        words = torch.tensor([*came, *before, *order], dtype=torch.int32)
        self._ranks.largest(words, Wait.SHOW_AFTER_LANDING)
        bits = words[: 2 * count].view(2, count).t().tolist()
        if any(before and not gradient for gradient, before in bits):
            unused = {place for (_, place), (gradient, _) in zip(places, bits, strict=True) if not gradient}
            for family in self._families.values():
                for place, target, value in family.overwritten:
                    if place in unused:
                        target.copy_(value)
            self._ranks.barrier("gradients that no rank has", why=Wait.SHOW_AFTER_LANDING)
        owners = list(indices)
        self._order = [owners[index] for index in words[2 * count :].tolist()]
        return bits

    def drop(self) -> None:
        """Drops gradients that have not reached ``param.grad``, and clears the records of one backward."""
        self.transfers.drop()
        self._turn = 0
        self._begun = False
        self._completed.clear()
        self.arriving.clear()
        self._ready.clear()
        self.places.end_backward()
