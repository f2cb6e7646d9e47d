"""An interrupt at any line of set-up and of teardown, and Ctrl-C at random moments of a run: nothing of the run is left.

A first Ctrl-C waits for the end of the batch (``tests/trainer/test_deferred_signals.py``). A second one does not, and here a
timer, which is never deferred, takes its place.
"""

from __future__ import annotations

import gc
import itertools
import linecache
import logging
import random
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.modules.module as torch_module
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.torch_compat.private import ENGINE_CALL
from sp_lightning.trainer.run import Run
from sp_lightning.trainer.strategy import StreamingStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.repository import result_row
from tests.support.runs import loader, trainer_for

WAYS: list[dict[str, Any]] = [
    {"optimizer_overlap": "forward"},
    {"optimizer_overlap": "backward"},
    {"optimizer_on": "gpu", "optimizer_overlap": "forward"},
    {"optimizer_on": "gpu", "optimizer_overlap": "backward"},
    {},
    {"activations": "recompute"},
    {"activations": "offload", "optimizer_overlap": "forward"},
]


def things_of_the_process() -> dict[str, Any]:
    """What a run changes in the process, or could leave there."""
    owner, name = ENGINE_CALL
    numbers = (signal.SIGTERM, signal.SIGUSR1, signal.SIGALRM)
    return {
        "hooks of optimizers": (
            len(torch_optimizer._global_optimizer_pre_hooks), len(torch_optimizer._global_optimizer_post_hooks),
        ),
        "hooks of modules": (
            len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks),
            len(torch_module._global_backward_hooks),
        ),
        "class of modules": (nn.Module.__call__, nn.Module._call_impl),
        "autograd's engine": getattr(owner, name),
        "threads": [each.name for each in threading.enumerate() if each.name.startswith("superpipeline")],
        "handlers": [signal.getsignal(number) for number in numbers],
        "modes": (
            torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"),
            torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack(),
            torch.is_inference_mode_enabled(), torch._C._autograd._top_saved_tensors_default_hooks(False),
        ),
    }  # fmt: skip


def what_is_left(module: pl.LightningModule, before: dict[str, Any]) -> list[str]:
    """What of a run is there still, in words; empty if nothing is. Trains the module with plain Lightning."""
    gc.collect()
    now = things_of_the_process()
    left = [f"{name}: {now[name]}" for name in before if now[name] != before[name]]
    if any(type(p) is not nn.Parameter for p in module.parameters()):
        left.append(f"classes of parameters: {sorted({type(p).__name__ for p in module.parameters()})}")
    if not all(p.isfinite().all() for p in module.parameters()):
        left.append("values that are not finite")
    if any(each._forward_hooks or each._forward_pre_hooks or each._backward_hooks for each in module.modules()):
        left.append("hooks of its modules")
    try:
        trainer_for("auto").fit(module, loader(vectors(2)))
    except BaseException as error:
        left.append(f"plain Lightning: {type(error).__name__}: {error}"[:200])
    return left


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    """Lightning leaves SIGINT ignored after Ctrl-C."""
    numbers = (signal.SIGINT, signal.SIGALRM)
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


# ---------------------------------------------------------------------- at any line of set-up and of teardown


class Lines:
    """Raises a KeyboardInterrupt at one of the lines of the package that run inside of a function; counts them before.

    Args:
        at: which of them, from 0.
    """

    def __init__(self, at: int) -> None:
        self.left, self.where = at, ""

    def __call__(self, frame: Any, event: str, argument: Any) -> Any:
        file = frame.f_code.co_filename
        if "/sp_lightning/" not in file or file.endswith("module_hooks.py"):
            return None
        if event == "line":
            self.left -= 1
            if self.left < 0 and not self.where and may_raise(frame):
                self.where = f"{Path(file).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt(self.where)
        return self


def may_raise(frame: Any) -> bool:
    """Whether an interrupt could come here, and would reach the caller.

    Python lets none come between the end of a block and the ``__exit__`` of its ``with``, which has a line as well. What
    garbage collection calls raises nothing.
    """
    source = linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
    finalizes = any(each.f_code.co_filename.endswith("weakref.py") for each, _ in traceback.walk_stack(frame))
    return not (finalizes or source.startswith("with "))


@contextmanager
def watched(owner: Any, name: str, lines: Lines) -> Iterator[None]:
    """Lines count while the function runs, the first time."""
    original, calls = getattr(owner, name), itertools.count()

    def inside(*args: Any, **options: Any) -> Any:
        if next(calls):
            return original(*args, **options)
        sys.settrace(lines)
        try:
            return original(*args, **options)
        finally:
            sys.settrace(None)

    setattr(owner, name, inside)
    try:
        yield
    finally:
        setattr(owner, name, original)


class Failing(Module):
    """Its backward fails where it is asked to."""

    fails = False

    def __init__(self) -> None:
        super().__init__(Stack(2))

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch)
        if self.fails and x.requires_grad:
            x.register_hook(self.fail)
        for block in self.net.blocks:
            x = block(x)
        return self.net.head(x).square().mean()

    def fail(self, gradient: Tensor) -> None:
        raise KeyError("in backward")


