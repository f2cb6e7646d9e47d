"""The turns of ranks: the primary changes the shared weights while the other ranks wait.

Between two turns, writes of user code to weights are private to their rank.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from zlib import crc32

from torch import nn

from sp_lightning.core.device.device import Wait
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.step import Step
from sp_lightning.core.engine.turns import Turns
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.ring import Staged
from sp_lightning.experimental.ranks.block_memory import SharedBlockMemory, merge, written_in_common
from sp_lightning.experimental.ranks.ranks import Ranks
from sp_lightning.experimental.ranks.reduced_gradients import ReducedGradients


class RankTurns(Turns):
    """The turns of one rank.

    Args:
        lock: the engine's lock.
        ranks: the ranks.
        layers: all layers.
        source, step, gradients: the parts of the engine.
    """

    several = True

    def __init__(
        self,
        lock: threading.RLock,
        ranks: Ranks,
        layers: Sequence[StreamedLayer],
        source: SharedSource,
        step: Step,
        gradients: ReducedGradients,
    ) -> None:
        self._lock = lock
        self.ranks = ranks
        self._layers = layers
        self._source = source
        self._step = step
        self._gradients = gradients

    @contextmanager
    def primary(self, what: str, *, weights: bool) -> Iterator[None]:
        """A context for the primary's turn, in which ``param.grad`` is shared memory. It begins once all ranks have reached it.

        Args:
            what: the purpose of the turn. If another rank has reached a turn for another purpose, an error is raised.
            weights: True if the turn changes weights. In this case the parameters are shared memory as well, private writes end
                before the turn, and casts are computed after it.
        """
        self.begin(what, weights=weights)
        with ExitStack() as stack:
            for layer in self._layers if weights else ():
                stack.enter_context(written_in_common(layer.block))
            stack.enter_context(self._gradients.places.written_in_common(self._layers))
            yield
        if weights:
            self.cast()

    def begin(self, what: str, *, weights: bool) -> bool:
        """Begins the primary's turn, on any rank: the primary shares its private writes, and the other ranks drop theirs.

        Returns:
            True on the primary if it has shared writes to weights, so that their casts are out of date.
        """
        self._prepare()
        if not self.ranks.primary:
            # The primary merges only after the barrier, when no other rank reads the shared weights any more.
            self._merge(weights)
        self.ranks.begin_turn(what)
        return self.ranks.primary and self._merge(weights)

    def gather(self, what: Callable[[], str]) -> None:
        """Waits for updates and for all ranks. Shares private writes of the primary's user code, with new casts."""
        self._step.updates.finish()
        if self.begin(what(), weights=True):
            self.cast()

    def must_be_alike(self, why: str) -> None:
        """Checks that all ranks have written the same weights since the last turn. Collective.

        Args:
            why: the reason, for the error.

        Raises:
            RuntimeError: ranks have written different weights.
        """
        self._prepare()
        found = {layer.name: memory_of(layer).digest(layer.planned.spans) for layer in self._layers}
        written = [name for name, digest in found.items() if digest]
        if not self.ranks.same(crc32(repr(found).encode()) if written else 0, "what was written between batches"):
            raise RuntimeError(
                f"Ranks have written different weights since the last update ({self.ranks.name} has written "
                f"{', '.join(map(repr, written)) or 'nothing'}), and {why}. Write them at the beginning of training_step, or the "
                "same on all ranks."
            )

    def follow(self, what: str, *, weights: bool) -> float:
        """Waits for the primary's turn, on another rank. Returns the number with which the primary has ended the turn."""
        self.begin(what, weights=weights)
        return self.ranks.end_turn()

    def merge(self) -> None:
        """Shares the primary's private writes to weights with all ranks, and drops those of other ranks. Collective."""
        self._prepare()
        self.ranks.begin_turn("an exchange of weights")
        if self._merge_weights() and self.ranks.primary:
            self.cast()
        self.ranks.end_turn()

    @contextmanager
    def loading(self, module: nn.Module) -> Iterator[None]:
        """A context for loading a state into a module. Afterwards all ranks have the primary's values. Collective at its end.

        Other ranks drop their private pages after each submodule is loaded, so that they do not keep a whole copy of the weights.
        """
        forget = [] if self.ranks.primary else [m for m in module.modules() if m._parameters]
        handles = [m.register_load_state_dict_post_hook(self._forget) for m in forget]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
        self.merge()

    def _forget(self, *_: object) -> None:
        self._merge_weights()

    def _merge(self, weights: bool) -> bool:
        self._gradients.places.merge()
        return weights and bool(self._merge_weights())

    def _merge_weights(self) -> int:
        return merge(layer.block.memory for layer in self._layers)

    def cast(self) -> None:
        """Computes all casts again, in the shared memory. Called on the primary."""
        for layer in self._layers:
            layer.casts.invalidate()
            layer.casts.refresh()

    def _prepare(self) -> None:
        """Copies weights that user code has written on the device to the host, adopts new memory, and waits for uploads."""
        with self._lock:
            self._step.write_back()
            self._source.adopt()
            self._source.synchronize()


class SharedSource(HostSource):
    """The :class:`~sp_lightning.core.layers.ring.BlockSource` of several ranks.

    The primary keeps the casts in shared memory up to date. If this rank's user code has written to a layer since the last
    update, the layer is uploaded from this rank's private view, with casts of its own. Private pages are not page-locked.
    """

    def adopt(self) -> None:
        """Adopts memory that user code has given to parameters of any layer."""
        for layer in self._layers:
            if displaced := layer.block.displaced:
                self._adopt(layer, displaced)

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's bytes as this rank's user code sees them, in shared memory or in the private view.

        Waits for the layer's update. If this rank has written to a layer with casts, computes its casts in the private view.
        """
        self.wait(layer)
        for member in layer.with_masters:
            if displaced := member.block.displaced:
                self._adopt(member, displaced)
        written = [
            memory_of(member).look() for member in layer.with_masters
        ]  # a list, because each `look` also records its result
        if layer.masters is not None and any(written):
            memory_of(layer).written = True
            layer.casts.invalidate()
            self._slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
            layer.casts.refresh()
        else:
            layer.casts.mark_current()
        return layer.block.weights, None


def memory_of(layer: StreamedLayer) -> SharedBlockMemory:
    """Returns the memory of a layer's block."""
    assert isinstance(layer.block.memory, SharedBlockMemory)
    return layer.block.memory
