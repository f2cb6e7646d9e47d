"""Placement: makes the parts of the engine that differ with the place of the weights and with the number of devices.

``Run._place`` (``trainer/run.py``) chooses: ``RankPlacement`` (``ranks``) for several devices,
``FilePlacement`` or ``ScratchPlacement`` (``disk``) for weights in files, and otherwise :data:`ONE_DEVICE`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.owners import Owners
from sp_lightning.core.model.found import Layer
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import Allocate, BlockMemory
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.gradients import Gradients, GradientSink
from sp_lightning.core.weights.ring import Uploads

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class Placement:
    """Makes the parts of the engine for weights in host memory, and for one device. Subclasses make other parts.

    Attributes:
        remark: a sentence for the user; empty if there is none.
        pages: True if trained weights or gradients of some layers leave host memory between their uses. Then optimizers step
            layer by layer.
        pages_gradients: True if gradients of some layers leave host memory. Then gradients are clipped and stepped one layer at a
            time, in float32.
    """

    remark = ""
    pages = pages_gradients = False

    def __init__(self, remark: str = "") -> None:
        self.remark = remark

    def count(self, ledger: Ledger) -> Ledger:
        """Returns a ledger of the weights and gradients that are in host memory. ``ledger`` counts all weights and gradients."""
        return ledger

    def leave(self) -> None:
        """Evicts weights from host memory that are also stored elsewhere. Called after training."""

    def complete_pending(self) -> None:
        """Waits until all writes of weights and gradients are complete.

        Raises:
            OSError: a write failed.
        """

    # Each of these methods may use the parts that `Engine.__init__` has made before it calls the method.

    def allocate(self, engine: Engine) -> Allocate:
        """Returns the function that allocates host memory for the plan's layers. It is called in the order of the layers."""
        return partial(BlockMemory, engine.device)

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        """Makes the host block of a layer, with the arguments of :class:`~sp_lightning.core.store.block.HostBlock`."""
        return HostBlock(layer, planned, *args, **options)

    def uploads(self, engine: Engine) -> Uploads:
        """Returns the part that copies layers to slots."""
        return Uploads(engine.device)

    def gradients(self, engine: Engine) -> GradientSink:
        """Returns the part that takes gradients."""
        return Gradients(
            engine.device,
            engine.staging,
            in_flight=engine.plan.k_prime + 1,
            keep_for_step=engine.plan.steps_on_device,
        )

    def updates(self, engine: Engine) -> BackgroundUpdates:
        """Returns the part that runs updates in the background."""
        return BackgroundUpdates(engine)

    @property
    def source(self) -> type[HostSource]:
        """The class of the part that provides the layers' bytes."""
        return HostSource

    def owners(self, engine: Engine) -> Owners:
        """Returns the part that knows which process steps which layer."""
        return Owners()


ONE_DEVICE = Placement()
