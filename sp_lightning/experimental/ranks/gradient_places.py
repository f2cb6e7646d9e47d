"""Shared memory for the gradients of several ranks, in which each parameter's gradient has a fixed place."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.core.device.layout import Span, lay_out, part, total_bytes, whole_pages
from sp_lightning.core.device.lease import lend
from sp_lightning.core.layers.layer import Kind, StreamedLayer
from sp_lightning.core.store.block_memory import Staging
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.experimental.ranks.shared_memory import OwnView, commit_or_drop

Place = tuple[StreamedLayer, int]
"""A layer and the index of one of its parameters."""


@dataclass(eq=False)
class Family:
    """The gradients of one layer and of its masters.

    Attributes:
        owner: the layer.
        begin: the offset of the layer's part in the shared memory, in bytes.
        places: the parameters, with the span of each gradient in the layer's part.
        view: this rank's private view of the shared memory, or only of the layer's part.
        offset: the offset of the layer's part in ``view``, in bytes.
        waiting: gradients on the device that are not summed yet.
        stashed: gradients in this rank's host memory that are not summed yet.
        came: the parameters that got a gradient in this backward.
        reduced: True after the layer was summed in this backward.
        slot: shared memory for the layer's gradients if the layer is updated in this backward; else None.
        downloaded: the event after the copy of this rank's part of the sum to ``slot``.
        lent: for each parameter, a weak reference to the storage under which ``param.grad`` was lent last.
        overwritten: for each parameter that had a ``param.grad`` and got no gradient on this rank: the parameter, the memory that
            this rank's part of the sum overwrites, and a copy of the former bytes.
        pages: the size of the part in bytes, in whole pages.
        locked: True if the part is page-locked.
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
    downloaded: Any = None
    lent: dict[Place, StorageWeakRef] = field(default_factory=dict)
    overwritten: list[tuple[Place, Tensor, Tensor]] = field(default_factory=list)
    locked: bool = False
    pages: int = field(init=False)

    def __post_init__(self) -> None:
        self.pages = whole_pages(total_bytes(tuple(self.places.values())))

    def end_backward(self) -> None:
        """Clears the records of one backward."""
        self.waiting.clear()
        self.stashed.clear()
        self.came.clear()
        self.overwritten.clear()
        self.reduced = False
        self.slot = None

    def trainable(self) -> list[Place]:
        """Returns the parameters that require a gradient."""
        return [(layer, index) for layer, index in self.places if layer.block.parameters[index].requires_grad]

    def of(self, place: Place) -> Tensor:
        """Returns this rank's private view of a parameter's gradient."""
        return part(self.view.bytes[self.offset :], self.places[place])

    def shows(self, place: Place) -> bool:
        """Returns True if ``param.grad`` of a parameter is this rank's private view of the parameter's place."""
        gradient = gradient_of(place)
        at = self.view.bytes.data_ptr() + self.offset + self.places[place].offset
        return gradient is not None and gradient.layout is torch.strided and gradient.data_ptr() == at


