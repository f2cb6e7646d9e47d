"""Several processes, of which one fails: everybody ends soon, with the first one's own error, and nothing is left."""

from __future__ import annotations

import gc
import os
import signal
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from traceback import extract_stack
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.experimental.ranks.failures import LOST, RankError
from sp_lightning.experimental.ranks.ranks import Ranks
from tests.support.ranks import RanksFailed, in_ranks, rank, start
from tests.support.runs import assert_equal, trainer_for
from tests.support.tiers import first, some

BOTH = 2
"""In place of a rank's number: both fail."""

SECONDS = 10
"""How long the others may take to end."""


class Net(pl.LightningModule):
    """Calls ``fails`` at some places where no hook of a callback runs."""

    def __init__(self, fails: Fails) -> None:
        super().__init__()
        self.fails = fails
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def configure_model(self) -> None:
        self.fails.at("set-up")

    def training_step(self, batch: Any, index: int) -> Any:
        x = self.layers[:2](batch[0])
        self.fails.at("forward")
        if x.requires_grad:
            x.register_hook(lambda gradient: self.fails.at("backward"))
        return self.layers[2:](x).square().mean()

    def configure_optimizers(self) -> Any:
        self.fails.at("optimizers")
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.fails.at("step"))
        return optimizer


class Data(TensorDataset):
    def __init__(self, fails: Fails) -> None:
        super().__init__(torch.randn(32, 16))
        self.fails = fails

    def __getitem__(self, index: int) -> Any:
        self.fails.at("data")
        return super().__getitem__(index)


class Fails(Callback):
    """Does something on one rank, at set-up or in the second batch."""

    def __init__(self, who: int, where: str, how: str, folder: str) -> None:
        self.who, self.where, self.how = who, where, how
        self.begun = Path(folder) / "begun"
        self.steps = 0
        if hasattr(Callback, where):
            setattr(self, where, self._hook)

    def _hook(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step:
            self.at(self.where)

    def on_train_batch_end(self, *_: Any) -> None:
        self.steps += 1

    def at(self, where: str) -> None:
        if where != self.where or self.who not in (rank(), BOTH):
            return
        if where in ("forward", "backward", "step", "data") and not self.steps:
            return
        self.begun.write_text(str(monotonic()))  # a clock that all processes have
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.how == "leave":
            os._exit(3)
        if self.how == "interrupt":
            signal.raise_signal(signal.SIGINT)
            self.who = -1
            return  # a step that has begun to update weights ends first
        raise {"raise": ValueError, "memory": torch.OutOfMemoryError}[self.how]("what the user's code says")


def train(who: int, where: str, how: str, folder: str, strategy: dict[str, Any], workers: int = 0) -> None:
    pl.seed_everything(1, verbose=False)
    fails = Fails(who, where, how, folder)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=SuperpipelineStrategy(**strategy), max_epochs=2, logger=False,
        callbacks=[fails], enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    of_workers: Any = {"multiprocessing_context": "fork"} if workers else {}
    try:
        trainer.fit(Net(fails), DataLoader(Data(fails), batch_size=4, num_workers=workers, **of_workers))
    finally:
        (Path(folder) / f"ended{rank()}").write_text(str(monotonic()))


HOOKS = (
    "on_train_batch_start", "on_before_backward", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end",
    "on_save_checkpoint",
)  # fmt: skip
WHERE = ("set-up", "optimizers", "data", "forward", "backward", "step", *HOOKS)
ALL = [(who, where, how) for who in (0, 1) for where in WHERE for how in ("raise", "kill", "leave", "memory")]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("who", "where", "how"),
    first(
        ALL, (0, "on_before_optimizer_step", "raise"), (1, "forward", "raise"), (1, "backward", "kill"),
        second=ALL[::6], why="three stand for all moments, and a sixth of them for all ways to fail",
    ),
)  # fmt: skip
def test_everybody_ends_with_the_first_error(who: int, where: str, how: str, tmp_path: Any) -> None:
    check(who, where, how, tmp_path, {})


@pytest.mark.long("the same moments as without updates in the background")
@pytest.mark.parametrize("where", ["forward", "backward", "step", "on_train_batch_end"])
@pytest.mark.parametrize("how", some(["raise", "kill"], "raise", why="the next test has the other"))
@pytest.mark.parametrize("who", [0, 1])
def test_everybody_ends_where_updates_run_under_forward(who: int, how: str, where: str, tmp_path: Any) -> None:
    check(who, where, how, tmp_path, {"optimizer_overlap": "forward"})


@pytest.mark.long("workers, which keep a killed rank's connections open")
@pytest.mark.parametrize("who", [0, 1])
def test_everybody_ends_where_a_killed_rank_has_workers(who: int, tmp_path: Any) -> None:
    check(who, "forward", "kill", tmp_path, {}, workers=1)


INTERRUPTS = [
    (who, where) for who in (0, 1, BOTH) for where in ("data", "forward", "backward", "step", HOOKS[0], HOOKS[-2])
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("who", "where"),
    first(
        INTERRUPTS, (1, "forward"), (BOTH, "backward"),
        second=INTERRUPTS[::3], why="two stand for all moments, and a third of them for all ranks",
    ),
)  # fmt: skip
def test_an_interrupt_ends_all_ranks_quietly(who: int, where: str, tmp_path: Any) -> None:
    """A fifth of all Ctrl-C printed a traceback: of a RankError, or of ranks that disagree, from a ``__del__``."""
    errors = [error for error, _ in start(2, interrupt, who, where, str(tmp_path)).outcomes()]
    for number, error in enumerate(errors):
        assert str(error).rstrip().endswith("SystemExit: 1")
        assert "RankError" not in str(error)
        printed = (tmp_path / f"{number}.txt").read_text()
        assert not any(word in printed for word in ("Traceback", "RankError", "ignored", "disagree")), printed


