"""First light: what this project rests on, on this machine. It stops at the first failure and says all about it.

From the root of the repository, on a machine with a GPU, in a minute::

    python -m examples.benchmarks.first_light --out rows.jsonl

``--pretend`` goes the same way on a CPU with tiny sizes, which shows that the script itself works, and nothing else.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import platform
import resource
import subprocess
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchvision
from torch import Tensor

import sp_lightning
from examples.benchmarks import cli, forks, limits, rows
from sp_lightning.capabilities.activations import offload
from sp_lightning.core.device.accelerator import device_for
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from tests.support.models import CASES, Classifier, Module, Stack, images
from tests.support.runs import Batches, Make, Outcome, assert_equal, fit, superpipeline

GIB = 2**30
PRECISIONS = ("32-true", "bf16-mixed")
EVENTS = 1000
# Of what is said of a failure, so many characters.
MOST_SAID = 20_000


@dataclass(frozen=True)
class Setting:
    """How large everything is.

    Attributes:
        device: where the models compute.
        nbytes: of host memory that is page-locked and copied.
        fork_nbytes: of host memory that is page-locked beside a fork; less where less is free.
        seconds: for the rates of copies.
    """

    device: torch.device
    nbytes: int
    fork_nbytes: int
    seconds: float

    @property
    def accelerator(self) -> str:
        return "cpu" if self.device.type == "cpu" else "gpu"


REAL = Setting(torch.device("cuda"), GIB, 8 * GIB, 4.0)
PRETENDED = Setting(torch.device("cpu"), 2**22, 2**24, 0.1)


# ---------------------------------------------------------------------- the stages: each returns what it found, or raises


def pinning(setting: Setting) -> rows.Row:
    """Host memory is page-locked in place, and given back without an error that a later kernel would raise."""
    begun = time.perf_counter()
    memory = PinnedMemory(device_for(setting.device), setting.nbytes, pin=True)
    seconds = time.perf_counter() - begun
    if not memory.pinned:
        raise RuntimeError(f"The system page-locks no {setting.nbytes / GIB:.2f} GiB of host memory (ulimit -l).")
    memory.unpin()
    torch.ones(1, device=setting.device).add_(1).item()
    return {"bytes": setting.nbytes, "pin_seconds": seconds}


def copies(setting: Setting) -> rows.Row:
    """Bytes arrive as they were sent, there and back, in the order of streams and events; then how fast."""
    device = device_for(setting.device)
    pinned = [PinnedMemory(device, setting.nbytes, pin=True) for _ in range(2)]  # while these live, it is page-locked
    there, back = (each.bytes for each in pinned)
    # Random bytes of a GiB take ten seconds. Those of a prime number of bytes, repeated, are others on each page.
    once = torch.randint(0, 256, (15_485_863,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    for begin in range(0, there.nbytes, once.nbytes):
        part = there[begin : begin + once.nbytes]
        part.copy_(once[: part.nbytes])
    near = device.empty(there.nbytes)
    device.copy([near], [there], Stream.UPLOAD)
    device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), Wait.USE_AFTER_FETCH)
    near.add_(1)
    device.wait(Stream.DOWNLOAD, device.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
    device.copy([back], [near], Stream.DOWNLOAD)
    device.synchronize(device.record(Stream.DOWNLOAD), Wait.APPLY_AFTER_DRAIN)
    if not torch.equal(back, there + 1):
        raise AssertionError("Bytes that went to the device and back are not those that were sent.")
    return limits.transfer_bytes(setting.device, setting.seconds)


def events(setting: Setting) -> rows.Row:
    """What an event costs the host: to record it, and to have another stream wait for it."""
    device = device_for(setting.device)
    begun = time.perf_counter()
    for _ in range(EVENTS):
        device.wait(Stream.UPLOAD, device.record(Stream.COMPUTE), Wait.FETCH_AFTER_USE)
    return {"seconds_per_event": (time.perf_counter() - begun) / EVENTS}


def convolutions() -> Classifier:
    """Convolutions with BatchNorm, whose buffers change in forward."""
    return Classifier(torchvision.models.mobilenet_v3_small(num_classes=5))


MODELS: dict[str, tuple[Make, Callable[[], Batches]]] = {
    "Llama": (CASES["llama-dropout"].make, CASES["llama-dropout"].batches),
    "ViT": (CASES["vit"].make, CASES["vit"].batches),
    "convolutions": (convolutions, lambda: images(32)),
}


def check(make: Make, batches: Callable[[], Batches], precision: str, setting: Setting, **options: Any) -> None:
    """Ours beside plain Lightning, as ``superpipeline check`` compares them, with the smallest window."""
    trainer = {"accelerator": setting.accelerator, "precision": precision}
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):  # else plain Lightning differs from itself
        report = sp_lightning.check(make, batches, trainer=trainer, **{"k": 1, "k_prime": 1, **options})
    if report.status:
        raise AssertionError(str(report))


def trained(make: Make, batches: Batches, setting: Setting, *, precision: str = "32-true", **options: Any) -> Outcome:
    """A training with the smallest window, in which every layer goes and comes back."""
    strategy = superpipeline(**{"k": 1, "k_prime": 1, **options})
    return fit(make, batches, strategy, recorded="losses", accelerator=setting.accelerator, precision=precision)


def equality(setting: Setting) -> rows.Row:
    """Three small models in both precisions, then all that moves at once."""
    done = []
    for name, (make, batches) in MODELS.items():
        for precision in PRECISIONS:
            done.append(f"{name}, {precision}")
            with about(done[-1]):
                check(make, batches, precision, setting)
    make, batches = MODELS["Llama"]
    done.append("Llama, bf16-mixed, activations offloaded")
    with about(done[-1]), mock.patch.object(offload, "WORTH_MOVING", 1):  # the model is small
        check(make, batches, "bf16-mixed", setting, activations="offload")
    return {"equal": done}


class about:  # noqa: N801 - reads as a word of the sentence
    """Has an error say what was compared."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if error is not None:
            error.add_note(f"This was {self._what}.")