class GradientPlaces:
    """The places of all gradients, in shared memory. A page of this memory is allocated when a gradient is first written to it.

    Args:
        ranks: the ranks that share the memory.
        layers: all layers.

    Attributes:
        families: the gradients of each layer.
        slots: the number of layers that may have gradients at the same time before they are updated in backward; 0 if no layer is
            updated in backward.
    """

    def __init__(self, ranks: Ranks, layers: Sequence[StreamedLayer]) -> None:
        laid: list[tuple[StreamedLayer, int, dict[Place, Span]]] = []
        begin = 0
        for owner in [layer for layer in layers if layer.owner is layer]:
            places = [(layer, i) for layer in owner.with_masters for i in range(len(layer.block.parameters))]
            like = [(layer.planned.spans[i].name, layer.block.parameters[i].detach()) for layer, i in places]
            spans = dict(zip(places, lay_out(like), strict=True))
            laid.append((owner, begin, spans))
            begin += whole_pages(total_bytes(tuple(spans.values())))
        self._ranks = ranks
        self._memory = ranks.share(begin, "gradients")
        self.slots = 0
        self._taken = 0
        self._slot_bytes = 0
        self.families = {owner: Family(owner, at, spans, self._memory.own, at) for owner, at, spans in laid}

    def common(self, family: Family, place: Place, begin: int, nbytes: int) -> Tensor:
        """Returns a part of a parameter's gradient in shared memory, flat ``uint8``."""
        at = family.places[place].offset + begin
        if family.slot is not None:
            return family.slot[at : at + nbytes]
        return self._memory.common[family.begin + at : family.begin + at + nbytes]

    def whole(self, family: Family, place: Place) -> Tensor:
        """Returns a parameter's gradient in shared memory, with the parameter's shape."""
        span = family.places[place]
        return part(self.common(family, place, 0, span.nbytes), replace(span, offset=0))

    def make_slots(self, count: int, staging: Staging) -> None:
        """Makes page-locked memory for the gradients of layers that are updated in backward. Collective.

        Args:
            count: the number of layers. The maximum over all ranks counts, because their windows may differ.
            staging: page-locks the memory.
        """
        largest = torch.tensor([count])
        self._ranks.largest(largest, "the number of layers that are updated in backward")
        moving = [family.pages for owner, family in self.families.items() if owner.kind is not Kind.RESIDENTS]
        self.slots = int(largest)
        self._slot_bytes = max(moving, default=0)
        self._passing = self._ranks.share(self.slots * self._slot_bytes, "passing gradients").common
        staging.lock(self._passing)

    def lock(self, staging: Staging) -> None:
        """Page-locks the memory of gradients that is not locked yet, except that of frozen layers, which would take memory.

        If layers are updated in backward, only residents are locked. The gradients of other layers usually pass through the
        locked buffers of :meth:`make_slots`.
        """
        for family in self.families.values():
            if (
                not family.locked
                and not (self.slots and family.owner.kind is not Kind.RESIDENTS)
                and family.trainable()
            ):
                family.locked = True
                staging.lock(self._memory.common[family.begin : family.begin + family.pages])

    def take_slot(self, family: Family) -> None:
        """Gives a layer the next slot.

        The layer that used the slot before has been updated: ``SharedUpdates.limit_pending`` has waited for its update.
        """
        begin = self._taken % self.slots * self._slot_bytes
        self._taken += 1
        family.slot = self._passing[begin : begin + family.pages]

    def end_backward(self) -> None:
        """Ends a backward. The next one begins with the first slot, so a layer usually gets the same pages."""
        self._taken = 0
        for family in self.families.values():
            family.end_backward()

    def keep_held(self, family: Family) -> None:
        """If user code still holds a gradient and ``param.grad`` is None, makes a new view for the layer's gradients.

        Otherwise the sum of this backward would overwrite the gradient that user code holds.
        """
        if any(not lent.expired() and gradient_of(place) is None for place, lent in family.lent.items()):
            self._leave(family)

    def _leave(self, family: Family) -> None:
        """Makes a new view for a family. The old view keeps its values for user code that holds gradients in it.

        Gradients that are ``param.grad`` are copied to the new view, and their tensors become views of it.
        """
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
        """Copies gradients of frozen parameters from the view to memory of their own.

        These gradients are not summed in this backward, and :meth:`forget_writes` drops private writes to the layer's part.
        """
        for place in family.places.keys() - family.trainable():
            gradient = gradient_of(place)
            if gradient is not None and family.shows(place):
                with no_inference_mode():
                    gradient.data = gradient.clone()

    def forget_writes(self) -> None:
        """Drops this rank's private writes to the gradients of layers that were summed, so that the view shows the sums."""
        self._keep_writes([family for family in self.families.values() if family.reduced], False)

    def show(self, family: Family, place: Place) -> None:
        """Makes ``param.grad`` a view of its place if it is None. If it is another tensor, copies the sum to that tensor."""
        layer, index = place
        parameter = layer.block.parameters[index]
        with no_inference_mode(), torch.no_grad():
            gradient = gradient_of(place)
            if gradient is None:
                parameter.grad = self._lend(family, place)
            elif not family.shows(place):
                gradient.copy_(family.of(place))

    def merge(self) -> None:
        """Shares private writes of the primary's user code to gradients with all ranks. Drops those of other ranks.

        Before that, a gradient that user code has assigned to ``param.grad`` is copied to its place, and its tensor becomes a
        view of the place.
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
            self._leave(family)  # user code holds the former gradient, which the copy would overwrite
        with no_inference_mode(), torch.no_grad():
            family.of(place).copy_(gradient)
            gradient.data = self._lend(family, place)  # other references to the gradient see its new values

    def _lend(self, family: Family, place: Place) -> Tensor:
        """Returns a view of a place under a new storage, and records the storage in ``lent``.

        As long as a tensor holds the view, the storage exists.
        """
        span = family.places[place]
        memory = lend(family.view.bytes[family.offset + span.offset :][: span.nbytes])
        family.lent[place] = StorageWeakRef(memory.untyped_storage())
        return part(memory, replace(span, offset=0))

    @contextmanager
    def written_in_common(self, owners: Iterable[StreamedLayer]) -> Iterator[None]:
        """A context in which ``param.grad`` of these layers is shared memory. Afterwards it is this rank's private view again."""
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
        """At the end of a turn, sets ``param.grad`` to this rank's view again. If it is None now, it stays None.

        If an optimizer has assigned another tensor to ``param.grad``, its values are copied to shared memory before. A tensor
        of another dtype or layout does not fit there, and stays ``param.grad``.

        Args:
            family: the layer's gradients.
            place: the parameter.
            gradient: this rank's view, which was ``param.grad`` before the turn.
        """
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
    """Returns True if a gradient has the dtype and the layout of its place."""
    return (
        type(gradient) is Tensor
        and gradient.layout is torch.strided
        and (gradient.dtype, gradient.shape, gradient.stride()) == (place.dtype, place.shape, place.stride())
    )


