"""Threads that are not the run's look at its module, at any time: the run goes on as if there were none."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn

from sp_lightning.core.engine.streamer import Streamer
from sp_lightning.core.layers import roles
from sp_lightning.core.layers.swap import ByThread
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.elsewhere import backward_elsewhere
from tests.support.models import vectors
from tests.support.readers import LOOKS, MAY_FAIL, Watched, elsewhere, reading
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

WAYS: dict[str, dict[str, Any]] = {
    "small window": {"k": 1, "k_prime": 1},
    "default": {},
    "forward": {"k": 1, "optimizer_overlap": "forward"},
    "backward": {"k": 1, "optimizer_overlap": "backward"},
    "recompute": {"k": 1, "activations": "recompute"},
    "offload": {"k": 1, "activations": "offload"},
}
_EXCHANGED = "no implementation found for"
"""torch's error where a parameter has lost its class between two lines of torch's own: once in some thousand looks."""


def run(make: Callable[[], Any], way: str | None, callbacks: Any = (), **options: Any) -> Outcome:
    """A short run, under plain Lightning or in one of the ways."""
    chosen = {} if way is None else WAYS[way]
    strategy = "auto" if way is None else superpipeline(**chosen)
    made = fused(make) if options.pop("fuse", "optimizer_overlap" in chosen) else make
    return fit(made, vectors(6), strategy, vectors(2), callbacks=list(callbacks), recorded="losses", **options)


# ---------------------------------------------------------------------- at random times


def read_at_random(way: str, seeds: range, *, simulates: bool, threaded: bool) -> dict[str, int]:
    """Fits with a reader at random times, all of which have to be what plain Lightning's fit is. Returns what was looked at."""
    plain = run(Watched, None, fuse="optimizer_overlap" in WAYS[way])
    looked = dict.fromkeys(LOOKS, 0)
    for seed in seeds:
        with ExitStack() as around:
            if simulates:
                around.enter_context(simulated())
            if threaded:
                around.enter_context(backward_elsewhere())
            reader = around.enter_context(reading(list(LOOKS), seed))
            assert_same(run(Watched, way, [reader]), plain)
        errors = [(name, error) for name, error in reader.errors if _EXCHANGED not in str(error)]
        assert not [(name, error) for name, error in errors if name not in MAY_FAIL]
        assert all(isinstance(error, (RuntimeError, KeyError)) for _, error in errors)
        looked = {name: looked[name] + reader.looked[name] for name in looked}
    return looked


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("simulates", "threaded"),
    first(
        product([True, False], repeat=2), (True, True), second=[(False, False)],
        why="the same with backward in the step's thread, and on a device that is the host",
    ),
)  # fmt: skip
@pytest.mark.parametrize("way", WAYS)
def test_a_reader_at_random_times_changes_nothing(way: str, simulates: bool, threaded: bool) -> None:
    read_at_random(way, range(2), simulates=simulates, threaded=threaded)


@pytest.mark.hours("a thousand fits")
@pytest.mark.timeout(7200)
def test_a_thousand_fits_with_readers(capsys: pytest.CaptureFixture[str]) -> None:
    each = 1000 // len(WAYS) + 1
    for number, way in enumerate(WAYS):
        begun = time.perf_counter()
        looked = read_at_random(way, range(number * each, (number + 1) * each), simulates=True, threaded=True)
        with capsys.disabled():
            print(f"\n{way}: {each} fits, {time.perf_counter() - begun:.0f} s, {looked}", flush=True)


# ---------------------------------------------------------------------- at certain moments


