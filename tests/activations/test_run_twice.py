"""A forward that runs twice shows once."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.activations.recompute import Unrepeatable
from tests.support.models import Module, Stack, Transformer, tokens, twice, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline
from tests.support.saving import MODES
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- a forward that runs twice shows once


class Norms(nn.Module):
    """Statistics that are moved, by momentum and by number, an iteration that is read and written, a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(16, 16))
        self.moved = nn.BatchNorm1d(16)
        self.averaged = nn.BatchNorm1d(16, momentum=None)
        self.drop = nn.Dropout(0.2)
        self.register_buffer("calls", torch.zeros(1))

    calls: Tensor

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.drop(self.averaged(self.moved(self.inner(x)))) * self.calls


class Keeps(nn.Module):
    """Everything that Python code keeps from call to call: a number, a list, a tensor, an object, a set."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.calls = 0
        self.means: list[float] = []
        self.by_name: dict[str, list[int]] = {"x": []}
        self.last: Any = torch.zeros(16)
        self.shapes: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.means.append(float(x.detach().mean()))
        self.by_name["x"].append(self.calls)
        self.shapes.add(self.calls)
        y = x + torch.tanh(self.inner(x)) * self.calls + self.last * len(self.means)
        self.last = y.detach().mean(0)
        self.fresh = len(self.shapes)
        return y


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("block", [Norms, Keeps])
def test_state_changes_once(block: type[nn.Module]) -> None:
    ours = fit(twice(block), vectors(), superpipeline(k=1, activations="recompute"))
    reference = fit(twice(block), vectors())
    assert_same(ours, reference)
    for mine, theirs in zip(ours.module.modules(), reference.module.modules(), strict=True):
        if isinstance(mine, Keeps):
            for name in ("calls", "means", "by_name", "shapes", "fresh"):
                assert getattr(mine, name) == getattr(theirs, name), name
            assert torch.equal(mine.last, theirs.last)


class Reached(nn.Module):
    """Statistics, an iteration that is read and written, a number that Python keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = spectral_norm(nn.Linear(16, 16))
        self.norm = nn.BatchNorm1d(16)
        self.number = 0

    def forward(self, x: Tensor) -> Tensor:
        self.number += 1
        return self.norm(self.inner(x)) / self.number


class CallsAnother(nn.Module):
    """A unit that calls another one, whose state is not its own."""

    def __init__(self, other: nn.Module, how: str) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.others, self.how = [other], how

    def forward(self, x: Tensor) -> Tensor:
        (other,) = self.others
        if self.how == "without gradients":
            with torch.no_grad():
                seen = other(x)
        elif self.how == "past its hooks":
            seen = other.forward(x)
        else:
            seen = other(x)
            if self.how == "twice":
                seen = seen + other(x)
        return torch.tanh(self.inner(x + seen))  # torch stops the second run after what backward needs last


def calls_another(how: str) -> Module:
    stack = Stack()
    stack.blocks[1] = Reached()
    stack.blocks[2] = CallsAnother(stack.blocks[1], how)
    stack.blocks[3] = CallsAnother(stack.blocks[2], how)
    return Module(stack)


HOW = ("called", "twice", "without gradients", "past its hooks")
CALLER = {"net.blocks.2": "recompute", "**": "offload"}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("how", "activations"),
    [
        *((how, "recompute") for how in HOW),
        *first([(how, CALLER) for how in HOW], ("called", CALLER), why="the ways to call are those of the first tier"),
        ("twice", {"net.blocks.3": "recompute"}),
    ],
)
def test_the_state_of_a_unit_that_a_recomputed_one_calls_changes_once(how: str, activations: Any) -> None:
    ours = fit(lambda: calls_another(how), vectors(), superpipeline(k=1, activations=activations))
    reference = fit(lambda: calls_another(how), vectors())
    assert_same(ours, reference)
    assert ours.module.net.blocks[1].number == reference.module.net.blocks[1].number  # type: ignore[index, union-attr]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["called", "past its hooks"])
def test_it_does_so_beside_updates(how: str) -> None:
    make = fused(partial(calls_another, how))
    strategy = SuperpipelineStrategy(k=1, activations="recompute", optimizer_overlap="forward")
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))


def cached_llama() -> Transformer:
    """As a configuration comes: a forward makes a cache of keys and values, which its layers add to."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=32,
    )  # fmt: skip
    assert config.use_cache
    return Transformer(transformers.LlamaForCausalLM(config))


class LooksAtCache(Transformer):
    """The loss asks what the layers have added."""

    def on_after_backward(self) -> None:
        assert {layer.keys.shape[-2] for layer in self.cache.layers} == {8}, "added to again in backward"

    def loss(self, batch: Any) -> Tensor:
        output = self.net(**batch)
        self.cache = output.past_key_values
        return output.loss + sum(layer.keys.square().mean() for layer in output.past_key_values.layers)


class Collects(nn.Module):
    """Adds to a list and to a dict that it is given, and reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor, seen: list[Tensor], *, by_name: dict[str, Any]) -> Tensor:
        seen.append(self.inner(x))
        by_name["count"] = by_name.get("count", 0) + 1
        return x + torch.tanh(sum(seen)) * len(seen) * by_name["count"]  # type: ignore[arg-type]


class Collecting(Module):
    def __init__(self) -> None:
        super().__init__(nn.ModuleList(Collects() for _ in range(4)))

    def loss(self, batch: Any) -> Tensor:
        seen: list[Tensor] = []
        by_name: dict[str, Any] = {}
        for block in self.net:  # type: ignore[attr-defined]
            batch = block(batch, seen, by_name=by_name)
        assert len(seen) == by_name["count"] == 4
        return batch.square().mean() + sum(each.square().mean() for each in seen)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", [Transformer, LooksAtCache])
def test_a_cache_is_added_to_once(kind: type[Transformer], mode: Any) -> None:
    def make() -> Transformer:
        return kind(cached_llama().net)

    ours = fit(make, tokens(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(make, tokens()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", MODES)
def test_what_arguments_collect_is_collected_once(mode: Any) -> None:
    ours = fit(Collecting, vectors(), superpipeline(k=1, activations=mode))
    assert_same(ours, fit(Collecting, vectors()))


_calls: list[int] = []


class Fickle(nn.Module):
    """Does something else each time, by a global variable."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        _calls.append(1)
        return x + (torch.tanh(self.inner(x)) if len(_calls) % 2 else self.inner(torch.cat([x, x])).exp()[:4].sin())


class Shrinks(Fickle):
    """Saves less each second time."""

    def forward(self, x: Tensor) -> Tensor:
        _calls.append(1)
        x = x + torch.tanh(self.inner(x))
        return x.exp() if len(_calls) % 2 else x


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("block", [Fickle, Shrinks])
def test_a_forward_that_does_something_else_the_second_time_is_named(block: type[nn.Module]) -> None:
    _calls.clear()
    stack = Stack()
    stack.blocks[1] = block()
    with pytest.raises(
        Unrepeatable, match=r"The forward of 'net.blocks.1' computed other values in backward"
    ) as raised:
        fit(lambda: Module(stack), vectors(), superpipeline(activations="recompute"))
    assert 'activations={"net.blocks.1": "offload", "**": "recompute"}' in str(raised.value)
