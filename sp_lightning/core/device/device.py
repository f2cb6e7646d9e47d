"""The interface between the engine and the device: memory, streams, copies, waits, times, and the background thread.

:class:`Device` is the synchronous CPU, whose copies are complete when the call returns, so that nothing has to wait.
:class:`~sp_lightning.core.device.accelerator.Accelerator` has the same methods and several streams (:class:`Stream`). The
rest of the package uses both in the same way.

# Note: waits

Two operations on the same memory are ordered either because they are on one stream, or by a wait: :meth:`Device.record` makes an
event on one stream, and :meth:`Device.wait` makes another stream wait for the event (:meth:`Device.synchronize`: the host). Every
wait has a member of :class:`Wait`, whose value is the guarantee of the wait.

The simulated device of the tests detects two operations that no wait orders (``tests/support/simdevice.py``).
``tests/device/test_waits.py`` leaves out one wait at a time and shows the error that follows. A new wait therefore needs a new
member and a row in that test.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any, Self

import torch
from torch import Tensor
from torch.profiler import record_function

from sp_lightning.core.device.background_thread import BackgroundThread
from sp_lightning.core.device.layout import PAGE, whole_pages
from sp_lightning.core.device.stats import Stats
from sp_lightning.core.device.timeline import LABELS, Kind, Timeline, name_of
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import copy_each, profiler_runs

KERNEL_THREADS = 2
"""Cores that background work leaves free: one for the main thread, which launches the kernels of forward, and one for autograd's
thread, which launches those of backward. If they share a core with background work, kernels are launched late."""


class Stream(enum.Enum):
    """The queue in which an operation runs. Operations of one stream run in the order in which they were issued."""

    COMPUTE = "compute"
    """The model's kernels: torch's current stream at the moment when the operation is issued."""
    UPLOAD = "host to device"
    DOWNLOAD = "device to host"
    REDUCE = "between devices"
    """The sum of gradients over ranks."""
    STEP = "steps on the device"
    """Optimizer kernels. They have a stream of their own so that the model's kernels need not wait for a step's uploads. Memory
    that is allocated on this stream is reused only on this stream."""
    UPDATE = "host, in the background"
    """The background thread of the host, which runs optimizer steps. The device has no such stream."""


class Wait(enum.Enum):
    """Every wait of the engine. The value of a member is the guarantee of the wait (see "Note: waits" above)."""

    # Enum's own __hash__ is a Python function (3.11), and each copy looks up its wait in a dictionary.
    __hash__ = object.__hash__

    FETCH_AFTER_USE = "a slot is overwritten only after the last kernel that read it"
    USE_AFTER_FETCH = "a layer is read only after its upload"
    CAST_AFTER_FETCH = "casts are recomputed only after the last upload that read them"
    WRITE_BACK_AFTER_USE = "a weight written on the device is downloaded only after the kernels that wrote it"
    RESIDENTS_AFTER_USE = "residents are uploaded again only after the last kernel that read them"
    USE_AFTER_RESIDENTS = "residents are read only after their upload"
    DRAIN_AFTER_GRADIENT = "a gradient is downloaded, or used by a step, only after the kernel that wrote it"
    REDUCE_AFTER_GRADIENT = "a gradient is sent to other ranks only after the kernel that wrote it"
    DRAIN_AFTER_REDUCE = "a sum of gradients is downloaded only after the kernels that computed it"
    STEP_AFTER_ARRIVAL = "a process writes weights only after all processes have reached the optimizer's step"
    READ_AFTER_OWNER = "a process reads a layer only after the step of the layer's owner"
    READ_AFTER_PUBLISH = "a process reads another one's gradient only after that process has shared it"
    READ_AFTER_FILL = "weights are read only after the first process of the node has filled their memory"
    REUSE_AFTER_DRAIN = "a gradient's device memory is reused only after its download"
    APPLY_AFTER_DRAIN = "the host reads a gradient only after its download"
    DROP_AFTER_DRAIN = "the host reuses a dropped gradient's memory only after its download"
    UPDATE_AFTER_FETCH = "the host writes weights only after the uploads that read them"
    UPDATE_AFTER_RESIDENTS = "the host writes residents only after the upload that reads them"
    CLIP_AFTER_NORM = "the host clips gradients only after the device has read them for their norms"
    BRING_AFTER_TAKE = "a step's slot is filled again only after the results of the previous step are downloaded"
    STEP_AFTER_BRING = "a step on the device starts only after its weights, gradients and state are uploaded"
    TAKE_AFTER_STEP = "the results of a step on the device are downloaded only after its kernels"
    STEP_AFTER_FETCH = "a step reuses the memory of new casts only after the upload that reads them"
    READ_AFTER_TAKE = "the host reads weights and state only after the download of a step's results"
    FETCH_AFTER_UPDATE = "a layer is uploaded only after its background update"
    READ_AFTER_UPDATE = "the host reads and writes weights and gradients only after their background updates"
    CLOSE_AFTER_FETCH = "slots and host blocks are freed only after the last upload"
    STORE_AFTER_SAVE = "an activation is offloaded only after the kernel that wrote it"
    REUSE_AFTER_STORE = "an activation's device memory is reused only after its download"
    GATHER_AFTER_SEND = "the host gathers rows of an embedding only after the upload of the previous rows"
    RETURN_AFTER_USE = "an activation is uploaded into memory only after the last kernel that used the previous content"
    USE_AFTER_RETURN = "an uploaded activation is read only after its upload"
    REUSE_AFTER_RETURN = "memory of an uploaded activation that was never read is reused only after the upload"
    CLOSE_AFTER_STORE = "host memory of activations is freed only after the last copy from or to it"
    UNPIN_AFTER_COPY = "host memory is unpinned only after the last copy from or to it"


class _Timed:
    """See :meth:`Device.timed`. ``nbytes`` may be set inside the context."""

    def __init__(self, device: Device, kind: Kind, layer: int | None, stream: Stream, nbytes: int) -> None:
        self._device, self._kind, self._layer, self._stream, self.nbytes = device, kind, layer, stream, nbytes

    def __enter__(self) -> Self:
        self._range = record_function(f"{LABELS[self._kind]}: {name_of(self._layer, self._device.layer_names)}")
        self._begun = self._device.mark(self._stream)
        self._range.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._range.__exit__(*error)
        self._device.note(self._kind, self._layer, self._begun, self._stream, self.nbytes)


class _Untimed(_Timed):
    """Does nothing: no timeline and no profiler records."""

    def __init__(self) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        pass


_UNTIMED = _Untimed()


def profiled(name: str) -> AbstractContextManager[Any]:
    """Returns a context that is a range of torch's profiler, if one records."""
    return record_function(name) if profiler_runs() else nullcontext()


