"""Faults end in a clear error with the host's weights whole, and what goes on from there ends as if nothing had happened.

``python -m tests.endurance.test_faults`` has each fault strike at many random moments and prints a row of
``examples/results/README.md``.
``kill -9`` is in ``test_kills``, what each error says and what becomes of a run that is repeated with less memory elsewhere.
"""

from __future__ import annotations

import gc
import logging
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import count, product
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.optim import AdamW
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset, get_worker_info

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.weights.device_parameter import DeviceParameter
from tests.support.engine import engine_of
from tests.support.models import Module, Stack
from tests.support.repository import result_row
from tests.support.runs import assert_equal, loader, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first

STEPS = 7
LAYERS = 7  # of Stack
OVERLAPS = ("off", "forward", "backward")
TEARS: dict[str, tuple[str, ...]] = {"in backward": ("backward",), "anywhere": ("forward", "backward")}


class ByStep(Module):
    """Data and random numbers follow from the step alone, which is what a checkpoint knows."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.begins: list[Callable[[int], None]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for each in self.begins:
            each(self.trainer.global_step)
        torch.default_generator.manual_seed(self.trainer.global_step)
        return self.loss(self.rows())

    def rows(self) -> Tensor:
        return torch.randn(4, 16)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=1e-2, fused=True)


def trainer_of(way: str, folder: Path, callbacks: list[Callback], **options: Any) -> pl.Trainer:
    strategy: Any = "auto"
    if way != "plain":
        strategy = SuperpipelineStrategy(k=1, k_prime=1, optimizer_overlap=way)  # type: ignore[arg-type]
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=2)
    options = {"max_steps": STEPS, "max_epochs": -1, "enable_checkpointing": True, **options}
    return trainer_for(strategy, callbacks=[*callbacks, saver], default_root_dir=folder, **options)


def batches() -> DataLoader[Any]:
    return loader([torch.zeros(1)] * STEPS)


def left_by(trainer: pl.Trainer, module: nn.Module) -> tuple[Any, Any]:
    """Weights and optimizer state, copied."""
    return tree_map_only(Tensor, Tensor.clone, (dict(module.state_dict()), trainer.optimizers[0].state_dict()))


@cache
def undisturbed() -> tuple[list[Any], Tensor]:
    """What plain Lightning has after each number of steps, and its random state at the end."""
    states: list[Any] = []
    with tempfile.TemporaryDirectory() as folder:
        pl.seed_everything(7, verbose=False)
        module, trainer = ByStep(), trainer_of("plain", Path(folder), [])
        module.begins.append(lambda step: states.append(left_by(trainer, module)))
        trainer.fit(module, batches())
    return [*states, left_by(trainer, module)], torch.get_rng_state()


# ---------------------------------------------------------------------- faults


class Broken(Exception):
    """What faults raise that could be anything."""


@dataclass
class Scene:
    """What a fault finds, and what it may change before training begins.

    Attributes:
        step: in which it strikes: so many are whole before it.
        whole: how many steps may be whole after it.
        struck: whether it has, which it does once.
    """

    way: str
    step: int
    chance: random.Random
    asynchronous: bool = False
    devices: list[SimDevice] = field(default_factory=list)
    module: ByStep = field(default_factory=ByStep)
    callbacks: list[Callback] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    batches: Any = field(default_factory=batches)
    whole: list[int] = field(default_factory=list)
    struck: bool = False

    def strikes(self) -> bool:
        """Whether it is the step; True once."""
        now = not self.struck and self.module.trainer.global_step == self.step
        self.struck = self.struck or now
        return now

    def wrap_a_layer(self, then: Callable[[Tensor], Tensor]) -> None:
        """``then`` gets the output of a layer somewhere in the middle."""
        net: Any = self.module.net
        layer = self.chance.choice([*net.blocks, net.head])
        forward = layer.forward
        layer.forward = lambda x: then(forward(x))


def fails_in_forward(scene: Scene) -> None:
    def then(output: Tensor) -> Tensor:
        if scene.strikes():
            raise Broken("in forward")
        return output

    scene.wrap_a_layer(then)


def fails_in_backward(scene: Scene) -> None:
    def fails(gradient: Tensor) -> None:
        if scene.strikes():
            raise Broken("in backward")

    def then(output: Tensor) -> Tensor:
        output.register_hook(fails)
        return output

    scene.wrap_a_layer(then)


def fails_in_a_hook(scene: Scene, of: str) -> None:
    """Of the LightningModule, or of a callback."""
    names = ["on_train_batch_start", "on_before_backward", "on_train_batch_end"]
    if scene.way != "backward":  # which refuses hooks that could see gradients
        names += ["on_before_zero_grad", "on_after_backward", "on_before_optimizer_step"]
    name, calls = scene.chance.choice(names), count()
    scene.whole = [scene.step + (name == "on_train_batch_end")]

    def fails(*_: Any) -> None:
        if next(calls) == scene.step:
            scene.struck = True
            raise Broken(f"in a {of}")

    scene.callbacks.append(callback := Callback())
    setattr(scene.module if of == "hook" else callback, name, fails)


@contextmanager
def fails_in_the_optimizer(scene: Scene) -> Iterator[None]:
    """torch's update raises: of all layers, or of one of them in the background."""
    module: Any = sys.modules["torch.optim.adam"]  # torch hides its name
    adam, calls = module.adam, count()
    parts = LAYERS if scene.way in TEARS["anywhere"] else 1
    last = scene.step * parts + scene.chance.randrange(parts)

    def fails(*args: Any, **options: Any) -> None:
        if next(calls) == last:
            scene.struck = True
            raise Broken("in the optimizer")
        adam(*args, **options)

    with mock.patch.object(module, "adam", fails):
        yield


