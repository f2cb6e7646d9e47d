"""What :mod:`~sp_lightning.torch_compat.private` is, for tensors without memory and the code of torch that runs on them."""

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
"""What a computation on such tensors raises where it reads their values."""

_DEPENDS_ON_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_DESCRIBE_THEMSELVES = (bool, int, float, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)


class FakeResults(fake_tensor.FakeTensorMode):
    """A mode that remembers what an operator makes of such arguments.

    Equal layers ask the same of each operator. torch remembers it, too, by twenty properties of each tensor; to ask it takes
    three times as long.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        # Results, as _make takes them, by operator and arguments. Empty where torch has to be asked each time.
        self._made: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __deepcopy__(self, memo: Any) -> FakeResults:
        return self  # copy.deepcopy of a fake tensor copies its mode as well; its views would belong to this one

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
        """Lists all of some arguments that the shape of a result depends on. Returns False if that is not known."""
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
                described += (type(each), each)
            else:
                return False
        return True

    def _look_at(self, func: Any, args: Any, kwargs: Any, result: Any) -> tuple[Any, ...]:
        """What is remembered of a result: each tensor that it consists of. Nothing if those made from that would not be alike."""
        results = result if isinstance(result, tuple) else (result,)
        if func._schema.is_mutable or _DEPENDS_ON_VALUES & {*func.tags} or not all(map(_is_plain, results)):
            return ()
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        storages = [storage_id(tensor.untyped_storage()) for tensor in given]
        made = []
        for each in results:
            view = storage_id(each.untyped_storage()) in storages
            one = (view, each.shape, each.stride(), each.storage_offset(), each.dtype, each.fake_device)
            if view and not (args and given[0] is args[0] is not each):
                return ()
            here, again = (tensor.untyped_storage() for tensor in (each, self._make(args, *one)))
            if here.nbytes() != again.nbytes() or (view and storage_id(here) != storage_id(again)):
                return ()
            made.append(one)
        return tuple(made)

    def _make(self, args: Any, view: bool, shape: Any, stride: Any, offset: int, dtype: Any, device: Any) -> Tensor:
        """A tensor in new memory, or a view of the memory of the first argument."""
        tensor = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
        if view:
            storage = args[0].untyped_storage()
            with fake_tensor.in_kernel_invocation_manager(self):
                tensor.set_(storage, offset, shape, stride)
        return FakeTensor(self, tensor, device)


def _is_plain(value: Any) -> bool:
    """Whether all that a fake tensor is besides its mode is its place in a storage, its dtype and its device."""
    if not isinstance(value, FakeTensor) or value.constant is not None or value.layout is not torch.strided:
        return False
    return not (value.dtype.is_complex or value.is_neg())


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
    """``module.to(…)`` makes new parameters. torch's swaps fake ones, which fails while there is a weak reference to one.

    A module that casts its weights for each forward and back behind it has the first ones again, and keeps no casts alive.
    """
    made: Any = WeakTensorKeyDictionary()  # a weak reference to what each was converted to: tied parameters stay tied
    before: Any = WeakTensorKeyDictionary()  # what each was made of

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
    """Modules that are made in this context have parameters without memory, and compute shapes only."""
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
