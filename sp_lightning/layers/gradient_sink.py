"""The interface by which gradients get from backward to ``param.grad``, and their copies to host memory."""

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
"""Returns True if an optimizer's step waits for a layer's gradients, to update the layer in this backward."""

W = TypeVar("W")


class GradientSink(Generic[W]):
    """Takes gradients from backward and brings them to ``param.grad`` on the host. Several devices sum them before.

    This class has the transfers to the host, in the order in which they were issued. A simulation needs no more. Subclasses
    choose what is transferred, and apply it. Each transfer carries a value of the type ``W``, which the subclass needs for that.

    Several of autograd's threads may have gradients at once. The caller lets in one thread at a time, except in :meth:`land`.

    Args:
        device: copies, and waits for the transfers.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
        apply: called with the value of a transfer, after the host has waited for the transfer.

    Attributes:
        in_flight: the same number.
        keep_narrow: True if gradients in a lower dtype than their parameter's keep that dtype until user code reads them.
        check: called before gradients are applied. It raises an error if they are known to be wrong.
        keep_for_step: True if all layers step on the GPU. Then the gradients of a layer that a step waits for are not copied.
        keep_for_own_slot: True if the gradients of layers that stay on the GPU wait there for the step.
        arriving: the layers with gradients that have arrived and are not yet issued to the host. With several devices, families.
        device_bytes: bytes of gradients that are on the device now.
        offloaded_bytes: bytes that were copied to the host.
        host_waits: how often the host has waited for a gradient whose size depends on computed values.
    """

    def __init__(self, device: Device, in_flight: int, apply: Callable[[W], None]) -> None:
        self.device = device
        self.in_flight = in_flight
        self._apply_one = apply
        self.keep_narrow = self.keep_for_step = self.keep_for_own_slot = False
        self.check: Callable[[], None] = _nothing
        self.arriving: dict[Any, None] = {}
        self.device_bytes = self.offloaded_bytes = self.host_waits = 0
        # Transfers in flight: the value, the tensors on the device that live until compute has waited for the copy, its event.
        self._flying: deque[tuple[W, list[Tensor], Any]] = deque()
        # Transfers that compute has waited for and that are not applied yet: the value, and the event (None: no copy).
        self._landed: deque[tuple[W, Any]] = deque()

    def send(self, layer: int, targets: Sequence[Tensor], sources: Sequence[Any], alive: list[Tensor], what: W) -> None:
        """Issues a transfer. Retires older ones, so that ``in_flight`` is not exceeded when the next layer's gradients arrive."""
        begun = self.device.mark(Stream.DOWNLOAD)
        self.device.copy(targets, sources, Stream.DOWNLOAD)  # (8)
        nbytes = sum(map(_nbytes, sources))
        if begun is not None:
            self.device.note("drain", layer, begun, Stream.DOWNLOAD, nbytes)
        self.offloaded_bytes += nbytes
        self._flying.append((what, alive, self.device.record(Stream.DOWNLOAD)))
        self.retire(self.in_flight - 1)

    def retire(self, keep: int) -> None:
        """Makes compute wait for all transfers except the ``keep`` latest ones. Then frees the memory of their gradients."""
        while len(self._flying) > keep:
            what, alive, landed = self._flying.popleft()
            self.device.wait(Stream.COMPUTE, landed, Wait.REUSE_AFTER_DRAIN)
            self.device.access(alive, Stream.COMPUTE, write=True)  # the allocator may give this memory to compute next
            self.device_bytes -= sum(map(bytes_of_dense, alive))
            self._landed.append((what, landed))

    def finish(self, keep: int = 1) -> None:
        """Waits for retired transfers, and applies their gradients, except those of the ``keep`` latest ones.

        This bounds the host memory of gradients, and how far the host runs ahead.
        """
        while len(self._landed) > keep:
            what, landed = self._landed.popleft()
            self.device.synchronize(landed, Wait.APPLY_AFTER_DRAIN)
            self.check()
            self._apply_one(what)

    def drop_drains(self) -> list[W]:
        """Waits for all transfers without applying gradients. Returns the values of the transfers."""
        under_way = [(what, landed) for what, _, landed in self._flying] + [*self._landed]
        self._flying.clear()
        self._landed.clear()
        for _, landed in under_way:
            self.device.synchronize(landed, Wait.DROP_AFTER_DRAIN)
        self.device_bytes = 0
        return [what for what, _ in under_way]

    # ------------------------------------------------------------------ called by backward

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes one gradient of a layer. Returns True if all gradients of the layer have arrived."""
        raise NotImplementedError

    def drain(self, layer: StreamedLayer) -> None:
        """Issues the transfer of the gradients of one layer that have arrived."""

    def make_room(self, layers: Sequence[StreamedLayer]) -> None:
        """Issues the transfer of other layers' gradients, because the backward of ``layers`` begins."""

    def expect(self, wanted: Wanted | None = None) -> None:
        """Called when the backward of a loss begins. Sinks that may keep gradients on the GPU, or update early, note ``wanted``.

        Args:
            wanted: returns True if an optimizer's step waits for a layer, to update it in this backward. None if no step waits.
        """

    def land(self, *, everything: bool = False) -> None:
        """Applies gradients that are on the host, and runs the user's hooks.

        Args:
            everything: True to wait for all gradients, because a graph task ends.
        """

    def end(self, *, last: bool) -> None:
        """Issues the transfers of all gradients, because a graph task ends. ``last``: it is the outermost one."""

    def freed(self, layer: StreamedLayer) -> None:
        """Called when a layer's step has used the gradients, and they are no longer in ``param.grad``."""

    def drop(self) -> None:
        """Drops the gradients that are not in ``param.grad``, after a backward that failed."""


def _nothing() -> None:
    pass


def bytes_of_dense(gradient: Tensor) -> int:
    """Returns the bytes of a gradient; 0 for a sparse one, whose bytes are few and are not known without a wait."""
    return gradient.nbytes if gradient.layout is torch.strided else 0


_nbytes: Callable[[Tensor], int] = attrgetter("nbytes")