def runs_out_of_device_memory(scene: Scene) -> None:
    """From one step on there is less than it takes."""

    def lessen(step: int) -> None:
        if scene.strikes():
            device = scene.devices[-1]
            device.capacity = device.in_use + int((device.peak - device.in_use) * scene.chance.random())

    scene.module.begins.append(lessen)


class Profile:
    """Counts the moments at which Python may look for signals, in the package's own code or in all; ``then`` comes at one."""

    def __init__(self, of: str, at: int, then: Callable[[], None]) -> None:
        self.of, self.left, self.then = of, at, then

    def __call__(self, frame: Any, event: str, argument: Any) -> None:
        if event in ("call", "c_return") and self.of in frame.f_code.co_filename:
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                self.then()


@cache
def moments_of_two_steps(way: str, asynchronous: bool, of: str) -> int:
    profile = Profile(of, 10**9, lambda: None)
    with tempfile.TemporaryDirectory() as folder, simulated(capacity=2**24) if asynchronous else nullcontext():
        module = ByStep()
        module.begins.append(lambda step: sys.setprofile(profile if 2 <= step < 4 else None))
        trainer_of(way, Path(folder), []).fit(module, batches())
    return 10**9 - profile.left


@contextmanager
def is_sent(scene: Scene, number: signal.Signals) -> Iterator[None]:
    """A signal comes at any moment of two steps, every other time while the package's own code runs."""
    of = "" if scene.way == "plain" else scene.chance.choice(["", "/sp_lightning/"])
    scene.whole = [scene.step + more for more in range(4)]  # SIGTERM is looked at when a step ends

    def strike() -> None:
        scene.struck = True
        signal.raise_signal(number)

    profile = Profile(of, scene.chance.randrange(moments_of_two_steps(scene.way, scene.asynchronous, of)), strike)
    scene.module.begins.append(
        lambda step: sys.setprofile(profile) if step == scene.step and not scene.struck else None
    )
    try:
        yield
    finally:
        sys.setprofile(None)


def has_a_loss_of_nan(scene: Scene) -> None:
    """Which Lightning looks for where it is asked to."""
    scene.options["detect_anomaly"] = True
    scene.module.rows = lambda: torch.randn(4, 16) * (torch.nan if scene.strikes() else 1)  # type: ignore[method-assign]


