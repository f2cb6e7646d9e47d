"""Values of small tensors in a dry run: image sizes, token ids, positions, and masks that are computed from them.

A vision-language model reads these values to find the patches of its images and their positions in the text. The tensors are
small, so that they can have memory in a dry run. All other tensors have none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sp_lightning.core.torch_compat.private import (
    FakeTensor,
    TorchDispatchMode,
    disable_dispatch_modes,
    tree_leaves,
    tree_map_only,
    writes_arguments,
)
from sp_lightning.tools.planner.fake import VALUES_NEEDED

# The largest number of elements of integer and bool tensors, and of floating-point tensors (for example positions between
# pixels). Larger tensors are attention masks, images and activations, whose values models do not read.
_MOST_INTEGERS = 2**24
_MOST_FLOATS = 2**16
# Operators that return a number, or a tensor whose shape depends on values.
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


Result = TypeVar("Result")


def answered(run: Callable[[], Result], *, at_once: bool = False) -> Result:
    """Calls a function without values. If the function reads values, calls it again with the values of small tensors.

    Args:
        run: the function. Call ``answered`` inside of :func:`~sp_lightning.tools.planner.fake.fake_tensors`.
        at_once: True to have the values of small tensors in the first call already. Use this if code that reads values raises
            other errors than :data:`~sp_lightning.tools.planner.fake.VALUES_NEEDED`.
    """
    if not at_once:
        with suppress(*VALUES_NEEDED):
            return run()
    with known_values():
        return run()


@contextmanager
def known_values() -> Iterator[None]:
    """In this context, a small tensor has values if all tensors from which it was computed have values.

    Small tensors that are created in this context have values, except random ones. Weights have no values. Operators that read
    values work if the values are known. Enter this context inside of :func:`~sp_lightning.tools.planner.fake.fake_tensors`.
    """
    with _Numbers(), _KnownValues():
        yield


class _Numbers(TorchFunctionMode):
    """Replaces tensors in the list that ``torch.tensor`` takes by numbers, because ``torch.tensor`` would read their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(Tensor, Tensor.item, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class _KnownValues(TorchDispatchMode):
    """Computes the values of small tensors, beside the fake tensors of the dry run."""

    def __init__(self) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:  # with a mask as index, the shape of its result would depend on values
            args = (args[0], self._without_masks(args[1]))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        known = all(self._value(tensor) is not None for tensor in given)
        if known and any(tag in func.tags for tag in _READING):
            return tree_map_only(Tensor, self._without_memory, self._computed(func, args, kwargs))
        result = func(*args, **kwargs)
        results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if known and torch.Tag.nondeterministic_seeded not in func.tags and all(map(_may_be_known, results)):
            computed = [leaf for leaf in tree_leaves(self._computed(func, args, kwargs)) if isinstance(leaf, Tensor)]
            self._values.update(zip(results, computed, strict=True))
        elif writes_arguments(func):
            self._forget(results)
        return result

    def _value(self, tensor: Tensor) -> Tensor | None:
        """Returns a tensor with the same values and with memory; None if the values are unknown."""
        if isinstance(tensor, FakeTensor):
            return self._values.get(tensor)
        return tensor if _may_be_known(tensor) else None

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns the result of an operator for arguments with known values."""
        real = tree_map_only(Tensor, self._value, (args, kwargs))
        with disable_dispatch_modes():
            return func(*real[0], **real[1])

    def _without_memory(self, value: Tensor) -> Tensor:
        """Returns a new tensor of the dry run, and records its values."""
        tensor = torch.empty(value.shape, dtype=value.dtype, device="cpu")
        self._values[tensor] = value
        return tensor

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns indices in which each mask with known values is replaced by the positions of its true elements."""
        replaced: list[Tensor | None] = []
        for index in indices:
            if index is None or index.dtype is not torch.bool or (mask := self._value(index)) is None:
                replaced.append(index)
                continue
            with disable_dispatch_modes():
                places = mask.nonzero().unbind(1)
            replaced.extend(map(self._without_memory, places))
        return replaced

    def _forget(self, written: Sequence[Tensor]) -> None:
        """Removes the values of tensors to which unknown values were written, and of all tensors with the same memory."""
        values = [value for tensor in written if (value := self._values.get(tensor)) is not None]
        memory = {value.untyped_storage().data_ptr() for value in values}
        for tensor, value in [*self._values.items()] if memory else ():
            if value.untyped_storage().data_ptr() in memory:
                del self._values[tensor]


def _may_be_known(tensor: Tensor) -> bool:
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_FLOATS if floating else _MOST_INTEGERS)
