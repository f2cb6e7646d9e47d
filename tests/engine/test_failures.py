"""After an error or Ctrl-C anywhere the module is whole, and nothing is under way."""

from __future__ import annotations

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.engine.saved_tensors import packs
from sp_lightning.core.engine.schedule import Residency
from sp_lightning.core.updates import background
from sp_lightning.core.updates.layerwise import LayerwiseStep
from sp_lightning.core.weights import swap
from tests.support.engine import Calls, Uploads, engine_of, step, streamed, three_linears
from tests.support.models import Module, Stack, vectors
from tests.support.moments import At
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for

WHERE = ("after_forward", "backward", "after_backward", "on_before_optimizer_step", "on_validation_batch_end", "start")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("where", WHERE)
def test_after_a_failure_the_module_is_whole(where: str) -> None:
    """Host parameters are back in the modules, finite, and a new run is equal to plain."""

    broken = True

    def fail(m: Any) -> None:
        if broken:
            raise (SystemExit if where == "start" else KeyError)(where)

    def run(strategy: Any, again: Any) -> Any:
        nonlocal broken
        pl.seed_everything(5, verbose=False)
        module, broken = At(**code), True
        with pytest.raises((KeyError, SystemExit), match=where):
            trainer_for(strategy).fit(module, loader(vectors()), loader(vectors()))
        assert all(type(p) is nn.Parameter and p.isfinite().all() for p in module.parameters())
        assert not any(m._forward_hooks for m in module.modules())
        left, broken = {name: value.clone() for name, value in module.state_dict().items()}, False
        trainer_for(again).fit(module, loader(vectors()), loader(vectors()))
        return left, dict(module.state_dict())

    code: dict[str, Any] = {where: fail}
    if where == "backward":
        code = {"after_forward": lambda m: m.net[2].first.weight.register_hook(lambda _: fail(m))}
    assert_equal(run(superpipeline(k=1), superpipeline()), run("auto", "auto"), where)


