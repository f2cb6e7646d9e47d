"""Turns: of the trials of one process one computes at a time, with the process's state as it left it.

A turn may end where a layer is about to come to the device. The next one goes to a trial whose next layer is there already; if
there is none, to the trial that has waited longest. So a layer that has come serves all trials before the next one comes, as
databases have several queries share one scan.

Inside ``torch.autocast`` with its cache a trial keeps its turn. The cache of casts is the process's, and any thread that leaves
its own outermost autocast clears it. The trial would cast a weight a second time then, and the gradient of a weight with two
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
"""Seconds without another turn after which a log says what the trial does whose turn it is."""
PATIENCE = 64
"""After so many turns of others a trial that waits comes next, whatever layer it needs."""

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
    """Of products in few bits: whether they may be reduced in as few, and in parts."""
    products = torch.backends.cuda.matmul
    name = f"allow_{name}_reduced_precision_reduction"
    parts = f"{name}_split_k" if hasattr(products, f"{name}_split_k") else name
    return (
        lambda: (getattr(products, name), getattr(products, parts)),
        lambda value: setattr(products, name, value if parts != name else value[0]),
    )


_B = torch.backends
_random: Any = np.random  # which does not say that it has all of these
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
"""What a process has once, and how it is read and written. Grad mode, autocast and modes of dispatch are each thread's own."""


class ProcessState:
    """What torch, NumPy, Python and Lightning keep once for a process, as it is now."""

    def __init__(self) -> None:
        self._torch = generator_states()
        self._numpy, self._python = np.random.get_state(), random.getstate()
        self._threads = torch.get_num_threads()
        self._settings = [read() for read, _ in _SETTINGS]

    def restore(self, now: ProcessState | None = None) -> None:
        """Makes it the process's again.

        Args:
            now: what the process has; None if that is to be read, which takes longer than all else.
        """
        for (_, write), value, found in zip(_SETTINGS, self._settings, (now or ProcessState())._settings, strict=True):
            if found != value:
                write(value)
        torch.set_num_threads(self._threads)  # a thread has a number of its own, too, which others do not see
        set_generator_states(self._torch)
        np.random.set_state(self._numpy)
        random.setstate(self._python)


_casts = threading.local()
"""Of each thread: whether autocast's cache was on since the thread entered its outermost autocast (``kept``)."""


def _autocast_depth() -> int:
    """How many contexts of autocast this thread is in."""
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
    """Whether autocast may have kept casts of this thread's weights, which it is to find again."""
    return getattr(_casts, "kept", False) and _autocast_depth() > 0


class TrialTurn:
    """A trial, as turns see it.

    Args:
        there: says whether a layer that it wants is on the device.

    Attributes:
        state: the process's, as this trial has left it: at first, as it is outside of trials.
        wants: the layer that it needs next; None if it waits for no layer.
        waited: how many turns others have had since its own.
        error: that its next turn ends with; None for none.
        log: for what its user should know.
        device: that of its run; None before.
        comes: tells its thread alone that its turn has come.
    """

    state: ProcessState
    comes: threading.Condition

    def __init__(self, there: Callable[[Hashable], bool]) -> None:
        self.wants: Hashable = None
        self.waited = 0
        self.error: Exception | None = None
        self.log = logging.getLogger("lightning.pytorch")
        self.device: Device | None = None
        self._there = there

    @property
    def ready(self) -> bool:
        """Whether what it wants is there."""
        return self.wants is None or self._there(self.wants)

    def fail(self) -> None:
        """Raises the error that the turn is to end with, once."""
        error, self.error = self.error, None
        if error is not None:
            raise error


class TrialTurns:
    """The trials of this process that are under way, each in a thread of its own."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._waiting: list[TrialTurn] = []  # the one that came first is first
        self._running: TrialTurn | None = None  # None where there is no trial
        self._thread = 0  # of the one that runs
        self._given = 0  # how often a turn has begun
        self._outside: ProcessState
        self._left: ProcessState | None  # what the process has where a turn begins, if that is known
        self._cache_notes = Patch(torch, "set_autocast_cache_enabled", _note_cache)

    def refuse_beside(self, trainer: Any) -> None:
        """Refuses a run outside of trials beside them: a RuntimeError. A trial that begins while it runs is refused, too."""
        with self._lock:
            if self._running is not None:
                raise RuntimeError(_BESIDE)
            TRAINERS.add(trainer)

    def begin(self, turn: TrialTurn) -> None:
        """Begins a trial. Returns once it is its turn.

        Raises:
            Exception: the error that the turn is to end with.
            RuntimeError: a run outside of trials is under way.
        """
        turn.comes = threading.Condition(self._lock)
        with self._lock:
            if self._running is None:
                if any(each.state.status == "running" for each in TRAINERS):
                    raise RuntimeError(_BESIDE)
                self._outside = ProcessState()
                self._cache_notes.install()
            turn.state = self._outside
            _casts.kept = _autocast_depth() > 0  # what was entered before is not known
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
        """The trial whose turn it is needs a layer, or begins a step. Returns once it is its turn again.

        Where autocast keeps casts for it, it goes on at once.

        Raises:
            Exception: the error that the turn is to end with. It is raised once.
        """
        if self._waiting and not _keeps_casts():  # who comes in this moment has a turn at the next layer
            with self._lock:
                turn.wants, turn.waited = wants, 0
                if self._chosen(turn) is not turn:
                    # If it cannot be read, this trial has the turn still, and does not wait.
                    turn.state = ProcessState()
                    if turn.device is not None:
                        turn.device.end_turn()
                    self._waiting.append(turn)
                    self._give(turn.state)
                    self._await(turn)
        turn.fail()

    def end(self, turn: TrialTurn) -> None:
        """Ends a trial, in its turn. After the last one the process has the state that it had before the first."""
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
        chosen.comes.notify()

    def _await(self, turn: TrialTurn) -> None:
        interrupt, given = None, self._given
        while self._running is not turn:
            try:
                in_time = turn.comes.wait(LONG)
            except BaseException as error:  # Ctrl-C, in the main thread: it ends in its turn, since others compute now
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
"""Those of this process, because random state and the like are the process's."""
