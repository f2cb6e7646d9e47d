"""The GPU on loan: between two steps the run gives its memory back, and its limit changes; results stay as they are."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import stream
from sp_lightning.capabilities.tuning.tuner import Tuner
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.weights.ring import Slots
from sp_lightning.trainer.run import Run
from tests.support.engine import engine_of
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Does, Stepped, on_device
from tests.support.runs import Outcome, assert_same, fit, superpipeline
from tests.support.simdevice import simulated
from tests.support.tiers import some

WAYS: dict[str, Any] = {
    "moving layers": lambda: superpipeline(k=2, optimizer_overlap="off"),
    "updates in forward": lambda: superpipeline(k=1, optimizer_overlap="forward"),
    "layers that stay": lambda: on_device(gpu_layers=0.5, optimizer_overlap="off"),
    "steps on the GPU": lambda: on_device(optimizer_overlap="forward"),
}


class WithBuffers(Stack):
    """Has a buffer that changes in forward, and a parameter outside of all layers, which stays on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16, affine=False)
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x * self.scale))


def resident() -> Module:
    module = Stepped()
    module.net = WithBuffers()
    return module


def train(strategy: Any, act: Any = lambda *_: None, make: Any = Stepped, batches: int = 4) -> Outcome:
    """Trains with code after each batch."""
    return fit(make, vectors(batches), strategy, callbacks=[Does(on_train_batch_end=act)], recorded="losses")


def calls(trainer: Any, module: Any, *_: Any) -> None:
    """Calls the module, if nothing of it is in the host's memory while the GPU is lent: then a call uploads all that it uses."""
    if not list(module.buffers()) and not engine_of(trainer.strategy).found.stay:
        with torch.no_grad():
            module.net(vectors(1)[0])


def lends(trainer: Any, module: Any, *_: Any) -> None:
    """Lends the GPU, and uses the module meanwhile."""
    engine = engine_of(trainer.strategy)
    plan = engine.plan
    with trainer.strategy.gpu_released() as staying:
        assert staying == 0
        calls(trainer, module)
        assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert engine.plan == plan


@pytest.mark.rest("takes a second")
@pytest.mark.parametrize(
    ("way", "make"),
    some(itertools.product(WAYS, (Stepped, resident)), ("layers that stay", resident), why="other modes, and no residents"),
)  # fmt: skip
def test_a_loan_after_each_batch(way: str, make: Any) -> None:
    """Staying layers return with their state; nothing races, and no memory is used after it was freed."""
    with simulated():
        ours = train(WAYS[way](), lends, make)
    with simulated():
        plain = train(WAYS[way](), calls, make)
    assert_same(ours, plain)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("error", [Exception, KeyboardInterrupt])
def test_an_error_within_a_loan(error: type[BaseException]) -> None:
    """The loop goes on after the loan: everything has returned."""

    def fails(trainer: Any, *_: Any) -> None:
        with suppress(error), trainer.strategy.gpu_released():
            raise error

    assert_same(train(WAYS["layers that stay"](), fails), train(WAYS["layers that stay"]()))


def refusals(trainer: Any, what: str) -> None:
    strategy = trainer.strategy
    with pytest.raises(RuntimeError, match=what), strategy.gpu_released():
        pass
    with pytest.raises(RuntimeError, match=what):
        strategy.gpu_memory = "1GiB"


class LendsWithin(Stepped):
    def loss(self, batch: Any) -> Tensor:
        refusals(self.trainer, "while a step runs.*on_train_batch_end")
        return super().loss(batch)


def test_a_loan_within_a_step_and_within_another_one() -> None:
    def lends_twice(trainer: Any, *_: Any) -> None:
        with trainer.strategy.gpu_released():
            refusals(trainer, "inside of gpu_released")

    does = Does(
        on_train_batch_end=lends_twice,
        on_before_optimizer_step=lambda trainer, *_: refusals(trainer, "while a step runs"),
    )
    fit(LendsWithin, vectors(2), superpipeline(k=1), callbacks=[does])


def test_a_loan_outside_of_a_run() -> None:
    with superpipeline().gpu_released() as staying:
        assert staying == 0