PARTS: dict[str, tuple[Any, str]] = {
    "set-up": (StreamingStrategy, "_set_up"),
    "teardown": (StreamingStrategy, "_tear_down"),
    "the end of an engine": (Run, "_end_engine"),
    "closing": (Engine, "close"),
    "after an error": (Run, "abort"),
}


def interrupted(part: str, at: int, way: dict[str, Any]) -> tuple[Lines, list[str]]:
    """Interrupts a run at a line of a part of it. Returns the lines, and what is left of the run."""
    before = things_of_the_process()
    module, lines = Failing(), Lines(at)
    module.fails = part == "after an error"
    with watched(*PARTS[part], lines), suppress(SystemExit, KeyError):
        trainer_for(SuperpipelineStrategy(k=1, **way)).fit(module, loader(vectors(2)))
    module.fails = False
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return lines, what_is_left(module, before)


def at_lines(part: str, every: int, way: dict[str, Any]) -> list[str]:
    """Interrupts a part of a run at some of its lines. Returns what was left, and where."""
    lines, _ = interrupted(part, 10**9, way)
    found = []
    for at in range(every // 2, 10**9 - lines.left, every):
        struck, left = interrupted(
            part, at, way
        )  # a run may have some lines less than another, and is not interrupted then
        found += [f"{part}, line {at}, {struck.where}: {each}" for each in left]
    return found


EVERY = {"set-up": 1501, "teardown": 401, "the end of an engine": 401, "closing": 301, "after an error": 201}


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_at_a_line(part: str) -> None:
    assert not at_lines(part, EVERY[part], WAYS[1])


@pytest.mark.long("other lines, in other modes")
@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_at_other_lines(part: str) -> None:
    assert not [each for way in (WAYS[2], WAYS[6]) for each in at_lines(part, EVERY[part] * 7 // 5, way)]


@pytest.mark.hours("interrupts at each seventh line")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_at_many_lines(part: str) -> None:
    assert not [each for way in WAYS[:4] for each in at_lines(part, 29, way)]


# ---------------------------------------------------------------------- Ctrl-C at any moment


LIGHTNINGS = ("Please call `iter(combined_loader)` first",)
"""What plain Lightning raises, too, if Ctrl-C comes while it prepares its loaders: its own teardown fails."""


class Interrupts:
    """Interrupts a run at a random moment, in a random mode."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.way = self.chance.choice(WAYS)
        self.precision = self.chance.choice(["32-true", "bf16-mixed"])
        self.stack: list[str] = []
        self.ended = ""

    def strike(self, number: int, frame: Any) -> None:
        self.stack = [f"{Path(each.f_code.co_filename).name}:{at}" for each, at in traceback.walk_stack(frame)][:6]
        raise KeyboardInterrupt("at a random moment")

    def run(self) -> list[str]:
        """Trains. Returns what of the run is left, in words."""
        module = Module(Stack(4))

        def train() -> None:
            strategy = SuperpipelineStrategy(k=self.chance.choice([1, 2]), **self.way)
            trainer_for(strategy, precision=self.precision).fit(module, loader(vectors(5)))

        signal.signal(signal.SIGALRM, self.strike)
        before = things_of_the_process()
        signal.setitimer(signal.ITIMER_REAL, self.chance.uniform(0.01, 0.16))
        try:
            train()
        except BaseException as error:
            self.ended = f"{type(error).__name__}: {error}"[:200]
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if self.ended.startswith(("SystemExit", "KeyboardInterrupt")) or not self.ended:
            return what_is_left(module, before)
        if any(each in self.ended for each in LIGHTNINGS):
            return []
        return [self.ended, *what_is_left(module, before)]


@pytest.mark.long("takes a second or more")
def test_ctrl_c_at_a_random_moment() -> None:
    for seed in range(4):
        assert not Interrupts(seed).run()


@pytest.mark.hours("a thousand runs")
@pytest.mark.timeout(3600)
def test_ctrl_c_at_a_thousand_random_moments() -> None:
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    runs = [Interrupts(seed) for seed in range(1000)]
    left = []
    for seed, each in enumerate(runs):
        left += [f"{seed}: {what} {each.way} {each.precision} {each.stack}" for what in each.run()]
        if left:
            print(left[-1], flush=True)
    struck = [each for each in runs if each.stack]
    lightnings = sum(any(said in each.ended for said in LIGHTNINGS) for each in runs)
    figure = (
        f"{len(struck)} of {len(runs)} runs interrupted; something left in {len(left)}; "
        f"Lightning's own teardown failed in {lightnings}"
    )
    print(result_row("A KeyboardInterrupt after 10 to 160 ms", figure, "python -m tests.endurance.test_interrupts"))
    assert not left


if __name__ == "__main__":
    test_ctrl_c_at_a_thousand_random_moments()
