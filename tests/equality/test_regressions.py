"""Defects that were found, each with its story. All were silent or masked another error before.

These run without any callback of the tests', so that the path that users take is taken: with copies kept and the next
batch's layers fetched early.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.engine.streamer import Streamer
from tests.support.engine import streamer_of
from tests.support.models import (
    CASES,
    Block,
    CheckpointedCalls,
    InsideCheckpoint,
    Module,
    Stack,
    llama,
    tokens,
    vectors,
)
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated


def bare(make: Callable[[], pl.LightningModule], strategy: Any, batches: Any = None, **options: Any) -> list[Any]:
    """Train without callbacks; what is left, and what the module noted in ``seen``."""
    pl.seed_everything(7, verbose=False)
    module = make()
    trainer = trainer_for(strategy, **options)
    trainer.fit(module, loader(vectors() if batches is None else batches))
    optimizers = [copy.deepcopy(each.state_dict()) for each in trainer.optimizers]
    return [dict(module.state_dict()), optimizers, getattr(module, "seen", None)]


def assert_like_plain(make: Callable[[], pl.LightningModule], batches: Any = None, **options: Any) -> None:
    plain = bare(make, "auto", batches, **options)
    for k, k_prime in ((1, 1), (2, 2), (99, 1)):
        assert_equal(bare(make, superpipeline(k=k, k_prime=k_prime), batches, **options), plain, f"k={k}")


@pytest.mark.parametrize("name", CASES)
def test_the_path_that_users_take(name: str) -> None:
    """The recorder of the equality tests overrides a hook, so with it copies were never kept: this runs without it."""
    if name == "checkpoint-whole":
        pytest.skip("its batches need gradients of their own")
    assert_like_plain(CASES[name].make, CASES[name].batches(), max_epochs=2)


class Manual(Module):
    def __init__(self, net: nn.Module | None = None) -> None:
        super().__init__(net or Stack(4))
        self.automatic_optimization = False
        self.seen: list[Any] = []


class StepsByHand(Manual):
    """Tutorial style: no optimizer, ``p.data -= lr * p.grad``, which bumps no version."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for _ in range(batch_idx + 1):
            loss = self.loss(batch)
            self.zero_grad()
            loss.backward()
            for p in self.parameters():
                p.data -= 0.1 * p.grad

    def configure_optimizers(self) -> Any:
        return None


class ClampsAfterBackward(Module):
    def on_after_backward(self) -> None:
        for p in self.parameters():
            p.data.clamp_(-0.1, 0.1)


class OwnOptimizerStep(Module):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer_closure()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


class WritesBetweenForwardAndBackward(Module):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)


class WritesDataInHooks(Module):
    """Outside the step's own code each use of a weight lets go of its layer at once: the write came too late, and was lost."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.data.mul_(0.9)


class LineSearch(Manual):
    """Rebinds ``.data`` of every parameter inside the step, as TRPO does."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.loss(batch).backward()
        start = nn.utils.parameters_to_vector(self.parameters()).detach()
        gradient = torch.cat([p.grad.flatten() for p in self.parameters()])  # type: ignore[union-attr]
        self.zero_grad()
        for size in (1.0, 0.5, 0.1):
            nn.utils.vector_to_parameters(start - size * gradient, self.parameters())
            self.seen.append(self.loss(batch).item())

    def configure_optimizers(self) -> Any:
        return None


class RebindsThenCalls(Module):
    def on_train_epoch_start(self) -> None:
        for p in self.parameters():
            p.data = p.data * 0.5
        self.seen = self.net(torch.ones(1, 16)).sum().item()


class RetriesAfterFailure(Manual):
    """Out of memory in backward, then a smaller batch: nothing of the first may be in the second."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        net: Any = self.net
        optimizer.zero_grad()
        y = net.stem(batch)
        y.register_hook(lambda _: (_ for _ in ()).throw(MemoryError("out of memory")))
        with suppress(MemoryError):
            loss = net.head(net.blocks[0](y)).sum()
            if batch_idx == 0:
                loss.backward()
            else:
                self.manual_backward(loss)
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch[:2]))
        self.seen.append(net.head.weight.grad.clone())
        optimizer.step()


class WritesThroughOldViews(Module):
    """Views taken before the forward and written after it: an average over ``[p.detach() for p in …]``."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        net: Any = self.net
        views = [block.inner.weight.detach() for block in net.blocks] + [net.blocks[1].outer.weight.data]
        self.loss(batch)
        if batch_idx == 2:
            torch._foreach_mul_(views, 0.5)
        return self.loss(batch)


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


