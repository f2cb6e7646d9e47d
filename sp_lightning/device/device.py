"""The one file that touches an accelerator: memory, streams, events, copies, pinning; and the background thread.

:class:`Device` is the synchronous CPU, where every copy is done at once and there is nothing to wait for.
:class:`Accelerator` does the same with three streams. All other code receives one of the two and does not ask which.
"""

from __future__ import annotations

import contextlib
import enum
import math
import os
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.modes import no_inference_mode
from sp_lightning.device.timeline import Kind, Timeline

PAGE = 4096


class Stream(enum.Enum):
    """In whose order something happens."""

    COMPUTE = "compute"
    """The stream that the model's kernels run on: whatever stream is current."""
    UPLOAD = "host to device"
    DOWNLOAD = "device to host"
    UPDATE = "host, in the background"
    """No stream of the device's: the thread that updates weights while the host goes on."""


class Wait(enum.Enum):
    """Every wait of the engine, and what would go wrong without it. ``tests/test_waits.py`` leaves out each in turn."""

    FETCH_AFTER_USE = "a slot is overwritten after the last kernel that read it"
    USE_AFTER_FETCH = "a layer is read after its transfer"
    CAST_AFTER_FETCH = "casts are made anew after the last transfer that read them"
    WRITE_BACK_AFTER_USE = "the host takes a weight after the kernels that wrote it on the device"
    RESIDENTS_AFTER_USE = "residents are sent again after the last kernel that read them"
    USE_AFTER_RESIDENTS = "residents are read after their transfer"
    DRAIN_AFTER_GRADIENT = "a gradient leaves after the kernel that wrote it"
    REUSE_AFTER_DRAIN = "a gradient's device memory is used again after its copy"
    APPLY_AFTER_DRAIN = "the host reads a gradient after its copy"
    DROP_AFTER_DRAIN = "the host uses a dropped gradient's memory again after its copy"
    UPDATE_AFTER_FETCH = "the host writes weights after the transfers that read them"
    UPDATE_AFTER_RESIDENTS = "the host writes residents after the transfer that reads them"
    FETCH_AFTER_UPDATE = "a layer is fetched after its update in the background"
    READ_AFTER_UPDATE = "the host reads and writes weights and gradients after their updates in the background"
    CLOSE_AFTER_FETCH = "slots and host blocks are freed after the last transfer"
    STORE_AFTER_SAVE = "an activation leaves after the kernel that wrote it"
    REUSE_AFTER_STORE = "an activation's device memory is used again after its copy to the host"
    GATHER_AFTER_SEND = "the host gathers rows of a table after the transfer of those before"
    RETURN_AFTER_USE = "an activation comes back into memory after the last kernel that used that before"
    USE_AFTER_RETURN = "a returned activation is read after its transfer"
    REUSE_AFTER_RETURN = "memory of a returned activation that nobody read is used again after the transfer"
    CLOSE_AFTER_STORE = "the host's memory of activations is freed after the last transfer from or to it"
    UNPIN_AFTER_COPY = "host memory is unpinned after the last copy from or to it"


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


