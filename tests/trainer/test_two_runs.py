"""Two runs at once, in two threads of one process: each is what it is alone."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.optim import optimizer as torch_optimizer

from sp_lightning.core.updates.updating import Updating
from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from tests.support.elsewhere import backward_elsewhere
from tests.support.models import vectors
from tests.support.readers import Watched, elsewhere
from tests.support.runs import assert_equal, fused, loader, superpipeline, trainer_for
from tests.support.tiers import first

WAYS: dict[str, dict[str, Any]] = {
    "off": {"k": 1},
    "forward": {"k": 1, "optimizer_overlap": "forward"},
    "backward": {"k": 1, "optimizer_overlap": "backward"},
}


class Meets(Callback):
    """Two trainers take turns: each waits after a batch until the other one has begun, or ended, one more."""

    def __init__(self, barrier: threading.Barrier) -> None:
        self.barrier = barrier

    def on_train_batch_start(self, *_: Any) -> None:
        self.meet()

    def meet(self) -> None:
        try:
            self.barrier.wait(20)
        except threading.BrokenBarrierError:  # the other one has ended
            return


def both(make: Callable[[int], Any], strategies: list[Any], counts: tuple[int, int]) -> tuple[list[Any], list[Any]]:
    """Fits two modules at once, with so many batches. Returns the modules, and what each has raised."""
    torch.manual_seed(7)
    modules, errors = [make(0), make(1)], [None, None]
    barrier = threading.Barrier(2)

    def run(index: int) -> None:
        try:
            trainer_for(strategies[index], callbacks=[Meets(barrier)]).fit(
                modules[index], loader(vectors(counts[index]))
            )
        except BaseException as error:
            errors[index] = error  # type: ignore[call-overload]
        finally:
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,), daemon=True) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a run hangs"
    return modules, errors


def weights(module: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("threaded", first([False, True], False, why="the same with one thread for both backwards"))
@pytest.mark.parametrize("way", WAYS)
def test_each_of_two_runs_is_what_it_is_alone(way: str, threaded: bool) -> None:
    """The first is under way when the second begins, and when it ends."""

    def make(_: int) -> Any:
        return (fused(Watched) if way != "off" else Watched)()

    plain, errors = both(make, ["auto", "auto"], (12, 4))
    assert errors == [None, None]
    with backward_elsewhere() if threaded else nullcontext():
        ours, errors = both(make, [superpipeline(**WAYS[way]) for _ in range(2)], (12, 4))
    assert errors == [None, None]
    assert_equal(list(map(weights, ours)), list(map(weights, plain)), "weights")
    assert not torch_optimizer._global_optimizer_pre_hooks


class Fails(Watched):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 3:
            loss.register_hook(self.fail)
        return loss

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("in backward")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("other", ["ours", "plain"])
def test_a_backward_that_fails_in_another_run_is_that_run_s_alone(other: str) -> None:
    def make(index: int) -> Any:
        return (Fails if index else Watched)()

    plain, _ = both(make, ["auto", "auto"], (12, 12))
    ours, errors = both(make, [superpipeline(k=1), superpipeline(k=1) if other == "ours" else "auto"], (12, 12))
    assert errors[0] is None
    assert type(errors[1]) is KeyError
    assert_equal(list(map(weights, ours)), list(map(weights, plain)), "weights")


def step() -> None:
    """Of a model that no run knows."""
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()


@pytest.mark.rest("takes tenths of a second")
def test_an_optimizer_that_steps_in_another_thread_is_no_step_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of the trainer's, in its own thread, prepares the engine; that of another model's somewhere else does not."""

    class Beside(Watched):
        def loss(self, batch: Tensor) -> Tensor:
            net: Any = self.net
            first, *more = net.blocks
            x = first(net.stem(batch))
            assert elsewhere(step) is None
            for block in more:
                x = block(x)
            return net.head(x).square().mean()  # type: ignore[no-any-return]

    def run(strategy: Any) -> list[Tensor]:
        torch.manual_seed(7)
        module = Beside()
        trainer_for(strategy).fit(module, loader(vectors(4)))
        return weights(module)

    prepared = set[int]()
    before = Updating.before

    def prepares(self: Updating, **options: Any) -> None:
        prepared.add(threading.get_ident())
        before(self, **options)

    monkeypatch.setattr(Updating, "before", prepares)
    assert_equal(run(superpipeline(k=1)), run("auto"), "weights")
    assert prepared == {threading.get_ident()}


def test_an_optimizer_steps_elsewhere_while_a_run_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's engine was gone, and its hooks were there still: the other run ended with an error that said nothing."""
    found: list[Any] = []
    close = OptimizerSteps.close

    def closes(self: OptimizerSteps) -> None:
        found.append(elsewhere(step))
        close(self)

    monkeypatch.setattr(OptimizerSteps, "close", closes)
    trainer_for(superpipeline(k=1)).fit(Watched(), loader(vectors(2)))
    assert found == [None]