def at(original: Any, number: int, error: BaseException) -> Any:
    """A function that raises the first time it has been called so often."""
    calls = count(1)

    def wrapped(*args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise error
        return original(*args, **options)

    return wrapped


def half_swapped(number: int) -> Any:
    """Places are exchanged one after the other, and in one of the exchanges Ctrl-C comes in the middle."""
    original, calls = swap._swap, count(1)

    def half(swaps: Any, **where: bool) -> None:
        struck = next(calls) == number
        for index, each in enumerate(swaps):
            if struck and index == 3:
                raise KeyboardInterrupt
            original([each], **where)

    return half


INTERRUPTED: dict[str, Callable[[], Any]] = {
    "while layers are submitted": lambda: mock.patch.object(
        LayerwiseStep, "_submit", at(LayerwiseStep._submit, 10, KeyboardInterrupt())
    ),
    "while one is handed over": lambda: mock.patch.object(Device, "later", at(Device.later, 12, KeyboardInterrupt())),
    "when one has been waited for": lambda: mock.patch.object(
        background, "_restore_classes", at(background._restore_classes, 3, KeyboardInterrupt())
    ),
    "while device parameters come": lambda: mock.patch.object(swap, "_swap", half_swapped(3)),
    "while device parameters go": lambda: mock.patch.object(swap, "_swap", half_swapped(4)),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("when", INTERRUPTED)
def test_ctrl_c_inside_the_engine_leaves_a_whole_module(when: str, tmp_path: Path) -> None:
    module = Module(Stack())
    trainer = trainer_for(SuperpipelineStrategy(k=1, optimizer_overlap="forward"))
    with INTERRUPTED[when](), pytest.raises(SystemExit):
        trainer.fit(module, loader(vectors(6)))
    assert all(type(p) is nn.Parameter for p in module.parameters())
    state = trainer.optimizers[0].state
    steps = {float(state[p]["step"]) if p in state else 0.0 for p in module.parameters()}
    if len(steps) == 1:
        trainer.save_checkpoint(tmp_path / "whole.ckpt")
    else:
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt")
    assert ("submitted" in when or "handed" in when) == (len(steps) > 1)
    trainer_for(SuperpipelineStrategy(k=1)).fit(module, loader(vectors()))


def test_a_checkpoint_on_exception_that_is_refused_leaves_nothing_behind(tmp_path: Path) -> None:
    """Lightning skips its teardown when a callback fails in ``on_exception``; the first error stays in sight."""
    module = Module(Stack())
    trainer = trainer_for(
        SuperpipelineStrategy(k=1, optimizer_overlap="forward"),
        callbacks=[ModelCheckpoint(tmp_path, save_on_exception=True)],
        enable_checkpointing=True,
    )
    error = KeyError("in the update")
    adam: Any = sys.modules["torch.optim.adam"]  # torch hides its name
    with (
        mock.patch.object(adam, "adam", at(adam.adam, 10, error)),
        pytest.raises(RuntimeError, match=r"not saved: .*in the update.*Go on from the last checkpoint") as raised,
    ):
        trainer.fit(module, loader(vectors()))
    assert raised.value.__context__ is error
    assert engine_of(trainer.strategy) is None
    assert all(type(p) is nn.Parameter for p in module.parameters())
    assert not list(tmp_path.iterdir())


def test_after_an_error_between_two_batches_nothing_is_under_way() -> None:
    """``on_exception`` of callbacks comes before the strategy's."""
    seen: list[set[type]] = []

    class Looks(pl.Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append({type(p) for p in pl_module.parameters()})

    strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
    trainer = trainer_for(strategy, callbacks=[Looks()])
    failing = mock.patch.object(Engine, "prefetch_for", at(Engine.prefetch_for, 4, KeyError("between")))
    with failing, pytest.raises(KeyError, match="between"):
        trainer.fit(Module(Stack()), loader(vectors()))
    assert seen == [{nn.Parameter}]


def test_ctrl_c_as_a_call_between_steps_is_left_takes_its_hooks_off(monkeypatch: pytest.MonkeyPatch) -> None:
    leave = Calls.leave
    struck: list[bool] = []

    def interrupted(self: Calls, *args: Any) -> None:
        if not self.engine.step.running and packs() and not struck:
            struck.append(True)
            raise KeyboardInterrupt
        leave(self, *args)

    monkeypatch.setattr(Calls, "leave", interrupted)
    calls = At(on_train_batch_end=torch.enable_grad()(lambda m: m.net(torch.ones(1, 16))))
    with pytest.raises(SystemExit):
        trainer_for(superpipeline(k=1)).fit(calls, loader(vectors(2)))
    assert struck
    assert not packs()


def test_after_a_transfer_that_fails_only_a_layer_in_use_keeps_its_slot() -> None:
    """The bytes of the others may be half of one layer and half of another."""
    net = three_linears()
    with streamed(net, Device(torch.device("cpu")), k=2, k_prime=2) as engine:
        slots, send = engine.slots, Uploads.send
        (first, second), (slot, other) = engine.layers[:2], slots.all[:2]

        def fails(self: Uploads, layer: Any, target: Tensor, source: Tensor) -> None:
            if layer is second:
                raise OSError("not read")
            send(self, layer, target, source)

        for in_use in (False, True):
            slots.fetch([(first, slot, (first.block.weights, None))])
            if in_use:
                slots.lock(first)
            with mock.patch.object(Uploads, "send", fails), pytest.raises(OSError, match="not read"):
                slots.fetch([(each, at, (each.block.weights, None)) for each, at in ((first, slot), (second, other))])
            assert (first.slot is slot) is in_use
            assert second.slot is None
            if in_use:
                slots.release(first, slot)


def test_a_call_that_cannot_begin_ends_the_step_only_if_it_is_outside_of_one() -> None:
    net, x = three_linears(), torch.ones(1, 4)
    expected = net(x)
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:

        def call_that_fails() -> None:
            failing = mock.patch.object(Residency, "begin_call", side_effect=OSError("not read"))
            with failing, pytest.raises(OSError, match="not read"):
                net(x)

        call_that_fails()
        assert not engine.swap.on_device

        def goes_on() -> Tensor:
            call_that_fails()
            assert engine.step.running
            result: Tensor = net(x)
            return result

        assert torch.equal(step(engine, goes_on), expected)


def test_an_error_that_user_code_catches_ends_no_step_and_any_other_does() -> None:
    net, x = three_linears(), torch.ones(1, 4)
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:

        def catches() -> bool:
            net(x)
            engine.abort()
            return engine.step.running

        assert step(engine, catches)
        for over in (False, True):
            engine.begin("train", training=True, manual=True)
            net(x)
            engine.abort(over=over)
            assert not engine.step.running
            assert not engine.swap.on_device
