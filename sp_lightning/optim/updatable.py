"""What a step that is taken apart needs: of the engine, and of the place where the optimizer's state is."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from sp_lightning.device.device import Device
from sp_lightning.device.patched import state_of
from sp_lightning.optim.background import BackgroundUpdates
from sp_lightning.store.away import Away, give
from sp_lightning.weights.gradient_sink import Wanted
from sp_lightning.weights.layer import StreamedLayer


class Updatable(Protocol):
    """The engine as a step that is taken apart sees it: which layers there are, and when each may be updated."""

    device: Device
    updates: BackgroundUpdates
    on_complete: Callable[[StreamedLayer], None] | None
    """Called in the backward that was announced, for each layer whose gradients are all in ``param.grad``."""

    wanted: Wanted | None
    """Says whether the step would update a layer at once when ``on_complete`` is called for it."""
    several: bool
    """Whether there are several devices, each of which runs the step."""

    def layer_of(self, parameter: nn.Parameter) -> StreamedLayer | None:
        """The layer of a host parameter; None if the parameter is not one of the module's."""

    def order(self) -> Iterator[StreamedLayer]:
        """All layers, in the order in which the next forward needs them."""

    def before(self, *, deferred: bool) -> None:
        """Called before the step writes host weights; returns once nothing reads them any more."""

    def before_early(self, layer: StreamedLayer) -> None:
        """Called before a layer is updated in the middle of backward."""

    def casts(self, layer: StreamedLayer) -> Mapping[int, Tensor]:
        """Called in the background before a layer's update. Returns, by ``id``, where it may put parameters' casts."""

    def after(self, layer: StreamedLayer, updated: Collection[int]) -> None:
        """Called in the background after the update of these of a layer's parameters, and of their casts."""

    def keep_narrow(self, keep: bool) -> None:
        """Sets whether gradients keep the dtype in which they come until somebody reads them."""

    def gather(self, optimizer: Optimizer) -> None:
        """Called before the step submits its first update after backward; returns once all ranks have come there."""

    def over(self) -> None:
        """Called when the step has submitted all updates."""

    def release_gradients(self, layer: StreamedLayer, parameters: Sequence[nn.Parameter]) -> None:
        """Called when nobody needs the gradients of these parameters of a layer any more."""


class OptimizerState(Protocol):
    """The place of the optimizer's state between updates: the host, as torch makes it, or a disk."""

    def bring(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """Called in the background before a layer's update; returns once the layer's state is in host memory."""

    def put(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """Called in the background after a layer's update, when its state may leave host memory."""


class OnHost:
    """State that stays on the host."""

    def bring(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """The state is on the host already, but for what an earlier run with ``disk=`` has left away."""
        state = state_of(optimizer)
        found = (state.get(p, {}) for group in optimizer.param_groups for p in group["params"])
        give([value for each in found for value in each.values() if type(value) is Away])

    def put(self, layer: StreamedLayer, optimizer: Optimizer) -> None:
        """The state stays on the host."""
