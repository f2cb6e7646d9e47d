"""Averages of weights that a module keeps in buffers: latent diffusion's ``LitEma``, retyped."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.layers.buffers import AveragesOnDevice, find_averages
from sp_lightning.core.model.find import find_layers
from sp_lightning.trainer.run import move_to_device
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first


class Average(nn.Module):
    """Copies of the trained weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.register_buffer("decay", torch.tensor(0.9))
        self.names = {}
        for name, p in model.named_parameters():
            if p.requires_grad:
                self.names[name] = name.replace(".", "")
                self.register_buffer(self.names[name], p.detach().clone())

    def forward(self, model: nn.Module) -> None:
        with torch.no_grad():
            copies = dict(self.named_buffers())
            for name, p in model.named_parameters():
                if p.requires_grad:
                    key = self.names[name]
                    copies[key] = copies[key].type_as(p)
                    copies[key].sub_((1 - self.decay) * (copies[key] - p))

    def copy_to(self, model: nn.Module) -> None:
        copies = dict(self.named_buffers())
        for name, p in model.named_parameters():
            if name in self.names:
                p.data.copy_(copies[self.names[name]].data)


class Penalty(Average):
    """The square of the distance from where training began (L2-SP)."""

    def forward(self, model: nn.Module) -> Tensor:
        pairs = ((p, self.get_buffer(self.names[name])) for name, p in model.named_parameters())
        return torch.stack([(p - start).square().sum() for p, start in pairs]).sum()


class Teacher(Average):
    """A copy of the model that follows it."""

    def forward(self, model: nn.Module, x: Tensor) -> Tensor:
        copies = {name: self.get_buffer(key) for name, key in self.names.items()}
        return torch.func.functional_call(model, copies, (x,))


class Diffusion(Module):
    """Averages after each batch, as latent diffusion does, or within the step; validates with both."""

    def __init__(self, *, within: str) -> None:
        super().__init__(Stack())
        self.average = Average(self.net)
        self.within = within

    @contextmanager
    def averaged(self) -> Iterator[None]:
        own = [p.clone() for p in self.net.parameters()]
        self.average.copy_to(self.net)
        try:
            yield
        finally:
            for kept, p in zip(own, self.net.parameters(), strict=True):
                p.data.copy_(kept.data)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.net(batch)
        if self.within == "call":
            self.average(self.net)
        if self.within in ("method", "both"):
            self.average.forward(self.net)
        if self.within == "both":
            self.average(self.net)
        return (hidden + self.net(batch)).square().mean()

    def on_train_batch_end(self, *args: Any) -> None:
        if not self.within:
            self.average(self.net)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        with self.averaged():
            self.log("averaged", self.loss(batch), batch_size=2)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["off", "forward", "backward"], "forward", why="the same at other times"))
@pytest.mark.parametrize(
    "device", first(["cpu", "simulated"], "simulated", why="the same where copies are done at once")
)
@pytest.mark.parametrize("within", ["", "call", "method", "both"])
def test_averages_are_those_of_plain_lightning(within: str, device: str, overlap: Any) -> None:
    def run(strategy: Any) -> tuple[Any, dict[str, Tensor]]:
        outcome = fit(fused(lambda: Diffusion(within=within)), vectors(3), strategy, val=vectors(2), recorded="losses")
        return outcome, outcome.trainer.callback_metrics

    plain, expected = run("auto")
    with simulated() if device == "simulated" else nullcontext():
        ours, metrics = run(SuperpipelineStrategy(k=1, optimizer_overlap=overlap))
    assert_same(ours, plain)
    assert {name: float(each) for name, each in metrics.items()} == {n: float(each) for n, each in expected.items()}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("within", ["call", "method", "both"])
def test_what_a_step_has_sent_is_back_after_it(within: str, monkeypatch: pytest.MonkeyPatch) -> None:
    keepers: list[AveragesOnDevice] = []
    sent: list[int] = []

    def elsewhere(module: nn.Module, device: torch.device, in_step: Any) -> AveragesOnDevice:
        keepers.append(AveragesOnDevice(module, torch.device("cpu:0"), in_step))
        return keepers[-1]

    class Watched(Diffusion):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            sent.append(sum(len(listener._sent) for listener in keepers))
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            assert not any(listener._sent for listener in keepers)

    plain = fit(lambda: Watched(within=within), vectors(3), val=vectors(2))
    sent.clear()
    monkeypatch.setattr("sp_lightning.core.engine.streamer.AveragesOnDevice", elsewhere)
    assert_same(fit(lambda: Watched(within=within), vectors(3), superpipeline(k=1), val=vectors(2)), plain)
    assert len(keepers) == 1
    assert all(sent)