class CatchesFailures(Module):
    """A backward that fails in the midst of its layers, and the next forward at once. Without failures, the same."""

    def __init__(self, *, fails: bool) -> None:
        super().__init__(Stack(width=64))
        self.automatic_optimization = False
        self.fails = fails
        for module in self.net.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0  # a forward more would take more random numbers

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        if self.fails:
            net: Any = self.net
            handle = net.blocks[1].register_forward_hook(hook_that_fails)
            try:
                self.manual_backward(self.loss(batch))
            except KeyError:
                optimizer.zero_grad()
            else:
                raise AssertionError("The backward that was to fail has not failed.")
            finally:
                handle.remove()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


def hook_that_fails(module: Any, inputs: Any, output: Tensor) -> None:
    output.register_hook(fail)


def fail(gradient: Tensor) -> Tensor:
    raise KeyError("in backward, on purpose")


def caught_failures(setting: Setting) -> rows.Row:
    """User code catches what a backward raises and goes on, while a thread of autograd's still lets go of that backward."""
    batches = [torch.randn(4, 64, generator=torch.Generator().manual_seed(number)) for number in range(6)]
    ours, expected = (trained(partial(CatchesFailures, fails=fails), batches, setting) for fails in (True, False))
    assert_equal(ours.state, expected.state, "state")
    assert_equal(ours.losses, expected.losses, "losses")
    return {"failures": len(batches)}


def fork(setting: Setting) -> rows.Row:
    """What a data loader's worker costs beside page-locked memory, and whether it can read a weight there."""
    nbytes = min(setting.fork_nbytes, rows.host_bytes_free() // 4)
    found = {"bytes": nbytes, **forks.measure(nbytes, setting.device, pin=True)}
    copied = found["bytes_of_the_childs_own"] > nbytes / 2
    said = "each worker costs the page-locked bytes" if copied else "a fork copies none of the page-locked bytes"
    return {**found, "says": f"{said}, and {'can' if found['child_can_read'] else 'cannot'} read them"}


STAGES: tuple[Callable[[Setting], rows.Row], ...] = (pinning, copies, events, equality, caught_failures, fork)


# ---------------------------------------------------------------------- what is said


def facts() -> dict[str, Any]:
    """All that may explain a failure."""
    said: dict[str, Any] = {
        "kernel": platform.platform(),
        "locked memory, soft and hard limit": resource.getrlimit(resource.RLIMIT_MEMLOCK),
        "host bytes free": rows.host_bytes_free(),
        "environment": {
            name: value for name, value in os.environ.items() if name.startswith(("CUDA", "PYTORCH", "OMP"))
        },
        "build of torch": torch.__config__.show(),
    }
    if torch.cuda.is_available():
        said["cuda, cudnn"] = (torch.version.cuda, torch.backends.cudnn.version())
        said["device memory"] = torch.cuda.memory_summary(abbreviated=True)
        said["nvidia-smi"] = _output_of("nvidia-smi")
    return said


def _output_of(command: str) -> str:
    try:
        return subprocess.run([command], capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return f"{type(error).__name__}: {error}"


def run(setting: Setting, stages: Sequence[Callable[[Setting], rows.Row]], out: Path) -> bool:
    """One stage after the other, each with its row at once. Returns whether all went well."""
    for stage in stages:
        begun = time.perf_counter()
        row = {**rows.origin(), "kind": "first-light", "stage": stage.__name__}
        found: rows.Row
        try:
            found = {"status": "ok", "found": stage(setting)}
        except Exception as error:  # whatever it is, it is the result
            said = "".join(traceback.format_exception(error))
            found = {"status": "failed", "error": f"{type(error).__name__}: {error}", "traceback": said[-MOST_SAID:]}
            found["facts"] = {name: str(fact)[:MOST_SAID] for name, fact in facts().items()}
        seconds = time.perf_counter() - begun
        rows.append(out, {**row, **found, "seconds": seconds})
        if found["status"] != "ok":
            print(f"{stage.__name__}: FAILED after {seconds:.1f} s\n{found['traceback']}", flush=True)
            print("\n".join(f"{name}: {fact}" for name, fact in found["facts"].items()), flush=True)
            return False
        print(f"{stage.__name__}: ok in {seconds:.1f} s: {found['found']}", flush=True)
    return True


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=cli.positive, default=60, help="after which it is ended (%(default)s)")
    parser.add_argument("--pretend", action="store_true", help="on the CPU with tiny sizes: whether the script works")
    parser.add_argument("--out", type=cli.rows_file, default="runs/benchmarks/rows.jsonl", help="(%(default)s)")
    options = parser.parse_args(argv)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before the first kernel: results that repeat
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    # What hangs says where, and ends.
    faulthandler.dump_traceback_later(options.seconds, exit=True)
    try:
        well = run(PRETENDED if options.pretend else REAL, STAGES, options.out)
    finally:
        faulthandler.cancel_dump_traceback_later()
        torch.use_deterministic_algorithms(False)
    print(f"first light: {'all went well' if well else 'stopped at the first failure'}", flush=True)
    return 0 if well else 1


if __name__ == "__main__":
    raise SystemExit(main())
