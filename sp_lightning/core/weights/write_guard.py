"""Write guard: records that user code may write a layer's weights in a way that no version counter shows.

Torch counts in-place writes of a tensor (``tensor._version``), so the engine detects them by comparing two lists of numbers. This
is enough for nearly all code, and then ``layer.guard`` is None. If user code has one of the following, the guard records it, and
:mod:`~sp_lightning.core.weights.writes` copies weights accordingly:

=========================  ==============  ==================================================================================
user code has              recorded in     treatment
=========================  ==============  ==================================================================================
a weight's ``.data``       ``exposed``     At the layer's release the weight is downloaded, and written to the host if it differs.
a view that outlives the   ``views``       Only the same layer may overwrite the slot (VIEWED). The view's values are copied to
layer's use                                the host before such a fetch, at the layer's next release, and at the end of the step.
a view that outlives the   ``digests``     The view and the host's weight are one memory on plain Lightning. Here they are two,
step                                       and each may be written at any time. So both are compared with earlier digests, and
                                           the written one is copied to the other. If both were written, an error is raised.
other memory for a weight  ``replaced``    User code has set ``param.data = other`` and holds ``other``. The weight stays in
                                           that memory in its layer's next uses. Before each use the memory is copied to the host.
                                           A master in such memory is used itself, and not its cast.
a weight of another dtype  ``retyped``     The slot has no place for the weight. The weight has device memory of its own, to which
                                           each use copies the host's values.
=========================  ==============  ==================================================================================

Programs that need them:

- ``exposed``: torchgeo's ``BYOLTask``; teachers as in fairscale #805 (``p.data = p * 0.999 + …``).
- ``digests``: WGAN's clipping through views that were taken in the first step. An error at the end of a step would also refuse
  programs that only read a kept view, such as a log of a weight.
- ``replaced``: bitsandbytes' 8-bit layer gives its weight the same copy in each forward; BYOL writes in place to new memory.
- ``retyped``: diffusers' layerwise casting (#10347); transformers' SwitchTransformers casts its router in each forward.

``diverged`` has the weights for which the slot may have other values than the host. For a weight outside ``diverged``, new memory
with the slot's values need not be copied.

:func:`guard_of` makes a guard when user code has the first of these, and :func:`drop_if_empty` removes the guard when it records
nothing any more.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor


class WriteGuard:
    """Records possible writes to one layer that no version counter shows. Weights are given by their index in the layer.

    Attributes:
        exposed: weights that user code may write at any time without a change of their version.
        diverged: weights for which the slot may have other values than the host.
        replaced: the other memory of weights (``param.data = other``), which user code holds as well.
        retyped: the memory of weights that were given another dtype.
        views: True if tensors that were made in an earlier use view the layer's slot.
        digests: the :class:`~sp_lightning.core.weights.writes.ViewDigests` with which views that outlive their step, and the
            host's weights, are compared. None if there is no such view, and within the step in which the views were made.
    """

    __slots__ = ("digests", "diverged", "exposed", "replaced", "retyped", "views")

    def __init__(self) -> None:
        self.exposed: set[int] = set()
        self.diverged: set[int] = set()
        self.replaced: dict[int, Tensor] = {}
        self.retyped: dict[int, Tensor] = {}
        self.views = False
        self.digests: Any = None

    def expose(self, indices: Iterable[int]) -> None:
        """Called when user code gets memory of these weights in the slot."""
        indices = tuple(indices)
        self.exposed.update(indices)
        self.diverged.update(indices)

    def replace(self, replaced: dict[int, Tensor]) -> None:
        """Records the other memory of weights that user code holds now. Weights outside ``replaced`` are exposed no longer."""
        self.replaced = replaced
        self.exposed.intersection_update(replaced)

    def leave_slot(self) -> None:
        """Called when the layer leaves its slot. Views of the slot do not show the layer's weights any more."""
        self.views = False
        self.digests = None

    def drop_views(self) -> None:
        """Called when only the layer's own tensors view the slot, and the host has all writes."""
        self.leave_slot()
        self.exposed.intersection_update(self.replaced)
        self.diverged.clear()


def guard_of(layer: Any) -> WriteGuard:
    """Returns the layer's guard. Makes one if the layer has none."""
    guard: WriteGuard | None = layer.guard
    if guard is None:
        guard = layer.guard = WriteGuard()
    return guard


def drop_if_empty(layer: Any) -> None:
    """Removes the layer's guard if it records nothing any more, so that uses of the layer need no more time."""
    guard = layer.guard
    if guard is not None and not (
        guard.exposed or guard.diverged or guard.replaced or guard.retyped or guard.views or guard.digests is not None
    ):
        layer.guard = None
