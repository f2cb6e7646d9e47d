"""Threads of the user's within a step, which only read weights, and threads that look at a module while it is trained."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sp_lightning.core.weights import roles
from tests.equality.rows import program, tiers
from tests.support.engine import Uses
from tests.support.models import Module, Stack, vectors
from tests.support.readers import LOOKS, MAY_FAIL, Watched, elsewhere
from tests.support.runs import Outcome, assert_equal


class Pool(Module):
    """A thread computes with the weights of a layer inside the forward."""

    def __init__(self, use: Callable[[Any, Tensor], Any], *, freezes: bool = False) -> None:
        super().__init__(Stack())
        self.use = use
        self.net.stem.requires_grad_(not freezes)  # type: ignore[union-attr]

    def loss(self, batch: Tensor) -> Tensor:
        before = [p.detach().clone() for p in self.parameters()]
        found = elsewhere(lambda: self.use(self.net, batch))
        assert_equal([p.detach() for p in self.parameters()], before, "written")
        if isinstance(found, Exception):
            raise found
        return super().loss(batch) + found.square().mean()


def computes(net: Any, x: Tensor) -> Tensor:
    return linear(x, net.stem.weight, net.stem.bias)


def _writes(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return net.stem.weight.mul_(1.01)


def _writes_out(net: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.mul(x[0, 0], 2, out=net.stem.bias)


def _gives_memory(net: Any, x: Tensor) -> Any:
    net.stem.weight.data = net.stem.weight.detach().clone()


def _differentiates(net: Any, x: Tensor) -> Any:
    return torch.autograd.grad(x.sum() * 1, list(net.parameters()), allow_unused=True)


ONLY = r".* in another thread than that of trainer\.fit.*copy\.deepcopy\(module\)"
BOTH = tiers("keep, k=1", "keep, k=1, bf16-mixed")
for name, use, what in (
    ("computes", computes, r"Backward reached what was computed with 'net\.stem\.(weight|bias)'"),
    ("calls", lambda net, x: net.stem(x), r"'net\.stem' was called"),
    ("writes", _writes, r"'net\.stem\.weight' was to be written"),
    ("writes a result", _writes_out, r"'net\.stem\.bias' was to be written"),
    ("gives memory", _gives_memory, r"'net\.stem\.weight' was to be written"),
    ("asks for gradients", _differentiates, r"The gradient of 'net\.stem\.weight' was asked for"),
):  # fmt: skip
    program(
        f"threads: a thread of the step {name}", BOTH, refused=dict.fromkeys(BOTH, f"RuntimeError: {what}{ONLY}"),
        covers="a thread may only read",
    )(partial(Pool, use))  # fmt: skip


def averages(net: Any, x: Tensor) -> Tensor:
    """As NeMo's ``EMAOptimizer`` does: its function writes averages, and reads weights."""
    found = [torch.zeros_like(p, device="cpu") for p in net.parameters()]
    torch._foreach_add_(found, list(net.parameters()), alpha=0.1)
    return found[0]


def of_a_copy(net: Any, x: Tensor) -> Any:
    """What the error advises."""
    return copy.deepcopy(net.stem)(x)


for use in (computes, averages, of_a_copy):
    program(
        f"threads: {use.__name__.replace('_', ' ')}, without gradients", tiers(rest=["keep, k=1"]), covers="a thread may read"
    )(lambda use=use: Pool(torch.no_grad()(use)))  # fmt: skip
program(
    "threads: computes with frozen weights", tiers(rest=["keep, k=1"]), covers="a thread may read, with a graph as well"
)(partial(Pool, computes, freezes=True))

# ---------------------------------------------------------------------- threads that look at all moments

EXACT = [name for name in LOOKS if name not in MAY_FAIL and name != "copy"]


class LookedAt(Watched):
    """Another thread looks at the module, and is waited for, at all moments of a step. Looks that are exact are noted."""

    def __init__(self, looks: Any = EXACT, *, in_backward: bool = True, writes: bool = False) -> None:
        super().__init__()
        self.looks, self.in_backward, self.writes = list(looks), in_backward, writes
        self.seen: list[Any] = []

    def look(self, *_: Any) -> None:
        for name in self.looks:
            found = elsewhere(lambda name=name: LOOKS[name](self, self.trainer))  # type: ignore[misc]
            assert name in MAY_FAIL or not isinstance(found, Exception), (name, found)
            self.seen.append(found if name in EXACT and self.in_backward else None)

    def loss(self, batch: Tensor) -> Tensor:
        net: Any = self.net
        self.look()
        x = net.stem(batch)
        if self.writes:
            with torch.no_grad():
                net.blocks[0].inner.weight.mul_(1.01)
                self.look()
                net.blocks[1].inner.weight.data.mul_(0.99)
            self.look()
        for block in net.blocks:
            x = block(x)
            self.look()
        if x.requires_grad and self.in_backward:
            x.register_hook(self.look)
        return net.head(x).square().mean()  # type: ignore[no-any-return]

    on_train_batch_start: Any = look
    on_train_batch_end: Any = look
    on_fit_start: Any = look
    on_fit_end: Any = look


