"""How fast a step can be at all: seconds per step from the machine's ceilings, by what is overlapped with what."""

from __future__ import annotations

from sp_lightning.tools.planner.rates import ADAMW_BYTES

# What the best schedule moves through host DRAM for each parameter: that, each gradient's arrival, and a bf16 copy.
BEST_BYTES = 34


def training_seconds(
    tokens: float, parameters: float, flops: float, pcie: float, dram: float, *, recompute: bool = False
) -> dict[str, float]:
    """Seconds per training step under each schedule; bf16 weights cross PCIe, attention's own work is left out.

    Args:
        tokens: per step.
        parameters: of the model.
        flops: FLOP/s of the device.
        pcie: bytes/s each way between host and device.
        dram: bytes/s of host memory, read and written together.
        recompute: activations are checkpointed, so that backward runs the forward again.
    """
    forward = 2 * parameters * tokens / flops
    backward = (6 if recompute else 4) * parameters * tokens / flops
    weights = 2 * parameters / pcie
    update = ADAMW_BYTES * parameters / dram
    return {
        "nothing overlapped": forward + weights + backward + weights + update,
        "transfers overlapped": max(forward, weights) + max(backward, weights) + update,
        "step under next forward": max(backward, weights) + max(forward, weights, update),
        "step under backward": max(forward, weights) + max(backward, weights, update),
        "best possible": max(forward + backward, 2 * weights, BEST_BYTES * parameters / dram),
    }


def prediction_seconds(tokens: float, parameters: float, flops: float, pcie: float) -> dict[str, float]:
    """Seconds per batch; arguments as in :func:`training_seconds`."""
    forward = 2 * parameters * tokens / flops
    weights = 2 * parameters / pcie
    return {"nothing overlapped": forward + weights, "best possible": max(forward, weights)}