class HookedGradients(Module):
    """A hook on a parameter counts for ``torch.autograd.grad`` as well."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for p in self.parameters():
            p.register_hook(lambda grad: grad.clamp(-1e-3, 1e-3))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + sum(g.sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True))


class SometimesNoBackward(Module):
    def __init__(self) -> None:
        super().__init__(Scaled())
        self.seen: list[Any] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx != 1:
            loss.backward()

    def on_train_batch_end(self, *args: Any) -> None:
        net: Any = self.net
        self.seen.append((type(net.scale).__name__, net.scale.sum().item()))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(Block() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * self.scale
        return x


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


class FrozenAndCheckpointed(Module):
    """A recompute keeps frozen weights as they are; autograd read NaN from them once their layer had gone.

    Found by fuzzing. Adapters on a checkpointed, frozen base are this case.
    """

    def __init__(self, net: nn.Module, *, manual: bool = False) -> None:
        super().__init__(net)
        self.automatic_optimization = not manual
        for block in self.net.blocks:
            block.inner.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss


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


class InnerOptimizer(Manual):
    """An optimizer over ``self.parameters()`` made inside the step, as meta-learning does: residents kept their value."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inner = torch.optim.SGD(self.parameters(), lr=0.05)
        for _ in range(2):
            inner.zero_grad()
            self.loss(batch).backward()
            inner.step()
        kept = list(self.parameters())
        self.loss(batch).backward()
        with torch.no_grad():
            for p in kept:
                p.sub_(0.05 * p.grad)  # type: ignore[operator]
        self.seen.append(sum(p.sum().item() for p in self.parameters()))
        self.zero_grad()


class SwapsData(Module):
    """Weights and their running mean change places by ``.data`` for validation, and back."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.mean = copy.deepcopy(self.net).requires_grad_(False)
        self.seen: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for p, mean in zip(self.net.parameters(), self.mean.parameters(), strict=True):
            mean.data.lerp_(p.data, 0.1)
            p.data, mean.data = mean.data, p.data
        self.seen.append(self.loss(torch.ones(2, 16)).item())
        inner = self.net.blocks[0].inner, self.net.blocks[2].inner
        inner[0].weight.data, inner[1].weight.data = inner[1].weight.data, inner[0].weight.data


class FusedInnerOptimizer(Manual):
    """A fused step bumps no version of what it writes."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.net.head.parameters())
        inner = torch.optim.SGD(parameters, lr=0.1, fused=True)
        for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
            p.grad = gradient
        inner.step()
        inner.zero_grad()
        self.seen.append(self.loss(batch).item())


class AddsGroupInStep(Module):
    """The group has the device's parameters, and the optimizer goes on for many steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.net.blocks.parameters(), lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.trainer.optimizers[0].add_param_group({"params": list(self.net.head.parameters()), "fused": True})
        return self.loss(batch)


class MakesParameters(Module):
    """``type(p)`` in a step is a class of ours, which makes ordinary parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net.blocks[2].inner.weight
        cast = weight.as_subclass(Tensor).square().mean()
        made = type(weight)(weight.data * 2)
        assert type(made) is nn.Parameter
        return self.loss(batch) + made.mean() + cast


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


class ExtraBackward(Module):
    """A backward inside ``training_step`` ended the step: what came after it found the host's parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch * 0.5).backward()
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)


class SavesInside(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        state = self.trainer.strategy.lightning_module_state_dict()
        assert all(type(value) is Tensor and value.isfinite().all() for value in state.values())
        loss = self.loss(batch)
        return loss + sum(
            g.square().sum() for g in torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        )


class Threads(Module):
    """Calls in a thread of its own build graphs too; hooks were pushed on one thread and popped on another."""

    def loss(self, batch: Any) -> Tensor:
        with ThreadPoolExecutor(1) as pool:
            first = pool.submit(super().loss, batch).result()
        return first + super().loss(batch * 0.5)


class BackwardWithInputs(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch), inputs=list(self.parameters())[2:6])
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])
        optimizer.step()


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


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


class HooksWhatIsFrozen(Module):
    """The user's hooks were once put on device parameters when they came up, and autograd refused frozen ones."""

    def __init__(self) -> None:
        super().__init__(Stack())
        weight = self.net.blocks[1].inner.weight
        weight.register_hook(doubled)
        weight.requires_grad_(False)


