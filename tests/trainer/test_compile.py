"""``torch.compile``: what is a layer, and how often it is compiled. Results are in ``tests/equality/programs/compiled.py``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo

from sp_lightning.core.model.checks import refuse_cuda_graphs
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, superpipeline, trainer_for

# dynamo's own remarks: on inputs that are no leaves, and on hooks that it leaves out of graphs, as it is told to
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.rest("takes tenths of a second")
def test_compiled_layers_are_layers_and_are_compiled_once() -> None:
    strategy, module = superpipeline(k=1), Module(Stack())
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        """Note how many inputs are known to be parameters: what is saved for backward depends on it."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append(sum("_dynamo_static_input_type" in node.meta["tensor_dict"] for node in placeholders))
        return graph.forward

    for block in module.net.blocks:  # type: ignore[union-attr]
        block.compile(backend=backend, fullgraph=True)
    trainer_for(strategy).fit(module, loader(vectors(4)))
    names = ["net.stem", *(f"net.blocks.{i}" for i in range(5)), "net.head"]
    assert [layer.name for layer in strategy.plan.layers] == names
    assert graphs == [4], "one for all blocks and all batches, with inner and outer's weights and biases"


@pytest.mark.rest("takes tenths of a second")
def test_what_is_compiled_as_a_whole_moves_as_one_and_the_plan_says_so() -> None:
    strategy, module = superpipeline(k=1), Module(Stack())
    module.net = torch.compile(module.net, backend="eager")  # type: ignore[assignment]
    trainer_for(strategy).fit(module, loader(vectors(1)))
    assert [layer.name for layer in strategy.plan.layers] == ["net"]
    assert any("Compile its layers instead" in note for note in strategy.plan.notes)


def test_the_remedy_has_no_cuda_graphs() -> None:
    """Nor have other ways to compile, nor modules without weights."""
    module: Any = Module(Stack())
    module.net.blocks[0].compile(mode="max-autotune-no-cudagraphs")
    module.net.blocks[1].compile()
    module.net.blocks[2].compile(backend="aot_eager")
    module.net.blocks[3].drop.compile(mode="reduce-overhead")
    refuse_cuda_graphs(module)
