"""Turns: one trial at a time, none waits for ever, each finds the process as it left it."""

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
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.core.torch_compat.private import attention_order, set_attention_order
from sp_lightning.experimental.sharing.turns import PATIENCE, ProcessState, TrialTurn, TrialTurns
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
@settings(max_examples=60, deadline=None)
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


def test_what_a_trial_has_set_before_its_end_is_not_the_next_one_s() -> None:
    machine = Machine(room=1)

    def run(turns: int, dtype: torch.dtype) -> list[torch.dtype]:
        turn, found = machine.begin(), list[torch.dtype]()
        try:
            for _ in range(turns):
                machine.turns.pass_on(turn)
                found.append(torch.get_default_dtype())
            torch.set_default_dtype(dtype)
        finally:
            machine.turns.end(turn)
        return found

    with machine.together(2) as pool:
        pool.submit(run, 3, torch.float64)
        longer = pool.submit(run, 9, torch.float32)
    assert set(longer.result()) == {torch.float32}
    assert torch.get_default_dtype() is torch.float32


def test_each_finds_the_process_as_it_left_it() -> None:
    before = ProcessState()
    machine = Machine(room=1)
    dtypes = (torch.float64, torch.float32)

    def run(seed: int) -> list[object]:
        turn, found = machine.begin(), list[object]()
        try:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            torch.set_default_dtype(dtypes[seed])
            os.environ["PL_GLOBAL_SEED"] = str(seed)
            for _ in range(50):
                found += [torch.rand(()).item(), np.random.rand(), random.random(), torch.get_default_dtype()]
                found.append(os.environ["PL_GLOBAL_SEED"])
                machine.turns.pass_on(turn)
        finally:
            machine.turns.end(turn)
        return found

    alone = [run(seed) for seed in (0, 1)]
    torch.manual_seed(11)
    state = torch.get_rng_state()
    with machine.together(2) as pool:
        futures = [pool.submit(run, seed) for seed in (0, 1)]
    assert [each.result() for each in futures] == alone
    assert all(one != other for one, other in zip(*alone, strict=True))
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    before.restore()


BACKENDS: Any = torch.backends


def another(value: Any) -> Any:
    """A value of the same setting."""
    precisions = ("high", False, "ieee", "tf32", "bf16", "ieee", "ieee", "ieee", "none", "none", "none")
    values = [True, False, 2, 1, "qnnpack", "none", torch.float64, (True, True), (True, False), (False, False)]
    values += [
        precisions,
        [2, 1, 0, 3, 4],
        np.random.MT19937(3),
        torch.backends.cuda.preferred_linalg_library("cusolver"),
    ]
    values += [torch.backends.cuda.preferred_blas_library("cublaslt")]
    alike = (each for each in values if type(each) is type(value) and each != value)
    return (
        "7" if value is None else next(each for each in alike if not isinstance(each, tuple) or len(each) == len(value))
    )


