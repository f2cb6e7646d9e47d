"""Small nets and modules in unusual forms: what they do is said by each; and callbacks for them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.updates.background import _PendingUpdate
from tests.support.models import Block, Module, Stack
from tests.support.runs import superpipeline

# ---------------------------------------------------------------------- modules that log, see and fail


class Net(Module):
    """Logs in all ways; its optimizer is fused, so that updates may run in the background."""

    def __init__(self, net: nn.Module | None = None, lr: float = 1e-2) -> None:
        super().__init__(Stack(4) if net is None else net)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=4)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=4, prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=self.lr, fused=True)


def middle(module: Any) -> Tensor:
    """A weight of a layer that is streamed, as it is now."""
    return module.net.blocks[1].inner.weight.detach().clone()


@contextlib.contextmanager
def clock(module: Any, *names: str) -> Iterator[None]:
    """Time passes in a module of Lightning's by one second with each look at it."""
    seconds = itertools.count().__next__
    with mock.patch.object(module, "time", SimpleNamespace(**dict.fromkeys(names, lambda: float(seconds())))):
        yield


@contextlib.contextmanager
def fails(where: str) -> Iterator[None]:
    """Lightning ends the program after an interrupt."""
    with pytest.raises(SystemExit if where == "interrupt" else KeyError, match=None if where == "interrupt" else where):
        yield


class Does(Callback):
    """Calls functions from hooks: ``Does(on_train_batch_end=f)``; they get the trainer, the module, and the rest."""

    def __init__(self, **hooks: Callable[..., None]) -> None:
        for name, hook in hooks.items():
            setattr(self, name, hook)


class Fails(Callback):
    """Raises somewhere in the fourth batch."""

    def __init__(self, where: str) -> None:
        self.where = where

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._fail("before", batch_idx)
        self._fail("interrupt", batch_idx)
        if self.where == "forward" and batch_idx == 3:
            pl_module.net.blocks[2].register_forward_hook(lambda *_: self._fail("forward", 3))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._fail("after", batch_idx)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._fail("validation", 3)

    def _fail(self, where: str, batch_idx: int) -> None:
        if where == self.where and batch_idx == 3:
            raise (KeyboardInterrupt if where == "interrupt" else KeyError)(where)


class WithExtras(Net):
    """Saves more, and hyperparameters."""

    def __init__(self, depth: int = 3, rate: float = 1e-2) -> None:
        super().__init__(Stack(depth), rate)
        self.save_hyperparameters()
        self.seen = torch.zeros(16)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen += batch.mean(0)
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["seen"] = self.seen.clone()
        checkpoint["norm"] = sum(value.norm() for value in checkpoint["state_dict"].values())
        checkpoint["weight"] = self.net.blocks[0].inner.weight.detach().clone()

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint["seen"]
        checkpoint["state_dict"]["net.head.bias"] = checkpoint["state_dict"]["net.head.bias"] + 1


class Scheduled(Net):
    """Schedulers by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        chosen: dict[str, Any] = {
            "epoch": lambda: schedulers.StepLR(optimizer, 1, 0.5),
            "step": lambda: {"scheduler": schedulers.ExponentialLR(optimizer, 0.8), "interval": "step", "frequency": 2},
            "plateau": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9), "monitor": "val_loss",
            },
            "plateau, step": lambda: {
                "scheduler": schedulers.ReduceLROnPlateau(optimizer, patience=1, threshold=0.9),
                "monitor": "train_loss_step", "interval": "step",
            },
            "one cycle": lambda: {
                "scheduler": schedulers.OneCycleLR(optimizer, 0.1, total_steps=20), "interval": "step", "name": "cycle",
            },
            "sequential": lambda: {
                "scheduler": schedulers.SequentialLR(
                    optimizer,
                    [schedulers.LinearLR(optimizer, 0.1, total_iters=3), schedulers.CosineAnnealingLR(optimizer, 9)],
                    [3],
                ),
                "interval": "step",
            },
        }  # fmt: skip
        return {"optimizer": optimizer, "lr_scheduler": chosen[self.kind]()}


class Summarized(Net):
    example_input_array = torch.ones(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def assert_changing(values: Sequence[Tensor]) -> None:
    """A sequence that stays as it is would be equal for the wrong reason."""
    assert len(values) > 2
    assert len({bytes(value.flatten().view(torch.uint8).tolist()) for value in values}) > 2


# ---------------------------------------------------------------------- modules that note what they see


class Looks(Module):
    """Looks at everything at once: weights and gradients by old references, state through the optimizer and through Lightning."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []
        self.references = [dict(self.named_parameters())["net.head.weight"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            self.look(batch_idx)
        return super().training_step(batch, batch_idx)

    def look(self, batch_idx: int) -> None:
        weight = self.references[0]
        optimizer: Any = self.optimizers()
        looks: list[Callable[[], Any]] = [
            lambda: weight.detach().clone(),
            lambda: weight.grad.clone(),
            lambda: weight.data.sum(),
            lambda: [value["exp_avg"].clone() for value in optimizer.state.values()],
            lambda: optimizer.optimizer.state_dict()["state"][3]["exp_avg_sq"].clone(),
            lambda: [p.detach().clone() for p in self.parameters()],
            lambda: torch._foreach_norm([weight]),
        ]
        self.seen.append(looks[batch_idx % len(looks)]())
        assert not issubclass(type(weight), _PendingUpdate)  # within a step it has another role, as a captured weight


class Seeing(Module):
    """Notes what it sees, and does something with the weights of its layers before or while they are called."""

    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(4))
        self.seen: list[Any] = []

    def see(self, *things: Any) -> None:
        self.seen.extend(thing.detach().clone() if isinstance(thing, Tensor) else thing for thing in things)


class Manual(Seeing):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net)
        self.automatic_optimization = False


