"""Turns: one trial at a time, none waits for ever, each with its own random state; and settings that none may change."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as of_examples
from hypothesis import strategies as st

from sp_lightning.core.torch_compat.private import attention_order
from sp_lightning.experimental.sharing import turns
from sp_lightning.experimental.sharing.turns import PATIENCE, RandomState, TrialTurn, TrialTurns, settings
from tests.support.trials import interruptible

PROGRAMS = st.lists(st.lists(st.none() | st.integers(0, 5), max_size=30), min_size=1, max_size=6)


class Machine:
    """Trials that need layers, of which a few are there. It notes the order of what they do."""

    def __init__(self, room: int) -> None:
        self.there: list[int] = []
        self.room = room
        self.turns = TrialTurns()
        self.inside = 0
        self.done: list[tuple[int, int | None]] = []
        self.brought = 0
        self.longest = 0

    def run(self, trial: int, program: list[int | None]) -> None:
        turn = self.begin()
        try:
            for layer in program:
                self.turns.pass_on(turn, layer)
                self.inside += 1
                assert self.inside == 1
                self.done.append((trial, layer))
                self.longest = max(self.longest, *(each.waited for each in self.turns._waiting), 0)
                if layer is not None and layer not in self.there:
                    self.brought += 1
                    self.there[:] = [*self.there, layer][-self.room :]
                self.inside -= 1
        finally:
            self.turns.end(turn)

    def begin(self) -> TrialTurn:
        turn = TrialTurn(self.there.__contains__)
        self.turns.begin(turn)
        return turn

    @contextmanager
    def together(self, count: int) -> Iterator[ThreadPoolExecutor]:
        """What is submitted inside, so many trials, begins at the end, all together."""
        first = self.begin()
        with ThreadPoolExecutor(count) as pool:
            yield pool
            while len(self.turns._waiting) < count:
                time.sleep(1e-3)
            self.turns.end(first)

    def all(self, programs: list[list[int | None]]) -> None:
        threads = [
            threading.Thread(target=self.run, args=each, daemon=True) for each in enumerate(programs)
        ]  # a daemon, should it hang
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a trial waits for ever"


@pytest.mark.long("takes a second or more")
@given(PROGRAMS, st.integers(1, 4))
@of_examples(max_examples=60, deadline=None)
def test_all_programs_end_in_their_own_order(programs: list[list[int | None]], room: int) -> None:
    machine = Machine(room)
    machine.all(programs)
    for trial, program in enumerate(programs):
        assert [layer for each, layer in machine.done if each == trial] == program
    assert machine.longest <= PATIENCE + len(programs)


def test_a_layer_serves_all_trials_before_the_next_comes() -> None:
    machine, layers = Machine(room=2), list[int | None](range(20))
    with machine.together(4) as pool:
        for trial in range(4):
            pool.submit(machine.run, trial, layers)
    assert machine.brought == 20
    assert {layer for _, layer in machine.done[:4]} == {0}


@pytest.mark.rest("takes tenths of a second")
def test_who_has_waited_long_comes_before_who_finds_its_layers() -> None:
    """Two trials go round layers that are there, as a validation may; a third needs another one."""
    machine = Machine(room=3)
    machine.there[:] = [0, 1]
    with machine.together(3) as pool:
        for trial, program in enumerate([[0, 1] * 200, [1, 0] * 200, [5, 6]]):
            pool.submit(machine.run, trial, list(program))
    first, second = machine.done.index((2, 5)), machine.done.index((2, 6))
    assert first <= PATIENCE + 3
    assert PATIENCE / 2 < second - first <= PATIENCE + 3, "once it had its turn, it waits anew"


def test_each_has_its_own_random_state_and_default_dtype() -> None:
    """Lightning's ``bf16-true`` sets the default dtype within its steps. A trial's last values are not the next one's first."""
    machine, dtypes = Machine(room=1), (torch.float64, torch.float32)

    def run(seed: int) -> list[object]:
        turn, found = machine.begin(), list[object]([torch.get_default_dtype()])
        try:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            torch.set_default_dtype(dtypes[seed])
            os.environ["PL_GLOBAL_SEED"] = str(seed)
            for _ in range(9 + seed):
                found += [torch.rand(()).item(), np.random.rand(), random.random(), torch.get_default_dtype()]
                found.append(os.environ["PL_GLOBAL_SEED"])
                machine.turns.pass_on(turn)
        finally:
            machine.turns.end(turn)
        return found

    before = RandomState()
    alone = [run(seed) for seed in (0, 1)]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with machine.together(2) as pool:
        futures = [pool.submit(run, seed) for seed in (0, 1)]
    assert [each.result() for each in futures] == alone
    assert alone[0][0] is alone[1][0] is torch.get_default_dtype() is torch.float32
    assert all(one != other for one, other in zip(alone[0][1:], alone[1][1:], strict=False))
    assert torch.equal(torch.get_rng_state(), state)
    before.restore()