def gets_another_shape(scene: Scene) -> None:
    scene.module.rows = lambda: torch.randn(4, 15 if scene.strikes() else 16)  # type: ignore[method-assign]


class Dies(Dataset[int]):
    """Takes its worker with it."""

    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 99

    def __getitem__(self, index: int) -> int:
        if index == self.at and get_worker_info() is not None:
            os._exit(9)
        return index


@contextmanager
def loses_a_worker(scene: Scene) -> Iterator[None]:
    """torch says so by a signal, at any moment."""
    scene.batches = DataLoader(Dies(scene.step + 2), batch_size=None, num_workers=1, prefetch_factor=2)
    scene.whole, scene.struck = [*range(STEPS)], True
    # torch sets its handler once, and Lightning puts back what was there before.
    with mock.patch("torch.utils.data._utils.signal_handling._SIGCHLD_handler_set", False):
        yield


@contextmanager
def may_not_pin(scene: Scene) -> Iterator[None]:
    """A warning is all."""
    scene.whole, scene.struck = [STEPS], True
    with (
        mock.patch.object(Device, "pin", return_value=False),
        pytest.warns(UserWarning, match="could not be page-locked"),
    ):
        yield


@contextmanager
def lacks_host_memory(scene: Scene) -> Iterator[None]:
    """Set-up sees it: for a layer's copy, or for gradients and the optimizer's state."""
    scene.whole, scene.struck = [0], True
    with mock.patch("sp_lightning.trainer.host_memory.available_bytes", return_value=scene.chance.choice([1000, 9000])):
        yield


@dataclass(frozen=True)
class Fault:
    """One row of the table.

    Attributes:
        inject: prepares it; what it returns is entered while training runs.
        error: that training ends in; None if it goes on.
        says: a pattern of its text.
        tears: the overlaps in which weights may be those of no whole step, so that nothing is saved.
        plain: whether plain Lightning knows it.
        devices: whether each is the asynchronous one.
    """

    inject: Callable[[Scene], AbstractContextManager[None] | None]
    error: type[BaseException] | None
    says: str = ""
    tears: tuple[str, ...] = ()
    plain: bool = True
    devices: tuple[bool, ...] = (False, True)


FAULTS = {
    "exception in forward": Fault(fails_in_forward, Broken, "in forward"),
    "exception in backward": Fault(fails_in_backward, Broken, "in backward", TEARS["in backward"]),
    "exception in a hook": Fault(partial(fails_in_a_hook, of="hook"), Broken, "in a hook"),
    "exception in a callback": Fault(partial(fails_in_a_hook, of="callback"), Broken, "in a callback"),
    "exception in the optimizer": Fault(fails_in_the_optimizer, Broken, "in the optimizer", TEARS["anywhere"]),
    "out of device memory": Fault(
        runs_out_of_device_memory, torch.OutOfMemoryError, r"are in use", TEARS["in backward"], False, (True,)
    ),
    "Ctrl-C": Fault(partial(is_sent, number=signal.SIGINT), SystemExit, "^1$", TEARS["anywhere"], devices=(False,)),
    "SIGTERM": Fault(partial(is_sent, number=signal.SIGTERM), SIGTERMException),
    "loss of NaN": Fault(has_a_loss_of_nan, RuntimeError, "returned nan values"),
    "batch of another shape": Fault(gets_another_shape, RuntimeError, "shapes cannot be multiplied"),
    "death of a worker": Fault(
        loses_a_worker, RuntimeError, r"DataLoader worker .*exited unexpectedly", TEARS["anywhere"], devices=(False,)
    ),
    "pinning refused": Fault(may_not_pin, None, plain=False, devices=(False,)),
    "no host memory": Fault(
        lacks_host_memory, MemoryError, "more of CPU memory are needed", plain=False, devices=(False,)
    ),
}
CASES = [
    (name, way, asynchronous)
    for name, fault in FAULTS.items()
    for way in (*(["plain"] if fault.plain else []), *OVERLAPS)
    for asynchronous in ([False] if way == "plain" else fault.devices)
]
SHORT = [each for each in CASES if not each[2] or FAULTS[each[0]].tears or each[0] == "exception in forward"]


