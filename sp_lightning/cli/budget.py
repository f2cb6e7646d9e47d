"""What a time is enough for: ``plan --hours`` looks for the fastest way to train, and says what it reaches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from sp_lightning.cli.answer import Answer, answer
from sp_lightning.cli.arguments import PRECISIONS, Question, command
from sp_lightning.cli.estimate import Estimate, estimate_model
from sp_lightning.cli.host import on_device
from sp_lightning.cli.scaling import FITTED_TO, LAW, expected_loss
from sp_lightning.cli.verdict import beside, strategy, strategy_options, trainer_options
from sp_lightning.plan.units import in_gib

_BATCHES = (1, 2, 4, 8, 16, 32, 64)
_ACCUMULATED = (4, 16)
_PRECISIONS = ("bf16-mixed", "bf16-true")
_SHOWN = 5  # ways
_WINDOWS = 4  # that are tried with accumulation, too
_GAIN = 1.02  # a larger batch has to be so much faster: a smaller one leaves more steps
_REPEATED = 4  # times that data may come with as much use as new data, by Muennighoff et al., arXiv 2305.16264


@dataclass(frozen=True)
class Budget:
    """What one way to train reaches in the time.

    Attributes:
        answer: how, with the best window.
        seconds: of the whole time.
        count: tokens, images or samples of an optimizer step, of all devices.
        unit: which of them.
    """

    answer: Answer
    seconds: float
    count: int
    unit: str

    @property
    def step_seconds(self) -> float:
        """Seconds from one optimizer step to the next."""
        return self.answer.shown.prediction.seconds * self.answer.question.accumulate

    @property
    def steps(self) -> int:
        """Optimizer steps that fit."""
        return int(self.seconds / self.step_seconds)

    @property
    def total(self) -> int:
        """Tokens, images or samples in all of them."""
        return self.steps * self.count

    @property
    def epochs(self) -> float | None:
        """How often the data comes; None if nobody has said how much there is."""
        return None if self.data is None else self.total / self.data

    @property
    def data(self) -> int | None:
        """Tokens, images or samples that there are, if somebody has said so."""
        question = self.answer.question
        if self.unit == "tokens":
            return question.samples * question.tokens if question.samples else question.dataset_tokens
        return None if self.unit == "batches" else question.samples

    @property
    def cost(self) -> float | None:
        """The price of the time; None if nobody has said one."""
        price = self.answer.question.price
        return None if price is None else price * self.seconds / 3600

    @property
    def rounds(self) -> bool:
        """Whether weights have no float32 values, so that updates are rounded."""
        return PRECISIONS[self.answer.question.precision][0].itemsize == 2


def budgets(asked: Question, say: Callable[[str], None]) -> list[Budget]:
    """Ways to train, the best first, as :func:`best_first` orders them.

    Args:
        asked: what is given is kept; the rest is tried.
        say: is told what takes its time.

    Raises:
        ValueError: the data is less than one step.
    """
    found: list[Budget] = []
    reasons: list[ValueError] = []
    precisions = _PRECISIONS if "precision" not in asked.given else (asked.precision,)
    for precision in precisions:
        batches = _BATCHES if "batch" not in asked.given and _takes_batches(asked) else (asked.batch,)
        fastest = 0
        for batch in batches:
            question = Question(**{**vars(asked), "precision": precision, "batch": batch, **_activations(asked)})
            say(f"runs a batch of {batch} in {precision}")
            try:
                estimate = estimate_model(question)
            except ValueError as error:
                reasons.append(error)
                continue
            fitting = _fitting(estimate)
            if not fitting and question.activations != asked.activations:
                # What "auto" needs in its first batches may be more than what computing all again takes.
                again = Question(**{**vars(question), "activations": "recompute"})
                fitting = _fitting(replace(estimate, question=again))
            found += fitting
            before, fastest = fastest, max((each.total for each in fitting), default=0)
            if fastest < before * _GAIN or not fitting:
                break  # larger batches are no faster, or fit still less
    if not found and reasons:
        raise reasons[0]
    _refuse_data(found, asked)
    return best_first(each for each in found if each.count <= (each.data or each.count))


def _refuse_data(found: list[Budget], asked: Question) -> None:
    """A ValueError if the data cannot be counted, or the data or the time is less than one step."""
    if found and found[0].data is None and (asked.samples or asked.dataset_tokens):
        what = {"batches": "its batches are its own; say of what shape they are: --input SIZE SIZE …"}
        raise ValueError(
            f"How much data there is cannot be counted in what {asked.model!r} takes, {found[0].unit}: "
            f"{what.get(found[0].unit, 'give --samples in place of --dataset-tokens')}."
        )
    if found and not any(each.steps for each in found):
        least = min(found, key=lambda each: each.step_seconds)
        raise ValueError(
            f"--hours {asked.hours:g} is less than one step, which takes {least.step_seconds:.3g} s. Give more."
        )
    if found and all(each.count > (each.data or each.count) for each in found):
        least = min(found, key=lambda each: each.count)
        raise ValueError(
            f"The data has {least.data:,} {least.unit}, and one step takes {least.count:,}. Give more data, or smaller "
            "--batch, --tokens or --accumulate."
        )


def _fitting(estimate: Estimate) -> list[Budget]:
    return [each for each in map(_budget, _ways(estimate)) if each.answer.best is not None]


def best_first(found: Iterable[Budget]) -> list[Budget]:
    """Whole updates before rounded ones, enough steps before too few; then the most tokens, or of too few the most steps."""

    def order(each: Budget) -> tuple[float, ...]:
        too_few = each.steps < each.answer.question.least_steps
        return each.rounds, too_few, -each.steps if too_few else -each.total, each.count

    ordered = sorted(found, key=order)
    best = ordered[0] if ordered else None
    # Of nearly as many tokens, those with the smallest step learn the most.
    alike = [
        each for each in ordered if best and order(each)[:2] == order(best)[:2] and each.total * _GAIN >= best.total
    ]
    alike.sort(key=lambda each: each.count)
    return [*alike[:1], *(each for each in ordered if each not in alike[:1])]


def _takes_batches(asked: Question) -> bool:
    """Whether --batch says anything of this model: a factory's batch is its own."""
    return ":" not in asked.model


