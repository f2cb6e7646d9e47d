"""Seconds of a training step whose optimizer steps on the host, or on the device: predicted, for some machines.

``python -m examples.benchmarks.where_to_step [MODEL]`` prints a table. Rates are assumed, and stand in it.
"""

from __future__ import annotations

import sys
from itertools import product
from typing import Any

from sp_lightning.tools.planner.answer import answer
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.estimate import estimate_model

MACHINES = {
    "PCIe 4, two channels of DDR4": "--pcie 25GB/s --host-bandwidth 45GB/s --tflops 100",
    "PCIe 5, two channels of DDR5": "--pcie 50GB/s --host-bandwidth 70GB/s --tflops 150",
    "H100, eight channels of DDR5": ("--pcie 52GB/s --host-bandwidth 175GB/s --tflops 400 --device-bandwidth 3350GB/s"),
    "GH200": "--pcie 400GB/s --host-bandwidth 400GB/s --tflops 400 --device-bandwidth 4000GB/s",
}
BATCHES = {"2,048": "--tokens 2048", "6,144": "--tokens 6144", "65,536": "--tokens 4096 --accumulate-grad-batches 16"}
PLACES = {
    "host": "",
    "device": "--optimizer-on gpu",
    "device, in backward": "--optimizer-on gpu --optimizer-overlap backward",
}
OPTIMIZERS = ("adamw", "adamw8bit")


def seconds(model: str, *options: str) -> float:
    """Of a whole step, all accumulated batches together."""
    question: Any = make_parser().parse_args(
        ["plan", model, "--gradient-checkpointing", "--k", "2", "--k-prime", "1", *" ".join(options).split()],
        namespace=Question(),
    )
    return question.accumulate_grad_batches * answer(estimate_model(question)).shown.prediction.seconds


def main(model: str = "examples/shapes/llama-3-8b.json") -> None:
    """Prints a row for each machine, optimizer and batch."""
    print(f"{model}, bf16-mixed, k = 2, k' = 1, gradient checkpointing\n")
    print(f"| machine | optimizer | tokens per step | {' | '.join(PLACES)} |\n|{'---|' * (3 + len(PLACES))}")
    for (machine, rates), optimizer, (tokens, batch) in product(MACHINES.items(), OPTIMIZERS, BATCHES.items()):
        found = [f"{seconds(model, rates, batch, place, '--optimizer', optimizer):.3g} s" for place in PLACES.values()]
        print(f"| {machine} | {optimizer} | {tokens} | {' | '.join(found)} |", flush=True)
    print("\n" + "\n".join(f"- {machine}: `{rates}`" for machine, rates in MACHINES.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
