"""What :mod:`~sp_lightning.device.torch_private` is, for tensors without memory and the code of torch that runs on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import fake_impls, fake_tensor

from sp_lightning.device.torch_private import grouped_mm_operator

FakeTensor = fake_tensor.FakeTensor
"""A tensor that has a shape, a dtype and a device, and no memory. The public ``meta`` device has no other devices."""

FakeTensorMode = fake_tensor.FakeTensorMode
"""The mode inside which all tensors are of that kind."""

VALUES_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""What a computation on such tensors raises where it reads their values."""


def truncated_normal_without_values() -> AbstractContextManager[Any]:
    """``nn.init.trunc_normal_`` leaves tensors as they are. torch's looks at values, which fake tensors do not have."""
    return mock.patch.object(nn.init, "_no_grad_trunc_normal_", lambda tensor, *args, **kwargs: tensor)


@contextmanager
def grouped_products_without_values() -> Iterator[None]:
    """``grouped_mm`` takes fake tensors of each dtype, as it takes real ones. torch's own are bfloat16 alone before 2.15."""

    def shape_only(
        mode: Any, func: Any, a: Tensor, b: Tensor, offs: Any = None, bias: Any = None, out_dtype: Any = None
    ) -> Tensor:
        groups = [len(offs)] if a.dim() == b.dim() == 2 else [len(a)] if a.dim() == b.dim() == 3 else []
        with mode:
            return a.new_empty(*groups, a.shape[-2], b.shape[-1], dtype=out_dtype or a.dtype)

    implementations: Any = fake_impls.op_implementations_dict  # others may be added meanwhile, which stay
    theirs = implementations.get(grouped_mm_operator.default)
    implementations[grouped_mm_operator.default] = shape_only
    try:
        yield
    finally:
        del implementations[grouped_mm_operator.default]
        if theirs is not None:
            implementations[grouped_mm_operator.default] = theirs


def modules_converted_without_swaps() -> AbstractContextManager[Any]:
    """``module.to(…)`` makes new parameters. torch's swaps fake ones, which fails while there is a weak reference to one."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # tied parameters stay tied

    def convert(parameter: nn.Parameter, function: Callable[[Tensor], Tensor]) -> nn.Parameter:
        with torch.no_grad():
            value = function(parameter)
        if (value.dtype, value.device) == (parameter.dtype, parameter.device):
            return parameter
        if parameter not in made or made[parameter].dtype is not value.dtype:
            made[parameter] = nn.Parameter(value, parameter.requires_grad)
        return made[parameter]

    def apply(self: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        for module in self.modules() if recurse else (self,):
            parameters, buffers = module._parameters, module._buffers
            parameters.update({name: convert(value, fn) for name, value in parameters.items() if value is not None})
            buffers.update({name: fn(value) for name, value in buffers.items() if value is not None})
        return self

    return mock.patch.object(nn.Module, "_apply", apply)


@contextmanager
def on_paper() -> Iterator[None]:
    """Modules that are made in this context have parameters without memory, and compute shapes only."""
    mode: Any = FakeTensorMode(allow_non_fake_inputs=True)
    # copy.deepcopy of a fake tensor would copy its mode as well. The copied tensor would belong to that mode, its views
    # to this one.
    mode.__deepcopy__ = lambda memo: mode
    with truncated_normal_without_values(), modules_converted_without_swaps(), grouped_products_without_values(), mode:
        yield
