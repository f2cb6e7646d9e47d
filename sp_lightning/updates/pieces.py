"""Updates weights piece by piece: values that are made for one piece are used while they are in the processor's caches.

In mixed precision a layer's update makes three passes over host memory: gradients are widened to float32, the optimizer steps,
and new weights are cast for the next fetch. A compiled kernel does all of it in a single pass. Without one, each pass over a
piece finds in the caches what the pass before has left there, and a widened gradient never reaches memory.

torch's fused kernels treat each element by itself. So the pieces get the bits of the whole if each begins where a vector of the
processor begins.

See "Note: fused operator in pieces" in ``updates/__init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sp_lightning.device.host_kernels import HALVES, Operands
from sp_lightning.layers.narrow_gradient import Change, Factor, NarrowGradient, narrow_and_changes
from sp_lightning.registry import host_kernels
from sp_lightning.torch_compat.private import FUSED_STEPS, second_level_cache


class InPieces(TorchFunctionMode):
    """While this mode is active, an optimizer's fused step runs piece by piece.

    torch's own code makes the optimizer's state, counts its steps and reads its settings, all of it for whole parameters.
    The fused operator that it calls in the end is called for each piece instead.

    Args:
        casts: by the ``id`` of a parameter, host memory that receives its new values in another dtype.
        clips: by the ``id`` of a parameter, what clips its gradient, but for narrow ones: those have their changes with them.
        others: by the ``id`` of a parameter, what updates it in place of torch's operator.
        elements: of a piece, a multiple of 512; :func:`piece_size` if it is not given.
    """

    def __init__(
        self,
        casts: Mapping[int, Tensor],
        clips: Mapping[int, Change],
        others: Mapping[int, UpdateOne] = MappingProxyType({}),
        *,
        elements: int | None = None,
    ) -> None:
        super().__init__()
        self._casts = casts
        self._clips = clips
        self._others = others
        self._kernels = host_kernels()
        self._elements = elements or piece_size(torch.get_num_threads())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FUSED_STEPS:
            # In the background, subclasses of Tensor are not asked. A narrow gradient has to be.
            lists = (each for each in args if type(each) is list)
            if any(type(each) is NarrowGradient for each in chain(args, *lists)):
                return NarrowGradient.__torch_function__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        step, together, size = partial(func, **(kwargs or {})), list[Update](), 0
        for weight, gradient, *state in zip(*(column or [None] * len(args[0]) for column in args), strict=True):
            came, changes = narrow_and_changes(gradient)
            if id(weight) in self._clips:
                changes = (*changes, self._clips[id(weight)])
            update = Update(weight.detach(), came, self._casts.get(id(weight)), state, changes)
            if (other := self._others.get(id(weight))) is not None:
                other(func, kwargs or {}, update)
                continue
            if (update.several_walks or weight.dtype in HALVES) and update.contiguous:
                if self._in_one_pass(func, kwargs or {}, update):
                    continue
                if update.several_walks and weight.numel() > self._elements:
                    self._step_in_pieces(step, update)
                    continue
            together.append(update)
            size += weight.numel()
            if size >= self._elements:
                self._step_together(step, together)
                together, size = [], 0
        if together:
            self._step_together(step, together)
        return None

    def _in_one_pass(self, operator: Callable[..., Any], settings: Mapping[str, Any], update: Update) -> bool:
        """Runs a compiled kernel, if there is one. Returns True if it has run."""
        if update.weight.dtype in HALVES:  # torch also rounds a changed gradient to 16 bits, so it is changed in place
            for change in update.changes:
                change(update.gradient)
            update.changes = ()
        changes = update.changes
        factors = [change.number for change in changes if isinstance(change, Factor)]
        # A gradient that is wide already is changed in place, because user code may read it.
        if len(factors) < len(changes) or (changes and not update.widens):
            return False
        return self._kernels.update(operator, settings, update, factors)

    def _step_in_pieces(self, step: Callable[..., Any], update: Update) -> None:
        # The loop is short, because after each piece the processor's caches are full of the piece, and Python is slow.
        for weight, came, gradient, cast, arguments in update.cut(self._elements):
            if came is not gradient:
                gradient.copy_(came)
            for change in update.changes:
                change(gradient)
            step(*arguments)
            if cast is not None:
                cast.copy_(weight)

    def _step_together(self, step: Callable[..., Any], updates: Sequence[Update]) -> None:
        gradients = [
            torch.empty_like(each.weight).copy_(each.gradient) if each.widens else each.gradient for each in updates
        ]
        for each, gradient in zip(updates, gradients, strict=True):
            for change in each.changes:
                change(gradient)
        # Either all parameters have a column, or none has.
        columns = (
            [] if column[0] is None else [*column] for column in zip(*(each.state for each in updates), strict=True)
        )
        step([each.weight for each in updates], gradients, *columns)
        for each in updates:
            if each.cast is not None:
                each.cast.copy_(each.weight)


@dataclass
class Update(Operands):
    """The operands of one parameter's update, and the changes of its gradient before it."""

    changes: Sequence[Change]

    @property
    def widens(self) -> bool:
        """True if the gradient has a lower dtype than the weight."""
        return self.gradient.dtype is not self.weight.dtype

    @property
    def several_walks(self) -> bool:
        """True if torch's operators pass over some operand more than once."""
        return self.widens or self.cast is not None or bool(self.changes)

    @property
    def contiguous(self) -> bool:
        """True if elements with the same index lie at the same place of all tensors."""
        return all(
            each is None or each.is_contiguous() for each in (self.weight, self.gradient, self.cast, *self.state)
        )

    def cut(self, elements: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None, list[list[Tensor]]]]:
        """Cuts the update into pieces.

        Returns:
            For each piece its weight, its gradient as it came, its gradient in the weight's dtype, its cast, and the
            arguments of the fused operator. A number of steps is the same for all: torch has counted this one already.
        """
        shape, weights = self.weight.shape, self.weight.view(-1).split(elements)

        def parts(tensor: Tensor | None) -> Sequence[Any]:
            cut = tensor is not None and tensor.shape == shape
            return tensor.view(-1).split(elements) if cut else [tensor] * len(weights)  # type: ignore[union-attr]

        came = gradients = parts(self.gradient)
        if self.widens:
            wide = torch.empty(elements, dtype=self.weight.dtype, device="cpu")
            gradients = [wide] * (len(weights) - 1) + [wide[: weights[-1].numel()]]
        columns = (weights, gradients, *map(parts, self.state))
        arguments = [[[] if each is None else [each] for each in row] for row in zip(*columns, strict=True)]
        return list(zip(weights, came, gradients, parts(self.cast), arguments, strict=True))


UpdateOne = Callable[[Callable[..., Any], Mapping[str, Any], Update], None]
"""Updates one parameter in place of a fused operator: it is given the operator, its keyword arguments, and the update."""


@cache
def piece_size(threads: int) -> int:
    """Returns the elements of a piece, a power of two, whose new weights are still in the caches when they are cast.

    A thread's share of weight, gradient and two tensors of state fills half of its second-level cache. Measuring several sizes
    would not be better: a quick measurement fits into a large third-level cache, where every size looks good.

    Args:
        threads: the number of threads of the calling thread's operators.
    """
    share = (second_level_cache() or _USUAL_CACHE) // (2 * 4 * 4)
    return 1 << max(share * threads, 512).bit_length() - 1


_USUAL_CACHE = 1 << 20
"""Bytes of a core's second-level cache if the system does not report them."""
