"""Finds changes of a question with which a model fits. Cheaper changes are tried first, each with a new plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from sp_lightning.activations.policy import FREEING
from sp_lightning.planner.answer import Answer, answer
from sp_lightning.planner.arguments import Question, changed, contradictions
from sp_lightning.planner.estimate import Estimate, dtypes, estimate_model
from sp_lightning.planner.verdict import enough_host_memory

_STEP = 2**29  # memory sizes are rounded up to a multiple of these bytes
_MOST = 3  # the number of fitting changes after which the search ends
_MOST_RUNS = 4  # the most dry runs of changed questions
_OF_LOSS = 3  # a loss over tokens needs at most this multiple of the bytes that it saves for backward
_DEVICE = frozenset({"device"})
_HOST = frozenset({"host"})

Changes = dict[str, Any]
"""New values of arguments, by their names."""


def remedies(asked: Answer, notify: Callable[[str], None]) -> list[Answer]:
    """Returns the answers to changed questions that fit, four at most.

    These are the cheapest changes that do not contain each other, a change with which plain Lightning fits, and more memory.

    Args:
        asked: an answer in which plain Lightning does not fit. If this strategy fits, only changes for plain Lightning are tried.
        notify: is called with a message before each slow step.
    """
    found: dict[frozenset[str], Answer] = {}
    estimates = [asked.estimate]
    for changes in _candidates(asked) if asked.best is None else ():
        names = frozenset(changes)
        if len(found) == _MOST:
            break
        if any(other <= names for other in found):
            continue
        ways = [changes]
        if "disk" in changes:  # with "backward", gradients are freed in backward instead of written to the disk
            ways.append({**changes, "optimizer_overlap": "backward"})
        fitting = [
            each for way in ways if (each := _try(asked, way, estimates, notify)) is not None and each.status == 0
        ]
        if fitting:
            found[names] = min(fitting, key=lambda each: each.shown.prediction.seconds)
    planned = (_try(asked, changes, estimates, notify) for changes in _for_plain(asked, [*found.values()]))
    without_us = next((each for each in planned if each is not None and each.fits_plain), None)
    more = _try(asked, _more_memory(asked), estimates, notify)
    others = [each for each in (without_us, more) if each is not None and each.status == 0]
    return [*[*found.values()][: _MOST + 1 - len(others)], *others]


def _for_plain(asked: Answer, found: list[Answer]) -> Iterator[Changes]:
    """Yields changes with which plain Lightning may fit: the model's own checkpoints, a chunked loss, adapters on 16-bit weights.

    Args:
        asked: an answer in which plain Lightning does not fit.
        found: the answers to changed questions that fit.
    """
    estimate, limit = asked.estimate, asked.question.gpu_memory
    if asked.fits_checkpointed and asked.best is None:
        yield {"gradient_checkpointing": True}
    if limit is None or any(each.fits_plain for each in found):
        return
    least = min(estimate.plain_bytes, estimate.checkpointed_bytes)
    # A chunked loss cannot save more than the whole loss needs.
    if _has_loss(asked) and least - _OF_LOSS * estimate.work.outside <= limit < least:
        yield {"loss_tokens": 1024}
        yield {"loss_tokens": 1024, "gradient_checkpointing": True}
    steps = {name: value for step, _, _ in _steps(asked) for name, value in step.items()}
    if "lora" in steps and asked.best is None:
        yield {name: steps[name] for name in ("precision", "lora", "loss_tokens") if name in steps}


def _has_loss(asked: Answer) -> bool:
    """Returns True if the batch may have a loss over tokens that is not chunked."""
    question, estimate = asked.question, asked.estimate
    known = not question.predict and not estimate.why_guessed and question.input is None and not estimate.unit
    return known and question.loss_tokens is None and estimate.work.largest_outside is not None


def _try(refused: Answer, changes: Changes, estimates: list[Estimate], notify: Callable[[str], None]) -> Answer | None:
    """Returns the answer to a changed question; None if the question cannot be answered, or needs one dry run too many.

    Args:
        refused: the answer to the unchanged question.
        changes: the changes; without any, the answer is None.
        estimates: the known estimates. If a dry run is needed, its estimate is appended.
        notify: is called with a message before a dry run.
    """
    question = refused.question.but(**changes)
    if not changes or any(contradictions(question)) or _is_too_large(refused, question):
        return None
    known = next((each for estimate in estimates if (each := estimate.asked(question)) is not None), None)
    if known is None:
        if len(estimates) > _MOST_RUNS:
            return None
        notify(f"tries {changed(refused.question, question)}")
        try:
            known = estimate_model(question)
        except (ValueError, ImportError):
            return None
        estimates.append(known)
    return answer(known)


def _is_too_large(refused: Answer, question: Question) -> bool:
    """Returns True if the weights alone exceed host memory, so that no dry run is needed."""
    limit, dtype = refused.estimate.host.limit, dtypes(question.precision)[0]
    needed = refused.estimate.parameters * dtype.itemsize
    return question.disk is None and question.host_memory == refused.question.host_memory and needed > (limit or needed)


def _candidates(refused: Answer) -> Iterator[Changes]:
    """Yields combinations of one to three of the :func:`_steps` that may reduce every lacking memory.

    Combinations are sorted by price, then by the number of steps.
    """
    lacking = refused.lacking
    steps = [step for step in _steps(refused) if step[1] & lacking]
    several = [chosen for count in (1, 2, 3) for chosen in combinations(steps, count)]
    for chosen in sorted(several, key=lambda chosen: sum(price for _, _, price in chosen)):
        changes = {name: value for step, _, _ in chosen for name, value in step.items()}
        helped = frozenset[str]().union(*(helps for _, helps, _ in chosen))
        # Two steps that change the same argument cannot be combined.
        if lacking <= helped and len(changes) == sum(len(step) for step, _, _ in chosen):
            yield changes


def _steps(refused: Answer) -> Iterator[tuple[Changes, frozenset[str], int]]:
    """Yields single changes, each with the memories (device, host) of which less may be needed, and a price.

    - 0: another window or number of staying layers.
    - 1: the same results, but slower.
    - 2: the same results, but with a disk.
    - 3: another batch size or precision.
    - 4: another training (adapters).
    """
    asked, estimate = refused.question, refused.estimate
    step = estimate.step
    if asked.k or asked.k_prime:
        yield {"k": None, "k_prime": None}, _DEVICE, 0
    if asked.gpu_layers:
        yield {"gpu_layers": 0 if asked.gpu_memory is None or asked.gpu_layers == "auto" else "auto"}, _DEVICE, 0
    if _has_loss(refused):
        yield {"loss_tokens": 1024}, _DEVICE, 1
    if not asked.predict and not estimate.why_guessed:
        for mode in ("auto", *FREEING):
            if asked.activations != mode:
                yield {"activations": mode}, _DEVICE, 1
    if asked.batch_size > 1 and (count := _fitting_batch(refused)):
        yield {"batch_size": count}, _DEVICE, 3
    if step is not None and step.overlap != "off" and not asked.frees:
        yield {"optimizer_overlap": "backward"}, _HOST, 1
    if asked.disk is None and asked.host_memory is not None:
        yield {"disk": asked.measured.drive}, _HOST, 2
    if not asked.stores_16_bits:
        yield {"precision": "bf16-true"}, _DEVICE | _HOST, 3
    weights, gradients = refused.shown.plan.plain
    # With few gradients, the model has adapters already.
    if not asked.predict and asked.lora is None and gradients > weights / 2:
        yield {"lora": 16}, _DEVICE | _HOST, 4


def _fitting_batch(refused: Answer) -> int:
    """Returns the approximate largest batch size that fits. Only activations and caches are proportional to this size."""
    asked, activations = refused.question, refused.estimate.activation_bytes
    room = (asked.gpu_memory or 0) - refused.shown.device_bytes + activations
    return min(asked.batch_size - 1, asked.batch_size * room // activations) if activations > 0 and room > 0 else 0


def _more_memory(refused: Answer) -> Changes:
    """Returns the least device and host memory that are enough, of those that are lacking, rounded up."""
    needed = {"host_memory": enough_host_memory(refused)} if "host" in refused.lacking else {}
    needed |= {"gpu_memory": refused.shown.device_bytes} if "device" in refused.lacking else {}
    return {name: -(-nbytes // _STEP) * _STEP for name, nbytes in needed.items()}
