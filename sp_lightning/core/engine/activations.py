"""The interface of the capability ``activations``, and its default, which keeps all activations on the device.

Activations are the tensors that autograd saves in forward for backward. A *unit* is a layer, or a part of the model beside the
layers. ``activations=`` gives each unit a mode: ``"keep"``, or one of the modes of the capability, which offload activations or
compute them again.

``registry.activations`` makes an :class:`ActivationPlan` at set-up. The engine calls its ``make``, and later the
:class:`Activations` that this returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from sp_lightning.core.plan.choices import Mode, Modes
from sp_lightning.core.weights.layer import StreamedLayer

if TYPE_CHECKING:
    from sp_lightning.core.engine.engine import Engine


class SavedActivation(Protocol):
    """The object that a graph holds in place of a saved tensor that may be offloaded."""

    def load(self) -> tuple[Tensor, int, int]:
        """Returns the tensor on the device, its version when it was saved, and its version now."""


class Activations(Protocol):
    """Carries out the mode of each unit while steps run. Attributes that are called may be None, which saves the call."""

    @property
    def modes(self) -> Modes:
        """The mode of each unit now."""

    @property
    def run(self) -> Callable[[str, Any, Any, nn.Module, Any, Any], Any] | None:
        """Runs the call of a unit. Its arguments: the unit's name, a function, another one that runs the forward again
        (:meth:`~sp_lightning.core.engine.uses.ModuleCall.again`), the module, and the arguments of the call.

        None: each unit is called as it is.
        """

    @property
    def store(self) -> Callable[[Tensor], SavedActivation | None] | None:
        """Takes a tensor that autograd saves. Returns the object for the graph to hold in its place; None to keep the tensor.

        None: all tensors are kept. The engine reads this attribute once before each step and each outermost module call.
        """

    @property
    def packs(self) -> bool:
        """True if saved tensors have to be packed even if no layer is streamed."""

    @property
    def make_room(self) -> Callable[[Sequence[StreamedLayer], Any], None] | None:
        """Called with the layers and the arguments of a call, before the layers are used. It may offload activations.

        None: no activations are offloaded at this moment.
        """

    def limit_host_memory(self, nbytes: int | None) -> None:
        """Sets how many bytes of host memory activations may take; None for no limit."""

    def begin(self) -> None:
        """Called when a training step begins."""

    def install(self) -> None:
        """Called when units are called again in a step, after :meth:`remove`."""

    def remove(self) -> None:
        """Called when a step ends, or before user code in the middle of a step that must find modules as outside of steps."""

    def flush(self) -> None:
        """Called when a step or a backward has ended: no copy is in flight afterwards."""

    def close(self) -> None:
        """Frees memory at the end of the run."""


MakeActivations = Callable[["Engine"], Activations]


class KeepAll:
    """The default: all units keep their activations on the device, and every method returns at once."""

    run = None
    store = None
    packs = False
    make_room = None

    def __init__(self, engine: Engine) -> None:
        self.modes: dict[str, Mode] = dict.fromkeys(engine.found.units, "keep")

    def limit_host_memory(self, nbytes: int | None) -> None: ...

    def begin(self) -> None: ...

    def install(self) -> None: ...

    def remove(self) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ActivationPlan:
    """The treatment of activations in a run, as decided at set-up.

    Attributes:
        make: makes the :class:`Activations` that carry out the modes.
        reruns: True if forwards of units run again in backward. Then a unit is one layer, with all experts in it.
        evicts: True if the oldest activations are offloaded when device memory ends.
        automatic: True if the option is ``"auto"``. After an out-of-memory error there is no use in suggesting it.
        why_kept: a line to log if device memory runs out: a part that is not installed could have prevented that.
    """

    make: MakeActivations = KeepAll
    reruns: bool = False
    evicts: bool = False
    automatic: bool = False
    why_kept: str = ""
