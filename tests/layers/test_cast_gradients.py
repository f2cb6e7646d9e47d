"""Gradients that stay in their casts' memory on the way to the host: nothing that autograd or user code does shows it."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sp_lightning.core.layers.casts import Cast
from sp_lightning.core.torch_compat.cast_gradient import CastGradient
from tests.support.mixed import Manual, Seeing, assert_like_plain
from tests.support.models import Module, Stack, vectors
from tests.support.overlapping import overlapping
from tests.support.runs import assert_equal, assert_same, fit, superpipeline
from tests.support.tiers import first

NARROW = torch.arange(12, dtype=torch.bfloat16).view(3, 4)


def test_it_is_a_float32_tensor_in_half_the_memory() -> None:
    gradient = CastGradient(NARROW)
    assert (gradient.dtype, gradient.shape, gradient.device.type) == (torch.float32, (3, 4), "cpu")
    with torch.DisableTorchFunctionSubclass():  # as autograd makes it a weight's
        again = gradient.detach()
    assert type(again) is CastGradient
    assert again.inner_tensor is gradient.inner_tensor is NARROW


def test_sums_are_plain_and_as_exact_as_float32() -> None:
    one, other = (CastGradient(torch.full((2,), value, dtype=torch.bfloat16)) for value in (256.0, 1.0))
    total = one + other
    assert type(total) is Tensor
    assert total.tolist() == [257.0, 257.0], "of bfloat16 it would be 256"


def test_whoever_holds_it_sees_what_is_written() -> None:
    gradient = CastGradient(NARROW.clone())
    view = gradient.view(-1)
    gradient.mul_(0.5)
    view[0] = 7
    assert torch.equal(gradient.inner_tensor, torch.tensor([7, *(each / 2 for each in range(1, 12))]).view(3, 4))
    assert torch.equal(gradient.detach(), gradient.inner_tensor)
    assert gradient.wide() is gradient.inner_tensor


@pytest.mark.parametrize("shape", [(4,), (1, 4)])
def test_it_has_memory_of_its_own(shape: tuple[int, ...]) -> None:
    """What a bias is added to has the same gradient, which user code may keep and write."""
    bias, x, kept = torch.zeros(shape, requires_grad=True), torch.ones(shape).bfloat16(), list[Tensor]()
    total = x + Cast.apply(bias, bias.detach().bfloat16())
    total.register_hook(kept.append)
    bias.register_hook(lambda gradient: kept.append(gradient.inner_tensor))
    (total * 2).sum().backward()
    theirs, ours = kept
    assert torch.equal(theirs, ours)
    assert theirs.data_ptr() != ours.data_ptr()


def test_what_is_to_be_differentiated_is_converted() -> None:
    weight, found = torch.zeros(2, 3, requires_grad=True), list[Tensor]()
    weight.register_hook(found.append)
    torch.autograd.grad(Cast.apply(weight, weight.detach().bfloat16()).square().sum(), weight, create_graph=True)
    assert type(found[0]) is Tensor
    assert found[0].requires_grad


class Asks(Seeing):
    """For gradients, one by one, by their places in the graph, and as a batch in two ways."""

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        loss = super().loss(batch)
        weights = [net.blocks[0].inner.weight, net.blocks[1].outer.bias, net.head.weight]
        places = [torch.autograd.graph.get_gradient_edge(each) for each in weights]
        found = [*torch.autograd.grad(loss, weights, retain_graph=True)]
        found += torch.autograd.grad(loss, places, retain_graph=True)
        found += torch.autograd.grad(loss, weights, torch.tensor([1.0, 2.0]), is_grads_batched=True, retain_graph=True)
        found += torch.func.vmap(lambda factor: torch.autograd.grad(loss, weights, factor, retain_graph=True))(
            torch.ones(2)
        )
        self.see(*found, *map(type, found))
        return loss


class AtNodes(Seeing):
    """A hook of the graph's nodes sees gradients before autograd makes them the weights'."""

    def __init__(self, does: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.does = does

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        for parameter in self.net.parameters() if loss.requires_grad else ():
            node = torch.autograd.graph.get_gradient_edge(parameter).node
            handle = node.register_prehook(lambda gradients: self.see(*map(self.does, gradients)))
            loss.register_hook(lambda _, h=handle: torch.autograd.Variable._execution_engine.queue_callback(h.remove))
        return loss


def moved(gradient: Tensor) -> Tensor:
    gradient.data = gradient.data * 0.3
    return gradient


def detached(gradient: Tensor) -> Tensor:
    before = gradient.detach()
    gradient.mul_(0.3)
    return before


def saved(gradient: Tensor) -> Tensor:
    file = io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    found: Tensor = torch.load(file, weights_only=True)
    return found


AT_NODES: dict[str, Callable[[Tensor], Any]] = {
    "in place": lambda gradient: gradient.mul_(0.3),
    "through detach()": lambda gradient: gradient.detach().mul_(0.3),
    "through .data": lambda gradient: gradient.data.mul_(0.3),
    "detached before": detached,
    "other memory": moved,
    "numpy": lambda gradient: gradient.numpy().tolist(),
    "lists": lambda gradient: gradient.tolist(),
    "text": str,
    "copies": copy.deepcopy,
    "files": saved,
    "addresses": lambda gradient: gradient.data_ptr() == gradient.untyped_storage().data_ptr() != 0,
    "dlpack": torch.from_dlpack,
    "shared memory": lambda gradient: gradient.share_memory_(),
    "metadata": lambda gradient: str((gradient.dtype, gradient.shape, gradient.is_leaf, gradient.requires_grad)),
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("use", first(AT_NODES, "through detach()", why="other uses"))
def test_hooks_of_nodes_see_plains(use: str) -> None:
    assert_like_plain(partial(AtNodes, AT_NODES[use]))


class Sums(Seeing):
    """What a linear layer's node gives its weight is kept, and written when that of the next layer comes."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.net.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(self.watch)

    def watch(self, module: Any, args: Any, output: Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_hook(self.add)

    def loss(self, batch: Any) -> Tensor:
        self.total: Any = None
        return super().loss(batch)

    def add(self, inputs: Any, outputs: Any) -> None:
        self.total = inputs[-1] if self.total is None else self.total.zero_()


class Asked(TorchDispatchMode):
    """Asks for the memory of what operators are given, as a tracker of memory does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in args:
            if isinstance(each, Tensor):
                each.untyped_storage().data_ptr()
        return func(*args, **(kwargs or {}))


class InMode(Manual):
    """A backward within a mode of the user's."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        with Asked():
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()


class UsesTwice(Seeing):
    """In two calls, whose gradients autograd adds up."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + super().loss(batch * 0.7)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("make", "options"),
    [(Asks, {}), (Sums, {}), (InMode, {}), (UsesTwice, {}), (Seeing, {"detect_anomaly": True})],
    ids=["asks", "writes what nodes gave", "in a mode", "uses twice", "anomalies are looked for"],
)
def test_a_run_is_plains(make: Any, options: dict[str, Any]) -> None:
    assert_like_plain(make, **options)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize(("make", "widened"), [(Stack, False), (lambda: nn.Sequential(*[nn.Linear(16, 16)] * 2), True)])
def test_nothing_is_widened_on_the_device_but_for_sums(
    make: Any, widened: bool, overlap: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[CastGradient] = []
    wide = CastGradient.wide

    def noted(gradient: CastGradient) -> Tensor:
        found.append(gradient)
        return wide(gradient)

    monkeypatch.setattr(CastGradient, "wide", noted)
    fit(lambda: Module(make()), vectors(), overlapping(overlap), precision="bf16-mixed", recorded="losses")
    assert bool(found) == widened


class Batched(Module):
    """Several gradients at once, of a net that uses its layers twice."""

    def __init__(self, how: str) -> None:
        super().__init__(Stack())
        self.how = how
        self.got: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, weights = super().loss(self.net(batch)), list(self.net.parameters())
        scales = torch.tensor([1.0, 2.0])
        if self.how == "vmap":
            self.got = torch.func.vmap(lambda scale: torch.autograd.grad(loss, weights, scale, retain_graph=True))(
                scales
            )
        else:
            self.got = torch.autograd.grad(loss, weights, scales, is_grads_batched=True, retain_graph=True)
        return loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["vmap", "is_grads_batched"])
@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_several_gradients_at_once(activations: Any, how: str) -> None:
    """Where a weight is used twice, autograd adds up gradients that stand for several each and have no memory to read."""
    ours = fit(lambda: Batched(how), vectors(), superpipeline(k=1, activations=activations), precision="bf16-mixed")
    plain = fit(lambda: Batched(how), vectors(), precision="bf16-mixed")
    assert_same(ours, plain)
    assert_equal(ours.module.got, plain.module.got, "got")
