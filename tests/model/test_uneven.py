"""Blocks that are much larger than others of their class are divided into their parts, and no other blocks.

``test_layer_names`` has the layers of all models of the tests: those of the transformers did not change.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.uneven import can_be_divided
from sp_lightning.core.plan.plan import make_plan
from tests.support.models import Module, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.uneven import CASES, PARTS, names_of_layers

SMALL, LARGE = 16, 128


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.second(torch.tanh(self.first(self.norm(x))))


class ReadsChildren(Residual):
    """As torchvision's Swin and torch's own transformer do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(F.linear(x, self.first.weight, self.first.bias))


class OwnMatrix(Residual):
    """A parameter of the block itself, which no call announces."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.matrix = nn.Parameter(torch.randn(width, width) / width)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.matrix


class InAList(Residual):
    """Parameters in a list, which nothing calls."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.matrices = nn.ParameterList([torch.randn(width, width) / width])

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) @ self.matrices[0]


class Routed(Residual):
    """Its experts are layers already."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(2))


class OneMatrix(Residual):
    """Nearly all weights are in one module."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.first, self.second = nn.Linear(width, 16 * width), nn.Identity()  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(x).view(*x.shape, 16).mean(-1)


class Attends(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.attention = nn.MultiheadAttention(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.attention(x, x, x, need_weights=False)[0]


class Normed(Residual):
    def __init__(self, width: int) -> None:
        super().__init__(width)
        weight_norm(self.first)


class Nested(nn.Module):
    """A block that only calls another one: that one is divided."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = Residual(width)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class Empty(Residual):
    """Its length is 0, so it is false."""

    def __len__(self) -> int:
        return 0


class Grouped(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))


def encoder_layer(width: int) -> nn.Module:
    return nn.TransformerEncoderLayer(width, 2, width, batch_first=True)


def growing(make: Callable[[int], nn.Module], head: int = SMALL) -> nn.Module:
    """Six blocks of one class, of which the last two are larger: 1.5 and 1.6."""
    stem, widen = nn.Linear(16, SMALL), nn.Linear(SMALL, LARGE)
    blocks = [*(make(SMALL) for _ in range(4)), widen, *(make(LARGE) for _ in range(2))]
    return nn.Sequential(stem, nn.Sequential(*blocks), nn.Linear(LARGE, head))


def divided(module: nn.Module, **options: Any) -> tuple[list[str], list[str]]:
    """The layers that are divided, and the layers in their place."""
    before, after = (names_of_layers(module, divided=each, **options) for each in (False, True))
    return [name for name in before if name not in after], [name for name in after if name not in before]


@pytest.mark.parametrize(
    ("make", "parts"),
    [
        (Residual, ["first", "second"]),
        (Empty, ["first", "second"]),
        (Nested, ["inner.first", "inner.second"]),
        (Grouped, ["0", "2"]),
        (Normed, ["first", "second"]),
        (Attends, ["first", "second", "attention"]),
    ],
)
def test_large_blocks_are_divided_into_their_parts(make: Callable[[int], nn.Module], parts: list[str]) -> None:
    blocks, instead = divided(growing(make))
    assert blocks == ["1.5", "1.6"]
    assert instead == [f"{block}.{part}" for block in blocks for part in parts]


@pytest.mark.parametrize("make", [ReadsChildren, OwnMatrix, InAList, Routed, OneMatrix, encoder_layer])
def test_a_block_whose_parts_cannot_be_layers_stays_whole(make: Callable[[int], nn.Module]) -> None:
    module = growing(make)
    assert divided(module) == ([], [])
    assert "1.6" in names_of_layers(module)


def test_blocks_with_experts_stay_whole_when_their_experts_are_no_layers() -> None:
    """With ``activations="recompute"``: two searches divided different blocks."""
    module = growing(Routed)
    assert "1.6" in {layer.name for layer in find_layers(module, whole_blocks=True).layers}


@pytest.mark.parametrize(
    "module",
    [nn.MultiheadAttention(16, 2), nn.LSTM(16, 16), weight_norm(nn.Linear(16, 16, bias=False)), encoder_layer(16)],
    ids=lambda module: type(module).__name__,
)
def test_modules_of_torch_that_are_not_divided(module: nn.Module) -> None:
    assert can_be_divided(Residual(LARGE))
    assert not can_be_divided(module)


class Deep(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(*(nn.Linear(width, width) for _ in range(8)))


def test_a_block_that_is_one_matrix_stays_whole_beside_blocks_that_are_divided() -> None:
    module = nn.Sequential(
        *(Deep(8) for _ in range(4)), *(OneMatrix(8) for _ in range(4)), OneMatrix(48), Deep(64), Deep(64)
    )
    assert divided(module)[0] == ["9", "10"]


def test_a_compiled_block_stays_whole() -> None:
    module = growing(Residual)
    module[1][6].compile()  # type: ignore[index, operator]
    assert not can_be_divided(module[1][6])  # type: ignore[index, arg-type]
    assert divided(module)[0] == ["1.5"]


@pytest.mark.parametrize("layers", ["1.*", "2"])
def test_nothing_is_divided_if_the_user_chooses_layers(layers: str) -> None:
    assert divided(growing(Residual), layers=layers) == ([], [])


def test_even_blocks_stay_whole() -> None:
    """Of two blocks or three, each has most of the weights, but none is larger than others of its class."""
    for count in (2, 3):
        assert divided(nn.Sequential(*(Residual(LARGE) for _ in range(count)), nn.Linear(LARGE, 8))) == ([], [])


def test_nothing_is_divided_beside_a_matrix_that_is_larger() -> None:
    """Whatever is divided, the slots have its size."""
    module = growing(Residual, head=40 * LARGE)
    assert divided(module) == ([], [])


def test_the_division_ends_at_a_third() -> None:
    """Blocks of width 24 are larger than the median, too. They stay whole."""
    module = nn.Sequential(*(Residual(width) for width in [8] * 9 + [24] * 6 + [48] * 2))
    assert divided(module)[0] == ["15", "16"]


def tied() -> nn.Module:
    """A bias of the last block is that of the block before it."""
    module: Any = growing(Residual)
    module[1][6].first.bias = module[1][5].first.bias
    return module


def test_a_tied_weight_in_a_divided_block_has_one_owner() -> None:
    module: Any = tied()
    found = find_layers(module)
    names = [layer.name for layer in found.layers]
    assert found.visits[module[1][6].first] == (names.index("1.5.first"), names.index("1.6.first"))
    owned = [p for layer in (*found.layers, found.residents) for _, p in layer.parameters]
    assert len(owned) == len({*owned})
    assert {*owned} == {*module.parameters()}


def test_a_block_whose_matrices_are_one_stays_whole() -> None:
    module: Any = growing(Residual)
    for block in module[1][5:]:
        block.second.weight = block.first.weight
    assert divided(module) == ([], [])


def test_a_block_owns_what_is_its_own() -> None:
    """The scale of a divided block belongs to no part: it stays on the GPU."""
    found = find_layers(growing(Residual))
    residents = [name for name, _ in found.residents.parameters]
    assert {"1.5.scale", "1.5.norm.weight", "1.6.scale"} <= {*residents}


@pytest.mark.rest("two trainings each")
@pytest.mark.parametrize("make", [Residual, Normed, Attends, OwnMatrix, ReadsChildren, InAList])
def test_results_are_equal(make: Callable[[int], nn.Module]) -> None:
    strategy = superpipeline(k=1, k_prime=1)
    assert_same(fit(lambda: Module(growing(make)), vectors(), strategy), fit(lambda: Module(growing(make)), vectors()))
    assert strategy.stats().fetched_layers


@pytest.mark.parametrize("name", [name for name in CASES if name != "unet"])
def test_families_of_vision(name: str) -> None:
    make, _ = CASES[name]
    module = make()
    assert PARTS[name] in names_of_layers(module)
    assert (PARTS[name] in names_of_layers(module, divided=False)) == (name == "vgg")


def test_a_resnet_takes_half_of_its_memory() -> None:
    make, _ = CASES["resnet"]
    module = make()
    plan = make_plan(find_layers(module), k=1, k_prime=1)
    weights, gradients = find_layers(module).plain_bytes
    assert plan.peak_device_bytes < 0.55 * (weights + gradients)
