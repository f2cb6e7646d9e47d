"""Which threads compute with the weights of a run, and which only look at its module.

# Note: threads of a run

- The *main thread* runs the steps: it has called ``trainer.fit``, and begins and ends each step.
- A thread of autograd's belongs to the run while it runs a graph task: backward, and a forward that runs again in it.
- A *helper* is a thread of the user's that computes in a forward that the main thread runs (a pool, one thread for each input).
  It belongs to the run while it calls a module, or runs one operation on a weight.
- Every other thread is *foreign*: a notebook, a dashboard, a checkpoint in the background. It gets the host's parameters,
  whose memory never moves, and changes no state of the engine. It waits for the work of an update, and for nothing else.

Nothing tells a helper from a foreign thread. Therefore a forward admits any thread that calls a module, computes for a graph or
writes; outside of a forward none is admitted. If the forward ends before the helper does, the helper gets an error, and the step
goes on.
"""

from __future__ import annotations

import threading

from sp_lightning.torch_compat.private import current_graph_task


class LateError(RuntimeError):
    """A helper computed with a weight, and its forward had ended before."""

    def __init__(self) -> None:
        super().__init__(
            "A thread still computed with the module's weights when the step's forward had ended; the result is lost. Join such "
            "threads before the step returns. To compute beside trainer.fit: copy.deepcopy(module)."
        )


class OwnThreads:
    """The threads of one run. The caller of what changes it holds the engine's lock.

    Attributes:
        main: the identifier of the thread that runs the steps.
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self._here = _ThreadCalls()
        self._forward = 0  # the number of the forward that admits helpers

    @property
    def own(self) -> bool:
        """Whether the present thread belongs to the run."""
        return threading.get_ident() == self.main or current_graph_task() != -1 or self.helps

    @property
    def began(self) -> bool:
        """Whether the present thread runs a call or an operation that it has begun as a helper."""
        return self._here.depth > 0

    @property
    def helps(self) -> bool:
        """Whether the present thread is a helper, whose forward goes on."""
        return self._here.depth > 0 and self._here.forward == self._forward

    @property
    def late(self) -> bool:
        """Whether the present thread is a helper whose forward has ended."""
        return self._here.depth > 0 and self._here.forward != self._forward

    def begin(self) -> None:
        """Admits the present thread as a helper for a call of a module, or for one operation."""
        if not self._here.depth:
            self._here.forward = self._forward
        self._here.depth += 1

    def end(self) -> None:
        """Ends what :meth:`begin` has begun."""
        self._here.depth -= 1

    def end_forward(self) -> None:
        """Ends the forward that admits helpers: those that still compute are late."""
        self._forward += 1

    def refuse_late(self) -> None:
        """Raises a :class:`LateError` in a helper whose forward has ended."""
        if self.late:
            raise LateError


class _ThreadCalls(threading.local):
    """Of a thread: how many calls and operations it has begun as a helper, and in which forward the outermost one."""

    depth = 0
    forward = 0


LEAVES_FAST_PATH = (
    "A thread beside trainer.fit used the module while nn.MultiheadAttention or nn.TransformerEncoderLayer evaluates: "
    "it would leave its fast path (last bits). Use a copy there: copy.deepcopy(module)."
)

CALLED_ELSEWHERE = (
    "{name} was called in another thread than that of trainer.fit, outside of a forward: its weights are not on the device. Call "
    "a copy: copy.deepcopy(module). Reading weights (state_dict(), parameters()) works in any thread."
)
