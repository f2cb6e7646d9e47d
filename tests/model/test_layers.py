"""Layers are found in any module, and cover it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import transformers
from torch import Tensor, nn

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.model.findable import MODELS
from tests.support.models import Block, Module, SharedTrunk, Stack, WithTrunk, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.tables import Inside
from tests.support.tiers import first

SLOW = ("vgg", "vit", "swin", "resnet50")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("name", first(MODELS, if_=lambda name: name not in SLOW, why="long to make"))
def test_layers_cover_the_model(name: str) -> None:
    make, expected = MODELS[name]
    module = make()
    found = find_layers(module)
    names = [layer.name for layer in found.layers]
    assert expected <= set(names)
    assert len(names) == len(set(names))
    owned = [p for layer in (*found.layers, *found.tables, found.residents) for _, p in layer.parameters]
    assert len(owned) == len({id(p) for p in owned}), "a shared parameter has one owner"
    assert {id(p) for p in owned} == {id(p) for p in module.parameters()}
    total = sum(p.numel() * p.element_size() for p in module.parameters())
    assert sum(layer.nbytes for layer in (*found.layers, *found.tables)) >= 0.95 * total
    if name in ("mlp", "one-linear", "stack"):  # alignment outweighs their sizes
        return
    # Whatever the sizes of the layers, slots take no more than the model: one convolution of VGG's is three quarters of it.
    plan = make_plan(found, k=2, k_prime=1)
    assert plan.slot_bytes <= 1.05 * total
    assert all(layer.nbytes <= plan.rings[layer.ring].nbytes for layer in plan.layers)


def test_tied_parameters_are_used_by_both_places() -> None:
    config = transformers.GPT2Config(n_embd=64, n_layer=4, n_head=4, vocab_size=500, bos_token_id=1, eos_token_id=2)
    module = transformers.GPT2LMHeadModel(config)
    found = find_layers(module)
    owner = next(i for i, layer in enumerate(found.layers) if layer.name == "transformer.wte")
    assert found.visits[module.lm_head] == (owner,)
    assert len(found.places[module.lm_head.weight]) == 2


def test_attention_is_never_cut() -> None:
    module = nn.ModuleList([nn.MultiheadAttention(16, 2), nn.MultiheadAttention(16, 2), Block()])
    assert [layer.name for layer in find_layers(module).layers] == ["0", "1", "2"]


class Wraps(nn.Module):
    """Calls one module."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def linears() -> nn.Module:
    return nn.Sequential(*[nn.Linear(16, 16) for _ in range(4)])


class Branches(nn.Module):
    """A network without blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.trunk = linears(), linears()


@pytest.mark.parametrize(
    ("module", "first"),
    [
        (nn.ModuleList([linears()]), "0.0"),
        (nn.ModuleList([Wraps(linears())]), "0.module.0"),
        (nn.ModuleList([Wraps(Wraps(linears()))]), "0.module.module.0"),
        (Wraps(nn.ModuleList([Wraps(linears())])), "module.0.module.0"),
        (nn.Sequential(Wraps(linears())), "0.module.0"),
        (nn.ModuleList([nn.ModuleList([Wraps(linears())]), linears()]), "0.0.module.0"),
        (nn.ModuleList([Branches()]), "0.branch.0"),
        (nn.ModuleList([Wraps(Stack(3))]), "0.module.stem"),
    ],
)
def test_a_list_of_one_network_is_not_one_layer(module: nn.Module, first: str) -> None:
    """PINA's solvers have their network in such a list, and all of it was one layer."""
    layers = find_layers(module).layers
    assert layers[0].name == first
    assert len(layers) >= 4


