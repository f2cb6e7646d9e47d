"""Threads that are not the run's look at its module, at any time: the run goes on as if there were none."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.callbacks import Callback

from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.equality.programs.threads import only_in_this_thread
from tests.support.elsewhere import backward_elsewhere
from tests.support.models import vectors
from tests.support.moments import At
from tests.support.readers import LOOKS, MAY_FAIL, Watched, elsewhere, reading
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, superpipeline, trainer_for
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


# ---------------------------------------------------------------------- checkpoints


@pytest.mark.rest("takes tenths of a second")
def test_a_checkpoint_that_another_thread_saves(tmp_path: Path) -> None:
    def save(m: Any) -> None:
        m.noted.append(elsewhere(lambda: m.trainer.save_checkpoint(tmp_path / f"{len(m.noted)}.ckpt")))

    def make() -> At:
        return At(on_train_batch_start=save)

    with only_in_this_thread(Engine, "reading"):
        ours = run(make, "small window")
    assert_same(ours, run(make, None))
    assert ours.module.noted == [None] * 6
    trainer_for(superpipeline(k=1)).fit(make(), loader(vectors(6)), ckpt_path=tmp_path / "3.ckpt")
