"""Checkpoints and saved-tensor hooks of the user's, around layers and inside them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.support.bare import assert_like_plain, bare
from tests.support.loops import Loop, assert_streams
from tests.support.models import (
    Block,
    CheckpointedCalls,
    EitherOptimization,
    FunctionalCall,
    InsideCheckpoint,
    Module,
    Stack,
    llama,
    tokens,
    vectors,
)
from tests.support.normed import NormedStack
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


class FrozenAndCheckpointed(EitherOptimization):
    """A recompute keeps frozen weights as they are; autograd read NaN from them once their layer had gone.

    Found by fuzzing. Adapters on a checkpointed, frozen base are this case.
    """

    def __init__(self, net: nn.Module, *, manual: bool = False) -> None:
        super().__init__(net, manual=manual)
        for block in self.net.blocks:
            block.inner.requires_grad_(False)


class InsideReentrant(Stack):
    """No module hook runs when this is recomputed, and no hooks are active."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=True)
        return self.head(x)


class KeepsWhatIsSaved(Module):
    """Hooks that return what they are given, as activation offloading does with parameters."""

    def loss(self, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().loss(batch)


def _saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


# torch announces that saved-tensor hooks will see what these checkpoints save; ours keep what is no weight.
SELECTIVE = "ignore:A saved_tensors_hooks context .* is active around a selective activation checkpoint:FutureWarning"


class SelectiveInside(Block):
    """Its dispatch mode counts operators in forward and in the recompute: the engine's own differ between them."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False, context_fn=_saves_products)


class SelectiveAround(Stack):
    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=_saves_products)
        return self.head(x)


def with_checkpointed_forwards() -> pl.LightningModule:
    """As transformers does it: no module hook tells of the recompute, which brings every weight by its stand-in."""
    module = llama(dropout=0.0)
    for layer in module.net.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_saves_products)
    return module


class SavesInside(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.trainer.strategy.lightning_module_state_dict()
        assert all(type(value) is Tensor and value.isfinite().all() for value in state.values())
        loss = self.loss(batch)
        return loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        )


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings(SELECTIVE)
def test_selective_checkpoints_of_transformers() -> None:
    assert_like_plain(with_checkpointed_forwards, tokens())


def test_a_graph_that_outlived_its_run_says_so() -> None:
    class KeepsLoss(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.last = self.loss(batch)
            return self.loss(batch)

    pl.seed_everything(7, verbose=False)
    module = KeepsLoss(Stack())
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match="graph of a run that is over"):
        module.last.backward()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", ["calls", "inside", "all", "kept", "kept-inside"])
def test_weights_that_are_kept_as_they_are(how: str, frozen: bool) -> None:
    assert_like_plain(lambda: Module(NormedStack(how, frozen=frozen)))


def test_bounds_hold_without_module_hooks() -> None:
    strategy = superpipeline(k=1)
    bare(lambda: FunctionalCall(Stack()), strategy)
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


CASES: dict[str, tuple[Callable[[], pl.LightningModule], dict[str, Any]]] = {
    "frozen-checkpoint": (lambda: FrozenAndCheckpointed(CheckpointedCalls(False)), {}),
    "frozen-checkpoint-manual": (lambda: FrozenAndCheckpointed(CheckpointedCalls(False), manual=True), {}),
    "frozen-checkpoint-reentrant": (lambda: FrozenAndCheckpointed(CheckpointedCalls(True), manual=True), {}),
    "frozen-checkpoint-inside": (lambda: FrozenAndCheckpointed(InsideCheckpoint()), {}),
    "frozen-checkpoint-inside-manual": (lambda: FrozenAndCheckpointed(InsideCheckpoint(), manual=True), {}),
    "frozen-checkpoint-inside-reentrant": (lambda: FrozenAndCheckpointed(InsideReentrant()), {}),
    "keeps-what-is-saved": (lambda: KeepsWhatIsSaved(Stack()), {}),
    "saves-inside": (lambda: SavesInside(Stack()), {}),
    "selective-inside": (lambda: Module(nn.Sequential(Block(), SelectiveInside(), Block(), SelectiveInside())), {}),
    "selective-around": (lambda: Module(SelectiveAround()), {}),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings(SELECTIVE)
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
@pytest.mark.parametrize("name", CASES)
def test_like_plain(name: str, precision: str) -> None:
    make, options = CASES[name]
    assert_like_plain(make, **options, precision=precision)


@pytest.mark.long("takes a second or more")
def test_bounds_hold_when_layers_thaw() -> None:
    """The plan was made while layers were frozen, and did not count their gradients."""

    class Thaws(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.net.requires_grad_(False)
            net: Any = self.net
            net.head.requires_grad_(True)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

        def on_train_epoch_start(self) -> None:
            self.net.requires_grad_(self.current_epoch > 0)
            net: Any = self.net
            net.head.requires_grad_(True)

    assert_like_plain(Thaws, max_epochs=2)
    strategy = superpipeline(k=1)
    bare(Thaws, strategy, max_epochs=2)
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


class TiedLinear:
    """As torchtune's: no module, so the weight is read without a call of its module."""

    def __init__(self, tied: nn.Module) -> None:
        self.tied = tied

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tied.weight)  # type: ignore[arg-type]


class ReadsWeights(nn.Module):
    """Reentrant checkpoints of functions that read weights.

    Nothing of the model runs in backward before the first of them: no module was called, and no weight is saved.
    """

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.embedding, self.norm, self.other = nn.Embedding(20, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = TiedLinear(self.embedding)

    def forward(self, numbers: Tensor) -> Tensor:
        again = partial(checkpoint, use_reentrant=True)
        x = self.embedding(numbers)
        for block in self.blocks:
            x = again(block, x)
        x = self.norm(x)
        if self.where == "between":
            x = again(lambda y: F.linear(y, self.other.weight, self.other.bias), x)
        if self.where == "chunks":
            return torch.cat([again(self.head, part) for part in x.chunk(2, 1)], 1)
        return again(self.head, x) if self.where == "head" else x if self.where == "loss" else self.head(x)


class ChecksHead(EitherOptimization):
    def __init__(self, where: str, *, manual: bool) -> None:
        super().__init__(ReadsWeights(where), manual=manual)

    def loss(self, batch: Any) -> Tensor:
        scores, net = self.net(batch), self.net
        if net.where == "loss":
            scores = checkpoint(net.head, scores, use_reentrant=True)  # type: ignore[arg-type]
        return F.cross_entropy(scores.flatten(0, 1).float(), batch.flatten())


def numbers() -> list[Tensor]:
    return list(torch.randint(20, (3, 2, 6), generator=torch.Generator().manual_seed(1)))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", ["loop", "loop in bf16", "automatic", "manual"])
@pytest.mark.parametrize("where", ["head", "chunks", "between", "loss"])
def test_a_backward_ends_with_the_outermost_graph_task(where: str, way: str) -> None:
    """The first of these nested backwards ended the step; nodes that followed found weights of the host on the GPU."""
    make = lambda: ChecksHead(where, manual=way == "manual")  # noqa: E731
    if way.startswith("loop"):
        with simulated():
            assert_streams(make, numbers(), Loop(bf16="bf16" in way), k=1, k_prime=1)
        return
    plain = bare(make, "auto", numbers())
    for context in (nullcontext, simulated):
        with context():
            ours = bare(make, superpipeline(k=1, k_prime=1), numbers())
        assert_equal(ours, plain, context.__name__)
