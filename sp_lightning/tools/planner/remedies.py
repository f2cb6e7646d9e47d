"""Changes of a question with which a model fits. Each is one of a few fixed changes, the cheapest first, and is planned anew."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from sp_lightning.tools.planner.answer import Answer, answer
from sp_lightning.tools.planner.arguments import Question, changed, contradictions
from sp_lightning.tools.planner.estimate import Estimate, dtypes, estimate_model
from sp_lightning.tools.planner.verdict import enough_host_memory

_STEP = 2**29  # memory sizes are rounded up to a multiple of these bytes
_MOST = 3  # the most changes that are shown, besides more memory
_MOST_RUNS = 4  # the most dry runs of changed questions

Changes = dict[str, Any]
"""New values of arguments, by their names."""


def remedies(asked: Answer, notify: Callable[[str], None]) -> Iterator[Answer]:
    """Yields the answers to changed questions that fit: the three cheapest changes, and more memory.

    A change that contains a cheaper one is left out.

    Args:
        asked: an answer in which the model does not fit.
        notify: is called with a message before each slow step.
    """
    found: list[frozenset[str]] = []
    estimates = [asked.estimate]
    for changes in _ways(asked):
        names = frozenset(changes)
        if len(found) == _MOST or any(other <= names for other in found):
            continue
        tried = _try(asked, changes, estimates, notify)
        if tried is not None and tried.status == 0:
            found.append(names)
            yield tried
            if tried.fits_plain:
                break
    more = _try(asked, _more_memory(asked), estimates, notify)
    if more is not None and more.status == 0:
        yield more


def _ways(refused: Answer) -> Iterator[Changes]:
    """Yields the changes that may reduce every lacking memory, in this order.

    1. The same results: the defaults of the window and the activations, recomputed activations, updates in backward,
       a disk.
    2. Experts in 4 bits, a smaller batch, 16-bit weights.
    3. Another training (adapters).
    """
    asked, estimate, lacking = refused.question, refused.estimate, refused.lacking
    backward: Changes = {}
    if estimate.step is not None and estimate.step.overlap != "off" and not asked.frees:
        backward = {"optimizer_overlap": "backward"}
    recompute = {} if asked.predict or asked.activations == "recompute" else {"activations": "recompute"}
    device = [usual := _usual(asked), recompute]
    host = [backward]
    if asked.disk is None and asked.host_memory is not None:
        host.append({"disk": asked.measured.drive, **backward})
    both: list[Changes] = []
    pack = {"pack_experts": "nvfp4"} if estimate.stacked and not asked.pack_experts else {}
    if pack and (asked.predict or asked.lora):
        both.append(pack)
    if not asked.stores_16_bits:
        both += [{"precision": "bf16-true"}, {"precision": "bf16-true", **backward}]
    weights, gradients = refused.shown.plan.plain
    if not asked.predict and asked.lora is None and gradients > weights / 2:
        both += [{"lora": 16}, {"lora": 16, **pack}, {"lora": 16, "precision": "bf16-true"}]
    if lacking == {"device"}:
        batch = {"batch_size": count} if asked.batch_size > 1 and (count := _fitting_batch(refused)) else {}
        yield from (*device, batch, *both)
    elif lacking == {"host"}:
        yield from (*host, *both)
    else:
        yield from both
        yield from ({**usual, **recompute, **way} for way in (*host, *both))


def _usual(asked: Question) -> Changes:
    """Returns the defaults of the options that the user gave and that take device memory."""
    usual: Changes = {"k": None, "k_prime": None} if asked.k or asked.k_prime else {}
    if asked.gpu_layers:
        usual["gpu_layers"] = 0 if asked.gpu_memory is None or asked.gpu_layers == "auto" else "auto"
    return usual if asked.activations == "auto" or asked.predict else {**usual, "activations": "auto"}


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
    elsewhere = question.pack_experts or question.disk or question.host_memory != refused.question.host_memory
    return not elsewhere and needed > (limit or needed)


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
