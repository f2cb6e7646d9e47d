"""Hooks that user code has registered before a step, of every kind: each runs as on plain Lightning, or is refused by name.

Modules use the device parameter in a step, so backward does not reach the host parameter's own ``AccumulateGrad`` node. Hooks on
it never ran, and nothing noticed: weights that torch's ``_apply_optimizer_in_backward`` steps did not train.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge, register_multi_grad_hook
from torch.distributed.optim import _apply_optimizer_in_backward

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Manual

USERS = tiers("users, k=1", rest=["users, k=1, bf16-mixed"])
Seen = list[Any]
Row = Callable[[Any, Seen], Any]


def hooks(name: str, variants: Any = USERS, **more: Any) -> Any:
    return program(f"hooks: {name}", variants, **more)


def node_of(p: Tensor) -> Any:
    """The node that adds gradients to ``p.grad``, as Megatron, apex and NeMo find it."""
    return p.expand_as(p).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


def note(seen: Seen, value: Any) -> Any:
    seen.append(value.to_dense().clone() if isinstance(value, Tensor) else value)


def halves(seen: Seen, gradient: Tensor) -> Tensor:
    note(seen, gradient)
    return gradient * 0.5


def after(p: Tensor, seen: Seen) -> Any:
    def hook(inputs: Any, outputs: tuple[Tensor]) -> None:
        assert inputs == ()
        note(seen, outputs[0])
        note(seen, p.grad)

    node = node_of(p)
    node.register_hook(hook)
    return node


def before(p: Tensor, seen: Seen) -> Any:
    node = get_gradient_edge(p).node
    node.register_prehook(lambda gradients: (note(seen, p.grad), (gradients[0] * 0.5,))[1])
    return node


def every_kind(p: Any, seen: Seen) -> Any:
    """In the order in which autograd calls them."""
    p.register_hook(lambda gradient: (note(seen, "first"), gradient * 0.5)[1])
    p.register_hook(partial(halves, seen))
    p.register_post_accumulate_grad_hook(lambda p: note(seen, p.grad))
    nodes = before(p, seen), after(p, seen)
    nodes[0].register_prehook(lambda gradients: note(seen, gradients[0]))
    return nodes


def registers_another(p: Tensor, seen: Seen) -> Any:
    node, handles = node_of(p), []  # type: ignore[var-annotated]

    def hook(*_: Any) -> None:
        if not handles:
            handles.append(node.register_hook(lambda *_: note(seen, "registered in a hook")))

    node.register_hook(hook)
    return node


def takes_the_gradient(p: Any, seen: Seen) -> Any:
    """As Megatron's ``main_grad``."""
    node = node_of(p)

    def hook(*_: Any) -> None:
        p.main_grad = p.grad if not hasattr(p, "main_grad") else p.main_grad + p.grad
        p.grad = None
        note(seen, p.main_grad)

    node.register_hook(hook)
    return node


def removed(p: Tensor, seen: Seen) -> Any:
    node = node_of(p)
    node.register_hook(lambda *_: note(seen, None)).remove()
    return node


def multi(p: Tensor, seen: Seen, mode: Any = "any") -> Any:
    return register_multi_grad_hook([p], lambda found: note(seen, found if mode == "any" else found[0]), mode=mode)


ROWS: dict[str, Row] = {
    "on nodes": after,
    "on nodes, that change gradients": before,
    "on nodes, removed": removed,
    "on nodes that nobody keeps": lambda p, seen: node_of(p).register_hook(lambda *_: note(seen, None)) and None,
    "on nodes, that register another": registers_another,
    "on nodes, that take the gradient": takes_the_gradient,
    "of every kind": every_kind,
    "on tensors": lambda p, seen: p.register_hook(partial(halves, seen)),
    "after accumulation": lambda p, seen: p.register_post_accumulate_grad_hook(lambda p: note(seen, p.grad)),
    "that retain gradients": lambda p, seen: p.retain_grad(),  # does nothing for a leaf
    "on any of several": multi,
}