def test_a_method_within_a_step_is_on_the_device() -> None:
    """``cpu:0`` stands for another device than ``cpu``; what is asked for stays there until the step is over."""
    average = Average(Stack())
    host = dict(average.named_buffers())
    step = [True]
    listener = AveragesOnDevice(average, torch.device("cpu:0"), lambda: step[0])
    name = next(iter(average.names.values()))
    sent = getattr(average, name)
    assert sent is not host[name]
    assert all(buffer is not host[each] for each, buffer in average.named_buffers())
    assert copy.deepcopy(average).get_buffer(name) is not sent
    sent.add_(1)
    assert not torch.equal(host[name], sent)
    step[0] = False
    listener.send_back()
    assert average.get_buffer(name) is host[name]
    assert torch.equal(host[name], sent)
    listener.close()
    assert type(average._buffers) is dict
    assert type(copy.deepcopy(average)._buffers) is dict


class Penalized(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.start = Penalty(self.net)

    def loss(self, batch: Tensor) -> Tensor:
        return super().loss(batch) + self.start(self.net) * 0.1


class Taught(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.teacher = Teacher(self.net)

    def loss(self, batch: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(self.net, batch)
        return (self.net(batch) - wanted.roll(1, 0)).square().mean()


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("options", [{}, {"optimizer_overlap": "backward"}, {"activations": "recompute"}], ids=str)
@pytest.mark.parametrize("make", [Penalized, Taught])
def test_other_uses_of_copies(make: Any, options: Any) -> None:
    plain = fit(fused(make), vectors(4), accumulate_grad_batches=2, recorded="losses")
    with simulated():
        ours = fit(
            fused(make), vectors(4), SuperpipelineStrategy(k=1, **options), accumulate_grad_batches=2, recorded="losses"
        )
    assert_same(ours, plain)


def test_no_buffer_is_sent_where_the_device_has_no_memory_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were sent before the error counted as all: what the next call wrote to the others was lost."""
    average, empty_like = Average(Stack()), torch.empty_like
    host, numbers, seen = dict(average.named_buffers()), count(), list[list[bool]]()
    listener = AveragesOnDevice(average, torch.device("cpu:0"), lambda: True)

    def has_no_memory(*args: Any, **options: Any) -> Tensor:
        if next(numbers) == 3:
            raise torch.OutOfMemoryError("full")
        return empty_like(*args, **options)

    monkeypatch.setattr(torch, "empty_like", has_no_memory)
    with pytest.raises(torch.OutOfMemoryError, match="full"):
        average(Stack())
    assert all(buffer is host[name] for name, buffer in dict.items(average._buffers))
    average.register_forward_pre_hook(
        lambda *_: seen.append([buffer is host[n] for n, buffer in average.named_buffers()])
    )
    average(Stack())
    assert seen == [[False] * len(host)]
    listener.send_back()
    assert all(buffer is host[name] for name, buffer in dict.items(average._buffers))


@pytest.mark.parametrize("layers", [None, ["net"]])
@pytest.mark.parametrize("fixed", [False, True])
def test_averages_stay_where_the_weights_are(fixed: bool, layers: Any) -> None:
    module = Module(Stack())
    module.net.stem.requires_grad_(not fixed)
    module.average = Average(module.net)
    module.norm = nn.BatchNorm1d(16, affine=False)
    module.more = nn.ModuleDict({"average": Average(module.net), "norm": nn.BatchNorm1d(16, affine=False)})
    found = find_layers(module, layers=layers)
    move_to_device(module, found, find_averages(module), torch.device("meta"))
    assert all(buffer.device.type == "cpu" for buffer in (*module.average.buffers(), *module.more["average"].buffers()))
    assert all(buffer.is_meta for buffer in (*module.norm.buffers(), *module.more["norm"].buffers()))
    assert module.device.type == "meta"
