"""Weights that are given another dtype inside a step (``module.to(dtype)`` in a forward) go on as on plain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.engine.graph import Backward
from tests.support.experts import switch
from tests.support.models import Block, Module, tokens, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, fused, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import first


class Router(nn.Module):
    """Computes in float32 whatever the model is in, as SwitchTransformers' router does."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.classifier = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.classifier = self.classifier.to(torch.float32)
        return self.classifier(self.before(x).float()).tanh().to(x.dtype)


def routed() -> Module:
    return Module(nn.Sequential(Block(), Router(), Block(), Router()))


def twice() -> Module:
    """One router before and after others: its layer leaves and comes again within a step."""
    router = Router()
    return Module(nn.Sequential(router, Block(), router, Block(), router))


class UsedBefore(nn.Module):
    """One use of the old weight and one of the new one give one gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.shift = nn.Parameter(torch.zeros(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x) + self.shift
        self.shift.data = self.shift.data.float()
        return torch.tanh(x + self.shift.to(x.dtype))


class WritesLate(Module):
    """A view that outlives the layer's use is written."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.training:
            self.net[1].classifier.bias.detach().add_(0.25)
        return loss


class SeveralSteps(Module):
    """Manual optimization: the optimizer's step, and another forward, come before the next batch."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        for _ in range(3):
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        with torch.no_grad():
            self.net(batch)
        return loss


class CallsBetween(Module):
    """Outside of any step, before the next batch."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen = self.net(batch)
        self.net[1].classifier.weight.data.mul_(0.5)


MODELS: dict[str, Callable[[], pl.LightningModule]] = {
    "routed": routed,
    "twice": twice,
    "used-before": lambda: Module(nn.Sequential(Block(), UsedBefore())),
    "writes-late": lambda: WritesLate(routed().net),
    "several-steps": lambda: SeveralSteps(twice().net),
    "calls-between": lambda: CallsBetween(routed().net),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "one layer at once": {"k": 1},
    "three": {"k": 3},
    "keep_on_gpu": {"k": 1, "keep_on_gpu": ["net.1"]},
    "offload": {"k": 1, "activations": "offload"},
}


def batches() -> Any:
    return [batch.to(torch.bfloat16) for batch in vectors(4)]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", first(OPTIONS, next(iter(OPTIONS)), "keep_on_gpu", why="other options"))
@pytest.mark.parametrize(
    ("name", "accumulated"),
    [(name, 1) for name in MODELS] + [(name, 2) for name in MODELS if name != "several-steps"],
)
def test_training_is_bitwise_equal(name: str, options: str, accumulated: int) -> None:
    more: dict[str, Any] = {"precision": "bf16-true", "accumulate_grad_batches": accumulated, "max_epochs": 2}
    with poisoned():
        ours = fit(MODELS[name], batches(), superpipeline(**OPTIONS[options]), val=batches(), **more)
    assert_same(ours, fit(MODELS[name], batches(), val=batches(), **more))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("sanity", first([0, 1], 1, why="without a forward before"))
@pytest.mark.parametrize("k", first([1, 3], 1, why="a larger window"))
def test_a_router_of_transformers(k: int, sanity: int) -> None:
    options: dict[str, Any] = {"precision": "bf16-true", "max_epochs": 2, "num_sanity_val_steps": sanity}
    ours = fit(switch, tokens(), superpipeline(k=k), val=tokens(), **options)
    assert_same(ours, fit(switch, tokens(), val=tokens(), **options))
    assert {value.dtype for value in ours.state.values()} == {torch.bfloat16, torch.float32}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_updates_in_the_background(overlap: str) -> None:
    strategy = superpipeline(k=1, optimizer_overlap=overlap)
    ours = fit(fused(routed), batches(), strategy, recorded="losses", precision="bf16-true", max_epochs=2)
    assert_same(ours, fit(fused(routed), batches(), recorded="losses", precision="bf16-true", max_epochs=2))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_device_of_its_own(name: str) -> None:
    with simulated():
        ours = fit(MODELS[name], batches(), superpipeline(k=1), precision="bf16-true")
    assert_same(ours, fit(MODELS[name], batches(), precision="bf16-true"))


def stateless() -> Module:
    """Plain's Adam cannot go on: its state is loaded as bfloat16, for the weight before the first forward."""
    module = routed()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1)  # type: ignore[method-assign]
    return module


@pytest.mark.rest("takes tenths of a second")
def test_checkpoints(tmp_path: Path) -> None:
    ours, plain = tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"
    options: dict[str, Any] = {"precision": "bf16-true", "max_steps": 3}
    fit(stateless, batches(), superpipeline(k=1), **options).trainer.save_checkpoint(ours)
    fit(stateless, batches(), **options).trainer.save_checkpoint(plain)
    saved = torch.load(ours, weights_only=True)["state_dict"]
    assert_equal(saved, torch.load(plain, weights_only=True)["state_dict"], "state_dict")
    assert saved["net.1.classifier.weight"].dtype is torch.float32
    options = {"precision": "bf16-true", "max_steps": 6, "max_epochs": 2}
    resumed = fit(stateless, batches(), superpipeline(k=1), ckpt_path=ours, **options)
    assert_same(resumed, fit(stateless, batches(), ckpt_path=plain, **options))


@pytest.mark.rest("takes tenths of a second")
def test_recompute_is_refused_by_name() -> None:
    """What a first forward computes in bfloat16 before the exchange the second one would compute in float32."""
    from sp_lightning.capabilities.activations.recompute import Unrepeatable

    with pytest.raises(Unrepeatable, match=r"'net.1' writes its parameter 'classifier.weight'.*\"net.1\": \"offload\""):
        fit(routed, batches(), superpipeline(activations="recompute"), precision="bf16-true")
    modes = {"net.1": "offload", "net.3": "offload", "**": "recompute"}
    ours = fit(routed, batches(), superpipeline(activations=modes), precision="bf16-true")
    assert_same(ours, fit(routed, batches(), precision="bf16-true"))


def test_a_gradient_of_another_dtype_takes_its_weight_back_under_the_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another thread of autograd might copy back the same weight."""
    owned: list[bool] = []
    arrived: Any = Backward.gradient_arrived

    def watched(backward: Any, *args: Any) -> None:
        write_back = backward.writes.write_back

        def noted(layer: Any) -> None:
            owned.append(backward.lock._is_owned())
            write_back(layer)

        with monkeypatch.context() as patches:
            patches.setattr(backward.writes, "write_back", noted)
            arrived(backward, *args)

    monkeypatch.setattr(Backward, "gradient_arrived", watched)
    fit(routed, vectors(2), superpipeline(k=1, keep_on_gpu=["net.*"]), precision="bf16-true")
    assert owned
    assert all(owned)