def _activations(asked: Question) -> dict[str, Any]:
    """What becomes of activations is chosen within the memory, if that is known and nobody has said it."""
    return {} if "activations" in asked.given or asked.gpu_memory is None else {"activations": "auto"}


def _ways(estimate: Estimate) -> Iterator[Answer]:
    """The answers for each time and place of the optimizer, and accumulation, of those that are not given."""
    asked, step = estimate.question, estimate.step
    if step is None:
        return
    alone = asked.devices * asked.nodes == 1 and "optimizer_on" not in asked.given and not step.on_device
    for place in ("host", "device") if alone else (asked.optimizer_on,):
        waits = place == "host" and step.overlap == "off"  # its updates cannot run in the background
        early: tuple[Literal["off", "forward", "backward"], ...] = ("forward", "backward")
        early = (asked.overlap,) if waits or "overlap" in asked.given else early
        for overlap in early:
            if overlap == "backward" and (
                asked.clip or (place == "device" and PRECISIONS[asked.precision][0].itemsize == 2)
            ):
                continue
            question = Question(**{**vars(asked), "optimizer_on": place, "overlap": overlap})
            stepped = step if waits else replace(step, overlap=overlap)
            stepped = on_device(stepped, question) if place == "device" else stepped
            yield from _accumulated(answer(replace(estimate, question=question, step=stepped)))


def _accumulated(found: Answer) -> Iterator[Answer]:
    """An answer, and those with accumulation, if nobody has said it, of the windows that are fastest without."""
    yield found
    question = found.question
    if "accumulate" in question.given or found.best is None:
        return
    rows = sorted((row for row in found.rows if row.fits), key=lambda row: row.prediction.seconds)[:_WINDOWS]
    windows = {"k": sorted({row.plan.k for row in rows}), "k_prime": question.k_prime}
    for accumulate in _ACCUMULATED:
        asked = Question(**{**vars(question), **windows, "accumulate": accumulate})
        more = answer(replace(found.estimate, question=asked))
        yield replace(more, question=Question(**{**vars(question), "accumulate": accumulate}))


def _budget(found: Answer) -> Budget:
    question = found.question
    rate, unit = found.rate
    count = round(rate * found.shown.prediction.seconds) * question.accumulate
    return Budget(found, (question.hours or 0) * 3600, count, unit)


# ---------------------------------------------------------------------- words


