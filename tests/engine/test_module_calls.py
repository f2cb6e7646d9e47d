"""Each call of a module ends by itself: inside another one, in another thread, and where it has not begun."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from sp_lightning.core.device.own_threads import OwnThreads
from sp_lightning.core.layers.layer import AllRows
from tests.support.engine import listen


class Listens:
    """Notes calls by number. ``enter`` raises for an input of zeros, and waits for ``go`` where there is one."""

    def __init__(self) -> None:
        self.entered: list[Any] = []
        self.left: list[Any] = []
        self.threads = OwnThreads()

    def enter(self, visits: Any, inputs: Any) -> Any:
        (x,) = inputs
        if not x.any():
            raise RuntimeError("no memory")
        self.entered.append(float(x.sum()))
        return self.entered[-1:]

    def leave(self, visits: Any, output: Any) -> None:
        self.left += visits


class Calls(nn.Module):
    """Does something inside its call."""

    def __init__(self) -> None:
        super().__init__()
        self.inside: Callable[[Tensor], None] = lambda x: None

    def forward(self, x: Tensor) -> Tensor:
        self.inside(x)
        return x


@contextmanager
def listening(*modules: nn.Module) -> Iterator[Listens]:
    listener = Listens()
    calls = listen(listener, dict.fromkeys(modules, ()))
    yield listener
    for each in calls:
        each.remove()


def test_a_call_that_has_not_begun_does_not_end_the_call_around_it() -> None:
    """The end of a call whose ``enter`` had raised took the outer call for its own."""
    module = Calls()

    def inside(x: Tensor) -> None:
        if x.sum() == 2:
            with pytest.raises(RuntimeError, match="no memory"):
                module(torch.zeros(1))
            assert listener.left == []

    module.inside = inside
    with listening(module) as listener:
        module(torch.tensor([2.0]))
    assert listener.left == [2.0]


class Routes(AllRows):
    """Notes the routed calls that are running. Those of zeros cannot be read."""

    watches_calls = True

    def __init__(self) -> None:
        self.running: list[float] = []

    def begin_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not args[0].any():
            raise RuntimeError("no memory")
        self.running.append(float(args[0].sum()))

    def end_call(self) -> None:
        self.running.pop()


def test_a_routed_call_that_has_not_begun_does_not_end_the_one_around_it() -> None:
    """The experts of the outer call were those of no call any more, and all of them came."""
    module, rows, listener = Calls(), Routes(), Listens()
    layer: Any = SimpleNamespace(rows=rows, index=0, name="experts")

    def inside(x: Tensor) -> None:
        if x.sum() == 2:
            with pytest.raises(RuntimeError, match="no memory"):
                module(torch.zeros(1))
            assert rows.running == [2.0]

    module.inside = inside
    with mock.patch.object(listener, "enter", return_value=()):
        (calls,) = listen(listener, {module: (layer,)})
        module(torch.tensor([2.0]))
    calls.remove()
    assert rows.running == []


def test_a_routed_call_whose_layers_do_not_come_ends() -> None:
    module, rows, listener = Calls(), Routes(), Listens()
    layer: Any = SimpleNamespace(rows=rows, index=0, name="experts")
    (calls,) = listen(listener, {module: (layer,)})
    with mock.patch.object(listener, "enter", side_effect=MemoryError), pytest.raises(MemoryError):
        module(torch.tensor([2.0]))
    calls.remove()
    assert rows.running == []


def test_a_hook_of_a_user_that_raises_ends_the_call_of_its_module_alone() -> None:
    inner, outer = Calls(), Calls()

    def refuses(module: nn.Module, args: Any) -> None:
        if module is inner:
            raise RuntimeError("refused")

    def inside(x: Tensor) -> None:
        with pytest.raises(RuntimeError, match="refused"):
            inner(x + 1)
        assert listener.left == [3.0]

    outer.inside = inside
    handle = register_module_forward_pre_hook(refuses)
    try:
        with listening(inner, outer) as listener:
            outer(torch.tensor([2.0]))
    finally:
        handle.remove()
    assert listener.left == [3.0, 2.0]


def test_ctrl_c_ends_a_call() -> None:
    """torch calls no hook after it."""
    inner, outer = Calls(), Calls()

    def interrupted(x: Tensor) -> None:
        raise KeyboardInterrupt

    def inside(x: Tensor) -> None:
        with pytest.raises(KeyboardInterrupt):
            inner(x + 1)
        assert listener.left == [2.0]

    inner.inside, outer.inside = interrupted, inside
    with listening(inner, outer) as listener:
        outer(torch.tensor([1.0]))
    assert listener.left == [2.0, 1.0]
