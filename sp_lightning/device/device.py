"""The seam between the engine and the device: memory, streams, copies, waits, times, and the background thread.

:class:`Device` is the synchronous CPU, where a copy is done when its call returns and nothing has to wait.
:class:`~sp_lightning.device.accelerator.Accelerator` has the same methods and three streams. The rest of the package
receives one of the two and does not ask which.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.background_thread import BackgroundThread
from sp_lightning.device.layout import PAGE, whole_pages
from sp_lightning.device.timeline import Kind, Timeline
from sp_lightning.torch_compat.modes import no_inference_mode
from sp_lightning.torch_compat.private import copy_each

KERNEL_THREADS = 2
"""The cores that background work leaves free if there are more: one for Python, which launches kernels in forward, and one for
autograd's thread, which launches those of backward. Where they share a core with it, kernels come late and step times scatter."""


class Stream(enum.Enum):
    """The order in which an operation takes its place."""

    COMPUTE = "compute"
    """The stream of the model's kernels, which is the stream that is current when the operation is issued."""
    UPLOAD = "host to device"
    DOWNLOAD = "device to host"
    REDUCE = "between devices"
    """The stream on which ranks sum their gradients."""
    STEP = "steps on the device"
    """The stream of optimizer kernels: the model's kernels need not wait for their uploads. Its memory is reused only on it."""
    UPDATE = "host, in the background"
    """The order of the background thread, which updates weights while the host goes on. The device has no such stream."""


class Wait(enum.Enum):
    """Every wait of the engine. The value of a member says what is true because of the wait.

    ``tests/device/test_waits.py`` leaves out one wait at a time and shows that a run then reads or writes too early.
    """

    # That of Enum runs in Python (3.11), and seconds are counted by wait with every copy.
    __hash__ = object.__hash__

    FETCH_AFTER_USE = "a slot is overwritten after the last kernel that read it"
    USE_AFTER_FETCH = "a layer is read after its transfer"
    BRING_AFTER_FETCH = "experts that were kept are copied into a slot after the transfer that came there before"
    SHARE_AFTER_BRING = "a trial copies a layer that it shares after that came to the device"
    BRING_AFTER_SHARE = "a layer comes to memory of shared ones after the trials that copied the one before"
    CAST_AFTER_FETCH = "casts are made anew after the last transfer that read them"
    WRITE_BACK_AFTER_USE = "the host takes a weight after the kernels that wrote it on the device"
    RESIDENTS_AFTER_USE = "residents are sent again after the last kernel that read them"
    USE_AFTER_RESIDENTS = "residents are read after their transfer"
    DRAIN_AFTER_GRADIENT = "a gradient leaves, or is used by a step, after the kernel that wrote it"
    REDUCE_AFTER_GRADIENT = "a gradient is sent to other ranks after the kernel that wrote it"
    DRAIN_AFTER_REDUCE = "a rank's part of a sum leaves after the kernels that added it up"
    SHOW_AFTER_LANDING = "gradients are shown after the parts of all ranks are there"
    STEP_AFTER_ARRIVAL = "the primary writes weights and gradients after all ranks have come to its turn"
    USE_AFTER_TURN = "the other ranks go on after the primary's turn"
    READ_AFTER_SHARED_UPDATE = "the other ranks read a layer after the primary's update in the background"
    UPDATE_AFTER_LANDING = "the primary updates a layer in backward after the parts of all ranks are there"
    READ_AFTER_FILL = "weights are read after the primary has filled the memory of all ranks"
    REUSE_AFTER_DRAIN = "a gradient's device memory is used again after its copy"
    APPLY_AFTER_DRAIN = "the host reads a gradient after its copy"
    DROP_AFTER_DRAIN = "the host uses a dropped gradient's memory again after its copy"
    UPDATE_AFTER_FETCH = "the host writes weights after the transfers that read them"
    UPDATE_AFTER_RESIDENTS = "the host writes residents after the transfer that reads them"
    CLIP_AFTER_NORM = "gradients are clipped on the host after the device has read them for their norms"
    BRING_AFTER_TAKE = "a slot of steps is filled again after all has left that the step before made there"
    STEP_AFTER_BRING = "a layer is stepped on the device after its weights, gradients and state have come"
    REUSE_AFTER_BRING = "the host's memory of what a step has brought is used again after the transfer"
    TAKE_AFTER_STEP = "what a step on the device has made leaves after its kernels"
    TAKE_AFTER_USE = "a layer that stays comes to the host after the kernels of user code that wrote it"
    STEP_AFTER_FETCH = "memory of new casts is used again by a step after the transfer that reads them"
    READ_AFTER_TAKE = "the host reads weights and state after what a step on the device has made is there"
    FETCH_AFTER_UPDATE = "a layer is fetched after its update in the background"
    READ_AFTER_UPDATE = "the host reads and writes weights and gradients after their updates in the background"
    CLOSE_AFTER_FETCH = "slots and host blocks are freed after the last transfer"
    STORE_AFTER_SAVE = "an activation leaves after the kernel that wrote it"
    REUSE_AFTER_STORE = "an activation's device memory is used again after its copy to the host"
    GATHER_AFTER_SEND = "the host gathers rows of a table after the transfer of those before"
    RETURN_AFTER_USE = "an activation comes back into memory after the last kernel that used that before"
    USE_AFTER_RETURN = "a returned activation is read after its transfer"
    REUSE_AFTER_RETURN = "memory of a returned activation that nobody read is used again after the transfer"
    READ_AFTER_COMPARE = "the host reads whether two runs of a forward differ after the kernels that compared them"
    CLOSE_AFTER_STORE = "the host's memory of activations is freed after the last transfer from or to it"
    UNPIN_AFTER_COPY = "host memory is unpinned after the last copy from or to it"


