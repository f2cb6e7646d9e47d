"""What was found in a module: its layers, what stays on the device, and where each parameter sits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.model.wrapped import parts

NamedParameter = tuple[str, nn.Parameter]
"""A parameter with its qualified name."""


STACK_DIMENSIONS = 3
"""One parameter of each expert is a matrix, and a stack of them has one more dimension."""


class Place(NamedTuple):
    """Where a parameter sits: ``module._parameters[attribute]``."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Layer:
    """Parameters that move as one, in the order in which they lie in memory.

    Attributes:
        name: the name of the module, or of the parameter if that belongs to no layer's module.
        parameters: the parameters that travel as they are. One that several layers share belongs to the first.
        lowered: the float32 parameters that travel as casts of a lower precision; they lie behind the others.
        rows: how many experts are stacked in its parameters, if only those travel that something is routed to; otherwise 0.
    """

    name: str
    parameters: tuple[NamedParameter, ...]
    lowered: tuple[NamedParameter, ...] = ()
    rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters, without alignment."""
        return sum(tensor_bytes(parameter) for _, parameter in (*self.parameters, *self.lowered))


@dataclass(eq=False)
class Unit:
    """A candidate for a layer: a whole module, or one parameter of a module that was cut.

    Attributes:
        name: the name of the module, or of the parameter.
        module: None for a parameter.
        parameters: what it owns. A parameter that several units share belongs to the first.
        chosen: whether the user has chosen it.
        expert: whether it is used only when something is routed to it.
        within: whether another unit is around it.
        rows: how many experts it holds in stacks, of which only those travel that something is routed to; otherwise 0.
    """

    name: str
    module: nn.Module | None
    parameters: list[NamedParameter]
    chosen: bool = False
    expert: bool = False
    within: bool = False
    rows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its parameters."""
        return sum(tensor_bytes(parameter) for _, parameter in self.parameters)


class OverlappingPair(NamedTuple):
    """Two frozen parameters over one memory, as a flow's permutation and its transpose are.

    Attributes:
        names: the names of both.
        parameters: both, or the plain tensors that they consist of.
    """

    names: tuple[str, str]
    parameters: tuple[Tensor, Tensor]

    def refuse_trained(self) -> None:
        """Refuses to train one of them: the two have the same values only while nobody writes either.

        Raises:
            ValueError: one of them is trained.
        """
        if any(parameter.requires_grad for parameter in self.parameters):
            first, second = self.names
            raise ValueError(
                f"Parameters {first!r} and {second!r} are two Parameter objects over the same memory. Moving them would "
                f"part them silently. Tie them by sharing one object (module_b.weight = module_a.weight), give one of them "
                f"a copy (module_b.weight.data = module_b.weight.data.clone()), or freeze both."
            )


@dataclass(frozen=True)
class Found:
    """What :func:`~sp_lightning.model.find.find_layers` found in a module.

    Attributes:
        layers: the layers, in the order of the module tree.
        residents: the parameters that stay on the device during a batch.
        visits: for each module, the indices of the layers that its forward uses: its own, and those that own a parameter
            that is tied to one of its own. Modules above and beside the layers use none.
        places: for each parameter, all places in the tree where it sits.
        aside: the names of modules that keep their parameters to themselves, and the modules: ScriptModules, and modules
            with tensor subclasses that are to be resident. They are moved whole.
        notes: what the plan should say about this model.
        autocast: the dtype of the casts; None without autocast.
        wrapped: the parameters that consist of several plain tensors. The layers have those tensors in their place.
        tables: embeddings of which only the rows travel that are looked up. Each is one parameter.
        experts: the indices of the layers that are used only when something is routed to them.
        units: by name, the modules that have one mode of activations each: the layers, and the parts that stay on the
            device, in the order of the module tree.
        parted: pairs of frozen parameters over one memory; each parameter gets a copy.
        buffer_bytes: bytes of all buffers, which are on the device all the time.
        nothing: why nothing is streamed; empty if something is.
        grouping_advice: if all layers are bare modules, which save nothing but their inputs, what to group, and how.
    """

    layers: tuple[Layer, ...]
    residents: Layer
    visits: dict[nn.Module, tuple[int, ...]]
    places: dict[nn.Parameter, tuple[Place, ...]]
    aside: tuple[tuple[str, nn.Module], ...]
    notes: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    wrapped: tuple[nn.Parameter, ...] = ()
    tables: tuple[Layer, ...] = ()
    experts: frozenset[int] = frozenset()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    parted: tuple[OverlappingPair, ...] = ()
    grouping_advice: str = ""
    buffer_bytes: int = 0
    nothing: str = ""

    @property
    def plain_bytes(self) -> tuple[int, int]:
        """Bytes of the weights, and of the gradients, that are on the device if nothing streams."""
        return _with_gradients({*self.places, *self._whole})

    @property
    def staying(self) -> tuple[int, int]:
        """Bytes that are on the device all the time: modules that are moved whole and buffers; gradients of such modules."""
        weights, gradients = _with_gradients(self._whole)
        return weights + self.buffer_bytes, gradients

    @property
    def _whole(self) -> set[nn.Parameter]:
        return {parameter for _, module in self.aside for parameter in module.parameters()}

    @property
    def masters(self) -> tuple[Layer, ...]:
        """The float32 parameters of every layer that has casts, as further layers that come on demand."""
        return tuple(Layer(layer.name, layer.lowered) for layer in self.layers if layer.lowered)


def _with_gradients(parameters: Collection[nn.Parameter]) -> tuple[int, int]:
    """Bytes of parameters, and of the gradients of those that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(map(tensor_bytes, parameters)), sum(map(tensor_bytes, trained))


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of a tensor's elements; of a wrapped one, those of the plain tensors that it consists of."""
    return sum(part.numel() * part.element_size() for _, part in parts("", tensor))


def is_stack(tensor: Tensor | None, count: int) -> bool:
    """Returns True if a parameter of a module with ``count`` stacked experts is one of its stacks."""
    return tensor is not None and tensor.dim() == STACK_DIMENSIONS and len(tensor) == count


def buffers_in(module: nn.Module) -> Iterator[Tensor]:
    """The buffers of a module and of all in it. One that two modules share comes twice, as two copies go to the device."""
    return (buffer for child in module.modules() for buffer in child._buffers.values() if buffer is not None)


def join_names(prefix: str, name: str) -> str:
    """The qualified name of a child or a parameter; the root's prefix is empty."""
    return f"{prefix}.{name}" if prefix else name
