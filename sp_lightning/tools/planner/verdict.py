"""The verdict of ``plan``: whether the model fits, with plain Lightning or with this strategy, and the recommended options."""

from __future__ import annotations

import json

from sp_lightning.capabilities.activations.policy import summary
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import enough_gib, exact_bytes, in_gib
from sp_lightning.tools.planner.answer import Answer, Row
from sp_lightning.tools.planner.arguments import Question
from sp_lightning.tools.planner.estimate import Estimate
from sp_lightning.trainer.metrics import WAITED

_OVER = {"updates": " in host memory", "fetches": " over PCIe", "gradient offloading": " over PCIe"}


def verdict(answer: Answer) -> str:
    """Returns the verdict in one or more lines."""
    estimate, limit, lines = answer.estimate, answer.question.gpu_memory or 0, list[str]()
    if answer.fits_plain:
        needed = _of(estimate.plain_bytes, limit)
        lines.append(f"You don't need sp_lightning: plain Lightning fits ({needed}) and is faster.")
    elif answer.fits_checkpointed:
        needed = _of(estimate.checkpointed_bytes, limit)
        lines.append(f"{_CHECKPOINTED} ({needed}).")
    if answer.best is not None:
        more = [*_modes(estimate, answer.best), *_staying(answer, answer.best)]
        return "\n".join([*lines, _recommended(answer, answer.best), *more])
    reasons = [_refused_by_host(answer)] if "host" in answer.lacking else []
    reasons += [_refused_by_device(answer)] if "device" in answer.lacking else []
    # The line that determines the exit status is the first one.
    return "\n".join([*lines, *reasons] if answer.fits_plain else [*reasons, *lines])


_CHECKPOINTED = "Plain Lightning fits if each layer runs in torch.utils.checkpoint"


def _of(needed: int, limit: int) -> str:
    return f"{in_gib(needed)} of {in_gib(limit)}"


def _too_little(needed: int, limit: int) -> str:
    """Returns the available and the missing memory. Both are printed, because two rounded sizes may look equal."""
    return f"{in_gib(limit)} available, {in_gib(needed - limit)} short"


def _refused(answer: Answer) -> str:
    return "With this strategy it does not fit" if answer.fits_plain else "It does not fit"


def _refused_by_host(answer: Answer) -> str:
    question, host = answer.question, answer.host
    disk = question.disk is not None
    processes = "the process" if question.devices == 1 else "the processes"
    return (
        f"{_refused(answer)}{', even with a disk' * disk}: {in_gib(host.nbytes)} of host memory needed (without {processes} and "
        f"libraries), {_too_little(host.nbytes, host.limit or 0)}. --host-memory {enough_gib(enough_host_memory(answer))} is "
        "enough."
    )


def enough_host_memory(answer: Answer) -> int:
    """Returns the least ``--host-memory`` that is enough, in bytes."""
    from sp_lightning.capabilities.disk.host_budget import limit_for

    question, host = answer.question, answer.host
    return limit_for(host.nbytes, question.devices, disk=question.disk is not None)


def _refused_by_device(answer: Answer) -> str:
    least, limit = answer.shown.device_bytes, answer.question.gpu_memory or 0
    return (
        f"{_refused(answer)}: at least {in_gib(least)} of GPU memory needed, "
        f"{in_gib(least - answer.shown.plan.peak_device_bytes)} of it for activations and intermediate results; "
        f"{_too_little(least, limit)}."
    )


def _recommended(answer: Answer, best: Row) -> str:
    question, estimate = answer.question, answer.estimate
    limited = question.gpu_memory is not None
    fits = "It fits" if limited else "The fastest"
    if answer.fits_plain or answer.fits_checkpointed:
        fits = "With this strategy"
    plain = "" if limited else f" Plain Lightning needs {in_gib(estimate.plain_bytes)} of GPU memory."
    inside = f" in Trainer({options})" if (options := trainer_options(question)) else ""
    chosen = f"{strategy(estimate, best.plan)}{inside}{beside(estimate)}"
    return f"{fits}: {chosen}, {speed(answer)}; {waiting(answer)}.{plain}"


def _modes(estimate: Estimate, best: Row) -> list[str]:
    """Returns a line on the chosen modes of activations; no line if a mode was given, or if ``auto`` keeps all activations."""
    return [f"Not all activations fit: {summary(best.modes)}."] if estimate.activations == "auto" else []


