"""The last lines of an answer: does the model fit, and what is to be chosen?"""

from __future__ import annotations

import json

from sp_lightning.cli.answer import Answer
from sp_lightning.cli.arguments import MODES, Question
from sp_lightning.plan.host_memory import limit_for
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import enough_bytes, exact_bytes, human_bytes


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
        advice = f"Use a smaller batch{_fitting_batch(question.batch, limit - weights, activations)}"
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


def _fitting_batch(batch: int, free: int, activations: int) -> str:
    """The batch that would fit: activations and caches grow with it, weights do not. Memory is in bytes."""
    count = int(batch * free / activations) if activations > 0 else 0
    return f" (about {count} would fit)" if 1 <= count < batch else ""


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
