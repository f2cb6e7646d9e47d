"""A simulated accelerator: asynchronous copies, poisoned memory and vector clocks, on CPU tensors.

What a synchronous CPU hides shows here, every time and not only when a race is lost:

- **Lazy streams.** A copy runs only when somebody waits for it, as late as allowed; until then its target is poison.
- **Lazy updates.** What is to be done in the background is done when somebody waits for it, as late as allowed.
- **Vector clocks.** Host, background, compute, upload and download are agents. An agent's clock says what it knows of
  the others: issuing work orders a stream after the host, a wait orders it after the event. Each access to memory must be ordered
  after the conflicting ones before it; otherwise :class:`Race` names both and the missing edge. Compute runs eagerly
  here, so that late copies alone would miss every wait *of* a copy stream; the clocks do not.
- **Allocating** device memory is a write by the current stream, whose kernels may use that memory still.
- **Unpinning** host memory is a write by the host, or by its background; :func:`simulated` raises what came too early.
- **Watch.** A dispatch mode that sees every operator: what touches a slot is an access by compute, what touches the
  host store one by the host, whether the engine declared it or not; an operator that takes both raises :class:`Mixed`.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning.device.background_thread import Pieces
from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.store.block import HostBlock
from sp_lightning.trainer.run import move_to_device

HOST = "host"
Agent = Stream | str
Clock = dict[Agent, int]


def settled(device: SimDevice, nbytes: int) -> Tensor:
    """Device memory that copies may use: they come after the kernels that used it."""
    memory = device.empty(nbytes)
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.wait(stream, device.record(Stream.COMPUTE), Wait.FETCH_AFTER_USE)
    return memory


class Race(AssertionError):
    """Two accesses to the same memory, and nothing orders the second after the first."""


class Mixed(AssertionError):
    """One operator takes memory of the host store and memory of the device: on a real device an error."""


@dataclass
class SimEvent:
    """What a stream had issued when it was recorded, and what it knew."""

    stream: Stream
    issued: int
    clock: Clock


@dataclass
class Access:
    """One access, as it is remembered."""

    by: Agent
    at: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} by {self.by.value if isinstance(self.by, Stream) else self.by} at {self.at}"


@dataclass
class Region:
    """The accesses to one stretch of memory."""

    start: int
    end: int
    alive: StorageWeakRef
    write: Access | None = None
    reads: dict[Agent, Access] = field(default_factory=dict)


class SimDevice(Device):
    """Plugs into the engine's one seam.

    Args:
        device: the CPU.
        omit: a wait that is left out, to show that it is needed.
        capacity: bytes of device memory; more than that is an ``OutOfMemoryError``. None: there is no end to it.
    """

    computes_on_host = False

    def __init__(self, device: torch.device, omit: Wait | None = None, capacity: int | None = None) -> None:
        super().__init__(device)
        self.omit = omit
        self.capacity = capacity
        self.peak = 0
        self.made: list[tuple[int, StorageWeakRef]] = []  # bytes of what operators on the device have made
        self.waits: list[Wait] = []
        self.pinned: set[int] = set()
        self.early: list[Race] = []  # where memory was unpinned; a finalizer cannot raise them
        self.clocks: dict[Agent, Clock] = {agent: {} for agent in (HOST, *Stream)}
        self.device_ranges: list[tuple[int, int, StorageWeakRef]] = []
        self.host_ranges: list[tuple[int, int, StorageWeakRef]] = []
        self.derived: dict[int, StorageWeakRef] = {}  # storages of what compute has made
        self._engine = threading.local()
        self._lock = threading.RLock()  # of clocks and queues: several threads may compute
        self._regions: list[Region] = []
        self._runs: Agent = HOST  # who runs the Python code of now
        self._many_regions = 64  # beyond so many, those whose memory is gone are left out
        self._queues: dict[Stream, deque[tuple[int, Callable[[], None]]]] = {s: deque() for s in Stream}
        self._issued = dict.fromkeys(Stream, 0)
        self._reads: list[
            tuple[SimEvent, tuple[int, int]]
        ] = []  # of copies within the device that may not have run yet
        self._later = Pieces()
        # What the host knew, and what it had issued to compute, when it gave work to the background.
        self._known: dict[Future[None], tuple[Clock, Clock]] = {}
        self._done: dict[Future[None], Clock] = {}

    @property
    def inside(self) -> bool:
        """Whether this thread is in the engine, whose own copies are no operators of the model."""
        return getattr(self._engine, "inside", False)

    # ------------------------------------------------------------------ the seam

    @property
    def in_use(self) -> int:
        """Bytes of device memory, now."""
        self.made = [each for each in self.made if not each[1].expired()]
        slots = sum(end - start for start, end, alive in self.device_ranges if not alive.expired())
        return slots + sum(nbytes for nbytes, _ in self.made)

    def allocate(self, nbytes: int) -> None:
        """Somebody takes device memory."""
        if self.capacity is not None and self.in_use + nbytes > self.capacity:
            raise torch.OutOfMemoryError(f"{nbytes} bytes, {self.in_use} of {self.capacity} are in use")
        self.peak = max(self.peak, self.in_use + nbytes)

    def free_bytes(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.in_use

    def peak_bytes(self) -> int | None:
        return None if self.capacity is None else self.peak

    def reset_peak(self) -> None:
        self.peak = self.in_use

    def empty(self, nbytes: int) -> Tensor:
        self.allocate(nbytes)
        memory = super().empty(nbytes)
        poison(memory)
        self.device_ranges.append((*_range(memory), StorageWeakRef(memory.untyped_storage())))
        # The allocator gives what kernels of the current stream may still use, and may fill it there (deterministic algorithms).
        self.access(memory, getattr(self._engine, "stream", Stream.COMPUTE), write=True)
        return memory

    def host_empty(self, nbytes: int, *, pin: bool = False) -> Tensor:
        memory = super().host_empty(nbytes)
        poison(memory)
        self.host_ranges.append((*_range(memory), StorageWeakRef(memory.untyped_storage())))
        return memory

    def pin(self, memory: Tensor) -> bool:
        self.pinned.add(memory.data_ptr())
        return True

    def unpin(self, memory: Tensor) -> None:
        self.pinned.remove(memory.data_ptr())
        try:
            self._check(memory, self._runs, write=True, what="unpinned")
        except Race as race:
            self.early.append(race)

    def copy(
        self, targets: Sequence[Tensor], sources: Sequence[Tensor], stream: Stream, *, why: Wait | None = None
    ) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(target, source, stream)

    def _copy(self, target: Tensor, source: Tensor, stream: Stream) -> None:
        self._issue(stream)
        self._check(source, stream, write=False, what="copied from")
        self._check(target, stream, write=True, what="copied to")
        for event, read in [each for each in self._reads if _overlap(each[1], target)]:
            self._run(event)  # what reads that memory comes before: otherwise there was a race
            self._reads.remove((event, read))
        with self.engine():
            poison(target)
        self._queues[stream].append((self._issued[stream], lambda: self._run_copy(target, source)))
        if _within(source, self.device_ranges) and _within(target, self.device_ranges):
            self._reads.append((SimEvent(stream, self._issued[stream], {}), _range(source)))

    def on_host(self, tensor: Tensor) -> Tensor:
        if not self.has(tensor):
            return tensor
        self.access(tensor, Stream.COMPUTE, write=False)
        with self.engine():
            return tensor.clone()

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._run(self.record(stream))  # what runs inside runs at once, and so has what was issued before it
        before, self._engine.stream = getattr(self._engine, "stream", Stream.COMPUTE), stream
        try:
            with self.engine():
                yield
        finally:
            self._engine.stream = before

    def record(self, stream: Stream) -> SimEvent:
        self._issue(stream)
        return SimEvent(stream, self._issued[stream], dict(self.clocks[stream]))

    def wait(self, stream: Stream, event: SimEvent | None, why: Wait) -> None:
        self.waits.append(why)
        if event is None or why is self.omit:
            return
        self._issue(stream)
        self._learn(stream, event.clock)
        if stream in (Stream.COMPUTE, Stream.STEP):
            self._run(event)  # kernels are eager: what they wait for must be there
        else:
            self._queues[stream].append((self._issued[stream], lambda: self._run(event)))

    def synchronize(self, event: SimEvent | None, why: Wait) -> None:
        self.waits.append(why)
        if event is None or why is self.omit:
            return
        self._learn(self._runs, event.clock)
        self._run(event)

    def has_happened(self, event: SimEvent | None) -> bool:
        return event is None  # as late as allowed

    def access(self, memory: Tensor | Iterable[Tensor], by: Stream | None, *, write: bool) -> None:
        agent: Agent = HOST if by is None else by
        for each in (memory,) if isinstance(memory, Tensor) else memory:
            if by is not None and by is not Stream.UPDATE:
                self._issue(by)
            self._check(each, agent, write=write, what="written" if write else "read")

    def later(self, work: Callable[[], None], urgency: int | None = None) -> Future[None]:
        done = self._later.add(work, urgency)
        self._known[done] = dict(self.clocks[HOST]), dict(self.clocks[Stream.COMPUTE])
        return done

    def finish(self, work: Future[None], why: Wait) -> None:
        self.waits.append(why)
        self._later.urge(work)
        while not work.done():
            piece = self._later.take()
            clock, issued = self._known.pop(piece.done)
            self._learn(Stream.UPDATE, clock)
            if self.steps:
                self._learn(Stream.STEP, issued)
            with (  # both are of one thread, and not the background's
                self.engine(),
                torch.autocast("cpu", enabled=False),
                torch.inference_mode(False),
            ):
                self._runs = Stream.UPDATE
                try:
                    piece.work()
                finally:
                    self._runs = HOST
            piece.done.set_result(None)
            self._done[piece.done] = dict(self.clocks[Stream.UPDATE])
        if why is not self.omit:
            self._learn(HOST, self._done[work])

    # ------------------------------------------------------------------ where memory is

    def has(self, tensor: Tensor) -> bool:
        """Whether a tensor is in device memory: in a slot or a buffer, or made of what is there."""
        return _within(tensor, self.device_ranges) or self.made_by_compute(tensor)

    def made_by_compute(self, tensor: Tensor) -> bool:
        """Whether an operator on the device has made a tensor's memory."""
        if tensor.layout is not torch.strided or not tensor.ndim:
            return False
        known = self.derived.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.expired()

    def take_buffers(self, module: nn.Module, stay: Sequence[nn.Module]) -> None:
        """A module's buffers are on the device from now on, but for those of averages, which stay beside the weights."""
        left_out = {inner for average in stay for inner in average.modules()}
        for child in module.modules():
            for buffer in child._buffers.values() if child not in left_out else ():
                if buffer is not None and buffer.layout is torch.strided and buffer.ndim and buffer.numel():
                    self.derived[buffer.untyped_storage()._cdata] = StorageWeakRef(buffer.untyped_storage())

    # ------------------------------------------------------------------ streams

    def _issue(self, stream: Stream) -> None:
        """The host, or its background, issues something to a stream, which from then on knows what that knows."""
        with self._lock:
            self._learn(stream, self.clocks[self._runs])
            self._issued[stream] += 1

    def _learn(self, agent: Agent, clock: Clock) -> None:
        with self._lock:
            mine = self.clocks[agent]
            for other, at in clock.items():
                mine[other] = max(mine.get(other, 0), at)

    def _run(self, event: SimEvent) -> None:
        queue = self._queues[event.stream]
        with self._lock:
            while queue and queue[0][0] <= event.issued:
                queue.popleft()[1]()

    def _run_copy(self, target: Tensor, source: Tensor) -> None:
        with self.engine(), torch.inference_mode(False), torch.no_grad():
            target.copy_(source)

    @contextmanager
    def engine(self) -> Iterator[None]:
        """What runs inside is no operator of the model's."""
        before, self._engine.inside = self.inside, True
        try:
            yield
        finally:
            self._engine.inside = before

    # ------------------------------------------------------------------ clocks

    def _check(self, memory: Tensor, agent: Agent, *, write: bool, what: str) -> None:
        # Another thread may have a weight asked for before each use meanwhile: that would take the engine's lock, under ours.
        with torch.DisableTorchFunctionSubclass():
            if memory.layout is not torch.strided or not memory.numel():
                return
            stretch, storage = _range(memory), memory.untyped_storage()
        with self._lock:
            self._check_stretch(*stretch, storage, agent, write=write, what=what)

    def _check_stretch(
        self, start: int, end: int, storage: torch.UntypedStorage, agent: Agent, *, write: bool, what: str
    ) -> None:
        self.clocks[agent][agent] = self.clocks[agent].get(agent, 0) + 1
        access = Access(agent, self.clocks[agent][agent], what)
        if len(self._regions) > self._many_regions:
            self._regions = [region for region in self._regions if not region.alive.expired()]
            self._many_regions = 2 * len(self._regions) + 64
        own = None
        for region in self._regions:
            if region.start < end and start < region.end and not region.alive.expired():
                before = [region.write, *(region.reads.values() if write else ())]
                for earlier in before:
                    if earlier is not None and self.clocks[agent].get(earlier.by, 0) < earlier.at:
                        raise Race(f"memory {start:#x}: {access} is not ordered after {earlier}")
                if (region.start, region.end) == (start, end):
                    own = region
        if own is None:
            own = Region(start, end, StorageWeakRef(storage))
            self._regions.append(own)
        if write:
            own.write = access
            own.reads.clear()
        else:
            own.reads[agent] = access


