"""Calls of autograd's engine that fail: the engine of this package is told of them before user code goes on.

autograd itself tells of the end of a backward that succeeds alone. What was queued in one that fails it drops, and on an
accelerator a thread of autograd's own does so, while user code that has caught the error may be in the next forward already.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Protocol

from sp_lightning.device.torch_private import ENGINE_CALL, leave_frame_out


class Watcher(Protocol):
    """Follows graph tasks.

    Attributes:
        tasks: the numbers of those that are under way.
    """

    tasks: list[int]

    def failed(self, before: Sequence[int]) -> None:
        """A call has raised. Called in the thread that made it.

        Args:
            before: the graph tasks that were under way when the call began. They still are, if they were not of that call.
        """


_watchers: weakref.WeakSet[Watcher] = weakref.WeakSet()
_theirs: Any = getattr(*ENGINE_CALL)


def watch(watcher: Watcher) -> None:
    """Tells somebody of each call that fails, whoever makes it: ``backward``, ``autograd.grad``, a checkpoint, other threads."""
    global _theirs
    if getattr(*ENGINE_CALL) is not _watched:
        _theirs = getattr(*ENGINE_CALL)
        setattr(*ENGINE_CALL, _watched)
    _watchers.add(watcher)


def unwatch(watcher: Watcher) -> None:
    """Ends :func:`watch`. Does nothing if it has ended already."""
    _watchers.discard(watcher)
    if not _watchers and getattr(*ENGINE_CALL) is _watched:
        setattr(*ENGINE_CALL, _theirs)


@leave_frame_out
def _watched(*args: Any, **options: Any) -> Any:
    before = [(watcher, list(watcher.tasks)) for watcher in list(_watchers)]
    try:
        return _theirs(*args, **options)
    except BaseException:
        for watcher, tasks in before:
            watcher.failed(tasks)
        raise
