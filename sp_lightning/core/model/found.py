"""The result of the search for layers: the layers, the residents, and the place of each parameter."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.core.model.wrapped import parts

NamedParameter = tuple[str, nn.Parameter]
"""A parameter with its qualified name."""


STACK_DIMENSIONS = 3
"""The number of dimensions of a stack of experts, in which each expert's parameter is a matrix."""


class Place(NamedTuple):
    """The place of a parameter: ``module._parameters[attribute]``."""

    module: nn.Module
    attribute: str


@dataclass(frozen=True)
class Layer:
    """Parameters that are uploaded together, in the order in which they lie in memory.

    Attributes:
        name: the name of the module, or of the parameter if it belongs to no layer's module.
        parameters: the parameters that are uploaded unchanged. A parameter that several layers share belongs to the first.
        lowered: the float32 parameters that are uploaded as casts of a lower precision. The casts are behind the other parameters
            in memory.
        rows: the number of experts that are stacked in the layer's parameters, if single experts are uploaded; otherwise 0.
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
    """A candidate for a layer: a whole module, or one parameter of a module that was divided.

    Attributes:
        name: the name of the module or parameter.
        module: the module; None for a parameter.
        parameters: the parameters that the unit owns. A parameter that several units share belongs to the first one.
        chosen: True if ``layers=`` chose the module.
        expert: True if only tokens that are routed to the unit use it.
        within: True if the module is inside the module of another unit.
        rows: the number of experts that the module holds in stacks, if single experts can be uploaded; otherwise 0.
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
        """Bytes of the unit's parameters."""
        return sum(tensor_bytes(parameter) for _, parameter in self.parameters)


class OverlappingPair(NamedTuple):
    """Two frozen parameters that share memory, for example a flow's permutation and its transpose.

    Attributes:
        names: the names of the two parameters.
        parameters: the two parameters. In the place of a wrapped parameter, the plain tensor in it that shares memory.
    """

    names: tuple[str, str]
    parameters: tuple[Tensor, Tensor]

    def refuse_trained(self) -> None:
        """Checks that both parameters are frozen. Each gets its own copy, so a write to one would not change the other.

        Raises:
            ValueError: one of the two parameters is trained.
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
    """The result of :func:`~sp_lightning.core.model.find.find_layers`.

    Attributes:
        layers: the layers, in the order of the module tree.
        residents: the parameters that stay on the device during a batch.
        visits: for each module that is a unit or contains units, the indices of the layers that its forward uses: its own layer,
            and layers that own a parameter tied to one of its parameters. Modules above the units use no layers, except
            attention, which reads its children's weights.
        places: for each parameter, all its places in the module tree.
        aside: names and modules that are moved to the device whole: ScriptModules, and modules with unsupported tensor
            subclasses that ``keep_on_gpu=`` names.
        stay: the layers that ``gpu_layers=`` chose. Their parameters are moved to the device, and are not in ``layers``.
        notes: notes on this model for the plan.
        autocast: the dtype of the casts; None without autocast.
        wrapped: the parameters that consist of several plain tensors. Layers contain the plain tensors in their place.
        tables: embeddings of which only the rows in a batch are uploaded. Each is one parameter.
        experts: the indices of the layers that are used only by tokens routed to them.
        units: the modules that each have one activation mode, by name, in the order of the module tree. These are layers, and
            modules that stay on the device; experts inside other units are not among them.
        overlapping: pairs of frozen parameters that share memory. Each parameter gets its own copy.
        buffer_bytes: bytes of all buffers. They stay on the device.
        nothing: the reason why nothing is streamed; empty if something is streamed.
        advice: sentences for the log on changes of the module, or of ``layers=``, with which less is uploaded or held.
        grouping_advice: advice to group modules, if all layers are modules without children; otherwise empty.
    """

    layers: tuple[Layer, ...]
    residents: Layer
    visits: dict[nn.Module, tuple[int, ...]]
    places: dict[nn.Parameter, tuple[Place, ...]]
    aside: tuple[tuple[str, nn.Module], ...]
    stay: tuple[Layer, ...] = ()
    notes: tuple[str, ...] = ()
    autocast: torch.dtype | None = None
    wrapped: tuple[nn.Parameter, ...] = ()
    tables: tuple[Layer, ...] = ()
    experts: frozenset[int] = frozenset()
    units: Mapping[str, nn.Module] = field(default_factory=dict)
    overlapping: tuple[OverlappingPair, ...] = ()
    advice: tuple[str, ...] = ()
    grouping_advice: str = ""
    buffer_bytes: int = 0
    nothing: str = ""

    @property
    def plain_bytes(self) -> tuple[int, int]:
        """Bytes of weights and buffers, and of gradients, on the device if nothing is streamed."""
        weights, gradients = _with_gradients({*self.places, *self.on_gpu})
        return weights + self.buffer_bytes, gradients

    @property
    def staying(self) -> tuple[int, int]:
        """Bytes of the weights :attr:`on_gpu` and of all buffers, and bytes of the gradients of these weights."""
        weights, gradients = _with_gradients(self.on_gpu)
        return weights + self.buffer_bytes, gradients

    @property
    def stay_bytes(self) -> tuple[tuple[str, int, int], ...]:
        """The name of each layer in :attr:`stay`, bytes of its weights, and bytes of their gradients."""
        return tuple((layer.name, *_with_gradients([p for _, p in layer.parameters])) for layer in self.stay)

    @cached_property
    def on_gpu(self) -> frozenset[nn.Parameter]:
        """The parameters of :attr:`aside` and :attr:`stay`: on the device between steps, too, where optimizers step them."""
        aside = {parameter for _, module in self.aside for parameter in module.parameters()}
        return frozenset(aside | {parameter for layer in self.stay for _, parameter in layer.parameters})

    @property
    def masters(self) -> tuple[Layer, ...]:
        """For each layer with casts, a further layer of the float32 parameters. It is uploaded on demand."""
        return tuple(Layer(layer.name, layer.lowered) for layer in self.layers if layer.lowered)


def _with_gradients(parameters: Collection[nn.Parameter]) -> tuple[int, int]:
    """Returns the bytes of parameters, and the bytes of the gradients of those that are trained."""
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    return sum(map(tensor_bytes, parameters)), sum(map(tensor_bytes, trained))


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's elements. For a wrapped tensor, returns the bytes of its plain tensors."""
    return sum(part.numel() * part.element_size() for _, part in parts("", tensor))


def is_stack(tensor: Tensor | None, count: int) -> bool:
    """Returns True if a tensor is a stack of ``count`` experts."""
    return tensor is not None and tensor.dim() == STACK_DIMENSIONS and len(tensor) == count


def buffers_in(module: nn.Module) -> Iterator[Tensor]:
    """Yields the buffers of a module and its submodules.

    A buffer that two modules share is yielded twice, because the device gets two copies of it.
    """
    return (buffer for child in module.modules() for buffer in child._buffers.values() if buffer is not None)


def join_names(prefix: str, name: str) -> str:
    """Returns the qualified name of a child or parameter. The root's prefix is empty."""
    return f"{prefix}.{name}" if prefix else name
