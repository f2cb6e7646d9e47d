"""Defers the handlers of signals: Python runs them in the main thread, between any two instructions of any code.

A handler is user code. It saves a checkpoint (SLURM's requeue signal), or raises (Ctrl-C), wherever the main thread is. Two
places are wrong for that:

- the package's own code, whose state is half changed there, and which holds locks that the same thread may take again,
- a step that has updated some weights and not the others.

Each handler that Python has is therefore replaced by a :class:`_Deferrable`. It runs the handler at once elsewhere, and a moment
later in such a place. The frame that the signal has interrupted decides, so nothing is done where no signal comes: neither for a
layer nor for a call.

Why handlers are replaced, and not ``signal.signal`` and ``signal.getsignal`` patched: a patch is the whole process's, in all its
threads, and code that has imported the names goes round it. What ``getsignal`` returns meanwhile equals the handler, and has its
attributes. Handlers that are set during a run are found before the next batch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import sysconfig
import threading
import time
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import FrameType
from typing import Any

_handler_of: Callable[[int], Any] = _signal.getsignal  # that of ``signal`` makes enums, which takes 40 times as long
_SIGNALS = sorted(map(int, signal.valid_signals()))

PATIENCE = 10.0
"""Seconds for which the package's own code defers a handler. Code that takes longer waits: for a disk, or for another process."""


def _never() -> bool:
    return False


