"""The simulation has tests of its own: it must notice what it is for."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Adagrad

from sp_lightning import stream
from sp_lightning.core.device.device import Stream, Wait
from sp_lightning.core.weights.gradients import Transfers
from sp_lightning.core.weights.swap import ParameterSwap
from tests.equality.programs.placed import HidingModule, KeepsOptimizer, Measures
from tests.support.engine import Slots
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, superpipeline
from tests.support.simdevice import Mixed, Race, SimDevice, Watch, settled, simulated

WHY = Wait.USE_AFTER_FETCH  # any


def make() -> tuple[SimDevice, torch.Tensor, torch.Tensor]:
    device = SimDevice(torch.device("cpu"))
    slot, host = settled(device, 64), device.host_empty(64)[:64]
    host.fill_(7)
    device.access(host, None, write=True)
    return device, slot, host


def test_a_copy_runs_only_when_somebody_waits() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    event = device.record(Stream.UPLOAD)
    assert slot.tolist() == [0xFF] * 64, "poison until then"
    device.wait(Stream.COMPUTE, event, WHY)
    assert slot.tolist() == [7] * 64


def test_a_copy_to_memory_that_kernels_may_still_use_is_a_race() -> None:
    """The allocator gives memory as soon as the host has let go of it, and fills it where algorithms are deterministic."""
    device, _, host = make()
    memory = device.empty(64)
    with pytest.raises(Race, match=r"copied to by host to device at .* is not ordered after written by compute"):
        device.copy([memory], [host], Stream.UPLOAD)


def test_reading_before_the_copy_is_a_race() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    with pytest.raises(Race, match=r"read by compute at .* is not ordered after copied to by host to device"):
        device.access(slot, Stream.COMPUTE, write=False)


def test_overwriting_what_compute_reads_is_a_race() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), WHY)
    device.access(slot, Stream.COMPUTE, write=False)
    with pytest.raises(Race, match=r"copied to by host to device at .* is not ordered after read by compute"):
        device.copy([slot], [host], Stream.UPLOAD)


def test_an_event_covers_only_what_came_before_it() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), WHY)
    early = device.record(Stream.COMPUTE)
    device.access(slot, Stream.COMPUTE, write=False)
    device.wait(Stream.UPLOAD, early, WHY)
    with pytest.raises(Race):
        device.copy([slot], [host], Stream.UPLOAD)


def test_the_host_may_not_write_what_an_upload_reads() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    with pytest.raises(Race, match=r"written by host at .* is not ordered after copied from by host to device"):
        device.access(host, None, write=True)


def test_parts_of_memory_are_told_apart() -> None:
    device, slot, host = make()
    device.copy([slot[:32]], [host[:32]], Stream.UPLOAD)
    device.access(slot[32:], Stream.COMPUTE, write=True)
    with pytest.raises(Race):
        device.access(slot[16:48], Stream.COMPUTE, write=True)


def test_an_operator_that_mixes_is_refused() -> None:
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    device.wait(Stream.COMPUTE, device.record(Stream.UPLOAD), WHY)
    with Watch(device):
        derived = slot.float() * 2
        with pytest.raises(Mixed, match="host store"):
            torch.add(derived, host)
        torch.add(derived, host[0])  # 0-dim is allowed on every device


def test_memory_of_the_same_shape_reads_nothing() -> None:
    """As a plan is made anew after weights were unfrozen, while one of them is updated."""
    device, slot, host = make()
    device.copy([slot], [host], Stream.UPLOAD)
    with Watch(device):
        torch.empty_like(slot, device="meta")
        slot.new_empty(3)
        with pytest.raises(Race):
            slot.clone()


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
def test_an_operator_that_nobody_declared_is_noticed() -> None:
    """Slots and host store are the doors to memory; what goes past them is seen by the watch."""

    def undeclared(self: Slots, layer: Any, **more: Any) -> Any:
        device, wait, access = self._device, self._device.wait, self._device.access
        with (
            mock.patch.object(device, "wait", lambda *a: wait(*a) if a[2] is not Wait.USE_AFTER_FETCH else None),
            mock.patch.object(
                device, "access", lambda m, by, write: None if by is Stream.COMPUTE else access(m, by, write=write)
            ),
        ):
            return use(self, layer, **more)

    use = Slots.lock
    with (
        simulated(),
        mock.patch.object(Slots, "lock", undeclared),
        pytest.raises(Race, match=r"read by compute"),
    ):
        fit(lambda: Module(Stack()), vectors(1), superpipeline())


@pytest.mark.rest("takes tenths of a second")
def test_weights_of_the_host_in_the_model_are_noticed() -> None:
    """Were the modules' parameters not exchanged, a CPU would compute with the host's and say nothing."""

    def forgetful(self: ParameterSwap) -> None:
        to_device(self)
        for module, _, attribute, host, _ in self._pairs:
            if host.shape == (16, 32):
                module._parameters[attribute] = host

    to_device = ParameterSwap.to_device
    exchanged = mock.patch.object(ParameterSwap, "to_device", forgetful)
    # Otherwise the host's would be taken for some that user code has captured.
    with simulated(), exchanged, mock.patch.object(ParameterSwap, "watch_captured"), pytest.raises(Mixed):
        fit(lambda: Module(Stack()), vectors(1), superpipeline())


class MixesBuffer(Module):
    """Between steps weights are on the host, and buffers stay on the device."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.register_buffer("scale", torch.ones(16))

    def on_train_batch_end(self, *args: Any) -> None:
        self.scale * self.net.head.weight  # type: ignore[operator, union-attr]


