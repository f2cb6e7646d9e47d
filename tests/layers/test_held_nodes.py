"""Hooks that user code has registered before a step, of every kind: each runs as on plain Lightning, or is refused by name.

Modules use the device parameter in a step, so backward does not reach the host parameter's own ``AccumulateGrad`` node. Hooks on
it never ran, and nothing noticed: weights that torch's ``_apply_optimizer_in_backward`` steps did not train.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.optim import _apply_optimizer_in_backward

import sp_lightning
from sp_lightning.core.layers import gradients
from sp_lightning.core.torch_compat import private
from sp_lightning.core.torch_compat.private import node_hooks
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, fit, superpipeline

Seen = list[Any]


def node_of(p: Tensor) -> Any:
    """The node that adds gradients to ``p.grad``, as Megatron, apex and NeMo find it."""
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def note(seen: Seen, name: str, value: Any) -> None:
    seen.append((name, value.to_dense().clone() if isinstance(value, Tensor) else value))


def after(name: str, p: Tensor, seen: Seen) -> Any:
    def hook(inputs: Any, outputs: tuple[Tensor]) -> None:
        assert inputs == ()
        note(seen, name, outputs[0])
        note(seen, name, p.grad)

    node = node_of(p)
    node.register_hook(hook)
    return node


def before(name: str, p: Tensor, seen: Seen) -> Any:
    def hook(gradients: tuple[Tensor]) -> tuple[Tensor]:
        note(seen, name, p.grad)
        return (gradients[0] * 0.5,)

    node = get_gradient_edge(p).node
    node.register_prehook(hook)
    return node


def both_on_one_node(name: str, p: Tensor, seen: Seen) -> Any:
    return before(name, p, seen), after(name, p, seen)


def on_tensor(name: str, p: Tensor, seen: Seen) -> Any:
    def hook(gradient: Tensor) -> Tensor:
        note(seen, name, gradient)
        return gradient * 0.5

    p.register_hook(hook)


def after_accumulation(name: str, p: Any, seen: Seen) -> Any:
    p.register_post_accumulate_grad_hook(lambda p: note(seen, name, p.grad))


def retains(name: str, p: Tensor, seen: Seen) -> Any:
    p.retain_grad()  # does nothing for a leaf


def any_of_several(name: str, p: Tensor, seen: Seen) -> Any:
    return register_multi_grad_hook([p], lambda gradient: note(seen, name, gradient), mode="any")


def all_of_several(name: str, p: Tensor, seen: Seen) -> Any:
    return register_multi_grad_hook([p], lambda gradients: note(seen, name, gradients[0]), mode="all")


def every_kind(name: str, p: Any, seen: Seen) -> Any:
    """In the order in which autograd calls them."""

    def halve(gradient: Tensor) -> Tensor:
        note(seen, name, "first")
        return gradient * 0.5

    p.register_hook(halve)
    on_tensor(name, p, seen)
    after_accumulation(name, p, seen)
    node = both_on_one_node(name, p, seen)
    node[0].register_prehook(lambda gradients: note(seen, name, gradients[0]))
    return node


def registers_another(name: str, p: Tensor, seen: Seen) -> Any:
    node, handles = node_of(p), []  # type: ignore[var-annotated]

    def hook(*_: Any) -> None:
        if not handles:
            handles.append(node.register_hook(lambda *_: note(seen, name, "registered in a hook")))

    node.register_hook(hook)
    return node


def takes_the_gradient(name: str, p: Any, seen: Seen) -> Any:
    """As Megatron's ``main_grad``."""
    node = node_of(p)

    def hook(*_: Any) -> None:
        p.main_grad = p.grad if not hasattr(p, "main_grad") else p.main_grad + p.grad
        p.grad = None
        note(seen, name, p.main_grad)

    node.register_hook(hook)
    return node


def not_kept(name: str, p: Tensor, seen: Seen) -> Any:
    """The node is gone at once, and its hook with it."""
    node_of(p).register_hook(lambda *_: note(seen, name, None))


def removed(name: str, p: Tensor, seen: Seen) -> Any:
    node = node_of(p)
    node.register_hook(lambda *_: note(seen, name, None)).remove()
    return node


ROWS: dict[str, Callable[[str, Tensor, Seen], Any]] = {
    "hooks on nodes": after,
    "hooks on nodes that change gradients": before,
    "both kinds on one node": both_on_one_node,
    "hooks on nodes that were removed": removed,
    "hooks on nodes that nobody keeps": not_kept,
    "hooks on nodes that register another": registers_another,
    "hooks on nodes that take the gradient": takes_the_gradient,
    "every kind": every_kind,
    "hooks on tensors": on_tensor,
    "hooks after accumulation": after_accumulation,
    "retained gradients": retains,
    "hooks on any of several": any_of_several,
}