class DeferredSignals:
    """Handlers of signals, which run at once or a moment later. In other threads than the main one it does nothing.

    Python's handlers run in the main thread alone, so that only a run in the main thread is interrupted by any.
    """

    def __init__(self) -> None:
        self._is_torn: Callable[[], bool] = _never
        self._installed: dict[int, _Deferrable] = {}
        self._deferred: dict[
            int, tuple[_Deferrable, float]
        ] = {}  # by signal, with the time from which on PATIENCE counts
        self._again: set[int] = set()  # signals that the thread below has sent
        self._lock = threading.RLock()  # a signal may come while the main thread holds it
        self._thread: threading.Thread | None = None
        self._process = 0

    def __reduce__(self) -> Any:
        return DeferredSignals, ()

    def install(self, is_torn: Callable[[], bool]) -> None:
        """Replaces the handlers that Python has now. Called again, it replaces those that were set since.

        Args:
            is_torn: says whether a step has updated some weights, and will update the others. It is called in any thread.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_torn = is_torn
        self._process = os.getpid()
        for number in _SIGNALS:
            handler = _handler_of(number)
            if handler is None or isinstance(handler, int):  # not Python's, SIG_DFL, SIG_IGN
                continue
            if type(handler) is _Deferrable and handler.deferred_by is self:
                continue
            while (
                type(handler) is _Deferrable and handler.deferred_by is None
            ):  # user code has put back one of a run before
                handler = handler.handler
            self._installed[number] = made = _Deferrable(handler, self)
            signal.signal(number, made)

    def remove(self) -> None:
        """Puts the handlers back, and runs those that were deferred. Others that were set since stay.

        Raises:
            BaseException: what a handler raises.
        """
        with self._lock:
            installed, self._installed = self._installed, {}
            for number, made in installed.items():
                if threading.current_thread() is threading.main_thread() and _handler_of(number) is made:
                    signal.signal(number, made.handler)
                made.deferred_by = None  # user code may have kept it, and may put it back
            self._is_torn = _never
        self.run_deferred()

    def run_deferred(self) -> None:
        """Runs the handlers that were deferred, because the step is over. Does nothing in another thread than the main one.

        Raises:
            BaseException: what a handler raises.
        """
        if not self._deferred or threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            number, (deferred, _) = self._deferred.popitem()
        try:
            deferred.handler(number, sys._getframe())
        finally:
            self.run_deferred()

    def drop(self, number: int) -> None:
        """Drops the handler of one signal if it was deferred: what it is to do is done already."""
        with self._lock:
            self._deferred.pop(number, None)

    def defers(self, deferred: _Deferrable, number: int, frame: FrameType | None) -> bool:
        """Whether a signal's handler does not run now. Then it does later.

        A second Ctrl-C acts at once, so that a step that hangs can be ended.
        """
        if os.getpid() != self._process:  # a forked child
            return False
        with self._lock:
            known, again = self._deferred.get(number), number in self._again
            self._again.discard(number)
            if again and known is None:  # it has run since
                return True
            now, torn = time.monotonic(), self._is_torn()
            runs = known is not None and not again and number == signal.SIGINT
            if not torn:
                runs = runs or not is_ours(frame) or (known is not None and now - known[1] > PATIENCE)
            if runs:
                self._deferred.pop(number, None)
                return False
            self._deferred[number] = deferred, now if torn or known is None else known[1]
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._send_again, name="superpipeline-signals", daemon=True)
            self._thread.start()
        return True

    def _send_again(self) -> None:
        """Has Python call deferred handlers again, until none is left."""
        pause = 0.0005
        while self._deferred:
            time.sleep(pause)
            pause = min(1.1 * pause, 0.02)
            if self._is_torn():
                continue
            with self._lock:
                for number, (deferred, _) in self._deferred.items():
                    if deferred.is_installed(number):  # otherwise it runs once the step is over
                        self._again.add(number)
                        _thread.interrupt_main(number)  # type: ignore[arg-type]  # a number is enough


class _Deferrable:
    """A handler in the place of another one, which it runs at once or later. It equals that one, and has its attributes."""

    def __init__(self, handler: Callable[..., Any], deferred_by: DeferredSignals) -> None:
        self.handler = handler
        self.deferred_by: DeferredSignals | None = deferred_by

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.deferred_by is None or not self.deferred_by.defers(self, number, frame):
            return self.handler(number, frame)
        return None

    def is_installed(self, number: int) -> bool:
        """Whether Python calls it, or a run inside of this one has another in its place that does."""
        handler = _handler_of(number)
        while type(handler) is _Deferrable and handler is not self:
            handler = handler.handler
        return handler is self

    def __getattr__(self, name: str) -> Any:
        if name in ("handler", "deferred_by"):
            raise AttributeError(name)
        return getattr(self.handler, name)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self.handler == other)

    def __hash__(self) -> int:
        return hash(self.handler)

    def __reduce__(self) -> Any:
        return _itself, (self.handler,)


def _itself(handler: Any) -> Any:
    return handler


def is_ours(frame: FrameType | None) -> bool:
    """Whether the package's own code runs there, or what it has called of torch, Python and their like.

    Also where torch switches a mode of the process, for anybody: an interrupt would leave it switched. And where Python ignores
    what is raised, in finalizers and callbacks of weak references: Ctrl-C would be lost.
    """
    if frame is not None and (frame.f_code.co_filename.endswith(_SWITCHES) or _is_in_finalizer(frame)):
        return True
    while frame is not None:
        ours = _is_ours(frame.f_code.co_filename)
        if ours is not None:
            return ours
        frame = frame.f_back
    return False


def _is_in_finalizer(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_name != "__del__":
        frame = frame.f_back
    return frame is not None


_SWITCHES = (
    *(str(Path("torch", *each)) for each in (("amp", "autocast_mode.py"), ("autograd", "grad_mode.py"))),
    "_weakrefset.py",
    "weakref.py",
)
_OURS = str(Path(__file__).parents[1]) + os.sep
_CALLED = tuple(
    str(Path(spec.origin).parent) + os.sep
    for name in ("torch", "numpy", "safetensors")
    if (spec := find_spec(name)) is not None and spec.origin
)
_PYTHONS = tuple({sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")})


@cache
def _is_ours(file: str) -> bool | None:
    """Whether a file is one of this package; None of what the package calls: then the caller tells."""
    if file.startswith(_OURS):
        return True
    is_python = file.startswith(_PYTHONS) and "-packages" not in file
    return None if is_python or file.startswith(("<", *_CALLED)) else False