class Accelerator(Device):
    """An accelerator with asynchronous copies, through ``torch.accelerator``, ``torch.Stream``, ``torch.Event``.

    The three streams are created once: fresh ones each step grow the allocator's pools (prime-rl#3196).
    """

    synchronous = False
    computes_on_host = False

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        super().__init__(device)
        self._side = {stream: torch.Stream(device) for stream in (Stream.UPLOAD, Stream.DOWNLOAD)}
        self._waits: list[tuple[Wait, torch.Event, torch.Event]] = []

    def _stream(self, stream: Stream) -> torch.Stream:
        # Never cached: hooks of backward run on autograd's thread, which has a current stream of its own.
        return self._side[stream] if stream in self._side else torch.accelerator.current_stream(self.device)

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        if pin and self.device.type != "cuda":
            with no_inference_mode(), contextlib.suppress(RuntimeError):  # it has none left, or is not allowed to
                return torch.empty(math.ceil(max(nbytes, 1) / PAGE) * PAGE, dtype=torch.uint8, pin_memory=True)
        return super().host_empty(nbytes)

    def pin(self, memory: Tensor) -> bool:
        # torch's own pinned allocator rounds each tensor up to a power of two; registering the block does not. Only CUDA
        # (and ROCm) can.
        if self.device.type != "cuda":
            return memory.is_pinned()
        runtime = torch.cuda.cudart()
        if int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
            return True
        _clear_last_error(self.device)
        return False

    def unpin(self, memory: Tensor) -> None:
        if self.device.type != "cuda":
            return  # torch's allocator takes it back when nobody holds it
        if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0:
            _clear_last_error(self.device)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        with self._stream(stream), no_inference_mode():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def record(self, stream: Stream) -> torch.Event:
        event = torch.Event(self.device)
        event.record(self._stream(stream))
        return event

    def wait(self, stream: Stream, event: torch.Event | None, why: Wait) -> None:
        if event is None or event.query():
            return
        waiting = self._stream(stream)
        if stream is not Stream.COMPUTE:
            waiting.wait_event(event)
            return
        before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(waiting)
        waiting.wait_event(event)
        after.record(waiting)
        self._waits.append((why, before, after))
        if len(self._waits) > 512:
            self._sum_waits()

    def synchronize(self, event: torch.Event | None, why: Wait) -> None:
        if event is not None:
            event.synchronize()

    def free_bytes(self) -> int | None:
        free, held, used = map(self._counted, ("get_memory_info", "memory_reserved", "memory_allocated"))
        if free is None or held is None or used is None:
            return None
        # Memory that the allocator holds and nobody uses can be had as well.
        return int(free[0] + held - used)

    def mark(self, stream: Stream) -> Any:
        if not self.timelines:
            return None
        if stream is Stream.UPDATE:
            return super().mark(stream)
        event = torch.Event(self.device, enable_timing=True)
        event.record(self._stream(stream))
        return event

    def make_timeline(self) -> Timeline:
        zero = torch.Event(self.device, enable_timing=True)
        zero.record(torch.accelerator.current_stream(self.device))
        zero.synchronize()
        start = perf_counter()

        def seconds(mark: Any) -> float | None:
            if isinstance(mark, float):
                return mark
            return start + zero.elapsed_time(mark) / 1000 if mark.query() else None

        return Timeline(seconds)

    def peak_bytes(self) -> int | None:
        peak = self._counted("max_memory_allocated")
        return None if peak is None else int(peak)

    def reset_peak(self) -> None:
        self._counted("reset_peak_memory_stats")

    def _counted(self, name: str) -> Any:
        """One of torch's counters of device memory; None where this torch (before 2.10) or this backend has none."""
        if self.device.type == "cuda":
            return getattr(torch.cuda, {"get_memory_info": "mem_get_info"}.get(name, name))(self.device)
        with contextlib.suppress(AttributeError, RuntimeError):
            return getattr(torch.accelerator, name)(self.device)
        return None

    def stall_seconds(self, *why: Wait) -> float:
        self._sum_waits()
        return super().stall_seconds(*why)

    def _sum_waits(self) -> None:
        still_open = []
        for why, before, after in self._waits:
            if after.query():
                self._stalled[why] += before.elapsed_time(after) / 1000
            else:
                still_open.append((why, before, after))
        self._waits = still_open


def device_for(device: torch.device) -> Device:
    """The :class:`Device` for a torch device.

    Raises:
        ValueError: a backend without streams and events.
    """
    if device.type == "cpu":
        return Device(device)
    current = torch.accelerator.current_accelerator()
    if current is not None and current.type == device.type and device.type != "mps":
        return Accelerator(device)
    raise ValueError(
        f"superpipeline cannot use device {str(device)!r}: it needs the CPU or an accelerator with streams and events "
        '(CUDA, ROCm, XPU). Pass Trainer(accelerator="cpu") or Trainer(accelerator="gpu").'
    )


class PinnedMemory:
    """Host memory that is page-locked while this object lives, where the device allows it.

    Attributes:
        bytes: ``uint8``, page-aligned.
        pinned: whether page-locking succeeded; False without ``pin``.
    """

    def __init__(self, device: Device, nbytes: int, *, pin: bool) -> None:
        self.bytes = device.host_empty(nbytes, pin=pin)
        self.pinned = pin and device.pin(self.bytes)
        # The finalizer holds the memory, so that it is unpinned before it is freed.
        self._finalizer = weakref.finalize(self, _unpin, device, self.bytes, os.getpid()) if self.pinned else None

    def unpin(self) -> None:
        """Give the page lock back; the memory stays as it is."""
        if self._finalizer is not None:
            self._finalizer()


def _unpin(device: Device, memory: Tensor, process: int) -> None:
    """Unpin memory once nothing is copied any more: whoever lets go of it need not know of its last copy."""
    if os.getpid() != process:  # a forked worker has a copy of the memory, and can neither wait nor unpin
        return
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.synchronize(device.record(stream), Wait.UNPIN_AFTER_COPY)
    device.unpin(memory)


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


def _clear_last_error(device: torch.device) -> None:
    """Take a failed registration's error out of the runtime, where the next kernel launch would find and raise it."""
    with contextlib.suppress(RuntimeError):  # this launch is that next one: its error is the registration's
        torch.zeros(1, device=device)
