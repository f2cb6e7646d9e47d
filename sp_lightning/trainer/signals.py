"""Defers signal handlers: Python runs them in the main thread, between any two bytecode instructions of any code.

A handler is user code. It saves a checkpoint (SLURM's requeue signal), or raises (Ctrl-C), wherever the main thread is. It must
not run

- in the package's own code, whose state may be inconsistent, and whose locks the main thread may hold: :func:`is_ours` finds this
  code by the interrupted frame,
- in a step that has updated only some weights: ``is_torn`` of the strategy.

Therefore each Python handler is replaced by a :class:`_Deferrable`. If the signal has interrupted such code, it runs the handler
later; otherwise at once. Without a signal, this costs nothing per layer or call.

Why handlers are replaced instead of patching ``signal.signal`` and ``signal.getsignal``: a patch would affect all threads of the
process, and code that has imported the names would bypass it. The result of ``getsignal`` equals the handler and has its
attributes. Handlers that are set during a run are replaced before the next batch.
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

_handler_of: Callable[[int], Any] = (
    _signal.getsignal
)  # ``signal.getsignal`` creates enums, which takes 40 times as long
_SIGNALS = sorted(map(int, signal.valid_signals()))

PATIENCE = 10.0
"""Seconds for which the package's own code defers a handler. Code that runs longer waits for a disk or another process.

After this time the handler interrupts that code, except while weights are torn.
"""


def _never() -> bool:
    return False


class DeferredSignals:
    """Replaces the Python handlers of all signals by deferrable ones. No-op outside the main thread.

    Python runs handlers in the main thread only, so a run in another thread cannot be interrupted by them.
    """

    def __init__(self) -> None:
        self._is_torn: Callable[[], bool] = _never
        self._installed: dict[int, _Deferrable] = {}
        # The deferred handlers by signal, with the time at which PATIENCE begins.
        self._deferred: dict[int, tuple[_Deferrable, float]] = {}
        self._again: set[int] = set()  # signals that `_thread` has sent again
        self._lock = threading.RLock()  # reentrant: a signal may interrupt the main thread while it holds the lock
        self._thread: threading.Thread | None = None
        self._process = 0

    def __reduce__(self) -> Any:
        """Pickles as a new object: handlers, locks and threads belong to this process."""
        return DeferredSignals, ()

    def install(self, is_torn: Callable[[], bool]) -> None:
        """Replaces the current Python handlers. A further call replaces handlers that were set since the last call.

        Args:
            is_torn: returns True if a step has updated only some weights, or is not counted yet. Any thread may call it.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        self._is_torn = is_torn
        self._process = os.getpid()
        for number in _SIGNALS:
            handler = _handler_of(number)
            if handler is None or isinstance(handler, int):  # set by C code (None), or SIG_DFL or SIG_IGN (int)
                continue
            if type(handler) is _Deferrable and handler.deferred_by is self:
                continue
            # User code may have installed a _Deferrable of an earlier run again, which defers nothing any more.
            while type(handler) is _Deferrable and handler.deferred_by is None:
                handler = handler.handler
            self._installed[number] = made = _Deferrable(handler, self)
            signal.signal(number, made)

    def remove(self) -> None:
        """Restores the handlers, and runs the deferred ones. A handler that other code has set in the meantime stays.

        Raises:
            BaseException: a handler's error.
        """
        with self._lock:
            installed, self._installed = self._installed, {}
            for number, made in installed.items():
                if threading.current_thread() is threading.main_thread() and _handler_of(number) is made:
                    signal.signal(number, made.handler)
                made.deferred_by = None  # user code may have kept `made`, and may install it again
            self._is_torn = _never
        self.run_deferred()

    def run_deferred(self) -> None:
        """Runs the deferred handlers, each at most once. Called when the step is over. No-op outside the main thread.

        Raises:
            BaseException: a handler's error.
        """
        if not self._deferred or threading.current_thread() is not threading.main_thread():
            return
        with self._lock:
            number, (deferred, _) = self._deferred.popitem()
        try:
            deferred.handler(number, sys._getframe())
        finally:  # the other handlers run even if this one raises
            self.run_deferred()

    def drop(self, number: int) -> None:
        """Drops the deferred handler of one signal, if there is one. Called if the handler would repeat what has happened."""
        with self._lock:
            self._deferred.pop(number, None)

    def defers(self, deferred: _Deferrable, number: int, frame: FrameType | None) -> bool:
        """Defers the handler of a signal that has arrived, if necessary. Returns True if deferred; False if it must run now.

        A deferred handler is recorded, and a thread sends the signal again until the handler has run. A second Ctrl-C is never
        deferred, so that a user can end a step that hangs.

        Args:
            deferred: the installed handler, which Python has called.
            number: the signal.
            frame: the frame that the signal has interrupted.
        """
        if os.getpid() != self._process:  # a forked child
            return False
        with self._lock:
            known = self._deferred.get(number)
            again = number in self._again  # True if `_send_again` has sent the signal, not the system or the user
            self._again.discard(number)
            if again and known is None:  # the handler has run or was dropped in the meantime: nothing is left to do
                return True
            now = time.monotonic()
            torn = self._is_torn()
            is_second_ctrl_c = known is not None and not again and number == signal.SIGINT
            is_patience_over = known is not None and now - known[1] > PATIENCE
            # While weights are torn, only a second Ctrl-C may interrupt.
            if is_second_ctrl_c or (not torn and (not is_ours(frame) or is_patience_over)):
                self._deferred.pop(number, None)
                return False
            # PATIENCE begins at the first signal, or when weights are no longer torn.
            self._deferred[number] = deferred, now if torn or known is None else known[1]
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._send_again, name="superpipeline-signals", daemon=True)
            self._thread.start()
        return True

    def _send_again(self) -> None:
        """Sends deferred signals again, until no handler is deferred. Runs in its own thread. Waits while weights are torn."""
        pause = 0.0005
        while self._deferred:
            time.sleep(pause)
            pause = min(1.1 * pause, 0.02)
            if self._is_torn():
                continue
            with self._lock:
                for number, (deferred, _) in self._deferred.items():
                    if deferred.is_installed(number):  # otherwise only run_deferred() can run it, after the step
                        self._again.add(number)
                        _thread.interrupt_main(number)  # type: ignore[arg-type]  # a number is enough


