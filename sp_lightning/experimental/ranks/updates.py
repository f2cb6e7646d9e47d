"""Background updates of several ranks: each rank updates the layers that it owns, and waits for the owners of other layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from sp_lightning.core.device.device import Wait
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.experimental.ranks.block_memory import written_in_common
from sp_lightning.experimental.ranks.failures import LOST
from sp_lightning.experimental.ranks.owners import RankOwners

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class OwnerUpdates(BackgroundUpdates):
    """Updates of several ranks in the background.

    Args:
        engine: the engine.
        owners: the owners of the layers.
    """

    def __init__(self, engine: Engine, owners: RankOwners) -> None:
        super().__init__(engine)
        self._owners = owners

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        common = ExitStack()
        number = self._owners.number

        def update() -> None:
            try:
                work()
            except LOST:
                raise
            except BaseException as error:
                self._owners.ranks.fail(error)
                raise
            self._owners.publish(layer, number)

        def after() -> None:
            common.close()
            if then is not None:
                then()

        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)
            # From now on until the run has waited for the update, the layer's parameters are the shared memory.
            for member in layer.with_masters:
                common.enter_context(written_in_common(member.block))
            super().submit(layer, update, after)

    def follow(self, layers: Iterable[StreamedLayer]) -> None:
        """Makes uses of layers wait until their owners have published the present step."""
        with self._lock:
            for layer in layers:
                self._finish(layer, Wait.READ_AFTER_UPDATE)
                self._set_waiting_class(layer)
                self._under_way[layer] = None
                published: Any = _Published(self, self._owners, layer)
                layer.update = published


class _Published:
    """The update of a layer by another rank, with the methods of a ``Future`` that the engine calls.

    If the other rank is lost, the updates have failed, as after an error of an update of this rank. So the error is raised once,
    and no other layer is waited for: a run with many layers would need minutes to end.
    """

    def __init__(self, updates: OwnerUpdates, owners: RankOwners, layer: StreamedLayer) -> None:
        self._updates, self._owners, self._layer, self._number = updates, owners, layer, owners.number

    def done(self) -> bool:
        return self._owners.is_published(self._layer, self._number)

    def result(self) -> None:
        if self._updates.failure is None:
            try:
                self._owners.wait_for(self._layer, self._number)
            except LOST as error:
                self._updates.failure = error

    exception = result