class Device:
    """A device whose copies are synchronous: the CPU.

    Attributes:
        timelines: the timelines to which :meth:`note` adds intervals.
        background_threads: how many threads an operator takes in the background. None: all that this process has, but
            :data:`KERNEL_THREADS` where that gives an accelerator its work.
        steps: whether work in the background steps layers on the device.
        held: bytes that a trial had allocated at the end of its last turn.

    Args:
        device: the device on which layers compute.
    """

    synchronous = True
    """Whether the host waits for every copy."""

    computes_on_host = True
    """Whether the model computes where the optimizer does."""

    plain_steps_on: torch.device | None = None
    """The GPU on which plain Lightning's optimizer would step; None where that is the CPU, or where its formulas are unknown."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stalled: dict[Wait, float] = dict.fromkeys(Wait, 0.0)
        self.timelines: list[Timeline] = []
        self.background_threads: int | None = None
        self.steps = False
        self.held = 0
        self._background: BackgroundThread | None = None
        self._most = 0  # the most that peak_bytes said before it was set back

    def empty(self, nbytes: int) -> Tensor:
        """Returns uninitialised device memory, shape ``(nbytes,)``, ``uint8``, usable inside and outside of inference mode.

        The allocator gives what kernels may still use, of which the host has let go. With deterministic algorithms a kernel fills
        it. So whatever another stream does there has to wait for compute.
        """
        with no_inference_mode():
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def upload_target(self, nbytes: int, by: Stream = Stream.COMPUTE) -> Tensor:
        """Returns such memory for copies of the upload stream, which wait for kernels that may still use it.

        Args:
            nbytes: how much.
            by: the stream that is current, whose kernels those are.
        """
        memory = self.empty(nbytes)
        self.wait(Stream.UPLOAD, self.record(by), Wait.FETCH_AFTER_USE)
        return memory

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        """Returns uninitialised host memory of at least ``nbytes`` bytes, ``uint8``, in whole pages of its own.

        Args:
            nbytes: how much is needed, in bytes.
            pin: whether the caller will call :meth:`pin`.
        """
        with no_inference_mode():
            padded = whole_pages(nbytes)
            raw = torch.empty(padded + PAGE, dtype=torch.uint8, device="cpu")
            start = -raw.data_ptr() % PAGE
            return raw[start : start + padded]

    def pin(self, memory: Tensor) -> bool:
        """Page-locks host memory in place. Returns False if the system refuses. The CPU needs no page locks."""
        return True

    def unpin(self, memory: Tensor) -> None:
        """Undoes :meth:`pin`. The caller has waited for every copy from or to the memory."""

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        """Copies between host and device, in the order of ``stream``. No tensor requires a gradient.

        Args:
            targets: the tensors to write.
            sources: the tensors to read, with the shapes and dtypes of ``targets``.
            stream: the stream whose order the copies follow.
            why: the wait under which a synchronous device counts the seconds of the copies; by default that for a
                fetched layer (upload) or for a drained gradient (download).
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
        """Returns a copy of a device tensor on the host, with the order of its strides. The host waits for the copy."""
        shape, stride = source.shape, torch.empty_like(source, device="meta").stride()
        with no_inference_mode():
            memory = torch.empty_strided(shape, stride, dtype=source.dtype, device="cpu")
        self.wait(Stream.DOWNLOAD, self.record(Stream.COMPUTE), Wait.DRAIN_AFTER_GRADIENT)
        self.copy([memory], [source], Stream.DOWNLOAD)
        self.synchronize(self.record(Stream.DOWNLOAD), Wait.APPLY_AFTER_DRAIN)
        return memory

    def on_host(self, tensor: Tensor) -> Tensor:
        """Returns a copy on the host of a tensor that is on the device, as part of a graph; any other tensor as it is."""
        return tensor.to("cpu") if self.has(tensor) else tensor

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in memory of the device that is not the host's."""
        return not self.computes_on_host and tensor.device == self.device

    def on(self, stream: Stream) -> AbstractContextManager[Any]:
        """A context in which kernels are issued to ``stream``."""
        return nullcontext()

    def record(self, stream: Stream) -> Any:
        """Returns an event that happens when everything that was issued to ``stream`` so far is done."""
        return None

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        """Lets ``stream`` wait for ``event``. The host goes on."""

    def synchronize(self, event: Any, why: Wait) -> None:
        """Lets the host wait for ``event``."""

    def has_happened(self, event: Any) -> bool:
        """Whether :meth:`synchronize` would return at once."""
        return True

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        """Gives work on the host to the background thread, which does one piece after the other.

        What it issues to :attr:`Stream.STEP` comes after all that was issued to compute by now: settings that are tensors, say.

        Args:
            work: the work.
            urgency: the lower, the sooner it is done, and what :meth:`finish` waits for comes first. None: in the order of
                calls, and before all that has a number.
        """
        if self._background is None:
            threads = torch.get_num_threads()
            own = threads if self.computes_on_host else max(1, threads - KERNEL_THREADS)
            self._background = BackgroundThread(self.background_threads or own, self.make_current)
        return self._background.submit(work, urgency)

    def make_current(self) -> None:
        """Makes this the device that code in this thread gets where it names no index. Each thread begins with the first one."""

    def finish(self, work: Future[None], why: Wait) -> None:
        """Waits for work that :meth:`later` has taken.

        Raises:
            BaseException: what the work raised.
        """
        start = perf_counter()
        if self._background is not None and not work.done():
            self._background.urge(work)
        try:
            work.result()
        finally:
            self._stalled[why] += perf_counter() - start

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        """Declares that ``by`` (None: the host) reads or writes ``memory``, one tensor or several, at this point of its order.

        Does nothing.

        The simulated device of the tests checks that accesses to the same memory are ordered by waits. :meth:`copy`
        declares its accesses itself.
        """

    def mark(self, stream: Stream) -> Any:
        """Returns a mark for the moment when ``stream`` comes to this point, or None while there is no timeline."""
        return perf_counter() if self.timelines else None

    def note(self, kind: Kind, layer: int | None, begun: Any, stream: Stream, nbytes: int = 0) -> None:
        """Adds an interval to the timelines, from the mark ``begun`` to the moment when ``stream`` comes to this point."""
        if begun is not None and self.timelines:
            now = self.mark(stream)
            for timeline in self.timelines:
                timeline.add(kind, layer, begun, now, nbytes)

    def make_timeline(self) -> Timeline:
        """Returns a timeline for this device, which the caller adds to :attr:`timelines`. The host waits for the device."""
        return Timeline(float)  # its marks are seconds

    def random_states(self) -> list[Tensor]:
        """The states of the generators that operators here draw random numbers from."""
        return [torch.get_rng_state()]

    def peak_bytes(self) -> int | None:
        """The most bytes of device memory that torch had allocated at once since :meth:`reset_peak`; None for the CPU."""
        return None

    def reset_peak(self) -> None:
        """Lets :meth:`peak_bytes` start again from what is allocated now."""

    def begin_turn(self, others: int | None = None) -> None:
        """The trial that this belongs to has its turn: :meth:`peak_bytes` is about its own memory, not all of the process's.

        Args:
            others: bytes that other trials have allocated; None for all but :attr:`held`.
        """

    def end_turn(self) -> None:
        """This trial's turn is over: other trials allocate memory from now on."""

    def begin_peak(self) -> None:
        """As :meth:`reset_peak`, which sets back the user's ``torch.cuda.max_memory_allocated()`` too: what it was is kept."""
        self._most = self.most_bytes()
        self.reset_peak()

    def most_bytes(self) -> int:
        """What :meth:`peak_bytes` would say if :meth:`begin_peak` had not set it back; 0 for the CPU."""
        return max(self._most, self.peak_bytes() or 0)

    def close(self) -> None:
        """Ends the background thread after the work that it has taken."""
        if self._background is not None:
            self._background.close()
            self._background = None

    def free_bytes(self) -> int | None:
        """Bytes of device memory that can still be allocated; None for the CPU, whose memory the plan counts elsewhere."""
        return None

    def stall_seconds(self, *why: Wait) -> float:
        """Seconds that the compute stream has waited for these reasons. A synchronous copy counts with all its seconds."""
        return sum(self._stalled[each] for each in why)
