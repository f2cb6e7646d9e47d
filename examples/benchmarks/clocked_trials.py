"""What trials over one frozen base gain where transfers are slow: the real engine, and a device whose streams are clocks.

Trainings run as ever, on the CPU; their copies and layers move clocks on by the seconds that a machine would need, in which the
host takes no time. A layer computes for one second and travels for so many. So the clock of the compute stream says how long
trials take at once, and one after the other. From the root of the repository::

    python -m examples.benchmarks.clocked_trials
"""

from __future__ import annotations

import argparse
import bisect
import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from examples.benchmarks.shared_base import Workload, trial_of
from sp_lightning import SharedBase
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.experimental.sharing.common import ON_DEVICE
from sp_lightning.tools.planner.prediction.clocks import ClockDevice
from sp_lightning.tools.planner.prediction.visits import Rates

WORKLOAD = Workload(24, 128, 64, 4)
RANK = 1  # what travels is nearly all the base's
LEAST, MOST_BYTES = 0.9, 1.1
"""The aims: until computation binds, n trials at once are so many times n as fast as one after the other, and so many times
1 / n of the bytes come to the device for each."""


class Streams(dict[Any, float]):
    """What streams' clocks show. Each trial, which is a thread, has its own, as on an accelerator; kernels have one."""

    @staticmethod
    def _key(stream: Stream) -> Any:
        return stream if stream is Stream.COMPUTE else (threading.get_ident(), stream)

    def __getitem__(self, stream: Stream) -> float:
        return self.get(self._key(stream), 0.0)

    def __setitem__(self, stream: Stream, seconds: float) -> None:
        super().__setitem__(self._key(stream), seconds)


class Clocked(ClockDevice):
    """The device of all trials. The real engine moves its clocks on, and bytes are copied as well.

    All uploads take turns on one link: each has the first time that is free for as long as it takes.

    Args:
        travel: seconds that a byte from the host takes.
    """

    def __init__(self, travel: float) -> None:
        super().__init__(Rates(1 / travel if travel else math.inf, math.inf, math.inf, math.inf))
        self.now = Streams()
        self._link: list[tuple[float, float]] = []  # when it is busy, in order
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
            seconds, begin = nbytes / self._rates.upload, max(self.now[stream], self.host)
            for busy, free in self._link:
                if begin + seconds <= busy:
                    break
                begin = max(begin, free)
            bisect.insort(self._link, (begin, begin + seconds))
            self.now[stream] = begin
            self.transfer("fetch", 0, nbytes)

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        # The engine says so of a slot when a layer begins to use it, and when it has.
        if by is Stream.COMPUTE and not write and isinstance(memory, Tensor):
            self.spend(Stream.COMPUTE, 0.5, "forward", 0)


class Ran(NamedTuple):
    """What the clocks say of a run.

    Attributes:
        seconds: what the compute stream's shows at the end.
        computed: so many of them it computed.
        nbytes: from the host.
        result: the run's.
    """

    seconds: float
    computed: float
    nbytes: int
    result: Any


class Row(NamedTuple):
    """Trials at once.

    Attributes:
        trials: how many.
        gain: how many times as fast they are as one after the other.
        bound: how many times as fast they would be if the device computed all the time.
        share: their bytes for each that comes for trials one after the other.
    """

    trials: int
    gain: float
    bound: float
    share: float


def clocked(run: Callable[[], Any], travel: float) -> Ran:
    """Runs something on such a device, where a byte travels for so many seconds."""
    device = Clocked(travel)
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        result = run()
    computed = sum(each.end - each.begin for each in device.intervals if each.kind == "forward")
    return Ran(device.now[Stream.COMPUTE], computed, device.copied, result)


def measure(ratio: float, counts: Sequence[int], layers: int = ON_DEVICE, workload: Workload = WORKLOAD) -> list[Row]:
    """Trains so many trials at once, and the same ones one after the other.

    Args:
        ratio: how many times as long as it computes a layer travels.
        counts: how many trials.
        layers: of the base that are on the device at once.
        workload: what each trains.

    Raises:
        RuntimeError: a trial has other losses than alone.
    """
    trial, rows = trial_of(workload, RANK), []
    travel = ratio * 2 * workload.layers * workload.steps / clocked(lambda: trial(0), 0.0).nbytes
    for count in counts:
        alone = [clocked(lambda number=number: trial(number), travel) for number in range(count)]  # type: ignore[misc]
        base = SharedBase(layers=layers)
        at_once = clocked(lambda: base.map(trial, range(count)), travel)  # noqa: B023
        if [each.losses for each in at_once.result] != [each.result.losses for each in alone]:
            raise RuntimeError(f"{count} trials at once have other losses than one after the other.")
        seconds, nbytes = sum(each.seconds for each in alone), sum(each.nbytes for each in alone)
        bound = seconds / sum(each.computed for each in alone)
        rows.append(Row(count, seconds / at_once.seconds, bound, at_once.nbytes / nbytes))
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--trials", type=int, nargs="+", default=[1, 2, 4, 8], help="how many (%(default)s)")
    parser.add_argument(
        "--ratios", type=float, nargs="+", default=[4, 8, 16],
        help="how many times as long as it computes a layer travels (%(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--layers", type=int, default=ON_DEVICE, help="of the base that are on the device at once (%(default)s)"
    )
    options = parser.parse_args(argv)
    print(
        "\n| a layer travels ÷ computes | trials | times as fast | computation allows | bytes ÷ one after the other |"
    )
    print("|---|---|---|---|---|")
    for ratio in options.ratios:
        for row in measure(ratio, options.trials, options.layers):
            print(f"| {ratio:g} | {row.trials} | {row.gain:.2f} | {row.bound:.2f} | {row.share:.3f} |", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    main()
