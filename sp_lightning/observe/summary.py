"""What a run has done and what it waited for, in sentences."""

from __future__ import annotations

from sp_lightning.observe.stats import Stats
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes

# Waiting for a smaller share of the time, or for fewer seconds, is not worth a line.
_LITTLE, _SHORT = 0.05, 1.0


def counters_line(stats: Stats) -> str:
    """The counters as one sentence."""
    activations = f"{human_bytes(stats.stored_bytes)} of activations stored; " if stats.stored_bytes else ""
    held_up = f" and {stats.host_waits} times for compute" if stats.host_waits else ""
    waited = f", {stats.activation_stall_seconds:.2f} s for activations" if stats.stored_bytes else ""
    return (
        f"Superpipeline: {stats.fetched_layers} layers fetched ({human_bytes(stats.fetched_bytes)}) in {stats.transfers} "
        f"transfers, {stats.demand_fetches} on demand, {stats.extra_slots} extra slots; {human_bytes(stats.drained_bytes)} of "
        f"gradients drained; {activations}peak of weights and gradients {human_bytes(stats.peak_device_bytes)}; waited "
        f"{stats.stall_seconds:.2f} s for fetches, {stats.drain_stall_seconds:.2f} s for gradients, "
        f"{stats.update_stall_seconds:.2f} s for updates, {stats.step_seconds:.2f} s for optimizers' steps{waited}{held_up}."
    )


def bottleneck(stats: Stats, seconds: float, plan: Plan) -> str:
    """What a run waited for most, and the option that would help; empty if it waited little.

    Args:
        stats: the run's counters.
        seconds: the time that it took.
        plan: what it ran with.
    """
    waits = {
        "fetches": stats.stall_seconds,
        "gradients to leave": stats.drain_stall_seconds,
        "updates": stats.update_stall_seconds,
        "activations": stats.activation_stall_seconds,
        "optimizers' steps": stats.step_seconds,
    }
    what, most = max(waits.items(), key=lambda each: each[1])
    share = min(most / max(seconds, 1e-9), 1.0)
    if share < _LITTLE or most < _SHORT:
        return ""
    return f"Superpipeline: of {seconds:.1f} s, {share:.0%} were waited for {what}; {remedy(what, plan)}."


def remedy(what: str, plan: Plan) -> str:
    """What makes a run wait less for one thing, as a half-sentence."""
    rarer = "a larger batch, or accumulate_grad_batches, makes them rarer"
    more = "" if plan.k >= len(plan.layers) else "a larger k or memory_budget, or "
    return {
        "fetches": f"{more}more work per batch (tokens, images) hides them",
        "gradients to leave": "a larger k_prime leaves them more time",
        "updates": rarer,
        "the host": "larger layers (layers=), or more work per batch (tokens, images), leave it more time",
        "sums of gradients": "more work per batch (tokens, images) hides them",
        "whole uploads": 'transfer="sliced" has each device upload a part and get the rest from the others',
        "sums over nodes": "more work per batch (tokens, images) hides them, or a faster --network",
        "the disk": "more host memory leaves less on it, and more work per batch (tokens, images) hides it",
        "activations": "recompute some of them, or give a larger memory_budget",
        "optimizers' steps": f"{rarer}; those of torch's Adam, AdamW, SGD and Adagrad can run beside the model "
        '(optimizer_overlap="forward")',
    }[what]
