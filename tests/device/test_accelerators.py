"""Accelerators at the seam and without one: page locks, counters and events of torch's, which fakes stand for."""

from __future__ import annotations

import functools
import math
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from sp_lightning.core.device.accelerator import (
    Accelerator,
    _side_stream,
    generator_states,
    name_of,
    present_device,
    set_generator_states,
)
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory

EMPTY = torch.empty


class Allocator:
    """Stands for torch's pinned allocator of an accelerator that this machine lacks."""

    def __init__(self, most: float = math.inf) -> None:
        self.most = most
        self.taken: list[int] = []  # addresses

    def empty(self, *size: int, pin_memory: bool = False, **options: Any) -> Tensor:
        memory = EMPTY(*size, **options)
        if pin_memory:
            if memory.nbytes > self.most:
                raise RuntimeError("out of pinned memory")
            self.taken.append(memory.data_ptr())
        return memory


def accelerator(kind: str, index: int = 0) -> Accelerator:
    """The seam of an accelerator: without streams, which it would make at once."""
    with streams_of(mock.MagicMock):
        return Accelerator(torch.device(kind, index))


@contextmanager
def streams_of(kind: Any) -> Iterator[None]:
    """Streams are of another class inside. Streams of the class stay with nobody, as this process may have a GPU."""
    made = functools.cache(_side_stream.__wrapped__)
    with mock.patch("sp_lightning.core.device.accelerator._side_stream", made), mock.patch("torch.Stream", kind):
        yield


@pytest.fixture
def xpu() -> Accelerator:
    return accelerator("xpu")


def pinned(device: Accelerator, allocator: Allocator, nbytes: int) -> PinnedMemory:
    with (
        mock.patch("torch.empty", allocator.empty),
        mock.patch.object(Tensor, "is_pinned", lambda memory: memory.data_ptr() in allocator.taken),
    ):
        return PinnedMemory(device, nbytes, pin=True)


def test_torch_pins_where_nothing_can_be_registered(xpu: Accelerator) -> None:
    memory = pinned(xpu, Allocator(), 5000)
    assert memory.pinned
    assert memory.bytes.shape == (8192,)
    with mock.patch.object(xpu, "record"), mock.patch.object(xpu, "synchronize") as waited:
        memory.unpin()  # CUDA's runtime, which there is none of, is left alone
    assert {call.args[1] for call in waited.call_args_list} == {Wait.UNPIN_AFTER_COPY}


def test_where_torch_can_pin_no_more_it_goes_on_without(xpu: Accelerator) -> None:
    memory = pinned(xpu, Allocator(most=0), 5000)
    assert not memory.pinned
    assert memory.bytes.shape == (8192,)


def test_what_is_not_to_be_pinned_is_not(xpu: Accelerator) -> None:
    allocator = Allocator()
    with mock.patch("torch.empty", allocator.empty):
        assert not PinnedMemory(xpu, 5000, pin=False).pinned
    assert allocator.taken == []


class Runtime:
    """CUDA's runtime with several devices, of which each thread has a current one. It notes where memory was registered."""

    def __init__(self) -> None:
        self.current = threading.local()
        self.seen: list[int] = []

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current.index = getattr(self.current, "index", 0), device.index
        yield
        self.current.index = before

    def note(self, *_: Any) -> int:
        self.seen.append(getattr(self.current, "index", 0))
        return 0

    cudaHostRegister = cudaHostUnregister = note  # noqa: N815


def test_memory_is_registered_with_the_device_of_the_run_in_any_thread() -> None:
    """A thread begins with the first device: registering there made a context on a GPU that the run does not use."""
    runtime = Runtime()
    device = accelerator("cuda", 1)
    with (
        mock.patch("torch.cuda.cudart", return_value=runtime),
        mock.patch("torch.cuda.device", runtime.device),
        mock.patch.object(device, "record"),
        mock.patch.object(device, "synchronize"),
        ThreadPoolExecutor(1) as thread,
    ):
        memory = thread.submit(lambda: PinnedMemory(device, 5000, pin=True)).result()
        thread.submit(memory.unpin).result()
    assert runtime.seen == [1, 1]


@contextmanager
def counted(**values: Any) -> Iterator[dict[str, mock.Mock]]:
    """Counters of ``torch.accelerator`` return these values inside."""
    counters: dict[str, Any] = {name: mock.Mock(return_value=value) for name, value in values.items()}
    with mock.patch.multiple("torch.accelerator", **counters):
        yield counters


def test_budget_and_peak_are_what_torch_counts(xpu: Accelerator) -> None:
    with counted(
        get_memory_info=(600, 1000),
        memory_stats={"reserved_bytes.all.current": 300, "allocated_bytes.all.current": 100},
        max_memory_allocated=250,
        reset_peak_memory_stats=None,
    ) as counters:
        assert xpu.free_bytes() == 600 + 300 - 100
        assert xpu.peak_bytes() == 250
        xpu.reset_peak()
    for asked in counters.values():
        asked.assert_called_once_with(torch.device("xpu", 0))


