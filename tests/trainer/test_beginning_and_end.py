"""Where a step or a run begins and ends, though nobody says so; and what is outside of them is plain."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.torch_compat.private import ENGINE_CALL
from tests.support.bare import bare
from tests.support.engine import streamer_of
from tests.support.models import (
    Module,
    Stack,
    llama,
    tokens,
    vectors,
)
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated


def test_a_copy_of_a_streamed_module_streams_nothing() -> None:
    class CallsCopy(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            before = self.trainer.strategy.stats().fetched_layers
            copy.deepcopy(self.net)(batch)
            assert self.trainer.strategy.stats().fetched_layers == before
            self.net(batch)
            assert self.trainer.strategy.stats().fetched_layers > before

    bare(lambda: CallsCopy(Stack()), superpipeline(k=1))


def test_a_failed_rebuild_tells_its_own_error_and_leaves_no_hooks() -> None:
    """The engine was closed, building it anew failed, and tearing down the closed one hid the reason."""

    class Aliases(Module):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                net: Any = self.net
                shared = net.blocks[0].inner.weight.data
                net.blocks[1].inner.weight = nn.Parameter(shared)

    module = Aliases(Stack())
    with pytest.raises(ValueError, match=r"blocks\.0\.inner\.weight.*blocks\.1\.inner\.weight"):
        trainer_for(superpipeline(), max_epochs=2).fit(module, loader(vectors()))
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()
    assert all(p.isfinite().all() for p in module.parameters())


def test_an_engine_whose_end_fails_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else autograd kept the function of ours through which its backwards run, for the rest of the process."""
    abort = Streamer.abort

    def fails(self: Streamer, *, over: bool = False) -> None:
        abort(self, over=over)
        if over and not self._closed:
            monkeypatch.undo()
            raise ValueError("at the end of the run")

    monkeypatch.setattr(Streamer, "abort", fails)
    module, trainer = Module(Stack()), trainer_for(superpipeline())
    with pytest.raises(ValueError, match="at the end of the run"):
        trainer.fit(module, loader(vectors()))
    assert getattr(*ENGINE_CALL) is torch.autograd.graph._engine_run_backward
    assert {type(p) for p in module.parameters()} == {nn.Parameter}
    assert trainer.strategy.stats().fetched_layers
    trainer_for(superpipeline()).fit(module, loader(vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_engines_are_freed_without_the_garbage_collector() -> None:
    """Autograd holds the hooks of a parameter where the collector does not look: each fit leaked its host store."""
    import weakref

    alive: list[weakref.ref[Streamer]] = []
    module = llama()
    for _ in range(3):
        trainer = trainer_for(strategy := superpipeline())

        class Note(pl.Callback):
            def on_train_start(self, trainer: Any, *args: Any) -> None:
                alive.append(weakref.ref(streamer_of(trainer.strategy)._gradients))

        trainer.callbacks.append(Note())  # type: ignore[attr-defined]
        trainer.fit(module, loader(tokens(1)))
        del trainer, strategy
    import gc

    gc.collect()
    assert [each() for each in alive] == [None] * 3


@pytest.mark.long("takes a second or more")
def test_a_step_that_weight_averaging_leaves_without_a_backward_is_over() -> None:
    """For batch statistics it runs an epoch forward only, and then writes the weights: a fetch was still under way."""

    def make() -> Module:
        stack = Stack()
        stack.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
        return Module(stack)

    def run(strategy: Any) -> Outcome:
        averaging = StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)
        return fit(make, vectors(), strategy, max_epochs=3, callbacks=[averaging])

    with simulated():
        ours = run(superpipeline(k=1))
    assert_same(ours, run("auto"))


def test_a_backward_that_does_nothing_ends_its_step() -> None:
    """With accumulation no optimizer's step came to end it, and the engine was built anew for the next batch."""

    class Skips(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.hosts: list[bool] = []

        def backward(self, loss: Tensor) -> None:  # type: ignore[override]
            if self.trainer.fit_loop.epoch_loop.batch_idx % 3 != 1:
                loss.backward()

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.hosts.append(all(type(p) is nn.Parameter for p in self.parameters()))

    def run(strategy: Any) -> Outcome:
        return fit(Skips, vectors(9), strategy, accumulate_grad_batches=4)

    ours, plain = run(superpipeline(k=1)), run("auto")
    assert_same(ours, plain)
    assert ours.module.hosts == plain.module.hosts == [True] * 9


@pytest.mark.parametrize("hook", ["on_fit_start", "on_train_start", "on_train_batch_end"])
def test_a_trainer_is_copied_during_its_run(hook: str) -> None:
    """Locks of the engine cannot be copied, and callbacks lead to the trainer."""
    copied: list[pl.Trainer] = []
    callback = pl.Callback()
    setattr(callback, hook, lambda trainer, *_: copied.append(copy.deepcopy(trainer)) if not copied else None)
    ours = fit(lambda: Module(Stack()), vectors(), superpipeline(), callbacks=[callback])
    assert_same(ours, fit(lambda: Module(Stack()), vectors()))
    module = copied[0].lightning_module
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert type(copied[0].strategy) is type(ours.trainer.strategy)


def test_steps_outside_of_a_run_are_plain() -> None:
    trainer = trainer_for(superpipeline(k=1))
    module = Module(Stack())
    trainer.fit(module, loader(vectors()))
    module.eval()  # without dropout
    found = trainer.strategy.predict_step(vectors()[0], 0)
    assert torch.equal(found, module.predict_step(vectors()[0], 0))


@pytest.mark.parametrize("fails_in", ["forward", "backward"])
def test_weights_may_be_written_as_soon_as_a_step_has_failed(fails_in: str) -> None:
    """Uploads that the step began may be under way still; on this device a write under them is an error."""

    class Fails(Module):
        def loss(self, batch: Any) -> Tensor:
            loss = super().loss(batch)
            if fails_in == "forward":
                raise KeyError(fails_in)
            return loss

        def on_after_backward(self) -> None:
            raise KeyError(fails_in)

    class Restores(pl.Callback):
        def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
            pl_module.load_state_dict(before)
            trainer.restored = True  # type: ignore[attr-defined]

    module = Fails(Stack())
    before = copy.deepcopy(module.state_dict())
    trainer = trainer_for(superpipeline(k=2), callbacks=[Restores()])
    with simulated(), pytest.raises(KeyError, match=fails_in):
        trainer.fit(module, loader(vectors()))
    assert trainer.restored  # type: ignore[attr-defined]
    assert_equal(module.state_dict(), before, "weights")


@pytest.mark.long("a dozen short runs")
def test_the_batch_size_finder_restores_what_nothing_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Scaled(Module):
        batch_size = 1

        def train_dataloader(self) -> Any:
            return DataLoader(torch.cat(vectors()), batch_size=self.batch_size, drop_last=True)

        def val_dataloader(self) -> Any:
            return loader(vectors(1))

    monkeypatch.chdir(tmp_path)
    module = Scaled(Stack())
    before = copy.deepcopy(module.state_dict())
    with simulated():
        trainer = trainer_for(superpipeline(k=2), default_root_dir=tmp_path)
        found = Tuner(trainer).scale_batch_size(module, max_trials=2, init_val=2)
    assert found == 4  # rows of the batches there are
    assert_equal(module.state_dict(), before, "weights")
