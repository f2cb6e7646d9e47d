"""One contestant on one workload, in a process of its own: run by contest.py, which reads the row it leaves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import statistics
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from examples.benchmarks import meter
from examples.benchmarks.contestants import Bare, Contestant, by_name
from examples.benchmarks.rows import Row
from examples.benchmarks.workloads import BLOCKS, WARM_UP, Batches, Workload, build_batches, build_net

GIB = 2**30


def measure(workload: Workload, contestant: Contestant, *, seconds: float) -> Row:
    """Run and read the meters. Seconds and bytes; ``seconds`` is the budget of the measured steps."""
    pl.seed_everything(0, verbose=False)
    clock = meter.Clock(WARM_UP, seconds)
    built = dataclasses.replace(workload, checkpointing=workload.checkpointing or contestant.checkpointing)
    net, batches = build_net(built), build_batches(workload, clock.is_over)
    if contestant.attention is not None:
        net.model.set_attn_implementation(contestant.attention)  # type: ignore[operator,union-attr]
    if isinstance(contestant, Bare):
        read = _bare(workload, contestant, net, batches, clock)
    else:
        read = _trained(workload, contestant, net, batches, clock)
    steps = clock.step_seconds()
    median = statistics.median(steps)
    return {
        "status": "ok",
        "step_seconds": steps,
        "median_step_seconds": median,
        "items_per_second": workload.items / median,
        **meter.memory(),
        **read,
    }


def _trained(workload: Workload, contestant: Contestant, net: nn.Module, batches: Batches, clock: meter.Clock) -> Row:
    gauge = meter.Meter(clock)
    trainer = pl.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=1,
        precision=workload.precision,  # type: ignore[arg-type]
        max_epochs=1,
        callbacks=[gauge],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        gradient_clip_val=contestant.clips,
        **contestant.trainer_arguments(workload),
    )
    for block in net.modules() if contestant.compiled else ():
        if isinstance(block, BLOCKS):
            block.compile()
    module = contestant.module(net, workload)
    updates_on_host = contestant.updates_on_host or not torch.cuda.is_available()
    if workload.task == "train":
        trainer.fit(module, batches)
    else:
        trainer.predict(module, batches, return_predictions=False)
    return {
        "losses": [float(loss) for loss in gauge.losses],
        "optimizer_seconds": gauge.update_seconds[clock.warm_up :] if updates_on_host else None,
        "registered_bytes": gauge.registered_bytes,
        **_counted(trainer.strategy, gauge, clock.warm_up),
    }


def _counted(strategy: Any, gauge: meter.Meter, warm_up: int) -> Row:
    """What superpipeline says of itself; nothing for others."""
    if not gauge.counters:
        return {}
    return {
        "stats": meter.deltas(gauge.counters[warm_up:]),
        "counted_peak_bytes": gauge.counters[-1]["peak_device_bytes"],
        "planned_peak_bytes": strategy.plan.peak_device_bytes,
        # Torch's own count is set back where superpipeline chooses a window.
        "peak_allocated_bytes": gauge.counters[-1]["peak_allocated_bytes"] or None,
    }


def _bare(workload: Workload, contestant: Bare, net: nn.Module, batches: Batches, clock: meter.Clock) -> Row:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    contestant.prepare(net, device)
    losses = []
    mixed = torch.autocast(device.type, torch.bfloat16, enabled=workload.precision == "bf16-mixed", cache_enabled=False)
    dtype = torch.bfloat16 if workload.precision == "bf16-true" else torch.float32
    with torch.no_grad(), mixed:
        for batch in batches:
            clock.tick()
            moved = {name: each.to(device, dtype if each.is_floating_point() else None) for name, each in batch.items()}
            losses.append(net(**moved))
    clock.stop()
    return {"losses": [float(loss) for loss in losses]}


def failure(error: BaseException) -> Row:
    """A row that says what went wrong."""
    text = "".join(traceback.format_exception(error))
    lines = str(error).strip().splitlines() or [""]
    return {"status": "failed", "error": f"{type(error).__name__}: {lines[0]}", "traceback": text[-3000:]}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--row", type=Path, required=True, help="where the row goes")
    parser.add_argument("--job", required=True, help="JSON: workload, contestant, seconds, device_gib")
    options = parser.parse_args(argv)
    job = json.loads(options.job)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", category=FutureWarning)
    try:
        if job["device_gib"] is not None and torch.cuda.is_available():
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, job["device_gib"] * GIB / total))
        row = measure(Workload(**job["workload"]), by_name(job["contestant"]), seconds=job["seconds"])
    except Exception as error:  # a contestant's failure is a result
        row = failure(error)
    options.row.write_text(json.dumps(row), encoding="utf-8")


if __name__ == "__main__":
    main()
