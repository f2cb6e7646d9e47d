"""A handler of a signal runs between two batches: it may save a checkpoint, or end the run, wherever the signal arrives."""

from __future__ import annotations

import _thread
import copy
import itertools
import random
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.weights import swap
from sp_lightning.trainer import optimizer_steps
from sp_lightning.trainer.signals import DeferredSignals
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Does
from tests.support.runs import assert_equal, loader, trainer_for
from tests.support.tiers import first

OPTIONS: dict[str, dict[str, Any]] = {
    "backward": {"optimizer_overlap": "backward"},
    "forward": {"optimizer_overlap": "forward"},
    "off": {"optimizer_overlap": "off"},
    "device": {"optimizer_overlap": "backward", "optimizer_on": "gpu"},
    "recompute": {"optimizer_overlap": "backward", "activations": "recompute"},
    "offload": {"optimizer_overlap": "forward", "activations": "offload"},
}
BATCHES = 6


class Fused(Module):
    """Calls ``strikes`` in the middle of backward, after the layers above have been updated."""

    strikes: Callable[[int], object] = staticmethod(lambda step: None)
    at = 1
    """After which block's backward."""

    def __init__(self) -> None:
        super().__init__(Stack(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.net.stem(batch)
        for index, block in enumerate(self.net.blocks):
            x = block(x)
            if index == self.at and x.requires_grad:
                x.register_hook(partial(self.in_backward, batch_idx))
        return self.net.head(x).square().mean()

    def in_backward(self, step: int, gradient: Tensor) -> None:
        self.strikes(step)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}]


