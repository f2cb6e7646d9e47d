"""Seconds of a step by when updates run: predicted by the package's own simulation, for machines whose times are given.

A model of 28 equal layers, all of which stay on the device: nothing but updates and gradients is waited for. From the root of the
repository::

    python -m examples.benchmarks.next_use
"""

from __future__ import annotations

from typing import Literal

from torch import nn

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan, make_plan
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Rates, Visit

LAYERS, BATCHES = 28, 8
CASES = {
    "3B, bf16-mixed, 4,096 tokens, 100 TFLOP/s, 60 GB/s": (0.41, 1.23, 1.5),
    "8B, bf16-mixed, 2,048 tokens, the same": (0.44, 1.32, 3.75),
    "8B, bf16-mixed, 4,096 tokens, the same": (0.88, 2.64, 3.75),
    "8B, bf16-mixed, 6,144 tokens, the same": (1.32, 3.95, 3.75),
    "8B, bf16-mixed, 16,384 tokens, an H100": (0.52, 1.55, 1.94),
}
"""Seconds of a step's forward, of its backward, and of its updates."""
WAYS: dict[str, tuple[Literal["off", "forward", "backward"], bool]] = {
    "off": ("off", False),
    "forward": ("forward", False),
    "backward, gradients freed": ("backward", True),
    "backward": ("backward", False),
}


def seconds(plan: Plan, forward: float, backward: float, updates: float, way: str) -> float:
    """The last of some steps."""
    overlap, frees = WAYS[way]
    visits = [Visit((layer,), forward / LAYERS) for layer in plan.order]
    visits += [Visit((layer,), backward / LAYERS, True, (layer,)) for layer in reversed(plan.order)]
    rate = plan.layers[0].gradient_bytes * LAYERS / updates
    rates = Rates(upload=1e15, download=1e15, update=rate, host_memory=1e15)
    walk = Walk(plan, visits, rates, overlap=overlap, frees=frees)
    for _ in range(BATCHES):
        begun = walk.batch()
    return walk.ended - begun


def main() -> None:
    """Prints the table."""
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))
    plan = make_plan(find_layers(layers), k=LAYERS, k_prime=1)
    print(f"| seconds per step | {' | '.join(WAYS)} | limit |\n|{'---|' * (len(WAYS) + 2)}")
    for name, (forward, backward, updates) in CASES.items():
        found = [f"{seconds(plan, forward, backward, updates, way):.2f}" for way in WAYS]
        print(f"| {name} | {' | '.join(found)} | {max(forward + backward, updates):.2f} |")


if __name__ == "__main__":
    main()