def test_all_settings_are_read() -> None:
    """A name that this version of torch lacks is left out: of the newest one, none is."""
    names = {f"torch.{place}{name}" for place, names in turns._SETTINGS.items() for name in names.split()}
    missing = names - settings().keys()
    assert not missing or torch.__version__ < "2.14"


B: Any = torch.backends
CHANGES: dict[str, tuple[str, str]] = {
    "torch.backends.cudnn.deterministic": ("B.cudnn.deterministic = True", "B.cudnn.deterministic = False"),
    "torch.get_num_threads": ("torch.set_num_threads(threads + 1)", "torch.set_num_threads(threads)"),
    "torch.backends.cudnn.conv.fp32_precision": ("B.cudnn.allow_tf32 = False", "B.cudnn.allow_tf32 = True"),
    "torch.backends.cuda.matmul.fp32_precision": (
        "B.cuda.matmul.fp32_precision = 'tf32'",
        "B.cuda.matmul.fp32_precision = 'none'",
    ),
    "torch.backends.cuda.math_sdp_enabled": ("B.cuda.enable_math_sdp(False)", "B.cuda.enable_math_sdp(True)"),
    "NumPy's generator": ("random.set_bit_generator(np.random.PCG64(3))", "random.set_bit_generator(generator)"),
    "attention kernels": ("set_order(order[::-1])", "set_order(order)"),
}
"""How users change and restore them."""


@pytest.mark.parametrize("name", CHANGES)
def test_a_setting_that_a_trial_changes_is_an_error(name: str) -> None:
    known = {
        "B": B, "torch": torch, "np": np, "random": np.random, "threads": torch.get_num_threads(),
        "generator": np.random.get_bit_generator(), "order": attention_order(),  # type: ignore[attr-defined]
        "set_order": torch._C._set_sdp_priority_order,
    }  # fmt: skip
    machine, (change, restore) = Machine(room=1), CHANGES[name]
    turn = machine.begin()
    try:
        machine.turns.check(turn)
        exec(change, known)
        with pytest.raises(
            RuntimeError, match=f"A trial of a SharedBase has changed a setting of the process: {name} is"
        ):
            machine.turns.check(turn)
    finally:
        exec(restore, known)
        machine.turns.end(turn)


def test_all_trials_under_way_raise_the_error_of_a_setting_and_later_ones_do_not() -> None:
    """They may have computed with it."""
    machine = Machine(room=1)

    def changes(turn: TrialTurn) -> None:
        torch.backends.cudnn.benchmark = True
        machine.turns.pass_on(turn)

    def run(work: Callable[[TrialTurn], Any]) -> str:
        turn = machine.begin()
        try:
            for _ in range(3):
                work(turn)
                machine.turns.pass_on(turn)
            machine.turns.check(turn)
        except RuntimeError as error:
            return str(error)
        finally:
            machine.turns.end(turn)
        return "it ends"

    try:
        with machine.together(2) as pool:
            ends = pool.map(run, (changes, lambda turn: None))
        found = list(ends)
        assert found == 2 * [found[0]]
        assert "torch.backends.cudnn.benchmark is True; it was False when the trials began" in found[0]
        assert run(lambda turn: None) == "it ends"
    finally:
        torch.backends.cudnn.benchmark = False