class Steps(Callback):
    """Keeps what a checkpoint has after each step."""

    def __init__(self) -> None:
        self.after: dict[int, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.note(trainer)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.note(trainer)

    def note(self, trainer: Any) -> None:
        optimizer = trainer.optimizers[0].state_dict()
        self.after[trainer.global_step] = copy.deepcopy(
            (dict(trainer.lightning_module.state_dict()), optimizer["state"])
        )


@pytest.fixture(scope="module")
def plain() -> dict[int, Any]:
    """What plain Lightning has after each step."""
    steps = Steps()
    pl.seed_everything(7, verbose=False)
    trainer_for("auto", callbacks=[steps]).fit(Fused(), loader(vectors(BATCHES)))
    return steps.after


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Lightning leaves SIGINT ignored after Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def made(name: str, strikes: Callable[[int], object] | None = None, **more: Any) -> tuple[Fused, pl.Trainer]:
    pl.seed_everything(7, verbose=False)
    module = Fused()
    module.strikes = strikes or module.strikes
    return module, trainer_for(SuperpipelineStrategy(k=1, **OPTIONS[name]), **more)


def at(number: int, *steps: int, times: int = 1) -> Callable[[int], object]:
    """A signal arrives in the middle of backward, in these steps."""
    return lambda step: [signal.raise_signal(number) for _ in range(times if step in steps else 0)]  # type: ignore[func-returns-value]


def assert_is_a_step(file: Path, plain: dict[int, Any]) -> int:
    """Checks that a checkpoint is that of plain Lightning after the step that it counts. Returns the step."""
    found = torch.load(file)
    step = int(found["global_step"])
    assert_equal((found["state_dict"], found["optimizer_states"][0]["state"]), plain[step], f"step {step}")
    return step


def assert_end(module: Fused, plain: dict[int, Any]) -> None:
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert_equal(dict(module.state_dict()), plain[BATCHES][0], "the end")


class Saves:
    """A handler that saves checkpoints."""

    def __init__(self, number: int, trainer: pl.Trainer, folder: Path) -> None:
        self.trainer, self.folder = trainer, folder
        self.files: list[Path] = []
        signal.signal(number, self)

    def __call__(self, number: int, frame: Any) -> None:
        self.files.append(self.folder / f"{len(self.files)}.ckpt")
        self.trainer.save_checkpoint(self.files[-1])


@pytest.mark.parametrize("name", first(OPTIONS, "backward", "forward", why="their other modes"))
def test_a_handler_saves_in_the_middle_of_backward(name: str, tmp_path: Path, plain: dict[int, Any]) -> None:
    """Lightning notes the user's handlers, and they are as they were afterwards."""
    module, trainer = made(name, at(signal.SIGUSR1, 1, BATCHES - 1))
    saves = Saves(signal.SIGUSR1, trainer, tmp_path)
    noted: list[Any] = []
    notes = Does(on_train_start=lambda trainer, _: noted.extend(trainer._signal_connector._original_handlers.values()))
    trainer.callbacks.append(notes)  # type: ignore[attr-defined]
    before = {number: signal.getsignal(number) for number in signal.valid_signals()}
    trainer.fit(module, loader(vectors(BATCHES)))
    assert [assert_is_a_step(file, plain) for file in saves.files] == [2, BATCHES]
    assert_end(module, plain)
    assert {number: signal.getsignal(number) for number in signal.valid_signals()} == before
    assert noted
    assert not any(hasattr(each, "deferred_by") for each in (*noted, *before.values()))


@pytest.mark.rest("takes tenths of a second")
def test_slurm_requeues_a_job_whose_signal_comes_in_backward(
    tmp_path: Path, plain: dict[int, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    for name in ("SLURM_NTASKS", "SLURM_JOB_NAME", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.delenv(name, raising=False)
    called: list[Any] = []
    monkeypatch.setattr(sys.modules["lightning.pytorch.trainer.connectors.signal_connector"], "call", called.append)
    module, trainer = made("backward", at(signal.SIGUSR1, 1), default_root_dir=tmp_path)
    environment = SLURMEnvironment(auto_requeue=True)
    monkeypatch.setattr(trainer._accelerator_connector, "cluster_environment", environment)
    trainer.fit(module, loader(vectors(BATCHES)))
    assert called == [["scontrol", "requeue", "7"]]
    assert assert_is_a_step(tmp_path / "hpc_ckpt_1.ckpt", plain) == 2
    assert_end(module, plain)


@pytest.mark.filterwarnings("ignore:.*(without a model|no last checkpoint):UserWarning")  # of OnExceptionCheckpoint
@pytest.mark.parametrize(
    ("name", "number"),
    first(
        [*((name, signal.SIGINT) for name in OPTIONS), ("backward", signal.SIGTERM)],
        ("backward", signal.SIGINT), ("backward", signal.SIGTERM), why="their other modes",
    ),
)  # fmt: skip
def test_what_ends_the_run_in_backward_is_saved(name: str, number: int, tmp_path: Path, plain: dict[int, Any]) -> None:
    callbacks = [ModelCheckpoint(tmp_path, save_on_exception=True), OnExceptionCheckpoint(tmp_path, "second")]
    module, trainer = made(name, at(number, 2), callbacks=callbacks, enable_checkpointing=True)
    with pytest.raises(SystemExit):
        trainer.fit(module, loader(vectors(BATCHES)))
    steps = [assert_is_a_step(file, plain) for file in tmp_path.iterdir()]
    assert steps in ([3, 3], [4, 4] if number == signal.SIGTERM else [])


def test_a_second_ctrl_c_ends_a_step_that_hangs(tmp_path: Path, plain: dict[int, Any]) -> None:
    """How far updates have got by then depends on the threads: the error names the layers whose weights have changed."""
    module, trainer = made("backward", at(signal.SIGINT, 2, times=2))
    with pytest.raises(SystemExit):
        trainer.fit(module, loader(vectors(BATCHES)))
    changed = {name for name, value in module.state_dict().items() if not torch.equal(value, plain[2][0][name])}
    with pytest.raises(RuntimeError, match=r"not saved: .*Go on from the last") as raised:
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    (listed,) = re.findall(r"Updated: ([^.]*(?:\.\w[^.]*)*)\. ", str(raised.value))
    named = tuple(f"{name}." for name in re.findall(r"'([^']+)'", listed))
    assert {"net.head.", "net.blocks.3."} <= set(named), "their backward was over"
    assert changed == {name for name in module.state_dict() if name.startswith(named)}
    assert all(type(p) is nn.Parameter for p in module.parameters())


def test_an_error_after_the_signal_is_no_reason_to_lose_it(plain: dict[int, Any]) -> None:
    """The handler runs once the step is given up."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, _: seen.append(number))

    def strike(step: int) -> None:
        signal.raise_signal(signal.SIGUSR1)
        assert not seen
        raise KeyError("in backward")

    module, trainer = made("backward", strike)
    with pytest.raises(KeyError):
        trainer.fit(module, loader(vectors(BATCHES)))
    assert seen == [signal.SIGUSR1]


@pytest.mark.rest("takes tenths of a second")
def test_with_accumulation_a_handler_saves_the_last_whole_step(tmp_path: Path) -> None:
    counts: list[int] = []

    def strike(step: int) -> None:
        signal.raise_signal(signal.SIGUSR1)
        counts.append(len(saves.files))

    module, trainer = made("backward", strike, accumulate_grad_batches=2)
    saves = Saves(signal.SIGUSR1, trainer, tmp_path)
    trainer.fit(module, loader(vectors(4)))
    assert counts == [0, 1, 2, 3]
    assert [torch.load(file)["global_step"] for file in saves.files] == [0, 1, 1, 2]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("owner", "name"),
    [(swap, "_swap"), (optimizer_steps.OptimizerSteps, "run")],
    ids=["while device parameters are attached", "after the step, before it is counted"],
)
def test_a_signal_arrives_while_state_is_half_changed(
    owner: Any, name: str, tmp_path: Path, plain: dict[int, Any]
) -> None:
    module, trainer = made("forward")
    saves, original = Saves(signal.SIGUSR1, trainer, tmp_path), getattr(owner, name)

    def half(*args: Any, **options: Any) -> Any:
        result = original(*args, **options)
        signal.raise_signal(signal.SIGUSR1)
        return result

    with mock.patch.object(owner, name, half):
        trainer.fit(module, loader(vectors(BATCHES)))
    assert saves.files
    for file in saves.files:
        assert_is_a_step(file, plain)
    assert_end(module, plain)


def test_a_timer_is_not_deferred_and_cannot_save_half_a_step(tmp_path: Path, plain: dict[int, Any]) -> None:
    """SIGALRM belongs to watchdogs. A handler that saves in backward finds layers updated, and others not yet."""
    module, trainer = made("backward", at(signal.SIGALRM, 2))
    saves = Saves(signal.SIGALRM, trainer, tmp_path)
    with pytest.raises(RuntimeError, match="not those of any whole step"):
        trainer.fit(module, loader(vectors(BATCHES)))
    assert saves.files
    assert not saves.files[0].exists()


def at_random_moments(seed: int, name: str, folder: Path, plain: dict[int, Any]) -> int:
    """Another thread sends signals during one run, whose handler saves. Returns the number of checkpoints."""
    chance = random.Random(f"{seed} {name}")
    module, trainer = made(name, lambda step: thread.start() if step == 0 else None)
    saves = Saves(signal.SIGUSR1, trainer, folder)
    over, handled = threading.Event(), threading.Event()

    def save(number: int, frame: Any) -> None:
        saves(number, frame)
        handled.set()

    def strike() -> None:
        while not over.wait(chance.uniform(0.0005, 0.02)):
            _thread.interrupt_main(signal.SIGUSR1)
            handled.wait()  # else a handler that runs after the run would be interrupted by the next signal, without end
            handled.clear()

    signal.signal(signal.SIGUSR1, save)
    thread = threading.Thread(target=strike)
    try:
        trainer.fit(module, loader(vectors(BATCHES)))
    finally:
        over.set()
        handled.set()
        thread.join()
    for file in saves.files:
        assert_is_a_step(file, plain)
        file.unlink()
    assert_end(module, plain)
    return len(saves.files)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", first(OPTIONS, "backward", "forward", why="their other modes"))
def test_a_handler_saves_at_random_moments(name: str, tmp_path: Path, plain: dict[int, Any]) -> None:
    assert at_random_moments(0, name, tmp_path, plain)


@pytest.mark.hours("a thousand runs")
def test_a_handler_saves_at_many_random_moments(tmp_path: Path, plain: dict[int, Any]) -> None:
    runs = itertools.islice(itertools.product(range(1000), OPTIONS), 1000)
    assert sum(at_random_moments(seed, name, tmp_path, plain) for seed, name in runs) > 1000


def test_a_run_in_another_thread_leaves_handlers_alone() -> None:
    """And where no signal comes, nothing is done."""
    module, trainer = made("backward")
    with mock.patch.object(signal, "signal") as setting, mock.patch.object(DeferredSignals, "arrived") as asked:
        thread = threading.Thread(target=trainer.fit, args=(module, loader(vectors(2))))
        thread.start()
        thread.join()
    assert trainer.global_step == 2
    assert not setting.called
    assert not asked.called
