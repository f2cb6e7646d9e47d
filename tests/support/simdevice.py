"""A simulated accelerator: asynchronous copies, poisoned memory and vector clocks, on CPU tensors.

It shows missing waits that a synchronous CPU hides. It shows them in each run, and not only when a race is lost:

- **Lazy streams.** A copy runs only when a stream or the host waits for it, as late as allowed. Until then its target has poison.
- **Lazy updates.** Background work runs only when the host waits for it, as late as allowed.
- **Vector clocks.** Host, background, compute, upload and download are agents. An agent's clock has, for each other agent, the
  number of accesses that are ordered before its own next access. Issuing work orders a stream after the host; a wait orders it
  after the event. Each access to memory must be ordered after the conflicting earlier accesses. Otherwise :class:`Race` names
  both. Compute runs eagerly, so late copies alone would miss every wait *of* a copy stream. The clocks do not.
- **Allocating** device memory is a write by the current stream, whose kernels may still use that memory.
- **Freed memory**, which no tensor holds, may be used by its *pool* at once: the stream that has allocated it, or the host.
  The pool must be ordered after all streams that have used the memory. Otherwise the next action is a :class:`Race`.
- **Reserved memory.** Each pool keeps what was freed. If an allocation does not fit, all pools are emptied (``retries``).
- **Unpinning** host memory is a write by the host or its background. :func:`simulated` raises such races at its end.
- **Watch.** A dispatch mode that sees every operator. An operator that uses a slot is an access by compute, and one that uses the
  host store an access by the host, whether the engine declares it or not. An operator that uses both raises :class:`Mixed`.
- **What is moved** when a run begins (buffers, metrics, layers that stay, optimizer state) gets other memory, which counts as the
  device's, and again other memory when it comes back. Tensors that a module or an optimizer had before the run count as the
  host's until they are moved. torch's clipping and unscaling divide gradients by place.
- **Kernels of the CPU** take addresses. One of device memory raises :class:`Mixed`.
- **Versions.** Under a dispatch mode, torch's ``foreach`` operators do not count their writes. The watch counts them.
- **Queued kernels** of an optimizer's step refer to its parameters until the host waits for them, as those of some backends do.
- **New memory** of ``torch.empty`` has other bytes in each call, as that of a GPU's allocator.
- **Unrepeatable kernels**, if asked for: ``index_add`` and ``scatter_add`` have other last bits in each call, as on a GPU, where
  atomic operations add numbers in any order. Not with deterministic algorithms.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn, overrides
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from sp_lightning.core.device.background_thread import Pieces
from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.model.wrapped import move
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.torch_compat.moved import move_module
from sp_lightning.trainer.run import Run

HOST = "host"
DEVICE = torch.device("cpu", 0)
"""The name of the device in a run: on the CPU, torch ignores the number, but keeps it in the name."""
Agent = Stream | str
Clock = dict[Agent, int]


def settled(device: SimDevice, nbytes: int) -> Tensor:
    """Returns device memory that copy streams may use: they have waited for the kernels that used it before."""
    memory = device.empty(nbytes)
    for stream in (Stream.UPLOAD, Stream.DOWNLOAD):
        device.wait(stream, device.record(Stream.COMPUTE), Wait.FETCH_AFTER_USE)
    return memory


class Race(AssertionError):
    """Two accesses to the same memory, of which the second is not ordered after the first."""


class Mixed(AssertionError):
    """An operator uses memory of the host and of the device. On a real device that is an error."""


@dataclass
class SimEvent:
    """An event of a stream.

    Attributes:
        stream: the stream.
        issued: the number of items that were issued to the stream when the event was recorded.
        clock: the stream's clock at that moment.
    """

    stream: Stream
    issued: int
    clock: Clock


@dataclass
class Access:
    """An access to memory.

    Attributes:
        by: the agent.
        at: the agent's own time: the number of its accesses so far.
        what: the kind of access, for messages.
    """

    by: Agent
    at: int
    what: str

    def __str__(self) -> str:
        return f"{self.what} by {self.by.value if isinstance(self.by, Stream) else self.by} at {self.at}"


@dataclass
class Region:
    """A range of memory, its last write, and each agent's last read since then."""

    start: int
    end: int
    alive: StorageWeakRef
    write: Access | None = None
    reads: dict[Agent, Access] = field(default_factory=dict)


