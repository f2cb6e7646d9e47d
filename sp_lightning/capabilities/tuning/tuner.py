"""Measures the first batches, then chooses k, k' and modes of activations so that every batch stays within the budget.

Activations are kept as long as all of them fit. An unmeasured batch runs with *headroom*: it keeps activations, and
offloads the oldest ones before the memory is full. If that was necessary, two batches are measured, and the batch after them runs
with modes that were chosen::

    headroom ──fits──▶ keep ──a larger batch──▶ headroom
        └──does not fit──▶ trial (all offloaded, each forward twice) ──▶ timed ──▶ chosen
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor

from sp_lightning.capabilities.tuning.choices import choose_window
from sp_lightning.capabilities.tuning.simulator import Walk
from sp_lightning.capabilities.tuning.visits import Prediction, Rates, Visit, measured
from sp_lightning.core.device.device import Device
from sp_lightning.core.device.timeline import Timeline
from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.engine.tuner import BaseTuner
from sp_lightning.core.observe.messages import degrading, say_once
from sp_lightning.core.plan.choices import Mode, Modes, Overlap
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import enough_bytes, human_bytes
from sp_lightning.core.plan.window import Window
from sp_lightning.core.torch_compat.private import tree_leaves

if TYPE_CHECKING:
    from sp_lightning.capabilities.activations.calls import UnitModes
    from sp_lightning.capabilities.tuning.balance import ActivationMemory, Balance

# The index of the batch that is timed. The batch before it compiles kernels and fills caches and workspaces.
_TIMED = 1

_READ_OFTEN = 3
"""No layer stays on the GPU after this number of consecutive steps in which staying layers were copied to the host."""


class Tuner(BaseTuner):
    """Chooses a streamer's window and the modes of its activations.

    Args:
        window: the options of the user, and the plans that fit.
        streamer: the engine whose slots and modes of activations change between batches.
        device: the streamer's device. The tuner resets the device's peak-memory counter for its measurements.
        log: the logger for choices.
        window_too: True to choose the window.
        modes_too: True to choose modes of activations as soon as not all activations fit. All units begin with ``"keep"``.
        alone: True if nothing else in this process uses the device's memory.
    """

    def __init__(
        self,
        window: Window,
        streamer: Streamer,
        device: Device,
        log: logging.Logger,
        *,
        window_too: bool = True,
        modes_too: bool = False,
        alone: bool = True,
    ) -> None:
        super().__init__(window, streamer)
        self._log = log
        self._device = device
        self._window_too = window_too
        self._activations = cast("UnitModes", streamer.activations) if modes_too else None
        self._alone = alone
        self._batches = 0
        self._timed: tuple[Sequence[Visit], Rates] | None = (
            None  # the visits of the timed batch, without second forwards
        )
        self._balanced = False  # True if modes are chosen, because not all activations fit
        self._memory: ActivationMemory | None = None  # of the batch with all activations offloaded
        self._balance: Balance | None = None  # of the timed batch, if modes are chosen
        self._timeline: Timeline | None = None
        self._measures = True  # False after a measurement has failed
        self._overlap: Literal["off", "forward", "backward"] = "off"
        self._size = 0  # the size of the largest batch whose memory was measured
        self._next = 0  # the size of the batch that runs now
        self._said = ""  # the last choice that was logged
        self._again = False  # True if the window is chosen again before the next batch
        self._anew = False  # True if the memory of activations must be measured again
        self.expect_more()
        if window_too:
            self.remark = "k and k' are chosen once two batches have been measured."
            device.begin_peak()

    def batch_starts(self, batch: Any, overlap: Overlap) -> None:
        """Reads the measurements of the last batch, and changes the window or modes of activations if necessary.

        The device must be idle.

        Args:
            batch: the next batch. If it is the largest so far, its memory use is expected to grow in the same proportion.
            overlap: when optimizer steps run.
        """
        if self._timeline is not None:
            with self._measuring():
                self._read_timeline(self._timeline)
        if self.window.may_stay and self.streamer.plan.stay and self.streamer.updates.landed_in_a_row >= _READ_OFTEN:
            self._log.info(
                "Superpipeline: user code reads or writes weights in each step (a callback, say), so layers do not stay on the "
                "GPU. gpu_layers=%d has them stay nevertheless.", len(self.streamer.plan.stay)
            )  # fmt: skip
            self.window.let_none_stay()
            self._again = True
        self._overlap = "off" if overlap == "auto" else overlap
        self._observe()
        if self._batches == 1 and (free := self._device.free_bytes()) is not None:
            # The first batch has loaded kernels, and libraries have allocated memory outside of torch's allocator.
            if self._window_too:
                self._device.begin_peak()
            self.window.lower_budget(free + (self._device.peak_bytes() or 0))
        self._size = max(self._size, self._next)
        self._next = sum(leaf.numel() for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        if self._activations is not None:
            headroom = self._activations.headroom
            if self._anew or (headroom is not None and (headroom.evicted_bytes or headroom.lacks)):
                self._begin_balancing(self._activations)
            elif headroom is not None and headroom.used:
                self._activations.headroom = None
        factor = max(1.0, self._next / self._size) if self._size else 1.0
        if self._timed is not None:
            self._fit(factor)
        elif (
            self._timeline is None
            and self._measures
            and self._batches >= _TIMED
            and (self._memory if self._balanced else self._window_too)
        ):
            self._time()
        more = math.ceil(self.window.rest * (factor - 1))
        if more and not self._balanced and not self.window.fits(self.streamer.plan, more=more):
            self.expect_more()
        self._batches += 1

    def expect_more(self) -> None:
        """Prepares for a batch that may use more memory. If modes are chosen, it is measured; otherwise it runs with headroom."""
        self._anew = self._balanced
        if self._activations is not None and not self._balanced and self._activations.headroom is None:
            self._activations.watch_memory(self._left, self.streamer.plan.gradient_bytes)

    def _left(self, kept: Callable[[], int]) -> int:
        """Returns the bytes that are left of the budget and of the device's memory.

        Args:
            kept: counts the bytes of kept activations.
        """
        window, free = self.window, self._device.free_bytes()
        room = window.filled_room
        assert room is not None  # modes are chosen only if there is a budget
        if free is None or window.free is None:  # on the CPU
            return room - self.streamer.weight_bytes - kept()
        if self._alone:  # window.free - free is what this process has allocated since set-up, workspaces included
            return min(room - (window.free - free), free)
        return min(room - self.streamer.weight_bytes - kept(), free)

    def _begin_balancing(self, activations: UnitModes) -> None:
        """Starts to choose modes, because not all activations fit.

        The next batch measures the minimum memory of activations, and finds units that cannot be recomputed.
        """
        window, streamer = self.window, self.streamer
        if not self._balanced:
            self._log.info(
                "Superpipeline: the activations of a batch do not fit into GPU memory. The next two batches measure them; "
                'then each layer\'s are kept, recomputed or offloaded, with the same results (activations="auto").'
            )
            if streamer.found.grouping_advice:
                say_once(self._log, f"Superpipeline: {streamer.found.grouping_advice}")
        self.stop_timing()
        self._timeline = self._timed = self._memory = self._balance = activations.headroom = None
        self._again = self._anew = False
        self._balanced = True
        activations.calls = ()
        activations.offload.counts_small = True
        window.fill()
        if (smallest := window.smallest()).slot_bytes < streamer.plan.slot_bytes:
            self._resize(smallest)
        activations.choose(self._all("offload"))
        activations.recompute.in_trial = True
        self._device.begin_peak()

    def stop_timing(self) -> None:
        """Ends the measurement of time: validation and the next batch are not part of the timed batch."""
        if self._timeline in self._device.timelines:
            self._device.timelines.remove(self._timeline)

    def shrink(self) -> None:
        """Changes to the smallest window and the modes with the least memory, after the device has run out of memory.

        Fewer layers stay on the GPU. If all activations were kept and the window was not the smallest, the modes do not change.
        """
        self._observe()  # first, because the next lines change how much of the memory was used by weights
        self.window.let_fewer_stay(self.streamer.plan)
        smallest = self.window.smallest()
        smaller = smallest.slot_bytes < self.streamer.plan.slot_bytes
        modes = self.streamer.activations.modes
        if smaller:
            self._resize(smallest)
        if self._balanced:
            if self._memory is not None:
                self._carry_out(self._all(self._memory.least_mode(self._largest)))
            self.window.lower_budget()  # a batch did not fit into the budget, although the measurements predicted that it would
        elif smaller:
            self.expect_more()
        elif self._activations is not None:
            self._begin_balancing(self._activations)
        if self._timed is not None and (smaller or self.streamer.activations.modes != modes):
            self._again = True

    # ------------------------------------------------------------------ measurements

    def _time(self) -> None:
        """Times the next batch.

        If modes are being chosen and memory allows, the batch recomputes its units. Copies of offloaded activations would slow
        computation down and distort the times of layer calls.
        """
        recompute = self._all("recompute")
        if self._balanced and self.window.fits(self.streamer.plan, more=self._more(recompute)):
            self._carry_out(recompute)
        with self._measuring():
            self._timeline = self._device.make_timeline()
            self._device.timelines.append(self._timeline)

    @contextmanager
    def _measuring(self) -> Iterator[None]:
        """A context for the measurement of a batch. If it fails, no further batch is measured, and the choices stay."""
        self._measures = False
        with degrading(self._log, "The measurement of a batch", "k, k' and the modes of activations stay as they are"):
            yield
            self._measures = True
        if not self._measures:
            self._timeline = None

    def _read_timeline(self, timeline: Timeline) -> None:
        """Reads visits and rates from the timeline of the timed batch. The next batch runs with a new choice."""
        self.stop_timing()
        layers = self.streamer.plan.layers
        visits, rates = measured(
            timeline.take(), len(layers), synchronous=self._device.synchronous, stay=self.streamer.plan.stay
        )
        if self._memory is not None:
            from sp_lightning.capabilities.tuning.balance import Balance, without_second_forwards

            if "recompute" in self.streamer.activations.modes.values():
                visits = without_second_forwards(visits)
            index_of = {layer.name: index for index, layer in enumerate(layers)}
            self._balance = Balance(self._memory.measured, index_of, visits, rates)
        self._timed = visits, rates
        self._timeline = None
        self._again = True

    def _observe(self) -> None:
        """Records the memory use of everything but weights in the last batch. Ends the trial if that was its batch."""
        window, activations, peak = self.window, self._activations, self._device.peak_bytes()
        kept = 0
        if activations is not None:
            if self._balanced and self._memory is None and activations.calls:
                from sp_lightning.capabilities.tuning.balance import ActivationMemory

                self._memory = ActivationMemory(activations.calls, self._next)
                activations.recompute.in_trial = False
                activations.offload.counts_small = False
            if activations.headroom is not None:
                if activations.headroom.evicted_bytes or activations.headroom.lacks:
                    return  # the peak belongs to no choice of modes
                kept = activations.headroom.most_kept
        if peak is None:
            window.rest = max(window.rest, kept if self._memory is None else self._memory.least(self._largest))
        elif (rest := peak - self.streamer.weight_bytes - self._more(self.streamer.activations.modes)) > window.rest:
            window.rest, window.rest_gradients = rest, self.streamer.plan.gradient_bytes

    @property
    def _largest(self) -> int:
        """The size of the largest batch so far, in elements of its tensors."""
        return max(self._size, self._next)

    def _more(self, modes: Modes) -> int:
        """Bytes that activations take with these modes beyond the least that they take with any; 0 if none are chosen."""
        size = self._largest
        return 0 if self._memory is None else self._memory.peak(modes, size) - self._memory.least(size)

    # ------------------------------------------------------------------ choices

    def _fit(self, factor: float) -> None:
        """Chooses again if there are new measurements, or if the next batch would not fit with the present choice.

        Args:
            factor: the size of the next batch relative to the largest one so far; at least 1.
        """
        window = self.window
        before, window.rest = window.rest, math.ceil(window.rest * factor)
        larger = window.rest > before
        if self._again or not window.fits(self.streamer.plan, more=self._more(self.streamer.activations.modes)):
            self._choose("for a larger batch" if larger else "measured")
        self._again = larger  # the larger batch is measured, so choose again after it
        window.rest = before

    def _choose(self, why: str) -> None:
        """Changes to the window and modes with the fastest predicted batch, and logs the choice if it is new.

        Args:
            why: the reason for the choice, for the log.
        """
        window, before = self.window, self.streamer.plan
        plan = choose_window(window, self._seconds)
        if not self._balanced:  # otherwise activations fill the rest of the memory
            plan = window.with_staying(window.with_experts(plan))
        # A resize empties the cache, so a slightly larger cache is not worth it.
        same_cache = before.cache_bytes <= plan.cache_bytes <= before.cache_bytes + before.cache_bytes // 8
        if (plan.k, plan.k_prime, plan.stay) != (before.k, before.k_prime, before.stay) or not same_cache:
            self._resize(plan)
        plan, activations = self.streamer.plan, self.streamer.activations
        said = f"k = {plan.k}, k' = {plan.k_prime}"
        if plan.stay:
            said += f"; {len(plan.stay)} of {len(plan.layers)} layers stay on the GPU with their optimizer state"
        if self._balanced:
            self._carry_out(self._modes_for(plan))
            assert self._activations is not None
            said += f"; activations: {self._activations.summary}"
        if said == self._said:
            return
        self._said = said
        needs = window.needs(plan) + self._more(activations.modes)
        assert window.room is not None
        self._log.debug(
            "Superpipeline: %s (%s), the fastest by prediction: %s on the GPU of %s%s.",
            said, why, human_bytes(needs), human_bytes(window.room),
            "" if window.rest else ", weights and gradients only: activations are not counted here",
        )  # fmt: skip
        if self._memory is not None and needs > window.room:
            self._log.warning(
                "Superpipeline: even the modes with the least memory do not fit: %s needed, %s of it for activations, and %s "
                'available. Use a smaller batch, or gpu_memory="%s".', human_bytes(needs),
                human_bytes(self._memory.peak(activations.modes, self._largest)), human_bytes(window.room), enough_bytes(needs),
            )  # fmt: skip

    def _all(self, mode: Mode) -> dict[str, Mode]:
        return dict.fromkeys(self.streamer.activations.modes, mode)

    def _carry_out(self, modes: Modes) -> None:
        """Sets the mode of every unit from the next batch on. A unit that cannot be recomputed is offloaded instead."""
        activations = self._activations
        assert activations is not None
        chosen = self._all("offload") | {  # units that were never called are not among the choices
            unit: mode for unit, mode in modes.items() if unit not in activations.recompute.unfit or mode != "recompute"
        }
        if chosen != activations.modes:
            activations.choose(chosen)
            self._device.begin_peak()  # the peak so far was measured with other modes

    def _resize(self, plan: Plan) -> None:
        """Changes the slots to those of a plan. If the device has no memory for them, the present plan stays; else the smallest.

        Raises:
            torch.OutOfMemoryError: the device has no memory for the smallest plan either.
        """
        before, old = self.streamer.weight_bytes, self.streamer.plan
        for choose in (lambda: plan, lambda: old, self.window.smallest):
            each = choose()
            more_stay = len(each.stay) > len(old.stay)
            try:
                self.streamer.resize(each)
                if more_stay:
                    self.streamer.updates.stepper.reserve(each)
                break
            except torch.OutOfMemoryError as error:
                self._log.warning("Superpipeline: no room for k = %d, k' = %d after all.", each.k, each.k_prime)
                if more_stay:
                    self.window.let_fewer_stay(each)
                failed = error
        else:
            raise failed
        if self.streamer.weight_bytes < before:
            self._device.begin_peak()

    def _seconds(self, plan: Plan) -> float:
        """Predicts the seconds of a batch with a plan."""
        return self._predicted(plan, self._modes_for(plan)).seconds

    def _modes_for(self, plan: Plan) -> Modes:
        """Returns the fastest choice of modes within the memory that a plan leaves free; the present modes if none are chosen."""
        if self._balance is None or self._memory is None or self.window.room is None:
            return self.streamer.activations.modes
        room = self.window.room - self.window.needs(plan) + self._memory.least(self._largest)
        candidates = replace(self._balance, calls=self._memory.calls(self._largest)).candidates(room)
        return min(candidates, key=lambda modes: self._predicted(plan, modes).seconds)

    def _predicted(self, plan: Plan, modes: Modes) -> Prediction:
        assert self._timed is not None
        visits, rates = self._timed
        if self._balance is not None:
            visits = self._balance.visited(modes)
        walk = Walk(plan, visits, rates, overlap=self._overlap)
        return walk.predict(batches=2)
