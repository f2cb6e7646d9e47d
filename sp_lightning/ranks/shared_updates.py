"""Background updates of several ranks: the primary updates each layer, and the other ranks wait for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from sp_lightning.device.device import Device, Wait
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.ranks.block_memory import merge
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.ranks.reduced_gradients import ReducedGradients
from sp_lightning.ranks.shared_memory import publish
from sp_lightning.updates.background import BackgroundUpdates


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
        common = ExitStack()
        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)
            self._submitted[layer] += 1
            update = partial(self._update, layer, self._submitted[layer], self._gradients.landing(layer), work)
            if self._ranks.primary:
                # Until the update is waited for, the layer's parameters and gradients are those that all ranks see.
                for member in layer.family:
                    common.enter_context(member.block.written_in_common())
                common.enter_context(self._gradients.places.written_in_common([layer]))

            def after() -> None:
                common.close()
                if then is not None:
                    then()

            super().submit(layer, update, after)

    def _update(
        self, layer: StreamedLayer, number: int, landing: Callable[[], None] | None, work: Callable[[], None]
    ) -> None:
        """Updates a layer on the primary, in backward once the parts of all ranks are there. The others wait for it."""
        ranks = self._ranks
        landed = [rank * len(self._layers) + layer.index for rank in range(ranks.size)]  # where each rank says so
        try:
            if landing is not None:
                landing()
                publish(self._landed, landed[ranks.rank], number)
            if not ranks.primary:
                ranks.until(lambda: self._done[layer.index] >= number, Wait.READ_AFTER_SHARED_UPDATE)
                return
            if landing is not None:
                ranks.until(lambda: all(self._landed[each] >= number for each in landed), Wait.UPDATE_AFTER_LANDING)
                # What this rank's user code has written counts. What others' has, they drop in the step's turn.
                merge(member.block.memory for member in layer.family)
            work()
            publish(self._done, layer.index, number)
        except BaseException as error:
            if ranks.primary:
                ranks.fail(error)
            raise

    def bound(self, most: int) -> None:
        """Waits for as many updates as leave a slot for the next layer's gradients. Those of all others may be on their way."""
        super().bound(max(most, self._gradients.places.slots - 1))
