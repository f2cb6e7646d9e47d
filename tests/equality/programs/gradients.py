"""Gradients that are hooked, kept, shared, thawed, asked for, or come in several backwards."""

from __future__ import annotations

import copy
import io
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from tests.equality.rows import program, tiers
from tests.support.models import Block, FunctionalCall, Module, Scaled, Stack
from tests.support.moments import At
from tests.support.nets import Manual, NormedStack

USERS = tiers(
    rest=["users, k=1"], long=["users, k=2", "users, k=all", "users, k=1, bf16-mixed", "users, k=1, simulated"]
)
PLAIN = tiers(long=["users, k=1", "users, k=all", "users, k=1, bf16-mixed"])
MODES = ("keep, k=1", "recompute, k=1", "offload, k=1")
EACH = {**tiers(long=[f"{mode}{more}" for mode in MODES for more in ("", ", simulated")])}
EACH["recompute, k=1"] = 2


def gradients(name: str, variants: Any = USERS, **more: Any) -> Any:
    return program(f"gradients: {name}", variants, **more)


def on_stack(kind: Any) -> Any:
    return lambda: kind(Stack(4))


def norms(module: Any) -> list[Tensor]:
    """The norms of all gradients, by the strategy or, on plain Lightning, by torch."""
    strategy = module.trainer.strategy
    kinds = (2.0, 1.0, float("inf"))
    if isinstance(strategy, SuperpipelineStrategy):
        return [*map(strategy.gradient_norm, kinds), torch.tensor(strategy.gradients_are_finite())]
    found = [
        nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], each) for each in kinds
    ]
    return [*(each.cpu() for each in found), torch.tensor(bool(found[0].isfinite()))]


NORMED = tiers(
    rest=["users, k=1"],
    long=[
        "users, k=1, bf16-mixed",
        "users, k=1, simulated",
        "clipped by norm",
        "everything on a disk, by default, accumulated, clipped, simulated",
        "50% stay, these stepped on the device, off, bf16-mixed, clipped, simulated",
        "off, on the GPU, half stays, bf16-mixed, simulated",
        "forward, 32-true, clipped by norm, two epochs",
    ],
)


@gradients("norms by the strategy", NORMED, at="on_before_optimizer_step")
def _(m: Any) -> None:
    """Also of infinite gradients."""
    m.seen += norms(m)
    if len(m.seen) > 4:
        next(m.parameters()).grad[0] = float("inf")
        m.seen += norms(m)
        next(m.parameters()).grad[0] = 0


@gradients("weights clamped after a backward that accumulates", at="on_after_backward", accumulate_grad_batches=3)
def _(m: Any) -> None:
    """The next backward of the same step reads the clamped weights."""
    for p in m.parameters():
        p.data.clamp_(-0.1, 0.1)


@gradients("hooks on parameters, and grad")
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


for accumulate in (1, 2):
    gradients(f"a batch without a backward, {accumulate} to a step", covers="modules have the host's weights after it",
              accumulate_grad_batches=accumulate)(SometimesNoBackward)  # fmt: skip


@gradients("a backward inside training_step", of=on_stack)
class ExtraBackward(Module):
    """It ended the step: what came after it found the host's parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.loss(batch * 0.5).backward()
        loss = self.loss(batch)
        grads = torch.autograd.grad(loss, list(self.parameters()), create_graph=True)
        return loss + sum(g.square().sum() for g in grads)


class InSteps(Manual):
    """Optimizes by hand; ``use`` does the backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.use(loss, batch)
        optimizer.step()
        return loss

    def use(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss)


def no_layer_came(ours: Any) -> None:
    assert ours.trainer.strategy.stats().extra_slots == 0


@gradients("a backward with inputs", also=no_layer_came)
class BackwardWithInputs(InSteps):
    """No other layer gets a gradient, or comes for one."""

    def use(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss, inputs=list(self.parameters())[2:6])
        self.seen.append([None if p.grad is None else p.grad.clone() for p in self.parameters()])


def doubled(gradient: Tensor) -> Tensor:
    return gradient * 2


@gradients("a hook on a frozen weight")
class HooksWhatIsFrozen(Module):
    """The user's hooks were once put on device parameters when they came up, and autograd refused frozen ones."""

    def __init__(self) -> None:
        super().__init__(Stack())
        weight = self.net.blocks[1].inner.weight
        weight.register_hook(doubled)
        weight.requires_grad_(False)


