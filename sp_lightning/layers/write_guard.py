"""Write guard: how user code may write a layer's weights in a way that no version counter shows, and what is done about it.

Torch counts in-place writes of a tensor (``tensor._version``), so the engine finds them by comparing two lists. That is enough
for nearly all code, and then ``layer.guard`` is None. If user code does one of the following, the guard remembers it, and
:mod:`~sp_lightning.layers.write_back` acts on it:

=========================  ==============  ==================================================================================
user code has              the guard       what is done
=========================  ==============  ==================================================================================
a weight's ``.data``       ``exposed``     At the layer's release its values are copied to the host, written or not.
a view that outlives the   ``views``       The slot is not overwritten (the layer is HELD). Before the layer's next use, and at
layer's use                                the end of the step, the view's values are copied to the host.
a view that outlives the   ``digests``     The view and the host's weight are one memory on plain Lightning. Here they are two,
step                                       and each may be written at any time. So both are compared with their digests, and
                                           the one that was written is copied to the other. If both were: an error.
given a weight other       ``replaced``    The weight stays in that memory in its layer's next uses. It is copied to the host
memory, and holds it                       before each of them, as long as user code holds the memory.
given a weight another     ``retyped``     The slot has no place for it. It stays in device memory of its own, and each use
dtype                                      copies the host's values to it.
=========================  ==============  ==================================================================================

``viewed`` says where the slot may have other values than the host in the meantime: a weight whose new memory has the same values
as the slot need not be copied, unless it is one of these.

A guard is made by :func:`guard_of` when the first of these happens, and goes by :func:`drop_if_empty` when the last one is over.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from torch import Tensor


class WriteGuard:
    """What is known of unseen writes to one layer. All weights are given by their index in the layer.

    Attributes:
        exposed: weights that user code may write at any time without a change of their version.
        viewed: weights of which the slot may have other values than the host.
        replaced: the other memory of weights (``param.data = other``) which user code holds as well.
        retyped: the memory of weights that were given another dtype.
        views: whether tensors view the layer's slot that were made in an earlier use.
        digests: the :class:`~sp_lightning.layers.writes.ViewDigests` that such views, and the host's weights, are compared with.
            None within the step in which the views were made.
    """

    __slots__ = ("digests", "exposed", "replaced", "retyped", "viewed", "views")

    def __init__(self) -> None:
        self.exposed: set[int] = set()
        self.viewed: set[int] = set()
        self.replaced: dict[int, Tensor] = {}
        self.retyped: dict[int, Tensor] = {}
        self.views = False
        self.digests: Any = None

    def expose(self, indices: Iterable[int]) -> None:
        """User code gets memory of these weights in the slot."""
        indices = tuple(indices)
        self.exposed.update(indices)
        self.viewed.update(indices)

    def replace(self, replaced: dict[int, Tensor]) -> None:
        """User code holds this other memory of weights, and no other any more."""
        self.replaced = replaced
        self.exposed.intersection_update(replaced)

    def leave_slot(self) -> None:
        """The layer leaves its slot. What tensors view there is not the layer's any more."""
        self.views = False
        self.digests = None

    def drop_views(self) -> None:
        """No tensor but the layer's own views the slot. What was written there is on the host."""
        self.leave_slot()
        self.exposed.intersection_update(self.replaced)
        self.viewed.clear()


class Guarded(Protocol):
    """A :class:`~sp_lightning.layers.layer.StreamedLayer`."""

    guard: WriteGuard | None


def guard_of(layer: Guarded) -> WriteGuard:
    """Returns the layer's guard, which is made if there is none."""
    if layer.guard is None:
        layer.guard = WriteGuard()
    return layer.guard


def drop_if_empty(layer: Guarded) -> None:
    """Drops the layer's guard if nothing is left to guard, so that the layer's uses cost nothing more."""
    guard = layer.guard
    if guard is not None and not (
        guard.exposed or guard.viewed or guard.replaced or guard.retyped or guard.views or guard.digests is not None
    ):
        layer.guard = None
