"""An answer in words for people, and as JSON for programs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace

from sp_lightning.cli.answer import Answer, Row, verdict
from sp_lightning.cli.arguments import MODES, Question
from sp_lightning.cli.model_estimate import ModelEstimate
from sp_lightning.observe.stats import remedy
from sp_lightning.plan.activation_policy import summary
from sp_lightning.plan.units import human_bytes
from sp_lightning.tune.dry_run import Work
from sp_lightning.tune.host_time import host_seconds

# Waiting that takes a smaller share of the time is not worth a line.
_LEAST_WAITING = 0.05


def as_text(answer: Answer) -> str:
    """The answer for people."""
    estimate, question, best = answer.estimate, answer.question, answer.best
    row = best or answer.rows[0]
    without_disk = "" if question.disk is None else "without a disk, "
    state = estimate.ledger.state if estimate.ledger else None
    lines = [
        _heading(estimate),
        row.plan.table(training=not question.predict, state=state),
        "",
        _activations(estimate, row),
        _host(estimate),
        *_processes(estimate),
        *(_disk(answer) or ()),
        *_step(estimate),
        *_assumed(question),
        "",
        *_windows(answer),
        *_words(answer),
        *_experts(estimate, row),
        "",
        _faster(estimate, row) if answer.host_fits else f"the times are those {without_disk}with enough host memory",
        *_nodes_gain(estimate, row),
    ]
    if estimate.work is not None and not question.predict:
        lines += ["", *_modes(estimate.work), *(f"note: {note}" for note in _notes(estimate))]
    return "\n".join([*lines, "", verdict(answer)])


def _heading(estimate: ModelEstimate) -> str:
    question = estimate.question
    what = "inference" if estimate.step is None else f"training, {estimate.step.name}"
    size, count = estimate.parameters, str(estimate.parameters)
    if size >= 1e4:
        count = f"{size / 1e9:.2f} B" if size >= 1e8 else f"{size / 1e6:.2f} M"
    if question.accumulate > 1:
        what += f" every {question.accumulate} batches"
    if question.clip:
        what += f", clipped by {question.clip}"
    where = f" on each of {question.devices} devices" if question.devices > 1 else ""
    where += f" {'of' if where else 'on'} each of {question.nodes} nodes" if question.nodes > 1 else ""
    return f"{estimate.question.model}: {count} parameters, {question.precision}, {what}, {estimate.model.items}{where}"


def _experts(estimate: ModelEstimate, row: Row) -> list[str]:
    """What stacked experts take of the links, and how that changes if some of them are on the device already."""
    stacked = {index for index, layer in enumerate(row.plan.layers) if layer.rows}
    if not stacked or estimate.work is None:
        return []
    lines = []
    for hits in (0.0, 0.25, 0.5, 0.75):
        costs = tuple(replace(cost, share=cost.share * (1 - hits)) for cost in estimate.work.costs)
        prediction = replace(estimate, work=replace(estimate.work, costs=costs)).predict(row.plan, row.modes)
        fetches = [each for each in prediction.intervals if each.kind == "fetch"]
        fetched = human_bytes(sum(each.nbytes for each in fetches))
        experts = human_bytes(sum(each.nbytes for each in fetches if each.layer in stacked))
        lines.append(f"  {hits:4.0%}  {fetched:>10}, of that experts {experts:>10}  {prediction.seconds:.3g} s")
    unit = "batch" if estimate.question.generate is None else "token of each sequence"
    kept = f"{human_bytes(row.plan.stack_bytes)} in all"
    return ["", f"per {unit}, if so many of the experts that it is routed to ({kept}) are on the device:", *lines]


def _activations(estimate: ModelEstimate, row: Row) -> str:
    if estimate.work is None:
        return (
            f"activations unknown: no batch could be run without values ({estimate.why_no_work}). Times are guessed from "
            f"parameter counts, as if each weight was used {estimate.model.uses} times in a forward"
        )
    per = "batch" if estimate.question.generate is None else "token"
    flops = f"{estimate.flops(row.plan, row.modes) / 1e12:.3g} TFLOP per {per}"
    nbytes = row.device_bytes - estimate.weight_bytes(row.plan)
    chosen = f"; {summary(row.modes)}" if estimate.question.activations == "auto" else ""
    return f"activations and intermediate results {human_bytes(nbytes)}, {flops}{chosen}"


def _host(estimate: ModelEstimate) -> str:
    ledger, nbytes = estimate.ledger, estimate.host_bytes
    node = " of each node" if estimate.question.nodes > 1 else " of the node" if estimate.question.devices > 1 else ""
    if ledger is None:
        return f"host memory{node} {human_bytes(nbytes)}"
    parts = f"weights {human_bytes(ledger.weights)}, gradients {human_bytes(ledger.gradients)}"
    if estimate.offloaded_bytes:
        parts = f"activations {human_bytes(estimate.offloaded_bytes)}, {parts}"
    parts += f", optimizer state {human_bytes(ledger.state or 0)}"
    if estimate.below is not None and estimate.below.placement is None:
        return f"host memory{node} at least {human_bytes(nbytes)}, with as much as possible on the disk; in all there are {parts}"
    below, on_disk = estimate.below, ""
    if below is not None and below.placement is not None and below.placement.on_disk:
        away = below.placement.disk_bytes + sum(below.weights.values()) + sum(below.gradients.values())
        through = below.placement.staging + below.window
        on_disk = f"; {human_bytes(away)} of these are on the disk, and pass through {human_bytes(through)} of memory"
    each = nbytes / max(estimate.parameters, 1)
    return (
        f"host memory{node} {human_bytes(nbytes)}, {each:.3g} bytes per parameter: {parts}{on_disk}{_hooks(estimate)}"
    )


def _disk(answer: Answer) -> list[str] | None:
    """What is on the disk; None without one."""
    below, best = answer.estimate.below, answer.best
    if below is None:
        return None
    return below.lines(answer.estimate.parameters, None if best is None else best.prediction.seconds)


def _processes(estimate: ModelEstimate) -> list[str]:
    """What processes take of the host memory that there is."""
    question, who = estimate.question, "the process, its"
    if question.host_memory is None:
        return []
    if question.devices > 1:
        who = f"the {question.devices} processes, their"
    kept = human_bytes(estimate.kept_for_processes)
    return [
        f"of the {human_bytes(question.host_memory)}, {kept} are for {who} libraries and batches; a run on the CPU has "
        "activations and the layers of its window there, too"
    ]


def _hooks(estimate: ModelEstimate) -> str:
    """Where more host memory is needed than is said."""
    fused = estimate.step is not None and estimate.step.seconds is None
    question = estimate.question
    mixed = question.precision.endswith("-mixed") and question.devices * question.nodes == 1
    narrow = fused and estimate.overlap == "forward" and mixed and question.accumulate == 1
    return "; a module with hooks between two steps needs what --overlap off says" if narrow else ""


def _step(estimate: ModelEstimate) -> list[str]:
    """What an optimizer's step takes, if it is more than a pass over memory."""
    step = estimate.step
    if step is None or step.seconds is None:
        return []
    if step.separable:
        return [f"{step.name}: each step takes {step.why}, layer by layer beside the device's work"]
    return [
        f"{step.name}: each step takes {step.why}, and the device waits: only torch's fused optimizers, and torchao's with a "
        "state of few bits, run beside it"
    ]


