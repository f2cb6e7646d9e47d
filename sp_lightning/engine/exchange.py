"""Exchanges what modules hold: the host's parameters between steps, the device's while a step runs."""

from __future__ import annotations

from collections.abc import Sequence

from sp_lightning.engine.lent_weights import LentWeights
from sp_lightning.weights.buffers import OnTheDevice
from sp_lightning.weights.pruned import PrunedWeights
from sp_lightning.weights.residents import Residents
from sp_lightning.weights.swap import Swap
from sp_lightning.weights.weight_watch import WeightWatch


class Exchange:
    """Exchanges parameters, and the buffers that are beside them. The caller holds the engine's lock.

    Args:
        swap: swaps the parameters.
        residents: the residents, which are up to date whenever modules hold the device's parameters.
        lent: is told that residents may be written.
        pruned, averages: the buffers that are on the device only within a step.
        watch: looks for writes of the host's weights, if ``check_writes`` asks for it; otherwise None.
    """

    def __init__(
        self,
        swap: Swap,
        residents: Residents,
        lent: LentWeights,
        pruned: PrunedWeights,
        averages: Sequence[OnTheDevice],
        watch: WeightWatch | None,
    ) -> None:
        self._swap = swap
        self._residents = residents
        self._lent = lent
        self._pruned = pruned
        self._averages = averages
        self._watch = watch

    @property
    def on_device(self) -> bool:
        """Whether the modules hold device parameters."""
        return self._swap.on_device

    @property
    def changed(self) -> bool:
        """Whether the user replaced or renamed modules or parameters, or gave a parameter another dtype or shape."""
        return self._swap.changed()

    def to_device(self) -> bool:
        """Puts the device's parameters into the modules, and brings residents up to date.

        Returns:
            Whether the modules held the host's parameters before.
        """
        was_away = not self._swap.on_device
        if was_away:
            self._residents.group.ask(before_use=False)
            self._swap.hold_device()
            self._pruned.hold_device()
        self._residents.refresh()
        if self._watch is not None:
            self._lent.suspect(self._residents.group)
        return was_away

    def to_host(self) -> None:
        """Puts the host's parameters into the modules."""
        if self._swap.on_device:
            self._residents.group.ask(before_use=True)
            self._pruned.hold_host()
            for average in self._averages:
                average.send_back()
            if self._watch is not None:
                self._watch.look_away()
            self._swap.hold_host()  # last, so that a call that was interrupted is repeated

    def watch_captured(self, watch: bool, *, thread: int | None = None) -> None:
        """Sets whether what is computed with the host's parameters for a graph is computed with the device's.

        Args:
            watch: whether it is.
            thread: the identifier of the thread that runs the step; None for the same as before.
        """
        if watch:
            self._swap.captured.watch(thread)
        else:
            self._swap.captured.look_away()

    def watch_forward(self, *, begins: bool) -> None:
        """Does the same as a forward that is within backward begins or ends."""
        self._swap.captured.watch_forward(begins)

    def close(self) -> None:
        """Drops the device parameters. Buffers stay on the host for good."""
        self._swap.close()
        for average in self._averages:
            average.close()