class Holds(Module):
    """By parameter, what its hooks have seen: the order of parameters within a backward is not plain's."""

    def __init__(self, row: Row, net: Callable[[], nn.Module] = lambda: Stack(3)) -> None:
        super().__init__(net())
        self.seen: dict[str, Seen] = {name: [] for name, _ in self.named_parameters()}
        self.held = [row(p, self.seen[name]) for name, p in self.named_parameters()]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def sparse_and_shared() -> nn.Module:
    """A table with sparse gradients, and two modules with one weight."""
    table, first, second = nn.Embedding(10, 16, sparse=True), nn.Linear(16, 16), nn.Linear(16, 16)
    second.weight = first.weight
    return nn.Sequential(table, first, second)


def numbers() -> Any:
    return [torch.tensor([1, 2, 2, 3]), torch.tensor([3, 3, 3, 4]), torch.tensor([0, 1, 2, 9])]


for name, row in ROWS.items():
    hooks(name, covers="hooks on the host's parameters")(partial(Holds, row))
    hooks(
        f"{name}, accumulated",
        tiers(rest=["users, k=1"]),
        accumulate_grad_batches=2,
        covers="gradients that are added up",
    )(partial(Holds, row))
    if "nobody keeps" not in name:
        hooks(
            f"{name}, sparse and shared",
            tiers(rest=["users, k=1"]),
            batches=numbers,
            covers="gradients of another form",
        )(partial(Holds, row, sparse_and_shared))


@hooks("on any of all weights")
class AnyOfAll(Holds):
    """The first gradient of all decides what the hook sees."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)
        self.held = [
            register_multi_grad_hook([*self.parameters()], partial(note, self.seen["net.stem.bias"]), mode="any")
        ]


hooks(
    "on all of several weights", tiers("users, k=1"), covers="it counts the nodes that backward will reach, and found none",
    refused={"users, k=1": r".*register_multi_grad_hook.*'net.head.bias'.*inside the step.*mode=\"any\""}, repairable=False,
)(partial(Holds, partial(multi, mode="all")))  # fmt: skip


@hooks("on all of several weights, inside the step", tiers("users, k=1"))
class HoldsInStep(Holds):
    """The remedy of the error; and with a node that is not a weight's."""

    def __init__(self) -> None:
        super().__init__(lambda *_: None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.held = [multi(p, self.seen[name], "all") for name, p in self.named_parameters()]
        head = self.net.head.weight  # type: ignore[union-attr]
        both = lambda gradients: note(self.seen["net.head.weight"], gradients[1])  # noqa: E731
        self.held.append(register_multi_grad_hook([loss, head], both))  # type: ignore[list-item]
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        assert all(self.seen.values())
        for handle in self.held:
            handle.remove()


class InBackward(Manual):
    """torch's own optimizers that step in backward; torchrec and experiments of torchtitan use it."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)))
        _apply_optimizer_in_backward(torch.optim.SGD, self.net.parameters(), {"lr": 0.1})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        before = [p.detach().clone() for p in self.net.parameters()]
        loss = self.loss(batch)
        self.manual_backward(loss)
        self.seen.append([bool((p != old).any()) for p, old in zip(self.net.parameters(), before, strict=True)])
        return loss

    def configure_optimizers(self) -> Any:
        return None


def all_were_trained(ours: Any) -> None:
    assert ours.module.seen == [[True] * 4] * len(vectors())


hooks(
    "an optimizer that steps in backward", tiers("users, k=1"), covers="its hooks are on nodes", also=all_were_trained
)(InBackward)

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


class HoldsEdges(Manual):
    """Edges that were taken before training, in calls within a step."""

    def __init__(self, call: Callable[[Tensor, Any], Any]) -> None:
        super().__init__(Stack(3))
        self.call = call
        self.edges = [get_gradient_edge(p) for p in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.use(self.loss(batch))
        optimizer.step()

    def use(self, loss: Tensor) -> None:
        self.seen.append(self.call(loss, self.edges))
        self.seen += [None if p.grad is None else p.grad.clone() for p in self.parameters()]


for name, call in EDGES.items():
    hooks(f"edges of before the step, {name}", tiers("users, k=1"),
          covers="backward does not reach them: gradients were None, or stayed away, and no error said so")(
        partial(HoldsEdges, call)
    )  # fmt: skip
