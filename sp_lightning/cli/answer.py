"""The answer of ``plan``: a range of windows with their memory and speed, and the best of them."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace

from sp_lightning.cli.arguments import Question
from sp_lightning.cli.estimate import Estimate, estimate_model
from sp_lightning.observe.messages import working
from sp_lightning.plan.activation_policy import Modes
from sp_lightning.plan.plan import Plan
from sp_lightning.tune.choices import SAME
from sp_lightning.tune.visits import Prediction


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
        question: what was asked.
        estimate: what is known of the model, whatever the window.
        rows: one for each window.
        best: the smallest among the fastest windows that fit; None if none does.
        prompt_seconds: the time before the first token. None if nothing is generated, or nothing fits.
    """

    question: Question
    estimate: Estimate
    rows: tuple[Row, ...]
    best: Row | None
    prompt_seconds: float | None


def answer(question: Question) -> Answer:
    """Estimates the model, and predicts each window that was asked for.

    Raises:
        ValueError, ImportError: as :func:`~sp_lightning.cli.estimate.estimate_model`.
    """
    estimate, best, prompt_seconds = estimate_model(question), None, None
    working("The windows are predicted")
    rows = tuple(_row(estimate, k, k_prime) for k, k_prime in _windows(estimate))
    if fitting := [row for row in rows if row.fits and estimate.host.fits]:
        enough = min(row.prediction.seconds for row in fitting) * SAME
        best = min((r for r in fitting if r.prediction.seconds <= enough), key=lambda row: row.device_bytes)
    if best is not None and estimate.prompts is not None:
        prompts = replace(estimate, work=estimate.prompts)
        prompt_seconds = prompts.predict(best.plan, prompts.modes(best.plan)).seconds
    return Answer(question, estimate, rows, best, prompt_seconds)


def _windows(estimate: Estimate) -> list[tuple[int, int]]:
    """The pairs of k and k' that were asked for; otherwise powers of two up to all layers, and the largest k that fits."""
    asked, count = estimate.question, max(len(estimate.found.layers), 1)
    together = asked.k_prime or (1, 2)
    if asked.k:
        return [(k, k_prime) for k in asked.k for k_prime in together]
    ks = {k for k in (1, 2, 4, 8, 16, 32, 64) if k < count} | {count}
    pairs = {(k, k_prime) for k_prime in together for k in ks}
    if asked.gpu_memory is not None:
        room, every = asked.gpu_memory - estimate.activation_bytes, range(1, count + 1)
        for k_prime in together:
            fitting = bisect_right(every, room, key=lambda k: estimate.weight_bytes(estimate.plan(k, k_prime)))
            pairs.add((max(1, fitting), k_prime))
    return sorted(pair for pair in pairs if sum(pair) <= max(count, 2))


def _row(estimate: Estimate, k: int, k_prime: int) -> Row:
    plan = estimate.plan(k, k_prime)
    modes, limit = estimate.modes(plan), estimate.question.gpu_memory
    nbytes = estimate.weight_bytes(plan) + estimate.work.alive(modes)
    return Row(plan, modes, nbytes, estimate.predict(plan, modes), limit is None or nbytes <= limit)
