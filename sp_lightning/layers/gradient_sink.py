"""Where gradients go."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.layers.layer import StreamedLayer

Wanted = Callable[[StreamedLayer], bool]


W = TypeVar("W")


class GradientSink(Generic[W]):
    """The place that gradients go to: ``param.grad`` on the host. With several devices they are summed first.

    Here are the transfers to the host, in the order in which they were issued; what a simulation needs is this alone. Several of
    autograd's threads may have gradients at once. The caller lets in one at a time, but for :meth:`land`.

    Args:
        device: copies, and waits for the transfers.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
        apply: called with what came, once the host has waited for a transfer.

    Attributes:
        in_flight: the same number.
        keep_narrow: whether gradients that come in a lower dtype than their parameter's keep it until user code reads them.
        checked: called before what came is applied. It raises an error if gradients are known to be wrong.
        stay: whether those of a layer that a step waits for stay on the device, where the layer is stepped.
        keep_there: whether gradients of layers that stay on the device wait there, whenever their step comes.
        arriving: the layers, or families of them, of which gradients have arrived that :meth:`make_room` would send off.
        device_bytes: bytes of gradients that are on the device now.
        drained_bytes: bytes that have left for the host.
        host_waits: how often the host has waited for a gradient whose size depends on values that compute has.
    """

    def __init__(self, device: Device, in_flight: int, apply: Callable[[W], None]) -> None:
        self.device = device
        self.in_flight = in_flight
        self._apply_one = apply
        self.keep_narrow = self.stay = self.keep_there = False
        self.checked: Callable[[], None] = _nothing
        self.arriving: dict[Any, None] = {}
        self.device_bytes = self.drained_bytes = self.host_waits = 0
        # What comes, the tensors on the device that are kept alive until compute has waited for the copy, and its event.
        self._flying: deque[tuple[W, list[Tensor], Any]] = deque()
        self._landed: deque[tuple[W, Any]] = deque()

    def send(self, layer: int, targets: Sequence[Tensor], sources: Sequence[Any], alive: list[Tensor], what: W) -> None:
        """Issues a transfer, and retires others so that the limit holds for it and the next one."""
        begun = self.device.mark(Stream.DOWNLOAD)
        self.device.copy(targets, sources, Stream.DOWNLOAD)  # (8)
        nbytes = sum(map(_nbytes, sources))
        if begun is not None:
            self.device.note("drain", layer, begun, Stream.DOWNLOAD, nbytes)
        self.drained_bytes += nbytes
        self._flying.append((what, alive, self.device.record(Stream.DOWNLOAD)))
        self.retire(self.in_flight - 1)

    def retire(self, keep: int) -> None:
        """Frees the device memory of all but the ``keep`` latest transfers, for which compute waits."""
        while len(self._flying) > keep:
            what, alive, landed = self._flying.popleft()
            self.device.wait(Stream.COMPUTE, landed, Wait.REUSE_AFTER_DRAIN)
            self.device.access(alive, Stream.COMPUTE, write=True)  # compute may put anything there next
            self.device_bytes -= sum(map(bytes_of_dense, alive))
            self._landed.append((what, landed))

    def finish(self, keep: int = 1) -> None:
        """Applies what came with all transfers that are retired but the ``keep`` latest ones.

        This bounds the host memory of gradients, and how far the host runs ahead.
        """
        while len(self._landed) > keep:
            what, landed = self._landed.popleft()
            self.device.synchronize(landed, Wait.APPLY_AFTER_DRAIN)
            self.checked()
            self._apply_one(what)

    def drop_drains(self) -> list[W]:
        """Waits for the transfers that are under way. Returns what came with them, which is not applied."""
        under_way = [(what, landed) for what, _, landed in self._flying] + [*self._landed]
        self._flying.clear()
        self._landed.clear()
        for _, landed in under_way:
            self.device.synchronize(landed, Wait.DROP_AFTER_DRAIN)
        self.device_bytes = 0
        return [what for what, _ in under_way]

    # ------------------------------------------------------------------ what backward tells

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes one gradient of a layer, which leaves with the layer's others. Returns whether all of them have arrived."""
        raise NotImplementedError

    def drain(self, layer: StreamedLayer) -> None:
        """Sends off the gradients of one layer that have arrived."""

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Sends off what is left of other layers' gradients, because the backward of ``layers`` begins."""

    def expect(self, wanted: Wanted | None = None) -> None:
        """The backward of a loss begins.

        Args:
            wanted: says of a layer whether an optimizer's step waits for it, to update it in this backward. None if no step
                waits for any.
        """

    def land(self, *, everything: bool = False) -> None:
        """Brings what has left to its place, where the user's hooks run. ``everything``: because a graph task ends."""

    def end(self, *, last: bool) -> None:
        """Sends off every gradient, because a graph task ends; ``last`` if it is the outermost one."""

    def freed(self, layer: StreamedLayer) -> None:
        """A layer's gradients are used, and are no longer in ``param.grad``."""

    def drop(self) -> None:
        """Drops the gradients that did not get there, after a backward that failed."""


def _nothing() -> None:
    pass


def bytes_of_dense(gradient: Tensor) -> int:
    """Bytes of a gradient; 0 of a sparse one, whose bytes are few and are not known without a wait."""
    return gradient.nbytes if gradient.layout is torch.strided else 0


_nbytes: Callable[[Tensor], int] = attrgetter("nbytes")
