"""The default mode of updates on an accelerator: the one that waits least and is exact, whatever user code looks at."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from itertools import product
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging, GradientAccumulationScheduler
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.background_thread import Pieces
from tests.support.models import Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def accelerator() -> Iterator[None]:
    """The simulated device is treated as an accelerator; its updates run when a thread waits for them."""
    with mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False), simulated():
        yield


class Watches(Callback):
    """Notes the mode of updates, and how many layers' are under way when a batch has ended. It looks at no weight."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.under_way: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, SuperpipelineStrategy):
            run: Any = trainer.strategy._run
            self.modes.append(run.steps.overlap)
            self.under_way.append(len(run.engine.updates._under_way))


class Hooked(Callback):
    """Does something at one hook, and keeps what it has found."""

    def __init__(self, hook: str, look: Callable[[Any], Any]) -> None:
        self.found: list[Any] = []
        setattr(self, hook, lambda trainer, module, *_: self.found.append(look(module)))


def clones(module: Any) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def norms(module: Any) -> list[Tensor]:
    return [p.grad.norm() for p in module.parameters() if p.grad is not None]


def states(module: Any) -> list[Tensor]:
    return [each["exp_avg"].clone() for each in module.trainer.optimizers[0].state.values()]


HOOKS: dict[str, tuple[Callable[[], list[Callback]], str]] = {
    "none": (list, "backward"),
    "epoch": (lambda: [Hooked("on_validation_epoch_end", clones)], "backward"),
    "batch": (lambda: [Hooked("on_train_batch_end", lambda module: 0)], "backward"),
    "weights": (lambda: [Hooked("on_train_batch_end", clones)], "backward"),
    "gradients": (lambda: [Hooked("on_train_batch_end", norms)], "backward"),
    "state": (lambda: [Hooked("on_train_batch_start", states)], "backward"),
    "averages": (lambda: [EMAWeightAveraging(decay=0.9)], "backward"),
    "norms before the step": (lambda: [Hooked("on_before_optimizer_step", norms)], "forward"),
    "schedule": (lambda: [GradientAccumulationScheduler({0: 2})], "backward"),
}
CLIPPED: dict[str, tuple[dict[str, Any], str]] = {
    "not clipped": ({}, "backward"),
    "accumulated": ({"accumulate_grad_batches": 2}, "backward"),
    "by value": ({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}, "backward"),
    "by norm": ({"gradient_clip_val": 0.01}, "forward"),
}


def both(
    make: Callable[[], Any], callbacks: Callable[[], list[Callback]] = list, *, strategy: Any = None, **options: Any
) -> tuple[Outcome, Watches]:
    """Plain Lightning and ours with its defaults; what callbacks have found is equal, too."""
    watches, theirs, ours = Watches(), callbacks(), callbacks()
    batches, options = vectors() * 2, {"recorded": "losses", "val": vectors(2), **options}
    plain = fit(fused(make), batches, callbacks=theirs, **options)
    streamed = fit(fused(make), batches, strategy or SuperpipelineStrategy(k=1), callbacks=[*ours, watches], **options)
    assert_same(streamed, plain)
    for mine, other in zip(ours, theirs, strict=True):
        assert_equal(getattr(mine, "found", None), getattr(other, "found", None), type(mine).__name__)
    return streamed, watches


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("hook", "clipped"),
    first(
        product(HOOKS, CLIPPED),
        if_=lambda pair: pair[0] == "none" or pair[1] == "not clipped",
        second=[(hook, "by norm") for hook in HOOKS],
        why="each hook and each way to clip by itself are in the first tier",
    ),
)
def test_the_mode_that_waits_least_is_taken(hook: str, clipped: str) -> None:
    """The first step shows whether backward needs a layer again."""
    (callbacks, by_hook), (options, by_clipping) = HOOKS[hook], CLIPPED[clipped]
    if hook == "schedule" and "accumulate_grad_batches" in options:
        pytest.skip("Lightning refuses both")
    _, watches = both(lambda: Module(Stack()), callbacks, **options)
    expected = "forward" if "forward" in (by_hook, by_clipping) else "backward"
    assert watches.modes[-1] == expected
    if hook in ("none", "epoch", "batch"):
        assert watches.under_way[-1] > 1, "no hook looks at a weight, and nothing waits"


@pytest.mark.rest("takes tenths of a second")
def test_a_look_at_one_weight_waits_for_its_layer_alone() -> None:
    class Looks(Watches):
        def on_train_batch_end(self, trainer: Any, *more: Any) -> None:
            trainer.lightning_module.net.head.weight.detach().sum()
            super().on_train_batch_end(trainer, *more)

    looks = Looks()
    fit(fused(lambda: Module(Stack())), vectors(), SuperpipelineStrategy(k=1), recorded="losses", callbacks=[looks])
    assert looks.under_way[-1] == 6  # of seven


