"""Errors, interrupts, forks and checkpoints while updates run in the background: nobody sees half of one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.layer import StreamedLayer
from tests.support.engine import engine_of
from tests.support.models import Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.ways import OVERLAP, overlapping


@contextmanager
def failing(step: int, layer: int) -> Iterator[list[int]]:
    """The update of a layer raises in a step; the layers that are updated after it."""
    submit = BackgroundUpdates.submit
    seen: dict[int, int] = {}

    def noted(self: BackgroundUpdates, which: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        seen[which.index] = seen.get(which.index, 0) + 1

        def fails() -> None:
            failed.append(which.index)
            raise FloatingPointError("in the update")

        def goes_on() -> None:
            after.extend([which.index] if failed else [])
            work()

        submit(self, which, fails if which.index == layer and seen[which.index] == step else goes_on, *then)

    failed: list[int] = []
    after: list[int] = []
    with mock.patch.object(BackgroundUpdates, "submit", noted):
        yield after


class _Interrupted(dict[Any, Any]):
    """Notes of updates. The tenth is interrupted."""

    notes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.notes += 1
        if self.notes == 10:
            raise KeyboardInterrupt
        super().__setitem__(key, value)


class LooksAtTheEnd(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen = [parameter.detach().clone() for parameter in pl_module.parameters()]


@pytest.mark.rest("takes tenths of a second")
def test_an_interrupt_while_an_update_is_submitted_leaves_none_that_goes_on() -> None:
    """It was submitted and not noted, so that what an interrupted run saved was in the midst of an update."""
    make, later, looks = BackgroundUpdates.__init__, Device.later, LooksAtTheEnd()

    def made(self: BackgroundUpdates, *arguments: Any) -> None:
        make(self, *arguments)
        self._under_way = _Interrupted()

    def slowly(self: Device, work: Callable[[], None], urgency: int | None = None) -> Any:
        def delayed() -> None:
            time.sleep(0.1)
            work()

        return later(self, delayed, urgency)

    module = fused(lambda: Module(Stack()))()
    with mock.patch.object(BackgroundUpdates, "__init__", made), mock.patch.object(Device, "later", slowly):
        with pytest.raises(SystemExit):
            trainer_for(overlapping("forward"), callbacks=[looks]).fit(module, loader(vectors() * 2))
        time.sleep(0.3)
    assert_equal(list(map(Tensor.detach, module.parameters())), looks.seen, "weights after the interrupt")


class Scheduled(Module):
    """The schedule moves the learning rate right after each step, while its updates are under way."""

    rate: Any = 1e-2

    def __init__(self) -> None:
        super().__init__(Stack().eval())  # a run that resumes has another random state: no dropout

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_what_is_saved_waits_and_resumes_from_and_to_plain_in_mid_epoch(tmp_path: Path) -> None:
    def run(strategy: Any, resume: Path | None = None, folder: str = "a") -> Outcome:
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        return fit(
            fused(Scheduled),
            vectors()[:1] * 6,
            strategy,
            ckpt_path=resume,
            recorded="losses",
            callbacks=[saver],
            enable_checkpointing=True,
        )

    whole = {"auto": run("auto", folder="auto")}
    for mode in OVERLAP:
        whole[mode] = run(overlapping(mode), folder=mode)
        assert_same(whole[mode], whole["auto"])
    for source in whole:
        for target in ("auto", *OVERLAP):
            strategy = "auto" if target == "auto" else overlapping(target)
            resumed = run(strategy, tmp_path / source / "step=4.ckpt", "resumed")
            assert_equal(resumed.state, whole["auto"].state, f"from {source} to {target}")
            assert_equal(resumed.optimizers, whole["auto"].optimizers, f"from {source} to {target}")


@pytest.mark.parametrize("step", [1, 3])  # the last one is waited for when training ends
@pytest.mark.parametrize("mode", OVERLAP)
def test_an_error_in_the_background_reaches_the_user_and_nothing_is_saved(mode: str, step: int, tmp_path: Path) -> None:
    strategy = overlapping(mode)
    trainer = trainer_for(strategy)
    module = Module(Stack())
    with failing(step, 2) as after, pytest.raises(FloatingPointError, match="in the update") as raised:
        trainer.fit(module, loader(vectors()))
    assert not after
    assert "in the background, by the optimizer's update of layer 'net.blocks.1'" in raised.value.__notes__[0]
    assert any(entry.name == "fails" for entry in raised.traceback)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    for weights_only in (False, True):
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt", weights_only=weights_only)
    assert not list(tmp_path.iterdir())
    trainer = trainer_for(overlapping(mode))
    trainer.fit(module, loader(vectors()))  # and all is well again
    trainer.save_checkpoint(tmp_path / "whole.ckpt")


def test_after_an_update_that_failed_no_layer_is_fetched() -> None:
    """Here code that must not fail has waited for all updates, so no layer has an update under way any more."""
    forwards: list[int] = []

    class Counts(Module):
        def __init__(self) -> None:
            super().__init__(Stack())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            forwards.append(batch_idx)
            return loss

    class Joins(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            engine_of(trainer.strategy).updates.join()

    with failing(1, 2), pytest.raises(FloatingPointError, match="in the update"):
        trainer_for(overlapping("forward"), callbacks=[Joins()]).fit(Counts(), loader(vectors()))
    assert forwards == [0]


@pytest.mark.rest("takes tenths of a second")
def test_a_backward_that_fails_after_early_updates_is_not_saved(tmp_path: Path) -> None:
    class FailsInBackward(Module):
        def __init__(self) -> None:
            super().__init__(Stack())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            stem = self.net.stem(batch)
            if batch_idx == 1:
                stem.register_hook(lambda gradient: (_ for _ in ()).throw(KeyError("in backward")))
            x = stem
            for block in self.net.blocks:
                x = block(x)
            return self.net.head(x).square().mean()

    module = FailsInBackward()
    trainer = trainer_for(overlapping("backward"))
    with pytest.raises(KeyError, match="in backward") as raised:
        trainer.fit(module, loader(vectors()))
    said = "".join(raised.value.__notes__)
    assert "These weights are not those of any whole step" in said, "who fits again reads it"
    layers = ", ".join(f"'net.{name}'" for name in ("head", *(f"blocks.{i}" for i in (4, 3, 2, 1, 0))))
    assert f"Updated: {layers}. Go on from the last checkpoint, or with a new model" in said
    with pytest.raises(RuntimeError, match="not those of any whole step"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    trainer = trainer_for(overlapping("forward"))
    with pytest.raises(KeyError, match="in backward"):
        trainer.fit(FailsInBackward(), loader(vectors()))
    trainer.save_checkpoint(tmp_path / "whole.ckpt")  # the first step is whole
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    trainer = trainer_for(overlapping("backward"), callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(KeyError, match="in backward") as raised:
        trainer.fit(FailsInBackward(), loader(vectors()))
    assert f"trainer.fit(model, ckpt_path={saver.best_model_path!r})" in "".join(raised.value.__notes__)


def test_an_interrupt_while_waiting_leaves_a_whole_step() -> None:
    """Ctrl-C comes while the host waits for an update: it is done all the same before anybody looks."""
    finish = Device.finish
    calls: list[int] = []

    def interrupted(self: Device, work: Any, why: Any) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        finish(self, work, why)

    states: list[int] = []

    class Looks(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            assert all(type(p) is nn.Parameter for p in pl_module.parameters())
            states.append(len(trainer.optimizers[0].state_dict()["state"]))

    module = Module(Stack())
    with mock.patch.object(Device, "finish", interrupted), pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_for(overlapping("forward"), callbacks=[Looks()]).fit(module, loader(vectors() * 2))
    assert states == [24]


class Reads(torch.utils.data.Dataset[Tensor]):
    """A data set that holds the module, and reads it in its workers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return vectors()[index] + 0 * next(self.module.parameters()).detach().sum()


@pytest.mark.long("takes a second or more")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_that_are_forked_while_updates_are_under_way() -> None:
    module = Module(Stack())
    submit = BackgroundUpdates.submit

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.02), work())[1], *then)  # type: ignore[func-returns-value]

    batches = torch.utils.data.DataLoader(Reads(module), batch_size=None, num_workers=1)
    with mock.patch.object(BackgroundUpdates, "submit", slow):
        trainer_for(overlapping("forward"), max_epochs=2).fit(module, batches)
