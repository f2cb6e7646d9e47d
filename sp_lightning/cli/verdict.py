"""The verdict of ``plan``: whether the model fits, and what to choose, or what would make it fit."""

from __future__ import annotations

import json

from sp_lightning.cli.answer import Answer, Row
from sp_lightning.cli.arguments import MODES, Question
from sp_lightning.plan.host_memory import limit_for
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import enough_bytes, exact_bytes, human_bytes


def verdict(answer: Answer) -> str:
    """What the answer comes to, in one line or two."""
    refusals = [] if answer.estimate.host.fits else [_refused_by_host(answer)]
    if not any(row.fits for row in answer.rows):
        refusals.append(_refused_by_device(answer))
    return "\n".join(refusals) if answer.best is None else _recommended(answer, answer.best)


def _too_little(needed: int, limit: int) -> str:
    """What there is, and what is missing, which may be less than the last digit of both."""
    return f"{human_bytes(limit)} are there, {human_bytes(needed - limit)} too little"


def _refused_by_host(answer: Answer) -> str:
    question, host = answer.question, answer.estimate.host
    disk = question.disk is not None
    processes = "the process" if question.devices == 1 else "the processes"
    enough = enough_bytes(limit_for(host.nbytes, question.devices, disk=disk))
    frozen = "freeze layers, or train adapters"
    less = f"Use --precision bf16-true, or {frozen}" if question.precision != "bf16-true" else frozen.capitalize()
    if question.overlap != "backward":
        less += "; --overlap backward saves gradients"
    return (
        f"It does not fit{', although there is a disk' * disk}: {human_bytes(host.nbytes)} of host memory are needed beside "
        f"what {processes} and libraries take, {_too_little(host.nbytes, host.limit or 0)}: --host-memory {enough} is "
        f"enough. {'Use a lower precision: --precision bf16-true' if question.predict else less}."
    )


def _refused_by_device(answer: Answer) -> str:
    question, work = answer.question, answer.estimate.work
    least, limit = min(row.device_bytes for row in answer.rows), question.gpu_memory or 0
    activations = answer.estimate.activation_bytes
    weights = least - activations
    needs = {mode: weights + work.alive(mode) for mode in MODES if mode != question.activations}
    if question.predict:
        needs = {}
    helpful = {mode: needed for mode, needed in needs.items() if needed <= limit}
    joined = ", or"
    if helpful or (activations > least / 2 and weights < limit):
        # Activations and caches grow with the batch, weights do not.
        count = int(question.batch * (limit - weights) / activations) if activations > 0 else 0
        advice = "Use a smaller batch" + f" (about {count} would fit)" * (1 <= count < question.batch)
    else:
        advice = "Cut layers finer with --layers"
    if not helpful and needs and min(needs.values()) < 0.9 * least:
        mode = min(needs, key=needs.__getitem__)
        helpful, joined = {mode: needs[mode]}, ";"
    for mode, needed in helpful.items():
        more = f", and {human_bytes(work.offloaded)} more of the host" if mode == "offload" else ""
        advice += f"{joined} --activations {mode} (the least is {human_bytes(needed)} then{more})"
    return (
        f"It does not fit: the least is {human_bytes(least)} of device memory, of which {human_bytes(activations)} are "
        f"activations; {_too_little(least, limit)}. {advice}."
    )


def _recommended(answer: Answer, best: Row) -> str:
    question, limited = answer.question, answer.question.gpu_memory is not None
    fits = "It fits" if limited else "The fastest"
    if answer.estimate.guessed:
        fits = "Weights and gradients fit, activations are unknown" if limited else "Perhaps the fastest"
    seconds, each = best.prediction.seconds, " on each device" * (question.devices * question.nodes > 1)
    time = f"{seconds:.3g} s per batch"
    if answer.prompt_seconds is not None:
        time = (
            f"{answer.prompt_seconds:.3g} s for the prompts, then {seconds:.3g} s for each token of {question.batch} "
            f"sequence{'s' * (question.batch > 1)}: {question.batch / seconds:.3g} tokens/s"
        )
    return f"{fits}: {_choice(question, best.plan)}, {time}{each}."


def _choice(question: Question, plan: Plan) -> str:
    """The strategy as it is to be written: every option that the answer depends on."""
    options: dict[str, object] = {"k": plan.k, "k_prime": plan.k_prime}
    if question.activations != "keep":
        options["activations"] = question.activations
    if question.activations == "auto":
        options["memory_budget"] = exact_bytes(question.gpu_memory or 0)
    if question.overlap != "forward" and not question.predict:
        options["optimizer_overlap"] = question.overlap
    if question.transfer != "whole":
        options["transfer"] = question.transfer
    if question.disk is not None:
        options["disk"] = "FOLDER"
        if question.host_memory is not None:
            options["host_memory"] = exact_bytes(question.host_memory)
    options |= {name: given for name in ("layers", "resident") if (given := getattr(question, name))}
    text = f"SuperpipelineStrategy({', '.join(f'{name}={json.dumps(value)}' for name, value in options.items())})"
    if question.devices * question.nodes > 1:
        text += f" in Trainer(devices={question.devices}{f', num_nodes={question.nodes}' * (question.nodes > 1)})"
    if question.checkpointing:
        text += " and the model's gradient_checkpointing_enable()"
    if question.loss_tokens:
        keep = ", keep_logits=True" * question.keep_logits
        text += f" and sp_lightning.chunk_loss(model, tokens={question.loss_tokens}{keep})"
    return text