# ---------------------------------------------------------------------- what was taken before the step


class Keeps(Callback):
    """Looks after each step at what it took before the first one, or before each."""

    def __init__(self, take: Callable[[Any], list[Any]], *, again: bool) -> None:
        self.take, self.again = take, again
        self.kept: list[Any] | None = None
        self.found: list[Any] = []

    def on_train_batch_start(self, trainer: Any, module: Any, *_: Any) -> None:
        if self.kept is None or self.again:
            self.kept = self.take(module)

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.kept is not None
        self.found.append([torch.as_tensor(each).clone() for each in self.kept])


TAKEN: dict[str, Callable[[Any], list[Any]]] = {
    "state_dict": lambda module: list(module.state_dict().values()),
    "views": lambda module: [p.data.view(-1)[1:] for p in module.parameters()],
    "arrays": lambda module: [np.asarray(p.detach()) for p in module.parameters()],
    "optimizer's state": lambda module: [
        value for each in module.trainer.optimizers[0].state_dict()["state"].values() for value in each.values()
    ],
    "views of state": lambda module: [each["exp_avg"].view(-1) for each in module.trainer.optimizers[0].state.values()],
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("what", "clipped", "again"),
    first(
        product(TAKEN, ["not clipped", "by norm"], [False, True]),
        if_=lambda each: each[1:] in (("not clipped", True), ("by norm", False)),
        second=[],
        why="of each two choices all pairs are in the first tier",
    ),
)
def test_what_was_taken_before_a_step_is_up_to_date_after_it(what: str, clipped: str, again: bool) -> None:
    """Reading such tensors does not show: so a step waits at once for layers whose memory user code holds."""
    both(lambda: Module(Stack()), lambda: [Keeps(TAKEN[what], again=again)], **CLIPPED[clipped][0])


# ---------------------------------------------------------------------- backward needs a layer again


class Reads(torch.autograd.Function):
    """Its backward reads a weight of a layer whose gradients are complete by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, head: nn.Linear) -> Tensor:  # type: ignore[override]
        ctx.head = head
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.head.weight.detach().mean(), None


class ReadsLater(Module):
    """``first``: the first batch in which it does."""

    def __init__(self, first: int = 0) -> None:
        super().__init__(Stack())
        self.first, self.count = first, 0

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        x = net.blocks[0](net.stem(batch))
        if self.count >= self.first:
            x = Reads.apply(x, net.head)  # type: ignore[no-untyped-call]
        self.count += self.training
        for block in net.blocks[1:]:
            x = block(x)
        return net.head(x).square().mean()  # type: ignore[no-any-return]


@pytest.mark.long("takes a second or more")
def test_a_backward_that_needs_a_layer_again_keeps_updates_out_of_it() -> None:
    streamed, watches = both(ReadsLater, val=None)
    assert set(watches.modes) == {"forward"}
    assert (
        "overlap with the next forward pass; in the first step, the gradients of layer 'net.head' were complete when its "
        "weights were needed again." in " ".join(streamed.trainer.strategy.remarks())
    )


@pytest.mark.rest("takes tenths of a second")
def test_one_that_begins_to_need_it_gets_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"had updated layer 'net.head' when, in the same backward"):
        fit(fused(lambda: ReadsLater(3)), vectors() * 2, SuperpipelineStrategy(k=1), recorded="losses")


# ---------------------------------------------------------------------- gradients after the step


class ReadsGradients(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for p in self.parameters():
            assert p.grad is None or p.grad.norm() >= 0
        return super().training_step(batch, batch_idx)


@pytest.mark.long("takes a second or more")
def test_gradients_are_there_after_the_step_and_after_the_run() -> None:
    ours, _ = both(lambda: ReadsGradients(Stack()))
    plain = fit(fused(lambda: ReadsGradients(Stack())), vectors() * 2, recorded="losses", val=vectors(2))
    assert_equal(
        [p.grad for p in ours.module.parameters()], [p.grad for p in plain.module.parameters()], "gradients after fit"
    )


@pytest.mark.rest("takes tenths of a second")
def test_a_look_at_gradients_that_were_freed_is_an_error_that_says_so() -> None:
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    with pytest.raises(RuntimeError, match=r"param.grad was read .* optimizer_overlap=\"backward\" has freed it"):
        trainer_for(strategy).fit(fused(lambda: ReadsGradients(Stack()))(), loader(vectors()))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("accumulated", [1, 2])
def test_gradients_are_kept_where_a_hook_could_look(accumulated: int) -> None:
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    both(lambda: Module(Stack()), HOOKS["gradients"][0], strategy=strategy, accumulate_grad_batches=accumulated)


# ---------------------------------------------------------------------- what changes in mid-run


def _clips(value: float | None, algorithm: str) -> Callable[[Any, Any], None]:
    def change(trainer: Any, module: Any) -> None:
        trainer.gradient_clip_val, trainer.gradient_clip_algorithm = value, algorithm

    return change


def _adds_a_callback(trainer: Any, module: Any) -> None:
    trainer.callbacks.append(Hooked("on_before_optimizer_step", _halved))


def _adds_a_hook(trainer: Any, module: Any) -> None:
    module.on_after_backward = lambda: _halved(module)


def _halved(module: Any) -> None:
    for p in module.parameters():
        p.grad.mul_(0.5)


class Changes(Callback):
    """Changes something in the third step, at one hook."""

    def __init__(self, hook: str, change: Callable[[Any, Any], None]) -> None:
        setattr(self, hook, lambda trainer, module, *_: change(trainer, module) if trainer.global_step == 2 else None)


CHANGES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None], str]] = {
    "another value": (
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        _clips(1e-4, "value"),
        "backward",
    ),
    "no value": ({"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}, _clips(None, "value"), "backward"),
    "by value from now on": ({}, _clips(1e-4, "value"), "backward"),
    "by norm from now on": ({}, _clips(1e-3, "norm"), "forward"),
    "a callback": ({}, _adds_a_callback, "forward"),
    "a hook": ({}, _adds_a_hook, "forward"),
}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("what", CHANGES)
def test_what_changes_in_mid_run_is_heeded_from_the_next_batch_on(what: str, hook: str) -> None:
    """Clipping by another value was ignored without a word, and a new hook got an error about a layer's weights."""
    options, change, mode = CHANGES[what]
    _, watches = both(lambda: Module(Stack()), lambda: [Changes(hook, change)], **options)
    assert (watches.modes[1], watches.modes[-1]) == ("backward", mode)


