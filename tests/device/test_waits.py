"""The omission matrix: leave out each wait of the engine in turn, and something here must fail.

The rows are the engine's own list (:class:`sp_lightning.device.waits.Wait`), so a new wait without its scenario fails. A wait
whose omission nothing notices is not needed, and goes: two went that way. A second matrix looks whether a wait is seen
where a device waits for more than the simulation: the two that are not are listed with what implies them.

| wait | scenario that fails without it |
|---|---|
| FETCH_AFTER_USE, USE_AFTER_FETCH | training |
| DRAIN_AFTER_GRADIENT, REUSE_AFTER_DRAIN, APPLY_AFTER_DRAIN | training |
| UPDATE_AFTER_FETCH | training |
| CLOSE_AFTER_FETCH | prediction |
| RESIDENTS_AFTER_USE, USE_AFTER_RESIDENTS | training, with residents |
| UPDATE_AFTER_RESIDENTS | an optimizer step before any forward, in manual optimization |
| CAST_AFTER_FETCH | weights written between forward and backward, in mixed precision |
| WRITE_BACK_AFTER_USE | weights written in place on the device |
| FETCH_AFTER_UPDATE | updates in the background |
| READ_AFTER_UPDATE | updates in the background, and a callback that looks at weights |
| STORE_AFTER_SAVE, REUSE_AFTER_STORE, RETURN_AFTER_USE, USE_AFTER_RETURN | activations that are offloaded |
| REUSE_AFTER_RETURN | a unit without a backward, whose activations were under way, and nothing else comes |
| GATHER_AFTER_SEND | an embedding of which only rows travel |
| CLOSE_AFTER_STORE | a last forward without a backward |
| DROP_AFTER_DRAIN | a hook that raises while gradients are applied |
| UNPIN_AFTER_COPY | residents alone, in a prediction whose results nobody reads |
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.activations.offload import Offload
from sp_lightning.device.waits import Stream, Wait
from sp_lightning.store.block import HostBlock
from sp_lightning.weights.embedding_rows import EmbeddingRows
from sp_lightning.weights.gradients import Gradients
from tests.support.engine import choose
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import Outcome, assert_same, fit, fused, loader, superpipeline, trainer_for
from tests.support.simdevice import Mixed, Race, SimDevice, Watch, simulated


def training(strategy: Any) -> Outcome:
    case = CASES["vit"]  # it has residents
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2], accumulate_grad_batches=2)


def written_in_place(strategy: Any) -> Outcome:
    case = CASES["rescaled-in-eval"]
    return fit(case.make, case.batches(), strategy, val=case.batches()[:2])


class StepsFirst(Module):
    """Applies the last batch's gradients before anything else."""

    def __init__(self) -> None:
        super().__init__(CASES["vit"].make().net)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.manual_backward(loss)
        return loss


def steps_first(strategy: Any) -> Outcome:
    return fit(StepsFirst, CASES["vit"].batches(), strategy)


class Ahead(Module):
    """Forwards right before an optimizer's step: the host comes to it long before the device has done with them."""

    def __init__(self) -> None:
        super().__init__(CASES["vit"].make().net)
        self.automatic_optimization = False
        self.seen: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
        with torch.no_grad():
            self.seen += [self.net(batch[0]) for _ in range(2)]
        optimizer.step()
        optimizer.zero_grad()


def ahead(strategy: Any) -> Outcome:
    outcome = fit(Ahead, CASES["vit"].batches(), strategy)
    assert isinstance(outcome.module, Ahead)
    outcome.losses += [each.cpu() for each in outcome.module.seen]
    return outcome


