"""Finds weights of other modules over the memory of a module's weights (``player.weight.data = agent.weight.data``).

Such a tie holds only if both tensors keep their memory, and the host store gives a weight other memory. Tensors that are in no
module (a mapped file, a held ``state_dict()``, the vector of ``vector_to_parameters``) do not compute, so they are not searched.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Container, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sp_lightning.core.device.lease import shared
from sp_lightning.core.model.checks import overlap
from sp_lightning.core.model.wrapped import parts
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.private import FakeTensor, storage_id


class Tie(NamedTuple):
    """A weight of a module, and a parameter or a buffer of another module over its memory.

    Attributes:
        name, weight: the weight. In the place of a wrapped parameter, a plain tensor in it.
        other_name, other: the other tensor, with its name in the module that has it, and the class of that module.
        streamed: True if another run streams the other tensor.
        whole: True if both tensors are the same view of the memory.
    """

    name: str
    weight: Tensor
    other_name: str
    other: Tensor
    streamed: bool
    whole: bool

    @property
    def can_follow(self) -> bool:
        """True if the other tensor can get the memory that the weight will have."""
        return self.whole and not self.streamed

    def follow(self) -> None:
        """Gives the other tensor the memory that the weight has now."""
        with no_inference_mode(), torch.no_grad(), torch.DisableTorchFunctionSubclass():
            self.other.data = self.weight.data

    def refuse_trained(self) -> None:
        """Checks that both tensors are frozen. Each then keeps its values, although only one gets new memory.

        Raises:
            ValueError: one of the two is trained.
        """
        if not (self.weight.requires_grad or self.other.requires_grad):
            return
        if self.streamed:
            raise ValueError(tied_streams(self.name, self.other_name))
        raise ValueError(
            f"Parameter {self.name!r} shares its memory with {self.other_name}, outside of the streamed module (param.data = "
            "other.data). Moving it would part them silently. Tie them later: after sp_lightning.stream(…) or fabric.setup(…), "
            "with a Trainer in on_fit_start. Or give one of them a copy: param.data = param.data.clone()."
        )


def tied_streams(name: str, other: str) -> str:
    """Returns the error message for a parameter that shares memory with a parameter of another run."""
    return (
        f"Parameter {name!r} was given the memory of {other} of another module (param.data = other.data), and both modules are "
        "streamed, each in memory of its own. Moving them would part them silently. Stream only one of them, and call the other "
        "one between two steps, on the CPU. Or give it a copy: param.data = other.data.clone()."
    )


def ties_elsewhere(module: nn.Module, streamed: Container[int] = ()) -> list[Tie]:
    """Returns the weights of a module over whose memory living modules have parameters or buffers that it does not have.

    All objects of the process are searched, but only if a weight's storage has another owner.

    Args:
        module: the root.
        streamed: the ``id`` of each parameter that another run streams.
    """
    with torch.DisableTorchFunctionSubclass():
        weights = [pair for named in module.named_parameters() for pair in parts(*named)]
        held = [(name, weight) for name, weight in weights if _has_memory(weight) and shared(weight)]
        if not held or not list(_find(module, held, streamed)):
            return []
        gc.collect()  # a module without references may still be in a cycle
        order = {name: index for index, (name, _) in enumerate(held)}
        return sorted(_find(module, held, streamed), key=lambda tie: order[tie.name])


def _find(module: nn.Module, held: Sequence[tuple[str, Tensor]], streamed: Container[int]) -> Iterator[Tie]:
    own = {id(tensor) for each in module.modules() for _, tensor in _tensors_of(each)}
    by_storage = defaultdict(list)
    for name, weight in held:
        by_storage[storage_id(weight.untyped_storage())].append((name, weight))
    for each in gc.get_objects():
        if not issubclass(type(each), nn.Module):  # `isinstance` would run code of proxies
            continue
        others = [part for key, tensor in _tensors_of(each) if id(tensor) not in own for part in parts(key, tensor)]
        for key, other in others:
            for name, weight in by_storage[storage_id(other.untyped_storage())] if _has_memory(other) else ():
                if overlap(weight, other):
                    named, is_whole = f"{key!r} of a {type(each).__name__}", _form(weight) == _form(other)
                    yield Tie(name, weight, named, other, id(other) in streamed, is_whole)


def _form(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _tensors_of(module: Any) -> list[tuple[str, Any]]:
    """Returns a module's own parameters and buffers. A module whose constructor runs, and a ScriptModule, may lack them."""
    held = (vars(module).get(kind) for kind in ("_parameters", "_buffers"))
    # `dict.items`, because `_parameters` of a run shows the device parameters to the run's thread only
    return [pair for each in held if isinstance(each, dict) for pair in list(dict.items(each)) if pair[1] is not None]


def _has_memory(tensor: Any) -> bool:
    """Returns True if a tensor has memory. Tensors on the meta device and some subclasses have none."""
    with suppress(RuntimeError, NotImplementedError):
        return tensor.layout is torch.strided and not isinstance(tensor, FakeTensor) and tensor.data_ptr() != 0
    return False