def _assumed(question: Question) -> list[str]:
    line = (
        f"assumed: {question.tflops:g} TFLOP/s, {question.device_bandwidth:g} GB/s on the device, "
        f"{question.pcie:g} GB/s each way, {question.dram:g} GB/s of host memory "
        "(--tflops --device-bandwidth --pcie --dram)"
    )
    seconds = host_seconds(training=not question.predict, measured=question.measure_host)
    visit, weight = (1e6 * each for each in seconds)
    known = "measured of this host" if question.measure_host else "assumed of the host (--measure-host)"
    host = f"{known}: {visit:.0f} µs of Python for each visit of a layer, and {weight:.0f} µs for each weight in it"
    lines = [line, host]
    if question.devices > 1:
        uploads, updates = "fetches all layers by itself", "one process updates the weights for all, "
        if question.transfer == "sliced":
            uploads = f"uploads 1/{question.devices} of each layer, and gets the rest from the others"
        lines.append(
            f"assumed of the {question.devices} devices: each has so many TFLOP/s and GB/s and {uploads}; they "
            f"share the host's memory, {updates * (not question.predict)}and {question.links:g} GB/s lead from each device "
            "to the others (--links). Beside that, each process may have a copy of the weights while a run begins: build the "
            "module on the meta device (weights=) and there is none"
        )
    if question.nodes > 1:
        lines.append(
            f"assumed of the {question.nodes} nodes: each has a copy of everything and updates it, and "
            f"{question.network / 1e9:g} GB/s lead from each node to the others, each way, for all its devices together "
            "(--network)"
        )
    return lines


