"""Parameters of all kinds, and ways to come by them, are those of the module."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from tests.support.bare import assert_like_plain, bare
from tests.support.models import Block, FunctionalCall, Module, Stack, vectors
from tests.support.moments import At
from tests.support.runs import assert_equal, fit, superpipeline
from tests.support.tiers import first


class LooksParametersUp(Module):
    def __init__(self) -> None:
        super().__init__(Stack(4))
        self.start = {p: p.detach().clone() for p in self.parameters()}
        for p in self.parameters():
            p.no_decay = p.ndim < 2  # type: ignore[attr-defined]

    def loss(self, batch: Any) -> Tensor:
        assert all((p == p).all() for p in self.parameters()), "compared with itself it is elementwise, as ever"
        decayed = [p for p in self.parameters() if not getattr(p, "no_decay", False)]
        assert len(decayed) == 10
        distance = sum((p - self.start[p]).square().sum() for p in self.parameters())
        return super().loss(batch) + distance + 0.1 * sum(p.square().sum() for p in decayed)


class Scale(nn.Parameter):
    def doubled(self) -> Tensor:
        return self * 2


class OwnParameterClass(Module):
    def __init__(self) -> None:
        super().__init__(Stack(3))
        self.net.scale = Scale(torch.ones(16))
        self.net.big = Scale(torch.ones(64, 64))

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        assert isinstance(net.big, Scale)
        assert isinstance(net.scale, Scale)
        return (net(batch) * net.scale.doubled()).square().mean() + net.big.doubled().mean()


class TiesInForward(Stack):
    def forward(self, x: Tensor) -> Tensor:
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        return super().forward(x)


class FrozenAttributes(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "weight" in self._parameters:
            raise AttributeError("frozen weight")
        super().__setattr__(name, value)


class OwnParameters(Stack):
    def parameters(self) -> Any:  # type: ignore[override]
        return iter([p for _, p in self.named_parameters()])


class MakesParameters(Module):
    """``type(p)`` in a step is a class of ours, which makes ordinary parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net.blocks[2].inner.weight
        cast = weight.as_subclass(Tensor).square().mean()
        made = type(weight)(weight.data * 2)
        assert type(made) is nn.Parameter
        return self.loss(batch) + made.mean() + cast


class Empty(nn.Module):
    """Layers without a byte, views of which are kept: extra slots have no address."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(0, 4))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight.sum()

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Empty.Layer() for _ in range(6))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(layer.weight.detach())
        return self.head(x)


def test_layers_without_a_byte() -> None:
    ours = bare(lambda: Module(Empty()), superpipeline(k=1, layers=["net.layers.*"]))
    assert_equal(ours, bare(lambda: Module(Empty()), "auto"), "empty")


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "looks-parameters-up": (lambda: LooksParametersUp(), {}),
    "own-parameter-class": (lambda: OwnParameterClass(), {}),
    "ties-in-forward": (lambda: Module(TiesInForward()), {"max_epochs": 2}),
    "frozen-attributes": (lambda: Module(nn.Sequential(FrozenAttributes(16, 16), Block(), Block())), {}),
    "own-parameters-method": (lambda: Module(OwnParameters()), {}),
    "makes-parameters": (lambda: MakesParameters(Stack()), {}),
    "functional-call": (lambda: FunctionalCall(Stack()), {}),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)


class Tagged(nn.Parameter):
    """A class with attributes, which says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = Tagged(self.data.clone(), self.requires_grad)
        copied.copied_from = self.tag
        return copied


class CopiedInStep(Module):
    """What copies and files of a module have of its weights, and what is left of attributes that a step sets and deletes."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for index, block in enumerate(self.net.blocks):
            block.inner.weight = Tagged(block.inner.weight.data)
            block.inner.weight.tag = index
            block.outer.weight = Scale(
                block.outer.weight.data
            )  # torch's own way of copying: the class without attributes
            block.outer.weight.tag = index
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        file = io.BytesIO()
        torch.save(self.net, file)
        file.seek(0)
        for net in (copy.deepcopy(self.net), copy.deepcopy(torch.load(file, weights_only=False))):
            for weight in (net.blocks[1].inner.weight, net.blocks[1].outer.weight):
                self.seen.append((type(weight).__name__, dict(vars(weight)), weight.detach().clone()))
            self.seen.append(net.eval()(batch).detach())
        for parameter in self.parameters():
            parameter.note = 1  # type: ignore[attr-defined]
            del parameter.note  # type: ignore[attr-defined]
            with pytest.raises(AttributeError):
                del parameter.note  # type: ignore[attr-defined]
            self.seen.append(hasattr(parameter, "note"))
            del parameter.grad  # as torch does it
        return super().loss(batch)


@pytest.mark.long("takes a second or more")
def test_copies_and_files_of_weights_in_a_step_are_those_of_their_class() -> None:
    """A deep copy lost the weight's class, a file its attributes; an attribute that was set could not be deleted (Opacus)."""
    assert_like_plain(CopiedInStep)


class Deciding(Tensor):
    """Torch's own treatment of a user's class: results are of that class."""


def test_between_two_batches_of_an_evaluation_results_are_of_the_users_class() -> None:
    def multiply(m: Any) -> None:
        weight = m.net[0].first.weight
        for result in (
            weight * torch.ones(16).as_subclass(Deciding),
            torch.pow(torch.full((), 2.0).as_subclass(Deciding), weight),
        ):
            m.seen.append((type(result).__name__, result.detach().as_subclass(Tensor).clone()))

    ours, plain = (
        fit(lambda: At(on_validation_batch_end=multiply), vectors(1), strategy, val=vectors(2))
        for strategy in (superpipeline(k=1), "auto")
    )
    assert_equal(ours.module.seen, plain.module.seen, "results and their classes")  # type: ignore[union-attr]
    assert {name for name, _ in plain.module.seen} == {"Deciding"}  # type: ignore[union-attr]
