"""Values of small tensors in a dry run: sizes of images, ids of tokens, positions, and masks that are made from them.

A model of vision and language reads them to tell how its images are cut into patches and where these stand in the text. They
are small, so that they can have memory where nothing else has any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from sp_lightning.planner.fake import VALUES_NEEDED
from sp_lightning.torch_compat.private import (
    FakeTensor,
    TorchDispatchMode,
    disable_dispatch_modes,
    tree_leaves,
    tree_map_only,
    writes_arguments,
)

# Whole numbers and truth values, and numbers with a fraction, such as places between pixels. What is larger is a mask of
# attention between all tokens, an image, or an activation, and nothing asks for its values.
_MOST_NUMBERS, _MOST_FRACTIONS = 2**24, 2**16
# What these return depends on values: a number, or a tensor of which only values tell the shape.
_READING = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


Result = TypeVar("Result")


def answered(run: Callable[[], Result], *, at_once: bool = False) -> Result:
    """Runs without values, and if something asks for values, again with those of small tensors.

    Args:
        run: what is run, inside of :func:`~sp_lightning.planner.fake.fake_tensors`.
        at_once: small tensors have values from the start, because what asks for them fails in ways of its own.
    """
    if not at_once:
        with suppress(*VALUES_NEEDED):
            return run()
    with known_values():
        return run()


@contextmanager
def known_values() -> Iterator[None]:
    """In this context small tensors have values, too, where all that they come from is known: made here, or no weight.

    To be entered inside of :func:`~sp_lightning.planner.fake.fake_tensors`. What asks for such a value is answered.
    """
    with _Numbers(), _KnownValues():
        yield


class _Numbers(TorchFunctionMode):
    """Lets ``torch.tensor`` ask for the values of numbers in a list. It would read their memory."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.tensor, torch.as_tensor) and args and isinstance(args[0], (list, tuple)):
            args = (tree_map_only(Tensor, Tensor.item, args[0]), *args[1:])
        return func(*args, **(kwargs or {}))


class _KnownValues(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten.index.Tensor:
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
        """A tensor with the same values and with memory, if they are known."""
        if isinstance(tensor, FakeTensor):
            return self._values.get(tensor)
        return tensor if _may_be_known(tensor) else None

    def _computed(self, func: Any, args: Any, kwargs: Any) -> Any:
        real = tree_map_only(Tensor, self._value, (args, kwargs))
        with disable_dispatch_modes():
            return func(*real[0], **real[1])

    def _without_memory(self, value: Tensor) -> Tensor:
        """A tensor of the dry run that has a value."""
        tensor = torch.empty(value.shape, dtype=value.dtype)
        self._values[tensor] = value
        return tensor

    def _without_masks(self, indices: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Indices in which each mask whose values are known is replaced by the places where it is true."""
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
        """Forgets the values of tensors, and of all others with the same memory, because something unknown was written there."""
        values = [value for tensor in written if (value := self._values.get(tensor)) is not None]
        memory = {value.untyped_storage().data_ptr() for value in values}
        for tensor, value in [*self._values.items()] if memory else ():
            if value.untyped_storage().data_ptr() in memory:
                del self._values[tensor]


def _may_be_known(tensor: Tensor) -> bool:
    fractions = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    return tensor.numel() <= (_MOST_FRACTIONS if fractions else _MOST_NUMBERS)
