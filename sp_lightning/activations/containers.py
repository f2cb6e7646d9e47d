"""Copies of Python's containers, and how a container becomes again what it was."""

from __future__ import annotations

import operator
import sys
from array import array
from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Any

from torch import Tensor, nn

from sp_lightning.device.torch_private import COMPILED_CALL, RNN_WEIGHTS

# Attributes of modules that forwards do not touch, and the lists of weights that nn.RNNBase makes anew whenever it is given
# other weights.
_OF_MODULES = frozenset(vars(nn.Module())) | {"forward", COMPILED_CALL, *RNN_WEIGHTS}


def is_container(value: Any) -> bool:
    """Whether a value can be changed in place, copied and restored."""
    return isinstance(value, (list, dict, set, deque, bytearray, array)) or _is_array(value)


def own_attributes(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a module that are not those of every module."""
    return {key: value for key, value in attributes.items() if key not in _OF_MODULES}


def copy_container(container: Any) -> Any:
    """A shallow copy. Of a module's ``__dict__``, only its own attributes are copied."""
    if isinstance(container, dict):
        return own_attributes(container) if _is_of_module(container) else dict(container.items())
    if isinstance(container, array):
        return container[:]
    if isinstance(container, (list, set, deque, bytearray)):
        return {list: list, set: set, deque: list, bytearray: bytes}[_base(container)](container)
    return container.copy()


def without_graphs(copied: Any) -> Any:
    """A copy that keeps no graph alive. Otherwise the graph of the last batch would keep the one before it, and so on."""

    def cut(value: Any) -> Any:
        if isinstance(value, Tensor) and value.grad_fn is not None:
            return value.detach().requires_grad_()
        return value

    if isinstance(copied, dict):
        tensors = {key: cut(value) for key, value in copied.items() if isinstance(value, Tensor)}
        return {**copied, **tensors} if tensors else copied
    return [cut(value) for value in copied] if isinstance(copied, list) else copied


def restore_container(container: Any, copied: Any) -> None:
    """Makes a container what it was when it was copied.

    The methods are those of the container's base class, because a subclass may do more in its own. A container that has
    not changed is left alone.
    """
    if _is_array(container):
        if container.shape != copied.shape:
            container.resize(copied.shape, refcheck=False)
        container[...] = copied
    elif isinstance(container, dict):
        _restore_dict(container, copied)
    elif isinstance(container, (bytearray, array)):
        container[:] = copied
    elif isinstance(container, set):
        if container != copied:
            set.clear(container)
            set.update(container, copied)
    elif not _same_items(container, copied):
        if isinstance(container, list):
            list.__setitem__(container, slice(None), copied)
        else:
            deque.clear(container)
            deque.extend(container, copied)


def _restore_dict(container: dict[Any, Any], copied: dict[Any, Any]) -> None:
    if _is_of_module(container):
        copied = {**{key: value for key, value in container.items() if key in _OF_MODULES}, **copied}
    if not (_same_items(container, copied) and _same_items(container.values(), copied.values())):
        kind = OrderedDict if isinstance(container, OrderedDict) else dict
        kind.clear(container)  # the order of the keys is restored, too
        kind.update(container, copied)


def _is_of_module(container: dict[Any, Any]) -> bool:
    """Whether a dict is the ``__dict__`` of a module."""
    return "_parameters" in container


def _is_array(value: Any) -> bool:
    """Whether it is an array of NumPy's that can be written and is in memory, not on disk."""
    numpy = sys.modules.get("numpy")
    return (
        numpy is not None
        and isinstance(value, numpy.ndarray)
        and not isinstance(value, numpy.memmap)
        and value.flags.writeable
    )


def _base(container: Any) -> Any:
    return next(kind for kind in (list, set, deque, bytearray) if isinstance(container, kind))


def _same_items(items: Collection[Any], others: Collection[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))