def only_in_this_thread(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    """A function of the engine is never called in another thread than the present one."""
    function, here = getattr(owner, name), threading.get_ident()

    def call(*args: Any, **options: Any) -> Any:
        assert threading.get_ident() == here, f"{name} was called in another thread"
        return function(*args, **options)

    monkeypatch.setattr(owner, name, call)


@pytest.mark.rest("takes tenths of a second")
def test_a_copy_made_elsewhere_is_an_ordinary_module(monkeypatch: pytest.MonkeyPatch) -> None:
    class Copied(Watched):
        copies: tuple[nn.Module, ...] = ()

        def loss(self, batch: Tensor) -> Tensor:
            def copies() -> tuple[nn.Module, ...]:
                first: Any = self.net.blocks[0].inner  # type: ignore[union-attr, index]
                return copy.deepcopy(self.net), copy.copy(first), pickle.loads(pickle.dumps(first._parameters))

            self.copies = elsewhere(copies)
            return super().loss(batch)

    only_in_this_thread(monkeypatch, roles, "leave_all")  # what a parameter is to the run it is meanwhile
    copies: Any = run(Copied, "small window").module.copies
    whole, shallow, parameters = copies
    for each in whole.modules():
        assert type(each._parameters) is dict
        assert all(type(p) is nn.Parameter for p in each._parameters.values() if p is not None)
    assert all(type(p) is nn.Parameter for p in parameters.values())
    assert isinstance(shallow, nn.Linear)


@pytest.mark.rest("takes tenths of a second")
def test_modules_have_ordinary_dictionaries_again() -> None:
    class Notes(Watched):
        found: tuple[type, ...] = ()

        def loss(self, batch: Tensor) -> Tensor:
            self.found = tuple(type(each._parameters) for each in self.modules())
            return super().loss(batch)

    module = run(Notes, "small window").module
    assert ByThread in module.found
    assert all(type(each._parameters) is dict for each in module.modules())


# ---------------------------------------------------------------------- calls


class Calls(Callback):
    """Another thread calls the module between two steps."""

    def __init__(self) -> None:
        self.found: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found.append(elsewhere(lambda: pl_module.net(vectors(1)[0])))


@pytest.mark.rest("takes tenths of a second")
def test_a_call_between_two_steps_is_refused_in_its_thread() -> None:
    calls = Calls()
    assert_same(run(Watched, "small window", [calls]), run(Watched, None, [Calls()]))
    assert all("was called in another thread" in str(each) for each in calls.found)


# ---------------------------------------------------------------------- updates that are under way


class Held:
    """Updates in the background wait until they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.go = threading.Event()
        submit, held = BackgroundUpdates.submit, self

        def later(self: BackgroundUpdates, layer: Any, work: Callable[[], None], *then: Any) -> None:
            def waits() -> None:
                assert held.go.wait(20)
                work()

            submit(self, layer, waits, *then)

        monkeypatch.setattr(BackgroundUpdates, "submit", later)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("what", ["weights", "optimizer", "copy of the optimizer"])
def test_another_thread_waits_for_an_update_and_leaves_what_follows_to_the_run(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(monkeypatch)
    found: list[Any] = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx or held.go.is_set():
                return
            looks: dict[str, Callable[[], Any]] = {
                "weights": lambda: [p.detach().clone() for p in pl_module.parameters()],
                "optimizer": trainer.optimizers[0].state_dict,
                "copy of the optimizer": lambda: copy.deepcopy(trainer.optimizers[0]),
            }
            before = type(trainer.optimizers[0])
            thread = threading.Thread(target=lambda: found.append(looks[what]()), daemon=True)
            thread.start()
            thread.join(0.1)
            assert thread.is_alive()
            held.go.set()
            thread.join(20)
            assert type(trainer.optimizers[0]) is before  # the run itself has not waited yet

    plain = run(Watched, None, fuse=True)
    ours = run(Watched, "forward", [Looks()])
    assert_same(ours, plain)
    if what == "weights":
        once = fit(fused(Watched), vectors(1), "auto", vectors(2), recorded="losses")
        assert_equal(found[0], [p.detach() for p in once.module.parameters()], "weights")
    if what == "copy of the optimizer":
        assert type(found[0]) is type(ours.trainer.optimizers[0])


# ---------------------------------------------------------------------- several moments of the trainer


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_that_another_thread_saves(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Saves(Callback):
        def __init__(self) -> None:
            self.found: list[Any] = []

        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            path = tmp_path / f"{len(self.found)}.ckpt"
            self.found.append(elsewhere(lambda: trainer.save_checkpoint(path)))

    saves = Saves()
    only_in_this_thread(monkeypatch, Streamer, "reading")
    ours = run(Watched, "small window", [saves])
    assert_same(ours, run(Watched, None))
    assert saves.found == [None] * len(saves.found)
    resumed = trainer_for(superpipeline(k=1))
    resumed.fit(Watched(), vectors_loader(), ckpt_path=tmp_path / "3.ckpt")


@pytest.mark.rest("takes tenths of a second")
def test_no_checkpoint_of_two_steps_is_saved_by_another_thread() -> None:
    """The run goes on, even if the other thread handles an error of its own, as a checkpoint on exception does."""

    class Saves(Watched):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[Any] = []

        def loss(self, batch: Tensor) -> Tensor:
            def save() -> Any:
                try:
                    raise KeyError
                except KeyError:
                    return self.trainer.strategy.lightning_module_state_dict()

            net: Any = self.net
            x = net.stem(batch)
            if x.requires_grad:  # the layers above it are updated by then
                x.register_hook(lambda _: self.found.append(elsewhere(save)))
            for block in net.blocks:
                x = block(x)
            return net.head(x).square().mean()  # type: ignore[no-any-return]

    ours = run(Saves, "backward")
    assert_same(ours, run(Saves, None, fuse=True))
    assert len(ours.module.found) == 6  # type: ignore[arg-type]
    assert all("Save it in a callback" in str(each) for each in ours.module.found)  # type: ignore[union-attr]


def vectors_loader() -> Any:
    return torch.utils.data.DataLoader(vectors(6), batch_size=None)  # type: ignore[arg-type]
