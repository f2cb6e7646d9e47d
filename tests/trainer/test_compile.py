"""``torch.compile``: compiled layers and modules stream, the engine outside of their graphs."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.model.checks import refuse_cuda_graphs
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.runs import Batches, LossRecorder, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first

# dynamo's own remarks: on inputs that are no leaves, and on hooks that it leaves out of graphs, as it is told to
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class Text(Stack):
    """With a table, of which only rows travel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x[:, 0].abs().mul(50).long() % 300))


def each_layer(module: Any, backend: str) -> Any:
    for layer in module.net.blocks if hasattr(module.net, "blocks") else module.net.model.layers:
        layer.compile(backend=backend)
    return module


def inner_module(module: Any, backend: str) -> Any:
    module.net = torch.compile(module.net, backend=backend)
    return module


def inner_module_in_place(module: Any, backend: str) -> Any:
    module.net.compile(backend=backend)
    return module


def lightning_module(module: Any, backend: str) -> Any:
    """What ``trainer.fit(torch.compile(module))`` takes."""
    return torch.compile(module, backend=backend)


WAYS: tuple[Callable[[Any, str], Any], ...] = (each_layer, inner_module, inner_module_in_place, lightning_module)


def run(
    make: Any, batches: Batches, way: Callable[[Any, str], Any], backend: str, strategy: Any, **options: Any
) -> Any:
    torch._dynamo.reset()
    pl.seed_everything(7, verbose=False)
    module, recorder = make(), LossRecorder()
    trainer = trainer_for(strategy, callbacks=[recorder], **options)
    compiled = way(module, backend)
    trainer.fit(compiled, loader(batches), loader(batches[:1]))
    state = {name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()}
    return recorder.losses, state, trainer.predict(compiled, loader(batches))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="seconds of compilation"))
@pytest.mark.parametrize("net", first([Stack, Text], Stack, why="seconds of compilation"))
@pytest.mark.parametrize(
    "way", first(WAYS, each_layer, second=(), why="seconds of compilation"), ids=lambda way: way.__name__
)
def test_results_are_those_of_plain_lightning(way: Any, net: Any, precision: Any) -> None:
    def results(strategy: Any) -> Any:
        return run(lambda: Module(net()), vectors(), way, "aot_eager", strategy, precision=precision)

    assert_equal(results(superpipeline(k=1)), results("auto"), way.__name__)


@pytest.mark.long("seconds of compilation")
def test_a_language_model() -> None:
    def results(strategy: Any) -> Any:
        return run(lambda: llama(dropout=0.0), tokens(), each_layer, "aot_eager", strategy)

    assert_equal(results(superpipeline(k=1)), results("auto"), "llama")


@pytest.mark.long("half a minute of compilation and more on a bare machine")
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a compiler for the CPU")
def test_with_inductor() -> None:
    def results(strategy: Any) -> Any:
        return run(lambda: Module(Stack(depth=2)), vectors(), each_layer, "inductor", strategy)

    assert_equal(results(superpipeline(k=1)), results("auto"), "inductor")


@pytest.mark.rest("takes tenths of a second")
def test_compiled_layers_are_layers_and_are_compiled_once() -> None:
    strategy, module = superpipeline(k=1), Module(Stack())
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        """Note how many inputs are known to be parameters: what is saved for backward depends on it."""
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        graphs.append(sum("_dynamo_static_input_type" in node.meta["tensor_dict"] for node in placeholders))
        return graph.forward

    for block in module.net.blocks:
        block.compile(backend=backend, fullgraph=True)
    trainer_for(strategy).fit(module, loader(vectors(4)))
    assert [layer.name for layer in strategy.plan.layers] == [
        "net.stem",
        *(f"net.blocks.{i}" for i in range(5)),
        "net.head",
    ]
    assert graphs == [4], "one for all blocks and all batches, with inner and outer's weights and biases"


