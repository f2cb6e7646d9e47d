"""The metrics of a run, and the lines in the log that explain its counters."""

from __future__ import annotations

from dataclasses import MISSING, fields

from sp_lightning.core.device.stats import Stats
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import human_bytes

_SMALL_SHARE = 0.05
_SHORT = 1.0
""":func:`bottleneck` reports no wait below this share of the time, or below these seconds."""


DEFAULT_METRICS = ("waited", "window")
"""The metrics that are logged by default."""

_NUMBERS = tuple(each.name for each in fields(Stats) if each.default_factory is MISSING)  # not the counters by layer
METRICS = (*DEFAULT_METRICS, "tokens_per_second", "fetch_gbps", "device_bytes", *_NUMBERS)
"""The names of all metrics."""


def metrics_of(stats: Stats, before: Stats | None, seconds: float, tokens: int | None, plan: Plan) -> dict[str, float]:
    """Returns the metrics of an interval, by name.

    Args:
        stats: the counters at the end of the interval.
        before: the counters at the begin of the interval; None if the interval began at set-up.
        seconds: the length of the interval.
        tokens: the number of tokens trained in the interval; None if it is unknown.
        plan: the plan of the run.

    Returns:
        The counters, and:

        - ``waited``: the share of the time that was spent waiting,
        - ``window``: k,
        - ``tokens_per_second``, if the number of tokens is known,
        - ``fetch_gbps``: uploads in 10⁹ bytes per second,
        - ``device_bytes``: the planned peak of device memory.
    """
    seconds = max(seconds, 1e-9)
    if before is not None and stats.transfers < before.transfers:  # the engine was built again, and counts from 0
        before = None
    waited = stats.waited_seconds - (before.waited_seconds if before else 0.0)
    fetched = stats.fetched_bytes - (before.fetched_bytes if before else 0)
    found = {name: float(getattr(stats, name)) for name in _NUMBERS}
    found |= {
        "waited": min(waited / seconds, 1.0),
        "window": float(plan.k),
        "device_bytes": float(plan.peak_device_bytes),
    }
    found["fetch_gbps"] = fetched / seconds / 1e9
    return found if tokens is None else {**found, "tokens_per_second": tokens / seconds}


def state_line(
    step: int, metrics: dict[str, float], host: tuple[int, int] | None, device: tuple[int, int] | None
) -> str:
    """Returns the status line of a running fit.

    Args:
        step: the number of steps.
        metrics: the result of :func:`metrics_of`.
        host, device: bytes in use, and in total; None if they are unknown.
    """
    parts = [f"idle {metrics['waited']:.0%}"]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    for name, memory in (("host", host), ("device", device)):
        if memory is not None:
            parts.append(f"{name} {human_bytes(memory[0])} of {human_bytes(memory[1])}")
    return f"Superpipeline: step {step}: {', '.join(parts)}."


def counters_line(stats: Stats) -> str:
    """Returns the counters as one sentence."""
    activations = steps = ""
    if stats.offloaded_activation_bytes:
        activations = f"{human_bytes(stats.offloaded_activation_bytes)} of activations offloaded; "
    if stats.step_upload_bytes:
        up, down = human_bytes(stats.step_upload_bytes), human_bytes(stats.step_download_bytes)
        steps = f"{up} uploaded for steps on the GPU, {down} downloaded; "
    host_waits = f"; the CPU waited for the GPU {stats.host_waits} times" if stats.host_waits else ""
    parts = ", ".join(f"{seconds:.2f} s for {WAITED[what]}" for what, seconds in stats.waits.items() if seconds)
    causes = f" ({parts})" if parts else ""
    return (
        f"Superpipeline: {stats.fetched_layers} layers uploaded ({human_bytes(stats.fetched_bytes)}) in {stats.transfers} "
        f"transfers, {stats.demand_fetches} on demand, {stats.extra_slots} extra slots; "
        f"{human_bytes(stats.offloaded_gradient_bytes)} of gradients offloaded; {activations}{steps}"
        f"peak of weights and gradients {human_bytes(stats.peak_device_bytes)}; "
        f"waited {stats.waited_seconds:.2f} s{causes}{host_waits}."
    )


# A peak of more than this multiple of the plan's is reported.
_FAR_ABOVE = 5 / 4


def over_plan(stats: Stats, plan: Plan) -> str:
    """Returns a sentence if slots beyond the plan made the peak of device memory much larger than planned; otherwise ""."""
    if not stats.extra_slots or stats.peak_device_bytes <= _FAR_ABOVE * plan.peak_device_bytes:
        return ""
    tables = [table.name for table in plan.tables]
    remedy = f" For a table that is read as a whole, layers={tables} puts it into the plan." if tables else ""
    return (
        f"Superpipeline: weights and gradients took {human_bytes(stats.peak_device_bytes)} of GPU memory; the plan has "
        f"{human_bytes(plan.peak_device_bytes)}. {stats.extra_slots} slots beyond the plan were allocated, because code outside "
        f"of the weights' modules read whole weights, or kept views of them.{remedy}"
    )


def bottleneck(stats: Stats, seconds: float, plan: Plan) -> str:
    """Returns a sentence about the longest wait of a run and an option against it; empty if the run waited little.

    Args:
        stats: the run's counters.
        seconds: the duration of the run.
        plan: the plan of the run.
    """
    what, most = max(stats.waits.items(), key=lambda each: each[1])
    share = min(most / max(seconds, 1e-9), 1.0)
    if share < _SMALL_SHARE or most < _SHORT:
        return ""
    return f"Superpipeline: waited {share:.0%} of {seconds:.1f} s for {WAITED[what]}. {remedy(what, plan)}."


WAITED = {
    "fetches": "uploads", "gradient offloading": "gradient offloading", "updates": "optimizer steps", "the host": "Python",
    "several things at once": "several things at once", "sums of gradients": "gradient sums",
    "the disk": "the disk", "activations": "activations",
    "optimizers' steps": "optimizer steps",
}  # fmt: skip
"""The causes of waits, by their keys, as messages name them."""


def remedy(what: str, plan: Plan) -> str:
    """Returns advice against one cause of waits, a key of :data:`WAITED`: a sentence without its full stop."""
    more = "" if plan.k >= len(plan.layers) else "a larger k or gpu_memory, or "
    fewer_steps = "Use a larger batch or accumulate_grad_batches"
    return {
        "fetches": f"Use {more}more tokens or images per batch",
        "gradient offloading": "Use more tokens or images per batch",
        "updates": fewer_steps,
        "the host": "Use larger layers (layers=), or more tokens or images per batch",
        "several things at once": "Use more tokens or images per batch",
        "sums of gradients": "Use more tokens or images per batch",
        "the disk": "Use more CPU memory, or more tokens or images per batch",
        "activations": "Recompute some of them, or use a larger gpu_memory",
        "optimizers' steps": f'{fewer_steps}. Adam, AdamW, SGD and Adagrad of torch can overlap (optimizer_overlap="forward")',
    }[what]
