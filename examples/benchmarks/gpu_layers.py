"""Seconds of a step by the number of layers that stay on the GPU with their optimizer state (``gpu_layers``): estimates.

``python -m examples.benchmarks.gpu_layers`` prints tables. Rates are assumed, and stand below them; nothing is measured.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from transformers import LlamaConfig

from sp_lightning.tools.planner.answer import Row, answer
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.estimate import Estimate, estimate_model

MACHINES = {
    "H100 80 GB": (
        "--tflops 700 --device-bandwidth 3350GB/s --pcie 52GB/s --host-bandwidth 175GB/s --gpu-memory 72GiB",
        "--batch-size 4 --tokens 4096",
    ),
    "GH200 96 GB": (
        "--tflops 700 --device-bandwidth 4000GB/s --pcie 400GB/s --host-bandwidth 400GB/s --gpu-memory 88GiB",
        "--batch-size 4 --tokens 4096",
    ),
    "RTX 4090 24 GB, PCIe 4, DDR4": (
        "--tflops 150 --device-bandwidth 1000GB/s --pcie 25GB/s --host-bandwidth 45GB/s --gpu-memory 22GiB",
        "--batch-size 1 --tokens 4096",
    ),
    "32 GB, PCIe 5, DDR5": (
        "--tflops 150 --device-bandwidth 1800GB/s --pcie 50GB/s --host-bandwidth 70GB/s --gpu-memory 29GiB",
        "--batch-size 1 --tokens 4096",
    ),
}
"""Rates and a step's tokens. With 700 TFLOP/s, and memory-bound operations beside, 1.5B and 8B compute as long as an H100 did."""
SHAPES = Path(__file__).parents[1] / "shapes"
MODELS = {"1.5B": "", "3B": str(SHAPES / "llama-3.2-3b.json"), "8B": str(SHAPES / "llama-3-8b.json")}
PRECISIONS = ("bf16-true", "bf16-mixed")
SHARES = (0, 0.25, 0.5, 0.75)
WINDOW = (2, 1)
OPTIONS = "--gradient-checkpointing --activations keep --k 2 --k-prime 1"
CLIPPING = {"": None, "clipped": "norm"}
TARGET = 0.85


def question(model: str, *options: str) -> Question:
    """What such a command line asks."""
    words = " ".join((OPTIONS, *options)).split()
    asked: Any = make_parser().parse_args(["plan", model, *words], namespace=Question())
    return asked


def most(estimate: Estimate) -> int:
    """How many layers can stay at most."""
    count, limit = len(estimate.found.layers), (estimate.question.gpu_memory or 0) - estimate.activation_bytes

    def needs(number: int) -> int:
        kept = with_layers(estimate, number)
        return kept.plan(*WINDOW).peak_device_bytes

    return max((number for number in range(count + 1) if needs(number) <= limit), default=0)


def with_layers(estimate: Estimate, share: float) -> Estimate:
    """The same with so many layers that stay."""
    return replace(estimate, question=estimate.question.but(gpu_layers=share))


def plain_seconds(estimate: Estimate, row: Row) -> float:
    """Seconds of plain Lightning, if the device had the memory: forward, backward, and a fused step on the device."""
    ledger, clip = with_layers(estimate, 0).host.ledger, estimate.question.gradient_clip is not None
    assert ledger is not None
    gradients = sum(layer.gradient_bytes for layer in row.plan.trained)
    passes = 3 + 2 * (ledger.state or 0) / gradients + 3 * clip  # a norm, and a multiplication in place
    return row.prediction.busy["compute"] + passes * gradients / estimate.question.device_bandwidth


def cell(row: Row, plain: float) -> str:
    """Seconds, and of plain Lightning's speed."""
    return f"{row.prediction.seconds:.3g} s, {plain / row.prediction.seconds:.2f}" if row.fits else "–"


def rows(estimate: Estimate, machine: str, clip: str) -> tuple[list[str], dict[str, Any]]:
    """A row of the table, and what is said of it below."""
    first = answer(with_layers(estimate, 0)).shown
    plain, number = plain_seconds(estimate, first), most(estimate)
    found = {str(share): answer(with_layers(estimate, share)) for share in (*SHARES, number)}
    last, rest = found[str(number)].shown, found[str(number)].waits
    seconds = {share: each.shown.prediction.seconds for share, each in found.items() if each.shown.fits}
    layers = len(estimate.found.layers)
    cells = [cell(found[str(share)].shown, plain) for share in SHARES]
    words = [machine, clip or "no clipping", f"{plain:.3g} s", *cells, f"{number} of {layers}: {cell(last, plain)}"]
    shares = {share: with_layers(estimate, share).host for share in (*map(float, SHARES), 1.0)}
    host = {share: each.nbytes for share, each in shares.items()}
    facts = {
        "plain": plain, "seconds": seconds, "number": number, "share": plain / min(seconds.values()), "host": host,
        "binds": last.prediction.binds, "waits": rest, "total": last.prediction.seconds,
        "none": first.prediction.seconds, "slower": max(seconds.values()) / first.prediction.seconds,
    }  # fmt: skip
    return words, facts


