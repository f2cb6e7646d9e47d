"""A step in the background finds what it would find in ``optimizer.step()``, and changes nothing of what the model finds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from sp_lightning.core.torch_compat.private import (
    COMPILE_LOCK,
    set_compiling,
)
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.updates.step_context import StepContext, awaiting_steps
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Stepped, on_device
from tests.support.runs import Outcome, assert_same, fit
from tests.support.ways import overlapping

_BIASED: ContextVar[float] = ContextVar("biased", default=0.0)


# ---------------------------------------------------------------------- what each thread has for itself


def _found() -> dict[str, Any]:
    """What a step may depend on, as this thread has it now."""
    return {
        "variable": _BIASED.get(),
        "device": torch.ones(()).device.type,
        "autocast": (torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")),
        "denormals": (torch.tensor(sys.float_info.min, dtype=torch.float64) / 2).item(),
    }


@pytest.fixture
def as_others_never_have_it() -> Iterator[None]:
    token = _BIASED.set(1.5)
    torch.set_default_device("meta")
    torch.set_flush_denormal(True)
    try:
        with torch.autocast("cpu", torch.float16):
            yield
    finally:
        torch.set_flush_denormal(False)
        torch.set_default_device(None)
        _BIASED.reset(token)


@pytest.mark.usefixtures("as_others_never_have_it")
def test_a_step_finds_what_its_caller_has() -> None:
    context = StepContext(["cpu"])
    torch.set_default_device(None)  # else the tensors of this test have no values
    with ThreadPoolExecutor(1) as background:
        before = background.submit(_found).result()
        during = background.submit(
            context.run, lambda: (_BIASED.get(), torch.ones(()).device.type, _settings())
        ).result()
        after = background.submit(_found).result()
    assert during == (1.5, "meta", (True, torch.float16, 0.0))
    assert before == after
    assert before["variable"] == 0.0
    assert before["device"] == "cpu"
    assert not before["autocast"][0]


def _settings() -> tuple[bool, torch.dtype, float]:
    return torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), sys.float_info.min / 2


class Declared(Optimizer):
    """Adds what a context variable says, as code does that reads a configuration."""

    steps_each_parameter_alone = True

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for p in [p for group in self.param_groups for p in group["params"]]:
            if p.grad is not None:
                p.data.add_(p.grad, alpha=-0.1).add_(_BIASED.get())
        return loss


def test_the_optimizers_of_a_run_do() -> None:
    def run(strategy: Any) -> Outcome:
        return fit(lambda: Stepped(lambda parameters: Declared(parameters, {})), vectors(), strategy, recorded="losses")

    without = run("auto")
    token = _BIASED.set(0.01)
    try:
        plain, ours = run("auto"), run(on_device())
    finally:
        _BIASED.reset(token)
    assert_same(ours, plain)
    assert not torch.equal(plain.losses[-1], without.losses[-1])


# ---------------------------------------------------------------------- torch.compile


class CompilesInForward(Stepped):
    """Compiles something in each forward, for which no graph is there yet."""

    def __init__(self, backend: Callable[..., Any]) -> None:
        super().__init__(lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=False))
        self.backend = backend

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        size = batch_idx + 2
        torch.compile(lambda x: x * size, backend=self.backend, dynamic=False)(torch.ones(size))
        return super().training_step(batch, batch_idx)


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates begin in the next forward."""
    submit = BackgroundUpdates.submit

    def late(self: BackgroundUpdates, layer: Any, work: Callable[[], None], *then: Any) -> None:
        def later() -> None:
            time.sleep(0.01)
            work()

        submit(self, layer, later, *then)

    monkeypatch.setattr(BackgroundUpdates, "submit", late)


@pytest.mark.long("takes a second or more")
@pytest.mark.usefixtures("long_steps")
def test_a_compilation_that_waits_for_a_step_gets_it() -> None:
    def run(strategy: Any) -> Outcome:
        seen = list[Tensor]()
        module: Any = None

        def backend(graph: Any, _: Any) -> Any:
            state = module.trainer.optimizers[0].state  # waits for all updates
            seen.extend(each["exp_avg"].clone() for each in state.values())
            return graph

        def make() -> CompilesInForward:
            nonlocal module
            module = CompilesInForward(backend)
            return module

        torch._dynamo.reset()
        outcome = fit(make, vectors(3), strategy, recorded="losses")
        outcome.gradients = [{str(index): each} for index, each in enumerate(seen)]
        assert seen
        return outcome

    assert_same(run(on_device(optimizer_overlap="forward")), run("auto"))


def test_steps_and_compilations_exclude_each_other() -> None:
    context, order, inside = StepContext(["cpu"]), list[str](), threading.Event()

    def step() -> None:
        inside.set()
        order.append(f"step {torch.compiler.is_compiling()}")

    with ThreadPoolExecutor(1) as background:
        with COMPILE_LOCK:
            before = set_compiling(True)
            running = background.submit(context.run, step)
            assert not inside.wait(0.1), "it waits"
            with awaiting_steps():  # but not for who waits for it
                running.result(10)
            assert torch.compiler.is_compiling()
            set_compiling(before)
            order.append("compiled")
            running = background.submit(context.run, step)
        running.result(10)
    assert order == ["step False", "compiled", "step False"]


@pytest.mark.rest("takes tenths of a second")
def test_only_updates_that_make_state_on_the_device_are_waited_for() -> None:
    """Updates of torch's optimizers on the host still run beside the next forward."""
    waits = list[int]()
    follow = BackgroundUpdates.complete

    def counted(self: BackgroundUpdates, layer: Any) -> None:
        waits.append(1)
        follow(self, layer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundUpdates, "complete", counted)
        fit(lambda: Module(Stack()), vectors(), overlapping("forward"), recorded="losses")
        assert not waits
        fit(Stepped, vectors(), on_device(optimizer_overlap="forward"), recorded="losses")
    layers = len(Stack().blocks) + 2
    assert len(waits) == layers, "those that make state"
