"""Turns: one trial of a process computes at a time, with the state that the process had at the end of the trial's last turn.

A turn may end before a layer is uploaded, before an uploaded layer is used, and when a step begins. The next turn goes to a trial
that can continue without an upload: among several, to the one that has waited longest. If all trials need an upload, the trial
that has waited longest is next. So one upload serves all trials, as several queries of a database share one scan.

Inside ``torch.autocast`` with its cache, a trial keeps its turn. The process has only one cache of casts, and each thread that
leaves its outermost autocast clears the cache. The trial would then cast a weight a second time. With two casts of a weight, the
parts of the weight's gradient are added in another order.
"""

from __future__ import annotations

import logging
import os
import random
import sys
import threading
import traceback
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np  # Lightning needs torchmetrics, which needs NumPy
import torch

from sp_lightning.core.device.accelerator import generator_states, set_generator_states
from sp_lightning.core.device.device import Device
from sp_lightning.core.torch_compat.patched import Patch
from sp_lightning.core.torch_compat.private import (
    attention_order,
    float32_precisions,
    set_attention_order,
    set_float32_precisions,
)
from sp_lightning.trainer.run_scope import TRAINERS

LONG = 60.0
"""After this many seconds without a change of turns, a warning shows the stack of the trial that has the turn."""
PATIENCE = 64
"""After this many turns of other trials, a waiting trial gets the next turn, even if its layer is not on the device."""

_BESIDE = (
    "A trainer with this strategy is used outside of the trials of a SharedBase while they run, in another thread or around "
    "them. Random state and settings belong to the whole process. Use it in a trial (base.wrap), or before or after them."
)

Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> Access:
    """Returns functions that read and write an attribute."""
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _pairs(owner: Any, read: str, write: str, names: str) -> list[Access]:
    """Returns an owner's functions that read and write settings. ``read`` and ``write`` are formats of their names."""
    return [(getattr(owner, read.format(name)), getattr(owner, write.format(name))) for name in names.split()]


def _environment(name: str) -> Access:
    def write(value: str | None) -> None:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value

    return lambda: os.environ.get(name), write


_anomalies: Access = (
    lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
    lambda value: torch.set_anomaly_enabled(*value),
)


def _reductions(name: str) -> Access:
    """Returns functions that read and write whether matrix products in float16 or bfloat16 may add in that dtype.

    Newer versions of torch have a second setting for sums of parts (split-k).

    Args:
        name: "fp16" or "bf16".
    """
    products = torch.backends.cuda.matmul
    name = f"allow_{name}_reduced_precision_reduction"
    parts = f"{name}_split_k" if hasattr(products, f"{name}_split_k") else name
    return (
        lambda: (getattr(products, name), getattr(products, parts)),
        lambda value: setattr(products, name, value if parts != name else value[0]),
    )


_B = torch.backends
_random: Any = np.random  # its types do not declare all functions that are used
_ATTRIBUTES: tuple[tuple[Any, str], ...] = (
    (_B.cudnn, "enabled benchmark benchmark_limit deterministic"),
    (_B.mkldnn, "enabled deterministic allow_tf32"),
    (_B.cuda.matmul, "allow_fp16_accumulation"),
    (_B.opt_einsum, "enabled strategy"),
    (_B.quantized, "engine"),
    (torch.utils.deterministic, "fill_uninitialized_memory"),
)
_CONVERTED = "overwrite_module_params swap_module_params"
_SETTINGS: tuple[Access, ...] = (
    (_random.get_bit_generator, _random.set_bit_generator),
    (torch.get_default_dtype, torch.set_default_dtype),
    (float32_precisions, set_float32_precisions),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    _anomalies,
    *(_attribute(owner, name) for owner, names in _ATTRIBUTES for name in names.split() if hasattr(owner, name)),
    *map(_reductions, ("fp16", "bf16")),
    (_B.mha.get_fastpath_enabled, _B.mha.set_fastpath_enabled),
    *_pairs(_B.cuda, "{}_sdp_enabled", "enable_{}_sdp", "flash mem_efficient math cudnn"),
    (_B.cuda.fp16_bf16_reduction_math_sdp_allowed, _B.cuda.allow_fp16_bf16_reduction_math_sdp),
    (attention_order, set_attention_order),
    *((library, library) for library in (_B.cuda.preferred_linalg_library, _B.cuda.preferred_blas_library)),
    *_pairs(torch.__future__, "get_{}_on_conversion", "set_{}_on_conversion", _CONVERTED),
    *map(_environment, ("PL_GLOBAL_SEED", "PL_SEED_WORKERS")),  # of Lightning's seed_everything
    _environment("CUBLAS_WORKSPACE_CONFIG"),  # of its Trainer(deterministic=True)
)
"""Functions that read and write the settings of the process. Grad mode, autocast and dispatch modes are settings of threads."""