class RaisesWhileApplying(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        net: Any = self.net
        net.blocks[0].inner.weight.register_post_accumulate_grad_hook(self.fail)  # the stem's is still on its way

    def fail(self, parameter: Tensor) -> None:
        if self.trainer.global_step == 0 and not hasattr(self, "failed"):
            self.failed = True
            raise KeyError("in a hook")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        try:
            self.manual_backward(self.loss(batch))
        except KeyError:
            self.zero_grad()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


def raises_while_applying(strategy: Any) -> Outcome:
    return fit(RaisesWhileApplying, vectors(), strategy)


class Looks(Callback):
    """Reads a weight after each step."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.head.weight.sum()


def in_the_background(strategy: Any, **options: Any) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, optimizer_overlap="forward", fused_optimizer=True)
    make = fused(lambda: Module(Stack()))
    return fit(make, vectors(), strategy, gradient_clip_val=0.05, gradients=False, **options)


def looked_at(strategy: Any) -> Outcome:
    return in_the_background(strategy, callbacks=[Looks()])


def offloaded(strategy: Any, make: Any = lambda: Module(Stack())) -> Outcome:
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, activations="offload")
    return fit(make, vectors(), strategy)


def returned_in_vain(strategy: Any) -> Outcome:
    """Nothing else comes to the device in backward: all layers stay in their slots, all other activations stay."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, activations={"net.blocks.2": "offload"}, k=99)
    return fit(lambda: Module(Aside()), vectors(), strategy)


class Aside(Stack):
    """A block whose result nobody uses."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, block in enumerate(self.blocks):
            if index == 2:
                self.unused = block(x + 0)  # which nobody else saves, and waits for
            else:
                x = block(x)
        return self.head(x)


class NoBackward(Module):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:  # type: ignore[override]
        loss = self.loss(batch)
        return loss if batch_idx < 2 else None


class WritesBeforeBackward(Module):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        for p in optimizer.param_groups[0]["params"]:
            p.data.mul_(0.9)


class Text(Stack):
    """Looks up twice in a table, the second time while the first rows may still be leaving."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        numbers = x.abs().mul(50).long() % 300
        return super().forward(self.table(numbers[:, 0]) + self.table(numbers[:, 1]))


def looked_up(strategy: Any) -> Outcome:
    return fit(lambda: Module(Text()), vectors(), strategy)


def cast_again(strategy: Any) -> Outcome:
    return fit(lambda: WritesBeforeBackward(Stack()), vectors(), strategy, precision="bf16-mixed")


def predicted(strategy: Any) -> Outcome:
    """Where no hook may write, the first layers for a batch that never comes are under way at the end."""
    case = CASES["vit"]
    pl.seed_everything(7, verbose=False)
    trainer, module = trainer_for(strategy), case.make()
    losses = trainer.predict(module, loader(case.batches()))
    state = {name: value.clone() for name, value in module.state_dict().items()}
    assert isinstance(losses, list)
    return Outcome(losses, [], state, [], torch.get_rng_state(), module, trainer)


def predicted_unseen(strategy: Any) -> Outcome:
    """Nothing but residents: their transfer is waited for by compute alone, and compute by nobody."""
    if isinstance(strategy, SuperpipelineStrategy):
        choose(strategy, resident=("net",))
    case = CASES["vit"]
    pl.seed_everything(7, verbose=False)
    trainer, module = trainer_for(strategy), case.make()
    trainer.predict(module, loader(case.batches()), return_predictions=False)
    state = {name: value.clone() for name, value in module.state_dict().items()}
    return Outcome(list(state.values()), [], state, [], torch.get_rng_state(), module, trainer)


SCENARIOS: dict[Wait, Callable[[Any], Outcome]] = {
    Wait.FETCH_AFTER_USE: training,
    Wait.USE_AFTER_FETCH: training,
    Wait.CAST_AFTER_FETCH: cast_again,
    Wait.WRITE_BACK_AFTER_USE: written_in_place,
    Wait.RESIDENTS_AFTER_USE: training,
    Wait.USE_AFTER_RESIDENTS: training,
    Wait.DRAIN_AFTER_GRADIENT: training,
    Wait.REUSE_AFTER_DRAIN: training,
    Wait.APPLY_AFTER_DRAIN: training,
    Wait.DROP_AFTER_DRAIN: raises_while_applying,
    Wait.STORE_AFTER_SAVE: offloaded,
    Wait.REUSE_AFTER_STORE: offloaded,
    Wait.RETURN_AFTER_USE: offloaded,
    Wait.USE_AFTER_RETURN: offloaded,
    Wait.REUSE_AFTER_RETURN: returned_in_vain,
    Wait.CLOSE_AFTER_STORE: lambda strategy: offloaded(strategy, lambda: NoBackward(Stack())),
    Wait.GATHER_AFTER_SEND: looked_up,
    Wait.UPDATE_AFTER_FETCH: training,
    Wait.UPDATE_AFTER_RESIDENTS: steps_first,
    Wait.FETCH_AFTER_UPDATE: in_the_background,
    Wait.READ_AFTER_UPDATE: looked_at,
    Wait.CLOSE_AFTER_FETCH: predicted,
    Wait.UNPIN_AFTER_COPY: predicted_unseen,
}


@contextmanager
def left_out() -> Iterator[None]:
    """Around a run that is to fail."""
    logging.getLogger("lightning.pytorch.superpipeline").setLevel(logging.CRITICAL)
    try:
        yield
    finally:  # a race in tearing down leaves hooks, which is no matter here
        torch_optimizer._global_optimizer_pre_hooks.clear()
        torch_optimizer._global_optimizer_post_hooks.clear()
        logging.getLogger("lightning.pytorch.superpipeline").setLevel(logging.NOTSET)


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a failed backward that fails to end
@pytest.mark.parametrize("wait", Wait, ids=lambda wait: wait.name)
def test_every_wait_is_needed(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.activations.offload.WORTH_MOVING", 1)
    assert wait in SCENARIOS, f"{wait} needs a scenario that fails without it"
    scenario = SCENARIOS[wait]
    with simulated() as made:
        ours = scenario(superpipeline(k=1))
    assert wait in made[0].waits, "the scenario does not come past this wait"
    assert_same(ours, scenario("auto"))
    with left_out(), pytest.raises((Race, Mixed, AssertionError)), simulated(wait):
        assert_same(scenario(superpipeline(k=1)), ours)


# ---------------------------------------------------------------- what else a device waits for


@contextmanager
def as_a_device_does() -> Iterator[None]:
    """Two things that the simulation leaves out so as to see each wait for itself.

    A copy to the host that is not told otherwise is done in the order of compute, and the host waits for it. And memory
    that compute has done with is written by the next kernel, which may come after another wait, not at once.
    """
    write, look_up, dispatch = HostBlock.write, EmbeddingRows.look_up, Watch.__torch_dispatch__
    freed: list[Tensor] = []

    def block(device: Any) -> None:
        device.synchronize(device.record(Stream.COMPUTE), "a copy that blocks")

    def written(self: HostBlock, index: int, value: Tensor) -> bool:
        block(self._device)
        return write(self, index, value)

    def looked_up(self: EmbeddingRows, *args: Any, **options: Any) -> Any:
        block(self._device)  # the indices come to the host
        return look_up(self, *args, **options)

    def freeing(method: Callable[..., None]) -> Callable[..., None]:
        def later(self: Any, *args: Any, **options: Any) -> None:
            access = self._device.access

            def note(memory: Tensor, by: Stream | None, *, write: bool) -> None:
                freed.append(memory) if by is Stream.COMPUTE else access(memory, by, write=write)

            with mock.patch.object(self._device, "access", note):
                method(self, *args, **options)

        return later

    def dispatched(self: Watch, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        while freed and not self._device.inside:
            SimDevice.access(self._device, freed.pop(), Stream.COMPUTE, write=True)
        return dispatch(self, func, types, args, kwargs)

    with (
        mock.patch.object(HostBlock, "write", written),
        mock.patch.object(EmbeddingRows, "look_up", looked_up),
        mock.patch.object(Gradients, "_free", freeing(Gradients._free)),
        mock.patch.object(Offload, "retire", freeing(Offload.retire)),
        mock.patch.object(Offload, "_drop", freeing(Offload._drop)),
        mock.patch.object(Watch, "__torch_dispatch__", dispatched),
    ):
        yield


IMPLIED = {
    Wait.WRITE_BACK_AFTER_USE: "the weight's own copy to the host",
    Wait.GATHER_AFTER_SEND: "the copy of the indices to the host, since compute has waited for the rows before",
}
"""Waits that a blocking copy beside them implies on a device; they would be needed were it none."""


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # a failed backward that fails to end
@pytest.mark.parametrize("wait", Wait, ids=lambda wait: wait.name)
def test_no_other_wait_implies_it(wait: Wait, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for those that are listed with what does."""
    monkeypatch.setattr("sp_lightning.activations.offload.WORTH_MOVING", 1)
    with simulated() as made, as_a_device_does():
        ours = SCENARIOS[wait](superpipeline(k=1))
    with left_out(), nullcontext() if wait in IMPLIED else pytest.raises((Race, Mixed)):
        with simulated(wait) as made, as_a_device_does():
            assert_same(SCENARIOS[wait](superpipeline(k=1)), ours)
        assert wait in made[0].waits
