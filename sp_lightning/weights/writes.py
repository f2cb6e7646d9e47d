"""Which weights were written between two moments."""

from __future__ import annotations

from collections.abc import Iterable

from sp_lightning.weights.layer import StreamedLayer


class Writes:
    """The writes of some layers' weights since this object was made.

    A layer that the running backward has updated is left out: nobody may use it before the next step, and its update changes
    its weights at any time.
    """

    def __init__(self, layers: Iterable[StreamedLayer]) -> None:
        self._before = [(layer, layer.parameters.host_writes()) for layer in layers if not layer.owner.updated_early]

    def first(self) -> str | None:
        """The name of a weight that has other values since; None if there is none."""
        for layer, before in self._before:
            if not layer.owner.updated_early and (now := layer.parameters.host_writes()) != before:
                changed = zip(layer.planned.spans, zip(*before, strict=True), zip(*now, strict=True), strict=True)
                return next(span.name for span, old, new in changed if old != new)
        return None
