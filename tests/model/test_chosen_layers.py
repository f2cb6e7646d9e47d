"""Layers and residents that the user chooses, and choices that do not fit."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.patterns import chosen_residents
from tests.support.models import Block, Module, Stack, vectors
from tests.support.runs import assert_equal, fit, superpipeline
from tests.support.ways import start


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"layers": ["net.block.*"]},
            r"layers='net\.block\.\*' matches nothing in Module\. Closest names: \['net\.blocks.*Largest modules: \['net'",
        ),
        ({"layers": ["xyz"]}, r"matches nothing in Module\. Largest modules: .*\. For example \['net\.blocks\.\*'\]"),
        ({"keep_on_gpu": ["net.haed"]}, r"keep_on_gpu='net\.haed' matches nothing.*net\.head"),
        (
            {"layers": [nn.Conv2d]},
            r"layers= names the class Conv2d, which is not in the module\. Expected one of .*Stack",
        ),
        ({"layers": ["net.blocks.*", "net.blocks.0.inner"]}, r"Overlapping layers: 'net\.blocks\.0\.inner' is inside"),
        (
            {"layers": ["net.head"], "keep_on_gpu": ["net.head"]},
            r"Overlapping layers: 'net\.head' is chosen by layers= and",
        ),
    ],
)
def test_patterns_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        start(SuperpipelineStrategy(**options))


@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (None, TypeError, "returned NoneType; expected a list"),
        ("net.head", TypeError, "returned str; expected a list"),
        ([nn.Linear(1, 1)], ValueError, "returned a Linear that is not part of the module"),
    ],
)
def test_a_callable_that_returns_the_wrong_thing(returned: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        start(SuperpipelineStrategy(layers=lambda module: returned))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (["net.blocks.*"], {"net.blocks.0", "net.blocks.4"}),
        ("net.blocks.?", {"net.blocks.0", "net.blocks.4"}),
        ([Block], {"net.blocks.0", "net.blocks.4"}),
        (Block, {"net.blocks.0", "net.blocks.4"}),
        (lambda module: module.net.blocks, {"net.blocks.0", "net.blocks.4"}),
        (lambda module: [module.net.blocks[1], "net.blocks.2.inner"], {"net.blocks.1", "net.blocks.2.inner"}),
        (["**.inner"], {"net.blocks.0.inner", "net.blocks.0.outer", "net.head"}),
    ],
)
def test_layers_can_be_chosen(layers: Any, names: set[str]) -> None:
    strategy = superpipeline(layers=layers)
    ours = fit(lambda: Module(Stack()), vectors(), strategy)
    assert names <= {layer.name for layer in strategy.plan.layers}
    assert_equal(ours.state, fit(lambda: Module(Stack()), vectors()).state, "state")


def test_residents_can_be_chosen() -> None:
    strategy = superpipeline(keep_on_gpu=["net.head", "net.blocks.1.inner.weight"])
    fit(lambda: Module(Stack()), vectors(), strategy)
    assert {span.name for span in strategy.plan.residents.spans} == {
        "net.head.weight", "net.head.bias", "net.blocks.1.inner.weight",
    }  # fmt: skip


def test_a_module_with_two_names_is_chosen_by_either() -> None:
    stack = Stack()
    stack.tail = stack.head
    for name in ("head", "tail"):
        assert chosen_residents(stack, [name]) == set(stack.head.parameters())


class Nested(pl.LightningModule):
    """Blocks alike, each of several linear layers."""

    def __init__(self, *inner: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            *(
                nn.Sequential(*(nn.Linear(64, 64) for _ in range(count))) if count else nn.Linear(64, 64)
                for count in inner
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_layer_to_divide_is_named_and_dividing_it_helps() -> None:
    batches = [torch.randn(2, 64)]
    with pytest.raises(ValueError, match=r"divide the largest layer, 'net\.0', with layers=") as told:
        fit(lambda: Nested(4, 4, 4), batches, SuperpipelineStrategy(gpu_memory="140KiB", layers="net.*"))
    assert 'and with gpu_memory="140KiB" there are' in str(told.value)
    fit(lambda: Nested(4, 4, 4), batches, SuperpipelineStrategy(gpu_memory="140KiB", layers="net.*.*"))
