"""Gradients of several ranks: each layer's gradients are summed once per backward, and the layer's owner downloads the sum.

Collectives match by their order alone, so all ranks sum the layers in one order. It is the order in which the layers' gradients
were complete on rank 0 in the last backward, with experts last. If a layer is complete before its turn, its gradients wait on
the device. If more than ``in_flight`` layers wait, the gradients of the oldest are moved to this rank's host memory until its
turn. At the end of backward every rank sums the remaining layers, with zeros for gradients that the rank does not have. So ranks
may take different paths through the model.
"""

from __future__ import annotations

import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.layout import lay_out, part, total_bytes
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.weights.gradient_roles import free
from sp_lightning.core.weights.gradients import Gradients, Received, Wanted, accumulate, each_row_once
from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.experimental.ranks.collectives import Collectives
from sp_lightning.experimental.ranks.gradient_copies import HasCopiedGradient
from sp_lightning.experimental.ranks.owners import RankOwners

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine

Place = tuple[StreamedLayer, int]
"""A layer and the index of one of its parameters."""


class SummedGradients(Gradients):
    """The :class:`~sp_lightning.core.weights.gradients.GradientSink` of several ranks.

    Args:
        engine: the engine.
        ranks: the ranks to sum over.
        owners: the owners of the layers.
    """

    def __init__(self, engine: Engine, ranks: Collectives, owners: RankOwners) -> None:
        in_flight = engine.plan.k_prime + 1
        super().__init__(engine.device, engine.staging, in_flight=in_flight)
        self._ranks = ranks
        self._owners = owners
        families = [layer for layer in engine.layers if layer.owner is layer]
        self._families = {
            layer: [(m, i) for m in layer.with_masters for i in range(len(m.block.parameters))] for layer in families
        }
        self._order = sorted(families, key=lambda layer: (layer.kind is Kind.RESIDENTS, -layer.index))
        self._turn = 0
        self._begun = False  # True after `expect`, until the backward ends
        # Gradients that are not summed yet: on the device, and on the host.
        self._waiting: defaultdict[StreamedLayer, dict[Place, Tensor]] = defaultdict(dict)
        self._stashed: defaultdict[StreamedLayer, dict[Place, Tensor]] = defaultdict(dict)
        # The layers whose gradients are complete in this backward, in the order of completion.
        self._completed: dict[StreamedLayer, None] = {}
        # Complete layers whose gradients wait on the device for the layers' turns. Layers in ``arriving`` are not complete yet.
        self._ready: dict[StreamedLayer, None] = {}
        self._came: set[Place] = set()  # the parameters that got a gradient on this rank
        # Downloaded sums of owned parameters without a gradient on this rank. Perhaps no rank has one.
        self._uncertain: dict[Place, Tensor] = {}
        # For each layer that may be updated in this backward, downloaded with its sum: not zero if a rank is against it.
        self._against: dict[StreamedLayer, Tensor] = {}

    def _trained(self, owner: StreamedLayer) -> list[Place]:
        """Returns the parameters of a layer and its masters that require a gradient."""
        return [(layer, index) for layer, index in self._families[owner] if layer.block.parameters[index].requires_grad]

    # ------------------------------------------------------------------ gradients arrive

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes a gradient from autograd. Returns True if it is certain that all gradients of its layer have arrived.

        Raises:
            RuntimeError: the gradient is sparse and cannot be summed over ranks, or its layer has been summed already.
        """
        name = layer.planned.spans[index].name
        self.expect()
        owner, place = layer.owner, (layer, index)
        if owner in self._received:
            raise RuntimeError(
                f"The gradient of {name!r} has two parts, and the first one is already summed over the ranks. With "
                "several devices each parameter may get one gradient in a backward: use checkpoints with "
                "use_reentrant=False, or Trainer(devices=1)."
            )
        waiting = self._waiting[owner]
        if place in waiting:
            self._stash(owner)
        if gradient.layout is not torch.strided:
            gradient = self._to_dense(layer, name, gradient)
        waiting[place] = gradient
        (self._ready if owner in self._completed else self.arriving)[owner] = None
        self._came.add(place)
        self.device.access(gradient, Stream.COMPUTE, write=True)
        self.transfers.device_bytes += gradient.nbytes
        # If forward has called a layer several times, each gradient may arrive in parts, and the number of parts is not known.
        once = all(member.visits <= 1 for member in owner.with_masters)
        return once and len(waiting) == len(self._trained(owner)) and owner.kind is not Kind.RESIDENTS

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
        if owner in self._received or not (self._waiting[owner] or self._stashed[owner]):
            return
        owner.rows.sparse_on_device = False
        self._completed[owner] = None
        if self._waiting[owner]:
            self.arriving.pop(owner, None)
            self._ready[owner] = None
        while self._turn < len(self._order) and self._order[self._turn] in self._completed:
            self._next()
        for each in list(self._ready)[: -self.transfers.in_flight]:
            self._stash(each)
        self._make_way()

    def _make_way(self) -> None:
        """Waits for transfers until transfers and waiting layers together use at most the memory that the plan counts."""
        self.transfers.retire(max(0, self.transfers.in_flight - 1 - len(self._ready)))

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Moves incomplete gradients of other layers to the host, because the backward of ``layers`` begins."""
        owners = [layer.owner for layer in layers]
        for owner in list(self.arriving):
            if owner not in owners and owner.kind is not Kind.RESIDENTS:
                self._stash(owner)

    def _stash(self, owner: StreamedLayer) -> None:
        """Moves a layer's gradients from the device to this rank's host memory until their turn. The host waits for the copies.

        Gradients that were moved before are added.
        """
        stashed = self._stashed[owner]
        for place, gradient in self._waiting[owner].items():
            there = self.device.receive(gradient)
            with no_inference_mode(), torch.no_grad():
                if place in stashed:  # parts are added in the parameter's own dtype, even if each part is narrow
                    there = stashed[place].to(_dtype_of(place)).add_(there)
            stashed[place] = there
            self.transfers.device_bytes -= gradient.nbytes
            self.device.stats.host_waits += 1
        self._waiting[owner].clear()
        self.arriving.pop(owner, None)
        self._ready.pop(owner, None)

    # ------------------------------------------------------------------ a layer is summed

    def expect(self, wanted: Wanted | None = None) -> None:
        """Called when the backward of a loss begins, on all ranks. A rank that gets no gradients takes part in the sums as well.

        Checks that ranks train the same parameters (collective): transfers are matched by their order and size only, so
        gradients of different parameters could be added up. Only the first call in a backward has an effect.

        Raises:
            ValueError: ``requires_grad`` of a parameter differs between ranks.
        """
        if self._begun:
            return
        trained = [place for owner in self._families for place in self._trained(owner)]
        copies = self._owners.copies
        written = copies.written()
        copies.forget()
        self._ranks.compare(
            "backward",
            {("trained parameters", layer.planned.spans[index].name): "trained" for layer, index in trained} | written,
            "Set requires_grad of the same parameters on all ranks, and write the same values to gradients. If requires_grad is "
            "chosen at random, use the same seed.",
        )
        copies.close()
        self._begun = True
        self._wanted = wanted
        if wanted is not None:
            self._owners.count()

    def _next(self, *, ends: bool = False) -> None:
        """Sums the gradients of the next layer over all ranks. Its owner downloads the sum.

        If a step updates layers in backward, the sum has one more element: the ranks that are against an update of this layer
        before all of them have ended backward. ``ends``: True if this rank has ended it.
        """
        owner = self._order[self._turn]
        self._turn += 1
        places = self._trained(owner)
        if not places:
            return
        self._ready.pop(owner, None)
        self._make_way()
        self._received[owner] = received = Received(len(places) * self._owners.owns(owner))
        waiting, stashed = self._waiting.pop(owner, {}), self._stashed.pop(owner, {})
        against = None if self._wanted is None else float(ends or not self._wanted(owner))
        with torch.DisableTorchFunctionSubclass():  # uses of the layer may be errors from now on
            sums, used, vote = self._sum(owner, places, waiting, stashed, against)
        self.arriving.pop(owner, None)
        self.device.wait(Stream.DOWNLOAD, self.device.record(Stream.REDUCE), Wait.DRAIN_AFTER_REDUCE)
        copies, staging, targets, sources = deque[Any](), None, list[Tensor](), list[Tensor]()
        if received.expected:
            copies, staging, targets, sources = self._place(
                {place: sums[place] for place in places if place in self._came}
            )
            for place in [place for place in places if place not in self._came]:
                with no_inference_mode():
                    self._uncertain[place] = torch.empty_like(sums[place], device="cpu")
                targets.append(self._uncertain[place])
                sources.append(sums[place])
            if vote is not None:
                targets.append(torch.empty_like(vote, device="cpu"))
                sources.append(vote)
                self._against[owner] = targets[-1]
        self.transfers.device_bytes += sum(each.nbytes for each in used)
        self.transfers.send(owner.index, targets, sources, [*waiting.values(), *used], (owner, copies, staging))

    def _sum(
        self,
        owner: StreamedLayer,
        places: Sequence[Place],
        waiting: dict[Place, Tensor],
        stashed: dict[Place, Tensor],
        against: float | None,
    ) -> tuple[dict[Place, Tensor], list[Tensor], Tensor | None]:
        """Sums gradients over the ranks on the stream ``REDUCE``. Collective. The host does not wait for an accelerator.

        Args:
            owner: the layer.
            places: its trained parameters.
            waiting, stashed: this rank's gradients on the device and on the host. A parameter without either counts as zero.
            against: another number to sum; None for none.

        Returns:
            The means on the device, the memory that was used, and the mean of ``against``.
        """
        sums, used, flats = dict[Place, Tensor](), list[Tensor](), list[Tensor]()
        for dtype in dict.fromkeys(map(_dtype_of, places)):
            alike = [place for place in places if _dtype_of(place) is dtype]
            spans = lay_out([("", layer.block.parameters[index].detach()) for layer, index in alike])
            own = -(-total_bytes(spans) // dtype.itemsize)
            count = -(-(own + (against is not None)) // self._ranks.world) * self._ranks.world
            memory = self.device.empty(count * dtype.itemsize)
            used.append(memory)
            flats.append(memory.view(dtype))
            sums |= {place: part(memory, span) for place, span in zip(alike, spans, strict=True)}
        # After all memory is allocated: kernels of compute may still use it.
        self.device.wait(Stream.REDUCE, self.device.record(Stream.COMPUTE), Wait.REDUCE_AFTER_GRADIENT)
        nbytes = sum(each.nbytes for each in flats)
        timed = self.device.timed("reduce", owner.index, Stream.REDUCE, nbytes)
        with self.device.on(Stream.REDUCE), no_inference_mode(), torch.no_grad(), timed:
            for flat in flats:
                flat.zero_()
            vote = None if against is None else flats[-1][own : own + 1].fill_(against)
            for place, target in sums.items():
                found = [each[place] for each in (stashed, waiting) if place in each]
                for each in found[:1]:
                    target.copy_(each)
                for each in found[1:]:
                    target.add_(each)
            self.device.access(waiting.values(), Stream.REDUCE, write=False)
            for flat in flats:
                used += self._ranks.mean(flat, self._owners.rank_of(owner), f"the gradients of {owner.name!r}")
            self.device.access(flats, Stream.REDUCE, write=True)
        return sums, used, vote

    def _rows_of(self, layer: StreamedLayer, index: int) -> None:
        """All rows of a sum are downloaded: other ranks may have used other rows."""

    def _apply_drain(self, drain: Any) -> None:
        owner = drain[0]
        if not self.device.computes_on_host:
            self._ranks.check(Wait.APPLY_AFTER_DRAIN)  # an aborted sum has no value
        if (against := self._against.pop(owner, None)) is not None:
            self.device.access(against, None, write=True)
            if against.item():
                self._received[owner].expected = -1  # so the layer does not count as complete, and is not updated yet
        super()._apply_drain(drain)

    def settle(self, arrivals: AbstractContextManager[Any]) -> None:
        """Raises a RuntimeError: gradients are summed over the ranks until the backward ends, and are not in ``param.grad``."""
        raise RuntimeError(
            "A hook of backward used p.grad, or stepped an optimizer. With several devices, gradients are summed over them until "
            "the backward ends. Do it after backward(), or use Trainer(devices=1)."
        )

    # ------------------------------------------------------------------ backward ends

    def apply(self, *, everything: bool = False) -> None:
        if everything:  # `end` has applied all gradients, or an inner graph task has ended
            with self._applying:
                self._finish(0)
        else:
            super().apply()

    def end(self, *, last: bool) -> None:
        """Sums the remaining layers, and finds the parameters with a gradient on any rank. Collective.

        Does nothing if a graph task inside another one ends (``last`` is False), or if :meth:`expect` was not called.
        """
        if not (self._begun and last):
            return
        try:
            while self._turn < len(self._order):
                self._next(ends=True)
            self.transfers.retire(0)
            with self._applying:
                self._finish(0)
            self._agree()
            self._begun = False
        finally:
            self.drop()

    def _agree(self) -> None:
        """Applies sums of parameters that have a gradient only on other ranks, and adopts rank 0's order. Collective.

        If no rank has a gradient for a parameter, its ``param.grad`` stays as it is.
        """
        places = [place for owner in self._families for place in self._trained(owner)]
        indices = {owner: index for index, owner in enumerate(self._families)}
        order = [0] * len(indices)
        if self._ranks.first:
            # In the order of completion. Experts are last, because each rank routes tokens to different experts.
            complete = dict.fromkeys([*self._completed, *self._order])
            order = [indices[owner] for owner in sorted(complete, key=lambda owner: owner.expert)]
        words = torch.tensor([*(place in self._came for place in places), *order], dtype=torch.int32, device="cpu")
        self._ranks.largest(words, "the end of backward")
        for place in [place for place, there in zip(places, words.tolist(), strict=False) if there]:
            layer, index = place
            parameter = layer.block.parameters[index]
            if not self._owners.owns(layer):
                free(parameter, HasCopiedGradient)
            elif place in self._uncertain:
                self.device.access(self._uncertain[place], None, write=True)
                accumulate(parameter, self._uncertain[place], None, own=True)
        self._owners.copies.open()
        owners = list(indices)
        self._order = [owners[index] for index in words[len(places) :].tolist()]

    def drop(self) -> None:
        """Drops gradients that have not reached ``param.grad``, and clears the records of one backward.

        If this follows an error that has kept this rank from its sums, reports the error, even one that user code may catch: the
        other ranks wait for these sums.
        """
        if self._begun and (error := sys.exception()) is not None:
            self._owners.ranks.fail(error)
        super().drop()
        self._turn = 0
        self._begun = False
        for each in (self._waiting, self._stashed, self._completed, self._ready, self._uncertain, self._against):
            each.clear()
        self._came.clear()


def _dtype_of(place: Place) -> torch.dtype:
    return place[0].block.parameters[place[1]].dtype