@gradients("a hook on a weight that is thawed")
class HooksWhatIsThawed(Module):
    """Between two batches."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.net.blocks[1].requires_grad_(True)
            self.net.blocks[1].inner.weight.register_hook(doubled)


@gradients("a hook that is registered in backward")
class HooksInBackward(Module):
    """On a reference from before the step: it counts in that backward."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = [self.net.blocks[0].inner.weight]

    def loss(self, batch: Any) -> Tensor:
        x = batch
        for block in self.net.blocks:
            x = block(x)
        x.register_hook(lambda gradient: self.captured[0].register_hook(doubled) and None)
        return x.square().mean()


@gradients(
    "a hook on a weight that saved-tensor hooks keep", of=lambda kind: lambda: kind(NormedStack("kept", frozen=False))
)
class HooksWhatIsKept(Module):
    """The graph has the device parameter that they kept; the hook must not be put on its successor only."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        if batch_idx == 1:
            for block in self.net.blocks:
                block.norm.weight.register_hook(doubled)
        return loss


@gradients("gradients that are shared", at="on_after_backward")
def _(m: Any) -> None:
    """What another process was sent stays what it was."""
    handle = m.net[1].first.weight.grad.untyped_storage()._share_filename_cpu_()
    m.kept.append(torch.empty(0).set_(torch.UntypedStorage._new_shared_filename_cpu(*handle)))
    m.seen.append(torch.stack([gradient.sum() for gradient in m.kept]))


@gradients("gradients that are kept", at="on_after_backward")
def _(m: Any) -> None:
    """Those that somebody still holds after ``zero_grad`` are not overwritten by the next batch's."""
    m.seen.append([p.grad for p in m.parameters()])


@gradients("a resident that is thawed within a step")
class ThawsWithinStep(Module):
    """Between two forwards: it takes the second one's gradient."""

    def __init__(self) -> None:
        super().__init__(Scaled())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = self.trainer.optimizers[0].param_groups[0]["params"]
        (scale,) = (p for p in weights if p.shape == (16,) and p.mean() == 1)
        scale.requires_grad_(False)
        loss = self.loss(batch)
        scale.requires_grad_(True)
        return loss + self.loss(batch * 0.5)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen = [None if p.grad is None else p.grad.clone() for p in self.parameters()]


def returns_from_a_hook() -> Module:
    module = Module(Stack())
    module.net.stem.weight.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(0.5))
    return module


gradients(
    "a hook after accumulation that returns something", tiers("users, k=1"), repairable=False,
    covers="``lambda p: p.grad.mul_(0.5)`` returns the gradient. It was accepted, and failed in plain Lightning.",
    refused={"users, k=1": r"RuntimeError: Tensor post accumulate grad hooks should return None\.$"},
)(returns_from_a_hook)  # fmt: skip

# ---------------------------------------------------------------------- frozen and unfrozen inside a step


OTHER_TENSORS = r"Unrepeatable: The forward of 'net.blocks.2' saved other tensors when it ran again .*torch says:"


class Freezes(Module):
    """Everything is trained at the start of each batch, and a part is frozen when backward has come to a block's output."""

    at = 2
    by_reference = False

    def __init__(self) -> None:
        super().__init__(Stack())
        self.captured = list(self.part.parameters())

    @property
    def part(self) -> Any:
        return self.net.blocks[2].outer  # type: ignore[index, union-attr]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(True)

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.stem(batch)
        for index, block in enumerate(net.blocks):
            x = block(x)
            if index == self.at and x.requires_grad:
                x.register_hook(self.freeze)
        return net.head(x).square().mean()

    def freeze(self, gradient: Tensor) -> None:
        for parameter in self.captured if self.by_reference else self.part.parameters():
            parameter.requires_grad_(False)


class UnfreezesBeforeBackward(Freezes):
    """Plain autograd gives no gradient to what was frozen in the forward."""

    at, trained = 9, True

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.requires_grad_(True)
        self.part.requires_grad_(not self.trained)

    def on_before_backward(self, loss: Tensor) -> None:
        self.part.requires_grad_(self.trained)


def with_(kind: type[Module], **attributes: Any) -> Any:
    return type(kind.__name__, (kind,), attributes)