class Scripted(Stepped):
    def __init__(self) -> None:
        super().__init__()
        self.net.head = torch.jit.script(self.net.head)  # type: ignore[assignment]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_the_state_of_whole_modules_leaves_and_returns() -> None:
    """A ScriptModule is on the GPU as a whole, so its optimizer makes state there."""

    def lends(trainer: Any, module: Any, *_: Any) -> None:
        state = trainer.optimizers[0].state[module.net.head.weight]
        assert made[-1].has(state["exp_avg"])
        with trainer.strategy.gpu_released() as staying:
            assert staying == 0
            assert not made[-1].has(state["exp_avg"])
        assert made[-1].has(state["exp_avg"])

    with simulated() as made:
        fit(Scripted, vectors(1), superpipeline(k=1), callbacks=[Does(on_train_batch_end=lends)])


def test_memory_that_tensors_view_stays_and_is_reported() -> None:
    net = Stack()
    views = list[Tensor]()
    net.head.register_forward_hook(lambda module, *_: views.append(module.weight[:1]))
    with stream(net, k=1) as streamed:
        net(vectors(1)[0])
        with streamed.gpu_released() as staying:
            assert staying >= net.head.weight.nbytes
        views.clear()
        with streamed.gpu_released() as staying:
            assert staying == 0


@pytest.mark.rest("takes tenths of a second")
def test_a_loan_in_a_loop_of_the_users() -> None:
    net = Stack()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    with simulated(), stream(net, optimizer, k=1) as streamed:
        for x in vectors(2):
            loss = net(x).sum()
            with pytest.raises(RuntimeError, match="while a step runs"), streamed.gpu_released():
                pass
            loss.backward()
            with streamed.gpu_released():
                assert streamed._run.engine.weight_bytes == 0
            optimizer.step()
    assert streamed.stats().fetched_layers > 0


# ---------------------------------------------------------------------- another limit


@pytest.mark.rest("takes a second")
@pytest.mark.parametrize(
    "limits", some([["1MiB", "26KiB"], ["26KiB", "1MiB"]], ["26KiB", "1MiB"], why="the same downwards")
)
def test_another_limit_between_batches(monkeypatch: pytest.MonkeyPatch, limits: list[Any]) -> None:
    """The window follows the limit, up and down, and results do not."""
    # On a simulated device a copy takes no time. With these times and stalls larger windows are faster.
    monkeypatch.setattr(Tuner, "_measured", lambda self, *_: (1 / self.engine.plan.k, 0.5 / self.engine.plan.k))
    plans = []

    def changes(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        plans.append(trainer.strategy.plan)
        if batch_idx == 5:
            trainer.strategy.gpu_memory = limits[1]

    with simulated():
        ours = train(superpipeline(gpu_memory=limits[0]), changes, batches=12)
    assert_same(ours, train("auto", batches=12))
    large, small = (plans[:6], plans[6:])[:: 1 if limits[0] == "1MiB" else -1]
    assert small[-1].k < large[-1].k
    assert max(plan.peak_device_bytes for plan in small) <= 26 * 1024


@pytest.mark.parametrize("former", [2**20, None])
def test_a_limit_that_is_too_small_leaves_the_former(former: int | None) -> None:
    def changes(trainer: Any, *_: Any) -> None:
        with pytest.raises(ValueError, match=r"with gpu_memory=.* there are 1024 bytes"):
            trainer.strategy.gpu_memory = "1KiB"
        assert trainer.strategy.gpu_memory == former

    assert_same(train(superpipeline(gpu_memory=former), changes), train("auto"))


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("owner", "method"),
    [(Run, "finish_updates"), (Slots, "_make_planned"), (Engine, "_connect"), (Run, "_find_and_plan")],
)
def test_an_error_while_the_limit_changes_leaves_the_former(
    owner: type, method: str, error: type[BaseException]
) -> None:
    """The engine is built with the former limit, and training goes on with it."""
    own = getattr(owner, method)

    def changes(trainer: Any, module: Any, *_: Any) -> None:
        plan, parameters, errors = trainer.strategy.plan, list(module.parameters()), [error()]

        def fails_once(*args: Any, **kwargs: Any) -> Any:
            if errors:
                raise errors.pop()
            return own(*args, **kwargs)

        with pytest.raises(error), mock.patch.object(owner, method, fails_once):
            trainer.strategy.gpu_memory = "2MiB"
        assert trainer.strategy.gpu_memory == 2**20
        assert trainer.strategy._run._window.budget == 2**20
        assert (trainer.strategy.plan, list(module.parameters())) == (plan, parameters)

    assert_same(train(superpipeline(gpu_memory=2**20, k=1), changes), train("auto"))
