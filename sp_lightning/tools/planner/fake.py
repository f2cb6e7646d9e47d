"""Private names of torch for fake tensors, and patches of torch's code that runs on them.

As :mod:`~sp_lightning.core.torch_compat.private`, for the planner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls, fake_tensor
from torch.utils.weak import TensorWeakRef, WeakTensorKeyDictionary

from sp_lightning.core.torch_compat.private import grouped_mm_operator

VALUES_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""The errors that operators raise if they need the values of fake tensors."""


class Fakes(fake_tensor.FakeTensorMode):
    """A FakeTensorMode that is not copied with its tensors: views of the copy would still belong to the first mode."""

    def __deepcopy__(self, memo: Any) -> Fakes:
        return self


def truncated_normal_without_values() -> AbstractContextManager[Any]:
    """In this context, ``nn.init.trunc_normal_`` does nothing, because torch's implementation reads values."""
    return mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor)


@contextmanager
def grouped_products_without_values() -> Iterator[None]:
    """In this context, ``grouped_mm`` takes fake tensors of every dtype, as it takes real tensors.

    Before torch 2.15 it takes fake tensors of bfloat16 only.
    """

    def shape_only(
        mode: Any, func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        groups: list[int] = []
        if a.dim() == b.dim() == 2:
            groups = [len(offs)]
        elif a.dim() == b.dim() == 3:
            groups = [len(a)]
        with mode:
            return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)

    # The dict is changed in place and not replaced by a copy, so that entries that other code adds in this context stay.
    implementations: Any = fake_impls.op_implementations_dict
    original = implementations.get(grouped_mm_operator.default)
    implementations[grouped_mm_operator.default] = shape_only
    try:
        yield
    finally:
        del implementations[grouped_mm_operator.default]
        if original is not None:
            implementations[grouped_mm_operator.default] = original


def modules_converted_without_swaps() -> AbstractContextManager[Any]:
    """In this context, ``module.to(…)`` replaces parameters by new ones.

    torch would swap the contents of fake parameters, which fails if a weak reference to one of them exists. If a module casts its
    weights before each forward and back after it, the module gets its first parameters again, and the casts are freed.
    """
    made: Any = (
        WeakTensorKeyDictionary()
    )  # by original: weak references to the converted parameters, so that tied parameters stay tied
    before: Any = WeakTensorKeyDictionary()  # the originals of converted parameters

    def convert(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        with torch.no_grad():
            value = function(parameter)
        form = value.dtype, value.device
        if form == (parameter.dtype, parameter.device):
            return parameter
        first: Any = before.get(parameter)
        if first is not None and form == (first.dtype, first.device):
            first.requires_grad_(parameter.requires_grad)
            return first
        found: Any = made[parameter]() if parameter in made else None
        if found is None or found.dtype is not value.dtype:
            found = nn.Parameter(value, parameter.requires_grad)
            made[parameter], before[found] = TensorWeakRef(found), parameter
        found.requires_grad_(parameter.requires_grad)
        return found

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            parameters, buffers = module._parameters, module._buffers
            parameters.update({name: convert(value, fn) for name, value in parameters.items() if value is not None})
            buffers.update({name: fn(value) for name, value in buffers.items() if value is not None})
        return self

    return mock.patch.object(nn.Module, "_apply", apply)


@contextmanager
def fake_tensors() -> Iterator[None]:
    """In this context, new modules have parameters without memory, and compute only shapes."""
    with (
        truncated_normal_without_values(),
        modules_converted_without_swaps(),
        grouped_products_without_values(),
        Fakes(allow_non_fake_inputs=True),
    ):
        yield
