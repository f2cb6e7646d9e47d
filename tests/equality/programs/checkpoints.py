"""Checkpoints and saved-tensor hooks of the user's, around layers and inside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.equality.rows import program, tiers
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
)  # fmt: skip
from tests.support.normed import NormedStack
from tests.support.runs import Outcome

WINDOWS = [f"users' path, k={k}" for k in ("1, k'=1", "2, k'=2", "all, k'=1")]
EACH = tiers(rest=WINDOWS[:1], long=[*WINDOWS[1:], "keep, k=1, bf16-mixed", "keep, k=1, simulated"])


def within_plan(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


for how in ("calls", "inside", "all", "kept", "kept-inside"):
    for frozen in (True, False):
        program(
            f"checkpoint: norms that save their weights as they are, {how}{', frozen' if frozen else ''}", EACH,
            covers="a norm saves its weight as it is, where a linear layer saves a view of it",
        )(lambda how=how, frozen=frozen: Module(NormedStack(how, frozen=frozen)))  # fmt: skip


class Frozen(EitherOptimization):
    """A recompute keeps frozen weights as they are; autograd read NaN from them once their layer had gone.

    Found by fuzzing. Adapters on a checkpointed, frozen base are this case.
    """

    def __init__(self, net: nn.Module, *, manual: bool = False) -> None:
        super().__init__(net, manual=manual)
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.inner.requires_grad_(False)


class InsideReentrant(Stack):
    """No module hook runs when this is recomputed, and no hooks are active."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block.forward, x, use_reentrant=True)
        return self.head(x)


for name, net, manual in (
    ("calls", partial(CheckpointedCalls, False), False), ("calls, manual", partial(CheckpointedCalls, False), True),
    ("reentrant calls, manual", partial(CheckpointedCalls, True), True), ("inside", InsideCheckpoint, False),
    ("inside, manual", InsideCheckpoint, True), ("reentrant inside", InsideReentrant, False),
):  # fmt: skip
    program(f"checkpoint: frozen weights, {name}", EACH, covers=Frozen.__doc__ or "")(
        lambda net=net, manual=manual: Frozen(net(), manual=manual)
    )


@program("saved-tensor hooks: kept as they are", EACH)
class KeepsWhatIsSaved(Module):
    """Hooks that return what they are given, as activation offloading does with parameters."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def loss(self, batch: Any) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return super().loss(batch)


@program("checkpoint files: saved inside a step", EACH)
class SavesInside(Module):
    """The state that is saved has ordinary, finite tensors; gradients are asked for with a graph of their own."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.trainer.strategy.lightning_module_state_dict()
        assert all(type(value) is Tensor and value.isfinite().all() for value in state.values())
        loss = self.loss(batch)
        gradients = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(each.square().sum() for each in gradients)


def _saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


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


for name, make in (
    ("inside", lambda: nn.Sequential(Block(), SelectiveInside(), Block(), SelectiveInside())), ("around", SelectiveAround),
):  # fmt: skip
    program(f"checkpoint: selective, {name}", EACH, covers=SelectiveInside.__doc__ or "")(
        lambda make=make: Module(make())
    )


@program("checkpoint: selective, around forwards of transformers", tiers(long=WINDOWS), batches=tokens)
def with_checkpointed_forwards() -> Any:
    """No module hook tells of the recompute, which brings every weight by its stand-in."""
    module = llama(dropout=0.0)
    for layer in module.net.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_saves_products)
    return module


program(
    "memory: weights that are computed", tiers("users' path, k=1, k'=1"), also=within_plan,
    covers="no module hook tells that a layer's backward begins",
)(lambda: FunctionalCall(Stack()))  # fmt: skip


@program("memory: layers that thaw", tiers(rest=WINDOWS[:1], long=WINDOWS[1:]), also=within_plan)
class Thaws(Module):
    """The plan was made while layers were frozen, and did not count their gradients."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.thaw(False)

    def thaw(self, trained: bool) -> None:
        self.net.requires_grad_(trained)
        self.net.head.requires_grad_(True)  # type: ignore[union-attr]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_start(self) -> None:
        self.thaw(self.current_epoch > 0)


class TiedLinear:
    """As torchtune's: no module, so the weight is read without a call of its module."""

    def __init__(self, tied: nn.Module) -> None:
        self.tied = tied

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.tied.weight)  # type: ignore[arg-type]


class ReadsWeights(nn.Module):
    """Reentrant checkpoints of functions that read weights.

    Nothing of the model runs in backward before the first of them: no module was called, and no weight is saved. The first of
    these nested backwards ended the step; nodes that followed found weights of the host on the GPU.
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


HEADS: dict[str, Callable[[], Any]] = {
    f"{where}{', manual' if manual else ''}": partial(ChecksHead, where, manual=manual)
    for where in ("head", "chunks", "between", "loss") for manual in (False, True)
}  # fmt: skip
for name, make in HEADS.items():
    program(
        f"checkpoint: reentrant, of functions that read weights, {name}",
        tiers(rest=[WINDOWS[0], "keep, k=1, simulated"], long=["keep, k=1, bf16-mixed"]), batches=numbers,
        covers=ReadsWeights.__doc__ or "",
    )(make)  # fmt: skip


def backward_after_the_run(ours: Outcome) -> None:
    with pytest.raises(RuntimeError, match="graph of a run that is over"):
        ours.module.last.backward()  # type: ignore[union-attr, operator]


@program("backward: after the run", tiers("keep, k=1"), also=backward_after_the_run)
class KeepsLoss(Module):
    """What its graph saved is on no device any more."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = self.loss(batch)
        return self.loss(batch)