def table(heading: list[str], found: list[list[str]]) -> Iterator[str]:
    """A table in Markdown."""
    yield f"| {' | '.join(heading)} |"
    yield f"|{'---|' * len(heading)}"
    yield from (f"| {' | '.join(each)} |" for each in found)
    yield ""


def main() -> None:
    """Prints the tables."""
    folder = Path(tempfile.mkdtemp())
    config = LlamaConfig(
        hidden_size=2048, intermediate_size=8192, num_hidden_layers=24, num_attention_heads=32, num_key_value_heads=8,
        vocab_size=32000, max_position_embeddings=4096, tie_word_embeddings=False, architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    models = {**MODELS, "1.5B": str(folder / "config.json")}
    known: dict[tuple[str, str, str], Estimate] = {}
    facts: dict[tuple[str, str, str, str], dict[str, Any]] = {}
    for name, precision in product(models, PRECISIONS):
        lines = []
        for (machine, (rates, batch)), (clip, by) in product(MACHINES.items(), CLIPPING.items()):
            asked = question(models[name], rates, batch, f"--precision {precision}", f"--gradient-clip {by}" * bool(by))
            key = name, precision, batch
            if key not in known:
                known[key] = estimate_model(asked)
            estimate = known[key].asked(asked)
            assert estimate is not None
            line, facts[name, precision, machine, clip] = rows(estimate, machine, clip)
            lines.append(line)
        print(f"## {name}, {precision}\n")
        heading = ["machine", "", "plain", *(f"{share:.0%}" for share in SHARES), "the most that fits"]
        print("\n".join(table(heading, lines)), flush=True)
    print_rest(facts)


def print_rest(facts: dict[tuple[str, str, str, str], dict[str, Any]]) -> None:
    """Prints host memory, what bounds a step, and what a further idea would give."""
    print("## Host bytes per parameter\n")
    counts = {"1.5B": 1.59e9, "3B": 3.21e9, "8B": 8.03e9}
    found = []
    for (name, precision, machine, clip), fact in facts.items():
        if clip and machine == next(iter(MACHINES)):
            found.append([name, precision, *(f"{each / counts[name]:.2f}" for each in fact["host"].values())])
    shares = [f"{share:.0%}" for share in (*SHARES, 1)]
    print("\n".join(table(["model", "precision", *shares], found)))
    print("## What bounds a step with clipping and the most that fits\n")
    found = []
    for (name, precision, machine, clip), fact in facts.items():
        if clip:
            waits = ", ".join(
                f"{s / fact['total']:.0%} for {what}" for what, s in fact["waits"].items() if s > 0.005 * fact["total"]
            )
            found.append(
                [name, precision, machine, f"{fact['plain'] / fact['total']:.2f}", waits or "nothing", fact["binds"]]
            )
    print("\n".join(table(["model", "precision", "machine", "of plain", "waits", "takes longest"], found)))
    print("## Updates in backward, as if nothing was clipped\n")
    found = []
    for (name, precision, machine, clip), fact in facts.items():
        if clip:
            accepted = facts[name, precision, machine, ""]
            last = str(fact["number"])
            size = 12 if precision == "bf16-mixed" else 6
            found.append([
                name, precision, machine, f"{fact['none']:.3g} s", f"{accepted['none']:.3g} s", f"{fact['seconds'][last]:.3g} s",
                f"{accepted['seconds'][last]:.3g} s", f"{size * counts[name] / 2**30:.3g} GiB",
            ])  # fmt: skip
    heading = [
        "model",
        "precision",
        "machine",
        "0%: as now",
        "0%: accepted",
        "most: as now",
        "most: accepted",
        "spare host memory, 0%",
    ]
    print("\n".join(table(heading, found)))
    worst = max(facts.items(), key=lambda each: each[1]["slower"])
    print(f"slowest beside share 0: {worst[0]}: {worst[1]['slower']:.4f}")
    for (name, precision, machine, clip), fact in facts.items():
        if clip and machine.startswith("H100") and precision == "bf16-true":
            print(f"target {TARGET}: {name}: {fact['share']:.3f}")
    print()
    for machine, (rates, batch) in MACHINES.items():
        print(f"- {machine}: `{rates} {batch}`")


if __name__ == "__main__":
    main()
