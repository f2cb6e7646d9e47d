"""Where the gradients of several ranks lie: in memory that all of them have, each parameter's at a place of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device.layout import Span, lay_out, part, total_bytes, whole_pages
from sp_lightning.device.lease import lend
from sp_lightning.layers.layer import Kind, StreamedLayer
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.ranks.shared_memory import OwnView, commit_or_drop
from sp_lightning.store.block_memory import Staging
from sp_lightning.torch_compat.modes import no_inference_mode

Place = tuple[StreamedLayer, int]
"""A layer and the index of one of its parameters."""


@dataclass(eq=False)
class Family:
    """The gradients of one layer and of its masters.

    Attributes:
        owner: the layer.
        begin: where their place in the shared memory begins.
        places: the parameters, with where each gradient lies there.
        view: this rank's view of it, and ``offset`` where it begins in the view.
        waiting: gradients on the device that have not left yet.
        stashed: gradients on this rank's host that have not left yet.
        came: the parameters that have had a gradient in this backward.
        reduced: whether it has left in this backward.
        slot: if it is updated in this backward, the memory that all ranks have for its gradients until then.
        landed: then, the event after this rank's part has got there.
        lent: the storage that was lent for each ``param.grad``.
        overwritten: for parameters without a gradient on this rank, their present ``param.grad`` in this rank's part.
        pages: bytes of the shared memory, in whole pages.
        locked: whether the shared memory is page-locked.
    """

    owner: StreamedLayer
    begin: int
    places: dict[Place, Span]
    view: OwnView
    offset: int
    waiting: dict[Place, Tensor] = field(default_factory=dict)
    stashed: dict[Place, Tensor] = field(default_factory=dict)
    came: set[Place] = field(default_factory=set)
    reduced: bool = False
    slot: Tensor | None = None
    landed: Any = None
    lent: dict[Place, StorageWeakRef] = field(default_factory=dict)
    overwritten: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)
    locked: bool = False
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        self.pages = whole_pages(total_bytes(tuple(self.places.values())))

    def end_backward(self) -> None:
        """Forgets what belonged to this backward."""
        self.waiting.clear()
        self.stashed.clear()
        self.came.clear()
        self.overwritten.clear()
        self.reduced, self.slot = False, None

    def trainable(self) -> list[Place]:
        """The parameters that are to get a gradient."""
        return [(layer, index) for layer, index in self.places if layer.block.parameters[index].requires_grad]

    def of(self, place: Place) -> Tensor:
        """This rank's view of a parameter's gradient."""
        return part(self.view.bytes[self.offset :], self.places[place])

    def shows(self, place: Place) -> bool:
        """Whether ``param.grad`` is this rank's view of the place."""
        gradient = gradient_of(place)
        at = self.view.bytes.data_ptr() + self.offset + self.places[place].offset
        return gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == at


