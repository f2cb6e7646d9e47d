"""Hooks and edges of before the step in a loop of one's own. ``tests/equality/programs/hooks.py`` has them in Lightning."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

import sp_lightning
from sp_lightning.core.torch_compat import private
from sp_lightning.core.torch_compat.private import node_hooks
from sp_lightning.core.weights import gradients
from tests.equality.programs.hooks import EDGES, ROWS, Holds, HoldsEdges, InBackward, after, node_of
from tests.support.models import Stack, vectors
from tests.support.nets import Manual
from tests.support.runs import assert_equal, fit, superpipeline


def test_the_hooks_on_a_node_are_read_twice_for_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    read, found = list[int](), list[int]()

    def noting(leaf: Tensor) -> Any:
        read.append(id(leaf))
        return node_hooks(leaf)

    class Counts(Holds):
        def on_before_backward(self, loss: Tensor) -> None:
            read.clear()

        def on_after_backward(self) -> None:
            found.extend(map(read.count, map(id, self.parameters())))

    monkeypatch.setattr(private, "node_hooks", noting)
    monkeypatch.setattr(gradients, "node_hooks", noting)
    fit(lambda: Counts(after), vectors(), superpipeline(k=1), recorded="losses")
    assert set(found) == {2}  # as it arrives, and as it is set


def in_a_loop(make: Callable[[], Any], step: Callable[[Any, Tensor, Any], None], optimizers: Any = None) -> None:
    """What the module has seen, and its weights, are equal with and without streaming."""

    def run(streamed: bool) -> Any:
        torch.manual_seed(0)
        module = make()
        found = torch.optim.SGD(module.parameters(), lr=0.1) if optimizers is None else optimizers(module)
        part = module.net if isinstance(module, Manual) else module
        with sp_lightning.stream(part, found, k=1, k_prime=1) if streamed else nullcontext():
            for batch in vectors():
                step(module, batch, found)
        return module.seen, dict(module.state_dict())

    assert_equal(run(True), run(False), "what was seen, and weights")


@pytest.mark.parametrize("name", ROWS)
def test_hooks(name: str) -> None:
    def step(module: Any, batch: Tensor, optimizer: Any) -> None:
        module.net(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    in_a_loop(lambda: Holds(ROWS[name]), step)


@pytest.mark.parametrize(
    "name", [each for each in EDGES if each != "several calls"]
)  # a loop's step ends with a backward
def test_edges_of_before_the_step(name: str) -> None:
    def step(module: Any, batch: Tensor, optimizer: Any) -> None:
        optimizer.zero_grad()
        module.use(module.net(batch).square().mean())
        optimizer.step()
        penalty = sum((p.square().sum() for p in module.parameters()), torch.zeros(()))  # its leaves are the host's
        module.seen.append(torch.autograd.grad(penalty, module.edges))

    in_a_loop(lambda: HoldsEdges(EDGES[name]), step)


def test_an_optimizer_that_steps_in_backward() -> None:
    def inner(module: Any) -> Any:
        return [each for p in module.net.parameters() for each in p._in_backward_optimizers]

    in_a_loop(InBackward, lambda module, batch, _: module.net(batch).square().mean().backward(), inner)


@pytest.mark.parametrize("way", [node_of, lambda p: get_gradient_edge(p).node], ids=["expand_as", "get_gradient_edge"])
def test_a_hook_on_a_node_of_the_running_step(way: Callable[[Tensor], Any]) -> None:
    """The weight was read as an alias, whose node the graph has not: the hook never ran."""

    class Sees(Stack):
        def __init__(self) -> None:
            super().__init__(3)
            self.seen: dict[str, list[Tensor]] = {name: [] for name, _ in self.named_parameters()}

    def step(net: Any, batch: Tensor, optimizer: Any) -> None:
        loss = net(batch).square().mean()
        nodes = {name: way(p) for name, p in net.named_parameters()}
        handles = [
            node.register_prehook(lambda gradients, name=name: net.seen[name].append(gradients[0].clone()))
            for name, node in nodes.items()
        ]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        assert all(net.seen.values())
        for handle in handles:
            handle.remove()

    in_a_loop(Sees, step)
