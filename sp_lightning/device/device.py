"""The seam between the engine and the device: memory, copies, waits, times; and the background thread.

:class:`Device` is the synchronous CPU, where every copy is done at once and there is nothing to wait for.
:class:`~sp_lightning.device.accelerator.Accelerator` does the same with three streams. All other code receives one of
the two and does not ask which.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.layout import PAGE
from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.timeline import Kind, Timeline
from sp_lightning.device.waits import Stream, Wait


class Device:
    """A device whose copies are synchronous: the CPU.

    Args:
        device: where layers are used.
    """

    synchronous = True
    """Whether copies hold up everything else."""

    computes_on_host = True
    """Whether the model computes where the optimizer does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stalled: dict[Wait, float] = dict.fromkeys(Wait, 0.0)
        self.timelines: list[Timeline] = []
        """Where :meth:`note` leaves times."""
        self._background: ThreadPoolExecutor | None = None

    def empty(self, nbytes: int) -> Tensor:
        """Uninitialised device memory, shape ``(nbytes,)``, ``uint8``, usable in and out of inference mode."""
        with no_inference_mode():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        """Uninitialised page-aligned, page-padded host memory of at least ``nbytes`` bytes, ``uint8``.

        Args:
            pin: that :meth:`pin` follows.
        """
        with no_inference_mode():
            padded = math.ceil(max(nbytes, 1) / PAGE) * PAGE
            raw = torch.empty(padded + PAGE, dtype=torch.uint8, device="cpu")
            start = -raw.data_ptr() % PAGE
            return raw[start : start + padded]

    def pin(self, memory: Tensor) -> bool:
        """Page-lock host memory in place. False where the system refuses; nothing to do for a CPU."""
        return True

    def unpin(self, memory: Tensor) -> None:
        """Undo :meth:`pin`. No copy from or to the memory is under way."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        """Copy between host and device in the order of ``stream``; shapes and dtypes are equal, none requires a gradient.

        Args:
            why: the wait that a synchronous copy counts as; None for that of weights or gradients.
        """
        start = perf_counter()
        with no_inference_mode():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        usual = Wait.USE_AFTER_FETCH if stream is Stream.UPLOAD else Wait.REUSE_AFTER_DRAIN
        self._stalled[why or usual] += perf_counter() - start

    def send(self, source: Tensor) -> Tensor:
        """Fresh device memory with the bytes of ``source``, which is flat host memory; compute waits for them."""
        memory = self.empty(source.nbytes)
        self.wait(Stream.UPLOAD, self.record(Stream.COMPUTE), Wait.FETCH_AFTER_USE)
        self.copy([memory], [source], Stream.UPLOAD)
        self.wait(Stream.COMPUTE, self.record(Stream.UPLOAD), Wait.USE_AFTER_FETCH)
        return memory

    def receive(self, source: Tensor) -> Tensor:
        """A copy of ``source`` on the host, which waits for it."""
        shape, stride = source.shape, torch.empty_like(source, device="meta").stride()
        memory = torch.empty_strided(shape, stride, dtype=source.dtype, device="cpu")
        self.wait(Stream.DOWNLOAD, self.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        self.copy([memory], [source], Stream.DOWNLOAD)
        self.synchronize(self.record(Stream.DOWNLOAD), Wait.APPLY_AFTER_DRAIN)
        return memory

    def record(self, stream: Stream) -> Any:
        """An event that has happened once everything issued to ``stream`` so far is done."""
        return None

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        """Let ``stream`` wait for ``event``; the host goes on."""

    def synchronize(self, event: Any, why: Wait) -> None:
        """Let the host wait for ``event``."""

    def later(self, work: Callable[[], None]) -> Future[None]:
        """Have the background thread do host work, one after the other, in the order of the calls."""
        if self._background is None:
            self._background = _one_thread()
        return self._background.submit(work)

    def finish(self, work: Future[None], why: Wait) -> None:
        """Let the host wait for work of :meth:`later`.

        Raises:
            BaseException: whatever the work raised.
        """
        start = perf_counter()
        try:
            work.result()
        finally:
            self._stalled[why] += perf_counter() - start

    def access(self, memory: Tensor, by: Stream | None, *, write: bool) -> None:
        """Say that ``memory`` is read or written by a stream (None: the host) now. Nothing but a declaration.

        :meth:`copy` declares for itself. A simulated device checks that each access is ordered after those before.
        """

    def mark(self, stream: Stream) -> Any:
        """The moment when ``stream`` comes here; None while there is no timeline."""
        return perf_counter() if self.timelines else None

    def note(self, kind: Kind, layer: int | None, begun: Any, stream: Stream, nbytes: int = 0) -> None:
        """Something that began at a mark ends when ``stream`` comes here."""
        if begun is not None and self.timelines:
            now = self.mark(stream)
            for timeline in self.timelines:
                timeline.add(kind, layer, begun, now, nbytes)

    def make_timeline(self) -> Timeline:
        """A timeline for this device, to be put into :attr:`timelines` while it is wanted. Waits for the device once."""
        return Timeline(_as_it_is)

    def peak_bytes(self) -> int | None:
        """Most device memory that was allocated, by anybody, since :meth:`reset_peak`; None where nobody counts (CPU)."""
        return None

    def reset_peak(self) -> None:
        """Count anew for :meth:`peak_bytes`."""

    def close(self) -> None:
        """End the background thread, once its work is done."""
        if self._background is not None:
            self._background.shutdown()
            self._background = None

    def free_bytes(self) -> int | None:
        """Device memory that can still be had, in bytes; None where that is not a limit (CPU)."""
        return None

    def stall_seconds(self, *why: Wait) -> float:
        """Seconds that compute waited for these reasons; on the CPU every second of a copy is one."""
        return sum(self._stalled[each] for each in why)


def _one_thread() -> ThreadPoolExecutor:
    """A background thread whose operators use all cores but one, which is left to Python."""
    threads = torch.get_num_threads()

    def leave_one() -> None:
        torch.get_num_threads()  # a thread's first look at the number sets it to the one that was set last, by any thread
        torch.set_num_threads(max(1, threads - 1))

    executor = ThreadPoolExecutor(1, "superpipeline", leave_one)
    executor.submit(lambda: None).result()
    torch.set_num_threads(threads)  # so that threads that begin from now on take this one again
    return executor


def _as_it_is(mark: float) -> float:
    return mark
