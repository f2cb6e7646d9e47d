"""Formats an answer as text, and as fields for JSON."""

from __future__ import annotations

from collections.abc import Iterator

from sp_lightning.capabilities.activations.policy import summary
from sp_lightning.core.plan.units import in_gib, number
from sp_lightning.tools.planner.answer import Answer, Row
from sp_lightning.tools.planner.arguments import MODES, Question
from sp_lightning.tools.planner.estimate import Estimate
from sp_lightning.tools.planner.verdict import verdict
from sp_lightning.trainer.metrics import WAITED, remedy

LEAST_WAITING = 0.05
"""The least share of the time for which the answer has advice on a cause of stalls."""
_DAY = 24 * 60 * 60


def as_text(answer: Answer) -> Iterator[str]:
    """Yields the answer as text: the verdict, reasons, and windows if the question names several."""
    yield verdict(answer)
    asked = answer.question
    windows = ["", *_windows(answer)] if len(asked.k or ()) > 1 or len(asked.k_prime or ()) > 1 else []
    yield from ["", *_reasons(answer), *windows]


def _reasons(answer: Answer) -> list[str]:
    estimate, question, row = answer.estimate, answer.question, answer.shown
    without_disk = "" if question.disk is None else "without a disk, "
    return [
        _heading(estimate),
        _device(estimate, row),
        *_host(answer),
        _faster(answer) if answer.host.fits else f"the times are predicted {without_disk}with enough host memory",
        _assumed(estimate),
        *_disk(answer),
        *_step(estimate),
        *(f"note: {note}" for note in _notes(estimate, row)),
    ]


# ---------------------------------------------------------------------- reasons


def _heading(estimate: Estimate) -> str:
    question = estimate.question
    what = "inference" if estimate.step is None else f"training, {estimate.step.name}"
    count = f"{number(estimate.parameters)} parameters"
    if estimate.step is not None and estimate.trained < estimate.parameters:
        count += f", of which {number(estimate.trained)} are trained"
    if question.accumulate_grad_batches > 1:
        what += f" every {question.accumulate_grad_batches} batches"
    if question.gradient_clip:
        what += f", clipped by {question.gradient_clip}"
    where = f" on each of {question.devices} devices" if question.devices > 1 else ""
    return f"{question.model}: {count}, {question.precision}, {what}, {estimate.items}{where}"


def _device(estimate: Estimate, row: Row) -> str:
    weights = row.plan.peak_device_bytes
    what = "weights" if estimate.question.predict else "weights and gradients"
    chosen = f" ({summary(row.modes)})" if estimate.activations == "auto" else ""
    return (
        f"device memory {in_gib(row.device_bytes)}: {what} {in_gib(weights)}, activations and intermediate results "
        f"{in_gib(row.device_bytes - weights)}{chosen}; {estimate.flops(row.plan, row.modes) / 1e12:.3g} TFLOP per "
        f"{_unit(estimate.question)}; plain Lightning needs {in_gib(estimate.plain_bytes)}"
    )


def _unit(question: Question) -> str:
    """Returns the unit of the predicted time."""
    return "batch" if question.generate is None else "token"


def _host(answer: Answer) -> list[str]:
    """Returns a line on the contents of host memory, and with ``--host-memory`` a line on the part that processes use."""
    estimate, question, host = answer.estimate, answer.question, answer.host
    node = " of the node" if question.devices > 1 else ""
    parts = ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in host.parts.items() if nbytes)
    if not parts:
        return [f"host memory{node} {in_gib(host.nbytes)}: everything stays on the GPU"]
    each = f"{host.nbytes / max(estimate.parameters, 1):.3g} bytes per parameter"
    line = f"host memory{node} {in_gib(host.nbytes)}, {each}: {parts}"
    if question.host_memory is None:
        return [line]
    who = "the process, its" if question.devices == 1 else f"the {question.devices} processes, their"
    return [
        line,
        f"of the {in_gib(question.host_memory)}, {in_gib(host.kept)} are for {who} libraries and batches",
    ]


