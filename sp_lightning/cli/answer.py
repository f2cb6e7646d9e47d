"""The answer of ``plan``: a range of windows with their memory and speed, and the best of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from sp_lightning.cli.arguments import Question
from sp_lightning.cli.model_estimate import ModelEstimate, estimate_model
from sp_lightning.plan.activation_policy import Modes
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.tune.prediction import Prediction
from sp_lightning.tune.window import SAME


@dataclass(frozen=True)
class Row:
    """One choice of k and k'.

    Attributes:
        plan: the plan for it.
        modes: what becomes of each unit's activations.
        device_bytes: device memory of weights, gradients and activations.
        prediction: the time of a batch.
        fits: whether the device has the memory.
    """

    plan: Plan
    modes: Modes
    device_bytes: int
    prediction: Prediction
    fits: bool

    @property
    def waiting(self) -> float:
        """The share of the time in which the device does not compute."""
        seconds = self.prediction.seconds
        return max(0.0, 1 - self.prediction.busy["compute"] / seconds) if seconds else 0.0


@dataclass(frozen=True)
class Answer:
    """What ``plan`` finds.

    Attributes:
        estimate: what is known of the model, whatever the window.
        rows: one for each window.
    """

    estimate: ModelEstimate
    rows: tuple[Row, ...]

    @property
    def question(self) -> Question:
        """What was asked."""
        return self.estimate.question

    @property
    def host_fits(self) -> bool:
        """Whether the host has the memory, if the question says how much it has."""
        below, limit = self.estimate.below, self.estimate.host_limit
        return limit is None or (self.estimate.host_bytes <= limit and (below is None or below.placement is not None))

    @property
    def best(self) -> Row | None:
        """The smallest among the fastest windows that fit."""
        fitting = [row for row in self.rows if row.fits and self.host_fits]
        if not fitting:
            return None
        enough = min(row.prediction.seconds for row in fitting) * SAME
        return min((r for r in fitting if r.prediction.seconds <= enough), key=lambda row: row.device_bytes)

    @property
    def prompt_seconds(self) -> float | None:
        """The time before the first token. None if nothing is generated, or nothing fits."""
        if self.estimate.prompts is None or self.best is None:
            return None
        prompts = replace(self.estimate, work=self.estimate.prompts)
        return prompts.predict(self.best.plan, prompts.modes(self.best.plan)).seconds


def answer(question: Question) -> Answer:
    """Estimates the model, and predicts each window that was asked for.

    Raises:
        ValueError, ImportError: as :func:`~sp_lightning.cli.model_estimate.estimate_model`.
    """
    estimate = estimate_model(question)
    return Answer(estimate, tuple(_row(estimate, k, k_prime) for k, k_prime in _windows(estimate)))


def _windows(estimate: ModelEstimate) -> list[tuple[int, int]]:
    """The pairs of k and k' that were asked for; otherwise powers of two up to all layers, and the largest k that fits."""
    asked, count = estimate.question, max(len(estimate.found.layers), 1)
    together = asked.k_prime or (1, 2)
    if asked.k:
        return [(k, k_prime) for k in asked.k for k_prime in together]
    ks = {k for k in (1, 2, 4, 8, 16, 32, 64) if k < count} | {count}
    pairs = {(k, k_prime) for k_prime in together for k in ks | {_largest(estimate, k_prime)}}
    return sorted(pair for pair in pairs if sum(pair) <= max(count, 2))


def _largest(estimate: ModelEstimate, k_prime: int) -> int:
    """The largest k that fits; 1 if none does, or if there is no limit."""
    limit = estimate.question.gpu_memory
    if limit is None:
        return 1
    room = limit - estimate.activation_bytes
    ks = range(1, max(len(estimate.found.layers), 1) + 1)
    return max(1, bisect_right(ks, room, key=lambda k: estimate.weight_bytes(_plan(estimate, k, k_prime))))


def _plan(estimate: ModelEstimate, k: int, k_prime: int) -> Plan:
    asked = estimate.question
    return make_plan(
        estimate.found, k=k, k_prime=k_prime, ranks=asked.devices, nodes=asked.nodes, training=not asked.predict
    )


def _row(estimate: ModelEstimate, k: int, k_prime: int) -> Row:
    plan = _plan(estimate, k, k_prime)
    modes, limit = estimate.modes(plan), estimate.question.gpu_memory
    nbytes = estimate.weight_bytes(plan) + (0 if estimate.work is None else estimate.work.alive(modes))
    return Row(plan, modes, nbytes, estimate.predict(plan, modes), limit is None or nbytes <= limit)
