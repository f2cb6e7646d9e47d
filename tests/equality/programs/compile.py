"""``torch.compile``: compiled layers and modules stream, the engine outside of their graphs."""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from tests.equality.rows import mistake, program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.runs import loader, superpipeline, trainer_for

LONG = tiers(long=["keep, k=1"])
REST = tiers(rest=["keep, k=1"])


def anew(make: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a module with nothing compiled before."""

    def made() -> Any:
        torch._dynamo.reset()
        # dynamo's own remarks: on inputs that are no leaves, and on hooks that it leaves out of graphs, as it is told to
        warnings.filterwarnings("ignore", category=UserWarning)
        return make()

    return made


class Text(Stack):
    """With a table, of which only rows travel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x[:, 0].abs().mul(50).long() % 300))


def each_layer(module: Any, backend: str) -> Any:
    if backend == "inductor" and shutil.which("g++") is None:
        pytest.skip("inductor needs a compiler for the CPU")
    for layer in module.net.blocks:
        layer.compile(backend=backend)
    return module


def inner_module(module: Any, backend: str) -> Any:
    module.net = torch.compile(module.net, backend=backend)
    return module


def inner_module_in_place(module: Any, backend: str) -> Any:
    module.net.compile(backend=backend)
    return module


def lightning_module(module: Any, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def compiled(way: Any, net: Any, backend: str) -> Any:
    return way(Module(net()), backend)


for way, net, backend in (
    (each_layer, Stack, "aot_eager"), (inner_module, Stack, "aot_eager"), (inner_module_in_place, Text, "aot_eager"),
    (lightning_module, Stack, "aot_eager"), (each_layer, partial(Stack, 2), "inductor"),
):  # fmt: skip
    name = f"compile: {way.__name__.replace('_', ' ')}, {backend}"
    program(name, REST if backend != "inductor" and way is each_layer else LONG, validated=True, covers="a way to compile")(
        anew(partial(compiled, way, net, backend))
    )  # fmt: skip


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


for kind in ("blocks", "blocks, fullgraph", "loss", "loss, clone", "cond", "cond, clone"):
    told = r".*Superpipeline copies weights.*without fullgraph=True.*weight\.clone\(\)"
    program(
        f"compile: a whole graph, {kind}", REST, repairable=False,
        refused=dict.fromkeys(REST, told) if kind in ("loss", "cond") else {},
        covers="dynamo said that it skips a function of ours that is disabled, and that one is to remove that",
    )(anew(partial(WholeGraph, kind)))  # fmt: skip


class Graphs:
    """A backend that notes what is in each graph."""

    def __init__(self) -> None:
        self.seen: list[list[str]] = []

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.seen.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward


class CompiledOutside(Module):
    """Computes with a network beside the trained one as one graph: in steps and between them."""

    def __init__(self) -> None:
        super().__init__(Stack(2))
        net = nn.Sequential(nn.Linear(16, 16), nn.Sequential(nn.Linear(16, 16), nn.ReLU())).requires_grad_(False)
        self.graphs = Graphs()
        self.judge = [torch.compile(lambda x: net(x), backend=self.graphs, fullgraph=True)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + self.judge[0](batch).square().mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.judge[0](batch)


def goes_on(ours: Any) -> None:
    """The next runs find the same graph."""
    for _ in range(3):
        trainer_for(superpipeline(k=1)).fit(ours.module, loader(vectors(2)))
    assert ours.module.graphs.seen == [["linear", "linear", "relu"]]


program(
    "compile: a graph of another module", LONG, also=goes_on, inside=lambda: torch._dynamo.config.patch(recompile_limit=2),
    covers="each call of any module passes code of ours: it is followed",
)(anew(CompiledOutside))  # fmt: skip


class InOneGraph(Module):
    """A compiled function that calls streamed layers of torch's own classes, and parts that stay on the device."""

    def __init__(self, *, hooked: bool = False) -> None:
        super().__init__(
            nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3))
        )
        self.graphs, self.head = Graphs(), nn.Linear(16, 16)
        self.run = torch.compile(self.layers, backend=self.graphs)
        for block in self.net.children() if hooked else ():
            block.register_forward_hook(torch.compiler.disable(lambda *_: None))

    def layers(self, x: Tensor) -> Tensor:
        for block in self.net.children():
            x = block(x) + 1
        return x

    def loss(self, batch: Any) -> Tensor:
        return self.head(self.run(batch)).square().mean()


def parts_apart(ours: Any) -> None:
    """Or ``activations`` would not count for the second part."""
    assert max([graph.count("linear") for graph in ours.module.graphs.seen], default=0) <= 2, "one graph has two parts"


program("compile: a graph that ends at layers", LONG, covers="as at any hook of a user's")(anew(InOneGraph))
program(
    "compile: a graph that ends at parts that stay", tiers(long=["recompute, k=1"]), strategy={"keep_on_gpu": "net"},
    also=parts_apart, covers="their weights are there, and no upload ends the graph",
)(anew(InOneGraph))  # fmt: skip

# ---------------------------------------------------------------------- CUDA graphs


class Asynchronous(Device):
    """An accelerator, as far as set-up asks."""

    synchronous = False


def with_graphs(way: str) -> None:
    """They are recorded for the addresses of weights, which streaming changes."""
    torch._dynamo.reset()
    module: Any = Module(Stack())
    blocks: Any = module.net.blocks
    if way == "lightning module":
        module = torch.compile(module, mode="reduce-overhead")
    elif way == "layer":
        blocks[2].compile(mode="max-autotune")
    elif way == "function":
        blocks[2].forward = torch.compile(blocks[2].forward, options={"triton.cudagraphs": True})
    else:
        blocks[2] = torch.compile(blocks[2], mode="reduce-overhead")
    with mock.patch("sp_lightning.trainer.run.device_for", Asynchronous):
        trainer_for(superpipeline(k=1)).fit(module, loader(vectors(1)))


for place in ("lightning module", "layer", "function", "inner module"):
    name = "Module" if place == "lightning module" else "net.blocks.2"
    said = f"ValueError: .*'{name}' is compiled with CUDA graphs.*max-autotune-no-cudagraphs"
    mistake(f"compile: CUDA graphs of a {place}", said)(partial(with_graphs, place))
