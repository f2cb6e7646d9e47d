"""Which threads compute with the weights of a run, and which only look at its module.

# Note: threads of a run

- The *main thread* runs the steps: it has called ``trainer.fit``, and begins and ends each step.
- A thread of autograd's belongs to the run while it runs a graph task: backward, and a forward that runs again in it.
- A *helper* is a thread of the user's that computes in a forward that the main thread runs (a pool, one thread for each input).
  It belongs to the run from its first use of a weight for a graph, or its first call of a module, until that ends.
- Every other thread is *foreign*: a notebook, a dashboard, a checkpoint in the background. It is given the host's parameters,
  whose memory never moves, and changes no state of the engine. It waits for the work of an update, and for nothing else.

A helper cannot be told from a foreign thread before it uses the weights. Therefore a forward admits every thread, and outside of
one none is admitted. If the forward ends while a helper computes, the helper gets an error, and the step goes on.
"""

from __future__ import annotations

import threading

from sp_lightning.device.torch_private import current_graph_task


class OwnThreads:
    """The threads of one run. Changes are made with the engine's lock held; :attr:`own` is asked without it.

    Attributes:
        main: the identifier of the thread that runs the steps.
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()
        self._here = _Here()
        self._forward = 0  # the number of the forward that admits helpers

    @property
    def own(self) -> bool:
        """Whether the present thread belongs to the run."""
        return threading.get_ident() == self.main or current_graph_task() != -1 or self.helps

    @property
    def began(self) -> bool:
        """Whether a call or an operation runs in the present thread that it has begun as a helper."""
        return self._here.depth > 0

    @property
    def helps(self) -> bool:
        """Whether the present thread is a helper, whose forward has not ended."""
        return self._here.depth > 0 and self._here.forward == self._forward

    @property
    def late(self) -> bool:
        """Whether the present thread is a helper whose forward has ended meanwhile."""
        return self._here.depth > 0 and self._here.forward != self._forward

    def begin(self) -> None:
        """A call of a module, or one operation, begins in a thread that helps from now on, or does so already."""
        if not self._here.depth:
            self._here.forward = self._forward
        self._here.depth += 1

    def end(self) -> None:
        """It has ended."""
        self._here.depth -= 1

    def end_forward(self) -> None:
        """The forward ends that has admitted helpers. What they do from now on with weights is refused."""
        self._forward += 1

    def refuse_late(self) -> None:
        """Refuses a helper whose forward has ended: a RuntimeError."""
        if self.late:
            raise RuntimeError(LATE)


class _Here(threading.local):
    """Of a thread: how many calls and operations run in it, and the forward that the outermost one has begun in."""

    depth = 0
    forward = 0


LATE = (
    "A thread computed with a streamed weight when the step went on without it: its forward had ended, so the result would be of "
    "other memory. Join threads that compute with the module before the step returns. To compute beside trainer.fit, use a copy: "
    "copy.deepcopy(module)."
)

CALLED_ELSEWHERE = (
    "{name} was called in another thread than the one that runs trainer.fit, and no forward was running there: its weights are not "
    "on the device. Call a copy: copy.deepcopy(module). Reading weights (state_dict(), parameters()) works in any thread."
)