def times_around(count: int, wrap: Callable[[nn.Module], nn.Module], network: Callable[[], nn.Module]) -> nn.Module:
    shared = network()
    return nn.ModuleList(wrap(shared) for _ in range(count))


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (times_around(2, Wraps, linears), ["0.module.0", "0.module.1", "0.module.2", "0.module.3"]),
        (
            times_around(2, Wraps, lambda: Stack(2)),
            ["0.module.stem", "0.module.blocks.0", "0.module.blocks.1", "0.module.head"],
        ),
        (
            times_around(2, lambda network: nn.Sequential(network, nn.Linear(16, 16)), linears),
            ["0.0.0", "0.0.1", "0.0.2", "0.0.3", "0.1", "1.1"],
        ),
        (SharedTrunk(), [f"tasks.0.trunk.{i}" for i in range(6)] + [f"tasks.{i}.head" for i in range(3)]),
        # Most of each is its own: blocks, of which the first has the shared weights.
        (times_around(3, WithTrunk, lambda: nn.LayerNorm(16)), ["0", "1", "2"]),
    ],
)
def test_a_list_around_one_network_is_cut_in_the_network(module: nn.Module, expected: list[str]) -> None:
    """torchphysics' solvers have a list of conditions that share their network: all of it was one layer."""
    assert [layer.name for layer in find_layers(module).layers] == expected


def test_tables_inside_of_modules_are_uploaded_by_rows() -> None:
    """pykeen's representations in a list, and BERT's embeddings, were uploaded whole."""
    found = find_layers(Inside())
    assert [table.name for table in found.tables] == ["table.0.words", "table.1.words"]
    assert [layer.name for layer in found.layers] == [f"blocks.{index}" for index in range(4)]
    whole = find_layers(Inside(), layers="table.*")
    assert [layer.name for layer in whole.layers][:2] == ["table.0", "table.1"]
    assert not whole.tables


def test_a_single_block_in_a_list_is_a_layer() -> None:
    """A transformer of depth one, ALBERT's layer that is called again and again."""
    module = Stack(1)
    module.blocks[0] = nn.TransformerEncoderLayer(16, 2, 32)
    assert [layer.name for layer in find_layers(module).layers][1] == "blocks.0"
    blocks = nn.ModuleList(Wraps(nn.TransformerEncoderLayer(16, 2, 32)) for _ in range(3))
    assert [layer.name for layer in find_layers(blocks).layers] == ["0", "1", "2"]
    small = nn.ModuleList([nn.ModuleList([Wraps(nn.Linear(16, 16))]), nn.Linear(16, 16), nn.Linear(16, 16)])
    assert find_layers(small).layers[0].name == "0.0"


def test_a_list_may_hold_none_in_place_of_a_module() -> None:
    """The VAEs of diffusers without attention in their middle raised an AttributeError."""
    module = nn.ModuleList([nn.ModuleList([None]), Block(), Block()])  # type: ignore[list-item]
    assert [layer.name for layer in find_layers(module).layers] == ["1", "2"]


def test_finding_changes_nothing() -> None:
    module = Stack()
    before = [(name, id(p), p._version) for name, p in module.named_parameters()]
    find_layers(module)
    assert [(name, id(p), p._version) for name, p in module.named_parameters()] == before


def test_equal_layers_have_one_ring_of_k_and_k_prime() -> None:
    module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(10)))
    for k, k_prime in ((1, 1), (2, 1), (3, 2)):
        (ring,) = make_plan(find_layers(module), k=k, k_prime=k_prime).rings
        assert ring.slots == k + k_prime


@pytest.mark.long("takes a second or more")
def test_planning_is_quick_for_many_sizes() -> None:
    """Sizes are grouped before all ways to split them are tried."""
    with torch.device("cpu"):
        module = nn.Sequential(*(nn.Linear(1, 1 + 128 * index, bias=False) for index in range(400)))
    plan = make_plan(find_layers(module), k=2, k_prime=1)
    assert len(plan.layers) > 300


def block(first: int = 64, inner: int = 128, last: int = 64) -> nn.Sequential:
    return nn.Sequential(nn.Linear(first, inner), nn.GELU(), nn.Linear(inner, last))


