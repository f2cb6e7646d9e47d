"""Stacked experts whose parameters are quantised: rows of the tensors inside come."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.nn.functional as F
from bitsandbytes.nn.parametrize import replace_parameter_4bit
from torch import Tensor, nn
from torchao.quantization import FqnToConfig, Int8WeightOnlyConfig, PerTensor, quantize_

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from tests.support import stacked
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.stacked import EXPERTS

# torchao 0.18 quantises stacks to int8 alone, and those can be read expert by expert, as "eager" does.
STACKS = r"re:.*experts\.(gate_up|down)_proj"


def quantised(dtype: torch.dtype = torch.float32, **options: Any) -> stacked.Transformer:
    module = stacked.transformer("qwen3", "eager")
    quantize_(module.net.to(dtype), FqnToConfig({STACKS: Int8WeightOnlyConfig(**options)}), filter_fn=None)
    module.net.requires_grad_(False)
    return module


def adapted(dtype: torch.dtype = torch.float32) -> stacked.Transformer:
    module = quantised(dtype)
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return module


def parametrised() -> stacked.Transformer:
    """Stacks that bitsandbytes has quantised: a parametrization dequantises a whole stack when it is read."""
    module = stacked.transformer("qwen3")
    for experts in [each for each in module.net.modules() if "Experts" in type(each).__name__]:
        for key in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(experts, key)
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return module


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("activations", ["keep", "recompute", "offload"])
def test_experts_in_4_bits_of_bitsandbytes(activations: str) -> None:
    strategy = superpipeline(k=1, activations=activations)
    with poisoned():
        ours = fit(parametrised, stacked.tokens(), strategy)
    assert_same(ours, fit(parametrised, stacked.tokens()))
    stacks = sum(span.nbytes for layer in strategy.plan.layers for span in layer.spans if "original" in span.name)
    assert stacks == 2 * EXPERTS * 3 * 24 * 32 // 2, "the packed bytes are part of the blocks"


def whole_bytes(strategy: Any, times: int) -> int:
    return times * sum(layer.nbytes for layer in strategy.plan.layers if layer.rows)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("activations", ["keep", "recompute"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "bf16-mixed"])
def test_adapters_train_beside_quantised_experts(precision: Any, activations: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16-true" else torch.float32
    batches, strategy = stacked.tokens(), superpipeline(k=1, activations=activations)
    with poisoned():
        ours = fit(lambda: adapted(dtype), batches, strategy, precision=precision)
    assert_same(ours, fit(lambda: adapted(dtype), batches, precision=precision))
    stacks = [layer for layer in strategy.plan.layers if layer.rows]
    assert len(stacks) == 2
    assert all({span.dtype for span in layer.spans} >= {torch.int8} for layer in stacks)
    forward_and_backward = 2 * len(batches)
    assert strategy.stats().expert_bytes < whole_bytes(strategy, forward_and_backward)


@pytest.mark.rest("takes tenths of a second")
def test_predicts_by_rows() -> None:
    def predictions(strategy: Any) -> Any:
        torch.manual_seed(5)
        trainer = trainer_for(
            strategy, inference_mode=False
        )  # torch 2.15 takes no row of a wrapped tensor in that mode
        return trainer.predict(quantised(), loader(stacked.tokens(6)))

    strategy = superpipeline(k=1)
    with poisoned():
        ours = predictions(strategy)
    assert_equal(ours, predictions("auto"), "predictions")
    assert strategy.stats().host_waits == 6 * 2, "for the indices of each batch and block; nothing is taken back"


@pytest.mark.long("takes a second or more")
def test_resumes_without_frozen_weights(tmp_path: Path) -> None:
    file, batches = tmp_path / "ours.ckpt", stacked.tokens(6)
    first = fit(adapted, batches, superpipeline(k=1, save_frozen=False))
    first.trainer.save_checkpoint(file)
    assert not any("experts" in name for name in torch.load(file, weights_only=False)["state_dict"])
    ours = fit(adapted, batches, superpipeline(k=1, save_frozen=False), ckpt_path=file, max_epochs=2)
    plain = fit(adapted, batches, max_epochs=2)
    assert_equal(ours.state, plain.state, "state")
    assert_equal(ours.losses, plain.losses[len(batches) :], "losses")


@stacked.of_transformers
class Linears(stacked.Stack):
    """torchao multiplies by ``linear`` alone."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for number in indices.unique().tolist():
            rows, place = torch.where(indices == number)
            hidden = F.linear(torch.tanh(F.linear(x[rows], self.inner[number])), self.outer[number])
            out = out.index_add(0, rows, hidden * weights[rows, place, None])
        return out


