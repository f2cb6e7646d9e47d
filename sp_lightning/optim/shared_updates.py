"""Updates in the background for several ranks: the primary's thread updates a layer, those of the others wait for that."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from sp_lightning.device.device import Device
from sp_lightning.device.ranks import Ranks
from sp_lightning.device.waits import Wait
from sp_lightning.optim.background import BackgroundUpdates
from sp_lightning.store.block_memory import merge
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.reduced_gradients import ReducedGradients


class SharedUpdates(BackgroundUpdates):
    """The updates that are under way, of all ranks.

    On every rank a layer's parameters wait until the primary has updated it. It says so by a number on a board: how many
    updates the layer has had.

    A layer that is updated in backward is submitted as soon as its gradients have been sent. Then each rank says by such a
    number that its part of them has landed, and that it reads the layer's weights no more. The primary waits for all ranks.
    No thread but the background's waits for that, and all ranks submit in one order, so none of them waits for ever.

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
        self._landed = ranks.share(8 * len(layers) * ranks.size, "landings").words("q")

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._submitted[layer] += 1
            number = self._submitted[layer]
            landing = self._gradients.landing(layer)
            if not self._ranks.primary:
                super().submit(layer, partial(self._follow, layer, number, landing), then)
            elif landing is None:
                self._lead(layer, number, work, then)
            else:
                self._lead(layer, number, partial(self._update, layer, number, landing, work), then)

    def bound(self, most: int) -> None:
        """Waits for as many updates as leave a slot for the next layer's gradients. Those of all others may be on their way."""
        super().bound(max(most, self._gradients.slots - 1))

    def _follow(self, layer: StreamedLayer, number: int, landing: Callable[[], None] | None) -> None:
        """Waits for the primary's update of a layer, on another rank."""
        if landing is not None:
            self._land(layer, number, landing)
        self._ranks.until(lambda: self._done[layer.index] >= number, Wait.READ_AFTER_SHARED_UPDATE)

    def _land(self, layer: StreamedLayer, number: int, landing: Callable[[], None]) -> list[int]:
        """Says when this rank's part of a layer's gradients has landed. Returns where on the board each rank says so."""
        words = [rank * len(self._layers) + layer.index for rank in range(self._ranks.size)]
        landing()
        self._ranks.publish(self._landed, words[self._ranks.rank], number)
        return words

    def _update(self, layer: StreamedLayer, number: int, landing: Callable[[], None], work: Callable[[], None]) -> None:
        """Updates a layer in backward, on the primary, once the parts of all ranks are there."""
        words = self._land(layer, number, landing)
        self._ranks.until(lambda: all(self._landed[each] >= number for each in words), Wait.UPDATE_AFTER_LANDING)
        # What this rank's user code has written counts. What others' has, they drop in the step's turn.
        merge(member.block.memory for member in layer.family)
        work()

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
