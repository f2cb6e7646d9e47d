"""Measures the memory and the upload stalls of the first batches, and chooses k so that every batch stays within the budget.

The first batches run with the smallest window. Before a batch that may need more memory, k is halved until the batch fits.

With ``activations="auto"``, a batch that was not measured runs with *headroom*: its activations are kept, and the oldest ones are
offloaded before memory is full. If that was necessary, the window is the smallest from then on, and headroom stays::

    headroom ──fits──▶ keep ──a larger batch──▶ headroom
        └──does not fit──▶ headroom, with the smallest window
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sp_lightning.capabilities.tuning.choices import Doublings
from sp_lightning.core.device.device import Device, Wait
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.core.plan.window import Window
from sp_lightning.core.torch_compat.private import tree_leaves
from sp_lightning.trainer.tuner import BaseTuner

if TYPE_CHECKING:
    from sp_lightning.capabilities.activations.calls import UnitModes


class Tuner(BaseTuner):
    """Chooses an engine's window, and has activations offloaded before memory is full.

    Args:
        window: the options of the user, and the plans that fit.
        engine: the engine whose slots change between batches.
        device: the engine's device. The tuner resets the device's peak-memory counter for its measurements.
        log: the logger for choices.
        window_too: True to choose k.
        evicts: True to offload the oldest activations if not all fit.
    """

    def __init__(
        self,
        window: Window,
        engine: Engine,
        device: Device,
        log: logging.Logger,
        *,
        window_too: bool = True,
        evicts: bool = False,
    ) -> None:
        super().__init__(window, engine)
        self._log = log
        self._device = device
        self._window_too = window_too
        self._activations = cast("UnitModes", engine.activations) if evicts else None
        self._batches = 0
        self._accumulate = 1  # the number of batches of an optimizer step
        self._doublings = Doublings(window)
        self._most_slots = 0  # bytes of the largest slots that the running search has tried
        self._resized = False  # True if the next batch fills new slots, so that it is not timed
        self._begun: tuple[float, float] | None = None  # clock and stalls at the begin of the batch that is timed
        self._timed: list[tuple[float, float]] = []  # the seconds and stalls of batches with the present k
        self._full = False  # True if activations were offloaded, because not all fit
        self._size = 0  # the size of the largest batch whose memory was measured
        self._next = 0  # the size of the batch that runs now
        self._said = ""  # the last choice that was logged
        self._why = "the first batches"  # the reason for the present k
        self._again = window_too  # True if the plan is chosen again before the next batch
        self.expect_more()
        if window_too:
            device.begin_peak()
        if not self._doublings.over:
            self.remark = "k is doubled while uploads stall the batches."

    def batch_starts(self, batch: Any, accumulate: int) -> None:
        """Reads the measurements of the last batch, and changes the window if necessary.

        Args:
            batch: the next batch. If it is the largest so far, its memory use is expected to grow in the same proportion.
            accumulate: the number of batches for each optimizer step, which are timed together.
        """
        self.stop_timing()
        self._accumulate = accumulate
        self._observe()
        if self._batches == 1 and (free := self._device.free_bytes()) is not None:
            # The first batch has loaded kernels, and libraries have allocated memory outside of torch's allocator.
            if self._window_too:
                self._device.begin_peak()
            self.window.lower_budget(free + (self._device.peak_bytes() or 0))
        self._size = max(self._size, self._next)
        self._next = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        self._look_at_headroom()
        factor = max(1.0, self._next / self._size) if self._size else 1.0
        if self._window_too and not self._full and self._batches:  # the first batch also compiles kernels
            if len(self._timed) >= accumulate:
                self._double()
            self._fit(factor)
            self._time()
        self._forget_larger()
        more = math.ceil(self.window.rest * (factor - 1))
        if more and not self.window.fits(self.engine.plan, more=more):
            self.expect_more()
        self._batches += 1

    def expect_more(self) -> None:
        """Runs the next batch with headroom, because it may use more memory."""
        if self._activations is not None:
            self._activations.watch_memory(self._left, lambda: self.engine.plan.gradient_bytes)

    def _look_at_headroom(self) -> None:
        """Ends headroom if the last batch has fitted. If its activations were offloaded, changes to the smallest window for good.

        The memory that the batch would have used is not known, so no larger window is chosen.
        """
        headroom = None if self._activations is None else self._activations.headroom
        if headroom is None or self._full:
            return
        if headroom.evicted_bytes:
            self._full = True
            if (smallest := self.window.smallest()).slot_bytes < self.engine.plan.slot_bytes:
                self._resize(smallest)
        elif headroom.used and self._activations is not None:
            self._activations.headroom = None

    def _left(self, kept: Callable[[], int]) -> int:
        """Returns the bytes that are left of the budget and of the device's memory.

        Args:
            kept: counts the bytes of kept activations.
        """
        window, free = self.window, self._device.free_bytes()
        room = window.filled_room
        assert room is not None  # activations are offloaded only if there is a budget
        if free is None or window.free is None:  # on the CPU
            return room - self.engine.weight_bytes - kept()
        # window.free - free is what this process has allocated since set-up, workspaces included.
        return min(room - (window.free - free), free)

    def stop_timing(self) -> None:
        """Reads the time and the stalls of the batch that is timed, which is over."""
        if self._begun is not None:
            self._timed.append(self._measured(*self._begun))
            self._begun = None

    def shrink(self) -> None:
        """Changes to the smallest window, after the device has run out of memory.

        From now on activations are offloaded before memory is full, and earlier if they were offloaded already.
        """
        self._observe()  # first, because the next lines change how much of the memory was used by weights
        smallest = self.window.smallest()
        if smallest.slot_bytes < self.engine.plan.slot_bytes:
            self._resize(smallest)
            self._again = True
        elif self._activations is not None and self._activations.headroom is not None:
            self.window.lower_budget()
        self.expect_more()

    # ------------------------------------------------------------------ measurements

    def _time(self) -> None:
        """Times the next batch, if k is not chosen yet."""
        if self._doublings.over or self.engine.plan.k != self._doublings.k:
            return
        if not self._resized:
            self._begun = self._device.clock(), self._stalls()
        self._resized = False

    def _stalls(self) -> float:
        return self._device.stall_seconds(Wait.USE_AFTER_FETCH, Wait.USE_AFTER_RESIDENTS)

    def _measured(self, clock: float, stalls: float) -> tuple[float, float]:
        """Returns the seconds and the stalls since the clock and the stalls were these."""
        return self._device.clock() - clock, self._stalls() - stalls

    def _double(self) -> None:
        """Chooses the next k by the timed batches."""
        seconds, stalls = map(sum, zip(*self._timed, strict=True))
        k = self._doublings.k
        self._doublings.measured(seconds, stalls)
        stalled = f"uploads stalled {stalls / max(seconds, 1e-9):.0%} of the time"
        taken_back = self._doublings.over and self._doublings.k < k
        self._why = "larger windows were no faster" if taken_back else stalled
        self._timed.clear()
        self._again = True

    def _forget_larger(self) -> None:
        """When the search has ended with a smaller window than it has tried, gives back the memory, and measures peaks anew."""
        if self._doublings.over or self._full:
            if self._most_slots > self.engine.plan.slot_bytes:
                self._device.release_unused()
                self.engine.begin_peaks()
            self._most_slots = 0

    def _observe(self) -> None:
        """Records the memory use of everything but weights in the last batch; nothing if activations were offloaded."""
        window, peak = self.window, self._device.peak_bytes()
        headroom = None if self._activations is None else self._activations.headroom
        if headroom is not None and headroom.evicted_bytes:
            return
        if peak is None:
            window.rest = max(window.rest, 0 if headroom is None else headroom.most_kept)
        elif (rest := peak - self.engine.weight_bytes) > window.rest:
            window.rest, window.rest_gradients = rest, self.engine.plan.gradient_bytes
            window.rest_steps = self.engine.plan.staying_bytes if self._batches > self._accumulate else 0

    # ------------------------------------------------------------------ choices

    def _fit(self, factor: float) -> None:
        """Chooses again if there are new measurements, or if the next batch would not fit with the present choice.

        Args:
            factor: the size of the next batch relative to the largest one so far; at least 1.
        """
        window = self.window
        before, window.rest = window.rest, math.ceil(window.rest * factor)
        larger = window.rest > before
        if self._again or not window.fits(self.engine.plan):
            self._choose(larger)
        self._again = larger  # the larger batch is measured, so choose again after it
        window.rest = before

    def _choose(self, larger: bool) -> None:
        """Changes to the chosen k, halved until it fits, and logs the plan if it is new.

        Args:
            larger: True if the memory use of a larger batch is only expected. Otherwise a k that does not fit never will.
        """
        window, before = self.window, self.engine.plan
        plan = window.plan(self._doublings.k)
        while window.k == "auto" and plan.k > 1 and not window.fits(plan):
            plan = window.plan(plan.k // 2)
        if plan.k < self._doublings.k and not larger:
            self._doublings.stop(plan.k)
        if plan.k != before.k:
            self._resize(plan)
            if self.engine.plan.k < plan.k:
                self._doublings.stop(self.engine.plan.k)
        plan = self.engine.plan
        said = f"k = {plan.k}, k' = {plan.k_prime}"
        if said == self._said:
            return
        self._said = said
        assert window.room is not None
        self._log.debug(
            "Superpipeline: %s (%s): %s on the GPU of %s%s.",
            said, "for a larger batch" if larger else self._why, human_bytes(window.needs(plan)), human_bytes(window.room),
            "" if window.rest else ", weights and gradients only: activations are not counted here",
        )  # fmt: skip

    def _resize(self, plan: Plan) -> None:
        """Changes the slots to those of a plan. If the device has no memory for them, the present plan stays; else the smallest.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the smallest plan either.
        """
        before, old = self.engine.weight_bytes, self.engine.plan
        self._resized, self._begun = True, None
        self._timed.clear()
        for choose in (lambda: plan, lambda: old, self.window.smallest):
            each = choose()
            if not self._doublings.over:
                self._most_slots = max(self._most_slots, each.slot_bytes)
            try:
                self.engine.resize(each)
                break
            except torch.OutOfMemoryError as error:
                self._log.warning("Superpipeline: no room for k = %d, k' = %d after all.", each.k, each.k_prime)
                failed = error
        else:
            raise failed
        if self.engine.weight_bytes < before:
            self._device.begin_peak()