@pytest.mark.long("takes a second or more")
def test_what_is_compiled_as_a_whole_moves_as_one_and_the_plan_says_so() -> None:
    strategy, module = superpipeline(k=1), inner_module(Module(Stack()), "aot_eager")
    trainer_for(strategy).fit(module, loader(vectors(1)))
    assert [layer.name for layer in strategy.plan.layers] == ["net"]
    assert any("Compile its layers instead" in note for note in strategy.plan.notes)


class WholeGraph(Module):
    """A loss that is one graph and takes the head's weight; a conditional of torch's, whose branches are; bare blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__(nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)]))
        self.head, self.kind = nn.Linear(16, 5), kind
        self.criterion = torch.compile(self.error, backend="eager", fullgraph=True) if "loss" in kind else self.error
        if "blocks" in kind:
            for block in self.net.children():
                block.compile(backend="eager", fullgraph="fullgraph" in kind)

    @staticmethod
    def error(hidden: Tensor, weight: Tensor) -> Tensor:
        return (hidden @ weight.T).square().mean()

    def loss(self, batch: Any) -> Tensor:
        hidden = self.net(batch)
        weight = self.head.weight.clone() if "clone" in self.kind else self.head.weight
        if "cond" in self.kind:
            return torch.cond(hidden.sum() > 0, self.error, lambda h, w: (h @ w.T).abs().mean(), (hidden, weight))
        return self.criterion(hidden, weight)


@pytest.mark.parametrize(
    ("refused", "remedy"),
    first(
        [("loss", "loss, clone"), ("cond", "cond, clone")],
        ("loss", "loss, clone"),
        why="other graphs that meet the engine",
    ),
)
def test_a_graph_without_breaks_meets_the_engine_and_is_told_what_to_do(refused: str, remedy: str) -> None:
    """Dynamo said that it skips a function of ours that is disabled, and that one is to remove that."""
    told = r"Superpipeline copies weights.*without fullgraph=True.*weight\.clone\(\)"
    with pytest.raises(RuntimeError, match=told):
        trainer_for(superpipeline()).fit(WholeGraph(refused), loader(vectors()))
    torch._dynamo.reset()
    plain = fit(lambda: WholeGraph(refused), vectors())
    torch._dynamo.reset()
    assert_same(fit(lambda: WholeGraph(remedy), vectors(), superpipeline()), plain)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", ["blocks", "blocks, fullgraph"])
def test_layers_of_torch_s_own_classes_are_whole_graphs(kind: str) -> None:
    """The graph of one began with hooks of ours, which no graph contains."""
    plain = fit(lambda: WholeGraph(kind), vectors())
    torch._dynamo.reset()
    assert_same(fit(lambda: WholeGraph(kind), vectors(), superpipeline()), plain)


class Graphs:
    """A backend that notes what is in each graph."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


class CompiledOutside(Module):
    """Computes with a network beside the trained one as one graph: in steps and between them."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__(Stack(2))
        net = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())).requires_grad_(False)
        self.judge = [torch.compile(lambda x: net(x), backend=graphs, fullgraph=True)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.judge[0](batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.judge[0](batch)


@pytest.mark.long("takes a second or more")
def test_graphs_of_other_modules_are_whole_and_stay() -> None:
    """Each call of any module passes code of ours: it is followed, and the next run finds the same."""
    graphs = Graphs()
    make = lambda: CompiledOutside(graphs)  # noqa: E731
    with mock.patch.object(torch._dynamo.config, "recompile_limit", 2):
        module = make()
        for _ in range(4):
            trainer_for(superpipeline(k=1)).fit(module, loader(vectors(2)))
    assert graphs.seen == [["linear", "linear", "relu"]]
    torch._dynamo.reset()
    ours = fit(make, vectors(2), superpipeline(k=1))
    torch._dynamo.reset()
    assert_same(ours, fit(make, vectors(2)))


class InOneGraph(Module):
    """A compiled function that calls streamed layers of torch's own classes."""

    def __init__(self, graphs: Graphs, *, hooked: bool = False) -> None:
        super().__init__(
            nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        )
        self.run = torch.compile(self.layers, backend=graphs)
        for block in self.net.children() if hooked else ():
            block.register_forward_hook(torch.compiler.disable(lambda *_: None))

    def layers(self, x: Tensor) -> Tensor:
        for block in self.net.children():
            x = block(x) + 1
        return x

    def loss(self, batch: Any) -> Tensor:
        return self.run(batch).square().mean()


