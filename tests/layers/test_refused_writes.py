"""Weights that are given other data where that cannot be followed are named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Block, Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.starts import start


@pytest.mark.parametrize("frozen", ["", "stem", "head"])
def test_parameters_over_the_same_memory(frozen: str) -> None:
    net = Stack()
    net.stem.weight.data = net.head.weight.data
    if frozen:
        net.get_submodule(frozen).requires_grad_(False)
    remedies = r"module_b\.weight = module_a.*module_b\.weight\.data\.clone\(\)"
    with pytest.raises(ValueError, match=r"'net.*weight' are two Parameter objects over the same memory.*" + remedies):
        start(superpipeline(), Module(net))
    net.stem.weight.data = net.stem.weight.data.clone()
    start(superpipeline(), Module(net))


class Permuted(nn.Module):
    """A block of a flow: a permutation, and its transpose for the way back, are views of one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        permutation = torch.eye(16)[torch.randperm(16)]
        self.forth = nn.Parameter(permutation, requires_grad=False)
        self.back = nn.Parameter(permutation.t(), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x @ self.forth)) @ self.back


class Thaws(Module):
    def on_train_epoch_start(self) -> None:
        self.net[1].back.requires_grad_(self.current_epoch == 1)


def test_frozen_parameters_over_the_same_memory_get_a_copy_each() -> None:
    def permuted() -> Module:
        return Module(nn.Sequential(*(Permuted() for _ in range(3))))

    ours = fit(permuted, vectors(), superpipeline(k=1), val=vectors())
    assert_same(ours, fit(permuted, vectors(), val=vectors()))
    with pytest.raises(ValueError, match=r"'net.1.*' are two Parameter objects over the same memory"):
        fit(lambda: Thaws(permuted().net), vectors(), superpipeline(k=1), max_epochs=2)


@pytest.mark.parametrize("change", ["to", "assign", "replace", "double"])
def test_weights_rebound_behind_our_back_are_absorbed_again(change: str) -> None:
    class Rebinds(Module):
        def on_train_epoch_start(self) -> None:
            net: Any = self.net
            if self.current_epoch != 1:
                return
            if change == "to":
                net.blocks[1].to(torch.float64).to(torch.float32)
            elif change == "assign":
                other = Stack()
                torch.manual_seed(5)
                for p in other.parameters():
                    nn.init.normal_(p, std=0.1)
                net.load_state_dict(other.state_dict(), assign=True)
            elif change == "replace":
                net.blocks[2] = Block().requires_grad_(False)
            elif change == "double":
                net.double()

        def loss(self, batch: Any) -> Tensor:
            return super().loss(batch.to(next(self.net.parameters()).dtype))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    make = lambda: Rebinds(Stack())  # noqa: E731
    ours, plain = (fit(make, vectors(), strategy, max_epochs=3) for strategy in (superpipeline(k=1), "auto"))
    assert_equal(ours.state, plain.state, change)
    assert_equal(ours.losses, plain.losses, change)


def test_other_dtypes_outside_a_step_are_named() -> None:
    """Between batches the layers are absorbed again; in the middle of a step or outside any there is no place."""

    class Doubles(Module):
        def on_fit_start(self) -> None:
            self.net.double()
            self.net(torch.ones(2, 16).double())

    with pytest.raises(
        RuntimeError, match=r"'net\.stem\.weight' is torch\.float64 .*Expected torch\.float32 .*between two batches"
    ):
        start(superpipeline(), Doubles(Stack()))


class GivenOther(Module):
    """A library that packs a weight anew when it first runs does this."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        weight = self.net.blocks[1].inner.weight
        weight.data = weight.data.view(-1) if self.other is None else weight.data.to(self.other)
        return loss

    other: torch.dtype | None = None


def test_data_of_another_shape_inside_a_step_is_refused() -> None:
    module = GivenOther(Stack())
    with pytest.raises(
        RuntimeError, match=r"'net.blocks.1.inner.weight' is torch.float32 of shape \(32, 16\) and was given"
    ):
        trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    assert module.net.blocks[1].inner.weight.shape == (32, 16)


@pytest.mark.parametrize("k", [1, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_data_of_another_dtype_before_backward_is_refused(dtype: torch.dtype, k: int) -> None:
    """Plain's backward finds the new weight where it saved the old one, and raises as well."""
    module = GivenOther(Stack())
    module.other = dtype
    with pytest.raises(RuntimeError, match=r"'net.blocks.1.inner.weight' was given torch.* used it as torch.float32"):
        trainer_for(superpipeline(k=k)).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"dtype"):
        trainer_for("auto").fit(module.float(), loader(vectors()))


class Halves(Module):
    """Under mixed precision this weight travels as its cast."""

    def loss(self, batch: Any) -> Tensor:
        self.net.blocks[1].inner.to(torch.bfloat16)
        return super().loss(batch)


def test_data_of_another_dtype_in_mixed_precision() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Halves(Stack()), vectors(), strategy, precision="bf16-mixed")

    with pytest.raises(
        RuntimeError, match=r"and was given torch.bfloat16.*keep_on_gpu=\['net.blocks.1.inner.weight'\]"
    ):
        run(superpipeline(k=1))
    assert_same(run(superpipeline(k=1, keep_on_gpu=["net.blocks.1.inner"])), run("auto"))


def test_a_weight_that_was_kept_from_a_step_is_told_after_the_run() -> None:
    """Pyro's store of parameters keeps what ``pyro.module`` finds within a step."""
    kept: list[Any] = []

    class Keeps(Module):
        def loss(self, batch: Any) -> Tensor:
            kept[:] = [self.net.blocks[1].inner.weight]
            return super().loss(batch)

    module = Keeps(Stack())
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    with pytest.raises(
        RuntimeError, match=r"'net\.blocks\.1\.inner\.weight' was taken within a step.*named_parameters"
    ):
        kept[0].sum()
    assert dict(module.named_parameters())["net.blocks.1.inner.weight"].sum().isfinite()
