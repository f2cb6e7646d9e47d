"""Updates in the background for several ranks: the primary's thread updates a layer, those of the others wait for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from sp_lightning.device.device import Device
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.waits import Wait
from sp_lightning.optim.background import BackgroundUpdates
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.reduced_gradients import ReducedGradients


class SharedUpdates(BackgroundUpdates):
    """The updates that are under way, of all ranks.

    On every rank a layer's parameters wait until the primary has updated it. It says so by a number on a board: how many
    updates the layer has had.

    Args:
        layers: all layers.
        device: runs work in its background thread, and waits for it.
        ranks: the ranks.
        gradients: where gradients are that all ranks see.
    """

    def __init__(
        self, layers: Sequence[StreamedLayer], device: Device, ranks: Ranks, gradients: ReducedGradients
    ) -> None:
        super().__init__(layers, device)
        self._ranks = ranks
        self._gradients = gradients
        self._submitted: Counter[StreamedLayer] = Counter()
        self._done = ranks.share(8 * len(layers), "updates").words("q")

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._submitted[layer] += 1
            number = self._submitted[layer]
            if self._ranks.primary:
                self._lead(layer, number, work, then)
            else:
                super().submit(
                    layer,
                    lambda: self._ranks.until(lambda: self._done[layer.index] >= number, Wait.READ_AFTER_SHARED_UPDATE),
                    then,
                )

    def _lead(
        self, layer: StreamedLayer, number: int, work: Callable[[], None], then: Callable[[], None] | None
    ) -> None:
        # Until somebody waits for the update, the layer's parameters and gradients are those that all ranks see.
        common = ExitStack()
        for member in layer.family:
            common.enter_context(member.block.written_in_common())
        common.enter_context(self._gradients.written_in_common(layer))

        def update() -> None:
            try:
                work()
            except BaseException as error:
                self._ranks.fail(error)
                raise
            self._ranks.publish(self._done, layer.index, number)

        def after() -> None:
            common.close()
            if then is not None:
                then()

        super().submit(layer, update, after)
