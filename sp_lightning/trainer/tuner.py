"""The interface by which a run's window and modes of activations change between batches."""

from __future__ import annotations

from typing import Any

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.window import Window


class BaseTuner:
    """Keeps the first plan, and makes room after the device has run out of memory.

    :class:`sp_lightning.capabilities.tuning.tuner.Tuner` overrides it: it measures batches and chooses k. No step may run
    during a call.

    Args:
        window: the window that the user asked for, and the windows that fit.
        engine: the engine.

    Attributes:
        remark: a sentence for the user about the choice, before the first batch; empty if there is none.
    """

    remark = ""

    def __init__(self, window: Window, engine: Engine) -> None:
        self.window = window
        self.engine = engine

    def batch_starts(self, batch: Any, accumulate: int) -> None:
        """Called before each batch of the loop that the run is for (not of a validation within training).

        Args:
            batch: the batch.
            accumulate: the number of batches for each optimizer step. They differ in what they upload.
        """

    def expect_more(self) -> None:
        """Called when the next batch may take more memory than earlier batches, because more weights are trained."""

    def stop_timing(self) -> None:
        """Called when other code follows the last batch, for example validation, whose time is not the batch's."""

    def shrink(self) -> None:
        """Takes the smallest window after the device has run out of memory. If the user gave k, this does nothing."""
        if self.window.auto:
            plan = self.engine.plan
            smallest = self.window.smallest()
            if smallest.slot_bytes < plan.slot_bytes:
                self.engine.resize(smallest)