def _disk(answer: Answer) -> list[str]:
    """Returns lines on the contents and traffic of the disk."""
    estimate, question, placement = answer.estimate, answer.question, answer.host.placement
    if question.disk is None:
        return []
    if placement is None:  # the verdict has the host memory that is enough
        return ["disk: in use as far as possible, but host memory is still too small"]
    if not placement.on_disk:
        limit = " (--host-memory is not set)" if question.host_memory is None else ""
        return [f"disk: not used, because everything is in host memory{limit}"]
    each = f"{placement.disk_bytes / max(estimate.parameters, 1):.3g} bytes per parameter"
    what = "weights"
    moved = f"each batch reads {each}, and writes nothing"
    if not question.predict:
        what = "optimizer state"
        moved = f"each step reads and writes {each}"
    lines = [
        f"disk: {in_gib(placement.disk_bytes)} of {what}, of {len(placement.on_disk)} layers, through "
        f"{in_gib(placement.staging)} of host memory; {moved}"
    ]
    trained = answer.host.trained
    assert trained is not None  # None only without a disk
    more = {
        "gradients, which each batch writes and reads once": trained.gradient_bytes,
        "trained weights, which each batch reads up to three times and each step writes once": trained.weight_bytes,
    }
    if trained.any:
        named = ", and ".join(f"{in_gib(nbytes)} of {what}" for what, nbytes in more.items() if nbytes)
        lines.append(f"disk: {named}, through {in_gib(trained.window)} of host memory")
    if answer.best is not None and not question.predict:
        written = (
            placement.disk_bytes + trained.weight_bytes
        ) / question.accumulate_grad_batches + trained.gradient_bytes
        daily = written / answer.best.prediction.seconds * _DAY
        lines.append(
            f"disk: {daily / 1e12:.3g} TB are written in a day of training; compare the endurance of the drive"
        )
    return lines


def _step(estimate: Estimate) -> list[str]:
    """Returns a line on the time of an optimizer's step; no line if a step takes the time of a pass over memory."""
    step = estimate.step
    if step is None or step.seconds is None:
        return []
    how = "layer by layer beside the device's work"
    if step.on_device:
        how = "layer by layer"
    elif step.overlap == "off":
        how = "and the device waits; torch's fused optimizers can run beside it"
    return [f"{step.name}: each step takes {step.why}, {how}"]


def _assumed(estimate: Estimate) -> str:
    question, step = estimate.question, estimate.step
    optimizer = "" if step is None else f"{step.name} ({step.source}), "
    known = {
        "tflops": f"{question.tflops:g} TFLOP/s", "device_bandwidth": f"{question.device_bandwidth / 1e9:g} GB/s on the device",
        "pcie": f"{question.pcie / 1e9:g} GB/s each way",
        "host_bandwidth": f"{question.host_bandwidth / 1e9:g} GB/s of host memory",
    }  # fmt: skip
    measured = [each for name, each in known.items() if name in question.measured.names]
    assumed = [name for name in known if name not in question.measured.names]
    options = f" (--{' --'.join(assumed)})".replace("_", "-") if assumed else ""
    line = f"measured: {', '.join(measured)} ({question.rates}); " if measured else ""
    line += f"assumed: {optimizer}{', '.join(known[name] for name in assumed)}{options}".removesuffix(", ")
    if question.gpu_memory is None:
        line += "; no --gpu-memory: any amount is there"
    if question.devices > 1:
        line += f"; {question.links / 1e9:g} GB/s from each device to the others (--links)"
    return line


def _windows(answer: Answer) -> list[str]:
    """Returns a heading and a line for each window."""
    per = f"s/{_unit(answer.question)}"
    lines = [f"   k  k' {'weights+grads':>14} {'with the rest':>14} {per:>9} {'waiting':>8}  binds"]
    for row in answer.rows:
        weights = in_gib(row.plan.peak_device_bytes)
        everything = in_gib(row.device_bytes)
        mark = "" if row.fits else "  does not fit"
        if row is answer.best:
            mark = " ◀"
        lines.append(
            f"{row.plan.k:>4} {row.plan.k_prime:>3} {weights:>14} {everything:>14} "
            f"{row.prediction.seconds:>9.3g} {row.waiting:>8.0%}  {row.prediction.binds}{mark}"
        )
    return lines