@dataclass
class Memory:
    """Device memory that an operator has made.

    Attributes:
        alive: the storage.
        pool: the stream that has allocated it, and may use it once it is freed.
        start, end: its addresses.
    """

    alive: StorageWeakRef
    pool: Stream
    start: int
    end: int


class SimDevice(Device):
    """The simulated device. It implements the engine's interface to devices (:class:`~sp_lightning.core.device.device.Device`).

    Args:
        device: the CPU.
        omit: a reason whose waits are left out, to show that a test fails without them.
        capacity: bytes of device memory. Allocating more raises an ``OutOfMemoryError``. None: unlimited.

    Attributes:
        omit: as the argument.
        capacity: as the argument.
        peak: the peak of device memory, in bytes.
        allocated: the bytes of each slot, buffer and tensor of an operator, with its storage and its pool.
        reserved: the bytes of each pool, freed ones included.
        retries: how often an allocation has found room only after all pools were emptied. A GPU waits for all streams then.
        waits: the reason of each wait so far, the omitted ones included.
        pinned: the addresses of page-locked memory.
        early: races of unpinning. A finalizer unpins, and cannot raise them.
        clocks: the clock of each agent.
        device_ranges: the ranges of device memory: slots and buffers.
        host_ranges: the ranges of the host store.
        derived: memory that operators on the device have made, or that was moved there, by its storage.
        left: memory outside of the host store that is the host's, by its storage.
        queued: parameters of kernels of a step that may not have run yet, which refer to them.
    """

    computes_on_host = False

    def __init__(self, device: torch.device, omit: Wait | None = None, capacity: int | None = None) -> None:
        super().__init__(device)
        self.omit = omit
        self.capacity = capacity
        self.peak = 0
        self.allocated: list[tuple[int, StorageWeakRef, Stream]] = []
        self.reserved = dict.fromkeys(Stream, 0)
        self.retries = 0
        self.waits: list[Wait] = []
        self.pinned: set[int] = set()
        self.early: list[Race] = []
        self.clocks: dict[Agent, Clock] = {agent: {} for agent in (HOST, *Stream)}
        self.device_ranges: list[tuple[int, int, StorageWeakRef]] = []
        self.host_ranges: list[tuple[int, int, StorageWeakRef]] = []
        self.derived: dict[int, Memory] = {}
        self.queued: list[nn.Parameter] = []
        self.left: dict[int, StorageWeakRef] = {}
        self._engine = threading.local()
        self._lock = threading.RLock()  # for clocks and queues: several threads may compute
        self._regions: list[Region] = []
        self._runs: Agent = HOST  # the agent that runs the present Python code: the host or the background
        self._many_regions = 64  # if there are more, regions whose memory is freed are dropped
        self._queues: dict[Stream, deque[tuple[int, Callable[[], None]]]] = {s: deque() for s in Stream}
        self._issued = dict.fromkeys(Stream, 0)
        # Memory that streams may still use, by its storage: its pool, and the last use by each stream that is not the pool.
        self._used: dict[int, tuple[StorageWeakRef, Agent, dict[Agent, Access]]] = {}
        self._pools: dict[int, Memory] = {}
        # Reads by copies within the device that may not have run yet: their event, and the range.
        self._reads: list[tuple[SimEvent, tuple[int, int]]] = []
        self._later = Pieces()
        # For each submitted work the clocks of the host and of compute when it was submitted.
        self._known: dict[Future[None], tuple[Clock, Clock]] = {}
        self._done: dict[Future[None], Clock] = {}  # the background's clock after each work

    @property
    def inside(self) -> bool:
        """True if this thread runs code of the engine, whose copies are not operators of the model."""
        return getattr(self._engine, "inside", False)

    # ------------------------------------------------------------------ the interface to devices

    @property
    def in_use(self) -> int:
        """The bytes of device memory in use."""
        return sum(self._in_pools().values())

    def _in_pools(self) -> dict[Stream, int]:
        """The bytes of device memory in use, by their pool."""
        self.allocated = [each for each in self.allocated if not each[1].expired()]
        found = dict.fromkeys(Stream, 0)
        for nbytes, _, pool in self.allocated:
            found[pool] += nbytes
        return found

    @property
    def stream(self) -> Stream:
        """The current stream of this thread, which allocates."""
        found: Stream = getattr(self._engine, "stream", Stream.COMPUTE)
        return found

    def allocate(self, nbytes: int) -> None:
        """Counts an allocation of device memory. Raises an OutOfMemoryError beyond the capacity."""
        used, pool = self._in_pools(), self.stream
        needed = self.reserved | {pool: max(self.reserved[pool], used[pool] + nbytes)}
        if self.capacity is not None and sum(needed.values()) > self.capacity:
            if sum(used.values()) + nbytes > self.capacity:
                raise torch.OutOfMemoryError(f"{nbytes} bytes, {sum(used.values())} of {self.capacity} are in use")
            self.retries += 1
            needed = used | {pool: used[pool] + nbytes}
        self.reserved = needed
        self.peak = max(self.peak, sum(used.values()) + nbytes)

    def free_bytes(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.in_use

    def total_bytes(self) -> int | None:
        return self.capacity

    def peak_bytes(self) -> int | None:
        return None if self.capacity is None else self.peak

    def reset_peak(self) -> None:
        self.peak = self.in_use

    def release_unused(self) -> None:
        self.reserved = self._in_pools()

    def empty(self, nbytes: int) -> Tensor:
        self.allocate(nbytes)
        memory = super().empty(nbytes)
        poison(memory)
        self.device_ranges.append((*_range(memory), StorageWeakRef(memory.untyped_storage())))
        self.note_allocated(memory.untyped_storage(), self._pools)
        # The allocator returns memory that kernels of the current stream may still use. Deterministic algorithms fill it there.
        self.access(memory, self.stream, write=True)
        return memory

    def note_allocated(self, storage: torch.UntypedStorage, to: dict[int, Memory]) -> None:
        """Records a storage that the current stream has allocated, once."""
        known, pool = to.get(storage._cdata), self.stream
        if known is None or known.alive.expired():
            begin = storage.data_ptr()
            to[storage._cdata] = Memory(StorageWeakRef(storage), pool, begin, begin + storage.nbytes())
            if to is self._pools or self.capacity is not None:
                self.allocated.append((storage.nbytes(), StorageWeakRef(storage), pool))

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
        with torch.DisableTorchFunctionSubclass(), torch.inference_mode(False):
            target, source = (
                target.detach(),
                source.detach(),
            )  # user code may exchange their memory before the copy runs
        # A GPU's driver has read pageable host memory when the call returns. Device memory that no operator was seen to make,
        # such as the casts of a step, was allocated by the current stream.
        pools: dict[Stream, tuple[Agent | None, Agent]] = {
            Stream.UPLOAD: (None, Stream.COMPUTE),
            Stream.DOWNLOAD: (self.stream, HOST),
        }
        of_source, of_target = pools.get(stream, (None, None))
        self._check(source, stream, write=False, what="copied from", pool=of_source)
        self._check(target, stream, write=True, what="copied to", pool=of_target)
        for event, read in [each for each in self._reads if _overlap(each[1], target)]:
            self._run(
                event
            )  # a pending copy reads the target's memory. The clocks have checked that it is ordered before
            self._reads.remove((event, read))
        with self.engine():
            poison(target)
        copied = self._later_tensor(target), self._later_tensor(source)
        self._queues[stream].append((self._issued[stream], lambda: self._run_copy(*copied)))
        if _within(source, self.device_ranges) and _within(target, self.device_ranges):
            self._reads.append((SimEvent(stream, self._issued[stream], {}), _range(source)))

    def _later_tensor(self, tensor: Tensor) -> Callable[[], Tensor | None]:
        """Returns a function that returns the tensor, or None if its memory was freed. Holds only memory that is not watched."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._used:
            return lambda: tensor
        alive, place = StorageWeakRef(storage), (tensor.storage_offset(), tensor.shape, tensor.stride())
        dtype = tensor.dtype

        def again() -> Tensor | None:
            found = torch.UntypedStorage._new_with_weak_ptr(alive.cdata)
            return None if found is None else torch.empty(0, dtype=dtype, device="cpu").set_(found, *place)

        return again

    def on_host(self, tensor: Tensor) -> Tensor:
        if not self.has(tensor):
            return tensor
        self.access(tensor, Stream.COMPUTE, write=False)
        with self.engine():
            copied = tensor.clone()
        self.note_left([copied])
        return copied

    def compute_stream(self) -> int:
        return list(Stream).index(self.stream)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self._run(self.record(stream))  # code inside runs at once, so work issued to the stream before has to run first
        before = self.stream
        self._engine.stream = stream
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
            self._run(event)  # kernels run at once, so the work that they wait for has to run first
        else:
            self._queues[stream].append((self._issued[stream], lambda: self._run(event)))

    def synchronize(self, event: SimEvent | None, why: Wait) -> None:
        self.waits.append(why)
        if event is None or why is self.omit:
            return
        self._learn(self._runs, event.clock)
        self._run(event)
        if event.stream is Stream.STEP:
            self.queued.clear()

    def has_happened(self, event: SimEvent | None) -> bool:
        return event is None  # events happen as late as allowed

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
        own = work in self._known or work in self._done
        if own:
            self._later.urge(work)
        while not work.done() if own else self._known:
            piece = self._later.take()
            clock, issued = self._known.pop(piece.done)
            self._learn(Stream.UPDATE, clock)
            if self.steps:
                self._learn(Stream.STEP, issued)
            with (  # these are the host thread's; a background thread would not have them
                self.engine(),
                _no_function_modes(),
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
        if not own:  # another process does the work, which may wait for this one's
            work.result()
        elif why is not self.omit:
            self._learn(HOST, self._done[work])

    # ------------------------------------------------------------------ where memory is

    def has(self, tensor: Tensor) -> bool:
        """Returns True if a tensor is in device memory: in a slot or a buffer, or the result of an operator on the device."""
        return _within(tensor, self.device_ranges) or self.made_by_compute(tensor)

    def made_by_compute(self, tensor: Tensor) -> bool:
        """Returns True if a tensor's memory is the result of an operator on the device."""
        if tensor.layout is not torch.strided or not tensor.ndim:
            return False
        known = self.derived.get(tensor.untyped_storage()._cdata)
        return known is not None and not known.alive.expired()

    def note_left(self, tensors: Iterable[Tensor]) -> None:
        """Treats memory as the host's, except what is on the device."""
        for each in tensors:
            if _is_plain(each) and not self.has(each):
                storage = each.untyped_storage()
                self.left[storage._cdata] = StorageWeakRef(storage)

    def is_left(self, tensor: Tensor) -> bool:
        """Returns True if a tensor's memory is the host's, outside of the host store."""
        known = self.left.get(tensor.untyped_storage()._cdata) if _is_plain(tensor) else None
        return known is not None and not known.expired()

    # ------------------------------------------------------------------ streams

    def _issue(self, stream: Stream) -> None:
        """Counts an item that the host, or its background, issues to a stream. It orders the stream after the issuer."""
        with self._lock:
            self._look_for_freed()
            self._learn(stream, self.clocks[self._runs])
            self._issued[stream] += 1

    def _look_for_freed(self) -> None:
        """Raises a Race if memory was freed before its pool, which may use it at once, waits for the streams that use it.

        A thread of the host that has waited for these streams may free it, too: their work is over.
        """
        for key, (alive, pool, uses) in list(self._used.items()):
            ordered = [self.clocks[each] for each in (pool, HOST, self._runs)]
            late = [use for agent, use in uses.items() if all(clock.get(agent, 0) < use.at for clock in ordered)]
            if not late or alive.expired():
                del self._used[key]
            if late and alive.expired():
                raise Race(f"memory of {pool} is free and may be used again, which is not ordered after {late[0]}")

    def _learn(self, agent: Agent, clock: Clock) -> None:
        """Orders an agent after all accesses in a clock."""
        with self._lock:
            mine = self.clocks[agent]
            for other, at in clock.items():
                mine[other] = max(mine.get(other, 0), at)

    def _run(self, event: SimEvent) -> None:
        """Runs all copies of a stream that were issued before an event."""
        queue = self._queues[event.stream]
        with self._lock:
            while queue and queue[0][0] <= event.issued:
                queue.popleft()[1]()

    def _run_copy(self, target: Callable[[], Tensor | None], source: Callable[[], Tensor | None]) -> None:
        with self.engine(), torch.inference_mode(False), torch.no_grad():
            found = target(), source()
            if found[0] is not None and found[1] is not None:
                found[0].copy_(found[1])

    @contextmanager
    def engine(self) -> Iterator[None]:
        """A context for code of the engine: its operators are not the model's."""
        before = self.inside
        self._engine.inside = True
        try:
            yield
        finally:
            self._engine.inside = before

    # ------------------------------------------------------------------ clocks

    def _check(self, memory: Tensor, agent: Agent, *, write: bool, what: str, pool: Agent | None = None) -> None:
        """Records an access, and raises a Race if it is not ordered after the conflicting earlier ones.

        Args:
            memory: the memory.
            agent: the agent that uses it.
            write: True for a write.
            what: the kind of access, for messages.
            pool: the agent that may use the memory once it is freed, if that is not known.
        """
        # Without dispatch: another thread may have given a weight a class that takes the engine's lock, while this holds its own.
        with torch.DisableTorchFunctionSubclass():
            if memory.layout is not torch.strided or not memory.numel():
                return
            stretch, storage = _range(memory), memory.untyped_storage()
        with self._lock:
            self._check_stretch(*stretch, storage, agent, write=write, what=what)
            known = self._pools.get(storage._cdata) or self.derived.get(storage._cdata)
            if known is not None and not known.alive.expired():
                pool = known.pool
            elif _within(memory, self.host_ranges):
                pool = HOST
            if pool not in (None, agent) and agent not in (HOST, Stream.UPDATE):
                _, _, uses = self._used.setdefault(storage._cdata, (StorageWeakRef(storage), pool, {}))
                uses[agent] = Access(agent, self.clocks[agent][agent], what)

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


_ALSO_OF_THE_HOST = {
    torch.ops.aten.copy_.default: (0, 1),
    **dict.fromkeys(
        (
            torch.ops.aten.index.Tensor, torch.ops.aten.index_put.default, torch.ops.aten.index_put_.default,
            torch.ops.aten._index_put_impl_.default,
        ),
        (1,),
    ),
}  # fmt: skip
"""Operators that torch runs with tensors of two devices: by operator, the positions of arguments that may be the host's.

Copies, and indices of a tensor on the device. Values that are put there must be the device's, or have no dimension.
"""


@contextmanager
def _no_function_modes() -> Iterator[None]:
    """A context without function modes, of which a default device is one."""
    modes = [overrides._pop_mode() for _ in overrides._get_current_function_mode_stack()]
    try:
        yield
    finally:
        for mode in reversed(modes):
            overrides._push_mode(mode)


def _overlap(stretch: tuple[int, int], memory: Tensor) -> bool:
    start, end = _range(memory)
    return stretch[0] < end and start < stretch[1]


def poison(memory: Tensor) -> None:
    """Fills memory with NaN, or with the smallest number of an integer dtype."""
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


def _is_plain(tensor: Tensor) -> bool:
    """Returns True for a tensor with elements in memory of its own. One without dimensions may be on any device."""
    with torch.DisableTorchFunctionSubclass():
        return tensor.layout is torch.strided and tensor.ndim > 0 and tensor.numel() > 0 and tensor.device.type == "cpu"


def tensors_of(value: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yields the tensors in attributes of modules, in their containers, in modules that they hide, and in optimizers' states."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield value
        return
    inner: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        inner = [each for name, each in vars(value).items() if name not in ("_trainer", "_fabric")]
    elif isinstance(value, torch.optim.Optimizer):
        inner = value.state.values()
    elif isinstance(value, dict):
        inner = value.values()
    elif isinstance(value, (list, tuple, set)):
        inner = value
    for each in inner:
        yield from tensors_of(each, seen)


class Moves(TorchFunctionMode):
    """Gives what is moved other memory, as between two devices: here both are the CPU.

    Args:
        device: the device.
        there: True for a move to the device, False for one to the host.
    """

    def __init__(self, device: SimDevice, there: bool) -> None:
        super().__init__()
        self._device = device
        self._there = there

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moved = func(*args, **(kwargs or {}))
        if func not in (Tensor.to, Tensor.cpu) or not _is_plain(args[0]) or self._device.has(args[0]) == self._there:
            return moved
        with self._device.engine(), torch.DisableTorchFunctionSubclass():
            copied = moved.clone()
        if self._there:
            self._device.note_allocated(copied.untyped_storage(), self._device.derived)
        else:
            self._device.note_left([copied])
        return copied


_READ_NOTHING = {torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default}
"""Operators that use only the shape of a tensor."""
_ALLOCATE = {f"aten::{each}" for each in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")}
_ATOMIC = {f"aten::{each}" for each in ("index_add", "index_add_", "scatter_add", "scatter_add_")}
"""Operators that add numbers on a GPU by atomic operations."""


class Watch(TorchDispatchMode):
    """A dispatch mode that records the accesses of every operator of the model; see the module's docstring.

    Args:
        device: the device.
        unrepeatable: True if atomic additions have other last bits in each call.
    """

    def __init__(self, device: SimDevice, unrepeatable: bool = False) -> None:
        super().__init__()
        self._device = device
        self._calls = 0  # of operators whose bytes differ in each call
        self._unrepeatable = unrepeatable

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name
        if self._device.stream is Stream.STEP:
            self._device.queued += [each for each in tree_leaves((args, kwargs)) if isinstance(each, nn.Parameter)]
        result = self._recorded(func, args, kwargs)
        if name in _ALLOCATE:
            self._fill(result)
        elif name.startswith("aten::_foreach_") and name.endswith("_"):
            increment_version([each for each in args[0] if not each.is_inference()])
        elif name in _ATOMIC and self._unrepeatable and not torch.are_deterministic_algorithms_enabled():
            self._change_last_bits(func, args, kwargs, result)
        return result

    def _fill(self, memory: Tensor) -> None:
        """Fills new memory with another byte than in the last call, except if torch fills it."""
        filled = torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        if type(memory) is Tensor and memory.device.type == "cpu" and memory.layout is torch.strided and not filled:
            self._calls += 1
            memory.untyped_storage().fill_(
                self._calls * 37 % 256 if memory.dtype is not torch.bool else self._calls % 2
            )

    def _change_last_bits(self, func: Any, args: Any, kwargs: Any, result: Tensor) -> None:
        """Changes the last bit of half of the numbers that are sums of three numbers or more: they depend on the order."""
        own, dim, index, added = args
        bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(own.element_size())
        if not own.is_floating_point() or bits is None:
            return
        several = func(torch.zeros_like(own), dim, index, torch.ones_like(added)) > 1
        self._calls += 1
        chance = torch.rand(own.shape, generator=torch.Generator().manual_seed(self._calls))
        chosen = several & result.isfinite() & (result != 0) & (chance < 0.5)
        result.copy_(torch.where(chosen, (result.view(bits) ^ 1).view(own.dtype), result))

    def _recorded(self, func: Any, args: Any, kwargs: Any) -> Any:
        if _is_view(func) or func in _READ_NOTHING:
            return func(*args, **kwargs)
        inside = self._device.inside  # the engine declares its accesses
        if inside and self._device.stream is Stream.COMPUTE:
            return func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        device = [each for each in tensors if self._on_device(each)]
        host = [each for each in tensors if not inside and _within(each, self._device.host_ranges) and each.ndim]
        derived = [each for each in tensors if self._is_derived(each)]
        allowed = {id(each) for at in _ALSO_OF_THE_HOST.get(func, ()) for each in tree_leaves(args[at : at + 1])}
        left = [each for each in tensors if not inside and id(each) not in allowed and self._device.is_left(each)]
        for what, mixed in (("the host store", host), ("the host", left)):
            if mixed and (device or derived):
                shapes = _shapes(mixed), _shapes(device + derived)
                raise Mixed(
                    f"Expected all tensors to be on the same device: {func} takes memory of {what} {shapes[0]} and of the "
                    f"device {shapes[1]}"
                )
        declared = zip(func._schema.arguments, args, strict=False)
        written = {id(each) for argument, given in declared if _is_written(argument) for each in tree_leaves(given)}
        for each in device if not inside else ():
            self._device.access(each, Stream.COMPUTE, write=id(each) in written)
        for each in host:
            self._device.access(each, None, write=id(each) in written)
        result = func(*args, **kwargs)
        given = {id(each) for each in tensors}  # an operator that writes in place returns its argument
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor) and id(each) not in given]
        if device or derived:
            for each in made:
                if each.layout is torch.strided and each.ndim and not self._on_device(each):
                    self._see(each.untyped_storage())
        elif host or left:
            self._device.note_left(made)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        """Records a storage that an operator on the device has made."""
        known = self._device.derived.get(storage._cdata)
        if known is None or known.alive.expired():
            if self._device.capacity is not None:
                self._device.allocate(storage.nbytes())
            self._device.note_allocated(storage, self._device.derived)

    def _on_device(self, tensor: Tensor) -> bool:
        return _within(tensor, self._device.device_ranges)

    def _is_derived(self, tensor: Tensor) -> bool:
        return self._device.made_by_compute(tensor)


def _within(tensor: Tensor, ranges: list[tuple[int, int, StorageWeakRef]]) -> bool:
    # Without dispatch, for the reason in `SimDevice._check`: the two threads of a test waited for each other's lock forever.
    with torch.DisableTorchFunctionSubclass():
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
    """Returns True for operators that return a view, and for ``set_``: they access no data."""
    returns = [each.alias_info for each in func._schema.returns]
    return func._schema.name == "aten::set_" or any(info is not None and not info.is_write for info in returns)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _shapes(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tuple(each.shape) for each in tensors]


@contextmanager
def simulated(
    omit: Wait | None = None,
    *,
    watch: bool = True,
    capacity: int | None = None,
    unrepeatable: bool = False,
    shared: bool = False,
) -> Iterator[list[SimDevice]]:
    """A context in which every strategy runs on a simulated device.

    Args:
        omit: see :class:`SimDevice`.
        watch: True to record the accesses of the model's operators.
        capacity: see :class:`SimDevice`.
        unrepeatable: see :class:`Watch`. Plain Lightning differs from itself then.
        shared: True if all strategies have one device, as those on one GPU have its streams in common.

    Yields:
        The list of the devices that were made, to which each run adds one.

    Raises:
        Race: at the end, if memory was unpinned too early.
    """
    made: list[SimDevice] = []
    init, begins, cpu = Run.__init__, Run.training_begins, nn.Module.cpu
    write, absorb, unscale = HostBlock.write, HostBlock._absorb, torch._amp_foreach_non_finite_check_and_unscale_

    def make(device: torch.device) -> SimDevice:
        if shared and made:
            return made[0]
        made.append(SimDevice(torch.device("cpu"), omit, capacity))
        if watch:
            mode = Watch(made[-1], unrepeatable)
            mode.__enter__()
            modes.append(mode)
        return made[-1]

    def engine_write(self: HostBlock, index: int, value: Tensor) -> bool:
        with self._device.engine():  # type: ignore[attr-defined]
            return write(self, index, value)

    def engine_absorb(self: HostBlock, index: int, into: torch.Tensor | None) -> None:
        with self._device.engine():  # type: ignore[attr-defined]
            absorb(self, index, into)

    def begin(self: Run, module: Any, options: Any, device: torch.device, *args: Any) -> None:
        """Begins a run. The device gets another name than the host, from which moves tell their direction."""
        init(self, module, options, DEVICE, *args)

    def move_others(module: nn.Module, device: torch.device, staying: Any, without_buffers: Any) -> None:
        there, to = device == DEVICE, made[-1]
        streamed = {*map(id, staying), *map(id, without_buffers)}
        to.note_left(tensors_of(module, streamed) if there else ())
        with to.engine(), Moves(to, there):
            move_module(module, torch.device("cpu"), staying, without_buffers)

    def move_one(tensor: Any, to: Any) -> None:
        with made[-1].engine(), Moves(made[-1], to.keywords["device"] == DEVICE):
            move(tensor, partial(Tensor.to, device="cpu"))

    def to_cpu(self: nn.Module) -> nn.Module:
        with Moves(made[-1], False) if made else nullcontext():
            return cpu(self)

    def training_begins(self: Run) -> None:
        for optimizer in self.trainer.optimizers:
            made[-1].note_left(tensors_of(optimizer, set()))
        begins(self)

    def unscale_by_place(gradients: Any, *numbers: Tensor) -> None:
        """Unscales gradients of both places apart, as torch does for devices."""
        for place in (False, True):
            if chosen := [each for each in gradients if any(device.has(each) for device in made) is place]:
                unscale(chosen, *numbers)

    def group_by_place(lists: Any, *_: Any) -> dict[Any, Any]:
        """Divides gradients by place, as torch's clipping divides them by device. Their order does not change."""
        groups: dict[Any, Any] = {}
        place = None
        for tensor in lists[0]:
            now = tensor.device, tensor.dtype, any(device.has(tensor) for device in made)
            if now != place:
                place, key = now, (tensor.device, (*now, len(groups)))
            groups.setdefault(key, ([[]], []))[0][0].append(tensor)
        return groups

    modes: list[Watch] = []
    with (
        mock.patch("sp_lightning.trainer.run.device_for", make),
        mock.patch.object(Run, "__init__", begin),
        mock.patch.object(Run, "training_begins", training_begins),
        mock.patch("sp_lightning.trainer.run.move_module", move_others),
        mock.patch("sp_lightning.trainer.run.move", move_one),
        mock.patch.object(nn.Module, "cpu", to_cpu),
        mock.patch("torch._amp_foreach_non_finite_check_and_unscale_", unscale_by_place),
        mock.patch("torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype", group_by_place),
        mock.patch.object(HostBlock, "write", engine_write),
        mock.patch.object(HostBlock, "_absorb", engine_absorb),
    ):
        try:
            yield made
        finally:
            for mode in reversed(modes):
                mode.__exit__(None, None, None)
        for race in (race for device in made for race in device.early):
            raise race