for name, kind in {
    "frozen before backward": with_(UnfreezesBeforeBackward, trained=False),
    "unfrozen before backward": UnfreezesBeforeBackward,
    "frozen in backward": Freezes,
    "frozen when its gradient is there": with_(Freezes, at=0),  # where it stays
    "frozen by references in backward": with_(Freezes, by_reference=True),
    "frozen by references when its gradient is there": with_(Freezes, by_reference=True, at=0),
}.items():
    said = {} if "is there" in name else dict.fromkeys(("recompute, k=1", "recompute, k=1, simulated"), OTHER_TENSORS)
    gradients(f"a layer {name}", EACH, covers="weights that are frozen and unfrozen inside a step", refused=said)(kind)


@gradients(
    "weights that were unfrozen and not used", tiers(rest=["users, k=1, bf16-mixed"], long=["users, k=1"]), max_epochs=2
)
class AsksForUnused(Module):
    """Asks for gradients of a block that no forward has called since it was unfrozen."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.unused = Block().requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.unused.requires_grad_(self.current_epoch == 1)

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        blocks: Any = self.net.blocks
        wanted = [p for block in (blocks[1], self.unused) for p in block.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, wanted, retain_graph=True, allow_unused=True)
        return loss + sum(gradient.square().sum() for gradient in found if gradient is not None)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


# ---------------------------------------------------------------------- asked for, of weights that were captured before


class Captures(Module):
    """As gradnorm-pytorch: weights are put in a plain list in ``__init__``."""

    def __init__(self, use: str) -> None:
        super().__init__(Stack(4))
        self.use = use
        self.captured = [list(self.net.parameters())]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, (weights,) = self.loss(batch), self.captured
        if self.use == "grad":
            found = torch.autograd.grad(loss, weights, retain_graph=True)
        elif self.use == "allow_unused":
            found = torch.autograd.grad(loss, weights, retain_graph=True, allow_unused=True)
        elif self.use == "create_graph":
            found = torch.autograd.grad(loss, weights, create_graph=True)
            return loss + sum((g.square().sum() for g in found), torch.zeros(()))
        elif self.use == "checkpoint":  # its forward runs again in backward
            again = checkpoint(
                lambda x: F.linear(x, weights[-2], weights[-1]).tanh(), batch.requires_grad_(), use_reentrant=True
            )
            return loss + again.square().mean()
        else:
            return loss + sum((p.square().sum() + p.abs().sum() + p.sum().square() for p in weights), torch.zeros(()))
        return loss * sum((g.norm() for g in found if g is not None), torch.zeros(())).detach() + loss


for use in ("grad", "allow_unused", "create_graph", "checkpoint", "penalty"):
    for accumulate in (1, 2):
        gradients(
            f"captured weights, {use}, {accumulate} to a step", USERS if accumulate == 1 else PLAIN,
            accumulate_grad_batches=accumulate,
            covers="grad did not find them, silently with allow_unused; a penalty was added up in another order",
        )(partial(Captures, use))  # fmt: skip


class GradAfterBackward(InSteps):
    """``torch.autograd.grad`` after a backward that kept its graph."""

    def __init__(self, taken: str) -> None:
        super().__init__()
        self.taken = taken
        self.captured = [list(self.net.parameters())]

    def loss(self, batch: Any) -> Tensor:
        self.before = [list(self.parameters())]
        return super().loss(batch)

    def use(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss, retain_graph=True)
        weights = {"before": self.before[0], "captured": self.captured[0], "now": list(self.parameters())}[self.taken]
        self.seen.append(torch.autograd.grad(loss, weights, allow_unused=True))


for taken in ("before", "captured", "now"):
    gradients(f"grad of weights taken {taken} after a backward", covers="they were not in the graph, or it was None")(
        partial(GradAfterBackward, taken)
    )  # fmt: skip


@gradients("gradients by hand")
class GradientsByHand(InSteps):
    """``torch.autograd.grad`` is what the refusal of ``create_graph`` recommends."""

    def use(self, loss: Tensor, batch: Any) -> None:
        weights = list(self.parameters())
        for p, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            p.grad = gradient


@gradients("an optimizer that is made in a step", tiers(rest=["keep, k=1"], long=["keep, k=1, simulated"]))
class OptimizerMadeInStep(InSteps):
    """Lightning has none. Its state is that of the weights that it was given."""

    made: Any = None

    def optimizers(self, *_: Any) -> Any:
        if self.made is None:
            self.made = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return self.made

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append([self.made.state[p]["exp_avg"].sum().item() for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return None


@gradients("a weight times its gradient", at="on_before_zero_grad")
def _(m: Any) -> None:
    """As AdaLoRA does: how much a weight matters."""
    m.seen.append([(p * p.grad).abs().sum().item() for p in m.parameters() if p.grad is not None])


@gradients("a weight that is used after backward")
class UsesWeightAfterBackward(InSteps):
    """On a graph from before the backward."""

    def loss(self, batch: Any) -> Tensor:
        self.hidden = self.net.stem(batch)  # type: ignore[operator, union-attr]
        return super().loss(batch)

    def use(self, loss: Tensor, batch: Any) -> None:
        self.manual_backward(loss)
        self.manual_backward(F.linear(self.hidden, self.net.head.weight).square().mean())  # type: ignore[union-attr, arg-type]


# ---------------------------------------------------------------------- parameters of all kinds


@gradients("parameters as keys, with attributes")
class LooksParametersUp(Module):
    """They are the module's own, whoever asks."""

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


