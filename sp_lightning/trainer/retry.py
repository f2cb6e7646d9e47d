"""Whether a step that failed for want of memory can be run once more as if nothing had happened.

Only a step that provably can is repeated: user code may have done anything by then, and what it did must show. So
everything that a forward usually changes is marked before it, by value where no version counts the writes; and where
something is there that cannot be marked, the step is not repeated.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.forward_state import TRUSTED
from sp_lightning.device.torch_private import forward_hooks, forward_pre_hooks, tree_leaves
from sp_lightning.engine.module_hooks import ModuleHooks
from sp_lightning.trainer.compat import MODULE_ATTRIBUTES, logged_counts, random_states, restore_random_states

# Modules of these packages keep no state in a forward but buffers, and count it.
_TRUSTED = (*TRUSTED, "peft.")
# What is compared by value, of one module or one batch, is copied up to so many bytes.
_SMALL = 2**20


class Unwatched(Exception):
    """Something that a step could change, and nobody would see it."""


class Snapshot:
    """What a forward might change, before it. What user code keeps in globals or in other objects' hands is not seen.

    Args:
        module: the LightningModule, its parameters those of the host.
        batch: the step's arguments.
    """

    def __init__(self, module: Any, batch: Any) -> None:
        self._module = module
        self._batch = batch
        self._random = random_states()
        try:
            self._before, self._unwatched = self._look(), ""
        except Unwatched as error:
            self._before, self._unwatched = {}, str(error)

    def obstacle(self) -> str:
        """Why the step cannot be repeated, in words; empty if it can."""
        if self._unwatched:
            return f"{self._unwatched} cannot be watched"
        try:
            now = self._look()
        except Unwatched as error:
            return f"{error} cannot be watched"
        return next((f"{what} had changed already" for what, before in self._before.items() if now[what] != before), "")

    def restore(self) -> None:
        """Random state is as it was."""
        restore_random_states(self._random)

    def _look(self) -> dict[str, Any]:
        module = self._module
        if not module.automatic_optimization:
            raise Unwatched("manual optimization")
        found: dict[str, Any] = {
            "the batch": [_of_batch(each) for each in tree_leaves(self._batch)],
            "what was logged": logged_counts(module.trainer),
        }
        weights = found["parameters"] = []
        for name, child in module.named_modules():
            for hook in (*forward_hooks(child).values(), *forward_pre_hooks(child).values()):
                if not isinstance(getattr(hook, "__self__", None), ModuleHooks):
                    raise Unwatched(f"what a forward hook of {name!r} does")
            weights += [(id(each), each._version) for each in child._parameters.values() if each is not None]
            found.update(_state(name, child))
        return found


def _state(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    kind = type(module)
    trusted = kind.__module__.startswith(_TRUSTED)
    if trusted and not module._buffers:
        return
    name = f"{name} ({kind.__qualname__})" if name else kind.__qualname__
    if module._buffers:
        buffers = [each for each in module._buffers.values() if each is not None]
        yield f"buffers of {name}", [_Value(each) if not trusted else _version(each) for each in buffers]
    if hasattr(kind, "update_count"):  # a metric, whose states are attributes
        yield f"the metric {name}", getattr(module, "update_count")  # noqa: B009
    elif not trusted:
        pickler = _Pickler(f"attributes of {name}")
        own = {key: value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES}
        yield f"attributes of {name}", pickler.values(own)


def _of_batch(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _version(value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    raise Unwatched(f"a batch with a {type(value).__name__} in it")


def _version(tensor: Tensor) -> Any:
    """Which tensor it is, and how often it was written; in inference mode nobody counts, so its values."""
    return _Value(tensor) if tensor.is_inference() else (id(tensor), tensor._version)


class _Value:
    """A tensor compared by its values. The copy stays on its device, and nobody waits for it."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.nbytes > _SMALL:
            raise Unwatched(f"a tensor of shape {tuple(tensor.shape)} whose writes nobody counts")
        self._tensor = tensor
        self._values = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and other._tensor is self._tensor and torch.equal(self._values, other._values)


class _Bounded(io.BytesIO):
    """A file that is not to become large."""

    def write(self, data: Any) -> int:
        if self.tell() > _SMALL:
            raise Unwatched("so much")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Turns attributes into something that can be compared: bytes, and the tensors among them by their values."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._file = _Bounded()
        self._tensors: list[_Value] = []
        super().__init__(self._file)

    def persistent_id(self, value: Any) -> Any:
        """Tensors are kept aside, modules have their own turn."""
        if isinstance(value, Tensor):
            self._tensors.append(_Value(value))
            return len(self._tensors)
        return ("module", id(value)) if isinstance(value, nn.Module) else None

    def values(self, attributes: dict[str, Any]) -> tuple[bytes, list[_Value]]:
        """Of the attributes.

        Raises:
            Unwatched: some cannot be pickled, or are large.
        """
        try:
            self.dump(attributes)
        except Exception as error:  # whatever an object raises that cannot be pickled
            raise Unwatched(self._what) from error
        return self._file.getvalue(), self._tensors
