"""One contestant on one workload, in a process of its own: run by contest.py, which reads the row it leaves."""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import resource
import statistics
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from examples.benchmarks.contestants import Bare, Contestant, by_name
from examples.benchmarks.rows import Row
from examples.benchmarks.workloads import BLOCKS, WARM_UP, Batches, Workload, build_batches, build_net
from sp_lightning.trainer.user_hooks import WRITE_NO_WEIGHTS

GIB = 2**30


def measure(workload: Workload, contestant: Contestant, *, seconds: float) -> Row:
    """Run and read the meters. Seconds and bytes; ``seconds`` is the budget of the measured steps."""
    pl.seed_everything(0, verbose=False)
    clock = Clock(WARM_UP, seconds)
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
        **memory(),
        **read,
    }


def _trained(workload: Workload, contestant: Contestant, net: nn.Module, batches: Batches, clock: Clock) -> Row:
    gauge = Meter(clock)
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


def _counted(strategy: Any, gauge: Meter, warm_up: int) -> Row:
    """What superpipeline says of itself; nothing for others."""
    if not gauge.counters:
        return {}
    return {
        "stats": deltas(gauge.counters[warm_up:]),
        "counted_peak_bytes": gauge.counters[-1]["peak_device_bytes"],
        "planned_peak_bytes": strategy.plan.peak_device_bytes,
        # Torch's own count is set back where superpipeline chooses a window.
        "peak_allocated_bytes": gauge.counters[-1]["peak_allocated_bytes"] or None,
    }


def _bare(workload: Workload, contestant: Bare, net: nn.Module, batches: Batches, clock: Clock) -> Row:
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


# ---------------------------------------------------------------------- meters


class Clock:
    """Moments between steps.

    On a GPU they are events on the compute stream: they say when the device came there and the host does not wait for them, so
    a host that runs ahead of its device stays ahead. The host waits twice: where measuring starts and where it ends.
    """

    def __init__(self, warm_up: int, seconds: float) -> None:
        self.warm_up = warm_up
        self.seconds = seconds
        self.moments: list[Any] = []
        self._started = 0.0

    def tick(self) -> None:
        """A step begins."""
        if len(self.moments) == self.warm_up:
            _synchronize()
            self._started = time.perf_counter()
        self._mark()

    def stop(self) -> None:
        """The last step is over."""
        _synchronize()
        self._mark()

    def is_over(self) -> bool:
        """Returns True if the time budget is spent and at least three steps are measured."""
        return len(self.moments) >= self.warm_up + 3 and time.perf_counter() - self._started > self.seconds

    def step_seconds(self) -> list[float]:
        """Returns the seconds of each measured step."""
        marks = self.moments[self.warm_up :]
        if torch.cuda.is_available():
            return [start.elapsed_time(end) / 1e3 for start, end in zip(marks, marks[1:])]  # noqa: B905
        return [end - start for start, end in zip(marks, marks[1:])]  # noqa: B905

    def _mark(self) -> None:
        if not torch.cuda.is_available():
            self.moments.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self.moments.append(event)


class Meter(Callback):
    """Clock, losses, the update's share and the strategy's counters, as hooks of the Trainer.

    The update is what lies between Lightning's ``on_before_optimizer_step``, when gradients are complete, and the end
    of the batch: an optimizer's own hooks would count forward and backward, which run inside its ``step``.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.losses: list[Tensor | float] = []
        self.update_seconds: list[float] = []
        self.counters: list[dict[str, float]] = []
        self.registered_bytes = 0
        self._update_started = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._start(trainer)

    def on_predict_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._start(trainer)

    def on_before_optimizer_step(self, *_: Any) -> None:
        self._update_started = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.update_seconds.append(time.perf_counter() - self._update_started)
        self.losses.append(outputs["loss"].detach())

    def on_predict_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(outputs.detach())

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end(trainer)

    def on_predict_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self._end(trainer)

    def _start(self, trainer: pl.Trainer) -> None:
        self._count(trainer)
        self.clock.tick()

    def _end(self, trainer: Any) -> None:
        self.clock.stop()
        self._count(trainer)
        self.registered_bytes = registered_bytes(trainer.lightning_module)

    def _count(self, trainer: Any) -> None:
        if hasattr(trainer.strategy, "stats"):
            counted = dataclasses.asdict(trainer.strategy.stats())
            self.counters.append({name: value for name, value in counted.items() if not isinstance(value, dict)})


# Read, as Lightning's own progress bar was: with it in the Trainer, superpipeline fetches ahead as without.
WRITE_NO_WEIGHTS.add(Meter)


def deltas(counters: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """What each step added to the counters; a peak is none."""
    names = [name for name in counters[0] if not name.startswith("peak")]
    return [{name: after[name] - before[name] for name in names} for before, after in zip(counters, counters[1:])]  # noqa: B905


def _gradient(parameter: nn.Parameter) -> torch.Tensor | None:
    """The gradient; None where the backward has freed it, which is an error to read."""
    try:
        return parameter.grad
    except RuntimeError:
        return None


def registered_bytes(module: nn.Module) -> int:
    """Bytes of pinned host memory under parameters and gradients, by torch or by this package; torch counts its own only."""
    found = {}
    for parameter in module.parameters():
        for tensor in (parameter, _gradient(parameter)):
            # a DTensor has no memory to ask for, and what lies under it came from torch's allocator
            if (
                tensor is not None
                and not hasattr(tensor, "to_local")
                and tensor.device.type == "cpu"
                and tensor.is_pinned()
            ):
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def memory() -> dict[str, int | None]:
    """Returns the peaks of this process so far, in bytes; None for GPU memory without a GPU."""
    cuda = torch.cuda.is_available()
    return {
        "peak_allocated_bytes": torch.cuda.max_memory_allocated() if cuda else None,
        "peak_reserved_bytes": torch.cuda.max_memory_reserved() if cuda else None,
        "peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "locked_bytes": _locked_bytes(),
        "pinned_bytes": torch.cuda.host_memory_stats().get("allocated_bytes.peak") if cuda else None,
    }


def _locked_bytes() -> int:
    """What the kernel counts as locked or pinned; not all drivers tell it."""
    status = Path("/proc/self/status")
    if not status.is_file():
        return 0
    lines = [line.split() for line in status.read_text().splitlines()]
    return sum(int(words[1]) * 1024 for words in lines if words[0] in ("VmLck:", "VmPin:"))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