def _overlap(stretch: tuple[int, int], memory: Tensor) -> bool:
    start, end = _range(memory)
    return stretch[0] < end and start < stretch[1]


def poison(memory: Tensor) -> None:
    """NaN in every float type; the smallest number elsewhere."""
    with torch.inference_mode(False), torch.no_grad():
        if memory.dtype == torch.uint8:
            memory.fill_(0xFF)
        elif memory.is_floating_point() or memory.is_complex():
            memory.fill_(float("nan"))
        elif memory.dtype != torch.bool:
            memory.fill_(torch.iinfo(memory.dtype).min)


def _range(memory: Tensor) -> tuple[int, int]:
    start = memory.data_ptr()
    extent = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True)) + 1
    return start, start + (extent * memory.element_size() if memory.numel() else 0)


_READ_NOTHING = {torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
"""Operators that take a tensor for its shape alone."""


class Watch(TorchDispatchMode):
    """Sees every operator; see the module's docstring."""

    def __init__(self, device: SimDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._device.inside or _is_view(func) or func in _READ_NOTHING:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = [each for each in tensors if self._on_device(each)]
        host = [each for each in tensors if _within(each, self._device.host_ranges) and each.ndim]
        derived = [each for each in tensors if self._is_derived(each)]
        if host and (device or derived):
            raise Mixed(
                f"{func} takes memory of the host store {_shapes(host)} and of the device {_shapes(device + derived)}"
            )
        declared = zip(func._schema.arguments, args, strict=False)
        written = {id(each) for argument, given in declared if _is_written(argument) for each in tree_leaves(given)}
        for each in device:
            self._device.access(each, Stream.COMPUTE, write=id(each) in written)
        for each in host:
            self._device.access(each, None, write=id(each) in written)
        result = func(*args, **kwargs)
        if device or derived:
            given = {id(each) for each in tensors}  # what is written in place is made by no operator
            for each in tree_leaves(result):
                if (
                    isinstance(each, Tensor)
                    and id(each) not in given
                    and each.layout is torch.strided
                    and each.ndim
                    and not self._on_device(each)
                ):
                    self._see(each.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Compute has made this, on the device."""
        known = self._device.derived.get(storage._cdata)
        if known is None or known.expired():
            if self._device.capacity is not None:
                self._device.allocate(storage.nbytes())
                self._device.made.append((storage.nbytes(), StorageWeakRef(storage)))
            self._device.derived[storage._cdata] = StorageWeakRef(storage)

    def _on_device(self, tensor: Tensor) -> bool:
        return _within(tensor, self._device.device_ranges)

    def _is_derived(self, tensor: Tensor) -> bool:
        return self._device.made_by_compute(tensor)


def _within(tensor: Tensor, ranges: list[tuple[int, int, StorageWeakRef]]) -> bool:
    if tensor.layout is not torch.strided or not tensor.numel():
        return False
    try:
        address = tensor.data_ptr()
    except RuntimeError:  # a weight that is away has no memory
        return False
    for start, end, alive in ranges:  # noqa: SIM110  # a generator takes twice as long, and every operator asks
        if start <= address < end and not alive.expired():
            return True
    return False


@cache
def _is_view(func: Any) -> bool:
    """A view, or ``set_``: no data is touched."""
    returns = [each.alias_info for each in func._schema.returns]
    return func._schema.name == "aten::set_" or any(info is not None and not info.is_write for info in returns)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _shapes(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


@contextmanager
def simulated(
    omit: Wait | None = None, *, watch: bool = True, capacity: int | None = None
) -> Iterator[list[SimDevice]]:
    """Every strategy inside runs on a simulated device; the list is of those that were made."""
    made: list[SimDevice] = []
    write, take = HostBlock.write, HostBlock._take

    def make(device: torch.device) -> SimDevice:
        made.append(SimDevice(device, omit, capacity))
        if watch:
            mode = Watch(made[-1])
            mode.__enter__()
            modes.append(mode)
        return made[-1]

    def engine_write(self: HostBlock, index: int, value: Tensor) -> bool:
        with self._device.engine():  # type: ignore[attr-defined]
            return write(self, index, value)

    def engine_take(self: HostBlock, index: int, into: torch.Tensor | None) -> None:
        with self._device.engine():  # type: ignore[attr-defined]
            take(self, index, into)

    def move(module: Any, found: Any, averages: Any, device: torch.device) -> None:
        move_to_device(module, found, averages, device)
        made[-1].take_buffers(module, averages)

    modes: list[Watch] = []
    with (
        mock.patch("sp_lightning.trainer.run.device_for", make),
        mock.patch("sp_lightning.trainer.run.move_to_device", move),
        mock.patch.object(HostBlock, "write", engine_write),
        mock.patch.object(HostBlock, "_take", engine_take),
    ):
        try:
            yield made
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
        for race in (race for device in made for race in device.early):
            raise race
