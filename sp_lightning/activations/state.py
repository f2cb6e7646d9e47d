"""State that can be put back: values beside tensors that a forward may read and change, each with the way back to it."""

from __future__ import annotations

import copy
import operator
import random
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.backends import cuda as attention

from sp_lightning.device.torch_private import COMPILED_CALL, RNN_WEIGHTS

# Attributes of modules that forwards do not touch, and the lists of weights that nn.RNNBase makes anew whenever it is given
# other weights.
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", COMPILED_CALL, *RNN_WEIGHTS}
# The value of an attribute that is not there: None would be one, and would hide a weight of that name.
_ABSENT = object()
_KERNELS: tuple[tuple[Callable[[], bool], Callable[[bool], None]], ...] = (
    (attention.flash_sdp_enabled, attention.enable_flash_sdp),
    (attention.mem_efficient_sdp_enabled, attention.enable_mem_efficient_sdp),
    (attention.math_sdp_enabled, attention.enable_math_sdp),
    (attention.cudnn_sdp_enabled, attention.enable_cudnn_sdp),
)


class State(NamedTuple):
    """Something that a forward may read and change.

    Attributes:
        read: returns its value.
        write: gives it a value.
        before: its value before the forward.
    """

    read: Callable[[], Any]
    write: Callable[[Any], object]
    before: Any


def state_now(read: Callable[[], Any], write: Callable[[Any], object]) -> State:
    """A state with the value that it has now."""
    return State(read, write, read())


def put(values: Iterable[tuple[State, Any]]) -> None:
    """Gives each state a value."""
    for state, value in values:
        state.write(value)


# ---------------------------------------------------------------------- around modules


def global_states() -> Iterator[State]:
    """Random numbers of Python and, if it is imported, of NumPy; the kernels of attention that are enabled; the default dtype."""
    yield state_now(random.getstate, random.setstate)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield state_now(numpy.random.get_state, numpy.random.set_state)
    for enabled, enable in _KERNELS:
        yield state_now(enabled, enable)
    yield state_now(torch.get_default_dtype, torch.set_default_dtype)


def random_states(value: Any) -> list[State] | None:
    """An object that gives random numbers, as a state. None for any other object.

    The list is empty if the object has no state, as ``random.SystemRandom`` has none.
    """
    if isinstance(value, random.SystemRandom):
        return []
    if isinstance(value, random.Random):
        return [state_now(value.getstate, value.setstate)]
    numpy = sys.modules.get("numpy")
    if isinstance(value, torch.Generator) or (numpy is not None and isinstance(value, numpy.random.RandomState)):
        return [state_now(value.get_state, value.set_state)]
    bits = value.bit_generator if numpy is not None and isinstance(value, numpy.random.Generator) else value
    if numpy is None or not isinstance(bits, numpy.random.BitGenerator):
        return None
    return [state_now(partial(getattr, bits, "state"), partial(setattr, bits, "state"))]


# ---------------------------------------------------------------------- in modules, and in what they are given


def item_state(place: dict[str, Any], key: str) -> State:
    """The value of a key in a dict, which may not be there."""

    def write(value: Any) -> None:
        if value is _ABSENT:
            place.pop(key, None)
        else:
            place[key] = value

    return state_now(partial(place.get, key, _ABSENT), write)


def training_state(modules: list[nn.Module]) -> State:
    """Whether modules are in training mode."""

    def write(training: list[bool]) -> None:
        for module, value in zip(modules, training, strict=True):
            if module.training != value:
                module.training = value

    return state_now(lambda: [module.training for module in modules], write)


def attributes_state(attributes: dict[str, Any]) -> State:
    """The attributes of a module that are not those of every module.

    Args:
        attributes: the module's ``__dict__``.
    """

    def write(own: dict[str, Any]) -> None:
        _restore_dict(attributes, {key: value for key, value in attributes.items() if key in _OF_MODULES} | own)

    own = own_attributes(attributes)
    return State(partial(own_attributes, attributes), write, without_graphs(own))


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are not those of every module."""
    return {key: value for key, value in attributes.items() if key not in _OF_MODULES}


def container_state(container: Any) -> State:
    """What is in a container: see :func:`is_container`."""
    return State(partial(_copy, container), partial(_restore, container), without_graphs(_copy(container)))


def is_container(value: Any) -> bool:
    """Whether a value can be changed in place, copied and restored."""
    return isinstance(value, (list, dict, set, deque, bytearray, array)) or _is_array(value)


def without_graphs(copied: Any) -> Any:
    """A copy that keeps no graph alive. Otherwise the graph of the last batch would keep the one before it, and so on."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.detach().requires_grad_()
        return value

    if isinstance(copied, dict):
        return {key: cut(value) for key, value in copied.items()}
    return [cut(value) for value in copied] if isinstance(copied, list) else copied


def _copy(container: Any) -> Any:
    if isinstance(container, dict):
        return dict(container.items())
    if isinstance(container, (list, deque)):
        return list(container)
    return set(container) if isinstance(container, set) else copy.copy(container)


def _restore(container: Any, copied: Any) -> None:
    """Makes a container what it was when it was copied.

    The methods are those of the container's base class, because a subclass may do more in its own. A container that has
    not changed is left alone.
    """
    if isinstance(container, dict):
        _restore_dict(container, copied)
    elif isinstance(container, set):
        if container != copied:
            set.clear(container)
            set.update(container, copied)
    elif _is_array(container):
        if container.shape != copied.shape:
            container.resize(copied.shape, refcheck=False)
        container[...] = copied
    elif isinstance(container, (bytearray, array)):
        container[:] = copied
    elif not _same_items(container, copied):
        if isinstance(container, list):
            list.__setitem__(container, slice(None), copied)
        else:
            deque.clear(container)
            deque.extend(container, copied)


def _restore_dict(container: dict[Any, Any], copied: dict[Any, Any]) -> None:
    if not (_same_items(container, copied) and _same_items(container.values(), copied.values())):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)  # the order of the keys is restored, too
        kind.update(container, copied)


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's that can be written and is in memory, not on disk."""
    numpy = sys.modules.get("numpy")
    in_memory = numpy is not None and isinstance(value, numpy.ndarray) and not isinstance(value, numpy.memmap)
    return in_memory and value.flags.writeable


def _same_items(items: Collection[Any], others: Collection[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))