@pytest.mark.parametrize("missing", [AttributeError("torch 2.9"), RuntimeError("not supported on this backend")])
def test_where_torch_counts_nothing_there_is_no_budget_and_no_peak(xpu: Accelerator, missing: Exception) -> None:
    refused = mock.Mock(side_effect=missing)
    with mock.patch.multiple("torch.accelerator", get_memory_info=refused, max_memory_allocated=refused):
        assert xpu.free_bytes() is None
        assert xpu.total_bytes() is None
        assert xpu.peak_bytes() is None


def test_a_count_tells_of_the_error_of_an_earlier_kernel(xpu: Accelerator) -> None:
    """It is a RuntimeError, too, and was taken for a backend that counts nothing."""
    failed = mock.Mock(side_effect=torch.AcceleratorError("an illegal memory access"))
    with mock.patch.multiple("torch.accelerator", max_memory_allocated=failed), pytest.raises(torch.AcceleratorError):
        xpu.peak_bytes()


def test_a_backend_without_product_names_is_named_by_its_type(xpu: Accelerator) -> None:
    with mock.patch("torch.get_device_module", return_value=object()):
        assert name_of(xpu) == "xpu"


def test_the_host_waits_without_spinning(xpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, event = list[float](), mock.Mock(query=mock.Mock(side_effect=[False] * 7 + [True]))
    monkeypatch.setattr("sp_lightning.core.device.accelerator.sleep", lambda pause: pauses.append(pause))
    xpu.synchronize(event, Wait.APPLY_AFTER_DRAIN)
    assert pauses == [20e-6, 40e-6, 80e-6, 160e-6, 200e-6, 200e-6]
    event.synchronize.assert_called_once()


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Python's own handler of Ctrl-C. A process that was started in the background ignores the signal."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_wait_for_an_event_that_never_happens_can_be_interrupted(xpu: Accelerator) -> None:
    """Signals reach a thread only when it runs Python code."""
    looks = 0

    def query() -> bool:
        nonlocal looks
        looks += 1
        if looks == 3:
            signal.raise_signal(signal.SIGINT)
        return False

    blocked = mock.Mock(side_effect=AssertionError)
    with pytest.raises(KeyboardInterrupt):
        xpu.synchronize(mock.Mock(query=query, synchronize=blocked), Wait.APPLY_AFTER_DRAIN)
    assert looks == 3


def test_a_wait_asks_whether_the_event_may_still_happen(xpu: Accelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In backward, a thread of autograd's waits, and no signal reaches it: nothing else would end the wait."""
    monkeypatch.setattr("sp_lightning.core.device.accelerator._LOOK", 0.0)
    never = mock.Mock(query=mock.Mock(side_effect=[False] * 9))
    xpu.check = mock.Mock(side_effect=[None, None, RuntimeError("another rank has failed")])
    with pytest.raises(RuntimeError, match="another rank has failed"):
        xpu.synchronize(never, Wait.APPLY_AFTER_DRAIN)
    assert xpu.check.call_args_list == [mock.call(Wait.APPLY_AFTER_DRAIN)] * 3


@pytest.mark.parametrize(("fraction", "free"), [(1.0, 600 + 300 - 100), (0.5, 500 - 100), (0.2, 200 - 100)])
def test_the_budget_is_within_what_the_user_allows_this_process(
    fraction: float, free: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's allocator raises out of memory beyond torch.cuda.set_per_process_memory_fraction, however much is free."""
    gpu = accelerator("cuda")
    current = {"reserved_bytes.all.current": 300, "allocated_bytes.all.current": 100}
    with counted(get_memory_info=(600, 1000), memory_stats=current):
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: fraction, raising=False)
        assert gpu.free_bytes() == free
        assert gpu.total_bytes() == 1000 * fraction
        monkeypatch.delattr(torch.cuda, "get_per_process_memory_fraction")  # torch 2.10 has none
        assert gpu.free_bytes() == 600 + 300 - 100


@pytest.mark.parametrize(("free", "held"), [(30 << 30, (40 << 30, 80 << 30)), (69 << 30, None)])
def test_memory_that_other_programs_hold(free: int, held: Any) -> None:
    with counted(get_memory_info=(free, 80 << 30), memory_reserved=10 << 30):
        assert accelerator("cuda").held_by_others() == held


class Event:
    """An event of CUDA's, at a time that the test says: elapsed milliseconds are float32."""

    now = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        self.seconds = 0.0

    def record(self, stream: Any) -> None:
        self.seconds = Event.now

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, end: Event) -> float:
        return float(np.float32((end.seconds - self.seconds) * 1000))


def test_intervals_are_as_fine_after_an_hour_as_at_first(xpu: Accelerator) -> None:
    """Kernels of 0.1 ms had no length, or 0.25 ms: all times were elapsed since one event at the beginning of a run."""
    with (
        mock.patch("torch.Event", Event),
        mock.patch("torch.accelerator.current_stream"),
        mock.patch.object(Event, "now", 0.0),
    ):
        timeline = xpu.make_timeline()
        xpu.timelines.append(timeline)
        taken = []
        for second in (0, 9, 11, 3600, 7200.5):
            for kernel in range(20):
                Event.now = second + kernel * 2e-4
                begun = xpu.mark(Stream.COMPUTE)
                Event.now += 1e-4
                xpu.note("forward", kernel, begun, Stream.COMPUTE)
            taken += timeline.take()
    assert [each.end - each.begin for each in taken] == pytest.approx([1e-4] * 100, abs=1e-5)
    assert [each.layer for each in taken] == list(range(20)) * 5
    assert taken[-1].end - taken[0].begin == pytest.approx(7200.5 + 0.0039, abs=1e-3)


class CountedEvent(Event):
    """Notes how many were made."""

    made = 0

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__()
        CountedEvent.made += 1

    def query(self) -> bool:
        return self.seconds < Event.now


class EnteredOnce:
    """A stream as torch 2.10 has it: one object remembers what was current before, and cannot be entered while it is."""

    def __init__(self, device: Any = None, *, stream_id: int = 7, device_index: int = 0, device_type: int = 1) -> None:
        self.stream_id, self.device_index, self.device_type = stream_id, device_index, device_type
        self.entered = False

    def __enter__(self) -> EnteredOnce:
        if self.entered:
            raise RuntimeError("Stream's context should not be initialized.")
        self.entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self.entered = False


def test_a_stream_may_be_entered_within_itself() -> None:
    """Nothing here does so on purpose, but two threads, or a copy that a collective makes, may at any time."""
    with streams_of(EnteredOnce):
        device = Accelerator(torch.device("xpu", 0))
        target = torch.zeros(2)
        with device.on(Stream.UPLOAD) as outer, device.on(Stream.UPLOAD) as inner:
            device.copy([target], [torch.ones(2)], Stream.UPLOAD)
        assert outer.stream_id == inner.stream_id == device._stream(Stream.UPLOAD).stream_id
    assert target.tolist() == [1, 1]


def test_engines_on_one_device_share_its_streams() -> None:
    """After some ten runs in one process, torch gave two kinds of copies one stream: it has 32 of them."""
    made = list[int]()

    def make(device: torch.device) -> mock.Mock:
        made.append(device.index)
        return mock.Mock()

    with streams_of(make):
        (one, other), third = (
            [Accelerator(torch.device("xpu", 0)) for _ in range(2)],
            Accelerator(torch.device("xpu", 1)),
        )
    sides = [stream for stream in Stream if stream not in (Stream.COMPUTE, Stream.UPDATE)]
    assert all(one._stream(side) is other._stream(side) is not third._stream(side) for side in sides)
    assert len({id(one._stream(side)) for side in sides}) == len(sides)
    assert sorted(made) == [0] * len(sides) + [1] * len(sides)


def test_the_present_device_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one, it is unequal to the device of each tensor on it."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)
    assert present_device() == torch.device("cuda", 1)


# ---------------------------------------------------------------------- random generators


class Generators:
    """Random generators of two devices, on a machine that may have none. Reading them initialises the accelerator."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
        self.kind, self.started = kind, False
        self.states = [torch.tensor([0]), torch.tensor([0])]
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
        for name in ("is_initialized", "get_rng_state", "set_rng_state", "manual_seed_all"):
            monkeypatch.setattr(torch.get_device_module(kind), name, getattr(self, name))

    def is_initialized(self) -> bool:
        return self.started

    def get_rng_state(self, device: torch.device) -> Tensor:
        self.started = True
        return self.states[device.index]

    def set_rng_state(self, state: Tensor, device: torch.device) -> None:
        self.states[device.index] = state

    def manual_seed_all(self, seed: int) -> None:
        self.states = [torch.tensor([seed])] * 2


@pytest.fixture(params=["cuda", "xpu"])
def generators(monkeypatch: pytest.MonkeyPatch, request: Any) -> Iterator[Generators]:
    with torch.random.fork_rng(devices=[]):
        yield Generators(monkeypatch, request.param)


def test_random_states_do_not_start_an_accelerator(generators: Generators) -> None:
    """A run on the CPU made a context on a GPU."""
    states = generator_states()
    set_generator_states(states)
    assert len(states) == 1
    assert not generators.started


def test_random_states_of_accelerators_come_back(generators: Generators) -> None:
    generators.started, generators.states = True, [torch.tensor([3]), torch.tensor([4])]
    states = generator_states()
    generators.states = [torch.tensor([5]), torch.tensor([6])]
    set_generator_states(states)
    assert generators.states == [3, 4]


def test_operators_of_the_model_draw_from_the_device_as_well(generators: Generators) -> None:
    """Of XPU and others, only the CPU's generator was looked at."""
    generators.states = [torch.tensor([3]), torch.tensor([4])]
    assert accelerator(generators.kind, 1).random_states()[1:] == [4]


def test_states_from_before_an_accelerator_started_give_it_its_first_state(generators: Generators) -> None:
    """They would keep the state that other runs have left, and dropout would draw other values."""
    torch.manual_seed(7)
    torch.rand(3)
    states = generator_states()
    generators.started, generators.states = True, [torch.tensor([5]), torch.tensor([6])]
    torch.manual_seed(9)
    set_generator_states(states)
    assert generators.states == [7, 7]
    assert torch.equal(generator_states()[0], states[0])