# ---------------------------------------------------------------------- what comes of them


def global_things() -> set[Any]:
    """Threads of ours, and hooks of anybody's; what a run before has left counts for that."""
    threads = [each for each in threading.enumerate() if each.name.startswith("superpipeline")]
    return {*threads, *torch_module._global_forward_hooks, *torch_optimizer._global_optimizer_pre_hooks}


class Witness(Callback):
    """Looks at the module while the error is on its way, as Lightning's ``OnExceptionCheckpoint`` does."""

    seen: dict[str, Tensor] | None = None

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        assert not any(issubclass(type(each), DeviceParameter) for each in pl_module.parameters())
        self.seen = {name: value.clone() for name, value in pl_module.state_dict().items()}


class Trial:
    """Has one fault strike one training."""

    def __init__(self, name: str, way: str, asynchronous: bool, seed: int, folder: Path) -> None:
        self.fault, self.way, self.folder = FAULTS[name], way, folder
        self.error: tuple[type[BaseException] | None, str] = (None, "")
        signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background jobs ignore
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)}
        chance = random.Random(f"{name} {way} {asynchronous} {seed}")
        step = chance.choice([2, 3, 4])
        self.asynchronous = asynchronous
        self.torn, self.before = False, global_things()
        with self.device() as devices:
            pl.seed_everything(7, verbose=False)
            self.scene = scene = Scene(way, step, chance, asynchronous, devices, whole=[step])
            with self.fault.inject(scene) or nullcontext():
                self.witness = Witness()
                self.trainer = trainer_of(way, folder, [*scene.callbacks, self.witness], **scene.options)
                try:
                    self.trainer.fit(scene.module, scene.batches)
                except (Exception, SystemExit, KeyboardInterrupt) as error:
                    self.error = _raised(error, self.fault.error)  # and not the error: its traceback holds activations
        gc.collect()
        self.handlers_left = {
            number: signal.signal(number, handler) for number, handler in handlers.items()
        } != handlers

    def device(self) -> AbstractContextManager[list[SimDevice]]:
        return simulated(capacity=2**24) if self.asynchronous else nullcontext([])

    def ended_in_its_error(self) -> None:
        assert self.scene.struck
        assert self.error[0] is self.fault.error, self.error
        assert re.search(self.fault.says, self.error[1]), self.error

    def left_the_host_whole(self) -> None:
        """And nothing on the device, no thread, no hook, no handler of signals."""
        for mine, like in zip(self.scene.module.parameters(), ByStep().parameters(), strict=True):
            assert type(mine) is nn.Parameter
            assert (mine.device, mine.shape, mine.dtype) == (like.device, like.shape, like.dtype)
            assert mine.isfinite().all()
        assert not global_things() - self.before
        assert engine_of(self.trainer.strategy) is None
        assert [each.in_use for each in self.scene.devices] == [0] * len(self.scene.devices)
        assert not any(each._forward_hooks or each._forward_pre_hooks for each in self.scene.module.modules())
        assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
        assert torch.is_grad_enabled()
        assert not self.handlers_left
        self.torn = self.way in self.fault.tears and self.trainer.strategy._last.partially_updated is not None
        with pytest.raises(RuntimeError, match="not those of any whole step") if self.torn else nullcontext():
            self.trainer.save_checkpoint(self.folder / "after.ckpt")
        if not self.torn:
            states, saved = undisturbed()[0], torch.load(self.folder / "after.ckpt")
            weights = saved["state_dict"]
            assert_equal(weights, dict(self.scene.module.state_dict()), "what is saved")
            assert_equal(self.witness.seen or weights, weights, "what was there while the error was on its way")
            whole = [n for n in self.scene.whole if all(weights[key].equal(states[n][0][key]) for key in weights)]
            assert whole, "the weights are those of no whole step"
            if whole != [0]:
                assert_equal(saved["optimizer_states"], [states[whole[0]][1]], "the optimizer's state")

    def went_on(self) -> None:
        """From the last checkpoint in a new trainer; in the old one from where it was, if that can be said."""
        last = self.folder / "last.ckpt"
        kept = Path(shutil.copy(last, self.folder / "kept.ckpt")) if last.exists() else None
        after = self.folder / "after.ckpt"
        assert kept is not None or self.scene.whole == [0]
        exact = len(self.scene.whole) == 1 and 0 < self.scene.whole[0] < STEPS and after.exists()
        self._ends_undisturbed(ByStep(), trainer_of(self.way, self.folder, []), kept)
        self._ends_undisturbed(self.scene.module, self.trainer, after if exact else kept)

    def _ends_undisturbed(self, module: ByStep, trainer: pl.Trainer, file: Path | None) -> None:
        if file is None:
            pl.seed_everything(7, verbose=False)
            module.load_state_dict(undisturbed()[0][0][0])
        with self.device():
            trainer.fit(module, batches(), ckpt_path=file)
        states, rng = undisturbed()
        assert_equal(left_by(trainer, module), states[-1], "the end")
        assert torch.equal(torch.get_rng_state(), rng), "random state differs"