@pytest.mark.long("takes a second or more")
def test_a_graph_ends_at_a_layer_and_goes_on_in_it() -> None:
    """As at any hook of a user's. Layers of torch's own classes are compiled where those with a hook are."""
    ours, plain = Graphs(), Graphs()
    with pytest.warns(UserWarning, match="compile_blocks"):
        outcome = fit(lambda: InOneGraph(ours), vectors(2), superpipeline(k=1), recorded="losses")
    torch._dynamo.reset()
    assert_same(outcome, fit(lambda: InOneGraph(plain, hooked=True), vectors(2), recorded="losses"))
    assert ours.seen == plain.seen


class BesideResidents(InOneGraph):
    """The compiled function calls parts that stay on the device, whose weights are there."""

    def __init__(self, graphs: Graphs) -> None:
        super().__init__(graphs)
        self.head = nn.Linear(16, 16)

    def loss(self, batch: Any) -> Tensor:
        return self.head(self.run(batch)).square().mean()


@pytest.mark.long("takes a second or more")
def test_a_graph_ends_at_a_part_that_stays_on_the_device() -> None:
    """Or ``activations`` would not count for it."""
    graphs = Graphs()
    strategy = superpipeline(k=1, keep_on_gpu="net", activations="recompute")
    ours = fit(lambda: BesideResidents(graphs), vectors(2), strategy)
    assert max([graph.count("linear") for graph in graphs.seen], default=0) <= 2, "one graph has two parts"
    torch._dynamo.reset()
    assert_same(ours, fit(lambda: BesideResidents(Graphs()), vectors(2)))


class Asynchronous(Device):
    """An accelerator, as far as set-up asks."""

    synchronous = False


def lightning_module_with_graphs(module: Any) -> Any:
    return torch.compile(module, mode="reduce-overhead")


def layer_with_graphs(module: Any) -> Any:
    module.net.blocks[2].compile(mode="max-autotune")
    return module


def function_with_graphs(module: Any) -> Any:
    block = module.net.blocks[2]
    block.forward = torch.compile(block.forward, options={"triton.cudagraphs": True})
    return module


def inner_module_with_graphs(module: Any) -> Any:
    module.net.blocks[2] = torch.compile(module.net.blocks[2], mode="reduce-overhead")
    return module


@pytest.mark.parametrize(
    ("way", "name"),
    [
        (lightning_module_with_graphs, "'Module'"),
        (layer_with_graphs, "'net.blocks.2'"),
        (function_with_graphs, "'net.blocks.2'"),
        (inner_module_with_graphs, "'net.blocks.2'"),
    ],
)
def test_cuda_graphs_are_refused_by_name(way: Any, name: str) -> None:
    """They are recorded for the addresses of weights, which streaming changes; a CPU has none, and compiles as ever."""
    torch._dynamo.reset()
    with (
        mock.patch("sp_lightning.trainer.run.device_for", Asynchronous),
        pytest.raises(ValueError, match=rf"{name} is compiled with CUDA graphs.*max-autotune-no-cudagraphs"),
    ):
        trainer_for(superpipeline(k=1)).fit(way(Module(Stack())), loader(vectors(1)))


def test_the_remedy_has_no_cuda_graphs() -> None:
    """Nor have other ways to compile, nor modules without weights."""
    module = Module(Stack())
    module.net.blocks[0].compile(mode="max-autotune-no-cudagraphs")
    module.net.blocks[1].compile()
    module.net.blocks[2].compile(backend="aot_eager")
    module.net.blocks[3].drop.compile(mode="reduce-overhead")
    refuse_cuda_graphs(module)