def in_words(found: list[Budget], asked: Question) -> list[str]:
    """The best way, what it reaches, how it is written, and others."""
    best = found[0]
    question, row = best.answer.question, best.answer.shown
    lines = [
        f"In {asked.hours:g} h: {best.steps:,} steps of {best.count:,} {best.unit}, {best.step_seconds:.3g} s each, "
        f"{_short(best.total)} {best.unit}{_epochs(best)}{_cost(best)}.",
        f"  {trainer_call(best)}",
        f"  {row.prediction.binds} binds; {in_gib(row.device_bytes)} of device and {in_gib(best.answer.estimate.host.nbytes)} of "
        "host memory",
        f"  {command(question)}",
    ]
    if best.steps < asked.least_steps:
        lines.append(
            f"  No way that fits reaches {asked.least_steps:,} steps (--least-steps); more hours do, or fewer --tokens."
        )
    if faster := next((b for b in found if b.rounds and not best.rounds and b.total > best.total * _GAIN), None):
        lines.append(
            f"  {faster.answer.question.precision} reaches {_short(faster.total)} {faster.unit}, but without float32 weights "
            "each update is rounded to 8 bits of mantissa, and small ones are lost (--precision bf16-true)."
        )
    others = list(_different(found[1:]))[: _SHOWN - 1]
    lines += ["", "other ways, and what they reach:"] * bool(others)
    lines += [
        f"  {_short(each.total):>7} {each.unit} in {each.steps:,} steps: {_way(each.answer.question)}"
        for each in others
    ]
    return lines


def _way(question: Question) -> str:
    return (
        f"--precision {question.precision} --batch {question.batch} --accumulate {question.accumulate} --overlap "
        f"{question.overlap} --optimizer-on {question.optimizer_on}"
    )


def _different(found: list[Budget]) -> Iterator[Budget]:
    """The best way with each place and time of the optimizer, and each precision."""
    seen = set()
    for each in found:
        question = each.answer.question
        key = question.precision, question.overlap, question.optimizer_on
        if key not in seen:
            seen.add(key)
            yield each


def trainer_call(best: Budget) -> str:
    """The Trainer as it is to be written."""
    question = best.answer.question
    accumulate = f", accumulate_grad_batches={question.accumulate}" * (question.accumulate > 1)
    devices = f", {options}" if (options := trainer_options(question)) else ""
    seconds = max(1, round(best.seconds))
    time = f'max_time={{"seconds": {seconds}}}' if seconds % 3600 else f'max_time={{"hours": {seconds // 3600}}}'
    options = f'precision="{question.precision}"{accumulate}{devices}, {time}, max_epochs=-1'
    return f"Trainer(strategy={strategy(question, best.answer.shown.plan)}, {options}){beside(question)}"


def _epochs(best: Budget) -> str:
    if best.epochs is None:
        return ""
    often = "; data that comes more than four times teaches little more" * (best.epochs > _REPEATED)
    return f", {best.epochs:.3g} epochs{often}"


def _cost(best: Budget) -> str:
    return "" if best.cost is None else f", for {best.cost:.4g}"


def _short(count: float) -> str:
    for limit, name in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if count >= limit:
            return f"{count / limit:.3g}{name}"
    return f"{count:g}"


def sizes(found: list[Budget]) -> list[str]:
    """Which of several sizes of a language model expects the least loss; nothing where no size is one, or there is but one."""
    if len(found) < 2 or any(each.unit != "tokens" for each in found):
        return []
    losses = [(expected_loss(each.answer.estimate.parameters, _fresh(each)), each) for each in found]
    lines = ["", f"expected loss by {LAW}, an estimate of nats per token on web text:"]
    lines += [
        f"  {_short(each.answer.estimate.parameters):>7} parameters, {_short(each.total):>7} tokens: {loss:.3f}"
        for loss, each in losses
    ]
    _, best = min(losses, key=lambda each: each[0])
    if any(each.answer.estimate.parameters < FITTED_TO for each in found):
        lines.append(
            f"  The law was fitted to {_short(FITTED_TO)} parameters and more: of smaller models it says nothing."
        )
    return [*lines, f"  the least: {_short(best.answer.estimate.parameters)}"]


def _fresh(each: Budget) -> float:
    """Tokens, as many as there are of the data up to four times."""
    return max(1, each.total if each.data is None else min(each.total, _REPEATED * each.data))


def fields(best: Budget) -> dict[str, Any]:
    """The best way for programs."""
    question = best.answer.question
    return {
        "budget": {
            "hours": question.hours, "batch": question.batch, "accumulate": question.accumulate, "tokens": question.tokens,
            "steps": best.steps, "seconds_per_step": best.step_seconds, f"total_{best.unit}": best.total, "epochs": best.epochs,
            "cost": best.cost,
        },
        "strategy": strategy_options(question, best.answer.shown.plan),
        "trainer": trainer_call(best),
    }  # fmt: skip
