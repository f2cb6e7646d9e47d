"""Runs an optimizer's step in the background with the settings of the thread that called ``optimizer.step()``.

Plain Lightning runs a step in the thread that calls ``optimizer.step()``, while no code of the model runs. The background runs
it in another thread, while the next forward or the rest of backward runs. Five things that a step depends on may then differ:

- *Random states* (torch, NumPy, Python) belong to the process. A step that draws random numbers would take numbers that the model
  draws. So steps that draw never run in the background. Optimizers that are known to step each parameter by itself do not draw;
  a user's class may draw.
- *torch.compile* saves torch's random states before it compiles and restores them afterwards. Numbers that the model has drawn
  meanwhile are drawn again. It also reads settings of the process and sets some. torchao's optimizers compile their step for each
  shape, dtype and setting (:func:`compiles`). So no other code runs while they step: the run waits for each of their updates.
- While *another thread compiles*, ``torch.compiler.is_compiling()`` is true in all threads, and torch's optimizers compute
  differently. So a step waits until no thread compiles, and compilations wait until the step is over (:meth:`StepContext.run`).
- *Default dtype and precision of matrix products* belong to the process. An optimizer makes its state in them. So on the GPU the
  run waits for the update that makes state; on the CPU torch's fused steps name each dtype. A few optimizers read these settings
  in each step (:func:`reads_settings`), so they never step in the background.
- *Context variables* (torch keeps the settings of its compiler there), the default device, autocast, and whether denormal numbers
  are zero belong to a thread. A step gets the settings of the thread that called ``optimizer.step()``. Grad mode is off in both
  threads. The background thread is never in inference mode, and dispatch modes are left to the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from sp_lightning.core.torch_compat.private import (
    COMPILE_LOCK,
    compiles_here,
    default_device_is_set,
    set_compiling,
)
from sp_lightning.core.updates.fused import is_separable

R = TypeVar("R")

_READ_SETTINGS = {"ASGD", "Adafactor", "Muon"}
"""torch's optimizers that read the default dtype in each step (ASGD), or multiply matrices."""


def compiles(optimizer: Any) -> bool:
    """Returns True if an optimizer compiles its step."""
    return is_separable(optimizer)  # all separable optimizers are torchao's


def reads_settings(optimizer: Any) -> bool:
    """Returns True if each step of one of torch's optimizers depends on the process's settings, and not only its first one."""
    return type(optimizer).__name__ in _READ_SETTINGS and type(optimizer).__module__.startswith("torch.optim")


class StepContext:
    """The settings of the thread that calls a step. Made in that thread; :meth:`run` is called in the background thread.

    Args:
        devices: the types of the devices whose autocast settings are kept (``"cpu"``, ``"cuda"``).
    """

    def __init__(self, devices: Collection[str]) -> None:
        self._devices = devices
        self._variables = copy_context()
        self._thread_settings = _thread_settings(devices)

    def run(self, step: Callable[[], R]) -> R:
        """Runs a step as it would run in the thread that made this object."""
        with _while_nothing_compiles(), self._with_thread_settings():
            return self._variables.copy().run(step)

    @contextmanager
    def _with_thread_settings(self) -> Iterator[None]:
        """A context in which this thread has the settings of the thread that made this object."""
        before = _thread_settings(self._devices)
        if before == self._thread_settings:  # nearly always true
            yield
            return
        _set_thread_settings(self._thread_settings)
        try:
            yield
        finally:
            _set_thread_settings(before)


# ---------------------------------------------------------------------- settings of a thread

_SMALLEST = sys.float_info.min
"""The smallest normal number: half of it is denormal."""


def _thread_settings(devices: Collection[str]) -> dict[str, Any]:
    """Returns the settings of this thread on which operators depend."""
    return {
        "denormals are zero": _SMALLEST / 2 == 0.0,  # torch has no function that returns it
        "default device": torch.get_default_device() if default_device_is_set() else None,
        "autocast": [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices],
    }


def _set_thread_settings(settings: dict[str, Any]) -> None:
    torch.set_flush_denormal(settings["denormals are zero"])
    if settings["default device"] is not None or default_device_is_set():
        torch.set_default_device(settings["default device"])
    for device, enabled, dtype in settings["autocast"]:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


# ---------------------------------------------------------------------- torch.compile in other threads

_POLL_SECONDS = 0.01
"""The interval at which a step that waits for a compilation tests whether that compilation waits for steps."""
_compilation_waits = False  # True while the thread that compiles waits for steps


@contextmanager
def _while_nothing_compiles() -> Iterator[None]:
    """A context in which no other thread compiles, except one that waits for steps: waiting for it would be a deadlock."""
    held = COMPILE_LOCK.acquire(timeout=_POLL_SECONDS)
    while not held and not _compilation_waits:
        held = COMPILE_LOCK.acquire(timeout=_POLL_SECONDS)
    try:
        yield
    finally:
        if held:
            COMPILE_LOCK.release()


@contextmanager
def awaiting_steps() -> Iterator[None]:
    """A context in which this thread waits for steps. If the thread compiles, steps run without waiting for its compilation.

    A compilation calls code of the model, which may read a weight whose update is under way.
    """
    global _compilation_waits
    if not compiles_here():
        yield
        return
    before = set_compiling(False)  # torch's optimizers compute differently while it is set
    _compilation_waits = True
    try:
        yield
    finally:
        _compilation_waits = False
        set_compiling(before)
