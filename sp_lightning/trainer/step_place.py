"""The place where optimizers step: the interface through which ``gpu_steps`` enters, with a default of the CPU only."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.optim import Optimizer

from sp_lightning.device.device import Device
from sp_lightning.plan.choices import Overlap
from sp_lightning.plan.ledger import Ledger
from sp_lightning.plan.update_policy import Place, UpdateFacts


class StepPlace:
    """Decides if optimizers can step on the GPU, and chooses the place for ``optimizer_on="auto"``.

    This default does not support steps on the GPU.

    Args:
        device: returns the device. It is another one after the engine was rebuilt.
        count: returns the memory traffic and transfers of a step, given its place and overlap.

    Attributes:
        why: why ``"auto"`` has chosen the place; empty before that, and if there is nothing to choose.
    """

    def __init__(self, device: Callable[[], Device], count: Callable[[Place, Overlap], Ledger]) -> None:
        self._engine_device = device
        self._count = count
        self.why = ""

    def against(self, optimizers: Sequence[Optimizer]) -> str:
        """Returns why these optimizers cannot step on the GPU; empty if they can."""
        return "sp_lightning/gpu_steps is not installed"

    def is_declared(self, optimizer: Optimizer) -> bool:
        """Returns True if only a declaration in the user's class shows that an optimizer steps each parameter by itself."""
        return False

    def remark(self, place: Place) -> str:
        """Returns the choice as a sentence; empty if there was none."""
        return f'Optimizers step on the {place.upper()} (optimizer_on="auto": {self.why}).' if self.why else ""

    def moves(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> bool:
        """Returns True if ``"auto"`` moves the steps from the GPU to the CPU. It decides once: the last bits depend on the place.

        This default only has the CPU, and notes why.

        Args:
            stepping: the optimizers.
            facts: the facts of the run, with steps on the GPU if there is room for them.

        Raises:
            ValueError: the user's ``optimizer_overlap`` is not possible on the GPU.
        """
        if facts.optimizer_on == "auto" and stepping:
            self.why = self.against(stepping)
        return False

    def better(self, stepping: Sequence[Optimizer], facts: UpdateFacts) -> str:
        """Returns a sentence if the other place would be faster; empty if not, or if that is unknown or impossible."""
        return ""