def attribute(owner: Any, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


MATRICES = BACKENDS.cuda.matmul
FUTURE: Any = torch.__future__
OWNERS: dict[str, tuple[Any, str]] = {
    "cudnn": (BACKENDS.cudnn, "enabled benchmark benchmark_limit deterministic allow_tf32"),
    "mkldnn": (BACKENDS.mkldnn, "enabled deterministic allow_tf32"),
    "matmul": (MATRICES, "allow_fp16_accumulation"),
    "reductions": (MATRICES, "allow_fp16_reduced_precision_reduction allow_bf16_reduced_precision_reduction"),
    "opt_einsum": (BACKENDS.opt_einsum, "enabled strategy"),
    "quantized": (BACKENDS.quantized, "engine"),
    "deterministic": (torch.utils.deterministic, "fill_uninitialized_memory"),
}
PUBLIC: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    **{f"{at}.{name}": attribute(owner, name) for at, (owner, names) in OWNERS.items() for name in names.split()},
    **{
        f"{name}_sdp": (getattr(BACKENDS.cuda, f"{name}_sdp_enabled"), getattr(BACKENDS.cuda, f"enable_{name}_sdp"))
        for name in ("flash", "mem_efficient", "math", "cudnn")
    },
    "math_sdp reductions": (
        BACKENDS.cuda.fp16_bf16_reduction_math_sdp_allowed,
        BACKENDS.cuda.allow_fp16_bf16_reduction_math_sdp,
    ),
    "linalg": (BACKENDS.cuda.preferred_linalg_library, BACKENDS.cuda.preferred_linalg_library),
    "blas": (BACKENDS.cuda.preferred_blas_library, BACKENDS.cuda.preferred_blas_library),
    "overwrite": (
        FUTURE.get_overwrite_module_params_on_conversion,
        FUTURE.set_overwrite_module_params_on_conversion,
    ),
    "swap": (FUTURE.get_swap_module_params_on_conversion, FUTURE.set_swap_module_params_on_conversion),
    "fast path": (BACKENDS.mha.get_fastpath_enabled, BACKENDS.mha.set_fastpath_enabled),
    "attention order": (attention_order, set_attention_order),
    "generator": (lambda: np.random.get_bit_generator(), lambda value: np.random.set_bit_generator(value)),  # type: ignore[attr-defined]
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "nan": (torch.is_anomaly_check_nan_enabled, lambda value: torch.set_anomaly_enabled(False, value)),
}
"""How users read and write them, by name, whatever the state goes by."""


@pytest.mark.parametrize("name", PUBLIC)
def test_what_users_set_goes_with_the_turn(name: str) -> None:
    (read, write), state = PUBLIC[name], ProcessState()
    before = read()
    try:
        write(another(before))
    except (AttributeError, AssertionError, RuntimeError):
        assert read() == before
        pytest.skip("torch cannot set it here: opt_einsum is not installed, or the build has no such setting")
    else:
        assert read() != before
    finally:
        state.restore()
        assert read() == before


def test_a_generator_of_numpy_goes_with_what_it_has_drawn() -> None:
    """The generator itself first, then its state: another one's would be set otherwise."""
    before, other = ProcessState(), np.random.MT19937(3)
    try:
        np.random.set_bit_generator(other)  # type: ignore[attr-defined]
        inside, drawn = ProcessState(), np.random.rand()
        before.restore()
        ours = np.random.get_state()[1].copy()  # type: ignore[index, union-attr]
        inside.restore()
        assert np.random.rand() == drawn
        before.restore()
        assert np.array_equal(np.random.get_state()[1], ours)  # type: ignore[arg-type, index]
    finally:
        before.restore()


def test_a_trial_whose_state_cannot_be_read_has_the_turn_still(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(room=1)
    with machine.together(2) as pool:
        turn: TrialTurn | None = None

        def fails() -> None:
            nonlocal turn
            turn = machine.begin()
            monkeypatch.setattr("sp_lightning.experimental.sharing.turns.ProcessState", lambda: 1 / 0)
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


def test_both_ways_to_set_what_float32_products_are_computed_in() -> None:
    """torch refuses to read them by the old one where both were used."""
    products, rest, state, machine = torch.backends.cuda.matmul, torch.backends, ProcessState(), Machine(room=1)

    def run(at: int) -> list[str]:
        turn, found = machine.begin(), list[str]()
        try:
            for _ in range(3):
                if at == 0:
                    products.fp32_precision = "tf32"  # explicitly, and what is above it says the same
                if at < 2:
                    rest.fp32_precision = "tf32"
                if at == 2:
                    torch.set_float32_matmul_precision("medium")
                machine.turns.pass_on(turn)
                rest.fp32_precision = "ieee"
                found += [products.fp32_precision, rest.mkldnn.matmul.fp32_precision]
                machine.turns.pass_on(turn)
        finally:
            machine.turns.end(turn)
        return found

    try:
        alone = [run(at) for at in range(3)]
        with machine.together(3) as pool:
            futures = [pool.submit(run, at) for at in range(3)]
        assert [each.result() for each in futures] == alone
        assert alone == [["tf32", "ieee"] * 3, ["ieee", "ieee"] * 3, ["tf32", "bf16"] * 3]
    finally:
        state.restore()


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
