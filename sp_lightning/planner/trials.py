"""Plans trainings that share a frozen base (``plan --trials``): their time and memory, and how many at once are worthwhile."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sp_lightning.plan.units import in_gib
from sp_lightning.planner.answer import Answer, Row
from sp_lightning.planner.estimate import Estimate
from sp_lightning.registry import needed_for
from sp_lightning.tuning.choices import SAME


@dataclass(frozen=True)
class Trials:
    """Several trials with the same window, which run each layer at the same time.

    Attributes:
        row: the window of each trial.
        count: the number of trials.
        alone: seconds of a step of one trial that runs alone.
        seconds: the least seconds of a step of each trial if all run at once: those of the busiest resource.
        binds: the busiest resource.
        nbytes: bytes that a step of each trial uploads.
        alone_bytes: bytes that a step of one trial that runs alone uploads.
        most: the number of trials with which the device always computes, so that more trials save no time; None if the device
            waits with any number.
        device_bytes: device memory of all trials and the base, which have equal shares of it in a run.
        host_bytes: host memory of all trials, with frozen weights once.
    """

    row: Row
    count: int
    alone: float
    seconds: float
    binds: str
    nbytes: float
    alone_bytes: int
    most: int | None
    device_bytes: int
    host_bytes: int

    @classmethod
    def of(cls, estimate: Estimate, row: Row, count: int) -> Trials | None:
        """Predicts trials of a model; returns None if the trials share less than a tenth of the uploaded bytes."""
        everything = estimate.question.predict
        prediction = row.prediction
        frozen = [
            sum(p.nbytes for _, p in layer.parameters if everything or not p.requires_grad)
            for layer in estimate.found.layers
        ]
        fetches = [each for each in prediction.intervals if each.kind == "fetch"]
        total = sum(each.nbytes for each in fetches)
        layers = [(each.layer, each.nbytes) for each in fetches if each.layer is not None and each.layer < len(frozen)]
        common = sum(min(frozen[layer], nbytes) for layer, nbytes in layers)
        if (
            not total or common < total / 10
        ):  # for example if only a table is frozen, and other layers are trained or uploaded as casts
            return None
        spared = common * (1 - 1 / count)  # bytes of each trial that other trials upload
        share = common / total
        busy = dict(prediction.busy)
        busy["fetch"] *= 1 - spared / total
        busy["host memory"] -= spared / estimate.rates.host_memory
        binds = max(busy, key=busy.__getitem__)
        compute, wire = prediction.busy["compute"], prediction.busy["fetch"]
        # For n trials, the device computes n · compute seconds and uploads for (share + n · (1 - share)) · wire seconds.
        left = compute - (1 - share) * wire
        with needed_for("--trials"):
            from sp_lightning.sharing.common import ON_DEVICE
        once = sum(weight.nbytes for weight in estimate.found.places if everything or not weight.requires_grad)
        return cls(
            row, count, prediction.seconds, min(busy[binds], prediction.seconds), binds, total - spared, total,
            math.ceil(share * wire / left) if left > 0 else None, (1 + count) * max(row.device_bytes, ON_DEVICE * max(frozen)),
            once + count * max(0, estimate.host.nbytes - once),
        )  # fmt: skip


def best_trials(answer: Answer) -> Trials | None:
    """Returns the fastest window that fits; of equally fast windows, the smallest. If no window fits, returns the smallest.

    Returns None for one trial, with unknown activations, or if trials share too few of the uploaded bytes.
    """
    estimate, limit = answer.estimate, answer.question.gpu_memory
    if answer.question.trials == 1 or estimate.why_guessed:
        return None
    found = [each for row in answer.rows if (each := Trials.of(estimate, row, answer.question.trials)) is not None]
    fitting = [each for each in found if limit is None or each.device_bytes <= limit]
    if not fitting:
        return min(found, key=lambda each: each.device_bytes, default=None)
    enough = SAME * min(each.seconds for each in fitting)
    return min((each for each in fitting if each.seconds <= enough), key=lambda each: each.device_bytes)


def lacking(answer: Answer, found: Trials | None = None) -> list[str]:
    """Returns the reasons why the asked trials do not fit: ``a base`` (nothing to share), ``device`` or ``host`` (memory).

    Args:
        answer: the answer for one trial.
        found: the result of :func:`best_trials`; None to compute it.
    """
    found = found or best_trials(answer)
    asked = answer.question
    if asked.trials == 1 or answer.estimate.why_guessed:
        return []
    if found is None:
        return ["a base"]
    limits = {"device": (found.device_bytes, asked.gpu_memory), "host": (found.host_bytes, answer.estimate.host.limit)}
    return [name for name, (nbytes, limit) in limits.items() if limit is not None and nbytes > limit]


def trials(answer: Answer) -> list[str]:
    """Returns lines on the asked trials, which are printed before the answer for one trial."""
    estimate, question, found = answer.estimate, answer.question, best_trials(answer)
    if question.trials == 1 or estimate.why_guessed:
        return []
    if found is None:
        casts = question.lora is not None or estimate.trained < estimate.parameters
        cast = (
            "frozen float32 weights are uploaded as casts; load the base in bfloat16 (in a factory), or use "
            "--precision bf16-true"
        )
        why = cast if casts else "freeze the base (--lora, or a factory)"
        return [f"trials: they share too few of the bytes that are copied: {why}"]
    # More trials save no time if a resource other than transfers binds already.
    pays = "with any number" if found.most is None else f"and more than {max(found.most, 1)} save nothing"
    limit, row, lacks = question.gpu_memory, found.row, lacking(answer, found)
    fits = room = ""
    if limit is not None or answer.estimate.host.limit is not None:
        fits = f" lack {' and '.join(lacks)} memory" if lacks else " fit"
    if limit is not None:
        room = f" needed, {in_gib(limit)} available"
        most = max(0, limit * (1 + found.count) // found.device_bytes - 1)
        if "device" in lacks:
            room += f" (enough for {most} trial{'' if most == 1 else 's'})"
    window = f"with k = {row.plan.k} and k' = {row.plan.k_prime}"
    return [
        f"trials{fits}: {found.count} at once over one SharedBase, {window}: a step of all takes at least "
        f"{found.count * found.seconds:.3g} s, {found.seconds:.3g} s for each ({found.binds} binds, {pays}), one of a trial "
        f"alone with that window {found.alone:.3g} s; {in_gib(int(found.nbytes))} uploaded per step and trial instead of "
        f"{in_gib(found.alone_bytes)}; {in_gib(found.device_bytes)} of GPU memory{room}, in {1 + found.count} equal "
        f"shares; {in_gib(found.host_bytes)} of host memory",
        "",
        "One alone:",
    ]