def interrupt(who: int, where: str, folder: str) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    printed = os.open(f"{folder}/{rank()}.txt", os.O_CREAT | os.O_WRONLY)
    os.dup2(printed, 2)
    try:
        train(who, where, "interrupt", folder, {})
    finally:
        gc.collect()


def check(who: int, where: str, how: str, folder: Any, strategy: dict[str, Any], workers: int = 0) -> None:
    started = start(2, train, who, where, how, str(folder), strategy, workers)
    errors = [error for error, _ in started.outcomes()]
    took = float((folder / f"ended{1 - who}").read_text()) - float((folder / "begun").read_text())
    other = errors[1 - who]
    assert other is not None
    assert "RankError" in other
    if how in ("raise", "memory"):
        assert "what the user's code says" in str(errors[who])
        assert "what the user's code says" in other
    else:
        assert "has ended" in other or "has lost" in other
    assert took < SECONDS, f"it took {took:.0f} seconds"
    assert not any(process.is_alive() for process in started.processes), "shared memory goes with the last process"


class FailsOnItsOwner(torch.optim.SGD):
    """The rank that steps the layers fails; the other has nothing to step, and waits for it."""

    def step(self, closure: Any = None) -> Any:
        assert closure is not None
        loss = closure()
        if any(group["params"] for group in self.param_groups):
            raise ValueError("what the user's code says")
        return loss


class SteppedByOne(Net):
    def configure_optimizers(self) -> Any:
        return FailsOnItsOwner(self.parameters(), lr=0.01)


def train_and_count(folder: str) -> tuple[str, int]:
    """Returns the error of this rank, and how often a wait for another rank has failed."""
    lost: list[Any] = []

    def counted(self: Ranks, *args: Any) -> None:
        try:
            wait_until(self, *args)
        except LOST as error:
            lost.append(error)
            raise

    wait_until, fails = Ranks.wait_until, Fails(-1, "", "", folder)
    trainer = trainer_for(SuperpipelineStrategy(k=1), devices=2)
    with mock.patch.object(Ranks, "wait_until", counted), pytest.raises((ValueError, RankError)) as caught:
        trainer.fit(SteppedByOne(fails), DataLoader(Data(fails), batch_size=4))
    return str(caught.value), len(lost)


@pytest.mark.long("starts two ranks")
def test_a_lost_rank_is_waited_for_once(tmp_path: Path) -> None:
    """The end of a run waited for each layer of a lost rank, up to a second each."""
    started = start(2, train_and_count, str(tmp_path))
    (_, (said, none)), (_, (told, lost)) = started.outcomes()
    assert said == "what the user's code says"
    assert "rank 0 has failed while rank 1 waited" in told
    assert (none, lost) == (0, 1)


class CatchesOutOfMemory(pl.LightningModule):
    """Its second batch runs out of memory in the optimizer's step, on all ranks; it goes on with the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
        self.automatic_optimization = False

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()

        def closure() -> Any:
            optimizer.zero_grad()
            loss = self.layers(batch[0]).square().mean()
            if index == 2 and rank() == 1:
                sleep(0.5)  # the other one waits, and looks whether this one has failed
            self.manual_backward(loss)
            if index == 1:
                raise torch.OutOfMemoryError("of the device")
            return loss

        with suppress(torch.OutOfMemoryError):
            optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_and_catch(kind: type[pl.LightningModule]) -> dict[str, torch.Tensor]:
    pl.seed_everything(1, verbose=False)
    module = kind()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy="superpipeline", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(32, 16)), batch_size=4))
    return module.state_dict()


class RunsOutInASum(CatchesOutOfMemory):
    """Its second backward runs out of memory in the sum of a layer's gradients, on rank 1 alone, which goes on."""

    def training_step(self, batch: Any, index: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        empty = Device.empty

        def full(device: Device, nbytes: int) -> Any:
            if index == 1 and rank() == 1 and "_sum" in {each.name for each in extract_stack(limit=4)}:
                raise torch.OutOfMemoryError("of the device")
            return empty(device, nbytes)

        with mock.patch.object(Device, "empty", full), suppress(torch.OutOfMemoryError):
            self.manual_backward(self.layers(batch[0]).square().mean())
        optimizer.step()


@pytest.mark.rest("starts two ranks")
def test_out_of_memory_in_a_sum_is_told_to_the_others() -> None:
    """They wait for this rank's part of the sum, which never comes, also if user code catches the error."""
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, train_and_catch, RunsOutInASum)
    assert "RankError: rank 1 has failed while rank 0 waited for the gradients of" in str(caught.value.errors[0])
    assert "OutOfMemoryError: of the device" in str(caught.value.errors[0])


@pytest.mark.rest("takes tenths of a second")
def test_out_of_memory_that_all_ranks_catch_ends_no_run() -> None:
    """No rank is told of it by another one, because user code may go on from it."""
    first, second = in_ranks(2, train_and_catch, CatchesOutOfMemory)
    assert_equal(first, second, "weights")
