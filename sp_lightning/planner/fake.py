"""Private names of torch for fake tensors, and patches of torch's code that runs on them.

As :mod:`~sp_lightning.torch_compat.private`, for the planner.
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

from sp_lightning.torch_compat.private import FakeTensor, grouped_mm_operator, storage_id, tree_leaves

VALUES_NEEDED = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
    fake_tensor.UnsupportedFakeTensorException,
)
"""The errors that operators raise if they need the values of fake tensors."""

_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_DESCRIBE_THEMSELVES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class FakeResults(fake_tensor.FakeTensorMode):
    """A FakeTensorMode that caches the results of operators: their shapes and dtypes.

    Equal layers call the same operators with equal arguments. torch's own cache has keys with twenty properties of each tensor,
    and a lookup in it takes three times as long.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # By operator and arguments: the arguments of _make for each result; empty if torch must compute the result each time.
        self._made: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __deepcopy__(self, memo: Any) -> FakeResults:
        return self  # deepcopy of a fake tensor would also copy the mode; views of the copy would still belong to this mode

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        described = [func, torch.get_default_dtype(), *kwargs]
        if func.namespace != "aten" or not self._describe((*args, *kwargs.values()), described):
            return super().dispatch(func, types, args, kwargs)
        key = tuple(described)
        if made := self._made.get(key):
            results = tuple(self._make(args, *each) for each in made)
            return results if len(results) > 1 else results[0]
        result = super().dispatch(func, types, args, kwargs)
        if key not in self._made:
            self._made[key] = self._look_at(func, args, kwargs, result)
        return result

    def _describe(self, arguments: Any, described: list[Any]) -> bool:
        """Appends to ``described`` the properties of arguments on which a result can depend.

        Returns False if the properties are unknown.
        """
        for each in arguments:
            if isinstance(each, FakeTensor):
                if each.fake_mode is not self or not _is_plain(each):
                    return False
                described += (each.shape, each.stride(), each.storage_offset(), each.dtype, each.fake_device)
            elif isinstance(each, (list, tuple)):
                described.append(len(each))
                if not self._describe(each, described):
                    return False
            elif isinstance(each, _DESCRIBE_THEMSELVES):
                described += (type(each), each)  # the type, because 1, 1.0 and True are equal keys
            else:
                return False
        return True

    def _look_at(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
        """Returns the arguments of _make for each tensor of a result; no arguments if _make would give a different result."""
        results = result if isinstance(result, tuple) else (result,)
        if func._schema.is_mutable or _DEPENDS_ON_VALUES & {*func.tags} or not all(map(_is_plain, results)):
            return ()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = [storage_id(tensor.untyped_storage()) for tensor in given]
        made = []
        for each in results:
            view = storage_id(each.untyped_storage()) in storages
            one = (view, each.shape, each.stride(), each.storage_offset(), each.dtype, each.fake_device)
            # _make creates a view of the first argument only, and never returns an argument itself.
            if view and not (args and given[0] is args[0] is not each):
                return ()
            storage = each.untyped_storage()
            again = self._make(args, *one).untyped_storage()
            if storage.nbytes() != again.nbytes() or (view and storage_id(storage) != storage_id(again)):
                return ()
            made.append(one)
        return tuple(made)

    def _make(self, args: Any, view: bool, shape: Any, stride: Any, offset: int, dtype: Any, device: Any) -> Tensor:
        """Returns a fake tensor in new memory or, if ``view`` is True, in the memory of the first argument."""
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if view:
            storage = args[0].untyped_storage()
            with fake_tensor.in_kernel_invocation_manager(self):
                tensor.set_(storage, offset, shape, stride)
        return FakeTensor(self, tensor, device)


def _is_plain(value: Any) -> bool:
    """Returns True for a fake tensor that shape, strides, offset, dtype and device describe completely."""
    if not isinstance(value, FakeTensor) or value.constant is not None or value.layout is not torch.strided:
        return False
    return not (value.dtype.is_complex or value.is_neg())


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
        FakeResults(),
    ):
        yield


FEATURES = {
    "the planner": {
        "VALUES_NEEDED": "superpipeline plan: activations that depend on values",
        "FakeResults": "superpipeline plan",
        "truncated_normal_without_values": "superpipeline plan: models that call nn.init.trunc_normal_",
        "grouped_products_without_values": "superpipeline plan: stacked experts",
        "modules_converted_without_swaps": "superpipeline plan: module.to(…)",
        "fake_tensors": "superpipeline plan",
    },
}
"""As :data:`sp_lightning.torch_compat.private.FEATURES`."""
