"""Where a step or a run begins and ends, though nobody says so; and what is outside of them is plain."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.torch_compat.private import ENGINE_CALL
from tests.support.engine import engine_of
from tests.support.models import (
    Module,
    Stack,
    llama,
    tokens,
    vectors,
)
from tests.support.nets import Does
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.ways import bare


def test_a_copy_of_a_streamed_module_streams_nothing() -> None:
    class CallsCopy(Module):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            before = self.trainer.strategy.stats().fetched_layers
            copy.deepcopy(self.net)(batch)
            assert self.trainer.strategy.stats().fetched_layers == before
            self.net(batch)
            assert self.trainer.strategy.stats().fetched_layers > before

    bare(lambda: CallsCopy(Stack()), superpipeline(k=1))


def test_an_engine_whose_end_fails_is_closed_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else autograd kept the function of ours through which its backwards run, for the rest of the process."""
    abort = Engine.abort

    def fails(self: Engine, *, over: bool = False) -> None:
        abort(self, over=over)
        if over and not self.closed:
            monkeypatch.undo()
            raise ValueError("at the end of the run")

    monkeypatch.setattr(Engine, "abort", fails)
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
    alive: list[weakref.ref[Any]] = []
    module = llama()
    for _ in range(3):
        trainer = trainer_for(superpipeline())
        notes = Does(on_train_start=lambda trainer, _: alive.append(weakref.ref(engine_of(trainer.strategy).gradients)))
        trainer.callbacks.append(notes)  # type: ignore[attr-defined]
        trainer.fit(module, loader(tokens(1)))
        del trainer
    gc.collect()
    assert [each() for each in alive] == [None] * 3


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