class Masked(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * (self.weight > 0), self.bias) + F.linear(x, self.weight, self.bias)


class OwnLinear(Block):
    """A subclass, an instance with a forward of its own, and a module that is called with its weight by name."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Masked(16, 32)
        self.more = nn.Linear(16, 16)
        self.more.forward = lambda x: F.linear(input=x, weight=self.more.weight * 2, bias=self.more.bias)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.more(x)
        own = {"weight": self.outer.weight * 0.5, "bias": self.outer.bias.detach()}
        return super().forward(x) + torch.func.functional_call(self.outer, own, (self.inner(x),))


class Readers(nn.Module):
    """Modules that read their children's weights past their calls, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.decoder = nn.TransformerDecoderLayer(16, 2, 32, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x[None]
        x = self.encoder(x + self.attention(x, x, x)[0])
        return self.decoder(x, x)[0]


class Tied(nn.Module):
    """One weight in two linear layers travels as a cast; one that an embedding has as well does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        self.table = nn.Embedding(16, 16)
        self.head = nn.Linear(16, 16, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x + self.table(torch.arange(x.shape[0])))


def of_blocks(block: type[Block]) -> Any:
    class Of(Stack):
        def __init__(self) -> None:
            super().__init__(0)
            self.blocks = nn.ModuleList(block() for _ in range(3))

    Of.__name__ = block.__name__
    return Of


# ---------------------------------------------------------------------- norms under checkpoints


class Normed(nn.Module):
    """A norm saves its weight as it is, where a linear layer saves a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.norm = nn.LayerNorm(16)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.norm(torch.tanh(self.linear(x))))


class NormedStack(nn.Module):
    def __init__(self, how: str, *, frozen: bool) -> None:
        super().__init__()
        self.how = how
        self.blocks = nn.ModuleList(Normed() for _ in range(4))
        for block in self.blocks:
            block.norm.requires_grad_(not frozen)

    def forward(self, x: Tensor) -> Tensor:
        x = x.clone().requires_grad_() if self.training else x
        for block in self.blocks:
            if self.how == "calls":
                x = checkpoint(block, x, use_reentrant=False)
            elif self.how == "inside":
                x = checkpoint(block.forward, x, use_reentrant=False)
            elif self.how == "all":
                x = checkpoint(block, x, use_reentrant=False, early_stop=False)
            else:
                with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
                    x = block(x) if self.how == "kept" else block.forward(x)
        return x


# ---------------------------------------------------------------------- modules whose optimizer is given


def adamw(parameters: Any) -> Optimizer:
    """AdamW as it comes."""
    return torch.optim.AdamW(parameters, lr=1e-2)


class Stepped(Module):
    """A stack of blocks.

    Args:
        make: makes its optimizer.
    """

    def __init__(self, make: Callable[[Any], Optimizer] = adamw) -> None:
        super().__init__(Stack())
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def on_device(**options: Any) -> SuperpipelineStrategy:
    """The smallest window, with steps on the device."""
    return superpipeline(k=1, optimizer_on="gpu", **options)


class Alternates(nn.Module):
    """Two parts of the same shapes that take turns: in each step one has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.parts[self.calls % 2](x))


def alternating() -> Stepped:
    """Blocks whose parts take turns, so that the state of the second ones is made while the first ones keep theirs."""
    module = Stepped()
    module.net = nn.Sequential(*(Alternates() for _ in range(4)))
    return module


class Wrapper(torch.optim.Optimizer):
    """As accelerate's ``AcceleratedOptimizer``, which does not call its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    state: Any = property(lambda self: self.inner.state)
    param_groups: Any = property(lambda self: self.inner.param_groups)
    defaults: Any = property(lambda self: self.inner.defaults)

    def state_dict(self) -> Any:
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        self.inner.load_state_dict(state_dict)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)
