"""``plan --hours``: finds the fastest way to train in a given time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from sp_lightning.core.plan.units import in_gib, number
from sp_lightning.tools.planner.answer import Answer, answer, stepped
from sp_lightning.tools.planner.arguments import PLACES, AskedOverlap, Question, command
from sp_lightning.tools.planner.estimate import Estimate, estimate_model
from sp_lightning.tools.planner.report import ROUNDED, rounds
from sp_lightning.tools.planner.verdict import beside, strategy, strategy_options, trainer_options

LEAST_STEPS = 1000
"""The number of optimizer steps in which a learning rate can rise and fall. Ways with fewer steps come last."""
_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ACCUMULATED = (4, 16)
_OVERLAPS: tuple[AskedOverlap, ...] = ("auto", "backward")
_PRECISIONS = ("bf16-mixed", "bf16-true")
_WINDOWS = 4  # the number of fastest windows that are tried with accumulation, too
_GAIN = 1.02  # a larger batch must be faster by this factor, because a smaller batch leaves more optimizer steps
_REPEATED = 4  # epochs in which repeated data is about as useful as new data (Muennighoff et al., arXiv 2305.16264)


@dataclass(frozen=True)
class Budget:
    """The training that one set of options reaches in the given time.

    Attributes:
        answer: the options, with the best window.
        seconds: the given time.
        count: the number of items (tokens, images, …) in an optimizer step of all devices.
        unit: the name of the items.
    """

    answer: Answer
    seconds: float
    count: int
    unit: str

    @property
    def step_seconds(self) -> float:
        """Seconds from one optimizer step to the next."""
        return self.answer.shown.prediction.seconds * self.answer.question.accumulate_grad_batches

    @property
    def steps(self) -> int:
        """The number of optimizer steps in the given time."""
        return int(self.seconds / self.step_seconds)

    @property
    def total(self) -> int:
        """The number of items in all steps."""
        return self.steps * self.count

    @property
    def epochs(self) -> float | None:
        """The number of passes over the data; None if the number of its tokens was not given."""
        data = self.answer.question.dataset_tokens
        return None if data is None else self.total / data


def budgets(asked: Question, notify: Callable[[str], None]) -> list[Budget]:
    """Returns ways to train that fit into memory, unsorted.

    Args:
        asked: the question. Arguments that the user gave are fixed. Precision, batch size, accumulation, and the place and
            overlap of the optimizer are searched if the user did not give them.
        notify: is called with a message before each slow step.

    Raises:
        ValueError: the model does not take the batch; the data is not counted in tokens; the data or the time is less than one
            step.
    """
    found: list[Budget] = []
    reasons: list[ValueError] = []
    for precision in _PRECISIONS if "precision" not in asked.given else (asked.precision,):
        fastest = 0
        for batch in _BATCHES if "batch_size" not in asked.given and _takes_batches(asked) else (asked.batch_size,):
            question = asked.but(precision=precision, batch_size=batch)
            notify(f"runs a batch of {batch} in {precision}")
            try:
                estimate = estimate_model(question)
            except ValueError as error:  # the model may take other batches or precisions
                reasons.append(error)
                continue
            fitting = _fitting(estimate)
            if not fitting and question.activations == "auto" and "activations" not in asked.given:
                # "auto" offloads, which may need more memory than recomputing everything.
                fitting = _fitting(replace(estimate, question=question.but(activations="recompute")))
            found += fitting
            before = fastest
            fastest = max((each.total for each in fitting), default=0)
            if fastest < before * _GAIN or not fitting:
                break  # larger batches are not faster, or do not fit
    if not found and reasons:
        raise reasons[0]
    return _with_enough(found, asked)


def _with_enough(found: list[Budget], asked: Question) -> list[Budget]:
    """Returns the ways whose optimizer step does not have more tokens than the data.

    Raises:
        ValueError: the data is not counted in tokens, or the data or the time is less than one step.
    """
    data = asked.dataset_tokens
    if found and data is not None and found[0].unit != "tokens":
        raise ValueError(f"{asked.model!r} takes {found[0].unit}, not tokens. Leave out --dataset-tokens.")
    if found and not any(each.steps for each in found):
        quickest = min(each.step_seconds for each in found)
        raise ValueError(f"--hours {asked.hours:g} is less than one step, which takes {quickest:.3g} s. Give more.")
    enough = [each for each in found if data is None or each.count <= data]
    if found and not enough:
        least = min(each.count for each in found)
        raise ValueError(
            f"The data has {data:,} tokens, and one step takes {least:,}. Give more data, or smaller --batch-size, --tokens or "
            "--accumulate-grad-batches."
        )
    return enough


def _fitting(estimate: Estimate) -> list[Budget]:
    """Returns the ways that fit into memory, for one batch size and precision."""
    return [_budget(each) for each in _ways(estimate) if each.best is not None]


def best_first(found: Iterable[Budget]) -> list[Budget]:
    """Sorts ways to train, the best first.

    The criteria, in this order:

    - float32 weights, before weights whose updates are rounded;
    - at least :data:`LEAST_STEPS` optimizer steps;
    - the number of items; for ways with too few steps, the number of steps.

    Then the way with the smallest step is moved to the front, of all ways with nearly as many items as the first one.
    """

    def kind(each: Budget) -> tuple[bool, bool]:
        return rounds(each.answer.question), each.steps < LEAST_STEPS

    def order(each: Budget) -> tuple[bool, bool, int, int]:
        rounded, too_few = kind(each)
        return rounded, too_few, -(each.steps if too_few else each.total), each.count

    ordered = sorted(found, key=order)
    if ordered:
        # Of ways with nearly as many items, the one with the smallest step has the most steps.
        alike = [each for each in ordered if kind(each) == kind(ordered[0]) and each.total * _GAIN >= ordered[0].total]
        first = min(alike, key=lambda each: each.count)
        ordered = [first, *(each for each in ordered if each is not first)]
    return ordered


def _takes_batches(asked: Question) -> bool:
    """Returns True if batch sizes can be searched. The model of a factory usually has its own example batch."""
    return ":" not in asked.model


def _ways(estimate: Estimate) -> Iterator[Answer]:
    """Yields an answer for each combination of ``optimizer_on``, ``optimizer_overlap`` and accumulation.

    Values that the user gave are fixed.
    """
    asked = estimate.question
    for place in PLACES if "optimizer_on" not in asked.given else (asked.optimizer_on,):
        for overlap in _OVERLAPS if "optimizer_overlap" not in asked.given else (asked.optimizer_overlap,):
            other = stepped(estimate, overlap, place)
            if other is not None:
                yield from _accumulated(answer(other))


def _accumulated(found: Answer) -> Iterator[Answer]:
    """Yields an answer and, if the user did not give the accumulation, answers with accumulation for the fastest windows."""
    yield found
    question = found.question
    if "accumulate_grad_batches" in question.given or found.best is None:
        return
    rows = sorted((row for row in found.rows if row.fits), key=lambda row: row.prediction.seconds)[:_WINDOWS]
    ks = sorted({row.plan.k for row in rows})
    for accumulate in _ACCUMULATED:
        more = answer(replace(found.estimate, question=question.but(k=ks, accumulate_grad_batches=accumulate)))
        # The answer's question, from which the command is printed, has the user's k instead of the tried numbers.
        yield replace(more, question=question.but(accumulate_grad_batches=accumulate))


def _budget(found: Answer) -> Budget:
    count, unit = found.batch
    return Budget(found, (found.question.hours or 0) * 3600, count * found.question.accumulate_grad_batches, unit)


# ---------------------------------------------------------------------- words


def in_words(found: list[Budget], asked: Question) -> list[str]:
    """Returns the lines of the answer: the best way to train, with its steps and options.

    Args:
        found: the ways, the best first.
        asked: the question.
    """
    best = found[0]
    question = best.answer.question
    row = best.answer.shown
    lines = [
        f"In {asked.hours:g} h: {best.steps:,} steps of {best.count:,} {best.unit}, {best.step_seconds:.3g} s each, "
        f"{number(best.total)} {best.unit}{_epochs(best)}.",
        f"  {trainer_call(best)}",
        f"  {row.prediction.binds} binds; {in_gib(row.device_bytes)} of GPU and {in_gib(best.answer.host.nbytes)} of "
        "host memory",
        f"  {command(question)}",
    ]
    if best.steps < LEAST_STEPS:
        lines.append(f"  No way that fits reaches {LEAST_STEPS:,} steps; more hours do, or fewer --tokens.")
    rounded = [each for each in found if rounds(each.answer.question) and each.total > best.total * _GAIN]
    if rounded and not rounds(question):
        precision, most = rounded[0].answer.question.precision, number(rounded[0].total)
        lines.append(f"  {precision} reaches {most} {best.unit}, but {ROUNDED} (--precision {precision}).")
    return lines


def trainer_call(best: Budget) -> str:
    """Returns the Python call that creates the Trainer."""
    question = best.answer.question
    accumulate = ""
    if question.accumulate_grad_batches > 1:
        accumulate = f", accumulate_grad_batches={question.accumulate_grad_batches}"
    devices = f", {options}" if (options := trainer_options(question)) else ""
    seconds = max(1, round(best.seconds))
    time = f'max_time={{"seconds": {seconds}}}' if seconds % 3600 else f'max_time={{"hours": {seconds // 3600}}}'
    options = f'precision="{question.precision}"{accumulate}{devices}, {time}, max_epochs=-1'
    return f"Trainer(strategy={strategy(best.answer.estimate, best.answer.shown.plan)}, {options}){beside(best.answer.estimate)}"


def _epochs(best: Budget) -> str:
    if best.epochs is None:
        return ""
    often = "; data repeated more than four times adds little" if best.epochs > _REPEATED else ""
    return f", {best.epochs:.3g} epochs{often}"


def fields(best: Budget) -> dict[str, Any]:
    """Returns the best way as fields for JSON."""
    question = best.answer.question
    return {
        "budget": {
            "hours": question.hours, "batch_size": question.batch_size, "tokens": question.tokens,
            "accumulate_grad_batches": question.accumulate_grad_batches,
            "steps": best.steps, "seconds_per_step": best.step_seconds, f"total_{best.unit}": best.total, "epochs": best.epochs,
        },
        "strategy": strategy_options(best.answer.estimate, best.answer.shown.plan),
        "trainer": trainer_call(best),
    }  # fmt: skip
