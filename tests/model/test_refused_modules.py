"""Modules that cannot be streamed, or not as a whole, and what is said of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts

from sp_lightning.trainer.plan_text import sentence
from tests.support import stacked
from tests.support.models import Block, Module, Stack, llama, tokens, vectors
from tests.support.runs import assert_equal, fit, loader, superpipeline, trainer_for
from tests.support.ways import start


def test_lazy_modules() -> None:
    with pytest.raises(ValueError, match=r"'net\.1\.weight' has no shape yet.*Run one batch"):
        start(superpipeline(), Module(nn.Sequential(nn.Linear(16, 16), nn.LazyLinear(4))))


def test_experts_of_transformers_mxfp4_kernels() -> None:
    net = stacked.transformer("gpt-oss").net
    net.model.layers[1].mlp.experts = Mxfp4GptOssExperts(net.config)
    with pytest.raises(
        ValueError, match=r"'net.model.layers.1.mlp.experts' keeps its experts .*kernels.*load_mxfp4\(model, folder"
    ):
        start(superpipeline(), stacked.Transformer(net))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_modules_that_are_never_cut() -> None:
    """Attention reads a child's weight without calling it, ScriptModules take no hooks: whole, and equal."""

    def make() -> Module:
        scripted = torch.jit.script(nn.Linear(16, 16))
        return Module(nn.Sequential(nn.Linear(16, 16), scripted, SelfAttention(), Block()))

    strategy = superpipeline(k=1)
    ours = fit(make, vectors(), strategy)
    assert_equal(ours.state, fit(make, vectors()).state, "state")
    assert any("stays on the GPU whole" in note for note in strategy.plan.notes)
    assert not any("out_proj" in layer.name for layer in strategy.plan.layers)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x)[0]


@pytest.mark.rest("takes tenths of a second")
def test_nothing_to_stream_just_runs() -> None:
    class NoParameters(Module):
        def training_step(self, batch: Any, batch_idx: int) -> None:
            return None

        def configure_optimizers(self) -> Any:
            return None

    strategy = superpipeline()
    trainer_for(strategy).validate(NoParameters(nn.Tanh()), loader(vectors()), verbose=False)
    assert strategy.plan.layers == ()
    everything = superpipeline(keep_on_gpu=["**"])
    ours = fit(llama, tokens(), everything)
    assert everything.plan.layers == ()
    assert_equal(ours.state, fit(llama, tokens()).state, "state")


@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
def test_a_model_that_is_one_script_module_says_so() -> None:
    """It was logged as "0 layers, k = 1 … weights take 0 B; a lower k, or smaller layers, would take less"."""
    make = lambda: nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))  # noqa: E731
    strategy = superpipeline(k=3)
    fit(lambda: Module(torch.jit.script(make())), vectors(1), strategy)
    plan = strategy.plan
    assert sentence(plan, state=0) == (
        "Superpipeline: nothing is streamed: all weights are on the GPU. "
        "Weights, gradients and steps take 41.6 KiB of GPU memory, plain Lightning 16.6 KiB with optimizer state, both "
        "without activations."
    )
    assert plan.notes[0] == "'net' stays on the GPU whole."
    assert strategy.remarks() == []
    assert "0 layers" not in str(plan)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.*torch.jit.*")
@pytest.mark.parametrize("blocks", [0, 4])
def test_script_modules_are_refused_where_they_do_not_fit(blocks: int) -> None:
    """A budget of 1 MiB took a scripted front of 4 MiB."""

    def module(*, script: bool) -> Module:
        front = nn.Sequential(*(nn.Linear(16, 16) for _ in range(40)))
        return Module(nn.Sequential(torch.jit.script(front) if script else front, *(Block() for _ in range(blocks))))

    with pytest.raises(ValueError, match=r"need .*what stays on the GPU .*names of keep_on_gpu= out"):
        fit(lambda: module(script=True), vectors(1), superpipeline(gpu_memory="40KiB"))
    strategy = superpipeline(gpu_memory="40KiB")
    fit(lambda: module(script=False), vectors(1), strategy)
    assert strategy.plan.peak_device_bytes <= 40 * 1024
    trainer = trainer_for(superpipeline(gpu_memory="60KiB"))
    trainer.predict(module(script=True), loader(vectors(1)))  # which has no gradients


@pytest.mark.parametrize("options", [{"layers": "net"}, {"keep_on_gpu": ["**"]}], ids=str)
def test_a_plan_that_saves_nothing_says_so(options: dict[str, Any]) -> None:
    strategy = superpipeline(**options)
    fit(lambda: Module(Stack()), vectors(1), strategy)
    assert any("no less GPU memory than all weights and gradients" in note for note in strategy.plan.notes)
    assert "note:" in str(strategy.plan)


def compile_whole(net: nn.Module) -> nn.Module:
    return torch.compile(net, backend="eager")  # type: ignore[return-value]


def compile_layers(net: Any) -> nn.Module:
    for block in net.blocks:
        block.compile(backend="eager")
    return net


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo looks at inputs
@pytest.mark.parametrize("compiled", [compile_whole, compile_layers])
def test_compiled_modules_are_one_layer(compiled: Any) -> None:
    """Nothing can come and go inside a graph."""
    strategy = superpipeline(k=1)
    ours = fit(lambda: Module(compiled(Stack())), vectors(), strategy)
    assert_equal(ours.state, fit(lambda: Module(compiled(Stack())), vectors()).state, "state")
    assert len(strategy.plan.layers) == (1 if compiled is compile_whole else 7)
    assert any("Compile its layers instead" in note for note in strategy.plan.notes) == (compiled is compile_whole)
