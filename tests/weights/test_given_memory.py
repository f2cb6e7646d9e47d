"""Weights over one memory, or written after the callbacks.

``tests/equality/programs/views.py`` and ``writes.py`` have what user code does with them.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.support.engine import engine_of
from tests.support.models import Module, Stack, vectors
from tests.support.moments import At, multiply, net_of
from tests.support.nets import Does
from tests.support.runs import assert_equal, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first
from tests.support.ways import start


@pytest.mark.parametrize("frozen", ["", "stem", "head"])
def test_parameters_over_the_same_memory(frozen: str) -> None:
    net = Stack()
    net.stem.weight.data = net.head.weight.data
    if frozen:
        net.get_submodule(frozen).requires_grad_(False)
    remedies = r"module_b\.weight = module_a.*module_b\.weight\.data\.clone\(\)"
    with pytest.raises(ValueError, match=r"'net.*weight' are two Parameter objects over the same memory.*" + remedies):
        start(superpipeline(), Module(net))
    net.stem.weight.data = net.stem.weight.data.clone()
    start(superpipeline(), Module(net))


def test_a_weight_that_was_kept_from_a_step_is_told_after_the_run() -> None:
    """Pyro's store of parameters keeps what ``pyro.module`` finds within a step."""
    module = At(start=lambda m: m.kept.append(m.net[1].first.weight))
    trainer_for(superpipeline(k=1)).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"'net\.1\.first\.weight' was taken within a step.*named_parameters"):
        module.kept[0].sum()
    assert dict(module.named_parameters())["net.1.first.weight"].sum().isfinite()


class WritesLate(Module):
    """Weights are written in a way that no version shows, after the callbacks were called at the batch's end."""

    def __init__(self, where: str) -> None:
        super().__init__(Stack())
        self.where = where

    def write(self, where: str) -> None:
        for p in self.parameters() if where == self.where else ():
            multiply(p)

    def on_save_checkpoint(self, checkpoint: Any) -> None:
        self.write("on_save_checkpoint")

    def configure_optimizers(self) -> Any:
        module = self

        class Plateau(torch.optim.lr_scheduler.ReduceLROnPlateau):
            """Steps after ``on_train_batch_end``, unlike others."""

            def step(self, *args: Any) -> None:  # type: ignore[override]
                super().step(*args)
                module.write("scheduler")

        optimizer = super().configure_optimizers()
        plateau = {"scheduler": Plateau(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": plateau}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def train_dataloader(self) -> Any:
        self.write("train_dataloader")
        return loader(vectors())


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("simulation", first([nullcontext, simulated], simulated, why="the same on the CPU"))
@pytest.mark.parametrize("where", ["on_save_checkpoint", "scheduler", "train_dataloader"])
def test_weights_written_after_the_callbacks_are_seen(where: str, simulation: Any, tmp_path: Path) -> None:
    def run(strategy: Any, folder: Path) -> Any:
        pl.seed_everything(3, verbose=False)
        module, saves = WritesLate(where), where == "on_save_checkpoint"
        trainer = trainer_for(
            strategy, max_epochs=2, enable_checkpointing=saves,
            callbacks=[ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)] if saves else [],
            reload_dataloaders_every_n_epochs=int(where == "train_dataloader"),
        )  # fmt: skip
        trainer.fit(module)
        return module.state_dict(), trainer.optimizers[0].state_dict()

    with simulation():
        ours = run(superpipeline(k=2), tmp_path / "ours")
    assert_equal(ours, run("auto", tmp_path / "plain"), where)


@pytest.mark.parametrize("k", [1, 8])
def test_weights_of_plain_code_are_not_compared(k: int) -> None:
    """Nothing is downloaded then."""
    found: list[Any] = []

    def look(trainer: Any, *_: Any) -> None:
        found.extend((layer.views, layer.parameters.written()) for layer in engine_of(trainer.strategy).layers)

    looks = Does(on_train_batch_start=look, on_before_backward=look, on_train_batch_end=look)
    strategy = superpipeline(k=k)
    fit(lambda: Module(net_of()), vectors(), strategy, callbacks=[looks], recorded="nothing")
    assert found
    assert set(found) == {(False, False)}
    assert strategy.stats().host_waits == 0
