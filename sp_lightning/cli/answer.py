"""The answer of ``plan``: a range of windows with their memory and speed, the best of them, and the verdict."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass, replace

from sp_lightning.cli.arguments import MODES, Question
from sp_lightning.cli.model_estimate import ModelEstimate, estimate_model
from sp_lightning.plan.activation_policy import Modes
from sp_lightning.plan.host_memory import limit_for
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import enough_bytes, exact_bytes, human_bytes
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
    return max(1, bisect_right(ks, room, key=lambda k: estimate.weight_bytes(estimate.plan(k, k_prime))))


def _row(estimate: ModelEstimate, k: int, k_prime: int) -> Row:
    plan = estimate.plan(k, k_prime)
    modes, limit = estimate.modes(plan), estimate.question.gpu_memory
    nbytes = estimate.weight_bytes(plan) + (0 if estimate.work is None else estimate.work.alive(modes))
    return Row(plan, modes, nbytes, estimate.predict(plan, modes), limit is None or nbytes <= limit)


# ---------------------------------------------------------------------- the verdict


def verdict(answer: Answer) -> str:
    """The last lines: whether the model fits, and what to choose."""
    refusals = [] if answer.host_fits else [_refused_by_host(answer)]
    if not any(row.fits for row in answer.rows):
        refusals.append(_refused_by_device(answer))
    return "\n".join(refusals) if refusals else _recommended(answer)


def _refused_by_host(answer: Answer) -> str:
    below = answer.estimate.below
    if below is not None and below.placement is None:
        return f"It does not fit, although there is a disk: {below.why_not}. {_less_host_memory(answer.question)}"
    needed, limit = answer.estimate.host_bytes, answer.estimate.host_limit or 0
    processes = "the process" if answer.question.devices == 1 else "the processes"
    enough = enough_bytes(limit_for(needed, answer.question.devices, disk=False))
    return (
        f"It does not fit: {human_bytes(needed)} of host memory are needed beside what {processes} and libraries take, "
        f"{_there(needed, limit)}: --host-memory {enough} is enough. "
        f"{_less_host_memory(answer.question)}"
    )


def _there(needed: int, limit: int) -> str:
    """What there is, and what is missing, which may be less than the last digit of both."""
    return f"{human_bytes(limit)} are there, {human_bytes(needed - limit)} too little"


def _less_host_memory(question: Question) -> str:
    if question.predict:
        return "Use a lower precision: --precision bf16-true."
    precision = "Use --precision bf16-true, or freeze" if question.precision != "bf16-true" else "Freeze"
    overlap = "" if question.overlap == "backward" else "; --overlap backward saves gradients"
    return f"{precision} layers, or train adapters{overlap}."


def _refused_by_device(answer: Answer) -> str:
    question, work = answer.question, answer.estimate.work
    least, limit = min(row.device_bytes for row in answer.rows), question.gpu_memory or 0
    activations = answer.estimate.activation_bytes
    weights = least - activations
    modes = [] if work is None or question.predict else [mode for mode in MODES if mode != question.activations]
    needs = {mode: weights + work.alive(mode) for mode in modes} if work is not None else {}
    fitting = [mode for mode in modes if needs[mode] <= limit]
    if fitting or (activations > least / 2 and weights < limit):
        # Activations and caches grow with the batch, weights do not.
        count = int(question.batch * (limit - weights) / activations) if activations > 0 else 0
        advice = "Use a smaller batch" + f" (about {count} would fit)" * (1 <= count < question.batch)
    else:
        advice = "Cut layers finer with --layers"
    smallest = min(needs, key=needs.__getitem__, default=None)
    for mode in fitting or ([smallest] if smallest is not None and needs[smallest] < 0.9 * least else []):
        more = f", and {human_bytes(work.offloaded)} more of the host" if work is not None and mode == "offload" else ""
        advice += f", or --activations {mode}" if fitting else f"; --activations {mode}"
        advice += f" (the least is {human_bytes(needs[mode])} then{more})"
    advice += "."
    return (
        f"It does not fit: the least is {human_bytes(least)} of device memory, of which {human_bytes(activations)} are "
        f"activations; {_there(least, limit)}. {advice}"
    )


def _recommended(answer: Answer) -> str:
    best, question = answer.best, answer.question
    if best is None:
        return ""
    limited = question.gpu_memory is not None
    fits = "It fits" if limited else "The fastest"
    if answer.estimate.work is None:
        fits = "Weights and gradients fit, activations are unknown" if limited else "Perhaps the fastest"
    choice = _choice(question, best.plan)
    seconds, several = best.prediction.seconds, question.devices * question.nodes > 1
    if answer.prompt_seconds is None:
        return f"{fits}: {choice}, {seconds:.3g} s per batch{' on each device' * several}."
    return (
        f"{fits}: {choice}, {answer.prompt_seconds:.3g} s for the prompts, then {seconds:.3g} s for each token of "
        f"{question.batch} sequence{'s' * (question.batch > 1)}: {question.batch / seconds:.3g} tokens/s"
        f"{' on each device' * several}."
    )


def _choice(question: Question, plan: Plan) -> str:
    """The strategy as it is to be written: every option that the answer depends on."""
    options: dict[str, object] = {"k": plan.k, "k_prime": plan.k_prime}
    if question.activations != "keep":
        options["activations"] = question.activations
    if question.activations == "auto":
        assert question.gpu_memory is not None
        options["memory_budget"] = exact_bytes(question.gpu_memory)
    if question.overlap != "forward" and not question.predict:
        options["optimizer_overlap"] = question.overlap
    if question.transfer != "whole" and question.devices > 1:
        options["transfer"] = question.transfer
    if question.disk is not None:
        limit = {} if question.host_memory is None else {"host_memory": exact_bytes(question.host_memory)}
        options |= {"disk": "FOLDER"} | limit
    options |= {name: given for name in ("layers", "resident") if (given := getattr(question, name))}
    written = ", ".join(f"{name}={json.dumps(value)}" for name, value in options.items())
    checkpoints = " and the model's gradient_checkpointing_enable()" if question.checkpointing else ""
    nodes = f", num_nodes={question.nodes}" * (question.nodes > 1)
    devices = f" in Trainer(devices={question.devices}{nodes})" if question.devices > 1 or nodes else ""
    keep = ", keep_logits=True" * question.keep_logits
    chunks = f" and sp_lightning.chunk_loss(model, tokens={question.loss_tokens}{keep})" if question.loss_tokens else ""
    return f"SuperpipelineStrategy({written}){devices}{checkpoints}{chunks}"
