"""Defers signal handlers to the time between two batches: Python runs them in the main thread, between any two instructions.

A handler is user code. It saves a checkpoint (SLURM's requeue signal; Lightning #21406), or raises (Ctrl-C), wherever the main
thread is. In a batch, some weights may have the values of a new step and others not, and the package's own code may be at work,
whose state is inconsistent and whose locks the main thread may hold.

Therefore each Python handler is replaced by a :class:`_Deferrable`, which only notes the signal. The strategy runs the noted
handlers before each batch, before each loop, at the end of training, and when it gives the handlers back. Without a signal, this
costs nothing per layer or call.

Why handlers are replaced instead of patching ``signal.signal`` and ``signal.getsignal``: a patch would affect all threads of the
process, and code that has imported the names would bypass it. The result of ``getsignal`` equals the handler and has its
attributes. Handlers that are set during a run are replaced before the next batch.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

_handler_of: Callable[[int], Any] = (
    _signal.getsignal
)  # ``signal.getsignal`` creates enums, which takes 40 times as long

_NEVER_DEFERRED = {
    # Timers belong to watchdogs (``signal.alarm``, pytest-timeout), which end code that hangs, and to profilers.
    signal.SIGALRM,
    signal.SIGVTALRM,
    signal.SIGPROF,
    signal.SIGCHLD,  # with it, torch's DataLoader notices that a worker has died
}
_SIGNALS = sorted(map(int, signal.valid_signals() - _NEVER_DEFERRED))


class DeferredSignals:
    """Replaces the Python handlers of signals by deferrable ones. No-op outside the main thread.

    Python runs handlers in the main thread only, so a run in another thread cannot be interrupted by them.
    """

    def __init__(self) -> None:
        self._installed = False  # True from `install` to `remove`
        self._deferred: dict[int, Callable[..., Any]] = {}  # the handlers to run, by signal
        self._process = 0

    def __reduce__(self) -> Any:
        """Pickles as a new object: handlers belong to this process."""
        return DeferredSignals, ()

    @property
    def defers(self) -> bool:
        """True from :meth:`install` to :meth:`remove`, but not in a forked child."""
        return self._installed and os.getpid() == self._process

    def install(self) -> None:
        """Replaces the current Python handlers. A further call replaces handlers that were set since the last call."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._installed, self._process = True, os.getpid()
        for number in _SIGNALS:
            handler = _handler_of(number)
            if handler is None or isinstance(handler, int):  # set by C code (None), or SIG_DFL or SIG_IGN (int)
                continue
            # User code may have installed a _Deferrable of an earlier run again, which defers nothing any more.
            while type(handler) is _Deferrable and not handler.deferred_by.defers:
                handler = handler.handler
            if type(handler) is not _Deferrable or handler.deferred_by is not self:
                signal.signal(number, _Deferrable(handler, self))

    def remove(self) -> None:
        """Restores the handlers, and runs the deferred ones. A handler that other code has set in the meantime stays.

        Raises:
            BaseException: a handler's error.
        """
        if threading.current_thread() is not threading.main_thread():
            return
        for number in _SIGNALS:
            handler = _handler_of(number)
            if type(handler) is _Deferrable and handler.deferred_by is self:
                signal.signal(number, handler.handler)
        self._installed = False  # for those that user code has kept, and installs again
        self.run_deferred()

    def run_deferred(self) -> None:
        """Runs the deferred handlers, each at most once. Called between two batches. No-op outside the main thread.

        Raises:
            BaseException: a handler's error.
        """
        if not self._deferred or threading.current_thread() is not threading.main_thread():
            return
        number, handler = self._deferred.popitem()
        try:
            handler(number, sys._getframe())
        finally:  # the other handlers run even if this one raises
            self.run_deferred()

    def drop(self, number: int) -> None:
        """Drops the deferred handler of one signal, if there is one. Called if the handler would repeat what has happened."""
        self._deferred.pop(number, None)

    def arrived(self, handler: Callable[..., Any], number: int, frame: FrameType | None) -> Any:
        """Notes a signal that has arrived. A second Ctrl-C runs the handler, so that a user can end a step that hangs.

        Python calls this only when the main thread runs Python code, as it calls each handler on plain Lightning. Until then (in
        a backward on a GPU, or a wait for a kernel), Ctrl-C pressed twice counts as once. Waits for other ranks end nevertheless:
        when a rank fails, or after the timeout of its process group.
        """
        if number == signal.SIGINT and self._deferred.pop(number, None) is not None:
            return handler(number, frame)
        self._deferred[number] = handler
        return None


class _Deferrable:
    """A handler that replaces a user's handler, and runs it at once or later. It equals the user's, and has its attributes.

    Args:
        handler: the user's handler.
        deferred_by: runs the user's handler later, as long as it defers.
    """

    def __init__(self, handler: Callable[..., Any], deferred_by: DeferredSignals) -> None:
        self.handler = handler
        self.deferred_by = deferred_by

    def __call__(self, number: int, frame: FrameType | None) -> Any:
        # Python calls a handler from the frame that it interrupts. Else another handler, which has replaced this one, calls it.
        if self.deferred_by.defers and sys._getframe(1) is frame:
            return self.deferred_by.arrived(self.handler, number, frame)
        return self.handler(number, frame)

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