class HooksWhatIsThawed(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net.blocks[1].requires_grad_(True)
            self.net.blocks[1].inner.weight.register_hook(doubled)


class HooksInBackward(Module):
    """Registered on a reference from before the step, while backward runs: it counts in that backward."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = [self.net.blocks[0].inner.weight]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch
        for block in self.net.blocks:
            x = block(x)
        x.register_hook(lambda gradient: self.captured[0].register_hook(doubled) and None)
        return x.square().mean()


class HooksWhatIsKept(Module):
    """The graph has the device parameter that saved-tensor hooks kept; the hook must not be put on its successor only."""

    def __init__(self) -> None:
        super().__init__(NormedStack("kept", frozen=False))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            for block in self.net.blocks:
                block.norm.weight.register_hook(doubled)
        return loss


class SharesMemory(Module):
    """In place: the slot's transfers went on to where the memory had been."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net.blocks[1].inner.weight.detach().share_memory_()
        return self.loss(batch)


class SharesGradients(Module):
    """What another process was sent stays what it was."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Tensor] = []
        self.mapped: list[Tensor] = []

    def on_after_backward(self) -> None:
        handle = self.net.blocks[1].inner.weight.grad.untyped_storage()._share_filename_cpu_()
        self.mapped.append(torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle)))
        self.seen.append(torch.stack([gradient.sum() for gradient in self.mapped]))


class Transposes(Module):
    """Same address, shape and dtype, other strides."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            weight = self.net.head.weight
            weight.data = weight.data.t()


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


class FreezesBeforeBackward(Module):
    """A parameter that is frozen between forward and backward takes no gradient, whoever freezes it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for p in self.trainer.optimizers[0].param_groups[0]["params"][:4]:
            p.requires_grad_(batch_idx != 1)
        return loss


class Copies(Module):
    """A copy of a streamed module is a plain module, made inside a step or between two."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.copied = [copy.deepcopy(self.net)]
        with torch.no_grad():
            self.seen.append(self.copied[0](batch).clone())
        assert all(type(p) is nn.Parameter for p in self.copied[0].parameters())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.seen.append(self.copied[0](batch).clone())
            self.seen.append(copy.deepcopy(self.net)(batch).clone())


class WritesCapturedInPlace(Module):
    """In-place writes through references from before the step bump a version, and are seen within the step."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = [list(self.net.parameters())]

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            super().loss(batch)
            for p in self.captured[0]:
                p.mul_(0.9)
        return super().loss(batch)


class KeepsOldGradients(Module):
    """Gradients that somebody still holds after ``zero_grad`` are not overwritten by the next batch's."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []

    def on_after_backward(self) -> None:
        self.seen.append([p.grad for p in self.parameters()])


class InnerOptimizerWithoutBackward(Manual):
    """The same with gradients of ``torch.autograd.grad``: no backward puts the host's parameters back in between."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> None:
        parameters = list(self.parameters())
        inner = torch.optim.SGD(parameters, lr=0.05)
        for _ in range(2):
            for p, gradient in zip(parameters, torch.autograd.grad(self.loss(batch), parameters), strict=True):
                p.grad = gradient
            inner.step()
            self.seen.append(self.loss(batch).item())
        self.zero_grad()


class ThawsWithinStep(Module):
    """A resident that is unfrozen between two forwards of one step takes the second one's gradient."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (scale,) = (
            p for p in self.trainer.optimizers[0].param_groups[0]["params"] if p.shape == (16,) and p.mean() == 1
        )
        scale.requires_grad_(False)
        loss = self.loss(batch)
        scale.requires_grad_(True)
        return loss + self.loss(batch * 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for p in self.parameters()]


