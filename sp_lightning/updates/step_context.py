"""What an optimizer's step may depend on except its parameters, and which steps may therefore run in the background.

Plain Lightning runs a step in the thread that calls ``optimizer.step()``, while no code of the model runs. The background runs
it in another thread, while the next forward or the rest of backward runs. What belongs to the process or to a thread may differ:

- *Random states* (torch, NumPy, Python) belong to the process. A step that draws would take numbers that the model draws. So
  steps that draw never run in the background. Optimizers that are known to step each parameter by itself do not draw; a user's
  class may.
- *torch.compile* saves torch's random states before it compiles and restores them afterwards. Numbers that the model has drawn
  meanwhile are drawn again. It also reads settings of the process and sets some. torchao's optimizers compile their step for each
  shape, dtype and setting (:func:`compiles`). So nothing else runs while they step: each of their updates is waited for at once.
- While *another thread compiles*, ``torch.compiler.is_compiling()`` is true in all threads, and torch's optimizers compute
  differently. So a step waits until nothing is compiled, and while it runs nothing is (:meth:`StepContext.run`).
- *Default dtype and precision of matrix products* belong to the process. An optimizer makes its state in them. So on the GPU the
  update that makes state is waited for; on the CPU torch's fused steps name each dtype. A few optimizers read them in each step
  (:func:`reads_settings`): changing them while such a step runs in the background is an error.
- *Context variables* (torch keeps the settings of its compiler there), the default device, autocast, and whether denormal numbers
  are zero belong to a thread. A step gets those of the caller of ``optimizer.step()``. Grad mode is off in both places. A thread
  in the background is never in inference mode, and dispatch modes are left to the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from contextvars import copy_context
from typing import Any, TypeVar

import torch

from sp_lightning.torch_compat.private import (
    COMPILE_LOCK,
    compiles_here,
    default_device_is_set,
    product_precisions,
    set_compiling,
)
from sp_lightning.updates.fused import is_separable

R = TypeVar("R")

_READ_SETTINGS = {"ASGD", "Adafactor", "Muon"}
"""torch's optimizers that read the default dtype in each step (ASGD), or multiply matrices."""


def compiles(optimizer: Any) -> bool:
    """Returns True if an optimizer compiles its step: torchao's that are taken apart by layers."""
    return is_separable(optimizer)


def reads_settings(optimizer: Any) -> bool:
    """Returns True if a step of one of torch's optimizers depends on the process's settings after its first step."""
    return type(optimizer).__name__ in _READ_SETTINGS and type(optimizer).__module__.startswith("torch.optim.")


class StepContext:
    """The settings of the thread that calls a step. It is made in that thread, and used in the thread that runs the step.

    Args:
        devices: the types of the devices whose autocast counts.
        settings_of: the optimizer's name if it depends on the process's settings; None if it does not.
    """

    def __init__(self, devices: Collection[str], settings_of: str | None = None) -> None:
        self._devices = devices
        self._variables = copy_context()
        self._own = _own_settings(devices)
        self._name = settings_of
        self._settings = None if settings_of is None else _process_settings()

    def run(self, step: Callable[[], R]) -> R:
        """Runs a step as it would run in the thread that has made this object.

        Raises:
            RuntimeError: the process's settings have changed, and the optimizer depends on them.
        """
        with _while_nothing_compiles(), self._entered():
            self._compare()
            result = self._variables.copy().run(step)
            self._compare()
        return result

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before = _own_settings(self._devices)
        if before == self._own:  # nearly always true
            yield
            return
        _set_own(self._own)
        try:
            yield
        finally:
            _set_own(before)

    def _compare(self) -> None:
        if self._settings is not None and (now := _process_settings()) != self._settings:
            changed = [
                f"{name} {now[name]} (expected {was})" for name, was in self._settings.items() if now[name] != was
            ]
            raise RuntimeError(
                f"{self._name} depends on torch's settings, and they were changed while it ran in the background: got "
                f'{", ".join(changed)}, as in optimizer.step(). Use SuperpipelineStrategy(optimizer_overlap="off").'
            )


# ---------------------------------------------------------------------- what each thread and the process have

_SMALLEST = sys.float_info.min


def _own_settings(devices: Collection[str]) -> dict[str, Any]:
    """Returns the settings of this thread on which operators depend."""
    return {
        "denormals are zero": _SMALLEST / 2 == 0.0,
        "default device": torch.get_default_device() if default_device_is_set() else None,
        "autocast": [(each, torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in devices],
    }


def _set_own(settings: dict[str, Any]) -> None:
    torch.set_flush_denormal(settings["denormals are zero"])
    if settings["default device"] is not None or default_device_is_set():
        torch.set_default_device(settings["default device"])
    for device, enabled, dtype in settings["autocast"]:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)


def _process_settings() -> dict[str, Any]:
    """Returns the settings of the process that :func:`reads_settings` is about."""
    return {"default dtype": torch.get_default_dtype(), "products": product_precisions()}


# ---------------------------------------------------------------------- torch.compile in other threads

_LOOK = 0.01
"""A step that waits for a compilation tests after this many seconds if the compilation waits for the step."""
_awaited = False  # whether the thread that compiles waits for steps


@contextmanager
def _while_nothing_compiles() -> Iterator[None]:
    held = COMPILE_LOCK.acquire(timeout=_LOOK)
    while not held and not _awaited:
        held = COMPILE_LOCK.acquire(timeout=_LOOK)
    try:
        yield
    finally:
        if held:
            COMPILE_LOCK.release()


@contextmanager
def awaiting_steps() -> Iterator[None]:
    """A context for a thread that waits for steps. If the thread compiles, steps do not wait for that compilation inside."""
    global _awaited
    if not compiles_here():
        yield
        return
    _awaited, before = True, set_compiling(False)
    try:
        yield
    finally:
        _awaited = False
        set_compiling(before)
