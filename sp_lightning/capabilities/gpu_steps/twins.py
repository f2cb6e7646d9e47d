"""Twins: copies of a layer's parameters on the GPU, which an optimizer steps. Lists the copies of a step's results."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.core.device.layout import Span
from sp_lightning.core.torch_compat.private import is_traceable_wrapper_subclass, tree_leaves
from sp_lightning.core.weights.gradient_roles import memory_for_values
from sp_lightning.core.weights.layer import StreamedLayer
from sp_lightning.core.weights.roles import ParameterRole


def twin_of(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Returns a twin: a parameter with the user's class on the GPU. Its version shows whether the step has written it.

    Args:
        parameter: the host parameter.
        value: its value in GPU memory, which becomes the twin's memory.
    """
    kind = type(parameter)
    users = kind.users if issubclass(kind, ParameterRole) else kind
    twin: Any = nn.Parameter(value.data, requires_grad=False)
    if users is not nn.Parameter:
        twin.__class__ = users
    resemble(twin, parameter)
    return twin


def resemble(twin: nn.Parameter, parameter: nn.Parameter) -> None:
    """Gives a twin the attributes of its host parameter, and ``requires_grad``, as they are now."""
    twin.requires_grad = parameter.requires_grad
    vars(twin).clear()
    vars(twin).update(vars(parameter))


def written_by(
    what: str, stepped: Iterable[tuple[nn.Parameter, nn.Parameter, Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the downloads after a step: the target on the host and the source on the GPU.

    These are all stepped weights, and the gradients that the step has written.

    Args:
        what: the beginning of the error.
        stepped: each host parameter, its twin, and the twin's gradient if the step has written it; otherwise None.

    Raises:
        RuntimeError: the step has given a parameter another dtype or shape.
    """
    for p, twin, gradient in stepped:
        if (twin.shape, twin.dtype) != (p.shape, p.dtype):
            raise RuntimeError(
                f"{what} {twin.dtype} of shape {tuple(twin.shape)}; it was {p.dtype} of shape "
                f"{tuple(p.shape)}. Exchange it between two batches."
            )
        yield p.data, twin.detach()  # with the version that the step has left, whenever the copy is made
        if gradient is not None and p.grad is not None:
            yield memory_for_values(p), gradient


def for_fetch(
    layer: StreamedLayer, casts: Mapping[int, Tensor], pairs: Iterable[tuple[nn.Parameter, nn.Parameter]]
) -> list[tuple[Span, Tensor]]:
    """Returns the tensors of the layer's next fetch, with their places in a slot; empty if the fetch has to upload from the host.

    Args:
        layer: the layer.
        casts: the casts of its new weights, by the ``id`` of the host parameter.
        pairs: the host parameters that were stepped, each with its twin.
    """
    parameters = [p for member in layer.with_masters for p in member.block.parameters]
    there = {id(p): twin.detach() for p, twin in pairs}
    if not casts or any(
        id(p) not in there for p in parameters
    ):  # without casts, the whole layer would be copied once more
        return []
    parts = (casts[id(p)] if id(p) in casts else there[id(p)].clone() for p in parameters)
    return list(zip(layer.spans, parts, strict=True))


def made_on(device: torch.device, states: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors in some values of new state that are on the GPU, each once."""
    leaves = [leaf for values in states for leaf in tree_leaves(values)]
    plain = [each for each in leaves if type(each) is Tensor and each.layout is torch.strided]
    return list({id(each): each for each in plain if each.device == device}.values())


def to_host(leaf: Any, of_host: Mapping[int, Tensor]) -> Any:
    """Returns a leaf of new state as the user finds it, with tensors on the host.

    Args:
        leaf: the leaf.
        of_host: the host tensors, by the ``id`` of the tensor of the step. Other leaves are returned unchanged, except wrapped
            tensors, which are copied.
    """
    if isinstance(leaf, Tensor) and is_traceable_wrapper_subclass(leaf):
        return leaf.to("cpu")
    return of_host.get(id(leaf), leaf)
