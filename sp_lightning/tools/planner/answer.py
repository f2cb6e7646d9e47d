"""The answer of ``plan``: windows with their memory and speed, and the best one."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from sp_lightning.core.plan.choices import Modes
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.rings import LEAST_SHARE
from sp_lightning.tools.planner.arguments import Question
from sp_lightning.tools.planner.estimate import SAME, Estimate
from sp_lightning.tools.planner.host import HostMemory
from sp_lightning.tools.planner.prediction.visits import Prediction

_NOTICED = 0.005  # the least share of the time that is rounded to 1 %


@dataclass(frozen=True)
class Row:
    """The memory and speed of one window.

    Attributes:
        plan: the plan for this window.
        modes: the activation mode of each unit.
        device_bytes: device memory of weights, gradients, optimizer steps on the device, activations and intermediate results.
        fits: True if the device has enough memory.
        estimate: the estimate of the model. In its question, ``--gpu-layers auto`` is replaced by the number of staying layers.
        host: the host memory with the activations that ``modes`` offload.
    """

    plan: Plan
    modes: Modes
    device_bytes: int
    fits: bool
    estimate: Estimate
    host: HostMemory

    @cached_property
    def prediction(self) -> Prediction:
        """The predicted time of a batch."""
        return self.estimate.predict(self.plan, self.modes)

    @property
    def waiting(self) -> float:
        """Share of the time in which the device does not compute."""
        seconds = self.prediction.seconds
        return max(0.0, 1 - self.prediction.busy["compute"] / seconds) if seconds else 0.0


@dataclass(frozen=True)
class Answer:
    """The answer to a question.

    Attributes:
        question: the question.
        estimate: the estimate of :attr:`shown`.
        rows: the rows of all windows.
        best: of the fastest windows that fit, the row with the least device memory. None if no window fits into device memory,
            or if host memory is too small.
        prompt_seconds: the time before the first token. None if no tokens are generated, or if ``best`` is None.
    """

    question: Question
    estimate: Estimate
    rows: tuple[Row, ...]
    best: Row | None
    prompt_seconds: float | None

    @property
    def fits_plain(self) -> bool:
        """True if plain Lightning is known to fit into device memory. False without a limit."""
        limit = self.question.gpu_memory
        return limit is not None and self.estimate.plain_bytes <= limit

    @property
    def fits_checkpointed(self) -> bool:
        """As :attr:`fits_plain`, for plain Lightning with activation checkpointing in each layer."""
        limit = self.question.gpu_memory
        return limit is not None and self.estimate.checkpointed_bytes <= limit

    @property
    def lacking(self) -> frozenset[str]:
        """The memories, ``device`` and ``host``, that are too small for this strategy."""
        fitting = [row for row in self.rows if row.fits]
        enough = {"device": bool(fitting), "host": any(row.host.fits for row in fitting or self.rows)}
        return frozenset(name for name, fits in enough.items() if not fits)

    @property
    def shown(self) -> Row:
        """The best row; if no row fits, the one with the least memory."""
        return self.best or _smallest(self.rows)

    @property
    def host(self) -> HostMemory:
        """The host memory of :attr:`shown`."""
        return self.shown.host

    @property
    def status(self) -> int:
        """The exit status: 0 if the model fits as asked, 1 if it does not fit."""
        return 0 if self.fits_plain or self.best is not None else 1

    @cached_property
    def waits(self) -> dict[str, float]:
        """Seconds that the device stalls, by cause.

        The cause whose removal alone saves the most time is first. The seconds of a cause are the time that its removal saves if
        all causes before it are removed already. A cause whose removal alone saves less than 0.5 % of the time has no entry. The
        last entry, ``several things at once``, has the remaining seconds.
        """
        row, rates = self.shown, self.estimate.rates
        # A cause whose rates are unlimited already causes no stalls: one device sums no gradients, for example.
        causes = [what for what, change in _changes(self.estimate).items() if replace(rates, **change) != rates]
        causes += ["updates", *["activations"] * ("offload" in row.modes.values())]
        alone = {what: _seconds_without(self.estimate, row, {what}) for what in causes}
        now = seconds = row.prediction.seconds
        left = row.waiting * seconds
        found: dict[str, float] = {}
        for what in sorted(alone, key=alone.__getitem__):
            if left > 0 and seconds - alone[what] >= _NOTICED * seconds:
                then = _seconds_without(self.estimate, row, {*found, what})
                found[what] = min(left, max(0.0, now - then))
                left, now = left - found[what], then
        return found | ({"several things at once": left} if left > 0 else {})

    @property
    def batch(self) -> tuple[int, str]:
        """The number of items in a batch of all devices, and their name: tokens, images, samples or batches."""
        asked = self.question
        items = self.estimate.items
        count, what = asked.batch_size * asked.tokens, "tokens"
        if asked.generate is not None:
            count = asked.batch_size  # the predicted time is that of one token of each sequence
        elif asked.input is not None:
            count, what = asked.input[0], "samples"
        elif "token" not in items:
            count, what = (asked.batch_size, "images") if "image" in items else (1, "batches")
        return count * asked.devices, what

    @property
    def rate(self) -> tuple[float, str]:
        """The number of items that all devices finish per second, and their name."""
        count, what = self.batch
        return count / (self.shown.prediction.seconds or 1e-9), what


def _seconds_without(estimate: Estimate, row: Row, causes: set[str]) -> float:
    """Returns the seconds of a batch, predicted without some causes of stalls.

    Args:
        estimate: the estimate of the model.
        row: the window, and the activation modes.
        causes: keys of :func:`_changes`, ``updates``, or ``activations`` (all activations are then kept on the device).
    """
    changes = [change for what, change in _changes(estimate).items() if what in causes]
    rates = replace(estimate.rates, **{name: value for change in changes for name, value in change.items()})
    modes: Modes = dict.fromkeys(row.modes, "keep") if "activations" in causes else row.modes
    return estimate.predict(row.plan, modes, rates, updates="updates" not in causes).seconds


def _changes(estimate: Estimate) -> dict[str, dict[str, Any]]:
    """Returns, for each cause of stalls, the changed rates that remove it."""
    return {
        # In inference, only uploads read host memory.
        "fetches": {"upload": math.inf} | ({"host_memory": math.inf} if estimate.question.predict else {}),
        "gradient offloading": {"download": math.inf},
        "the host": {"visit_seconds": 0.0, "weight_seconds": 0.0},
        "sums of gradients": {"links": math.inf},
        "the disk": {"disk": math.inf},
    }


def answer(estimate: Estimate) -> Answer:
    """Predicts the asked windows, or a default range of windows, and chooses the best one."""
    best = None
    prompt_seconds = None
    asked = estimate.question
    rows = tuple(_row(estimate, k, k_prime) for k, k_prime in _windows(estimate))
    if fitting := [row for row in rows if row.fits and row.host.fits]:
        enough = min(row.prediction.seconds for row in fitting) * SAME
        best = min((r for r in fitting if r.prediction.seconds <= enough), key=lambda row: row.device_bytes)
    estimate = (best or _smallest(rows)).estimate
    if best is not None and estimate.prompts is not None:
        prompts = replace(estimate, work=estimate.prompts)
        prompt_seconds = prompts.predict(best.plan, prompts.modes(best.plan)).seconds
    return Answer(asked, estimate, rows, best, prompt_seconds)


def _windows(estimate: Estimate) -> list[tuple[int, int]]:
    """Returns the asked pairs of k and k'.

    By default, k is 1, 2, 4, … 64, the number with which all layers have a slot, and with a memory limit the largest that fits.
    k' is 1 or 2. Pairs with more slots (k + k') than layers are left out, except the smallest window.
    """
    asked = estimate.question
    count = max(len(estimate.found.layers), 1)
    together = asked.k_prime or (1, 2)
    if asked.k:
        return [(k, k_prime) for k in asked.k for k_prime in together]
    pairs = set[tuple[int, int]]()
    for k_prime in together:
        most = max(1, count - k_prime)
        pairs |= {(k, k_prime) for k in (1, 2, 4, 8, 16, 32, 64, most) if k <= most}
        if asked.gpu_memory is not None:
            pairs.add((_largest_that_fits(estimate, asked.gpu_memory, k_prime, most), k_prime))
    return sorted(pair for pair in pairs if sum(pair) <= max(count, 2))


def _largest_that_fits(estimate: Estimate, gpu_memory: int, k_prime: int, most: int) -> int:
    """Returns the largest k of at most ``most`` whose window fits beside the activations; 1 if none fits."""

    def beyond(k: int, share: float = 1.0) -> int:
        """Returns the bytes that are lacking if all slots had this share of their bytes."""
        plan = estimate.plan(k, k_prime)
        others = plan.peak_device_bytes - plan.slot_bytes + estimate.activation_bytes
        return int(share * plan.slot_bytes) + others - gpu_memory

    # A larger k may need less memory, with slots of other sizes. So larger ones are tried until no further one can fit.
    largest = bisect_right(range(1, most + 1), 0, key=beyond)
    for k in range(largest + 1, most + 1):
        if beyond(k) <= 0:
            largest = k
        elif beyond(k, LEAST_SHARE) > 0:
            break
    return max(1, largest)


def _smallest(rows: Sequence[Row]) -> Row:
    return min(rows, key=lambda row: row.device_bytes)


def _row(asked: Estimate, k: int, k_prime: int) -> Row:
    estimate = asked.staying(k, k_prime)
    plan = estimate.plan(k, k_prime)
    modes = estimate.modes(plan)
    limit = estimate.question.gpu_memory
    nbytes = plan.peak_device_bytes + estimate.work.alive(modes)
    fits = limit is None or nbytes <= limit
    return Row(plan, modes, nbytes, fits, estimate, estimate.host_with(modes))