@stacked.of_transformers
class ReadsInside(Linears):
    """Reads the tensors inside of a stack, too."""

    def forward(self, x: Tensor, indices: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, indices, weights) + self.inner.scale.sum() + self.outer.dequantize().mean()


class Own(stacked.Router):
    stack = Linears


class Inside(stacked.Router):
    stack = ReadsInside


@pytest.mark.parametrize("block", [Own, Inside])
def test_experts_of_a_users_own(block: type[stacked.Router]) -> None:
    def make() -> Any:
        module = stacked.own(block)
        for layer in module.net.layers:
            quantize_(layer.experts, FqnToConfig({"re:inner|outer": Int8WeightOnlyConfig()}), filter_fn=None)
            layer.experts.requires_grad_(False)
        return module

    strategy = superpipeline(k=1)
    with poisoned():
        ours = fit(make, stacked.rows(), strategy)
    assert_same(ours, fit(make, stacked.rows()))
    assert all(layer.rows for layer in strategy.plan.layers if "experts" in layer.name)
    assert (strategy.stats().expert_bytes >= whole_bytes(strategy, 3)) is (block is Inside)


class Writes(stacked.Transformer):
    """The experts are written before its forward, all of them in place and one through a row."""

    def loss(self, batch: Any) -> Tensor:
        with torch.no_grad():
            for layer in self.net.base_model.model.model.layers:
                layer.mlp.experts.gate_up_proj.scale.mul_(0.9)
                layer.mlp.experts.down_proj[1].scale.mul_(0.9)
        return super().loss(batch)


class Centred(Tensor):
    """A stack of which each function reads all experts."""

    stack: Tensor

    @staticmethod
    def __new__(cls, stack: Tensor) -> Any:
        made: Any = Tensor._make_wrapper_subclass(cls, stack.shape, strides=stack.stride(), dtype=stack.dtype)
        made.stack = stack
        return made

    def __tensor_flatten__(self) -> Any:
        return ["stack"], None

    @staticmethod
    def __tensor_unflatten__(tensors: Any, context: Any, size: Any, stride: Any) -> Any:
        return Centred(tensors["stack"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return Centred(func(args[0].stack))
        args = [each.stack - each.stack.mean() if isinstance(each, Centred) else each for each in args]
        return func(*args, **(kwargs or {}))


def centred() -> stacked.Transformer:
    module = stacked.transformer("qwen3", "grouped_mm")
    module.net.requires_grad_(False)
    for experts in [each for each in module.net.modules() if "Experts" in type(each).__name__]:
        for key in ("gate_up_proj", "down_proj"):
            experts._parameters[key] = nn.Parameter(Centred(experts._parameters[key].detach()), requires_grad=False)  # type: ignore[union-attr]
    module.net = peft.get_peft_model(module.net, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    return module


def test_a_class_that_reads_all_experts_gets_all_of_them() -> None:
    """Only of packed experts is it known that an operation on a stack leaves the values of other experts alone."""
    with poisoned():
        ours = fit(centred, stacked.tokens(), superpipeline(k=1))
    assert_same(ours, fit(centred, stacked.tokens()))


@pytest.mark.rest("takes tenths of a second")
def test_writes_are_taken_back() -> None:
    def make() -> Writes:
        return Writes(adapted().net)

    with poisoned():
        ours = fit(make, stacked.tokens(), superpipeline(k=1))
    assert_same(ours, fit(make, stacked.tokens()))


def test_what_does_not_lie_by_rows_moves_with_its_block() -> None:
    found = find_layers(quantised(granularity=PerTensor()))
    assert not any(layer.rows for layer in found.layers)
    assert "experts are stacked in 2 modules that are uploaded whole" in str(make_plan(found, k=1, k_prime=1))
    assert [layer.rows for layer in find_layers(quantised()).layers if "experts" in layer.name] == [EXPERTS] * 2