def _raised(error: BaseException, wanted: type[BaseException] | None) -> tuple[type[BaseException], str]:
    """What was raised: the error, or what it was raised from.

    torch reports a dead worker wherever Python happens to be, and ``inspect`` raises an error of its own from that.
    """
    cause: BaseException | None = error
    while cause is not None and type(cause) is not wanted:
        cause = cause.__cause__
    return type(cause or error), str(cause or error)


CHECKS = (Trial.ended_in_its_error, Trial.left_the_host_whole, Trial.went_on)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("name", "way", "asynchronous"),
    first(
        SHORT,
        if_=lambda each: each[2] and each[1] == "forward",
        second=SHORT[::2],
        why="the same in the other modes of updates",
    ),
)
# A signal's error may come between open() and the line that holds the file. It is closed all the same, once nothing holds it.
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_fault(name: str, way: str, asynchronous: bool, tmp_path: Path) -> None:
    """The rows of plain Lightning say that the test asks for what it gives."""
    trial = Trial(name, way, asynchronous, 0, tmp_path)
    for check in CHECKS:
        check(trial)


def held(check: Callable[[], None], name: str) -> bool:
    """Whether it does; if not, the standard output says why."""
    try:
        check()
    except BaseException as error:
        print(f"{name}: {check.__name__}: {type(error).__name__}: {error}"[:500], flush=True)
        return False
    return True


@pytest.mark.hours("each fault at many random moments")
@pytest.mark.timeout(3600)
def test_faults_at_random_moments() -> None:
    """Each at ten moments in each way."""
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    gc.freeze()
    faults, failures = [], 0
    for name, fault in FAULTS.items():
        found = []
        for way, seed in product(OVERLAPS, range(1, 11)):
            asynchronous = fault.devices[seed % len(fault.devices)]
            with tempfile.TemporaryDirectory() as folder:
                trial = Trial(name, way, asynchronous, seed, Path(folder))
                where = f"{name}, {way}, {'asynchronous, ' * asynchronous}{seed}"
                checks = (trial.ended_in_its_error, trial.left_the_host_whole, trial.went_on)
                found.append([held(check, where) for check in checks] + [trial.torn])
        ended, whole, resumed, torn = (sum(each) for each in zip(*found, strict=True))
        failures += 3 * len(found) - ended - whole - resumed
        faults.append(
            f"{name}: of {len(found)}, {ended} ended in its error, {whole} whole ({torn} torn), {resumed} equal"
        )
        print(faults[-1], flush=True)
    print(result_row("Faults at random moments", "; ".join(faults), "python -m tests.endurance.test_faults"))
    assert not failures


if __name__ == "__main__":
    test_faults_at_random_moments()
