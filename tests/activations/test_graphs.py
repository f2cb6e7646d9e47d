"""Graphs that users make and go through in their own ways, with activations that are recomputed or offloaded."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from tests.support.models import Module, Stack, twice, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.saving import MODES
from tests.support.simdevice import simulated
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- graphs that users make


class TwoBackwards(Module):
    """``retain_graph``: the same saved tensors twice."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss * 2)
        optimizer.step()
        return loss


class Partly(Module):
    """A backward that reaches only some units, and a graph that has none."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        unused = self.loss(batch * 2)
        hidden = net.stem(batch)
        for block in net.blocks[:3]:
            hidden = block(hidden)
        (gradient,) = torch.autograd.grad(hidden.square().mean(), hidden, retain_graph=True)
        del unused
        return self.loss(batch) + hidden.mean() + gradient.detach().mean()


class UsersHooks(Module):
    """The user's own hooks around one forward, a function of theirs inside another."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with save_on_cpu():
            loss = self.loss(batch)
        with saved_tensors_hooks(lambda x: x * 2, lambda x: x / 2):
            loss = loss + self.loss(batch)
        return loss + self.loss(batch)


class WritesLater(nn.Module):
    """In-place operations that autograd allows, on views and on what was saved before the write."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x).relu_()
        z = torch.zeros_like(y)
        z[:, :8] = y[:, :8]
        z[:, 8:].add_(y[:, 8:].exp())
        z.mul_(2)
        return x + torch.sigmoid(z).mul(2).add_(1)


_unused: list[Tensor] = []


class WrittenBetween(nn.Module):
    """Saves a tensor, writes it, and saves it again; nobody asks for the gradient of the first use."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        y = x.detach().tanh()
        _unused[:] = [self.scale * y]
        y.add_(1)
        return x + torch.tanh(self.inner(x)) + self.scale * y


class WrittenParts(nn.Module):
    """Two halves of one tensor, each written before it is saved; torch counts the writes of each by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        left, right = torch.unsafe_chunk(x.detach().tanh(), 2, dim=1)
        right.add_(1)
        scaled = self.scale * right
        left.add_(1)
        return x + torch.tanh(self.inner(x)) + torch.cat([self.scale * left, scaled], dim=1)


USERS: dict[str, Any] = {
    "written-between": twice(WrittenBetween),
    "written-parts": twice(WrittenParts),
    "two-backwards": lambda: TwoBackwards(Stack()),
    "partly": lambda: Partly(Stack()),
    "users-hooks": lambda: UsersHooks(Stack()),
    "writes-later": twice(WritesLater),
    "compiled": lambda: _compiled(),
}


def _compiled() -> Module:
    stack = Stack()
    stack.blocks[1].compile(backend="aot_eager")
    stack.blocks[2] = torch.compile(stack.blocks[2], backend="aot_eager")  # type: ignore[assignment]
    return Module(stack)


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", USERS)
def test_what_users_do_with_graphs(name: str, mode: Any) -> None:
    ours = fit(USERS[name], vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(USERS[name], vectors()))


class WritesSaved(nn.Module):
    """What plain autograd refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.exp(self.inner(x))
        y.add_(1)
        return y


def writes_saved() -> Module:
    stack = Stack()
    stack.blocks[0] = WritesSaved()
    return Module(stack)


@pytest.mark.parametrize("strategy", ["auto", superpipeline(activations="offload")], ids=["plain", "offload"])
def test_a_saved_tensor_that_was_written_is_refused(strategy: Any) -> None:
    """Though what has left was not."""
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        fit(writes_saved, vectors(), strategy)


class Copies(Callback):
    """Copies the module in the middle of a step, in both ways that there are."""

    def __init__(self) -> None:
        self.copies: list[Any] = []

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
        block = pl_module.net.blocks[1]
        assert type(block.inner.weight) is not nn.Parameter, "the step has ended"
        self.copies = [copy.deepcopy(block), pickle.loads(pickle.dumps(block))]


@pytest.mark.long("takes a second or more")
def test_a_copy_that_is_made_in_a_step_runs_by_itself() -> None:
    copies = Copies()
    ours = fit(lambda: Module(Stack()), vectors(), superpipeline(activations="recompute"), callbacks=[copies])
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    for each in copies.copies:
        assert "forward" not in vars(each)
        x = torch.randn(4, 16)
        before = each.eval()(x)
        with torch.no_grad():
            each.inner.weight.zero_()
            each.inner.bias.zero_()
        assert not torch.equal(each(x), before), "it ran the original's forward"


class Chunked(Module):
    """A loss that takes the head's weight, and makes no logits."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.stem(batch)
        for block in net.blocks:
            x = block(x)
        labels = torch.arange(len(batch)) % 16
        options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
        return torch.nn.functional.linear_cross_entropy(x, net.head.weight, labels, options=options)  # type: ignore[attr-defined]


@pytest.mark.long("takes a second or more")
@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyOptions"), reason="torch 2.14 has it")
@pytest.mark.parametrize(
    "options",
    first(
        [{}, {"keep_on_gpu": ["net.head"]}, {"layers": ["net.blocks.*"]}],
        {},
        why="where a weight lies, no mode knows of",
    ),
    ids=str,
)
@pytest.mark.parametrize("mode", ["keep", *MODES])
def test_a_chunked_loss(mode: Any, options: dict[str, Any]) -> None:
    with simulated():
        ours = fit(lambda: Chunked(Stack()), vectors(), superpipeline(k=1, activations=mode, **options))
    assert_same(ours, fit(lambda: Chunked(Stack()), vectors()))