@pytest.mark.rest("takes tenths of a second")
def test_buffers_are_device_memory() -> None:
    """On a GPU that is torch's error about two devices; here nothing noticed it."""
    with simulated(), pytest.raises(Mixed):
        fit(MixesBuffer, vectors(1), superpipeline())


def test_foreach_operators_count_their_writes() -> None:
    """Under a dispatch mode torch leaves the versions as they are, so code that notices writes was never reached."""
    with Watch(SimDevice(torch.device("cpu"))):
        tensor = torch.zeros(3)
        torch._foreach_add_([tensor], 1.0)
        assert tensor._version == 1


def test_new_memory_has_other_bytes_in_each_call() -> None:
    with Watch(SimDevice(torch.device("cpu"))):
        first, second = (torch.empty(2, dtype=torch.int64) for _ in range(2))
        assert not torch.equal(first, second)
        assert first._version == 0
        assert not torch.equal(torch.empty_like(first), torch.empty_like(first))


@pytest.mark.parametrize("add", [Tensor.index_add, Tensor.index_add_, Tensor.scatter_add, Tensor.scatter_add_])
def test_atomic_additions_may_have_other_last_bits_in_each_call(add: Any) -> None:
    where, numbers = torch.tensor([0] * 50 + [1]), torch.rand(51)
    with Watch(SimDevice(torch.device("cpu")), unrepeatable=True):
        sums = {tuple(add(torch.zeros(3), 0, where, numbers).tolist()) for _ in range(9)}
        assert len(sums) == 2
        assert len({each[1:] for each in sums}) == 1, "a sum of two numbers has no order"
        with mock.patch.object(torch, "are_deterministic_algorithms_enabled", return_value=True):
            assert len({tuple(add(torch.zeros(3), 0, where, numbers).tolist()) for _ in range(9)}) == 1


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("dropped", ["source", "target"])
@pytest.mark.parametrize("waits", [False, True])
def test_memory_that_is_dropped_while_it_is_copied_is_a_race(dropped: str, waits: bool) -> None:
    """The allocator may give it to the next kernel, or to the next tensor on the host."""
    device, _, _ = make()
    tensors = {"source": settled(device, 64), "target": torch.empty(64, dtype=torch.uint8)}
    device.copy([tensors["target"], torch.empty(0)], [tensors["source"], torch.empty(0)], Stream.DOWNLOAD)
    event = device.record(Stream.DOWNLOAD)
    if waits:
        device.synchronize(event, WHY)
    del tensors[dropped]
    with nullcontext() if waits else pytest.raises(Race, match="is free and may be used again"):
        device.record(Stream.COMPUTE)


@pytest.mark.rest("takes tenths of a second")
def test_gradients_that_are_dropped_while_they_are_copied_are_noticed() -> None:
    send = Transfers.send

    def forgets(self: Any, layer: int, targets: Any, sources: Any, alive: Any, what: Any) -> None:
        send(self, layer, targets, sources, [], what)

    with simulated(), mock.patch.object(Transfers, "send", forgets), pytest.raises(Race, match="is free and may be"):
        fit(lambda: Module(Stack()), vectors(2), superpipeline(), recorded="nothing")


def test_a_copy_to_memory_that_has_one_place_for_many_numbers_is_refused() -> None:
    device, slot, _ = make()
    target = torch.empty((), dtype=torch.uint8).expand(64)
    device.copy([target], [slot], Stream.DOWNLOAD)
    with pytest.raises(RuntimeError, match="more than one element"):
        device.synchronize(device.record(Stream.DOWNLOAD), WHY)


