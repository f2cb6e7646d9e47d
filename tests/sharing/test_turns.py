"""Turns: one trial at a time, none waits for ever, each finds the process as it left it."""

from __future__ import annotations

import random
import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sp_lightning.sharing.turns import PATIENCE, ProcessState, Turns

PROGRAMS = st.lists(st.lists(st.none() | st.integers(0, 5), max_size=30), min_size=1, max_size=6)


class Machine:
    """Trials that need layers, of which a few are there. It notes the order of what they do."""

    def __init__(self, room: int, most: int | None = None) -> None:
        self.there: list[int] = []
        self.room = room
        self.turns = Turns(self.there.__contains__, most)
        self.inside = 0
        self.done: list[tuple[int, int | None]] = []
        self.brought = 0
        self.longest = 0

    def run(self, trial: int, program: list[int | None]) -> None:
        turn = self.turns.begin()
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

    def all(self, programs: list[list[int | None]]) -> None:
        threads = [
            threading.Thread(target=self.run, args=each, daemon=True) for each in enumerate(programs)
        ]  # a daemon, should it hang
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive(), "a trial waits for ever"


@given(PROGRAMS, st.integers(1, 4), st.none() | st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_all_programs_end_in_their_own_order(programs: list[list[int | None]], room: int, most: int | None) -> None:
    machine = Machine(room, most)
    machine.all(programs)
    for trial, program in enumerate(programs):
        assert [layer for each, layer in machine.done if each == trial] == program
    assert machine.longest <= PATIENCE + len(programs)


def test_a_layer_serves_all_trials_before_the_next_comes() -> None:
    machine, layers = Machine(room=2), list[int | None](range(20))
    first = machine.turns.begin()  # the others come meanwhile
    with ThreadPoolExecutor(4) as pool:
        for trial in range(4):
            pool.submit(machine.run, trial, layers)
        while machine.turns.count < 5:
            pass
        machine.turns.end(first)
    assert machine.brought == 20
    assert {layer for _, layer in machine.done[:4]} == {0}


def test_who_has_waited_long_comes_before_who_finds_its_layers() -> None:
    """Two trials go round layers that are there, as a validation may; a third needs another one."""
    machine = Machine(room=2)
    machine.there[:] = [0, 1]
    begun = machine.turns.begin()
    with ThreadPoolExecutor(3) as pool:
        for trial, program in enumerate([[0, 1] * 200, [1, 0] * 200, [5]]):
            pool.submit(machine.run, trial, list(program))
        while machine.turns.count < 4:
            pass
        machine.turns.end(begun)
    assert machine.done.index((2, 5)) <= PATIENCE + 3


def test_each_finds_the_process_as_it_left_it() -> None:
    before = ProcessState()
    turns = Turns(lambda layer: True, None)

    def run(seed: int) -> list[object]:
        turn = turns.begin()
        found = list[object]()
        try:
            torch.manual_seed(seed)
            np.random.seed(seed)
            random.seed(seed)
            torch.set_default_dtype([torch.float64, torch.float32][seed])
            for _ in range(50):
                found += [torch.rand(()).item(), np.random.rand(), random.random(), torch.get_default_dtype()]
                turns.pass_on(turn)
        finally:
            turns.end(turn)
        return found

    alone = [run(seed) for seed in (0, 1)]
    state = torch.get_rng_state()
    begun = turns.begin()
    with ThreadPoolExecutor(2) as pool:
        futures = [pool.submit(run, seed) for seed in (0, 1)]
        while turns.count < 3:
            pass
        turns.end(begun)
    assert [each.result() for each in futures] == alone
    assert alone[0] != alone[1]
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.get_rng_state(), state)
    before.restore()


def test_trials_that_are_cancelled_end_at_their_next_layer() -> None:
    turns = Turns(lambda layer: True, None)
    turn = turns.begin()
    turns.cancel()
    with pytest.raises(CancelledError, match="interrupted"):
        turns.pass_on(turn, 1)
    turns.pass_on(turn, 2)  # while it ends it needs layers still
    turns.end(turn)
    assert turns.count == 0
