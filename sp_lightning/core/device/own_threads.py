"""The threads that may use the weights on the device, and the threads that see only the host's weights.

# Note: threads of a run

- The *main thread* called ``trainer.fit``. It begins and ends each step.
- An *autograd thread* belongs to the run while it runs a backward, including a forward that is recomputed in it.
- A *helper* is a thread of user code that computes inside a forward of the main thread (for example a pool with one thread per
  input). It belongs to the run while it calls a module, or runs one operation on a weight.
- Every other thread is *foreign*: a notebook, a dashboard, a background checkpoint. It sees the host's parameters, whose memory
  never moves, and changes no state of the engine. It waits only for optimizer steps of the weights that it reads.

A helper cannot be distinguished from a foreign thread. During a forward, any thread that calls a module, computes for a graph or
writes a weight is therefore admitted as a helper; outside of a forward no thread is. If the forward ends before the helper does,
the helper gets an error, and the step continues.
"""

from __future__ import annotations

import threading

from sp_lightning.core.torch_compat.private import current_graph_task


class LateError(RuntimeError):
    """A helper used a weight after its forward had ended."""

    def __init__(self) -> None:
        super().__init__(
            "A thread still computed with the module's weights when the step's forward had ended; the result is lost. Join such "
            "threads before the step returns. To compute beside trainer.fit: copy.deepcopy(module)."
        )


class OwnThreads:
    """The threads of one run. Callers of methods that change this object hold the engine's lock.

    Attributes:
        main: the identifier of the thread that runs the steps.
        here: for the present thread, the number of nested calls that it runs as a helper (``depth``).
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self.here = _ThreadCalls()
        self._forward = 0  # number of the current forward

    @property
    def own(self) -> bool:
        """True if the present thread belongs to the run."""
        return threading.get_ident() == self.main or current_graph_task() != -1 or self.helps

    @property
    def only_helps(self) -> bool:
        """True if the present thread is a helper, perhaps a late one, or does not belong to the run.

        Such a thread can take part in the run only as a helper.
        """
        return self.here.depth > 0 or (threading.get_ident() != self.main and current_graph_task() == -1)

    @property
    def helps(self) -> bool:
        """True if the present thread is a helper whose forward is still running."""
        return self.here.depth > 0 and self.here.forward == self._forward

    @property
    def late(self) -> bool:
        """True if the present thread is a helper whose forward has ended."""
        return self.here.depth > 0 and self.here.forward != self._forward

    def begin(self) -> None:
        """Admits the present thread as a helper, for one module call or one operation."""
        if not self.here.depth:
            self.here.forward = self._forward
        self.here.depth += 1

    def end(self) -> None:
        """Ends the call or operation of the last :meth:`begin`."""
        self.here.depth -= 1

    def end_forward(self) -> None:
        """Ends the forward. Helpers that still compute are late from now on."""
        self._forward += 1

    def refuse_late(self) -> None:
        """Raises a :class:`LateError` in a helper whose forward has ended."""
        if self.late:
            raise LateError


class _ThreadCalls(threading.local):
    """For one thread: the number of nested calls that it runs as a helper, and the number of the outermost call's forward."""

    depth = 0
    forward = 0


LEAVES_FAST_PATH = (
    "A thread beside trainer.fit used the module while nn.MultiheadAttention or nn.TransformerEncoderLayer evaluates: "
    "it would leave its fast path (last bits). Use a copy there: copy.deepcopy(module)."
)

CALLED_ELSEWHERE = (
    "{name} was called in another thread than that of trainer.fit, outside of a forward: its weights are not on the GPU. Call "
    "a copy: copy.deepcopy(module). Reading weights (state_dict(), parameters()) works in any thread."
)
