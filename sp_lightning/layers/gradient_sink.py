"""The interface that passes gradients from backward to ``param.grad``, and the transfers of gradients to host memory."""

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
    """Copies gradients from backward to the host, and applies them to ``param.grad``. Several devices first sum them.

    This class keeps the transfers to the host, in the order in which they were issued. A simulation needs no more. Subclasses
    choose the gradients of each transfer, and apply them. Each transfer has a value of the type ``W``, by which the subclass
    knows what to apply.

    Several of autograd's threads may have gradients at once. The caller lets one thread at a time call methods, except
    :meth:`land`.

    Args:
        device: copies, and waits for the transfers.
        in_flight: the number of layers whose gradients may be on the device at once (k' + 1).
        apply: applies the gradients of a transfer, given its value. Called after the host has waited for the transfer.

    Attributes:
        in_flight: the same number.
        keep_narrow: True if gradients in a lower dtype than their parameter's keep that dtype until user code reads them.
        check: called before gradients are applied. It raises an error if the gradients are known to be wrong.
        keep_for_step: True if all layers step on the GPU. If a step waits for a layer, the layer's gradients are then not copied
            to the host.
        keep_for_own_slot: True if the gradients of layers that stay on the GPU remain on the GPU until the step.
        arriving: the layers with gradients that have arrived, and whose transfer is not issued yet. With several devices, their
            families.
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
        # Transfers in flight: the value, the device tensors to keep until compute has waited for the copy, the copy's event.
        self._flying: deque[tuple[W, list[Tensor], Any]] = deque()
        # Transfers that compute waits for, and whose gradients are not applied yet: the value, and the event (None: no copy).
        self._landed: deque[tuple[W, Any]] = deque()

    def send(self, layer: int, targets: Sequence[Tensor], sources: Sequence[Any], alive: list[Tensor], what: W) -> None:
        """Issues a transfer. Retires older ones, so that ``in_flight`` is not exceeded when the next layer's gradients arrive.

        Args:
            layer: the index of the layer, for timelines.
            targets: the host memory for each tensor of ``sources``.
            sources: the tensors to copy.
            alive: the device tensors to keep until compute has waited for the copies.
            what: the value of the transfer.
        """
        nbytes = sum(map(_nbytes, sources))
        with self.device.timed("drain", layer, Stream.DOWNLOAD, nbytes):
            self.device.copy(targets, sources, Stream.DOWNLOAD)  # (8)
        self.offloaded_bytes += nbytes
        self._flying.append((what, alive, self.device.record(Stream.DOWNLOAD)))
        self.retire(self.in_flight - 1)

    def retire(self, keep: int) -> None:
        """Makes compute wait for all transfers except the ``keep`` latest ones. Frees the device memory of these transfers."""
        while len(self._flying) > keep:
            what, alive, landed = self._flying.popleft()
            self.device.wait(Stream.COMPUTE, landed, Wait.REUSE_AFTER_DRAIN)
            self.device.access(alive, Stream.COMPUTE, write=True)  # the allocator may give this memory to compute next
            self.device_bytes -= sum(map(bytes_of_dense, alive))
            self._landed.append((what, landed))

    def finish(self, keep: int = 1) -> None:
        """Makes the host wait for retired transfers, except the ``keep`` latest ones, and applies their gradients.

        This limits the host memory of gradients, and how far the host runs ahead of the device.
        """
        while len(self._landed) > keep:
            what, landed = self._landed.popleft()
            self.device.synchronize(landed, Wait.APPLY_AFTER_DRAIN)
            self.check()
            self._apply_one(what)

    def drop_drains(self) -> list[W]:
        """Makes the host wait for all transfers, and drops their gradients. Returns the values of the transfers."""
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
        """Called when the backward of a loss begins. Sinks that keep gradients on the GPU, or update early, store ``wanted``.

        Args:
            wanted: returns True if an optimizer's step waits for a layer, to update it in this backward. None if no step waits.
        """

    def land(self, *, everything: bool = False) -> None:
        """Applies gradients that are on the host, and runs the user's hooks.

        Args:
            everything: True to wait for all gradients, because a graph task ends.
        """

    def end(self, *, last: bool) -> None:
        """Issues the transfers of all gradients, because a graph task ends. ``last``: True if it is the outermost task."""

    def freed(self, layer: StreamedLayer) -> None:
        """Called when a layer's step has used the layer's gradients, and they are no longer in ``param.grad``."""

    def drop(self) -> None:
        """Drops the gradients that are not in ``param.grad``, after a backward that failed."""


def _nothing() -> None:
    pass


def bytes_of_dense(gradient: Tensor) -> int:
    """Returns the bytes of a gradient; 0 if it is sparse, because its bytes are few, and the host would wait for their number."""
    return gradient.nbytes if gradient.layout is torch.strided else 0


_nbytes: Callable[[Tensor], int] = attrgetter("nbytes")
