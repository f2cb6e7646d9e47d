"""Estimates where optimizers step faster, by the bytes that a step copies, reads and writes, and by its multiplications."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.updates.cpu_seconds import EIGHT_BITS_SECONDS, muon_flops
from sp_lightning.core.updates.fused import is_separable

_NBYTES = 1 << 26  # of the copies that are timed
_WIDTH = 512  # of the matrices whose product is timed


@dataclass(frozen=True)
class Machine:
    """Rates of a machine.

    Attributes:
        upload, download: bytes per second to the GPU and from it.
        host_memory: bytes per second that the CPU reads and writes.
        flops: multiplications and additions per second of the CPU, in ``bfloat16``.
    """

    upload: float
    download: float
    host_memory: float
    flops: float


def measure(device: Device) -> Machine:
    """Measures the rates of this machine, in about a tenth of a second.

    Raises:
        torch.OutOfMemoryError: the GPU has no memory for the copies.
    """
    memory, there = PinnedMemory(device, _NBYTES, pin=True), device.upload_target(_NBYTES)
    here = memory.bytes[:_NBYTES].fill_(1)
    other = torch.ones_like(here)
    matrix = torch.ones(_WIDTH, _WIDTH, dtype=torch.bfloat16)

    def copy(stream: Stream, target: Tensor, source: Tensor) -> None:
        device.copy([target], [source], stream)
        device.synchronize(device.record(stream), Wait.CLOSE_AFTER_FETCH)

    with torch.no_grad():
        found = Machine(
            _NBYTES / _seconds(lambda: copy(Stream.UPLOAD, there, here)),
            _NBYTES / _seconds(lambda: copy(Stream.DOWNLOAD, here, there)),
            2 * _NBYTES / _seconds(lambda: other.copy_(here)),
            2 * _WIDTH**3 / _seconds(lambda: matrix @ matrix),
        )
    memory.unpin()
    return found


def _seconds(work: Callable[[], Any]) -> float:
    """Returns the shortest time of three calls of ``work``, after a warm-up."""
    work()
    taken = []
    for _ in range(3):
        begun = perf_counter()
        work()
        taken.append(perf_counter() - begun)
    return max(min(taken), 1e-9)


def least_seconds(ledger: Ledger, machine: Machine, computing: float = 0.0) -> float:
    """Returns the seconds of a step with all its micro-batches, as if its uploads, downloads, passes and computation overlapped.

    Args:
        ledger: the bytes that a step copies, reads and writes.
        machine: the rates of the machine.
        computing: the seconds that the CPU computes.
    """
    up, down = ledger.sent
    return max(up / machine.upload, down / machine.download, ledger.traffic / machine.host_memory, computing)


def host_seconds_of(optimizers: Iterable[Any], machine: Machine) -> float:
    """Returns the seconds that steps on the CPU compute: Muon's, and those of torchao's optimizers.

    The other optimizers count as 0, because their passes over memory take longer.
    """
    total = 0.0
    for optimizer in optimizers:
        trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        if type(optimizer) is torch.optim.Muon:
            total += muon_flops(trained) / machine.flops
        elif is_separable(optimizer):
            total += EIGHT_BITS_SECONDS * sum(p.numel() for p in trained)
    return total
