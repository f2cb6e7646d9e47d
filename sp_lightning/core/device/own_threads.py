"""The threads that may use the weights on the device, and the threads that see only the host's weights.

# Note: threads of a run

- The *main thread* called ``trainer.fit``. It begins and ends each step.
- An *autograd thread* belongs to the run while it runs a backward, including a forward that is recomputed in it.
- Every other thread is *foreign*: a notebook, a dashboard, a background checkpoint, NeMo's ``EMAOptimizer``, a pool. It reads the
  host's parameters, whose memory never moves, and changes no state of the engine. It waits only for optimizer steps of the
  weights that it reads. It gets an error if it calls a module or writes a weight. What it computes with trained weights raises an
  error in backward.
"""

from __future__ import annotations

import threading

from sp_lightning.core.torch_compat.private import current_graph_task


class OwnThreads:
    """The threads of one run.

    Attributes:
        main: the identifier of the thread that runs the steps.
    """

    def __init__(self) -> None:
        self.main = threading.get_ident()

    @property
    def own(self) -> bool:
        """True if the present thread belongs to the run."""
        return threading.get_ident() == self.main or current_graph_task() != -1


ONLY_READS = (
    "{what} in another thread than that of trainer.fit. Such a thread can only read weights, in CPU memory. Do it in the thread "
    "of trainer.fit, or with a copy: copy.deepcopy(module)."
)
