"""Turns: one trial of a process computes at a time, with its own random state.

A turn may end before a layer is uploaded, before an uploaded layer is used, and when a step begins. The next turn goes to a trial
that can continue without an upload: among several, to the one that has waited longest. If all trials need an upload, the trial
that has waited longest is next. So one upload serves all trials, as several queries of a database share one scan.

Inside ``torch.autocast`` with its cache, a trial keeps its turn. The process has only one cache of casts, and each thread that
leaves its outermost autocast clears the cache. The trial would then cast a weight a second time. With two casts of a weight, the
parts of the weight's gradient are added in another order.
"""

from __future__ import annotations

import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch

from sp_lightning.core.device.accelerator import generator_states, set_generator_states
from sp_lightning.core.device.device import Device
from sp_lightning.core.messages import LOG
from sp_lightning.core.torch_compat.patched import Patch
from sp_lightning.core.torch_compat.private import attention_order, float32_precisions
from sp_lightning.trainer.run_scope import TRAINERS

LONG = 60.0
"""After this many seconds without a change of turns, a warning shows the stack of the trial that has the turn."""
PATIENCE = 64
"""After this many turns of other trials, a waiting trial gets the next turn, even if its layer is not on the device."""

_BESIDE = (
    "A trainer with this strategy is used outside of the trials of a SharedBase while they run, in another thread or around "
    "them. Random state and settings belong to the whole process. Use it in a trial (base.wrap), or before or after them."
)
_CHANGED = (
    "A trial of a SharedBase has changed a setting of the process: {name} is {now!r}; it was {before!r} when the trials began. "
    "Other trials compute with it, too. Set it for all trials, before base.map."
)

_random: Any = np.random  # its types do not declare all functions that are used
_SETTINGS = {
    "": "get_num_threads get_deterministic_debug_mode is_anomaly_enabled is_anomaly_check_nan_enabled",
    "utils.deterministic.": "fill_uninitialized_memory",
    "backends.cudnn.": "enabled benchmark benchmark_limit deterministic",
    "backends.mkldnn.": "enabled deterministic",
    "backends.cuda.matmul.allow_": "fp16_accumulation fp16_reduced_precision_reduction bf16_reduced_precision_reduction "
    "fp16_reduced_precision_reduction_split_k bf16_reduced_precision_reduction_split_k",
    "backends.cuda.": "flash_sdp_enabled mem_efficient_sdp_enabled math_sdp_enabled cudnn_sdp_enabled "
    "fp16_bf16_reduction_math_sdp_allowed preferred_linalg_library preferred_blas_library",
    "backends.": "opt_einsum.enabled opt_einsum.strategy quantized.engine mha.get_fastpath_enabled",
    "__future__.": "get_overwrite_module_params_on_conversion get_swap_module_params_on_conversion",
}
"""Settings of the process, by the beginning of their names. Grad mode, autocast and dispatch modes are settings of threads."""


def settings() -> dict[str, Any]:
    """Returns the present settings of the process that trials may not change."""
    found: dict[str, Any] = {
        **float32_precisions(),
        "attention kernels": attention_order(),
        "NumPy's generator": type(_random.get_bit_generator()),
    }
    for name in (place + name for place, names in _SETTINGS.items() for name in names.split()):
        with suppress(AttributeError):  # older versions of torch
            value = attrgetter(name)(torch)
            found[f"torch.{name}"] = value() if callable(value) else value
    return found


