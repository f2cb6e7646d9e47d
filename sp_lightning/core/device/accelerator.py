"""The one file that touches an accelerator: its memory, streams, events, copies and page locks."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager
from time import perf_counter, sleep
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait, profiled
from sp_lightning.core.device.layout import whole_pages
from sp_lightning.core.device.timeline import Timeline
from sp_lightning.core.torch_compat.modes import no_inference_mode

_NEW_ZERO = 10.0
"""Seconds after which a timeline takes a new zero event, so that float32 milliseconds resolve at least a microsecond."""

_LEAST_PAUSE, _MOST_PAUSE = 20e-6, 200e-6
"""Seconds between two looks at an event for which the host waits. The first pauses are the shortest, for short waits."""

_LOOK = 0.1
"""Seconds between two calls of ``check`` while the host waits."""

_SIDE = (Stream.UPLOAD, Stream.DOWNLOAD, Stream.REDUCE, Stream.STEP)
"""Streams beside torch's current one."""

_CONTEXT = 2**30
"""More bytes than this process's context takes beside torch's allocator."""


def present_device() -> torch.device:
    """Returns the current accelerator of this machine, with its index; the CPU if there is none."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None else torch.device(found.type, torch.accelerator.current_device_index())


class Accelerator(Device):
    """An accelerator with asynchronous copies, through ``torch.accelerator``, ``torch.Stream`` and ``torch.Event``.

    All accelerators of one device have the same streams, so a stream may also have operations of other engines. An event of
    this engine then also waits for some of them, which is never wrong.

    Args:
        device: the device on which layers compute; without an index, the current one of its type.
    """

    synchronous = False
    computes_on_host = False

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.accelerator.current_device_index())
        super().__init__(device)
        self._side = {stream: _side_stream(device, stream) for stream in _SIDE}
        self._waits: list[tuple[Wait, torch.Event, torch.Event]] = []
        self._spare: list[tuple[torch.Event, torch.Event]] = []

    def _stream(self, stream: Stream) -> torch.Stream:
        """Returns torch's stream for one of ours."""
        # Not cached: hooks of backward run on autograd's thread, which has a current stream of its own.
        return self._side[stream] if stream in self._side else torch.accelerator.current_stream(self.device)

    def compute_stream(self) -> int:
        return self._stream(Stream.COMPUTE).stream_id

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        if pin and self.device.type != "cuda":
            # torch raises RuntimeError if no more memory can be page-locked (size or permission).
            with no_inference_mode(), contextlib.suppress(RuntimeError):
                return torch.empty(whole_pages(nbytes), dtype=torch.uint8, device="cpu", pin_memory=True)
        return super().host_empty(nbytes)

    def pin(self, memory: Tensor) -> bool:
        # CUDA and ROCm can page-lock existing memory. torch's allocator of pinned memory rounds each tensor up to a power of
        # two bytes. Other backends have only that allocator: see host_empty.
        if self.device.type != "cuda":
            return memory.is_pinned()
        with torch.cuda.device(self.device):  # see unpin
            if int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)) == 0:
                return True
            _clear_last_error(self.device)
        return False

    def unpin(self, memory: Tensor) -> None:
        if self.device.type != "cuda":
            return  # torch's allocator frees the memory when no tensor holds it
        # CUDA's runtime uses the thread's current device, by default the first one, and creates a context there. Finalizers
        # may run in any thread, so the device is set.
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())) != 0:
                _clear_last_error(self.device)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        with self.on(stream), no_inference_mode():
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        # A new object each time: a torch.Stream remembers one previous stream, and torch 2.10 refuses to enter it twice.
        its = self._stream(stream)
        return torch.Stream(stream_id=its.stream_id, device_index=its.device_index, device_type=its.device_type)

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
        # Two events measure the stall for stall_seconds. They are reused, because creating events takes longest.
        try:
            before, after = self._spare.pop()
        except IndexError:
            before, after = (torch.Event(self.device, enable_timing=True) for _ in range(2))
        before.record(waiting)
        waiting.wait_event(event)
        after.record(waiting)
        self._waits.append((why, before, after))
        if len(self._waits) > 512:
            self._sum_waits()

    def synchronize(self, event: torch.Event | None, why: Wait) -> None:
        if event is None:
            return
        # Why the host looks at the event again and again, and so returns up to 0.25 ms late:
        # - event.synchronize() spins on a core, which the CPU's optimizer steps need. torch.Event ignores blocking=True.
        # - torch.cuda.Event has it, but its C++ code reads any stream that it is given as a torch.cuda.Stream, without a check.
        # - If another rank has failed, an event may never happen, and only polling can ask for that. It also lets Ctrl-C and
        #   SIGTERM through in the main thread. In backward, another thread polls, and the main thread is in C++.
        # An update takes milliseconds per layer. sleep and synchronize release Python's lock.
        pause, look = _LEAST_PAUSE, perf_counter() + _LOOK
        if not event.query():
            with profiled(f"host waits: {why.value}"):
                while not event.query():
                    sleep(pause)
                    pause = min(2 * pause, _MOST_PAUSE)
                    if self.check is not None and perf_counter() > look:
                        self.check(why)
                        look = perf_counter() + _LOOK
        event.synchronize()

    def has_happened(self, event: torch.Event | None) -> bool:
        return event is None or event.query()

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        if not self.steps:
            return super().later(work, urgency)
        issued = self.record(Stream.COMPUTE)

        def after_compute() -> None:
            self._stream(Stream.STEP).wait_event(issued)
            work()

        return super().later(after_compute, urgency)

    def make_current(self) -> None:
        torch.accelerator.set_device_index(self.device.index)

    def release_unused(self) -> None:
        torch.accelerator.synchronize(self.device)
        torch.accelerator.empty_cache()

    def free_bytes(self) -> int | None:
        free, stats = map(self._counted, ("get_memory_info", "memory_stats"))
        if free is None or not stats:
            return None
        reserved, used = (stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated"))
        allowed = min(free[0], free[1] * self._fraction() - reserved)
        # Memory that torch's allocator has reserved and no tensor uses can be allocated as well.
        return int(allowed + reserved - used)

    def total_bytes(self) -> int | None:
        memory = self._counted("get_memory_info")
        return None if memory is None else int(memory[1] * self._fraction())

    def _fraction(self) -> float:
        """The fraction of all device memory to which the user has limited this process, reserved memory included."""
        # torch 2.10 cannot read the value of torch.cuda.set_per_process_memory_fraction.
        if self.device.type == "cuda" and hasattr(torch.cuda, "get_per_process_memory_fraction"):
            return torch.cuda.get_per_process_memory_fraction(self.device)
        return 1.0

    def held_by_others(self) -> tuple[int, int] | None:
        memory, reserved = map(self._counted, ("get_memory_info", "memory_reserved"))
        if memory is None or reserved is None:
            return None
        free, total = memory
        held = total - free - reserved
        return (held, total) if held > _CONTEXT else None

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
            nonlocal zero, start
            if isinstance(mark, float):
                return mark
            if not mark.query():
                return None
            now = start + zero.elapsed_time(mark) / 1000
            # Elapsed milliseconds are float32: after an hour their resolution would be 0.25 ms.
            if now - start > _NEW_ZERO:
                zero, start = mark, now
            return now

        return Timeline(seconds)

    def random_states(self) -> list[Tensor]:
        return [*super().random_states(), torch.get_device_module(self.device).get_rng_state(self.device)]

    def peak_bytes(self) -> int | None:
        peak = self._counted("max_memory_allocated")
        return None if peak is None else int(peak)

    def reset_peak(self) -> None:
        self._counted("reset_peak_memory_stats")

    def _counted(self, name: str) -> Any:
        """Calls a memory statistic of ``torch.accelerator``; returns None if the backend has none."""
        try:
            return getattr(torch.accelerator, name)(self.device)
        except torch.AcceleratorError:  # a RuntimeError: an earlier kernel has failed
            raise
        except (AttributeError, RuntimeError):
            return None

    def stall_seconds(self, *why: Wait) -> float:
        self._sum_waits()
        return super().stall_seconds(*why)

    def _sum_waits(self) -> None:
        """Adds up the measured waits that the device has passed, and keeps the others for the next call."""
        waits, self._waits = self._waits, []  # another thread may add waits meanwhile
        for why, before, after in waits:
            if after.query():
                self._stalled[why] += before.elapsed_time(after) / 1000
                self._spare.append((before, after))
            else:
                self._waits.append((why, before, after))


@functools.cache
def _side_stream(device: torch.device, stream: Stream) -> torch.Stream:
    """Returns a stream of a device, one for all runs in this process.

    torch has 32 streams for a device and then returns the first ones again, so that streams of different kinds would be one. Its
    allocator keeps freed memory for each stream: with new streams, memory would grow (prime-rl#3196).
    """
    return torch.Stream(device)


def _with_generators() -> list[torch.device]:
    """Returns all devices of this machine's accelerator once it is initialised.

    Reading a generator's state would initialise it, in runs on the CPU as well.
    """
    found = torch.accelerator.current_accelerator()
    if found is None or not getattr(torch.get_device_module(found), "is_initialized", lambda: False)():
        return []
    return [torch.device(found.type, index) for index in range(torch.accelerator.device_count())]


def generator_states() -> list[Tensor]:
    """Returns the states of torch's random generators: of the CPU, and of all accelerators once they are initialised."""
    return [torch.get_rng_state(), *(torch.get_device_module(d).get_rng_state(d) for d in _with_generators())]


def set_generator_states(states: Sequence[Tensor]) -> None:
    """Restores states that :func:`generator_states` returned.

    Accelerators that had none yet get the state with which they begin.
    """
    torch.set_rng_state(states[0])
    devices = _with_generators()
    if len(states) > 1:
        for state, device in zip(states[1:], devices, strict=True):
            torch.get_device_module(device).set_rng_state(state, device)
    elif devices:  # initialised since then; they begin with the seed of torch.manual_seed, which is the CPU's
        torch.get_device_module(devices[0]).manual_seed_all(torch.initial_seed())


def name_of(device: Device) -> str | None:
    """Returns the product name of an accelerator, or its type if the backend has no names; None for the CPU."""
    if device.computes_on_host:
        return None
    kind = device.device.type
    return str(getattr(torch.get_device_module(kind), "get_device_name", lambda _: kind)(device.device))


def device_for(device: torch.device) -> Device:
    """Returns the :class:`Device` or :class:`Accelerator` for a device of torch's.

    Raises:
        ValueError: the backend of the device has no streams and events (MPS), or is not available.
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


def _clear_last_error(device: torch.device) -> None:
    """Clears the error of a failed page lock from CUDA's runtime: otherwise the next kernel launch of the user raises it."""
    with contextlib.suppress(RuntimeError):  # this launch raises the stored error
        torch.zeros(1, device=device)
