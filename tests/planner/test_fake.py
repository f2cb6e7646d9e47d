"""Fake tensors: the mode remembers the results of operators, and functions of torch that read values are replaced."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.planner import fake
from sp_lightning.torch_compat.modes import default_dtype
from sp_lightning.torch_compat.private import FakeTensorMode, storage_id


def _place(tensor: Tensor) -> Any:
    storage = tensor.untyped_storage()
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device, storage.nbytes()


OPERATORS: dict[str, Any] = {
    "product": lambda x, y: x @ y.t(),
    "scalar": lambda x, y: x.int() * 2,
    "scalar with a fraction": lambda x, y: x.int() * 2.0,
    "cast": lambda x, y: x.to(torch.bfloat16),
    "list": lambda x, y: torch.cat([x, y]),
    "slice": lambda x, y: x[1:, 2:],
    "slice of a slice": lambda x, y: x[1:][1:],
    "transposed": lambda x, y: x.t() + x.t(),
    "parts": lambda x, y: x.split(2, dim=1)[1],
    "several results": lambda x, y: torch.native_layer_norm(x, [6], None, None, 1e-5)[1],
    "argument": lambda x, y: y.expand_as(x),
    "written": lambda x, y: x.clone().add_(1),
    "complex": lambda x, y: torch.complex(x, x).conj().imag,
    "by values": lambda x, y: torch.ones(4, 6)[torch.tensor([0, 1])],
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_what_an_operator_made_is_made_again(operator: Any) -> None:
    """The second and the third time the mode knows it from the first."""
    found: list[Any] = []
    for mode in (FakeTensorMode(allow_non_fake_inputs=True), fake.FakeResults()):
        with mode:
            for _ in range(3):
                x, y = torch.empty(4, 6), torch.empty(4, 6)
                made = operator(x, y)
                memory = [storage_id(each.untyped_storage()) for each in (x, y, made)]
                found.append((_place(made), memory[2] == memory[0], memory[2] == memory[1], made.is_neg()))
    assert [*{*found}] == found[:1]


def test_what_is_remembered_depends_on_more_than_shapes() -> None:
    with fake.FakeResults() as paper:
        x = torch.empty(4, dtype=torch.int32)
        assert [(x * other).dtype for other in (2, 2.0, True, 2, 2.0)] == [
            torch.int32, torch.float32, torch.int32, torch.int32, torch.float32,
        ]  # fmt: skip
        with default_dtype(torch.bfloat16):
            assert (x * 2.0).dtype is torch.bfloat16
        for _ in range(2):
            with pytest.raises(fake.VALUES_NEEDED):
                x.nonzero()
        base = torch.empty(8)
        assert [base[at : at + 4].clone().storage_offset() for at in (0, 4)] == [0, 0]
        assert [base[at : at + 4].view(2, 2).storage_offset() for at in (0, 4)] == [0, 4]
        weight = nn.Parameter(torch.empty(4, 4))
        for _ in range(2):
            (weight.t() @ weight[0]).sum().backward()
        assert weight.grad is not None
        assert weight.grad.shape == (4, 4)
        assert copy.deepcopy(paper) is paper


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
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.ones(2, 3)
        for read in (lambda: x.sum().item(), lambda: x.nonzero()):
            with pytest.raises(fake.VALUES_NEEDED):
                read()


def test_truncated_normal_needs_no_values_inside_alone() -> None:
    with FakeTensorMode(), fake.truncated_normal_without_values():
        assert nn.init.trunc_normal_(torch.empty(100)).shape == (100,)
    left = torch.full((100,), 7.0)
    with fake.truncated_normal_without_values():
        assert nn.init.trunc_normal_(left) is left
    assert (left == 7).all()
    assert nn.init.trunc_normal_(left).abs().max() <= 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_of_groups_have_shapes_without_values(dtype: torch.dtype) -> None:
    """torch 2.14 refuses float32 on paper, and multiplies it on devices."""
    with fake.grouped_products_without_values(), FakeTensorMode():
        offs = torch.empty(4, dtype=torch.int32)
        rows, stack = torch.empty(24, 16, dtype=dtype, requires_grad=True), torch.empty(4, 16, 32, dtype=dtype)
        stack.requires_grad_()
        out = nn.functional.grouped_mm(rows, stack, offs=offs)
        out.sum().backward()
    assert (out.shape, out.dtype) == ((24, 32), dtype)
    assert [each.grad is not None and each.grad.shape == each.shape for each in (rows, stack)] == [True, True]


def test_modules_without_values_are_converted_and_tied_parameters_stay_tied() -> None:
    with FakeTensorMode(), fake.modules_converted_without_swaps():
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