class RandomState:
    """A snapshot of the random generators, and of the default dtype, which ``precision="bf16-true"`` sets within its steps."""

    def __init__(self) -> None:
        self._torch, self._numpy, self._python = generator_states(), np.random.get_state(), random.getstate()
        self._dtype = torch.get_default_dtype()
        # `seed_everything` sets the first one. From it, workers of data loaders get their seeds.
        self._seeds = {name: os.environ.get(name) for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")}

    def restore(self) -> None:
        """Restores the state."""
        set_generator_states(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)
        torch.set_default_dtype(self._dtype)
        for name, value in self._seeds.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_casts = threading.local()
"""The attribute ``kept`` of each thread: True if autocast's cache was on since the thread entered its outermost autocast."""


def _autocast_depth() -> int:
    """Returns the number of nested autocast contexts of this thread."""
    # torch has no function that only reads the number.
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _note_cache(set_enabled: Callable[[bool], None], enabled: bool) -> None:
    """Runs in place of ``torch.set_autocast_cache_enabled``, which autocast calls whenever it is entered or left.

    Records in ``_casts`` whether the cache may have casts. A cast stays in the cache until the outermost autocast ends, even if
    only an inner autocast had its cache on (the autocast of ``bf16-mixed`` has its cache off).

    Args:
        set_enabled: torch's function.
        enabled: its argument.
    """
    set_enabled(enabled)
    depth = _autocast_depth()
    if enabled or not depth:
        _casts.kept = depth > 0


def _keeps_casts() -> bool:
    """Returns True if autocast may have cached casts of weights in this thread."""
    return getattr(_casts, "kept", False) and _autocast_depth() > 0


@dataclass(eq=False)
class TrialTurn:
    """The turn of one trial.

    Args:
        is_on_device: returns True if a layer is on the device, or its upload is in flight.
        check: called when a turn ends. It raises an error if the trial has done what would change other trials.

    Attributes:
        state: the random state at the end of the trial's last turn; before its first turn, the state outside of trials.
        wants: the layer that the trial needs next; None if it waits for no layer.
        waited: the number of turns that other trials have had since the trial's last turn.
        error: an error to raise in the trial's thread, when it next ends a turn; None without an error.
        device: the device of the trial's run; None before the run.
        begun: notified when the trial's turn begins. The trial's thread waits for this condition.
    """

    is_on_device: Callable[[Hashable], bool]
    check: Callable[[], None] = lambda: None
    wants: Hashable = None
    waited: int = 0
    error: Exception | None = None
    device: Device | None = None
    state: RandomState = field(init=False)
    begun: threading.Condition = field(init=False)

    def fail(self) -> None:
        """If :attr:`error` is set, raises it, and sets it to None."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class TrialTurns:
    """Gives turns to the trials of this process that are under way, each in its own thread."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[TrialTurn] = []  # the trial that has waited longest is first
        self._running: TrialTurn | None = None  # the trial that has the turn; None if there is no trial
        self._thread = 0  # the identifier of the thread that has the turn
        self._given = 0  # how many turns have begun
        # The random state and the settings of the process before the first trial. Each trial begins with the state, and the end
        # of the last trial restores it.
        self._outside: RandomState
        self._settings: dict[str, Any]
        self._changed = ""  # the error for all trials that are under way, after a trial has changed a setting
        # Installed while there are trials. It records for each thread whether autocast may have cached casts.
        self._cache_notes = Patch(torch, "set_autocast_cache_enabled", _note_cache)

    def refuse_beside(self, trainer: Any) -> None:
        """Records a trainer outside of trials. While the trainer runs, :meth:`begin` raises an error.

        Raises:
            RuntimeError: trials are under way.
        """
        with self._lock:
            if self._running is not None:
                raise RuntimeError(_BESIDE)
            TRAINERS.add(trainer)

    def begin(self, turn: TrialTurn) -> None:
        """Begins a trial. Returns when its turn begins.

        Raises:
            Exception: the turn's :attr:`~TrialTurn.error`.
            RuntimeError: a trainer outside of trials is running.
            BaseException: an interrupt during the wait.
        """
        turn.begun = threading.Condition(self._lock)
        with self._lock:
            if self._running is None:
                if any(each.state.status == "running" for each in TRAINERS):
                    raise RuntimeError(_BESIDE)
                self._outside, self._settings, self._changed = RandomState(), settings(), ""
                self._cache_notes.install()
            turn.state = self._outside
            # If the thread is in autocast already, its cache may have been on before `_note_cache` was installed.
            _casts.kept = _autocast_depth() > 0
            self._waiting.append(turn)
            try:
                if self._running is None:
                    self._give()
                self._await(turn)
                turn.fail()
            except BaseException:
                self.end(turn)
                raise

    def pass_on(self, turn: TrialTurn, wants: Hashable = None) -> None:
        """Called when a turn may end: before a layer is uploaded or used, and when a step begins.

        If another trial is to have the next turn, ends this turn, and returns when the next turn of this trial begins. If
        autocast may have cached casts for this trial, its turn does not end.

        Args:
            turn: the turn, of the calling thread.
            wants: the layer that the trial needs next; None if it needs no layer.

        Raises:
            Exception: the turn's :attr:`~TrialTurn.error`, once.
            RuntimeError: see :meth:`check`.
        """
        # Read without the lock: a trial that begins at this moment gets a turn at the next call.
        if self._waiting and not _keeps_casts():
            with self._lock:
                turn.wants, turn.waited = wants, 0
                if self._chosen(turn) is not turn:
                    # First, because both may raise an error. The trial then still has the turn.
                    self.check(turn)
                    turn.state = RandomState()
                    if turn.device is not None:
                        turn.device.end_turn()
                    self._waiting.append(turn)
                    self._give()
                    self._await(turn)
        turn.fail()

    def check(self, turn: TrialTurn) -> None:
        """Checks that the trial that has the turn has changed nothing that other trials use.

        Raises:
            RuntimeError: a setting of the process has changed, in this turn or in an earlier one; or the error of
                :attr:`TrialTurn.check`.
        """
        turn.check()
        now = settings()
        if not self._changed and now != self._settings:
            name = next(name for name in now if now[name] != self._settings[name])
            self._changed = _CHANGED.format(name=name, now=now[name], before=self._settings[name])
        if self._changed:
            raise RuntimeError(self._changed)

    def end(self, turn: TrialTurn) -> None:
        """Ends a trial, which has the turn. If no trial waits, restores the random state from before the first trial."""
        with self._lock:
            self._running = None
            if self._waiting:
                self._give()
            else:
                self._cache_notes.remove()
                self._outside.restore()

    def _chosen(self, *last: TrialTurn) -> TrialTurn:
        """Returns the trial that gets the next turn, among the waiting trials and ``last``, which has waited least.

        The first trial that has waited for :data:`PATIENCE` turns; else the first that can continue without an upload, because
        its next layer is on the device, or it waits for no layer; else the first of all.
        """
        waiting = [*self._waiting, *last]
        patient = next((each for each in waiting if each.waited >= PATIENCE), None)
        ready = (each for each in waiting if each.wants is None or each.is_on_device(each.wants))
        return patient or next(ready, waiting[0])

    def _give(self) -> None:
        """Gives the turn to the next trial."""
        self._running = chosen = self._chosen()
        self._waiting.remove(chosen)
        self._given += 1
        for each in self._waiting:
            each.waited += 1
        chosen.begun.notify()

    def _await(self, turn: TrialTurn) -> None:
        """Waits for the turn of a trial, and restores its random state.

        Raises:
            BaseException: an interrupt during the wait. It is raised after the turn has begun.
        """
        interrupt, given = None, self._given
        while self._running is not turn:
            try:
                in_time = turn.begun.wait(LONG)
            # Ctrl-C in the main thread: raised when the turn has begun, because another trial computes now.
            except BaseException as error:
                interrupt, in_time = error, True
            if not in_time and given == self._given:
                self._say_who_runs()
            given = self._given
        self._thread = threading.get_ident()
        turn.state.restore()
        if turn.device is not None:
            turn.device.begin_turn()
        if interrupt is not None:
            raise interrupt

    def _say_who_runs(self) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
        LOG.warning(
            "Superpipeline: trials of a SharedBase have waited %g s for one that does not come to a layer. If it waits for "
            "another trial (a lock, a queue), both wait for ever: leave that out. It is here:\n%s", LONG, stack,
        )  # fmt: skip


TURNS = TrialTurns()
"""The turns of all trials of this process, of every ``SharedBase``, because random state and settings belong to the process."""
