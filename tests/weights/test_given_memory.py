"""Weights over one memory, or written after the callbacks; and what given memory costs.

``tests/equality/programs/views.py`` and ``writes.py`` have what user code does with them.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from sp_lightning.core.weights.layer import Kind, StreamedLayer
from sp_lightning.core.weights.write_guard import guard_of
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
def test_plain_code_has_no_write_guard(k: int) -> None:
    """Nothing is downloaded and compared then."""
    found: list[Any] = []

    def look(trainer: Any, *_: Any) -> None:
        found.extend(layer.guard for layer in engine_of(trainer.strategy).layers)

    looks = Does(on_train_batch_start=look, on_before_backward=look, on_train_batch_end=look)
    strategy = superpipeline(k=k)
    fit(lambda: Module(net_of()), vectors(), strategy, callbacks=[looks], recorded="nothing")
    assert found
    assert set(found) == {None}
    assert strategy.stats().host_waits == 0


UNKNOWN: dict[str, Callable[[Any, Any, Any], tuple[Any, str, Any]]] = {
    "an update is under way": lambda writes, layer, slot: (layer.owner, "update", Future()),
    "the CPU's was written": lambda writes, layer, slot: (StreamedLayer, "stale", True),
    "the slot has to be filled again": lambda writes, layer, slot: (slot, "stale", True),
    "the slot's views may write it": lambda writes, layer, slot: (guard_of(layer), "digests", object()),
    "only rows are uploaded": lambda writes, layer, slot: (layer, "planned", replace(layer.planned, rows=(0,))),
    "a table": lambda writes, layer, slot: (layer, "kind", Kind.TABLE),
    "residents": lambda writes, layer, slot: (layer, "kind", Kind.RESIDENTS),
    "the weight was handed out": lambda writes, layer, slot: (guard_of(layer), "diverged", {0}),
    "it has another dtype": lambda writes, layer, slot: (guard_of(layer), "retyped", {0: torch.ones(1)}),
}


@pytest.mark.parametrize("why", UNKNOWN)
def test_a_weight_is_not_compared_with_a_slot_that_may_have_other_values_than_the_host(why: str) -> None:
    """Then it is written back, as before. Equal to the slot, it would be taken for the host's."""
    found: list[set[int]] = []

    def ask(m: At) -> None:
        writes = engine_of(m.trainer.strategy).writes
        slot = next(each for each in writes._slots.all if each.layer is not None)
        given = {0: writes._slots.views(slot.layer, slot)[0].clone()}
        found.append(writes._alike(slot, given))
        owner, name, value = UNKNOWN[why](writes, slot.layer, slot)
        with mock.patch.object(owner, name, value):
            found.append(writes._alike(slot, given))

    fit(lambda: At(after_forward=ask), vectors(1), superpipeline(k=1))
    assert found == [{0}, set()]