class Device:
    """A device whose copies are synchronous: the CPU.

    Attributes:
        stats: the counters, to which all parts of the engine add.
        timelines: the timelines to which :meth:`note` adds intervals.
        layer_names: the layers' names, by their index.
        background_threads: threads of an operator in the background. None: all threads of this process; with an accelerator,
            :data:`KERNEL_THREADS` fewer.
        steps: True if background work runs optimizer steps on the device.
        check: called each tenth of a second while the host waits for an event, with the purpose of the wait. Raises an error if
            the event may never happen, because another process has failed. None for no call.

    Args:
        device: the device on which layers compute.
    """

    synchronous = True
    """True if a copy is complete when :meth:`copy` returns."""

    computes_on_host = True
    """True if the model runs on the CPU, as the optimizer does."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stalled: dict[Wait, float] = dict.fromkeys(Wait, 0.0)
        self.stats = Stats()
        self.timelines: list[Timeline] = []
        self.layer_names: Sequence[str] = ()
        self.background_threads: int | None = None
        self.steps = False
        self.check: Callable[[Wait], None] | None = None
        self._background: BackgroundThread | None = None
        self._most = 0  # the highest peak_bytes before the last begin_peak

    def empty(self, nbytes: int) -> Tensor:
        """Returns uninitialised device memory, shape ``(nbytes,)``, ``uint8``, usable inside and outside of inference mode.

        torch's allocator may return memory that issued kernels still use, because it orders reuse on the compute stream only.
        With deterministic algorithms, torch also fills new memory with a kernel. Other streams must wait for compute before they
        use the memory: see :meth:`upload_target`.
        """
        with no_inference_mode():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def upload_target(self, nbytes: int, by: Stream = Stream.COMPUTE) -> Tensor:
        """Returns uninitialised device memory for uploads. The upload stream waits for kernels that may still use the memory.

        Args:
            nbytes: size in bytes.
            by: the stream that is torch's current stream now. The allocator orders reuse of memory on this stream.
        """
        memory = self.empty(nbytes)
        self.wait(Stream.UPLOAD, self.record(by), Wait.FETCH_AFTER_USE)
        return memory

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        """Returns uninitialised host memory of at least ``nbytes`` bytes, ``uint8``, in whole pages of its own.

        Args:
            nbytes: size in bytes.
            pin: True if the caller will call :meth:`pin`.
        """
        with no_inference_mode():
            padded = whole_pages(nbytes)
            raw = torch.empty(padded + PAGE, dtype=torch.uint8, device="cpu")
            start = -raw.data_ptr() % PAGE
            return raw[start : start + padded]

    def pin(self, memory: Tensor) -> bool:
        """Page-locks host memory in place. Returns False if the system refuses. On the CPU this does nothing."""
        return True

    def unpin(self, memory: Tensor) -> None:
        """Undoes :meth:`pin`. The caller has waited for every copy from or to the memory."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        """Issues copies between host and device to ``stream``. No tensor requires a gradient.

        Args:
            targets: the tensors to write.
            sources: the tensors to read, with the shapes and dtypes of ``targets``.
            stream: the stream of the copies.
            why: the wait to which a synchronous device adds the seconds of the copies. Default: ``USE_AFTER_FETCH`` for an
                upload, ``REUSE_AFTER_DRAIN`` for a download.
        """
        start = perf_counter()
        with no_inference_mode():
            copy_each(targets, sources)
        usual = Wait.USE_AFTER_FETCH if stream is Stream.UPLOAD else Wait.REUSE_AFTER_DRAIN
        self._stalled[why or usual] += perf_counter() - start

    def send(self, source: Tensor) -> Tensor:
        """Returns new device memory with the bytes of flat host memory. The compute stream waits for the copy."""
        memory = self.upload_target(source.nbytes)
        self.copy([memory], [source], Stream.UPLOAD)
        self.wait(Stream.COMPUTE, self.record(Stream.UPLOAD), Wait.USE_AFTER_FETCH)
        return memory

    def receive(self, source: Tensor) -> Tensor:
        """Returns a copy of a device tensor in host memory. The host waits for the copy.

        The copy has no gaps in memory. Its dimensions have the same order in memory as the tensor's.
        """
        shape, stride = source.shape, torch.empty_like(source, device="meta").stride()
        with no_inference_mode():
            memory = torch.empty_strided(shape, stride, dtype=source.dtype, device="cpu")
        self.wait(Stream.DOWNLOAD, self.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        self.copy([memory], [source], Stream.DOWNLOAD)
        self.synchronize(self.record(Stream.DOWNLOAD), Wait.APPLY_AFTER_DRAIN)
        return memory

    def on_host(self, tensor: Tensor) -> Tensor:
        """Returns a differentiable copy on the CPU of a tensor of this accelerator; any other tensor unchanged."""
        return tensor.to("cpu") if self.has(tensor) else tensor

    def has(self, tensor: Tensor) -> bool:
        """Returns True if this device is an accelerator and a tensor is in its memory."""
        return not self.computes_on_host and tensor.device == self.device

    def compute_stream(self) -> int:
        """Returns the number of the stream on which this thread computes now. User code may choose another one."""
        return 0

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which kernels are issued to ``stream``."""
        return nullcontext()

    def record(self, stream: Stream) -> Any:
        """Returns an event that is complete when all operations issued to ``stream`` so far are complete."""
        return None

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        """Makes ``stream`` wait for ``event``. The host does not wait."""

    def synchronize(self, event: Any, why: Wait) -> None:
        """Makes the host wait for ``event``. Raises the error of :attr:`check`."""

    def has_happened(self, event: Any) -> bool:
        """Returns True if an event is complete, so that :meth:`synchronize` would return at once."""
        return True

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        """Queues host work for the background thread, which runs one piece at a time.

        If :attr:`steps` is True, kernels that the work issues to :attr:`Stream.STEP` run after all kernels issued to the compute
        stream so far: a learning rate may be a tensor on the device.

        Args:
            work: the function to run.
            urgency: work with a lower number runs first; :meth:`finish` moves the awaited work before other work with a number.
                None: in the order of calls, before all work with a number.
        """
        if self._background is None:
            threads = torch.get_num_threads()
            own = threads if self.computes_on_host else max(1, threads - KERNEL_THREADS)
            self._background = BackgroundThread(self.background_threads or own, self.make_current)
        return self._background.submit(work, urgency)

    def make_current(self) -> None:
        """Makes this the current device of the present thread. A new thread starts with the device of index 0."""

    def finish(self, work: Future[None], why: Wait) -> None:
        """Waits for work that was queued by :meth:`later`, and moves it before other work that has an urgency.

        Raises:
            BaseException: the error that the work raised.
        """
        start = perf_counter()
        try:
            if self._background is not None and not work.done():
                self._background.urge(work)
                with profiled(f"host waits: {why.value}"):
                    work.exception()  # waits
            work.result()
        finally:
            self._stalled[why] += perf_counter() - start

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        """Declares that a stream reads or writes memory now. The simulated device of the tests checks the order of accesses.

        :meth:`copy` declares its own accesses.

        Args:
            memory: one tensor or several.
            by: the stream; None for the host.
            write: True for a write, False for a read.
        """

    def clock(self) -> float:
        """Waits for the compute stream, so that a batch is over. Returns the host's clock, in seconds."""
        self.synchronize(self.record(Stream.COMPUTE), Wait.CLOSE_AFTER_FETCH)
        return perf_counter()

    def mark(self, stream: Stream) -> Any:
        """Returns a mark of the moment at which ``stream`` reaches this point; None if no timeline is recorded."""
        return perf_counter() if self.timelines else None

    def note(self, kind: Kind, layer: int | None, begun: Any, stream: Stream, nbytes: int = 0) -> None:
        """Adds an interval to the timelines: from the mark ``begun`` to the moment at which ``stream`` reaches this point."""
        if begun is not None and self.timelines:
            now = self.mark(stream)
            for timeline in self.timelines:
                timeline.add(kind, layer, begun, now, nbytes)

    def timed(self, kind: Kind, layer: int | None, stream: Stream, nbytes: int = 0) -> AbstractContextManager[_Timed]:
        """Returns a context: what is issued to ``stream`` in it is an interval of the timelines, and a range of torch's profiler.

        The range shows when the host issues the work. Its name is that of the kind and the layer.
        """
        if not self.timelines and not profiler_runs():
            return _UNTIMED
        return _Timed(self, kind, layer, stream, nbytes)

    def make_timeline(self) -> Timeline:
        """Returns a timeline for this device. The caller adds it to :attr:`timelines`. The host waits for the device."""
        return Timeline(float)  # its marks are seconds

    def random_states(self) -> list[Tensor]:
        """Returns the states of the random generators that operators of the model use."""
        return [torch.get_rng_state()]

    def peak_bytes(self) -> int | None:
        """Returns the peak of allocated device memory since :meth:`reset_peak`, in bytes; None for the CPU."""
        return None

    def reset_peak(self) -> None:
        """Sets the peak of :meth:`peak_bytes` to the memory that is allocated now."""

    def begin_peak(self, *, forget: bool = False) -> None:
        """Calls :meth:`reset_peak`, and keeps the old peak for :meth:`most_bytes`, except with ``forget``.

        The reset also changes the result of ``torch.cuda.max_memory_allocated()`` for user code.
        """
        self._most = 0 if forget else self.most_bytes()
        self.reset_peak()

    def most_bytes(self) -> int:
        """Returns the peak in bytes since the last :meth:`begin_peak` with ``forget``; 0 for the CPU."""
        return max(self._most, self.peak_bytes() or 0)

    def close(self) -> None:
        """Ends the background thread after all queued work."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def release_unused(self) -> None:
        """Gives memory that torch's allocator keeps without need back to the device, for other allocators and programs."""

    def free_bytes(self) -> int | None:
        """Returns the bytes of device memory that can still be allocated; None for the CPU."""
        return None

    def total_bytes(self) -> int | None:
        """Returns the bytes of device memory that this process could allocate if nobody used any; None for the CPU."""
        return None

    def held_by_others(self) -> tuple[int, int] | None:
        """Returns the bytes that other programs hold and those of all device memory; None if they hold little."""
        return None

    def stall_seconds(self, *why: Wait) -> float:
        """Returns the seconds that the compute stream has waited for these reasons. A synchronous copy counts in full."""
        return sum(self._stalled[each] for each in why)
