"""Turns: one trial of a process computes at a time, with the state of the process that it had at the end of its last turn.

A turn may end before a layer is uploaded. The next turn goes to a trial whose next layer is on the device already; if there is
none, to the trial that has waited longest. So one upload serves all trials, as several queries of a database share one scan.

Inside ``torch.autocast`` with its cache a trial keeps its turn. The process has one cache of casts, and any thread that leaves
its own outermost autocast clears it. The trial would then cast a weight a second time, and the gradient of a weight with two
casts is added up in another order.
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

from sp_lightning.device.accelerator import generator_states, set_generator_states
from sp_lightning.device.device import Device
from sp_lightning.torch_compat.patched import Patch
from sp_lightning.torch_compat.private import (
    attention_order,
    float32_precisions,
    set_attention_order,
    set_float32_precisions,
)
from sp_lightning.trainer.run_scope import TRAINERS

LONG = 60.0
"""Seconds without a change of turns after which the log shows the stack of the trial that has the turn."""
PATIENCE = 64
"""Turns of others after which a waiting trial is next, whatever layer it needs."""

_BESIDE = (
    "A trainer with this strategy is used outside of the trials of a SharedBase while they run, in another thread or around "
    "them. Random state and settings belong to the whole process. Use it in a trial (base.wrap), or before or after them."
)

Access = tuple[Callable[[], Any], Callable[[Any], Any]]


def _attribute(owner: Any, name: str) -> Access:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _pairs(owner: Any, read: str, write: str, names: str) -> list[Access]:
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
    """The settings that let products in few bits be reduced in as few bits, and in parts."""
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
"""Functions that read and write the settings that a process has once. Grad mode, autocast and dispatch modes are per thread."""


class ProcessState:
    """A snapshot of the state that torch, NumPy, Python and Lightning keep once for a process."""

    def __init__(self) -> None:
        self._torch = generator_states()
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._threads = torch.get_num_threads()
        self._settings = [read() for read, _ in _SETTINGS]

    def restore(self, now: ProcessState | None = None) -> None:
        """Restores the state.

        Args:
            now: the present state; None to read it, which takes longer than all else.
        """
        for (_, write), value, found in zip(_SETTINGS, self._settings, (now or ProcessState())._settings, strict=True):
            if found != value:
                write(value)
        torch.set_num_threads(self._threads)  # each thread has its own number, too
        set_generator_states(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


_casts = threading.local()
"""``kept``, for each thread: whether autocast's cache was on since the thread entered its outermost autocast."""


def _autocast_depth() -> int:
    """Returns how many contexts of autocast this thread is in."""
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return depth


def _note_cache(set_enabled: Callable[[bool], None], enabled: bool) -> None:
    """Runs in place of ``torch.set_autocast_cache_enabled``, which autocast calls whenever it is entered or left.

    A cast stays in the cache after an inner autocast, although the outer one has its cache off, as that of ``bf16-mixed`` has.
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
        is_on_device: returns True if a layer is on the device.

    Attributes:
        state: the state of the process at the end of its last turn; at first, the state outside of trials.
        wants: the layer that it needs next; None if it waits for no layer.
        waited: how many turns others have had since its last one.
        error: raised at the end of its next turn; None for none.
        log: the logger for warnings.
        device: that of its run; None before the run.
        begun: notified when its turn begins. Its thread waits for this.
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
        """True if the trial can continue: the layer that it needs is on the device, or it needs none."""
        return self.wants is None or self._is_on_device(self.wants)

    def fail(self) -> None:
        """Raises :attr:`error` once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class TrialTurns:
    """The trials of this process that are under way, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[TrialTurn] = []  # the trial that has waited longest is first
        self._running: TrialTurn | None = None  # None if there is no trial
        self._thread = 0  # the identifier of its thread
        self._given = 0  # how often a turn has begun
        # The state of the process before the first trial. Each trial begins with it. The end of the last trial restores it.
        self._outside: ProcessState
        # The state of the process at the end of the last turn, so that the next turn need not read it again, which is slow. None
        # if it was not read: at the first turn, and after the end of a trial.
        self._left: ProcessState | None
        # While there are trials: notes for each thread whether autocast may have cached casts in it.
        self._cache_notes = Patch(torch, "set_autocast_cache_enabled", _note_cache)

    def refuse_beside(self, trainer: Any) -> None:
        """Notes a trainer outside of trials. Raises a RuntimeError if trials are under way.

        While it runs, :meth:`begin` raises one.
        """
        with self._lock:
            if self._running is not None:
                raise RuntimeError(_BESIDE)
            TRAINERS.add(trainer)

    def begin(self, turn: TrialTurn) -> None:
        """Begins a trial. Returns when its turn begins.

        Raises:
            Exception: the turn's :attr:`~TrialTurn.error`.
            RuntimeError: a run outside of trials is under way.
        """
        turn.begun = threading.Condition(self._lock)
        with self._lock:
            if self._running is None:
                if any(each.state.status == "running" for each in TRAINERS):
                    raise RuntimeError(_BESIDE)
                self._outside = ProcessState()
                self._cache_notes.install()
            turn.state = self._outside
            _casts.kept = _autocast_depth() > 0  # the cache may have been on before
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
        """Ends a turn because the trial needs a layer or begins a step. Returns when its next turn begins.

        If autocast has cached casts for the trial, it returns immediately.

        Raises:
            Exception: the turn's :attr:`~TrialTurn.error`, once.
        """
        if self._waiting and not _keeps_casts():  # a trial that begins at this moment has a turn at the next layer
            with self._lock:
                turn.wants, turn.waited = wants, 0
                if self._chosen(turn) is not turn:
                    # If this fails, the trial still has the turn, and does not wait.
                    turn.state = ProcessState()
                    if turn.device is not None:
                        turn.device.end_turn()
                    self._waiting.append(turn)
                    self._give(turn.state)
                    self._await(turn)
        turn.fail()

    def end(self, turn: TrialTurn) -> None:
        """Ends a trial, in its turn. After the last trial the process has the state from before the first."""
        with self._lock:
            self._running = None
            if self._waiting:
                self._give()
            else:
                self._cache_notes.remove()
                self._outside.restore()

    def _chosen(self, *last: TrialTurn) -> TrialTurn:
        waiting = [*self._waiting, *last]
        patient = next((each for each in waiting if each.waited >= PATIENCE), None)
        return patient or next((each for each in waiting if each.ready), waiting[0])

    def _give(self, left: ProcessState | None = None) -> None:
        self._running = chosen = self._chosen()
        self._left = left
        self._waiting.remove(chosen)
        self._given += 1
        for each in self._waiting:
            each.waited += 1
        chosen.begun.notify()

    def _await(self, turn: TrialTurn) -> None:
        interrupt, given = None, self._given
        while self._running is not turn:
            try:
                in_time = turn.begun.wait(LONG)
            except (
                BaseException
            ) as error:  # Ctrl-C in the main thread: the trial ends in its turn, because others compute now
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
"""The turns of this process: random state and settings belong to the process."""