def test_a_trial_whose_state_cannot_be_read_has_the_turn_still(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(room=1)
    with machine.together(2) as pool:
        turn: TrialTurn | None = None

        def fails() -> None:
            nonlocal turn
            turn = machine.begin()
            monkeypatch.setattr("sp_lightning.experimental.sharing.turns.RandomState", lambda: 1 / 0)
            try:
                with pytest.raises(ZeroDivisionError):
                    machine.turns.pass_on(turn)
                assert turn not in machine.turns._waiting
                assert machine.turns._running is turn
            finally:
                monkeypatch.undo()
                machine.turns.end(turn)

        futures = [pool.submit(fails), pool.submit(machine.run, 1, [1, 2])]
    for each in futures:
        each.result()


def _outer(cache: bool) -> Any:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


@contextmanager
def _after_an_inner_one(cache: bool) -> Iterator[None]:
    with _outer(False):
        with _outer(cache):
            pass
        yield


@contextmanager
def _switched_off_inside() -> Iterator[None]:
    with _outer(True), torch.autocast("cpu", enabled=False):
        yield


@pytest.mark.parametrize(
    ("inside", "keeps"),
    [
        (lambda: _outer(True), True),
        (lambda: _outer(False), False),
        (lambda: _after_an_inner_one(True), True),
        (lambda: _after_an_inner_one(False), False),
        (_switched_off_inside, True),
    ],
    ids=["cached", "not cached", "cached before", "not cached before", "off"],
)
def test_a_trial_keeps_its_turn_where_autocast_keeps_casts(inside: Callable[[], Any], keeps: bool) -> None:
    """The cache is the process's, and whoever leaves the outermost autocast of a thread clears it."""
    machine, set_enabled = Machine(room=1), torch.set_autocast_cache_enabled
    turn = machine.begin()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(machine.run, 1, [None] * 3)
        while not machine.turns._waiting:
            time.sleep(1e-3)
        try:
            with _outer(True):
                pass
            given = machine.turns._given
            with inside():
                machine.turns.pass_on(turn)
                assert (machine.turns._given > given) is not keeps
            given = machine.turns._given
            machine.turns.pass_on(turn)
            assert machine.turns._given > given, "outside of it turns change"
        finally:  # otherwise the other trial waits for ever
            machine.turns.end(turn)
    assert torch.set_autocast_cache_enabled is set_enabled


def test_a_trial_that_begins_within_autocast_keeps_its_turn() -> None:
    machine = Machine(room=1)
    with _outer(True):
        turn = machine.begin()
        with ThreadPoolExecutor(1) as pool:
            pool.submit(machine.run, 1, [None])
            while not machine.turns._waiting:
                time.sleep(1e-3)
            given = machine.turns._given
            machine.turns.pass_on(turn)
            kept = machine.turns._given == given
            machine.turns.end(turn)
    assert kept
    assert machine.done


def test_trials_that_are_cancelled_end_at_their_next_layer() -> None:
    machine = Machine(room=1)
    turn = machine.begin()
    turn.error = CancelledError("interrupted")
    with pytest.raises(CancelledError, match="interrupted"):
        machine.turns.pass_on(turn, 1)
    machine.turns.pass_on(turn, 2)  # while it ends it needs layers still
    machine.turns.end(turn)
    assert machine.turns._running is None


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("begun", [False, True], ids=["while it begins", "while it waits"])
def test_a_trial_of_the_main_thread_is_interrupted_in_its_turn(begun: bool) -> None:
    """Ctrl-C comes while another trial computes. Nobody waits for ever, and no two compute at once."""
    machine, go_on = Machine(room=1), threading.Event()
    ours = machine.begin() if begun else TrialTurn(machine.there.__contains__)
    order = list[str]()

    def other() -> None:
        turn = machine.begin()
        order.append("the other computes")
        while ours not in machine.turns._waiting:
            time.sleep(1e-3)
        with machine.turns._lock:  # which is free once ours waits
            interrupt()
        go_on.wait(10)
        order.append("the other ends")
        machine.turns.end(turn)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    while begun and not machine.turns._waiting:
        time.sleep(1e-3)
    while not begun and machine.turns._running is None:
        time.sleep(1e-3)
    threading.Timer(0.3, go_on.set).start()
    with interruptible() as interrupt, pytest.raises(KeyboardInterrupt):
        machine.turns.pass_on(ours, 1) if begun else machine.turns.begin(ours)
    order.append("ours is told")
    if begun:
        machine.turns.end(ours)
    thread.join(10)
    assert order == ["the other computes", "the other ends", "ours is told"]
    machine.all([[1, 2], [2, 1]])


@pytest.mark.rest("takes tenths of a second")
def test_a_log_says_who_does_not_come_to_a_layer(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("sp_lightning.experimental.sharing.turns.LONG", 0.05)
    machine = Machine(room=1)
    turn = machine.begin()

    def waits_for_another() -> None:
        time.sleep(0.3)

    with ThreadPoolExecutor(1) as pool, caplog.at_level("WARNING", "lightning.pytorch"):
        pool.submit(machine.run, 1, [1])
        waits_for_another()
        machine.turns.end(turn)
    assert "does not come to a layer" in caplog.text
    assert "waits_for_another()" in caplog.text
