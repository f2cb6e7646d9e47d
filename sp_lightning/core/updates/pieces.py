"""Updates weights piece by piece, so that values computed for one piece are used while they are in the processor's caches.

In mixed precision a layer's update makes three passes over host memory: gradients are widened to float32, the optimizer steps,
and new weights are cast for the next fetch. Here all three passes are made over one piece before the next piece begins. The
second and the third find the piece in the caches, and the widened gradient is never written to memory.

torch's fused kernels compute each element by itself. So the results are bit-identical if each piece begins at a multiple of the
processor's vector length.

See "Note: fused operator in pieces" in ``updates/__init__``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from sp_lightning.core.torch_compat.private import FUSED_STEPS, second_level_cache
from sp_lightning.core.weights.gradient_roles import Change, NarrowGradient, narrow_and_changes


class InPieces(TorchFunctionMode):
    """While this mode is active, an optimizer's fused step runs piece by piece.

    torch's own code makes the optimizer's state, counts its steps and reads its settings, all of it for whole parameters.
    The fused operator that it calls in the end is called for each piece instead.

    Args:
        casts: by the ``id`` of a parameter, host memory that receives its new values in another dtype.
        clips: by the ``id`` of a parameter, the function that clips its gradient. Narrow gradients (in a lower dtype than the
            weight) are not among them: they store their changes themselves.
        elements: the number of elements of a piece, a multiple of 512; None for :func:`piece_size`.
    """

    def __init__(
        self,
        casts: Mapping[int, Tensor],
        clips: Mapping[int, Change],
        *,
        elements: int | None = None,
    ) -> None:
        super().__init__()
        self._casts = casts
        self._clips = clips
        self._elements = elements or piece_size(torch.get_num_threads())

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FUSED_STEPS:
            # In the background torch's dispatch to subclasses of Tensor is off. A narrow gradient needs it: this calls its class.
            lists = (each for each in args if type(each) is list)
            if any(type(each) is NarrowGradient for each in chain(args, *lists)):
                return NarrowGradient.__torch_function__(func, types, args, kwargs)
            return func(*args, **(kwargs or {}))
        self._run_fused_step(func, args, kwargs or {})
        return None

    def _run_fused_step(self, operator: Callable[..., Any], columns: Sequence[Any], settings: dict[str, Any]) -> None:
        """Runs a fused operator of torch, for each parameter in the best way.

        Args:
            operator: the operator.
            columns: its positional arguments: lists with an entry for each parameter (weights, gradients, state), or empty lists.
            settings: its keyword arguments.
        """
        step = partial(operator, **settings)
        small: list[Update] = []  # one call of the operator steps several small parameters
        small_elements = 0
        count = len(columns[0])
        for weight, gradient, *state in zip(*(column or [None] * count for column in columns), strict=True):
            stored, changes = narrow_and_changes(gradient)
            if id(weight) in self._clips:
                changes = (*changes, self._clips[id(weight)])
            update = Update(weight.detach(), stored, self._casts.get(id(weight)), state, changes)
            # A step without widening, changes and a cast is one pass already.
            if update.needs_several_passes and update.contiguous and weight.numel() > self._elements:
                self._step_in_pieces(step, update)
                continue
            small.append(update)  # also a large update for which torch's operator alone is best
            small_elements += weight.numel()
            if small_elements >= self._elements:
                self._step_together(step, small)
                small, small_elements = [], 0
        if small:
            self._step_together(step, small)

    def _step_in_pieces(self, step: Callable[..., Any], update: Update) -> None:
        """Steps a large parameter piece by piece: widens and changes its gradient, steps, and casts the new weight."""
        # The loop does little in Python: after each piece the caches are full of tensors, so the interpreter itself is slow.
        for weight, stored, gradient, cast, arguments in update.cut(self._elements):
            if stored is not gradient:
                gradient.copy_(stored)
            for change in update.changes:
                change(gradient)
            step(*arguments)
            if cast is not None:
                cast.copy_(weight)

    def _step_together(self, step: Callable[..., Any], updates: Sequence[Update]) -> None:
        """Steps parameters with one call of the operator. Each change of gradients, and the casts, are separate passes."""
        gradients = [
            torch.empty_like(each.weight).copy_(each.gradient) if each.widens else each.gradient for each in updates
        ]
        for each, gradient in zip(updates, gradients, strict=True):
            for change in each.changes:
                change(gradient)
        columns = [list(column) for column in zip(*(each.state for each in updates), strict=True)]
        # The operator takes an empty list for state that the optimizer does not have. All parameters have the same state or none.
        columns = [[] if column[0] is None else column for column in columns]
        step([each.weight for each in updates], gradients, *columns)
        for each in updates:
            if each.cast is not None:
                each.cast.copy_(each.weight)


def mode_for(
    parameters: Iterable[Tensor],
    casts: Mapping[int, Tensor],
    clips: Mapping[int, Change],
) -> AbstractContextManager[Any]:
    """Returns the context in which the step of these parameters runs: :class:`InPieces` if the step needs it.

    A mode that intercepts torch's functions lengthens a small fused step by a third, because torch's code calls many of them.
    A step without casts, clipping and narrow gradients is one pass of torch's operator already.
    """
    if casts or clips or any(type(each.grad) is NarrowGradient for each in parameters):
        return InPieces(casts, clips)
    return nullcontext()


@dataclass
class Update:
    """The tensors that the update of one parameter reads and writes, all of them on the host.

    Attributes:
        weight: the values, which are updated in place.
        gradient: in the weight's dtype or a lower one.
        cast: receives the new values in its own dtype; None if there is no cast.
        state: the operator's arguments that follow the gradients: optimizer state of the weight's shape, which is updated in
            place, and the step number. None for state that the optimizer does not have.
        changes: functions that change the gradient before the update, for example unscaling and clipping.
    """

    weight: Tensor
    gradient: Tensor
    cast: Tensor | None
    state: Sequence[Tensor | None]
    changes: Sequence[Change]

    @property
    def widens(self) -> bool:
        """True if the gradient has a lower dtype than the weight."""
        return self.gradient.dtype is not self.weight.dtype

    @property
    def needs_several_passes(self) -> bool:
        """True if torch's operators would read or write some operand more than once."""
        return self.widens or self.cast is not None or bool(self.changes)

    @property
    def contiguous(self) -> bool:
        """True if all tensors are contiguous: elements with the same index then have the same offset in each of them."""
        return all(
            each is None or each.is_contiguous() for each in (self.weight, self.gradient, self.cast, *self.state)
        )

    def cut(self, elements: int) -> list[tuple[Tensor, Tensor, Tensor, Tensor | None, list[list[Tensor]]]]:
        """Cuts the update into pieces.

        Returns:
            For each piece its weight, its stored gradient, its gradient in the weight's dtype, its cast, and the arguments of
            the fused operator. If the gradient has to be widened, all pieces share one buffer for it. The number of steps is the
            same for all pieces: torch has counted this step already.
        """
        weights = self.weight.view(-1).split(elements)

        def parts(tensor: Tensor | None) -> Sequence[Any]:
            if tensor is None or tensor.shape != self.weight.shape:  # for example the number of steps
                return [tensor] * len(weights)
            return tensor.view(-1).split(elements)

        stored = gradients = parts(self.gradient)
        if self.widens:
            buffer = torch.empty(elements, dtype=self.weight.dtype, device="cpu")
            gradients = [buffer] * (len(weights) - 1) + [buffer[: weights[-1].numel()]]
        columns = (weights, gradients, *map(parts, self.state))
        arguments = [[[] if each is None else [each] for each in row] for row in zip(*columns, strict=True)]
        return list(zip(weights, stored, gradients, parts(self.cast), arguments, strict=True))


@cache
def piece_size(threads: int) -> int:
    """Returns the number of elements of a piece, a power of two, so that a piece stays in the processor's caches.

    A thread's share of weight, gradient and two tensors of state fills half of its second-level cache. Measuring several sizes
    would not be better: the memory of a quick measurement fits into a large third-level cache, where every size looks good.

    Args:
        threads: how many threads torch uses for an operator of the calling thread (``torch.get_num_threads()``).
    """
    share = (second_level_cache() or _USUAL_CACHE) // (2 * 4 * 4)  # half of it, for four tensors of 4 bytes an element
    return 1 << max(share * threads, 512).bit_length() - 1


_USUAL_CACHE = 1 << 20
"""Bytes of a core's second-level cache if the system does not report them."""
