"""The host store of several ranks as the source of layers' bytes: what this rank's user code has written comes before it."""

from __future__ import annotations

from sp_lightning.device.waits import Wait
from sp_lightning.engine.host_source import HostSource
from sp_lightning.store.block_memory import SharedBlockMemory
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import Staged


class SharedSource(HostSource):
    """The :class:`~sp_lightning.weights.slots.BlockSource` of several ranks.

    The primary keeps casts up to date in the memory that all ranks have. A layer that this rank's user code has written since
    the last update comes from this rank's own view, with casts of its own. That memory is not page-locked.
    """

    def stage(self, layer: StreamedLayer) -> Staged:
        """Returns the layer's bytes as this rank's user code sees them."""
        self.wait(layer)
        for member in layer.family:
            self._adopt(member)
        written = [memory_of(member).look() for member in layer.family]  # all of them: each notes what it sees
        if layer.masters is not None and any(written):
            memory_of(layer).written = True
            layer.casts.doubt()
            self._slots.synchronize(Wait.CAST_AFTER_FETCH, layer)
            layer.casts.refresh()
        else:
            layer.casts.trust()
        return layer.block.weights, None


def written_here(layer: StreamedLayer) -> bool:
    """Whether a layer that was staged comes from this rank's own view."""
    return memory_of(layer).written


def memory_of(layer: StreamedLayer) -> SharedBlockMemory:
    """The memory of a layer's block."""
    assert isinstance(layer.block.memory, SharedBlockMemory)
    return layer.block.memory