for writes in (False, True):
    program(
        f"threads: what another one sees{', written in the step' if writes else ''}",
        tiers(rest=["forward, accumulated, clipped, two epochs"] if writes else (),
              long=["keep, k=1", "offload, k=1", "forward, accumulated, clipped, two epochs"]),
        validated=True, covers=LookedAt.__doc__ or "",
    )(partial(LookedAt, writes=writes))  # fmt: skip
program(
    "threads: looks that may fail", tiers(long=["backward, accumulated, two epochs", "keep, k=1", "recompute, k=1"]),
    validated=True,
    covers="an error in another thread leaves the run alone",
)(partial(LookedAt, LOOKS, in_backward=False))  # fmt: skip


@contextmanager
def only_in_this_thread(owner: Any, name: str) -> Iterator[None]:
    """A function of the engine is never called in another thread than the present one."""
    function, here = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **options: Any) -> Any:
        assert threading.get_ident() == here, f"{name} was called in another thread"
        return function(*args, **options)

    with mock.patch.object(owner, name, call):
        yield


@program(
    "threads: parameters that another one was given", tiers(rest=["keep, k=1"]),
    inside=partial(only_in_this_thread, Uses, "operation_on"),
)  # fmt: skip
class Given(Watched):
    """They were taken inside of the step. While a layer is away its uses are those of the host's parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def loss(self, batch: Tensor) -> Tensor:
        kept = list(self.net.parameters())
        self.seen.append(elsewhere(lambda: [(p.detach().clone(), p.data.clone()) for p in kept]))
        return super().loss(batch)


# ---------------------------------------------------------------------- threads that copy, call and save


def are_ordinary(ours: Outcome) -> None:
    whole, shallow, parameters = ours.module.noted[-1]  # type: ignore[index, union-attr]
    for each in whole.modules():
        assert type(each._parameters) is dict
    assert {type(p) for p in (*whole.parameters(), *parameters.values())} == {nn.Parameter}
    assert isinstance(shallow, nn.Linear)
    assert all(type(each._parameters) is dict for each in ours.module.modules())


@program(
    "threads: a copy of the module", tiers(rest=["keep, k=1"]), at="start", also=are_ordinary,
    inside=partial(only_in_this_thread, roles, "leave_all"),
)  # fmt: skip
def _(m: Any) -> None:
    """What a parameter is to the run it is meanwhile. After the run the module's dictionaries are ordinary again."""
    one = m.net[0].first
    copies = elsewhere(lambda: (copy.deepcopy(m.net), copy.copy(one), pickle.loads(pickle.dumps(one._parameters))))
    m.noted.append(copies)


def refused(said: str) -> Callable[[Outcome], None]:
    def also(ours: Outcome) -> None:
        noted: Any = ours.module.noted
        assert noted
        assert all(said in str(each) for each in noted), noted

    return also


@program(
    "threads: a call between two steps, refused in its thread", tiers(rest=["keep, k=1"]), at="on_train_batch_end",
    also=refused("was called in another thread"),
)  # fmt: skip
def _(m: Any) -> None:
    """The run goes on."""
    m.noted.append(elsewhere(lambda: m.net(vectors(1)[0])))


def saves(m: Any) -> Any:
    try:
        raise KeyError
    except KeyError:
        return m.trainer.strategy.lightning_module_state_dict()


@program(
    "threads: a checkpoint of two steps, refused in its thread", tiers(rest=["backward, two epochs"]), at="loss",
    also=refused("Save it in a callback"),
)  # fmt: skip
def _(m: Any, batch: Tensor) -> Tensor:
    """Also if the thread handles an error of its own, as a checkpoint on exception does. The run goes on."""
    x = m.net[0](batch)
    if x.requires_grad:  # the layers above it are updated by then
        x.register_hook(lambda _: m.noted.append(elsewhere(lambda: saves(m))))
    return m.net[3](m.net[2](m.net[1](x))).square().mean()  # type: ignore[no-any-return]
