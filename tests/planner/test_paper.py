"""The mode of a dry run remembers operators, and nothing shows that it does."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.torch_compat import fake as torch_fake
from sp_lightning.torch_compat.modes import default_dtype
from sp_lightning.torch_compat.private import storage_id


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
    for mode in (torch_fake.FakeTensorMode(allow_non_fake_inputs=True), torch_fake.FakeResults()):
        with mode:
            for _ in range(3):
                x, y = torch.empty(4, 6), torch.empty(4, 6)
                made = operator(x, y)
                memory = [storage_id(each.untyped_storage()) for each in (x, y, made)]
                found.append((_place(made), memory[2] == memory[0], memory[2] == memory[1], made.is_neg()))
    assert [*{*found}] == found[:1]


def test_what_is_remembered_depends_on_more_than_shapes() -> None:
    with torch_fake.FakeResults() as paper:
        x = torch.empty(4, dtype=torch.int32)
        assert [(x * other).dtype for other in (2, 2.0, True, 2, 2.0)] == [
            torch.int32, torch.float32, torch.int32, torch.int32, torch.float32,
        ]  # fmt: skip
        with default_dtype(torch.bfloat16):
            assert (x * 2.0).dtype is torch.bfloat16
        for _ in range(2):
            with pytest.raises(torch_fake.VALUES_NEEDED):
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
    with torch_fake.fake_tensors():
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
