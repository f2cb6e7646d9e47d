"""Checkpoints and saved-tensor hooks of the user's, around layers and inside them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.equality.rows import program, tiers
from tests.support.models import (
    Block,
    EitherOptimization,
    FunctionalCall,
    Module,
    Stack,
    llama,
    tokens,
)  # fmt: skip
from tests.support.nets import Normed
from tests.support.runs import Outcome

WINDOWS = [f"users, k={k}, two epochs" for k in (1, 2, "all")]
EACH = tiers(rest=WINDOWS[:1], long=[*WINDOWS[1:], "keep, k=1, bf16-mixed", "keep, k=1, simulated"])


def within_plan(ours: Outcome) -> None:
    strategy: Any = ours.trainer.strategy
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


def _saves_products() -> Any:
    return create_selective_checkpoint_contexts([torch.ops.aten.mm.default, torch.ops.aten.addmm.default])


def kept(call: Any, x: Tensor) -> Any:
    """Hooks that return what they are given, as activation offloading does with parameters."""
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return call(x)


again = partial(checkpoint, use_reentrant=False)
reentrant = partial(checkpoint, use_reentrant=True)
CALLS: dict[str, Callable[[Any, Tensor], Any]] = {
    "calls": again,
    "inside": lambda block, x: again(block.forward, x),  # no module hook runs when this is recomputed
    "without an early stop": partial(again, early_stop=False),
    "reentrant calls": reentrant,
    "reentrant inside": lambda block, x: reentrant(block.forward, x),  # and no hooks are active
    "hooks that keep": kept,
    "hooks that keep, inside": lambda block, x: kept(block.forward, x),
    # Its dispatch mode counts operators in forward and in the recompute: the engine's own differ between them.
    "selective calls": partial(again, context_fn=_saves_products),
    "selective inside": lambda block, x: again(block.forward, x, context_fn=_saves_products),
}


class Around(EitherOptimization):
    """Calls blocks in a way of its own, under ``nn.Module.__call__`` or past it."""

    def __init__(
        self, call: Callable[[Any, Tensor], Any], block: type[nn.Module], frozen: str, *, manual: bool
    ) -> None:
        super().__init__(nn.Sequential(*(block() for _ in range(4))), manual=manual)
        self.call = call
        for name, child in self.net.named_modules():
            if frozen and name.endswith(frozen):
                child.requires_grad_(False)

    def loss(self, batch: Tensor) -> Tensor:
        x = batch.clone().requires_grad_() if self.training else batch
        for block in self.net:  # type: ignore[union-attr]
            x = self.call(block, x)
        return x.square().mean()


NETS: dict[str, tuple[type[nn.Module], str, str]] = {
    "norms": (Normed, "", "a norm saves its weight as it is, where a linear layer saves a view of it"),
    "frozen norms": (Normed, "norm", "a recompute keeps frozen weights as they are"),
    # Found by fuzzing. Adapters on a checkpointed, frozen base are this case.
    "frozen layers": (Block, "inner", "autograd read NaN from frozen weights once their layer had gone"),
}
for (name, call), (net, (block, frozen, covers)) in product(CALLS.items(), NETS.items()):
    for manual in (False, True) if net == "frozen layers" else (False,):
        program(
            f"checkpoint: {net}, {name}{', manual' if manual else ''}", covers=covers,
            variants=tiers(long=EACH) if manual and "reentrant" not in name else EACH,
        )(partial(Around, call, block, frozen, manual=manual))  # fmt: skip


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


@program("checkpoint: selective, around forwards of transformers", tiers(long=WINDOWS), batches=tokens)
def with_checkpointed_forwards() -> Any:
    """No module hook tells of the recompute, which brings every weight by its stand-in."""
    module = llama(dropout=0.0)
    for layer in module.net.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False, context_fn=_saves_products)
    return module


program(
    "memory: weights that are computed", tiers("users, k=1, two epochs"), also=within_plan,
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
        x = self.embedding(numbers)
        for block in self.blocks:
            x = reentrant(block, x)
        x = self.norm(x)
        if self.where == "between":
            x = reentrant(lambda y: F.linear(y, self.other.weight, self.other.bias), x)
        if self.where == "chunks":
            return torch.cat([reentrant(self.head, part) for part in x.chunk(2, 1)], 1)
        return reentrant(self.head, x) if self.where == "head" else x if self.where == "loss" else self.head(x)


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