class GradientPlaces:
    """The places of all gradients. Pages take memory once a gradient is in them.

    Args:
        ranks: those who share the memory.
        layers: all layers.

    Attributes:
        families: the gradients of each layer that owns some.
        slots: how many layers that are updated in backward have gradients at once; 0 if none is.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[StreamedLayer]) -> None:
        laid: list[tuple[StreamedLayer, int, dict[Place, Span]]] = []
        begin = 0
        for owner in [layer for layer in layers if layer.owner is layer]:
            places = [(layer, i) for layer in owner.family for i in range(len(layer.block.parameters))]
            like = [(layer.planned.spans[i].name, layer.block.parameters[i].detach()) for layer, i in places]
            spans = dict(zip(places, lay_out(like), strict=True))
            laid.append((owner, begin, spans))
            begin += whole_pages(total_bytes(tuple(spans.values())))
        self._ranks = ranks
        self._memory = ranks.share(begin, "gradients")
        self.slots = self._taken = self._slot_bytes = 0
        self.families = {owner: Family(owner, at, spans, self._memory.own, at) for owner, at, spans in laid}

    def common(self, family: Family, place: Place, begin: int, nbytes: int) -> Tensor:
        """A part of what all ranks see of a parameter's gradient, flat ``uint8``."""
        at = family.places[place].offset + begin
        if family.slot is not None:
            return family.slot[at : at + nbytes]
        return self._memory.common[family.begin + at : family.begin + at + nbytes]

    def whole(self, family: Family, place: Place) -> Tensor:
        """What all ranks see of a parameter's gradient, as a tensor of its shape."""
        span = family.places[place]
        return part(self.common(family, place, 0, span.nbytes), replace(span, offset=0))

    def make_slots(self, count: int, staging: Staging) -> None:
        """Makes page-locked memory for the gradients of so many layers that are updated in backward. Collective.

        Args:
            count: of layers. The largest of all ranks counts, since each may have chosen a window of its own.
            staging: locks it.
        """
        largest = torch.tensor([count])
        self._ranks.largest(largest)
        moving = [family.pages for owner, family in self.families.items() if owner.kind is not Kind.RESIDENTS]
        self.slots, self._slot_bytes = int(largest), max(moving, default=0)
        self._passing = self._ranks.share(self.slots * self._slot_bytes, "passing gradients").common
        staging.lock(self._passing)

    def lock(self, staging: Staging) -> None:
        """Page-locks the memory that gradients come to, as far as it is not: what is frozen takes no memory."""
        for family in self.families.values():
            if (
                not family.locked
                and not (self.slots and family.owner.kind is not Kind.RESIDENTS)
                and family.trainable()
            ):
                family.locked = True
                staging.lock(self._memory.common[family.begin : family.begin + family.pages])

    def take_slot(self, family: Family) -> None:
        """Gives a layer the next slot. The layer that had it so many layers ago has been updated."""
        begin = self._taken % self.slots * self._slot_bytes
        self._taken += 1
        family.slot = self._passing[begin : begin + family.pages]

    def end_backward(self) -> None:
        """The next backward begins with the first slot, so that a layer mostly finds the same pages."""
        self._taken = 0
        for family in self.families.values():
            family.end_backward()

    def keep_held(self, family: Family) -> None:
        """If user code holds a gradient of an earlier step, leaves it to that and takes another view for this step's."""
        if any(not lent.expired() and gradient_of(place) is None for place, lent in family.lent.items()):
            self._leave(family)

    def _leave(self, family: Family) -> None:
        """Leaves a family's view to user code that holds gradients in it, and takes another one."""
        gradients = {place: gradient_of(place) for place in family.places if family.shows(place)}
        family.view.keep(family.offset, family.offset + family.pages)
        family.view, family.offset = self._memory.view_anew(family.begin, family.begin + family.pages), 0
        family.lent.clear()
        with no_inference_mode(), torch.no_grad():
            for place, gradient in gradients.items():
                assert gradient is not None
                family.of(place).copy_(gradient)
                gradient.data = self._lend(family, place)

    def keep_others(self, family: Family) -> None:
        """Leaves gradients that are not summed in this backward (of frozen parameters) to their parameters, as they are."""
        for place in family.places.keys() - family.trainable():
            gradient = gradient_of(place)
            if gradient is not None and family.shows(place):
                with no_inference_mode():
                    gradient.data = gradient.clone()

    def forget_writes(self) -> None:
        """Drops what this rank's user code has written to gradients, which are others now."""
        self._keep_writes([family for family in self.families.values() if family.reduced], False)

    def show(self, family: Family, place: Place) -> None:
        """Lets ``param.grad`` show what is at its place."""
        layer, index = place
        parameter = layer.block.parameters[index]
        with no_inference_mode(), torch.no_grad():
            gradient = gradient_of(place)
            if gradient is None:
                parameter.grad = self._lend(family, place)
            elif not family.shows(place):
                gradient.copy_(family.of(place))

    def merge(self) -> None:
        """Makes what the primary's user code has written to gradients that of all ranks, and forgets what another rank's has.

        A gradient that user code has put into ``param.grad`` moves to its place first.
        """
        for family in self.families.values():
            for place in family.places:
                self._take_over(family, place)
        self._keep_writes(self.families.values(), self._ranks.primary)

    def _keep_writes(self, families: Iterable[Family], commit: bool) -> None:
        commit_or_drop([(each.view, (each.offset, each.offset + each.pages)) for each in families], commit=commit)

    def _take_over(self, family: Family, place: Place) -> None:
        gradient = gradient_of(place)
        if gradient is None or family.shows(place) or not _alike(gradient, family.of(place)):
            return
        lent = family.lent.get(place)
        if lent is not None and not lent.expired():
            self._leave(family)
        with no_inference_mode(), torch.no_grad():
            family.of(place).copy_(gradient)
            gradient.data = self._lend(family, place)  # other tensors of it show what becomes of it

    def _lend(self, family: Family, place: Place) -> Tensor:
        """The view of a place, with a storage of its own that shows whether a tensor holds it."""
        span = family.places[place]
        memory = lend(family.view.bytes[family.offset + span.offset :][: span.nbytes])
        family.lent[place] = StorageWeakRef(memory.untyped_storage())
        return part(memory, replace(span, offset=0))

    @contextmanager
    def written_in_common(self, owners: Iterable[StreamedLayer]) -> Iterator[None]:
        """While this is active, what is written to ``param.grad`` of these layers is written for all ranks."""
        families = [self.families[owner] for owner in owners if owner in self.families]
        shown = [(family, place) for family in families for place in family.places if family.shows(place)]
        gradients = [gradient_of(place) for _, place in shown]
        try:
            with no_inference_mode():
                for family, (layer, index) in shown:
                    layer.block.parameters[index].grad = self.whole(family, (layer, index))
            yield
        finally:
            for (family, place), gradient in zip(shown, gradients, strict=True):
                self._show_again(family, place, gradient)

    def _show_again(self, family: Family, place: Place, gradient: Tensor | None) -> None:
        """After a turn: what an optimizer has put into ``param.grad`` is what all ranks see, unless it is None."""
        now = gradient_of(place)
        if now is None:
            return
        common = self.whole(family, place)
        if now.data_ptr() != common.data_ptr():
            if not _alike(now, common):
                return
            with no_inference_mode(), torch.no_grad():
                common.copy_(now)
        with no_inference_mode():
            place[0].block.parameters[place[1]].grad = gradient


