"""Background updates of several ranks: the primary updates each layer, and the other ranks wait for the update."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from sp_lightning.core.device.device import Device, Wait
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.experimental.ranks.block_memory import merge, written_in_common
from sp_lightning.experimental.ranks.failures import LOST
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.experimental.ranks.reduced_gradients import ReducedGradients


class SharedUpdates(BackgroundUpdates):
    """Updates of several ranks in the background.

    A barrier follows each update, so on every rank a layer's parameters wait until the primary has updated the layer. A layer
    that is updated in backward is submitted as soon as its gradients are summed. In this case another barrier precedes the
    update. After it, the parts of the sum of all ranks have arrived, and no rank reads the layer's weights any more.

    The barriers of the background threads have their own process group. All ranks submit the same layers in the same order.

    Args:
        layers: all layers.
        device: runs work in its background thread, and waits for it.
        ranks: the ranks.
        gradients: the gradients that all ranks share.
    """

    def __init__(
        self, layers: Sequence[StreamedLayer], device: Device, ranks: Ranks, gradients: ReducedGradients
    ) -> None:
        super().__init__(layers, device)
        self._ranks = ranks
        self._gradients = gradients
        self._group = ranks.background

    def submit(self, layer: StreamedLayer, work: Callable[[], None], then: Callable[[], None] | None = None) -> None:
        common = ExitStack()
        with self._lock:
            self._finish(layer, Wait.READ_AFTER_UPDATE)
            update = partial(self._update, layer, self._gradients.arrival(layer), work)
            if self._ranks.primary:
                # From now on until the run has waited for the update, the layer's parameters and gradients are the shared memory.
                for member in layer.with_masters:
                    common.enter_context(written_in_common(member.block))
                common.enter_context(self._gradients.places.written_in_common([layer]))

            def after() -> None:
                common.close()
                if then is not None:
                    then()

            super().submit(layer, update, after)

    def _update(self, layer: StreamedLayer, arrival: Callable[[], None] | None, work: Callable[[], None]) -> None:
        """Updates a layer on the primary. The other ranks wait for the update. Runs in the background thread.

        Args:
            layer: the layer.
            arrival: if the layer is updated in backward, waits until this rank's part of the gradients' sum has arrived;
                otherwise None.
            work: the update.
        """
        ranks = self._ranks
        try:
            if arrival is not None:
                arrival()
                ranks.barrier(f"an update of {layer.name!r}", why=Wait.UPDATE_AFTER_LANDING, group=self._group)
            if ranks.primary:
                if arrival is not None:
                    # User code of the primary may have written to private pages of the layer. These writes are shared with all
                    # ranks. Outside of backward, `RankTurns.begin` has done so before the step.
                    merge(member.block.memory for member in layer.with_masters)
                work()
            ranks.barrier(
                f"the end of an update of {layer.name!r}", why=Wait.READ_AFTER_SHARED_UPDATE, group=self._group
            )
        except LOST:  # the error of another rank, which has reported it
            raise
        except BaseException as error:
            ranks.fail(error)
            raise

    def limit_pending(self, most: int) -> None:
        """Waits for updates until one slot is free for the next layer's gradients, or until at most ``most`` are under way.

        So gradients use all slots, and fewer waits are needed than on one device.
        """
        super().limit_pending(max(most, self._gradients.places.slots - 1))