def gradient_of(place: Place) -> Tensor | None:
    return place[0].block.parameters[place[1]].grad


def present(family: Family, place: Place, begin: int, nbytes: int) -> Tensor:
    """Returns a copy of a part of ``param.grad``, flat ``uint8``. It is restored if no rank gets a gradient for the parameter.

    Args:
        family: the layer's gradients.
        place: the parameter. It has a ``param.grad``.
        begin, nbytes: the offset and the size of the part in the gradient, in bytes.
    """
    gradient, shown = family.of(place), gradient_of(place)
    if shown is not None and shown.data_ptr() != gradient.data_ptr():
        # With the strides of the place, because the bytes are copied flat.
        gradient = torch.empty_like(gradient).copy_(shown)
    flat = gradient.as_strided((gradient.numel(),), (1,)).view(torch.uint8)
    return flat[begin : begin + nbytes].clone()


def compare_trained(ranks: Ranks, families: Collection[Family]) -> None:
    """Checks that all ranks train the same parameters. Called when the backward of a loss begins. Collective.

    Ranks sum gradients in transfers that are matched by their order and size only. If one rank sent fewer or other gradients,
    gradients of different parameters would be added up.

    Raises:
        ValueError: ``requires_grad`` of a parameter differs between ranks.
    """
    trained = [layer.block.parameters[index].requires_grad for family in families for layer, index in family.places]
    if not ranks.same(crc32(bytes(trained)), "backward"):
        ranks.must_agree(
            "trained parameters",
            {family.places[place].name: "trained" for family in families for place in family.trainable()},
            "Set requires_grad of the same parameters on all ranks. If requires_grad is chosen at random, use the same seed on "
            "all ranks.",
        )
