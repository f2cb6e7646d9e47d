"""A simulated clock device for the real engine.

A training runs as ever, on the CPU; its copies, layers and steps move clocks on by the seconds that a machine would need. The
thread that runs the model and the background have a clock each, and who is earlier goes on first.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.tools.planner.prediction.clocks import ClockDevice
from sp_lightning.tools.planner.prediction.visits import Rates

LAYERS, WIDTH, STEPS = 24, 32, 8
LATE = 60.0
"""Real seconds after which a thread that waits for the other one's clock is an error."""


class Clocked(ClockDevice):
    """The real engine moves its clocks on, and bytes are copied as well.

    Args:
        rates: how fast the machine is.
        seconds: how long a layer computes, forward and backward each.
        stepping: how long a layer's step computes.
    """

    def __init__(self, rates: Rates, seconds: float, stepping: float) -> None:
        self._turn = threading.Condition()
        self._clocks = {"model": 0.0, "background": 0.0}
        self._asked = deque[float]()  # when the pieces of work were given to the background that are not done
        self._blocked = False  # whether the model waits for the background
        self._done: dict[Future[None], float] = {}
        self._host_memory: list[tuple[int, int]] = []
        self._seconds, self._stepping = seconds, stepping
        self._given, self._ended = deque[Future[None]](), deque[float]()
        self._used = set[int]()  # addresses of slots
        self.moved: dict[Stream, list[int]] = {Stream.UPLOAD: [], Stream.DOWNLOAD: []}
        super().__init__(rates)

    @property
    def _who(self) -> str:
        return "background" if threading.current_thread().name.startswith("superpipeline_") else "model"

    @property
    def host(self) -> float:
        """The clock of this thread."""
        return self._clocks[self._who]

    @host.setter
    def host(self, seconds: float) -> None:
        with self._turn:
            self._clocks[self._who] = seconds
            self._turn.notify_all()

    def _is_first(self) -> bool:
        model = self._clocks["model"]
        if self._who == "background":
            return self._blocked or self._clocks["background"] <= model
        return not self._asked or max(self._asked[0], self._clocks["background"]) > model

    def _wait_for_turn(self) -> None:
        with self._turn:
            if not self._turn.wait_for(self._is_first, LATE):
                raise RuntimeError(f"The {self._who} has waited for {LATE:g} s.")

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        asked = self.host

        def run() -> None:
            self.host = max(self.host, asked)
            try:
                work()
            finally:
                with self._turn:
                    self._asked.popleft()
                    self._ended.append(self.host)
                    self._turn.notify_all()

        with self._turn:
            self._asked.append(asked)
        future = super().later(run)
        self._given.append(future)
        return future

    def finish(self, work: Future[None], why: Wait) -> None:
        self._block(lambda: Device.finish(self, work, why))
        while self._ended:
            self._done[self._given.popleft()] = self._ended.popleft()
        self.host = max(self.host, self._done[work])

    def _block(self, wait: Callable[[], None]) -> None:
        with self._turn:
            self._blocked = True
            self._turn.notify_all()
        try:
            wait()
        finally:
            self._blocked = False

    def close(self) -> None:
        self._block(super().close)

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        memory = super().host_empty(nbytes, pin=pin)
        self._host_memory.append((memory.data_ptr(), memory.data_ptr() + memory.nbytes))
        return memory

    def empty(self, nbytes: int) -> Tensor:
        return Device.empty(self, nbytes)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Any], stream: Stream, *, why: Wait | None = None
    ) -> None:
        self._wait_for_turn()
        Device.copy(self, targets, sources, stream, why=why)
        if stream is Stream.UPLOAD:  # a copy within the device takes no time
            sources = [each for each in sources if any(a <= each.data_ptr() < b for a, b in self._host_memory)]
        nbytes = sum(each.nbytes for each in sources)
        self.transfer("fetch" if stream is Stream.UPLOAD else "drain", 0, nbytes)
        if self._who == "background":
            self.moved[stream].append(nbytes)

    def record(self, stream: Stream) -> float:
        self._wait_for_turn()
        return super().record(stream)

    def wait(self, stream: Stream, event: float | None, why: Wait) -> None:
        self._wait_for_turn()
        super().wait(stream, event, why)

    def synchronize(self, event: float | None, why: Wait) -> None:
        self._wait_for_turn()
        super().synchronize(event, why)

    def has_happened(self, event: float | None) -> bool:
        return event is None or event <= self.host

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        if not isinstance(memory, Tensor):
            return
        if by is Stream.COMPUTE and not write:  # a slot, where its use begins and where it ends
            self._used ^= {memory.data_ptr()}
            if memory.data_ptr() in self._used:
                self._wait_for_turn()
                self.spend(Stream.COMPUTE, self._seconds, "forward", 0)
        elif by is Stream.STEP and write:  # the slot of a step
            self._wait_for_turn()
            self.step(self._stepping, 0)


class Trained(pl.LightningModule):
    """A stack of equal linear layers, trained with AdamW.

    Args:
        device: whose clock of compute is noted when a batch begins.
    """

    def __init__(self, device: Clocked) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.clocks = device
        self.at: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.at.append(max(self.clocks.now[Stream.COMPUTE], self.clocks.host))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found: Tensor = self.net(batch).square().mean()
        return found

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)
