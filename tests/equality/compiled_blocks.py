"""Trains models with blocks that inductor compiles, streamed and on plain Lightning, and prints a table.

    python -m tests.equality.compiled_blocks [NAME]...

Names are those of the model matrix (``tests/support/zoo.py``) and of the equality cases.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import logging
import platform
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo

from sp_lightning import compile_blocks
from tests.equality.cases import CASES
from tests.support.runs import Batches, Outcome, assert_same, fit, superpipeline
from tests.support.zoo import ZOO

MODELS = (
    "llama-dropout", "lora-checkpoint", "frozen", "gpt2-tied", "t5", "vit", "resnet50", "unet", "sdxl", "dit", "whisper",
    "experts/switch", "stacked/qwen3", "stacked/gpt-oss", "quantised/int8", "quantised/int4",
)  # fmt: skip


# torch 2.14's inductor cannot compile these for several sizes at once, on plain Lightning either.
OPTIONS: dict[str, dict[str, Any]] = {"unet": {"dynamic": False}, "sdxl": {"dynamic": False}}


def model(name: str) -> tuple[Callable[[], Any], Batches]:
    """Returns a function that makes a model, and its batches."""
    if name in CASES:
        return CASES[name].make, CASES[name].batches()
    return ZOO[name].make, ZOO[name].batches()[:2]


def train(name: str, strategy: Any, *, compiled: bool) -> tuple[Outcome, int]:
    """Trains a model. Returns the outcome, and the number of graphs."""
    make, batches = model(name)

    def made() -> Any:
        module = make()
        if compiled:
            compile_blocks(module, **OPTIONS.get(name, {}))
        return module

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    outcome = fit(made, batches, strategy, precision="bf16-mixed")
    return outcome, int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


def row(name: str) -> str:
    """Returns a row of the table."""
    try:
        plain, graphs = train(name, "auto", compiled=True)
    except Exception as error:  # of torch's compiler; the other rows are still of interest
        return f"| {name} | plain Lightning: {type(error).__name__}: {str(error).splitlines()[0][:80]} | | | | | |"
    ours, eager = superpipeline(k=1), superpipeline(k=1)
    train(name, eager, compiled=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome, our_graphs = train(name, ours, compiled=True)
    try:
        assert_same(outcome, plain)
        equal = "equal"
    except AssertionError as error:
        equal = f"different: {error}"
    masters = "yes" if any("needs weights in float32" in str(each.message) for each in caught) else "no"
    share = ours.stats().fetched_bytes / eager.stats().fetched_bytes
    gradients = ours.stats().offloaded_gradient_bytes / max(1, eager.stats().offloaded_gradient_bytes)
    return f"| {name} | {equal} | {graphs} | {our_graphs} | {share:.2f} | {gradients:.2f} | {masters} |"


def main() -> None:
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    versions = ", ".join(
        f"{each} {importlib.metadata.version(each)}" for each in ("torch", "lightning", "transformers")
    )
    print(f"{datetime.date.today()}, {platform.machine()}, Python {platform.python_version()}, {versions}\n")
    print(
        "| model | results | graphs, plain | graphs, streamed | uploaded bytes / eager | gradient bytes / eager | masters |"
    )
    print("|---|---|---|---|---|---|---|")
    for name in sys.argv[1:] or MODELS:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
