"""Where gradients go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from sp_lightning.weights.layer import StreamedLayer

Wanted = Callable[[StreamedLayer], bool]


class GradientSink(Protocol):
    """The place that gradients go to: ``param.grad`` on the host. With several devices they are summed first.

    Several of autograd's threads may have gradients at once. The caller lets in one at a time, but for :meth:`land`.

    Attributes:
        keep_narrow: whether gradients that come in a lower dtype than their parameter's keep it until somebody reads them.
        device_bytes: bytes of gradients that are on the device now.
        drained_bytes: bytes that have left for the host.
        host_waits: how often the host has waited for a gradient whose size depends on values that compute has.
    """

    keep_narrow: bool
    device_bytes: int
    drained_bytes: int
    host_waits: int

    def limit(self, in_flight: int) -> None:
        """Sets the number of layers whose gradients may be on the device at once (k' + 1)."""

    def arrived(self, layer: StreamedLayer, index: int, gradient: Tensor) -> bool:
        """Takes one gradient of a layer, which leaves with the layer's others. Returns whether all of them have arrived."""

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

    def drop(self) -> None:
        """Drops the gradients that did not get there, after a backward that failed."""


def has_graph(layer: StreamedLayer, index: int) -> str:
    """The error message for a gradient that could be differentiated itself (``backward(create_graph=True)``)."""
    name = layer.planned.spans[index].name
    return (
        f"The gradient of {name!r} has a graph of its own (backward(create_graph=True)); it would be lost on "
        f"the way to the host. Use torch.autograd.grad(loss, parameters, create_graph=True), which keeps it."
    )
