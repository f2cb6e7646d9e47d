"""What is compiled, and what of it travels as casts. ``tests/equality/programs/compiled.py`` has compiled blocks in training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.torch_compat.private import is_compiled
from sp_lightning.trainer.compile import compile_blocks
from tests.equality.cases import CASES
from tests.equality.training import DYNAMOS, forget_graphs
from tests.support.models import Block, Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.ways import MIXED

pytestmark = pytest.mark.filterwarnings(f"ignore:{DYNAMOS}:UserWarning")


def test_products_tuned_by_the_compiler_have_masters() -> None:
    """Its own kernels may leave out the rounding of a gradient."""
    net = Stack()
    for block in net.blocks:
        block.compile(mode="max-autotune-no-cudagraphs")
    tuned = [layer for layer in find_layers(net, autocast=torch.bfloat16).layers if "blocks" in layer.name]
    assert len(tuned) == 5
    assert not any(layer.lowered for layer in tuned)
    assert any(layer.lowered for layer in find_layers(Stack(), autocast=torch.bfloat16).layers)


@pytest.mark.long("takes a second or more")
def test_the_next_run_uses_the_graphs_of_the_first_one() -> None:
    class Twice(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(super().forward(x))

    def make() -> Module:
        net = nn.Sequential(Twice(), Twice(), Twice())
        compile_blocks(net, backend="aot_eager")
        return Module(net)

    forget_graphs()
    plain = fit(make, vectors(), **MIXED)
    forget_graphs()
    with pytest.warns(UserWarning, match="needs weights in float32"):
        fit(make, vectors(), superpipeline(k=1), **MIXED)
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert_same(fit(make, vectors(), superpipeline(k=1), **MIXED), plain)  # which does not warn again
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    forget_graphs()


def test_blocks_with_experts_are_compiled_without_them() -> None:
    net = CASES["experts/mixture"].make().net
    names = compile_blocks(net, backend="aot_eager")
    assert names
    assert not any("expert" in name for name in names)
    assert [name for name, module in net.named_modules() if is_compiled(module)] == names
    assert compile_blocks(net, backend="aot_eager") == names, "once more, nothing is compiled again"


def test_compile_blocks_compiles_the_outermost_blocks() -> None:
    assert compile_blocks(Stack()) == [f"blocks.{index}" for index in range(5)]
    with pytest.raises(ValueError, match=r"No repeated blocks found in Linear.*compile\(\)"):
        compile_blocks(nn.Linear(2, 2))