class FunctionalCall(Module):
    """Weights that are computed lie in no slot, and no module hook tells that a layer's backward begins."""

    def loss(self, batch: Any) -> Tensor:
        weights = {name: p * 2 for name, p in self.net.named_parameters()}
        return torch.func.functional_call(self.net, weights, batch).square().mean()


@pytest.mark.filterwarnings("ignore:.*returned `None`, this fit will run with no optimizer")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (lambda: StepsByHand(), {}),
        (lambda: ClampsAfterBackward(Stack()), {"accumulate_grad_batches": 3}),
        (lambda: OwnOptimizerStep(Stack()), {}),
        (lambda: WritesBetweenForwardAndBackward(Stack()), {}),
        (lambda: WritesDataInHooks(Stack()), {}),
        (lambda: LineSearch(), {}),
        (lambda: RebindsThenCalls(Stack()), {"max_epochs": 2}),
        (lambda: RetriesAfterFailure(), {}),
        (lambda: WritesThroughOldViews(Stack()), {}),
        (lambda: LooksParametersUp(), {}),
        (lambda: OwnParameterClass(), {}),
        (lambda: HookedGradients(), {}),
        (lambda: SometimesNoBackward(), {}),
        (lambda: SometimesNoBackward(), {"accumulate_grad_batches": 2}),
        (lambda: Module(TiesInForward()), {"max_epochs": 2}),
        (lambda: Module(nn.Sequential(FrozenAttributes(16, 16), Block(), Block())), {}),
        (lambda: Module(OwnParameters()), {}),
        (lambda: FunctionalCall(Stack()), {}),
        (lambda: FrozenAndCheckpointed(CheckpointedCalls(False)), {}),
        (lambda: FrozenAndCheckpointed(CheckpointedCalls(False), manual=True), {}),
        (lambda: FrozenAndCheckpointed(CheckpointedCalls(True), manual=True), {}),
        (lambda: FrozenAndCheckpointed(InsideCheckpoint()), {}),
        (lambda: FrozenAndCheckpointed(InsideCheckpoint(), manual=True), {}),
        (lambda: FrozenAndCheckpointed(InsideReentrant()), {}),
        (lambda: KeepsWhatIsSaved(Stack()), {}),
        (lambda: InnerOptimizer(), {}),
        (lambda: ExtraBackward(Stack()), {}),
        (lambda: SavesInside(Stack()), {}),
        (lambda: Threads(Stack()), {}),
        (lambda: BackwardWithInputs(), {}),
        (lambda: FreezesBeforeBackward(Stack()), {}),
        (lambda: Copies(), {}),
        (lambda: WritesCapturedInPlace(), {}),
        (lambda: KeepsOldGradients(), {}),
        (lambda: ThawsWithinStep(), {}),
        (lambda: InnerOptimizerWithoutBackward(), {}),
        (lambda: HooksWhatIsFrozen(), {}),
        (lambda: HooksWhatIsThawed(), {}),
        (lambda: HooksInBackward(), {}),
        (lambda: HooksWhatIsKept(), {}),
        (lambda: SharesMemory(Stack()), {}),
        (lambda: SharesGradients(), {}),
        (lambda: Transposes(Stack()), {}),
        (lambda: SwapsData(), {"max_epochs": 2}),
        (lambda: FusedInnerOptimizer(), {}),
        (lambda: AddsGroupInStep(Stack()), {}),
        (lambda: MakesParameters(Stack()), {}),
        (lambda: Module(nn.Sequential(Block(), SelectiveInside(), Block(), SelectiveInside())), {}),
        (lambda: Module(SelectiveAround()), {}),
    ],
    ids=[
        "steps-by-hand", "clamps-after-backward", "own-optimizer-step", "writes-between-forward-and-backward",
        "writes-data-in-hooks",
        "line-search", "rebinds-then-calls", "retries-after-failure", "writes-through-old-views", "looks-parameters-up",
        "own-parameter-class", "hooked-gradients", "no-backward", "no-backward-accumulating", "ties-in-forward",
        "frozen-attributes", "own-parameters-method", "functional-call", "frozen-checkpoint",
        "frozen-checkpoint-manual", "frozen-checkpoint-reentrant", "frozen-checkpoint-inside",
        "frozen-checkpoint-inside-manual", "frozen-checkpoint-inside-reentrant", "keeps-what-is-saved",
        "inner-optimizer", "extra-backward", "saves-inside", "threads", "backward-with-inputs",
        "freezes-before-backward", "copies", "writes-captured-in-place", "keeps-old-gradients", "thaws-within-step",
        "inner-optimizer-without-backward", "hooks-what-is-frozen", "hooks-what-is-thawed", "hooks-in-backward",
        "hooks-what-is-kept", "shares-memory", "shares-gradients", "transposes", "swaps-data",
        "fused-inner-optimizer", "adds-group-in-step", "makes-parameters", "selective-inside", "selective-around",
    ],
)  # fmt: skip
@pytest.mark.filterwarnings(SELECTIVE)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_like_plain(make: Callable[[], pl.LightningModule], options: dict[str, Any], precision: str) -> None:
    assert_like_plain(make, **options, precision=precision)