def _windows(answer: Answer) -> list[str]:
    """A line for each window, below a heading."""
    estimate, best = answer.estimate, answer.best
    per = "s/batch" if answer.question.generate is None else "s/token"
    lines = [f"   k  k' {'weights+grads':>14} {'with the rest':>14} {per:>9} {'waiting':>8}  binds"]
    for row in answer.rows:
        weights = human_bytes(estimate.weight_bytes(row.plan))
        everything = human_bytes(row.device_bytes) if estimate.work is not None else "?"
        mark = " ◀" if row is best else "" if row.fits else "  does not fit"
        lines.append(
            f"{row.plan.k:>4} {row.plan.k_prime:>3} {weights:>14} {everything:>14} "
            f"{row.prediction.seconds:>9.3g} {row.waiting:>8.0%}  {row.prediction.binds}{mark}"
        )
    return lines


def _words(answer: Answer) -> list[str]:
    """What the columns mean, a line each."""
    question = answer.question
    weights = (
        "weights on the device" if question.predict else "weights on the device, and gradients on their way to the host"
    )
    rest = "the same with activations" + (", keys and values" if question.generate is not None else "")
    sums = [] if question.predict else ["sums of gradients"]
    links = " and ".join([*sums, *["layers"] * (question.transfer == "sliced")])
    words = {
        "k": "layers that are usable on the device at once",
        "k'": "layers that move as one transfer; a window is k and k' with their memory",
        "weights+grads": weights,
        "with the rest": f"{rest} and intermediate results: what the device needs",
        "waiting": "share of the time in which the device does not compute",
        "binds": "what takes longest and so decides the time; host: Python's own time; host memory: reading and writing it"
        + f"; links: {links} between devices" * (question.devices > 1)
        + "; network: sums of gradients between nodes" * (question.nodes > 1),
        "◀": "the smallest of the fastest windows that fit",
    }
    return ["", *(f"  {word:<14} {meaning}" for word, meaning in words.items())]


def _faster(estimate: ModelEstimate, row: Row) -> str:
    """What would make it faster: the batch is predicted without each kind of waiting."""
    rates, plan = estimate.rates, row.plan
    # In inference, fetches alone pass over the host's memory.
    memory = math.inf if estimate.question.predict else rates.host_memory
    without = {
        "fetches": estimate.predict(plan, row.modes, replace(rates, upload=math.inf, host_memory=memory)),
        "gradients to leave": estimate.predict(plan, row.modes, replace(rates, download=math.inf)),
        "updates": estimate.predict(plan, row.modes, updates=False),
        "the host": estimate.predict(plan, row.modes, replace(rates, visit_seconds=0.0, weight_seconds=0.0)),
    }
    if estimate.question.devices > 1:
        without["sums of gradients"] = estimate.predict(plan, row.modes, replace(rates, links=math.inf))
    if estimate.question.devices > 1 and not rates.sliced:
        without["whole uploads"] = estimate.predict(plan, row.modes, replace(rates, sliced=True))
    if estimate.question.nodes > 1:
        without["sums over nodes"] = estimate.predict(plan, row.modes, replace(rates, network=math.inf))
    if estimate.below is not None:
        without["the disk"] = estimate.predict(plan, row.modes, replace(rates, disk=math.inf))
    if "offload" in row.modes.values():
        without["activations"] = estimate.predict(plan, dict.fromkeys(row.modes, "keep"))
    saved = {what: 1 - other.seconds / max(row.prediction.seconds, 1e-9) for what, other in without.items()}
    what = max(saved, key=saved.__getitem__)
    slices = saved.get("whole uploads", 0.0)
    if slices >= _LEAST_WAITING and what != "whole uploads":
        seconds = without["whole uploads"].seconds
        return f'{_by_waiting(row, saved, what)} transfer="sliced" takes {seconds:.3g} s.'
    return _by_waiting(row, saved, what)


def _by_waiting(row: Row, saved: Mapping[str, float], what: str) -> str:
    """What would make it faster, by the share of the time that waiting for ``what`` takes."""
    plan = row.plan
    window = f"with k = {plan.k} and k' = {plan.k_prime}"
    if saved[what] < _LEAST_WAITING and row.waiting > 0.5:
        waited = f"{row.waiting:.0%} of the time is waited, for several things at once"
        return f"faster: {window}, {waited}; more work per batch (tokens, images) hides them."
    if saved[what] < _LEAST_WAITING:
        computing = f"the device computes {1 - row.waiting:.0%} of the time"
        return f"faster: {window}, {computing}; fewer operations or a faster device help."
    # Seconds, because the share would differ from the column's: what is waited for hides other waits.
    waits = f"{saved[what] * row.prediction.seconds:.3g} of {row.prediction.seconds:.3g} s"
    return f"faster: {window}, {waits} are waited for {what}; {remedy(what, plan)}."


