"""A forward whose inner results are not kept: they are computed once more in backward, by torch's own checkpoint.

torch restores the random state and autocast. What it leaves to the user is done here: a forward that is run twice shows
once. Whatever it changes in its module (BatchNorm's statistics, spectral norms, counters, lists) and in the objects that
it is given (a cache of keys and values) is, for the second run, what it was before the first, and afterwards as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import _unsafe_preserve_version_counter
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from sp_lightning.memory import normal_mode, unseen

# A module of these packages keeps no state in a forward but its buffers.
TRUSTED = ("torch.nn.modules.", "torchvision.models.", "transformers.models.", "timm.", "peft.")
_MODULES = frozenset(vars(nn.Module()))  # what every module has; forwards do not touch it
_MISSING = object()
# A cache of keys and values has a list of objects, one for each layer, that have tensors.
_DEEP = 3


def recomputed(
    module: nn.Module,
    forward: Callable[..., Any],
    again: Callable[[Any], AbstractContextManager[None]],
    args: Sequence[Any],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module's forward, of which autograd keeps the inputs only.

    The second run is seen by hooks on inner modules, prints, files and global variables: everything outside of the
    module and its arguments.

    Args:
        module: whose state it is.
        forward: its forward.
        again: a context for the second run, in backward; called with the positional arguments.
    """
    given: Any = (tuple(args), kwargs)
    leaves, spec = tree_flatten(given, is_leaf=_is_leaf)
    changes: Changes | None = None

    def run(*leaves: Any) -> Any:
        nonlocal changes, given
        if changes is None:
            changes, (args, kwargs), given = Changes(module, leaves), given, None
            output = forward(*args, **kwargs)
            changes.keep()
            return output
        # Lists and dicts are as they were given; what the forward adds to them is in those of the first run.
        args, kwargs = tree_unflatten(list(leaves), spec)
        with changes.undone(), again(args):
            return forward(*args, **kwargs)

    return checkpoint(run, *leaves, use_reentrant=False)


def _is_leaf(value: Any) -> bool:
    """Whether checkpoint keeps a value as it is; objects are not taken apart, whoever has told torch how to."""
    return type(value) not in (tuple, list, dict) and not (isinstance(value, tuple) and hasattr(value, "_fields"))


class Changes:
    """What a forward changes in Python objects and in buffers, between here and :meth:`keep`.

    Args:
        module: it and those inside are looked at.
        given: arguments; objects that are no tensors are looked at, and what they hold.
    """

    def __init__(self, module: nn.Module, given: Sequence[Any]) -> None:
        self._containers: dict[int, tuple[Any, Any]] = {}  # dicts and lists, each with a copy
        self._tensors: dict[int, tuple[Tensor, Tensor, int, bool]] = {}  # with a copy, the version, whether that counts
        for child in module.modules():
            uncounted = isinstance(child, _NormBase)  # its kernels write statistics and tell nobody
            self._containers[id(child._buffers)] = child._buffers, child._buffers.copy()
            for buffer in child._buffers.values():
                if buffer is not None:
                    self._copy(buffer, counted=not uncounted)
            if not type(child).__module__.startswith(TRUSTED):
                attributes = vars(child)
                own = {key: value for key, value in attributes.items() if key not in _MODULES}
                self._containers[id(attributes)] = attributes, own
                for value in own.values():
                    self._look(value, objects=1)
        for value in given:
            if not isinstance(value, Tensor):
                self._look(value, objects=_DEEP)

    def keep(self) -> None:
        """The forward is over: forget what it did not change."""
        self._containers = {key: each for key, each in self._containers.items() if _changed(*each)}
        self._tensors = {key: each for key, each in self._tensors.items() if not each[3] or each[0]._version != each[2]}

    @contextmanager
    def undone(self) -> Iterator[None]:
        """While this is active everything is as it was before; then as it is now again."""
        tensors = tuple(tensor for tensor, *_ in self._tensors.values())
        with _unsafe_preserve_version_counter(tensors):
            now = [(container, _copy_of(container, before)) for container, before in self._containers.values()]
            values = [(tensor, _clone(tensor)) for tensor in tensors]
            for container, before in self._containers.values():
                _restore(container, before)
            for tensor, before, *_ in self._tensors.values():
                _write(tensor, before)
            try:
                yield
            finally:
                for tensor, value in values:
                    _write(tensor, value)
                for container, state in now:
                    _restore(container, state)

    def _copy(self, tensor: Tensor, *, counted: bool) -> None:
        if id(tensor) not in self._tensors:
            self._tensors[id(tensor)] = tensor, _clone(tensor), tensor._version, counted

    def _look(self, value: Any, *, objects: int) -> None:
        """At what can be changed in place, and into it, through so many ``objects``."""
        if isinstance(value, Tensor):
            if not isinstance(value, nn.Parameter) and not value.requires_grad and value.layout is torch.strided:
                self._copy(value, counted=True)
        elif isinstance(value, (list, dict, set)):
            self._look_into(value, objects)
        elif isinstance(value, tuple):
            for each in value:
                self._look(each, objects=objects)
        elif (
            objects and hasattr(value, "__dict__") and not isinstance(value, (type, nn.Module)) and not callable(value)
        ):
            self._look_into(vars(value), objects - 1)

    def _look_into(self, container: Any, objects: int) -> None:
        if id(container) not in self._containers:
            self._containers[id(container)] = container, container.copy()
            for each in list(container.values() if isinstance(container, dict) else container):
                self._look(each, objects=objects)


def _changed(container: Any, before: Any) -> bool:
    if isinstance(container, dict):
        return any(container.get(key, _MISSING) is not value for key, value in before.items()) or _added(
            container, before
        )
    if isinstance(container, list):
        return len(container) != len(before) or any(a is not b for a, b in zip(container, before, strict=True))
    return bool(container != before)


def _added(container: dict[Any, Any], before: dict[Any, Any]) -> bool:
    return any(key not in before and key not in _MODULES for key in container)


def _copy_of(container: Any, before: Any) -> Any:
    if isinstance(container, dict) and "_parameters" in container:  # a module's: its own attributes only
        return {key: value for key, value in container.items() if key not in _MODULES}
    return container.copy()


def _restore(container: Any, state: Any) -> None:
    if isinstance(container, list):
        container[:] = state
    elif isinstance(container, set):
        container.clear()
        container.update(state)
    else:
        for key in [key for key in container if key not in state and key not in _MODULES]:
            del container[key]
        container.update(state)


def _clone(tensor: Tensor) -> Tensor:
    with normal_mode(), unseen(), torch.no_grad():
        return tensor.detach().clone()


def _write(tensor: Tensor, value: Tensor) -> None:
    with normal_mode(), unseen(), torch.no_grad():
        tensor.copy_(value)
