"""What trials over one frozen base gain where transfers are slow: the real engine, and a device whose streams are clocks.

Trainings run as ever, on the CPU; their copies and layers move clocks on by the seconds that a machine would need, in which the
host takes no time. A layer computes for one second and travels for so many. So the clock of the compute stream says how long
trials take at once, and one after the other. From the root of the repository::

    python -m examples.benchmarks.clocked_trials
"""

from __future__ import annotations

import argparse
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from unittest import mock

from torch import Tensor

from examples.benchmarks.shared_base import Workload, trial_of
from sp_lightning import SharedBase
from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.sharing.common import ON_DEVICE
from sp_lightning.tune.clocks import ClockDevice
from sp_lightning.tune.visits import Rates

WORKLOAD = Workload(24, 128, 64, 4)
RANK = 1  # what travels is nearly all the base's
LEAST, MOST_BYTES = 0.9, 1.1
"""The aims: until computation binds, n trials at once are so many times n as fast as one after the other, and so many times
1 / n of the bytes come to the device for each."""


class Clocked(ClockDevice):
    """The device of all trials, which upload on one stream. The real engine moves its clocks on, and bytes are copied as well.

    Args:
        travel: seconds that a byte from the host takes.
    """

    def __init__(self, travel: float) -> None:
        super().__init__(Rates(1 / travel if travel else math.inf, math.inf, math.inf, math.inf))
        self._made: list[Tensor] = []

    def empty(self, nbytes: int) -> Tensor:
        self._made.append(Device.empty(self, nbytes))
        return self._made[-1]

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        Device.copy(self, targets, sources, stream, why=why)
        there = {each.untyped_storage().data_ptr() for each in self._made}  # a copy from there takes no time
        nbytes = sum(source.nbytes for source in sources if source.untyped_storage().data_ptr() not in there)
        if stream is Stream.UPLOAD and nbytes:
            self.transfer("fetch", 0, nbytes)

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        # The engine says so of a slot when a layer begins to use it, and when it has.
        if by is Stream.COMPUTE and not write and isinstance(memory, Tensor):
            self.spend(Stream.COMPUTE, 0.5, "forward", 0)


def seconds(run: Callable[[], Any], travel: float) -> tuple[float, int, Any]:
    """What the compute stream's clock shows after a run, bytes from the host, and what the run has returned."""
    device = Clocked(travel)
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        found = run()
    return device.now[Stream.COMPUTE], device.copied, found


def measure(
    ratio: float, counts: Sequence[int], layers: int = ON_DEVICE, workload: Workload = WORKLOAD
) -> list[tuple[int, float, float]]:
    """How many trials, how many times as fast as one after the other they are, and their bytes for each of that one's.

    Args:
        ratio: how many times as long as it computes a layer travels.
        counts: how many trials.
        layers: of the base that are on the device at once.
        workload: what each trains.

    Raises:
        RuntimeError: a trial has other losses than alone.
    """
    trial, rows = trial_of(workload, RANK), []
    _, nbytes, _ = seconds(lambda: trial(0), 0.0)
    travel = ratio * 2 * workload.layers * workload.steps / nbytes
    for count in counts:
        alone = [seconds(lambda number=number: trial(number), travel) for number in range(count)]  # type: ignore[misc]
        base = SharedBase(layers=layers)
        at_once, brought, found = seconds(lambda: base.map(trial, range(count)), travel)  # noqa: B023
        if [each.losses for each in found] != [each.losses for _, _, each in alone]:
            raise RuntimeError(f"{count} trials at once have other losses than one after the other.")
        rows.append((count, sum(each for each, _, _ in alone) / at_once, brought / sum(each for _, each, _ in alone)))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (%(default)s)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[2, 4, 8],
        help="how many times as long as it computes a layer travels (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, default=ON_DEVICE, help="of the base that are on the device at once (%(default)s)"
    )
    options = parser.parse_args(argv)
    print("\n| a layer travels ÷ computes | trials | times as fast | bytes ÷ one after the other |\n|---|---|---|---|")
    for ratio in options.ratios:
        for count, gain, share in measure(ratio, options.trials, options.layers):
            print(f"| {ratio:g} | {count} | {gain:.2f} | {share:.3f} |", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    main()