def _modes(work: Work) -> list[str]:
    """What each mode of activations takes."""
    lines = [f"  {mode:<10} {human_bytes(work.saved(mode)):>10}" for mode in MODES]
    lines[MODES.index("offload")] += f", and {human_bytes(work.offloaded)} on the host"
    return ["activations=    saved for backward, at most", *lines]


def _notes(estimate: ModelEstimate) -> list[str]:
    """Memory that no mode of activations changes, if it is much."""
    work, question = estimate.work, estimate.question
    if work is None or question.predict:
        return []
    notes = [estimate.found.ungrouped] if estimate.found.ungrouped else []
    largest = work.largest_outside
    saved = max((call.saved for call in work.calls), default=0)
    if largest is None or (work.outside <= estimate.saved_bytes / 4 and largest.nbytes <= saved):
        return notes
    return [
        *notes,
        f"{human_bytes(work.outside)} are saved outside of all layers (largest: {largest}), whatever activations= says. "
        "If that is the loss, --loss-tokens 1024 says what it takes in chunks: see examples/guide/activations.md.",
    ]


def _nodes_gain(estimate: ModelEstimate, row: Row) -> list[str]:
    """How many times as many samples several nodes train in the same time as one; nothing for one, or without training."""
    question, busy = estimate.question, row.prediction.busy
    if question.nodes == 1 or question.predict:
        return []
    one = _seconds_with(estimate, row, 1)
    gains = {nodes: nodes * one / _seconds_with(estimate, row, nodes) for nodes in sorted({2, question.nodes})}
    times = ", ".join(f"{nodes} train {gain:.3g} times as many samples" for nodes, gain in gains.items())
    pays = (
        f"adds {gains[2] - 1:.0%} of what the first one trains"
        if gains[2] > 1
        else "does not pay: the sums take too long"
    )
    others = max(seconds for name, seconds in busy.items() if name != "network")
    enough = question.network / 1e9 * busy["network"] / max(others, 1e-9)
    return [
        f"nodes: one takes {one:.3g} s per batch; beside it, {times}. A second node {pays}. The network is at work for "
        f"{busy['network']:.3g} s; it binds below {enough:.3g} GB/s."
    ]


def _seconds_with(estimate: ModelEstimate, row: Row, nodes: int) -> float:
    """The time of a batch on so many such nodes, with the window and the modes of a row."""
    question = type(estimate.question)(**{**vars(estimate.question), "nodes": nodes})
    return replace(estimate, question=question).predict(replace(row.plan, nodes=nodes), row.modes).seconds


# ---------------------------------------------------------------------- JSON


def as_json(answer: Answer) -> str:
    """The answer for programs; bytes and seconds."""
    estimate, best = answer.estimate, answer.best
    question, work, plan = answer.question, estimate.work, answer.rows[0].plan
    fields = {
        "model": estimate.question.model,
        "precision": question.precision,
        "parameters": estimate.parameters,
        "tables": [{"name": table.name, "bytes": table.nbytes} for table in plan.tables],
        "layers": [{"name": layer.name, "bytes": layer.nbytes} for layer in plan.layers],
        "activations": question.activations,
        "activation_bytes": estimate.activation_bytes if work else None,
        "saved_bytes": {mode: work.saved(mode) for mode in MODES} if work else None,
        "offloaded_bytes": work.offloaded if work else None,
        "flops": estimate.flops(plan, answer.rows[0].modes) if work else None,
        "why_no_activations": estimate.why_no_work or None,
        "batch": estimate.model.items,
        "training": not question.predict,
        "devices": question.devices,
        "nodes": question.nodes,
        "disk": _disk(answer),
        "generated_tokens": question.generate,
        "prompt_seconds": answer.prompt_seconds,
        "host_bytes": estimate.host_bytes,
        "host_fits": answer.host_fits,
        "notes": [*plan.notes, *_notes(estimate)],
        "assumed": {
            "tflops": question.tflops, "device_gbps": question.device_bandwidth, "pcie_gbps": question.pcie,
            "dram_gbps": question.dram, "links_gbps": question.links,
            "network_gbps": question.network / 1e9,
        },
        "windows": [_window(row) for row in answer.rows],
        "best": None if best is None else {"k": best.plan.k, "k_prime": best.plan.k_prime},
        "verdict": verdict(answer),
    }  # fmt: skip
    return json.dumps(fields, indent=2)


def _window(row: Row) -> dict[str, object]:
    return {
        "k": row.plan.k, "k_prime": row.plan.k_prime, "activations": summary(row.modes),
        "device_bytes": row.device_bytes, "fits": row.fits,
        "seconds": row.prediction.seconds, "busy_seconds": row.prediction.busy, "binds": row.prediction.binds,
    }  # fmt: skip
