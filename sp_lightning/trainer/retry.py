"""Whether a step that ran out of device memory can be run once more as if nothing had happened.

User code may have done anything by then, and what it did must show. So a step is repeated only if it can be shown to
have changed nothing: everything that a forward usually changes is noted before the step and compared after it, by
versions where torch counts the writes, by values elsewhere. If there is something that cannot be noted, the step is not
repeated.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from sp_lightning.activations.snapshot import TRUSTED
from sp_lightning.device.torch_private import forward_hooks, forward_pre_hooks, tree_leaves
from sp_lightning.engine.module_hooks import Hook
from sp_lightning.trainer.compat import MODULE_ATTRIBUTES, logged_counts, random_states, restore_random_states

# In a forward, modules of these packages change no state but buffers, whose writes torch counts.
_TRUSTED = (*TRUSTED, "peft.")
# The most bytes of one tensor, and of the attributes of one module, that are copied to compare values.
_SMALL = 2**20


class Unwatched(Exception):
    """A step could change something without anybody seeing it. The message names it."""


class Snapshot:
    """Everything that a forward might change, as it is before the forward.

    Global variables, and objects that neither the module nor the batch holds, are not seen.

    Args:
        module: the LightningModule, with its parameters on the host.
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
        """Returns why the step cannot be repeated, in words; an empty string if it can."""
        if self._unwatched:
            return f"{self._unwatched} cannot be watched"
        try:
            now = self._look()
        except Unwatched as error:
            return f"{error} cannot be watched"
        return next((f"{what} had changed already" for what, before in self._before.items() if now[what] != before), "")

    def restore(self) -> None:
        """Sets the random number generators back to what they were; nothing else has changed."""
        restore_random_states(self._random)

    def _look(self) -> dict[str, Any]:
        module = self._module
        if not module.automatic_optimization:
            raise Unwatched("manual optimization")
        state: dict[str, Any] = {
            "the batch": [_of_batch(leaf) for leaf in tree_leaves(self._batch)],
            "what was logged": logged_counts(module.trainer),
        }
        weights = state["parameters"] = []
        for name, child in module.named_modules():
            for hook in (*forward_hooks(child).values(), *forward_pre_hooks(child).values()):
                if not isinstance(hook, Hook):
                    raise Unwatched(f"what a forward hook of {name!r} does")
            weights += [(id(p), p._version) for p in child._parameters.values() if p is not None]
            state.update(_state(name, child))
        return state


def _state(name: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields what a module may change by itself, named: its buffers and its attributes."""
    kind = type(module)
    trusted = kind.__module__.startswith(_TRUSTED)
    if trusted and not module._buffers:
        return
    name = f"{name} ({kind.__qualname__})" if name else kind.__qualname__
    if module._buffers:
        buffers = [buffer for buffer in module._buffers.values() if buffer is not None]
        yield f"buffers of {name}", [_version(buffer) if trusted else _Value(buffer) for buffer in buffers]
    # A metric of torchmetrics: its states are attributes, and it counts their updates.
    if hasattr(kind, "update_count"):
        yield f"the metric {name}", getattr(module, "update_count")  # noqa: B009
    elif not trusted:
        pickler = _Pickler(f"attributes of {name}")
        attributes = {key: value for key, value in vars(module).items() if key not in MODULE_ATTRIBUTES}
        yield f"attributes of {name}", pickler.values(attributes)


def _of_batch(value: Any) -> Any:
    if isinstance(value, Tensor):
        return _version(value)
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    raise Unwatched(f"a batch with a {type(value).__name__} in it")


def _version(tensor: Tensor) -> Any:
    """Notes which tensor it is and how often it was written, or its values if it was made in inference mode.

    torch counts no writes of inference tensors.
    """
    return _Value(tensor) if tensor.is_inference() else (id(tensor), tensor._version)


class _Value:
    """A tensor that is compared by its values. The copy is made on its device, without waiting for it."""

    def __init__(self, tensor: Tensor) -> None:
        if tensor.nbytes > _SMALL:
            raise Unwatched(f"a tensor of shape {tuple(tensor.shape)} whose writes nobody counts")
        self._tensor = tensor
        self._values = tensor.detach().clone()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Value) and other._tensor is self._tensor and torch.equal(self._values, other._values)


class _Bounded(io.BytesIO):
    """A file in memory that refuses to become large."""

    def write(self, data: Any) -> int:
        if self.tell() > _SMALL:
            raise Unwatched("so much")
        return super().write(data)


class _Pickler(pickle.Pickler):
    """Turns attributes into something that can be compared: bytes, and the values of the tensors among them."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._file = _Bounded()
        self._tensors: list[_Value] = []
        super().__init__(self._file)

    def persistent_id(self, value: Any) -> Any:
        """Keeps tensors aside, and leaves out modules: each of them has its own turn."""
        if isinstance(value, Tensor):
            self._tensors.append(_Value(value))
            return len(self._tensors)
        return ("module", id(value)) if isinstance(value, nn.Module) else None

    def values(self, attributes: dict[str, Any]) -> tuple[bytes, list[_Value]]:
        """Returns the attributes as bytes, and the tensors among them.

        Raises:
            Unwatched: an attribute cannot be pickled, or is large.
        """
        try:
            self.dump(attributes)
        except Exception as error:  # an object that cannot be pickled may raise anything
            raise Unwatched(self._what) from error
        return self._file.getvalue(), self._tensors