class _Deferrable:
    """A handler that replaces a user's handler, and runs it at once or later. It equals the user's, and has its attributes.

    Args:
        handler: the user's handler.
        deferred_by: decides when the user's handler runs. None (after :meth:`DeferredSignals.remove`): always at once.
    """

    def __init__(self, handler: Callable[..., Any], deferred_by: DeferredSignals) -> None:
        self.handler = handler
        self.deferred_by: DeferredSignals | None = deferred_by

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        if self.deferred_by is None or not self.deferred_by.defers(self, number, frame):
            return self.handler(number, frame)
        return None

    def is_installed(self, number: int) -> bool:
        """Returns True if Python calls this handler, directly or through the :class:`_Deferrable` of a nested run."""
        handler = _handler_of(number)
        while type(handler) is _Deferrable and handler is not self:
            handler = handler.handler
        return handler is self

    def __getattr__(self, name: str) -> Any:
        if name in ("handler", "deferred_by"):  # not set yet: the line below would call this method again
            raise AttributeError(name)
        return getattr(self.handler, name)

    def __eq__(self, other: object) -> bool:
        return self is other or bool(self.handler == other)

    def __hash__(self) -> int:
        return hash(self.handler)

    def __reduce__(self) -> Any:
        """Pickles and copies as the user's handler."""
        return _itself, (self.handler,)


def _itself(handler: Any) -> Any:
    return handler


def is_ours(frame: FrameType | None) -> bool:
    """Returns True if a handler must not interrupt the code of this frame:

    - the package's own code, and code of torch, numpy, safetensors and Python that the package calls,
    - code in which torch switches a mode of the process, for any caller: an interrupt would leave the mode switched,
    - finalizers and callbacks of weak references: Python ignores errors in them, so Ctrl-C would be lost.
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
    """Returns True for a file of this package, and False for user code and all other libraries, for example Lightning.

    None for Python, torch, numpy, safetensors and generated code (``<string>``): the file of their caller decides.
    """
    if file.startswith(_OURS):
        return True
    is_python = file.startswith(_PYTHONS) and "-packages" not in file
    return None if is_python or file.startswith(("<", *_CALLED)) else False