def test_a_backward_in_training_step_adds_to_no_freed_gradient() -> None:
    class RunsBackward(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                super().training_step(batch, batch_idx).backward()
            return loss

    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    with pytest.raises(RuntimeError, match=r"adds to param.grad of 'net\..*zero_grad"):
        trainer_for(strategy).fit(fused(lambda: RunsBackward(Stack()))(), loader(vectors()))


@pytest.mark.parametrize("kind", ["value", "norm"])
def test_clipping_that_changes_within_a_step_is_refused(kind: str) -> None:
    def change(trainer: Any, module: Any) -> None:
        trainer.gradient_clip_val, trainer.gradient_clip_algorithm = 1e-4, kind

    class Changing(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if batch_idx == 2:
                change(self.trainer, self)
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="Gradient clipping was changed within a training step"):
        fit(fused(lambda: Changing(Stack())), vectors() * 2, SuperpipelineStrategy(k=1), recorded="losses")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("what", ["by norm from now on", "a callback"])
def test_a_mode_that_was_asked_for_is_refused_by_name_from_then_on(what: str) -> None:
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="backward")
    callbacks: list[Any] = [Changes("on_train_batch_end", CHANGES[what][1])]
    with pytest.raises(
        ValueError, match=r'optimizer_overlap="backward" cannot be used: .*(clip_val=|on_before_optimizer)'
    ):
        fit(fused(lambda: Module(Stack())), vectors() * 2, strategy, recorded="losses", callbacks=callbacks)


# ---------------------------------------------------------------------- the order of updates


def test_the_most_urgent_work_is_done_first() -> None:
    pieces, done = Pieces(), list[str]()

    def add(name: str, urgency: int | None) -> Future[None]:
        return pieces.add(lambda: done.append(name), urgency)

    add("last", 3)
    add("second", 1)
    add("in order", None)
    wanted = add("wanted", 2)
    also = add("in order, too", None)
    pieces.urge(wanted)
    pieces.urge(also)  # which changes nothing
    for _ in range(5):
        pieces.take().work()
    assert done == ["in order", "in order, too", "wanted", "second", "last"]


class WithAFlag(Module):
    """Models keep flags as parameters of integers, which no optimizer steps (pytorch_tabular's Node does)."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.flag = nn.Parameter(torch.tensor(0, dtype=torch.uint8), requires_grad=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


@pytest.mark.rest("takes tenths of a second")
def test_a_parameter_of_integers_does_not_keep_the_others_from_running_fused() -> None:
    """The mode was "off", and the reason named settings that nobody had made."""
    watch = Watches()
    strategy = SuperpipelineStrategy(k=1)
    ours = fit(WithAFlag, vectors() * 2, strategy, callbacks=[watch], recorded="losses")
    assert_equal(ours.state, fit(fused(WithAFlag), vectors() * 2, recorded="losses").state, "the module")
    assert watch.modes[-1] == "backward"