class Holds(Module):
    def __init__(self, row: Callable[[str, Tensor, Seen], Any]) -> None:
        super().__init__(Stack(3))
        self.seen: Seen = []
        self.held = [row(name, p, self.seen) for name, p in self.named_parameters()]


def by_name(module: Any) -> dict[str, list[Any]]:
    """What hooks have seen, for each parameter: the order of parameters within a backward is not plain's."""
    return {name: [value for other, value in module.seen if other == name] for name, _ in module.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2}], ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_hooks_run_as_on_plain_lightning(name: str, options: dict[str, Any]) -> None:
    ours, plain = (
        fit(lambda: Holds(ROWS[name]), vectors(), strategy, recorded="losses", **options)
        for strategy in (superpipeline(k=1, k_prime=1), "auto")
    )
    assert_equal(ours.losses, plain.losses, "losses")
    assert_equal(by_name(ours.module), by_name(plain.module), "what hooks have seen")
    assert_equal(ours.state, plain.state, "weights")


def test_the_hooks_on_a_node_are_read_once_for_each_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
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
    assert set(found) == {1}


@pytest.mark.parametrize("name", ROWS)
def test_hooks_run_as_in_a_plain_loop(name: str) -> None:
    def run(streamed: bool) -> Any:
        torch.manual_seed(0)
        module = Holds(ROWS[name])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with sp_lightning.stream(module, optimizer, k=1, k_prime=1) if streamed else nullcontext():
            for batch in vectors():
                module.net(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return by_name(module), dict(module.state_dict())

    assert_equal(run(True), run(False), "what hooks have seen, and weights")


class Sparse(Module):
    """A table with sparse gradients, and two modules with one weight."""

    def __init__(self, row: Callable[[str, Tensor, Seen], Any]) -> None:
        table, first, second = nn.Embedding(10, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 16)
        second.weight = first.weight
        super().__init__(nn.Sequential(table, first, second))
        self.seen: Seen = []
        self.held = [row(name, p, self.seen) for name, p in self.named_parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", [each for each in ROWS if each != "hooks on nodes that nobody keeps"])
def test_hooks_on_sparse_and_shared_weights(name: str) -> None:
    numbers = [torch.tensor([1, 2, 2, 3]), torch.tensor([3, 3, 3, 4]), torch.tensor([0, 1, 2, 9])]
    ours, plain = (
        fit(lambda: Sparse(ROWS[name]), numbers, strategy, recorded="losses")
        for strategy in (superpipeline(k=1, k_prime=1), "auto")
    )
    assert_equal(by_name(ours.module), by_name(plain.module), "what hooks have seen")
    assert_equal(ours.state, plain.state, "weights")


class AnyOfAll(Holds):
    """The first gradient of all decides what the hook sees."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.held = [
            register_multi_grad_hook(list(self.parameters()), lambda g: self.seen.append(g.clone()), mode="any")
        ]


def test_a_hook_on_any_of_all_weights() -> None:
    ours, plain = (fit(AnyOfAll, vectors(), each, recorded="losses") for each in (superpipeline(k=1), "auto"))
    assert_equal(ours.module.seen, plain.module.seen, "what the hook has seen")


# ---------------------------------------------------------------------- edges and nodes in calls of autograd

EDGES: dict[str, Callable[[Tensor, Any], Any]] = {
    "grad": lambda loss, edges: torch.autograd.grad(loss, edges),
    "grad, allow_unused": lambda loss, edges: torch.autograd.grad(loss, edges, allow_unused=True),
    "one edge": lambda loss, edges: torch.autograd.grad(loss, edges[0]),
    "backward": lambda loss, edges: loss.backward(inputs=edges[:2]),
    "autograd.backward": lambda loss, edges: torch.autograd.backward([loss], inputs=edges),
    "several calls": lambda loss, edges: [
        torch.autograd.grad(loss, edges[2:], retain_graph=True), loss.backward(retain_graph=True),
        torch.autograd.grad(loss, edges[:3]),
    ],
}  # fmt: skip


class HoldsEdges(Module):
    """Edges that were taken before training, in calls within a step."""

    def __init__(self, call: Callable[[Tensor, Any], Any]) -> None:
        super().__init__(Stack(3))
        self.automatic_optimization = False
        self.call = call
        self.seen: Seen = []
        self.edges = [get_gradient_edge(p) for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.use(self.loss(batch))
        optimizer.step()

    def use(self, loss: Tensor) -> None:
        self.seen.append(self.call(loss, self.edges))
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.parameters()]


@pytest.mark.parametrize("name", EDGES)
def test_edges_of_before_the_step(name: str) -> None:
    """Backward does not reach them: gradients were None, or stayed away, and no error said so."""
    ours, plain = (
        fit(lambda: HoldsEdges(EDGES[name]), vectors(), each, recorded="losses")
        for each in (superpipeline(k=1), "auto")
    )
    assert_equal(ours.module.seen, plain.module.seen, "gradients")
    assert_equal(ours.state, plain.state, "weights")


@pytest.mark.parametrize(
    "name", [each for each in EDGES if each != "several calls"]
)  # a loop's step ends with a backward
def test_edges_of_before_the_step_in_a_loop(name: str) -> None:
    def run(streamed: bool) -> Any:
        torch.manual_seed(0)
        module = HoldsEdges(EDGES[name])
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        with sp_lightning.stream(module.net, optimizer, k=1, k_prime=1) if streamed else nullcontext():
            for batch in vectors():
                optimizer.zero_grad()
                module.use(module.net(batch).square().mean())
                optimizer.step()
                penalty = sum(
                    (p.square().sum() for p in module.parameters()), torch.zeros(())
                )  # its leaves are the host's
                module.seen.append(torch.autograd.grad(penalty, module.edges))
        return module.seen, dict(module.state_dict())

    assert_equal(run(True), run(False), "gradients and weights")


@pytest.mark.parametrize("way", [node_of, lambda p: get_gradient_edge(p).node], ids=["expand_as", "get_gradient_edge"])
def test_a_hook_on_a_node_of_the_running_step_of_a_loop(way: Callable[[Tensor], Any]) -> None:
    """The weight was read as an alias, whose node the graph has not: the hook never ran."""

    def run(streamed: bool) -> Any:
        torch.manual_seed(0)
        net, seen = Stack(3), []  # type: ignore[var-annotated]
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with sp_lightning.stream(net, optimizer, k=1, k_prime=1) if streamed else nullcontext():
            for batch in vectors():
                loss = net(batch).square().mean()
                nodes = {name: way(p) for name, p in net.named_parameters()}
                handles = [
                    node.register_prehook(lambda gradients, name=name: seen.append((name, gradients[0].clone())))
                    for name, node in nodes.items()
                ]
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                for handle in handles:
                    handle.remove()
        return sorted(seen, key=lambda each: each[0])

    ours, plain = run(True), run(False)
    assert_equal(ours, plain, "what hooks have seen")
    assert len(plain) == 3 * len(list(Stack(3).parameters()))


def test_a_hook_on_all_of_several_weights_is_refused_by_name() -> None:
    """It counts the nodes that backward will reach, and found none: it never ran."""
    with pytest.raises(RuntimeError, match=r"register_multi_grad_hook.*'net.head.bias'.*inside the step.*mode=\"any\""):
        fit(lambda: Holds(all_of_several), vectors(), superpipeline(k=1), recorded="losses")


class HoldsInStep(Holds):
    """The remedy of the error."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.held = [all_of_several(name, p, self.seen) for name, p in self.named_parameters()]
        head = self.get_parameter("net.head.weight")
        both = register_multi_grad_hook(
            [loss, head], lambda gradients: note(self.seen, "net.head.weight", gradients[1])
        )
        self.held.append(both)  # with a node that is not a weight's
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        for handle in self.held:
            handle.remove()


def test_a_hook_on_all_of_several_weights_inside_the_step() -> None:
    ours, plain = (fit(HoldsInStep, vectors(), each, recorded="losses") for each in (superpipeline(k=1), "auto"))
    assert_equal(by_name(ours.module), by_name(plain.module), "what hooks have seen")
    assert len(plain.module.seen) > 0


@pytest.mark.parametrize("way", ["lightning", "stream"])
def test_an_optimizer_that_steps_in_backward(way: str) -> None:
    """torch's own; torchrec and experiments of torchtitan use it."""

    def run(streamed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
        before = [p.detach().clone() for p in net.parameters()]
        if way == "lightning":

            class Manual(Module):
                def __init__(self) -> None:
                    super().__init__(net)
                    self.automatic_optimization = False

                def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
                    self.manual_backward(self.net(batch).square().mean())

                def configure_optimizers(self) -> None:
                    return None

            with pytest.warns(UserWarning, match="will run with no optimizer"):
                fit(Manual, vectors(), superpipeline(k=1) if streamed else "auto", recorded="nothing")
        else:
            inner = [each for p in net.parameters() for each in p._in_backward_optimizers]
            with sp_lightning.stream(net, inner, k=1, k_prime=1) if streamed else nullcontext():
                for batch in vectors():
                    net(batch).square().mean().backward()
        assert not any(map(torch.equal, before, net.parameters()))
        return [p.detach() for p in net.parameters()]

    assert_equal(run(True), run(False), "weights")