def _faster(answer: Answer) -> str:
    """Returns a line on changes that make a batch faster."""
    row = answer.shown
    waited = answer.waits
    plan = row.plan
    now = row.prediction.seconds
    what = max(waited, key=waited.__getitem__, default="")
    if waited.get(what, 0) >= LEAST_WAITING * now:
        # In seconds, as in the message of a run. The verdict has the share of the time.
        why = f"the GPU waits {waited[what]:.3g} of {now:.3g} s for {WAITED[what]}. {remedy(what, plan)}."
    else:
        why = f"the GPU computes {1 - row.waiting:.0%} of the time; only fewer operations or a faster GPU help."
    return f"faster: with k = {plan.k} and k' = {plan.k_prime}, {why}"


def _notes(estimate: Estimate, row: Row) -> list[str]:
    """Returns sentences on parts of a batch that are not counted, and on large activations outside of all layers."""
    work = estimate.work
    notes = [*estimate.notes]
    if estimate.question.predict:
        return notes
    notes += [estimate.found.grouping_advice] if estimate.found.grouping_advice else []
    largest = work.largest_outside
    saved = max((call.saved for call in work.calls), default=0)
    if largest is not None and (work.outside > work.saved(row.modes) / 4 or largest.nbytes > saved):
        loss = ""
        if "token" in estimate.items:
            loss = " If they are the loss's logits, compute the loss in chunks (examples/guide/memory.md)."
        notes.append(
            f"{in_gib(work.outside)} of activations lie outside the layers (largest: {largest}). activations= does not reduce "
            f"them.{loss}"
        )
    return notes


# ---------------------------------------------------------------------- JSON


def as_fields(answer: Answer) -> dict[str, object]:
    """Returns one answer as fields for JSON."""
    estimate, best, question, work = answer.estimate, answer.best, answer.question, answer.estimate.work
    plan, modes = answer.rows[0].plan, answer.rows[0].modes
    rates = ("device_bandwidth", "pcie", "host_bandwidth", "links")
    return {
        "model": question.model, "precision": question.precision, "optimizer_on": question.optimizer_on,
        "gpu_layers": question.gpu_layers,
        "pack_experts": question.pack_experts,
        "batch": estimate.items, "training": not question.predict,
        "devices": question.devices, "generated_tokens": question.generate,
        "parameters": estimate.parameters, "trained_parameters": estimate.trained,
        "tables": [{"name": table.name, "bytes": table.nbytes} for table in plan.tables],
        "layers": [{"name": layer.name, "bytes": layer.nbytes} for layer in plan.layers],
        "activations": estimate.activations,
        "activation_bytes": estimate.activation_bytes,
        "saved_bytes": {mode: work.saved(mode) for mode in MODES},
        "offloaded_bytes": work.offloaded("offload"),
        "flops": estimate.flops(plan, modes),
        "prompt_seconds": answer.prompt_seconds,
        "plain_bytes": estimate.plain_bytes,
        "checkpointed_bytes": estimate.checkpointed_bytes,
        "host_bytes": answer.host.nbytes,
        "host_parts": dict(answer.host.parts), "host_fits": answer.host.fits,
        "disk": _disk(answer) or None,
        "notes": [*plan.notes, *_notes(estimate, answer.rows[0])],
        "assumed": {"tflops": question.tflops}
        | {f"{name.partition('_')[0]}_gbps": getattr(question, name) / 1e9 for name in rates},
        "measured": sorted(question.measured.names),
        "windows": [_window(row) for row in answer.rows],
        "best": None if best is None else {"k": best.plan.k, "k_prime": best.plan.k_prime, "gpu_layers": len(best.plan.stay)},
        "verdict": verdict(answer),
    }  # fmt: skip


def _window(row: Row) -> dict[str, object]:
    return {
        "k": row.plan.k, "k_prime": row.plan.k_prime, "gpu_layers": len(row.plan.stay), "activations": summary(row.modes),
        "device_bytes": row.device_bytes, "fits": row.fits,
        "seconds": row.prediction.seconds, "busy_seconds": row.prediction.busy, "binds": row.prediction.binds,
    }  # fmt: skip