def _staying(answer: Answer, best: Row) -> list[str]:
    """Returns a line on layers that stay on the GPU: their number and memory, and the resource that binds.

    Returns no line without ``--gpu-layers``.
    """
    question, plan, host = answer.question, best.plan, best.host
    if not question.gpu_layers:
        return []
    if not plan.stay:
        return ["No layer stays on the GPU: none fits beside the window and activations, or it is not faster."]
    count = len(plan.stay) + len(plan.layers)
    return [
        f"{len(plan.stay)} of {count} layers stay on the GPU, and take {in_gib(plan.stay_bytes)} there: "
        f"{in_gib(best.device_bytes)} of GPU memory; {in_gib(host.nbytes)} of host memory; {best.prediction.binds} binds."
    ]


def speed(answer: Answer) -> str:
    """Returns the seconds of a batch, or of prompts and tokens, and the items per second."""
    question, seconds = answer.question, answer.shown.prediction.seconds
    each = " on each device" if question.devices > 1 else ""
    time = f"{seconds:.3g} s per batch{each}"
    if answer.prompt_seconds is not None:
        time = (
            f"{answer.prompt_seconds:.3g} s for the prompts, then {seconds:.3g} s for each token of {question.batch_size} "
            f"sequence{'s' * (question.batch_size > 1)}{each}"
        )
    number, what = answer.rate
    return f"{time}, {number:.3g} {what}/s" if number < 1000 else f"{time}, {number:.0f} {what}/s"


def waiting(answer: Answer) -> str:
    """Returns the share of the time in which the device stalls, and the causes."""
    total = 0.0
    parts: list[str] = []
    row = answer.shown
    step = answer.estimate.step
    over = dict(_OVER)
    if step is not None and (step.on_device or step.seconds is not None):
        over["updates"] = " on the GPU" if step.on_device else ""
    for what, seconds in answer.waits.items():
        before, total = total, total + 100 * seconds / row.prediction.seconds
        if percent := round(total) - round(before):  # so that the parts add up to the whole
            parts.append(f"{percent}% for {WAITED[what]}{over.get(what, '')}")
    causes = f" ({', '.join(parts)})" if parts else ""
    return f"the GPU waits {row.waiting:.0%} of the time{causes}"


def strategy_options(estimate: Estimate, plan: Plan) -> dict[str, object]:
    """Returns the options of the strategy that reproduce the plan."""
    question, options = estimate.question, dict[str, object](k=plan.k, k_prime=plan.k_prime)
    # Left out if "auto", the default of the strategy, keeps all activations.
    if question.activations != "auto" or estimate.activations == "auto":
        options["activations"] = question.activations
    if estimate.activations == "auto":
        options["gpu_memory"] = exact_bytes(question.gpu_memory or 0)
    if question.optimizer_overlap != "auto" and not question.predict:
        options["optimizer_overlap"] = question.optimizer_overlap
    if question.optimizer_on != "cpu" and not question.predict:
        options["optimizer_on"] = question.optimizer_on
    if question.gpu_layers:
        options["gpu_layers"] = question.gpu_layers
    if question.disk is not None:
        options["disk"] = "FOLDER"
        if question.host_memory is not None:
            options["host_memory"] = exact_bytes(question.host_memory)
    return options | {name: given for name in ("layers", "keep_on_gpu") if (given := getattr(question, name))}


def strategy(estimate: Estimate, plan: Plan) -> str:
    """Returns the Python call that creates the strategy."""
    options = strategy_options(estimate, plan)
    return f"SuperpipelineStrategy({', '.join(f'{name}={json.dumps(value)}' for name, value in options.items())})"


def trainer_options(question: Question) -> str:
    """Returns the Trainer's arguments for devices; an empty text for one device."""
    return f"devices={question.devices}" if question.devices > 1 else ""


def beside(estimate: Estimate) -> str:
    """Returns the changes of the model that the plan needs, as the end of a sentence."""
    question = estimate.question
    text = ""
    if question.gradient_checkpointing:
        text += f" and the model's {estimate.checkpointing}()"
    if question.lora is not None:
        text += f' and PEFT\'s LoraConfig(r={question.lora}, target_modules="all-linear")'
    if question.pack_experts:
        text += f' and sp_lightning.pack_experts(model, "{question.pack_experts}")'
    return text
