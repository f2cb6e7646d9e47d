"""Fake tensors: functions of torch that read values are replaced."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from sp_lightning.core.torch_compat.private import fake_tensor, storage_id
from sp_lightning.tools.planner import fake


def test_weights_that_are_cast_up_and_back_are_the_first_ones_again() -> None:
    """diffusers' layerwise casting: each cast stayed alive, and the plan counted both directions of it as activations."""
    with fake.fake_tensors():
        layer = nn.Linear(8, 8).to(torch.float8_e4m3fn)
        tied = nn.Linear(8, 8)
        tied.weight = layer.weight
        first = layer.weight
        layer.to(torch.bfloat16)
        cast = storage_id(layer.weight.untyped_storage())
        tied.to(torch.bfloat16)
        assert tied.weight is layer.weight
        assert storage_id(tied.weight.untyped_storage()) == cast
        saved = weakref.ref(layer.weight.untyped_storage())
        layer.requires_grad_(False)
        layer.to(torch.float8_e4m3fn)
        tied.to(torch.float8_e4m3fn)
        assert layer.weight is tied.weight is first
        assert not first.requires_grad
        assert saved() is None


def test_an_error_says_where_values_are_needed() -> None:
    with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(2, 3)
        for read in (lambda: x.sum().item(), lambda: x.nonzero()):
            with pytest.raises(fake.VALUES_NEEDED):
                read()


def test_truncated_normal_needs_no_values_inside_alone() -> None:
    with fake_tensor.FakeTensorMode(), fake.truncated_normal_without_values():
        assert nn.init.trunc_normal_(torch.empty(100)).shape == (100,)
    left = torch.full((100,), 7.0)
    with fake.truncated_normal_without_values():
        assert nn.init.trunc_normal_(left) is left
    assert (left == 7).all()
    assert nn.init.trunc_normal_(left).abs().max() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_shapes_without_values(dtype: torch.dtype) -> None:
    """torch 2.14 refuses float32 on paper, and multiplies it on devices."""
    with fake.grouped_products_without_values(), fake_tensor.FakeTensorMode():
        offs = torch.empty(4, dtype=torch.int32)
        rows, stack = torch.empty(24, 16, dtype=dtype, requires_grad=True), torch.empty(4, 16, 32, dtype=dtype)
        stack.requires_grad_()
        out = nn.functional.grouped_mm(rows, stack, offs=offs)
        out.sum().backward()
    assert (out.shape, out.dtype) == ((24, 32), dtype)
    assert [each.grad is not None and each.grad.shape == each.shape for each in (rows, stack)] == [True, True]


def test_modules_without_values_are_converted_and_tied_parameters_stay_tied() -> None:
    with fake_tensor.FakeTensorMode(), fake.modules_converted_without_swaps():
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 2))
        module[2].weight = module[0].weight
        before = module[0].weight
        assert module.to(torch.float32)[0].weight is before, "nothing changes"
        module[1].weight.requires_grad = False
        module.to(torch.bfloat16)
        assert {value.dtype for value in module.state_dict().values()} == {torch.bfloat16, torch.int64}
        assert module[2].weight is module[0].weight
        assert [p.requires_grad for p in module.parameters()] == [True, True, False, True, True]
    assert nn.Linear(2, 2).to(torch.bfloat16).weight.dtype is torch.bfloat16
    assert nn.Module._apply.__module__.startswith("torch.")
