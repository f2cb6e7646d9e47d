"""An accelerator on which everything comes late, so that a wait that is left out shows in the results.

The simulated device (:mod:`tests.support.simdevice`) reasons about order; this one lets the hardware lose each race. In one
regime copies are slow: each waits on its stream and fills its target with NaN first. In the other compute is, before each
use of memory that it is given, so that copies come too early.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor

from sp_lightning.core.device.accelerator import Accelerator
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.torch_compat.modes import no_inference_mode
from tests.support.wait_scenarios import IMPLIED, OF_RANKS

Slow = Literal["copies", "compute"]
REGIMES: tuple[Slow, ...] = ("copies", "compute")
CYCLES = {"copies": 40_000_000, "compute": 5_000_000}
"""Of a sleep, by the regime: some milliseconds, and the kernels of the tests' models are microseconds. A copy has to sleep
longer than the host takes from there to what a wait protects."""
UPDATE_SECONDS = 0.02


class Delayed(Accelerator):
    """Plugs into the engine's one seam.

    Args:
        device: a GPU.
        slow: the regime.
        omit: a wait that is left out.
    """

    def __init__(self, device: torch.device, slow: Slow, omit: Wait | None = None) -> None:
        super().__init__(device)
        self.slow = slow
        self.omit = omit
        self.waits: set[Wait] = set()
        self.early: list[str] = []
        """Streams that were busy when host memory was unpinned; a finalizer cannot raise."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        if self.slow == "copies":
            with self.on(stream), no_inference_mode():
                torch.cuda._sleep(CYCLES[self.slow])  # type: ignore[no-untyped-call]
                for target, source in zip(targets, sources, strict=True):
                    spoil(target, source)
        super().copy(targets, sources, stream, why=why)

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        if self.slow == "compute" and by in (Stream.COMPUTE, Stream.STEP):
            with self.on(by):
                torch.cuda._sleep(CYCLES[self.slow])  # type: ignore[no-untyped-call]

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().wait(stream, event, why)

    def synchronize(self, event: Any, why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().synchronize(event, why)

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        def late() -> None:
            time.sleep(UPDATE_SECONDS)
            work()

        return super().later(late, urgency)

    def finish(self, work: Future[None], why: Wait) -> None:
        self.waits.add(why)
        if why is not self.omit:
            super().finish(work, why)

    def unpin(self, memory: Tensor) -> None:
        for name, side in self._side.items():
            if name is not Stream.STEP and not side.query():
                self.early.append(name.value)
                side.synchronize()  # unpinning now might end the process, and with it what others have found
        super().unpin(memory)


def spoil(target: Tensor, source: Tensor) -> None:
    """NaN, wherever the target is, in the order of the current stream."""
    value = float("nan") if source.is_floating_point() else 0xFF
    if target.device == source.device or target.device.type != "cpu":
        target.fill_(value)
    else:
        target.copy_(torch.full_like(source, value), non_blocking=True)


@contextmanager
def delayed(slow: Slow, omit: Wait | None = None) -> Iterator[list[Delayed]]:
    """Every strategy inside runs on such a device, whose trainers take the GPU; the list is of those that were made."""
    from tests.support import runs, wait_scenarios

    made: list[Delayed] = []

    def make(device: torch.device) -> Delayed:
        made.append(Delayed(device, slow, omit))
        return made[-1]

    trainer_for = runs.trainer_for

    def on_gpu(strategy: Any, **options: Any) -> Any:
        return trainer_for(strategy, **{"accelerator": "gpu", **options})

    with (
        mock.patch("sp_lightning.trainer.run.device_for", make),
        mock.patch.object(runs, "trainer_for", on_gpu),
        mock.patch.object(wait_scenarios, "trainer_for", on_gpu),
    ):
        yield made
    torch.cuda.synchronize()


NOT_SEEN = {
    **IMPLIED,
    Wait.DROP_AFTER_DRAIN: "the next gradient comes into that memory by the same stream, and nothing else does",
    Wait.CLOSE_AFTER_FETCH: "page locks are given back next, which waits for all copies before anybody takes memory",
    Wait.CLOSE_AFTER_STORE: "the same",
}
"""Waits whose omission no result can show, and why; the clocks of the simulated device show it."""

SEEN = [wait for wait in Wait if wait not in NOT_SEEN and wait not in OF_RANKS]
"""Waits of one device whose omission a result shows. Those of several ranks have no scenario on one device."""
