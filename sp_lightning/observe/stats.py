"""The counters of a run, and what they say in sentences: what it has done, and what it waited for."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes
from sp_lightning.registry import host_kernels

# Waiting for a smaller share of the time, or for fewer seconds, is not worth a line.
_LITTLE, _SHORT = 0.05, 1.0


@dataclass(frozen=True)
class Stats:
    """Counters since set-up.

    Attributes:
        fetched_layers: how many layers were copied to the device.
        fetched_bytes: bytes of layers' weights copied to the device, rows of embeddings included. What stays there
            and is trained comes once more after each step, which is not counted.
        drained_bytes: bytes of gradients copied to the host.
        transfers: how many groups of layers were fetched as one.
        demand_fetches: how many layers were needed before the trace had asked for them. Compute stalls for each of them.
        host_waits: how often the host waited for compute where it could have run ahead: for the indices of rows, and
            for weights that were written on the device.
        extra_slots: how many slots were made beyond the plan, because user code held views of weights.
        peak_device_bytes: the most bytes that weights and gradients took on the device.
        peak_allocated_bytes: the most bytes that torch had allocated on the device at once. ``torch.cuda.max_memory_allocated()``
            says less, because choosing a window or modes of activations sets it back. 0 on the CPU.
        stored_bytes, returned_bytes: bytes of activations copied to the host, and back.
        stall_seconds: seconds that compute waited for fetches.
        drain_stall_seconds: seconds that compute waited for gradients to leave.
        update_stall_seconds: seconds that the host waited for updates in the background.
        activation_stall_seconds: seconds that compute waited for activations to leave and to come back.
        step_seconds: seconds that optimizers' steps took on the host while the device waited; 0 where the model computes on
            the host, too.
        expert_hits, expert_misses: how many stacked experts that uses of their layers have asked for were on the device when
            the use began, kept or come ahead of time, and how many had to come then. A hit may thus have travelled, too.
        expert_bytes: bytes of stacked experts copied to the device, ahead of time or not; what was saved is seen here. They
            are among ``fetched_bytes``.
        gathered_bytes: bytes of weights that came from other devices of the node, with ``transfer="sharded"``. They are among
            ``fetched_bytes``.
        brought_bytes, taken_bytes: bytes of weights, gradients and state that came to the device for steps there, and left it.
    """

    fetched_layers: int
    fetched_bytes: int
    drained_bytes: int
    transfers: int
    demand_fetches: int
    host_waits: int
    extra_slots: int
    peak_device_bytes: int
    stored_bytes: int
    returned_bytes: int
    stall_seconds: float
    drain_stall_seconds: float
    update_stall_seconds: float
    activation_stall_seconds: float
    step_seconds: float
    expert_hits: int = 0
    expert_misses: int = 0
    expert_bytes: int = 0
    gathered_bytes: int = 0
    peak_allocated_bytes: int = 0
    brought_bytes: int = 0
    taken_bytes: int = 0

    @property
    def waited_seconds(self) -> float:
        """Seconds of waiting of all kinds."""
        return sum(_waits(self).values())


DEFAULT_METRICS = ("waited", "window")
"""What is logged unless other metrics are named."""

METRICS = (*DEFAULT_METRICS, "tokens_per_second", "fetch_gbps", "device_bytes", *(each.name for each in fields(Stats)))
"""The names of all metrics."""


def metrics_of(stats: Stats, before: Stats | None, seconds: float, tokens: int | None, plan: Plan) -> dict[str, float]:
    """Metrics by their names.

    Args:
        stats: the counters now.
        before: the counters when the rates begin; None for those of set-up.
        seconds: the time since then.
        tokens: how many tokens were trained on since then; None if batches do not say it.
        plan: of the run.

    Returns:
        The counters; ``waited``, the share of the time in which something was waited for; ``window``, which is k;
        ``tokens_per_second``, if it is known; ``fetch_gbps``, 10⁹ bytes per second; ``device_bytes`` as planned.
    """
    seconds = max(seconds, 1e-9)
    waited = stats.waited_seconds - (before.waited_seconds if before else 0.0)
    fetched = stats.fetched_bytes - (before.fetched_bytes if before else 0)
    found = {name: float(value) for name, value in vars(stats).items()}
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
    """One line about a run that goes on.

    Args:
        step: the number of steps.
        metrics: as :func:`metrics_of` returns them.
        host, device: bytes that are taken, and that there are; None if that is not known.
    """
    parts = [f"idle {metrics['waited']:.0%}"]
    if "tokens_per_second" in metrics:
        parts.append(f"{metrics['tokens_per_second']:.0f} tokens/s")
    for name, memory in (("host", host), ("device", device)):
        if memory is not None:
            parts.append(f"{name} {human_bytes(memory[0])} of {human_bytes(memory[1])}")
    return f"Superpipeline: step {step}: {', '.join(parts)}."


def counters_line(stats: Stats) -> str:
    """The counters as one sentence."""
    activations = f"{human_bytes(stats.stored_bytes)} of activations offloaded; " if stats.stored_bytes else ""
    if stats.brought_bytes:
        activations += f"{human_bytes(stats.brought_bytes)} uploaded for steps on the GPU, "
        activations += f"{human_bytes(stats.taken_bytes)} downloaded; "
    held_up = f"; the CPU waited for the GPU {stats.host_waits} times" if stats.host_waits else ""
    parts = ", ".join(f"{seconds:.2f} s for {WAITED[what]}" for what, seconds in _waits(stats).items() if seconds)
    return (
        f"Superpipeline: {stats.fetched_layers} layers uploaded ({human_bytes(stats.fetched_bytes)}) in {stats.transfers} "
        f"transfers, {stats.demand_fetches} on demand, {stats.extra_slots} extra slots; {human_bytes(stats.drained_bytes)} of "
        f"gradients offloaded; {activations}peak of weights and gradients {human_bytes(stats.peak_device_bytes)}; waited "
        f"{stats.waited_seconds:.2f} s{f' ({parts})' * bool(parts)}{held_up}."
    )


def _waits(stats: Stats) -> dict[str, float]:
    """The parts of :attr:`Stats.waited_seconds`, by what was waited for."""
    return {
        "fetches": stats.stall_seconds,
        "gradients to leave": stats.drain_stall_seconds,
        "updates": stats.update_stall_seconds,
        "activations": stats.activation_stall_seconds,
        "optimizers' steps": stats.step_seconds,
    }


def bottleneck(stats: Stats, seconds: float, plan: Plan) -> str:
    """What a run waited for most, and the option that would help; empty if it waited little.

    Args:
        stats: the run's counters.
        seconds: the time that it took.
        plan: what it ran with.
    """
    what, most = max(_waits(stats).items(), key=lambda each: each[1])
    share = min(most / max(seconds, 1e-9), 1.0)
    if share < _LITTLE or most < _SHORT:
        return ""
    more = ""
    if what == "updates" and any(layer.casts for layer in plan.trained) and (package := host_kernels().missing):
        more = f" `pip install {package}` makes optimizer steps faster."
    return f"Superpipeline: waited {share:.0%} of {seconds:.1f} s for {WAITED[what]}. {remedy(what, plan)}.{more}"


WAITED = {
    "fetches": "uploads", "gradients to leave": "gradient offloading", "updates": "optimizer steps", "the host": "Python",
    "several things at once": "several things at once", "sums of gradients": "gradient sums", "whole uploads": "full uploads",
    "sums over nodes": "gradient sums over nodes", "the disk": "the disk", "activations": "activations",
    "optimizers' steps": "optimizer steps",
}  # fmt: skip
"""In the words of messages: what a run can wait for."""


def remedy(what: str, plan: Plan) -> str:
    """What makes a run wait less for one thing: a sentence without its full stop."""
    more = "" if plan.k >= len(plan.layers) else "a larger k or gpu_memory, or "
    rarer = "Use a larger batch or accumulate_grad_batches"
    return {
        "fetches": f"Use {more}more tokens or images per batch",
        "gradients to leave": "Use a larger k_prime",
        "updates": rarer,
        "the host": "Use larger layers (layers=), or more tokens or images per batch",
        "several things at once": "Use more tokens or images per batch",
        "sums of gradients": "Use more tokens or images per batch",
        "whole uploads": 'Use transfer="sharded": each device uploads a part and gets the rest from the others',
        "sums over nodes": "Use more tokens or images per batch, or a faster --network",
        "the disk": "Use more host memory, or more tokens or images per batch",
        "activations": "Recompute some of them, or use a larger gpu_memory",
        "optimizers' steps": f'{rarer}. Adam, AdamW, SGD and Adagrad of torch can overlap (optimizer_overlap="forward")',
    }[what]