@pytest.mark.filterwarnings(SELECTIVE)
def test_selective_checkpoints_of_transformers() -> None:
    assert_like_plain(with_checkpointed_forwards, tokens())


def test_tying_by_data_is_refused() -> None:
    class Ties(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            self.net.blocks[2].inner.weight.data = self.net.blocks[0].inner.weight.data

    with pytest.raises(
        RuntimeError, match=r"'net.blocks.2.inner.weight' was given the memory of 'net.blocks.0.inner.weight'"
    ):
        bare(lambda: Ties(Stack()), superpipeline())


def test_layers_without_a_byte() -> None:
    ours = bare(lambda: Module(Empty()), superpipeline(k=1, layers=["net.layers.*"]))
    assert_equal(ours, bare(lambda: Module(Empty()), "auto"), "empty")


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


@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("how", ["calls", "inside", "all", "kept", "kept-inside"])
def test_weights_that_are_kept_as_they_are(how: str, frozen: bool) -> None:
    assert_like_plain(lambda: Module(NormedStack(how, frozen=frozen)))


def test_a_copy_of_a_streamed_module_streams_nothing() -> None:
    class CallsCopy(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            before = self.trainer.strategy.stats().fetched_layers
            copy.deepcopy(self.net)(batch)
            assert self.trainer.strategy.stats().fetched_layers == before
            self.net(batch)
            assert self.trainer.strategy.stats().fetched_layers > before

    bare(lambda: CallsCopy(Stack()), superpipeline(k=1))


def test_weights_may_be_written_after_a_call_outside_any_step() -> None:
    """A transfer that the call began may not be reading them any more."""

    class CallsThenWrites(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            with torch.no_grad():
                self.seen = self.net(batch)
            self.net.blocks[1].inner.weight.data.mul_(0.5)

    with simulated():
        ours = fit(lambda: CallsThenWrites(Stack()), vectors(), superpipeline(k=1))
    assert_same(ours, fit(lambda: CallsThenWrites(Stack()), vectors()))


def test_optimizer_state_is_found_inside_a_step() -> None:
    class LooksState(Manual):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer: Any = self.optimizers()
            self.seen.append(sum(p in optimizer.state for p in self.parameters()))
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    assert_like_plain(LooksState)


def test_a_failed_rebuild_tells_its_own_error_and_leaves_no_hooks() -> None:
    """The engine was closed, building it anew failed, and tearing down the closed one hid the reason."""

    class Aliases(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                net: Any = self.net
                shared = net.blocks[0].inner.weight.data
                net.blocks[1].inner.weight = nn.Parameter(shared)

    module = Aliases(Stack())
    with pytest.raises(ValueError, match=r"blocks\.0\.inner\.weight.*blocks\.1\.inner\.weight"):
        trainer_for(superpipeline(), max_epochs=2).fit(module, loader(vectors()))
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    assert all(p.isfinite().all() for p in module.parameters())


def test_engines_are_freed_without_the_garbage_collector() -> None:
    """Autograd holds the hooks of a parameter where the collector does not look: each fit leaked its host store."""
    import weakref

    alive: list[weakref.ref[Streamer]] = []
    module = llama()
    for _ in range(3):
        trainer = trainer_for(strategy := superpipeline())

        class Note(pl.Callback):
            def on_train_start(self, trainer: Any, *args: Any) -> None:
                alive.append(weakref.ref(streamer_of(trainer.strategy)._gradients))

        trainer.callbacks.append(Note())  # type: ignore[attr-defined]
        trainer.fit(module, loader(tokens(1)))
        del trainer, strategy
    import gc

    gc.collect()
    assert [each() for each in alive] == [None] * 3


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


def test_backward_with_inputs_brings_no_layer() -> None:
    strategy = superpipeline(k=1)
    bare(BackwardWithInputs, strategy)
    assert strategy.stats().extra_slots == 0


def test_bounds_hold_without_module_hooks() -> None:
    strategy = superpipeline(k=1)
    bare(lambda: FunctionalCall(Stack()), strategy)
    assert strategy.stats().peak_device_bytes <= strategy.plan.peak_device_bytes


class WritesAfterBatches(Module):
    """As averaging, clamping and adapters do around validation; a fetch may be under way that nobody waited for."""

    def __init__(self, hook: str) -> None:
        super().__init__(Stack())
        setattr(self, hook, self.write)

    def write(self, *_: Any) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.97)


@pytest.mark.parametrize(
    "hook", ["on_validation_batch_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"]
)
def test_weights_that_hooks_write_after_a_batch_are_read_by_no_fetch(hook: str) -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: WritesAfterBatches(hook), vectors(), strategy, val=vectors(), max_epochs=2)

    with simulated():
        ours = run(superpipeline(k=1))
    assert_same(ours, run("auto"))


def test_a_step_that_weight_averaging_leaves_without_a_backward_is_over() -> None:
    """For batch statistics it runs an epoch forward only, and then writes the weights: a fetch was still under way."""

    def make() -> Module:
        stack = Stack()
        stack.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        return Module(stack)

    def run(strategy: Any) -> Outcome:
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        return fit(make, vectors(), strategy, max_epochs=3, callbacks=[averaging])

    with simulated():
        ours = run(superpipeline(k=1))
    assert_same(ours, run("auto"))


def test_a_backward_that_does_nothing_ends_its_step() -> None:
    """With accumulation no optimizer's step came to end it, and the engine was built anew for the next batch."""

    class Skips(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.hosts: list[bool] = []

        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            if self.trainer.fit_loop.epoch_loop.batch_idx % 3 != 1:
                loss.backward()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hosts.append(all(type(p) is nn.Parameter for p in self.parameters()))

    def run(strategy: Any) -> Outcome:
        return fit(Skips, vectors(9), strategy, accumulate_grad_batches=4)

    ours, plain = run(superpipeline(k=1)), run("auto")
    assert_same(ours, plain)
    assert ours.module.hosts == plain.module.hosts == [True] * 9


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_end"])
def test_a_trainer_is_copied_during_its_run(hook: str) -> None:
    """Locks of the engine cannot be copied, and callbacks lead to the trainer."""
    copied: list[pl.Trainer] = []
    callback = pl.Callback()
    setattr(callback, hook, lambda trainer, *_: copied.append(copy.deepcopy(trainer)) if not copied else None)
    ours = fit(lambda: Module(Stack()), vectors(), superpipeline(), callbacks=[callback])
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    module = copied[0].lightning_module
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert type(copied[0].strategy) is type(ours.trainer.strategy)


def test_steps_outside_of_a_run_are_plain() -> None:
    trainer = trainer_for(superpipeline(k=1))
    module = Module(Stack())
    trainer.fit(module, loader(vectors()))
    module.eval()  # without dropout
    found = trainer.strategy.predict_step(vectors()[0], 0)
    assert torch.equal(found, module.predict_step(vectors()[0], 0))


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_overlap_without_an_optimizer_has_nothing_to_do(overlap: Any) -> None:
    class Fixed(Module):
        def configure_optimizers(self) -> None:  # type: ignore[override]
            return None

    ours = fit(lambda: Fixed(Stack()), vectors(), superpipeline(k=1, optimizer_overlap=overlap))
    assert_same(ours, fit(lambda: Fixed(Stack()), vectors()))


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_weights_may_be_written_as_soon_as_a_step_has_failed(fails_in: str) -> None:
    """Uploads that the step began may be under way still; on this device a write under them is an error."""

    class Fails(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if fails_in == "forward":
                raise KeyError(fails_in)
            return loss

        def on_after_backward(self) -> None:
            raise KeyError(fails_in)

    class Restores(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            pl_module.load_state_dict(before)
            trainer.restored = True  # type: ignore[attr-defined]

    module = Fails(Stack())
    before = copy.deepcopy(module.state_dict())
    trainer = trainer_for(superpipeline(k=2), callbacks=[Restores()])
    with simulated(), pytest.raises(KeyError, match=fails_in):
        trainer.fit(module, loader(vectors()))
    assert trainer.restored  # type: ignore[attr-defined]
    assert_equal(module.state_dict(), before, "weights")


def writes(module: nn.Module) -> None:
    """Weights, in a way that no version shows."""
    for p in module.parameters():
        p.data.mul_(0.9)


class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
    """Steps after ``on_train_batch_end``, unlike others."""

    def step(self, *args: Any) -> None:  # type: ignore[override]
        super().step(*args)
        for group in self.optimizer.param_groups:
            for p in group["params"]:
                p.data.mul_(0.9)


class WritesLate(Module):
    """Weights are written after the callbacks have heard of the batch's end."""

    def __init__(self, where: str) -> None:
        super().__init__(Stack())
        self.where = where

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        if self.where == "on_save_checkpoint":
            writes(self)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.where != "scheduler":
            return optimizer
        plateau = {"scheduler": Plateau(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Reloads(WritesLate):
    def train_dataloader(self) -> Any:
        writes(self)
        return loader(vectors())


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("simulation", [nullcontext, simulated])
@pytest.mark.parametrize("where", ["on_save_checkpoint", "scheduler", "train_dataloader"])
def test_weights_written_after_the_callbacks_are_seen(where: str, simulation: Any, tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> Any:
        pl.seed_everything(3, verbose=False)
        module = Reloads(where) if where == "train_dataloader" else WritesLate(where)
        saves = where == "on_save_checkpoint"
        trainer = trainer_for(
            strategy, max_epochs=2, enable_checkpointing=saves,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if saves else [],
            reload_dataloaders_every_n_epochs=int(where == "train_dataloader"),
        )  # fmt: skip
        trainer.fit(module, None if where == "train_dataloader" else loader(vectors()))
        return module.state_dict(), trainer.optimizers[0].state_dict()

    with simulation():
        ours = run(superpipeline(k=2), tmp_path / "ours")
    assert_equal(ours, run("auto", tmp_path / "plain"), where)


def test_the_batch_size_finder_restores_what_nothing_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Module):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return DataLoader(torch.cat(vectors()), batch_size=self.batch_size, drop_last=True)

        def val_dataloader(self) -> Any:
            return loader(vectors(1))

    monkeypatch.chdir(tmp_path)
    module = Scaled(Stack())
    before = copy.deepcopy(module.state_dict())
    with simulated():
        trainer = trainer_for(superpipeline(k=2), default_root_dir=tmp_path)
        found = Tuner(trainer).scale_batch_size(module, max_trials=2, init_val=2)
    assert found == 4  # rows of the batches there are
    assert_equal(module.state_dict(), before, "weights")


def test_a_copy_inside_a_step_in_the_background_is_refused() -> None:
    class Copies(Module):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            copy.deepcopy(self.trainer)

    fit(lambda: Copies(Stack()), vectors(), SuperpipelineStrategy(optimizer_overlap="off"))
    with pytest.raises(TypeError, match=r"inside an optimizer's step.*on_train_batch_end.*optimizer_overlap=\"off\""):
        fit(lambda: Copies(Stack()), vectors(), SuperpipelineStrategy(optimizer_overlap="forward"), gradients=False)


def test_early_updates_beside_another_run() -> None:
    """Each run has hooks on all optimizers' steps; those of others are not users'."""

    class Other(SuperpipelineStrategy):
        pass

    class Nested(Module):
        def on_train_start(self) -> None:
            fit(
                lambda: Module(Stack()), vectors(), SuperpipelineStrategy(optimizer_overlap="backward"), gradients=False
            )

    fit(lambda: Nested(Stack()), vectors(), Other(k=1))
