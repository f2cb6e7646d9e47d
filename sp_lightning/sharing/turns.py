"""Turns: of the trials of one process one computes at a time, with the process's state as it left it.

A turn may end where a layer is about to come to the device. The next one goes to a trial whose next layer is there already; if
there is none, to the trial that has waited longest. So a layer that has come serves all trials before the next one comes, as
databases have several queries share one scan.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Hashable
from concurrent.futures import CancelledError
from typing import Any

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch

PATIENCE = 64
"""After so many turns of others a trial that waits comes next, whatever layer it needs."""

Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> Access:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _environment(name: str) -> Access:
    def write(value: str | None) -> None:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

    return lambda: os.environ.get(name), write


_SETTINGS: dict[str, Access] = {
    "default dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "precision of float32 products": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "deterministic algorithms": (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    "cudnn.benchmark": _attribute(torch.backends.cudnn, "benchmark"),
    "cudnn.deterministic": _attribute(torch.backends.cudnn, "deterministic"),
    **{name: _environment(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")},  # of Lightning's seed_everything
}
"""What a process has once, and how it is read and written. Grad mode, autocast and modes of dispatch are each thread's own."""


class ProcessState:
    """What torch, NumPy, Python and Lightning keep once for a process, as it is now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._settings = {name: read() for name, (read, _) in _SETTINGS.items()}

    def restore(self) -> None:
        """Makes it the process's again."""
        torch.set_rng_state(self._torch)
        for index, state in enumerate(self._devices):
            torch.cuda.set_rng_state(state, index)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        for name, (read, write) in _SETTINGS.items():
            if read() != self._settings[name]:
                write(self._settings[name])


class Turn:
    """A trial, as turns see it.

    Attributes:
        state: the process's, as this trial has left it.
        wants: the layer that it needs next; None if it waits for no layer.
        waited: how many turns others have had since its own.
        cancelled: whether its next turn is its last.
    """

    def __init__(self, state: ProcessState) -> None:
        self.state = state
        self.wants: Hashable = None
        self.waited = 0
        self.cancelled = False


class Turns:
    """The trials that are under way, each in a thread of its own.

    Args:
        there: says whether a layer is on the device.
        most: how many trials may be under way at once; None for no limit.
    """

    def __init__(self, there: Callable[[Hashable], bool], most: int | None) -> None:
        self._there = there
        self.most = most
        self._first = ProcessState()
        self._changed = threading.Condition()
        self._waiting: list[Turn] = []  # the one that came first is first
        self._running: Turn | None = None
        self._outside: ProcessState

    @property
    def count(self) -> int:
        """How many trials are under way."""
        return len(self._waiting) + (self._running is not None)

    def begin(self) -> Turn:
        """Begins a trial, with the process's state of when this object was made. Returns once it is its turn."""
        turn = Turn(self._first)
        with self._changed:
            self._changed.wait_for(lambda: self.most is None or self.count < self.most)
            if not self.count:
                self._outside = ProcessState()
            self._waiting.append(turn)
            if self._running is None:
                self._give()
            self._await(turn)
        return turn

    def pass_on(self, turn: Turn, wants: Hashable = None) -> None:
        """The trial whose turn it is needs a layer, or has come to the end of a step. Returns once it is its turn again.

        Raises:
            CancelledError: the trials are to end. It is raised once in each.
        """
        if self._waiting:  # who comes in this moment has a turn at the next layer
            with self._changed:
                turn.wants, turn.waited = wants, 0
                self._waiting.append(turn)
                if self._chosen() is turn:
                    self._waiting.remove(turn)
                else:
                    turn.state = ProcessState()
                    self._give()
                    self._await(turn)
        if turn.cancelled:
            turn.cancelled = False
            raise CancelledError("The trials are ended, because the thread that waits for them was interrupted.")

    def end(self, turn: Turn) -> None:
        """Ends a trial. After the last one the process has the state that it had before the first."""
        with self._changed:
            self._running = None
            if self._waiting:
                self._give()
            else:
                self._outside.restore()
            self._changed.notify_all()

    def cancel(self) -> None:
        """Has all trials that are under way end with their next turn."""
        with self._changed:
            for turn in (*self._waiting, *([] if self._running is None else [self._running])):
                turn.cancelled = True

    def _chosen(self) -> Turn:
        patient = next((each for each in self._waiting if each.waited >= PATIENCE), None)
        ready = (each for each in self._waiting if each.wants is None or self._there(each.wants))
        return patient or next(ready, self._waiting[0])

    def _give(self) -> None:
        self._running = chosen = self._chosen()
        self._waiting.remove(chosen)
        for each in self._waiting:
            each.waited += 1
        self._changed.notify_all()

    def _await(self, turn: Turn) -> None:
        self._changed.wait_for(lambda: self._running is turn)
        turn.state.restore()