class ProcessState:
    """A snapshot of the state of the process: random generators, number of threads, and the settings in :data:`_SETTINGS`."""

    def __init__(self) -> None:
        self._torch = generator_states()
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._threads = torch.get_num_threads()
        self._settings = [read() for read, _ in _SETTINGS]

    def restore(self, now: ProcessState | None = None) -> None:
        """Restores the state.

        Args:
            now: the present state. Settings that are equal in it are not written. None to read the state, which takes longer than
                everything else in this method.
        """
        for (_, write), value, found in zip(_SETTINGS, self._settings, (now or ProcessState())._settings, strict=True):
            if found != value:
                write(value)
        torch.set_num_threads(self._threads)  # always, because each thread has its own number as well
        set_generator_states(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


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


class TrialTurn:
    """The turn of one trial.

    Args:
        is_on_device: returns True if a layer is on the device, or its upload is in flight.

    Attributes:
        state: the state of the process at the end of the trial's last turn; before its first turn, the state outside of trials.
        wants: the layer that the trial needs next; None if it waits for no layer.
        waited: the number of turns that other trials have had since the trial's last turn.
        error: an error to raise in the trial's thread, when it next ends a turn; None without an error.
        log: the logger for warnings.
        device: the device of the trial's run; None before the run.
        begun: notified when the trial's turn begins. The trial's thread waits for this condition.
    """

    state: ProcessState
    begun: threading.Condition

    def __init__(self, is_on_device: Callable[[Hashable], bool]) -> None:
        self.wants: Hashable = None
        self.waited = 0
        self.error: Exception | None = None
        self.log = logging.getLogger("lightning.pytorch")
        self.device: Device | None = None
        self._is_on_device = is_on_device

    @property
    def ready(self) -> bool:
        """True if the trial can continue without an upload: its next layer is on the device, or it waits for no layer."""
        return self.wants is None or self._is_on_device(self.wants)

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
        # The state of the process before the first trial. Each trial begins with it. The end of the last trial restores it.
        self._outside: ProcessState
        # The state of the process at the end of the last turn, so that the next turn need not read it again, which is slow. None
        # if it was not read: at the first turn, and after the end of a trial.
        self._left: ProcessState | None
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
                self._outside = ProcessState()
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
        """
        # Read without the lock: a trial that begins at this moment gets a turn at the next call.
        if self._waiting and not _keeps_casts():
            with self._lock:
                turn.wants, turn.waited = wants, 0
                if self._chosen(turn) is not turn:
                    # First, because it may raise an error. The trial then still has the turn.
                    turn.state = ProcessState()
                    if turn.device is not None:
                        turn.device.end_turn()
                    self._waiting.append(turn)
                    self._give(turn.state)
                    self._await(turn)
        turn.fail()

    def end(self, turn: TrialTurn) -> None:
        """Ends a trial, which has the turn. If no trial waits, restores the state of the process from before the first trial."""
        with self._lock:
            self._running = None
            if self._waiting:
                self._give()
            else:
                self._cache_notes.remove()
                self._outside.restore()

    def _chosen(self, *last: TrialTurn) -> TrialTurn:
        """Returns the trial that gets the next turn, among the waiting trials and ``last``, which has waited least.

        The first trial that has waited for :data:`PATIENCE` turns; else the first that is ready; else the first of all.
        """
        waiting = [*self._waiting, *last]
        patient = next((each for each in waiting if each.waited >= PATIENCE), None)
        return patient or next((each for each in waiting if each.ready), waiting[0])

    def _give(self, left: ProcessState | None = None) -> None:
        """Gives the turn to the next trial. ``left``: the present state of the process; None if it was not read."""
        self._running = chosen = self._chosen()
        self._left = left
        self._waiting.remove(chosen)
        self._given += 1
        for each in self._waiting:
            each.waited += 1
        chosen.begun.notify()

    def _await(self, turn: TrialTurn) -> None:
        """Waits for the turn of a trial, and restores its state of the process.

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
                self._say_who_runs(turn.log)
            given = self._given
        self._thread = threading.get_ident()
        turn.state.restore(self._left)
        if turn.device is not None:
            turn.device.begin_turn()
        if interrupt is not None:
            raise interrupt

    def _say_who_runs(self, log: logging.Logger) -> None:
        frame = sys._current_frames().get(self._thread)
        stack = "".join(traceback.format_stack(frame)[-8:]) if frame else ""
        log.warning(
            "Superpipeline: trials of a SharedBase have waited %g s for one that does not come to a layer. If it waits for "
            "another trial (a lock, a queue), both wait for ever: leave that out. It is here:\n%s", LONG, stack,
        )  # fmt: skip


TURNS = TrialTurns()
"""The turns of all trials of this process, of every ``SharedBase``, because random state and settings belong to the process."""
