"""The first batches are watched; then k and k' are chosen, and every batch after them keeps to the budget."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from sp_lightning.device import Device
from sp_lightning.options import Overlap
from sp_lightning.plan import Plan, human_bytes
from sp_lightning.prediction import Rates, Visit, measured, predict
from sp_lightning.streamer import Streamer
from sp_lightning.timeline import Timeline
from sp_lightning.window import Window

log = logging.getLogger("lightning.pytorch.superpipeline")

# The first batch makes kernels, caches and workspaces; the second one is timed.
_TIMED = 1


class Tuning:
    """Chooses a streamer's window.

    Args:
        window: what is asked for, and what there is room for.
        streamer: whose slots are changed, between batches.
        device: the same as the streamer's; its count of the most memory in use is begun anew.
    """

    def __init__(self, window: Window, streamer: Streamer, device: Device) -> None:
        self._window = window
        self._streamer = streamer
        self._device = device
        self._batches = 0
        self._work: tuple[Sequence[Visit], Rates] | None = None
        self._timeline: Timeline | None = None
        self._overlap: Overlap = "off"
        self._size = 0  # of the largest batch whose memory was measured, in numbers
        self._next = 0  # of the one that runs now
        self._said = False
        self._again = False  # whether the window is to be chosen anew at the next batch
        device.reset_peak()

    def batch_starts(self, batch: Any, overlap: Overlap) -> None:
        """Nothing is under way: look at the batch before, and change the window if that is called for.

        Args:
            batch: that is to run. One that is larger than all before is expected to take as much more memory.
            overlap: how updates run.
        """
        if self._timeline is not None:
            self.stop_timing()
            layers = len(self._streamer.plan.layers)
            self._work = measured(self._timeline.take(), layers, synchronous=self._device.synchronous)
            self._timeline = None
            self._again = True
        self._overlap = overlap
        self._observe()
        self._next = sum(each.numel() for each in tree_leaves(batch) if isinstance(each, Tensor))
        if self._work is not None:
            self._fit()
        elif self._batches == _TIMED:
            self._timeline = self._device.make_timeline()
            self._device.timelines.append(self._timeline)
        self._batches += 1

    def stop_timing(self) -> None:
        """What comes now is no part of the batch: validation, or the next one."""
        if self._timeline in self._device.timelines:
            self._device.timelines.remove(self._timeline)

    def shrink(self) -> bool:
        """The device has run out of memory: the smallest window from here on. Returns whether it was larger."""
        self._observe(whole=False)
        smallest = self._window.smallest()
        smaller = smallest.slot_bytes < self._streamer.plan.slot_bytes
        if smaller:
            self._resize(smallest)
            self._again = self._work is not None
        return smaller

    def _observe(self, *, whole: bool = True) -> None:
        """Note what everything but weights has taken in the last batch, if it has come through as a ``whole``."""
        window, peak = self._window, self._device.peak_bytes()
        if peak is None:
            return
        rest = peak - self._streamer.weight_bytes
        if rest > window.rest:
            window.rest, window.rest_gradients = rest, self._streamer.plan.gradient_bytes
        if whole and self._next > self._size:
            self._size = self._next

    def _fit(self) -> None:
        window = self._window
        measured_rest = window.rest
        if self._next > self._size > 0:
            window.rest = math.ceil(window.rest * self._next / self._size)
        larger = window.rest > measured_rest
        if self._again or not window.fits(self._streamer.plan):
            self._choose("for a larger batch" if larger else "measured")
        self._again = larger  # what it has really taken is known after it
        window.rest = measured_rest

    def _choose(self, why: str) -> None:
        plan, before = self._window.choose(self._seconds), self._streamer.plan
        if (plan.k, plan.k_prime) != (before.k, before.k_prime):
            self._resize(plan)
        elif self._said:
            return
        self._said = True
        assert self._window.room is not None
        log.info(
            "Superpipeline: k = %d, k' = %d (%s), the fastest by prediction: %s on the device of %s%s.",
            plan.k, plan.k_prime, why, human_bytes(self._window.needs(plan)), human_bytes(self._window.room),
            "" if self._window.rest else ", weights and gradients only: activations are not counted here",
        )  # fmt: skip

    def _resize(self, plan: Plan) -> None:
        before, old = self._streamer.weight_bytes, self._streamer.plan
        try:
            self._streamer.resize(plan)
        except torch.OutOfMemoryError:
            self._streamer.resize(old)
            log.warning("Superpipeline: no room for k = %d, k' = %d after all.", plan.k, plan.k_prime)
        if self._streamer.weight_bytes < before:
            self._device.reset_peak()

    def _seconds(self, plan: Plan) -> float:
        if self._work is None:
            return 1 / plan.k  # nothing is known of the time yet: more is faster
        visits, rates = self._work
        mode = "off" if self._overlap == "auto" else self._overlap
        return predict(plan, visits, rates, overlap=mode, batches=2).seconds