def test_each_stream_keeps_what_it_has_freed() -> None:
    """Until an allocation does not fit: then all pools are emptied, for which a GPU waits."""
    device = SimDevice(torch.device("cpu"), capacity=100)
    for _ in range(3):
        device.empty(60)
    assert (device.in_use, sum(device.reserved.values()), device.retries) == (0, 60, 0)
    with device.on(Stream.STEP):
        kept = device.empty(60)
    assert (device.in_use, device.reserved[Stream.COMPUTE], device.retries) == (60, 0, 1)
    with pytest.raises(torch.OutOfMemoryError):
        device.empty(60)
    del kept


@pytest.mark.parametrize(
    ("left_out", "make"),
    [
        ("tests.support.simdevice.move_module", Measures),
        ("tests.support.simdevice.move_module", HidingModule),
        ("sp_lightning.trainer.run.Run._move_state", partial(KeepsOptimizer, partial(Adagrad, lr=0.1))),
    ],
)  # fmt: skip
def test_what_is_left_on_the_host_is_noticed(left_out: str, make: Any) -> None:
    """Tensors in attributes of modules and in state of optimizers, from before the run."""
    with (
        mock.patch(left_out),
        simulated(),
        pytest.raises(Mixed, match=r"takes memory of the host \[.*\] and of the device"),
    ):
        fit(make, vectors(2), superpipeline(k=1, gpu_layers=1), recorded="nothing")


def test_what_is_computed_on_the_host_is_the_hosts() -> None:
    device, slot, host = make()
    with Watch(device):
        on_host, on_device = host.float() * 2, slot.float()
        with pytest.raises(Mixed, match=r"takes memory of the host \[\(64,\)\]"):
            on_device.add(on_host.exp())
        assert device.is_left(on_host.exp())
        assert device.is_left(device.on_host(on_device))
        assert device.has(on_device.exp())


WITH_TWO_PLACES: dict[str, tuple[bool, Callable[[torch.Tensor, torch.Tensor], Any]]] = {
    "a copy to the device": (True, lambda device, host: device.copy_(host)),
    "a copy to the host": (True, lambda device, host: host.copy_(device)),
    "indices of the host": (True, lambda device, host: device[host.long()]),
    "values put at indices of the host": (True, lambda device, host: device.index_put((host.long(),), device)),
    "values put in place": (True, lambda device, host: device.index_put_((host.long(),), device + 1)),
    "values put by the inner operator": (
        True,
        lambda device, host: torch._index_put_impl_(device, (host.long(),), device + 1),
    ),
    "a number of the host": (True, lambda device, host: device.index_put_((host.long(),), host.sum())),
    "values of the host": (False, lambda device, host: device.index_put((device.long(),), host)),
    "values of the host in place": (False, lambda device, host: device.index_put_((device.long(),), host)),
    "indices of the device": (False, lambda device, host: host[device.long()]),
    "a sum": (False, lambda device, host: device + host),
}
NOT_OF_FAKES = ("values put by the inner operator", "indices of the device")
"""Rules of torch's kernels (``TensorAdvancedIndexing.cpp``) that its fake tensors do not have."""


@pytest.mark.parametrize("name", WITH_TWO_PLACES)
def test_operators_take_both_places_as_torch_does(name: str) -> None:
    """Torch's fake tensors have the rules of a GPU, without one."""
    allowed, operate = WITH_TWO_PLACES[name]
    if name not in NOT_OF_FAKES:
        with FakeTensorMode(), nullcontext() if allowed else pytest.raises(RuntimeError, match="device"):
            operate(torch.ones(64, device="cuda"), torch.ones(64))
    device, slot, host = make()
    with Watch(device):
        on_host, on_device = host.float() * 0 + 1, slot.float() * 0 + 1
        with nullcontext() if allowed else pytest.raises(Mixed, match=r"takes memory of the host"):
            operate(on_device, on_host)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("streamed", [False, True])
def test_what_was_moved_is_back_after_the_run(streamed: bool) -> None:
    """A Trainer's run ends with Lightning's ``module.cpu()``, which calls no ``to``; a stream ends with ``to``."""
    module: Any = HidingModule()
    scaled, follows, _ = module.net.blocks
    module.register_buffer("constant", torch.ones(3))
    of_apply = lambda: [scaled.scale, scaled.data[0], follows.shift, module.constant]  # noqa: E731
    of_to = module.net.hidden[0].weight
    seen = list[bool]()
    with simulated() as made:
        look = lambda *_: seen.extend(made[-1].has(each) for each in (*of_apply(), of_to))  # noqa: E731
        scaled.register_forward_hook(look)
        if streamed:
            with stream(module, k=1):
                module.net(vectors(1)[0])
        else:
            fit(lambda: module, vectors(1), superpipeline(k=1), run="predict")
        assert seen == [True] * len(seen) != []
        assert not any(map(made[-1].has, of_apply()))
        assert made[-1].has(of_to) is not streamed
