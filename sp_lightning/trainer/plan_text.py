"""A plan in words, for the log."""

from __future__ import annotations

from sp_lightning.core.plan.choices import Count, Share
from sp_lightning.core.plan.plan import Plan
from sp_lightning.core.plan.units import in_one_unit


def sentence(plan: Plan, *, state: int | None = None, on_cpu: bool = False) -> str:
    """Returns a plan in one line: layers, window, and device memory compared to plain Lightning, without activations.

    Args:
        plan: the plan.
        state: bytes of the optimizer's state. If it is None (unknown), the text lacks the memory use of plain training.
        on_cpu: True if the model computes on the CPU, so that the memory is what a GPU would need.
    """
    peak, what = plan.peak_device_bytes, "weights"
    if plan.training:
        what = "weights, gradients and steps" if plan.update_bytes else "weights and gradients"
        if plan.stay:
            what += f" (with the optimizer state of {len(plan.stay)} more layers, which stay)"
    known = not plan.training or state is not None
    plain = [sum(plan.plain) + (state or 0) if plan.training else plan.plain[0]] if known else []
    ours, *theirs = in_one_unit(peak, *plain)
    whose = "a GPU's" if on_cpu else "GPU"
    saves = f"take {ours} of {whose} memory"
    note = " with optimizer state" if plan.training else ""
    saves += f", plain Lightning {theirs[0]}{note}, both without activations" if theirs else ", without activations"
    return f"{plan.heading}. {what.capitalize()} {saves}." if plan.nothing else f"{plan.heading}: {what} {saves}."


def cap_remarks(k: Count, k_prime: Count, plan: Plan, gpu_layers: Share = 0) -> list[str]:
    """Returns sentences for the user whose k, k' or gpu_layers is above the number of layers, or of other layers."""
    count, remarks = len(plan.layers), list[str]()
    if plan.nothing:
        return remarks
    if k != "auto" and k > count:
        remarks.append(f"k={k} is capped at {count}, the number of layers: all are on the GPU at once.")
    if isinstance(gpu_layers, int) and gpu_layers > len(plan.stay) > 0:
        remarks.append(f"gpu_layers={gpu_layers} is capped at {len(plan.stay)}, the number of layers.")
    rest = count - plan.k
    if k_prime != "auto" and k_prime > max(rest, 1):
        remarks.append(
            f"k_prime={k_prime} is more than the {rest} layers beyond k={plan.k}: each layer has its own slot."
        )
    return remarks
