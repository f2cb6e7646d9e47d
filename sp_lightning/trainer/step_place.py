"""The place where optimizers step: an interface, with a default that knows only the CPU. ``gpu_steps`` implements it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from sp_lightning.core.device.device import Device
from sp_lightning.core.plan.choices import Overlap
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.plan.update_policy import Place, UpdateFacts


class StepPlace:
    """Decides if optimizers can step on the GPU, and chooses the place for ``optimizer_on="auto"``.

    This default does not support steps on the GPU.

    Args:
        device: returns the engine's device. A new engine has a new device.
        count: returns the host memory and the traffic of steps in a place, with an overlap.

    Attributes:
        why: the reason why ``"auto"`` has chosen the place; empty before the choice, and if there is nothing to choose.
    """

    def __init__(self, device: Callable[[], Device], count: Callable[[Place, Overlap], Ledger]) -> None:
        self._engine_device = device
        self._count = count
        self.why = ""

    def against(self, optimizers: Sequence[Optimizer]) -> str:
        """Returns why these optimizers cannot step on the GPU; empty if they can."""
        return "sp_lightning/capabilities/gpu_steps is not installed"

    def is_declared(self, optimizer: Optimizer) -> bool:
        """Returns True if only a declaration in the user's class shows that an optimizer steps each parameter by itself."""
        return False

    def remark(self, place: Place) -> str:
        """Returns the choice of ``"auto"`` as a sentence; empty if nothing was chosen."""
        return f'Optimizers step on the {place.upper()} (optimizer_on="auto": {self.why}).' if self.why else ""

    def moves(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> bool:
        """Chooses the place for ``"auto"``, and sets :attr:`why`. Returns True if steps move from the GPU to the CPU.

        A subclass decides only once in a run, because the last bits of weights depend on the place. In this default all steps
        are on the CPU already, so it only sets :attr:`why`.

        Args:
            stepping: the optimizers.
            facts: the facts of the run. Before the choice, the place is the GPU if device memory has room for steps.

        Raises:
            ValueError: the user's ``optimizer_overlap`` is not possible on the GPU.
        """
        if facts.optimizer_on == "auto" and stepping:
            self.why = self.against(stepping)
        return False

    def better(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> str:
        """Returns a sentence if the other place would be faster. Empty if it is slower, not possible, or cannot be measured."""
        return ""