def times(count: int, make: Callable[[], nn.Module]) -> nn.Sequential:
    return nn.Sequential(*(make() for _ in range(count)))


def norms() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())


def activated() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU())


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(64, 2)
        self.experts = nn.ModuleList(block() for _ in range(2))


def with_head(blocks: nn.Module) -> nn.Module:
    return nn.ModuleDict({"blocks": blocks, "head": nn.Linear(64, 64)})


HANDWRITTEN: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "list": (lambda: with_head(nn.ModuleList([block(), block()])), ["blocks.0", "blocks.1", "head"]),
    "first-other": (lambda: with_head(nn.ModuleList([block(8), block(), block()])), ["blocks.0", "blocks.1", "blocks.2", "head"]),
    "convolution-and-norm": (lambda: times(3, norms), ["0", "1", "2"]),
    "stages": (lambda: times(2, lambda: times(2, block)), ["0.0", "0.1", "1.0", "1.1"]),
    "innermost-of-two-parts": (lambda: times(2, lambda: times(2, activated)), ["0", "1"]),
    # One part: nothing is saved inside but what the part itself saves.
    "one-part": (lambda: times(2, activated), ["0.0", "1.0"]),
    # Most of the model each, and not alike: cut.
    "encoder-and-decoder": (lambda: nn.Sequential(block(64, 32, 8), block(8, 32, 64)), ["0.0", "0.2", "1.0", "1.2"]),
    "between-stages": (
        lambda: nn.Sequential(*(each() for each in (norms, lambda: times(2, Block), norms, lambda: times(2, Block)))),
        ["0.0", "1.0", "1.1", "2.0", "3.0", "3.1"],
    ),
    "experts": (Routed, ["experts.0", "experts.1"]),
}  # fmt: skip


@pytest.mark.parametrize("name", HANDWRITTEN)
def test_blocks_that_are_sequences_of_bare_modules(name: str) -> None:
    """The innermost that repeats and has more than one part; a sequence of such is a stage."""
    make, expected = HANDWRITTEN[name]
    found = find_layers(make())
    assert [layer.name for layer in found.layers] == expected
    assert len(found.experts) == (2 if name == "experts" else 0)
    assert not found.grouping_advice or name in ("one-part", "encoder-and-decoder")


class Heads(nn.Module):
    """Attention whose heads are in parameters of three dimensions, as that of policies for routing problems."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Parameter(torch.randn(4, 16, 4) / 4) for _ in range(3))
        self.out = nn.Parameter(torch.randn(4, 4, 16) / 4)

    def forward(self, q: Tensor, h: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h = q if h is None else h
        weights = torch.softmax((q @ self.query) @ (h @ self.key).transpose(1, 2), -1)
        return ((weights @ (h @ self.value)) @ self.out).sum(0)


class PolicyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.module, self.feed = Heads(), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.feed(self.module(x)))


@pytest.mark.rest("takes tenths of a second")
def test_heads_in_one_parameter_are_no_experts() -> None:
    """A forward of three arguments was enough: each attention was a layer that came when its call asked for it."""

    def make() -> Module:
        return Module(nn.Sequential(*(PolicyLayer() for _ in range(6))))

    strategy = superpipeline(k=1, callback=False)
    ours = fit(make, vectors(), strategy)
    assert_same(ours, fit(make, vectors()))
    plan, stats = strategy.plan, strategy.stats()
    assert [layer.name for layer in plan.layers] == [f"net.{index}" for index in range(6)]
    assert not any("expert" in note for note in plan.notes)
    assert stats.demand_fetches == 0
    assert stats.fetched_layers == len(vectors()) * (2 * 6 - 2)


def test_plain_lightning_has_gradients_of_what_is_trained() -> None:
    module = Stack()
    module.stem.requires_grad_(False)
    weights, gradients = find_layers(module).plain_bytes
    assert weights - gradients == module.stem.weight.nbytes + module.stem.bias.nbytes
    assert weights == sum(p.nbytes for p in module.parameters())