def _alike(gradient: Tensor, place: Tensor) -> bool:
    """Whether a gradient can be moved to its place without being another one there."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and (gradient.dtype, gradient.shape, gradient.stride()) == (place.dtype, place.shape, place.stride())
    )


def gradient_of(place: Place) -> Tensor | None:
    """A parameter's ``grad``."""
    return place[0].block.parameters[place[1]].grad


def present(family: Family, place: Place, begin: int, nbytes: int) -> Tensor:
    """A copy of a part of ``param.grad``, which stays as it is if no rank has a gradient for it."""
    gradient, shown = family.of(place), gradient_of(place)
    if shown is not None and shown.data_ptr() != gradient.data_ptr():
        gradient = torch.empty_like(gradient).copy_(shown)
    flat = gradient.as_strided((gradient.numel(),), (1,)).view(torch.uint8)
    return flat[begin : begin + nbytes].clone()


def compare_trained(ranks: Ranks, families: Collection[Family]) -> None:
    """Ranks match what they send by order and size, so all of them must send the gradients of the same parameters."""
    trained = [layer.block.parameters[index].requires_grad for family in families for layer, index in family.places]
    if not ranks.same(crc32(bytes(trained)), "backward"):
        ranks.must_agree(
            "trained parameters",
            {family.places[place].name: "trained" for family in families for place in family.trainable()},
            "With several devices set requires_grad of the same parameters on all of them: what it is drawn from must not depend "
            "on the rank.",
        )