@gradients("a class of parameters of the user's")
class OwnParameterClass(Module):
    """With a method of its own."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        self.net.scale = Scale(torch.ones(16))
        self.net.big = Scale(torch.ones(64, 64))

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        assert isinstance(net.big, Scale)
        assert isinstance(net.scale, Scale)
        return (net(batch) * net.scale.doubled()).square().mean() + net.big.doubled().mean()


def module_of(net: Any) -> Any:
    return lambda: Module(net())


@gradients("weights that are tied in forward", of=module_of, max_epochs=2)
class TiesInForward(Stack):
    """In the first step, and again in each."""

    def forward(self, x: Tensor) -> Tensor:
        self.blocks[3].inner.weight = self.blocks[0].inner.weight
        return super().forward(x)


@gradients(
    "a module that refuses other weights", of=lambda kind: lambda: Module(nn.Sequential(kind(16, 16), Block(), Block()))
)
class FrozenAttributes(nn.Linear):
    """An attribute that raises when it is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight" and "weight" in self._parameters:
            raise AttributeError("frozen weight")
        super().__setattr__(name, value)


@gradients("a method parameters() of the user's", of=module_of)
class OwnParameters(Stack):
    """Without arguments, as some have it."""

    def parameters(self) -> Any:  # type: ignore[override]
        return iter([p for _, p in self.named_parameters()])


gradients("weights that functional_call takes", covers="they are the module's")(lambda: FunctionalCall(Stack()))


@gradients("parameters made of a weight's class", of=on_stack)
class MakesParameters(Module):
    """``type(p)`` in a step is a class of ours, which makes ordinary parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = self.net.blocks[2].inner.weight
        cast = weight.as_subclass(Tensor).square().mean()
        made = type(weight)(weight.data * 2)
        assert type(made) is nn.Parameter
        return self.loss(batch) + made.mean() + cast


class EmptyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.sum()


@gradients("layers without a byte", of=module_of, strategy={"layers": ["net.layers.*"]})
class Empty(nn.Module):
    """Views of them are kept: extra slots have no address."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EmptyLayer() for _ in range(6))
        self.head = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.layers:
            x = layer(x)
            kept.append(layer.weight.detach())
        return self.head(x)


class Tagged(nn.Parameter):
    """A class with attributes, which says itself how it is copied."""

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        copied = Tagged(self.data.clone(), self.requires_grad)
        copied.copied_from = self.tag
        return copied


@gradients("copies and files of weights in a step")
class CopiedInStep(Module):
    """A deep copy lost the weight's class, a file its attributes; an attribute that was set could not be deleted (Opacus)."""

    def __init__(self) -> None:
        super().__init__(Stack(3))
        for index, block in enumerate(self.net.blocks):
            block.inner.weight = Tagged(block.inner.weight.data)
            block.inner.weight.tag = index
            block.outer.weight = Scale(block.outer.weight.data)  # torch's own way: the class without attributes
            block.outer.weight.tag = index
        self.seen: list[Any] = []

    def loss(self, batch: Any) -> Tensor:
        torch.save(self.net, file := io.BytesIO())
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


class Deciding(Tensor):
    """Torch's own treatment of a user's class: results are of that class."""


@gradients("results of a class of the user's", at="on_validation_batch_end", validated=True)
def _(m: At) -> None:
    """Between two batches of an evaluation a weight meets tensors of that class."""
    weight = m.net[0].first.weight
    one, two = torch.ones(16).as_subclass(Deciding), torch.full((), 2.0).as_subclass(Deciding)
    for result in (weight * one, torch.pow(two, weight)):
        m.seen.append((type(result).__name__, result.detach().as_subclass(Tensor).clone()))
