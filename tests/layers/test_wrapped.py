"""Quantised weights: tensor subclasses stream as their packed bytes, or are refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchao.quantization import Int8WeightOnlyConfig, quantize_

from sp_lightning.core.model.find import find_layers
from sp_lightning.core.model.wrapped import parts
from tests.support.models import Module, Stack, Transformer, tokens, vectors
from tests.support.poison import poisoned
from tests.support.quantised import CONFIGS, adapted, opaque, travels_packed
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, superpipeline, trainer_for

# peft warns that these adapters cannot be merged: nobody told it how to quantise again.
pytestmark = pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", CONFIGS)
def test_adapters_train_on_a_base_that_was_quantised_from_bfloat16(name: str) -> None:
    """The registry of equality has those that were float32."""
    make, precision = adapted(CONFIGS[name], torch.bfloat16), "bf16-true"
    strategy = superpipeline(k=1)
    with poisoned():
        ours = fit(make, tokens(), strategy, val=tokens(), precision=precision)
    assert_same(ours, fit(make, tokens(), val=tokens(), precision=precision))
    assert travels_packed(strategy.plan)


@pytest.mark.rest("takes tenths of a second")
def test_generates() -> None:
    class Generating(Transformer):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.net.generate(input_ids=batch["input_ids"], max_new_tokens=4, do_sample=True, pad_token_id=0)

    def texts(strategy: Any) -> Any:
        torch.manual_seed(3)
        module = Generating(adapted(Int8WeightOnlyConfig)().net)
        return trainer_for(strategy).predict(module, loader(tokens(2)))

    assert_equal(texts(superpipeline(k=1)), texts("auto"), "generated")


@pytest.mark.long("takes a second or more")
def test_resumes(tmp_path: Path) -> None:
    """A checkpoint holds the quantised weights as plain Lightning's does, which cannot load any (a callable map_location)."""
    make, files = adapted(Int8WeightOnlyConfig), [tmp_path / "ours.ckpt", tmp_path / "plain.ckpt"]
    for file, strategy in zip(files, [superpipeline(k=1), "auto"], strict=True):
        fit(make, tokens(), strategy).trainer.save_checkpoint(file)
    saved = [torch.load(file, weights_only=False) for file in files]
    assert_equal(saved[0]["state_dict"], saved[1]["state_dict"], "state_dict")
    with pytest.raises(RuntimeError, match="Callable map_location"):
        fit(make, tokens(6), ckpt_path=files[1], max_epochs=2)
    assert_same(*(fit(make, tokens(6), superpipeline(k=1), ckpt_path=file, max_epochs=2) for file in files))


class Reads(Module):
    """Looks at a quantised weight in every other way."""

    def loss(self, batch: Any) -> Tensor:
        weight = self.net.blocks[3].inner.weight
        assert weight.shape == (32, 16)
        assert weight.requires_grad is False
        whole = weight.dequantize().sum() + weight.qdata.float().mean() + weight.scale.sum()
        copied = copy.deepcopy(weight)
        x = self.net.stem(batch)
        x = F.linear(F.linear(x, self.net.blocks[2].inner.weight), self.net.blocks[2].outer.weight)
        kept = [weight.qdata]
        for block in self.net.blocks:
            x = block(x)
        self.log("kept", kept[0].float().sum() + copied.scale.sum())
        return self.net.head(x).square().mean() + 0.01 * whole


def partly_quantised(kind: type[Module] = Module) -> Module:
    net = Stack()
    for block in net.blocks:
        quantize_(block, Int8WeightOnlyConfig())
        block.inner.bias.requires_grad_(True)
    return kind(net)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", [Module, Reads])
def test_weights_read_without_forward(kind: type[Module]) -> None:
    def make() -> Module:
        return partly_quantised(kind)

    with poisoned():
        ours = fit(make, vectors(), superpipeline(k=1), val=vectors())
    assert_same(ours, fit(make, vectors(), val=vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_quantised_again_between_batches() -> None:
    class Requantises(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            linear = self.net.blocks[1].inner
            with torch.no_grad():
                linear.weight = nn.Parameter(linear.weight.dequantize() * 0.5)
            quantize_(linear, Int8WeightOnlyConfig())

    def make() -> Module:
        return partly_quantised(Requantises)

    assert_same(fit(make, vectors(), superpipeline(k=1)), fit(make, vectors()))


@pytest.mark.rest("takes tenths of a second")
def test_residents_may_be_quantised() -> None:
    strategy = superpipeline(k=1, keep_on_gpu=["net.blocks.2"])
    assert_same(fit(partly_quantised, vectors(), strategy), fit(partly_quantised, vectors()))
    assert "net.blocks.2" not in [layer.name for layer in strategy.plan.layers]


def with_opaque() -> nn.Module:
    net = Stack()
    net.blocks[1].inner.weight = opaque(torch.randn(32, 16))
    return net


def trainable() -> nn.Module:
    net = partly_quantised().net
    net.blocks[1].inner.weight.requires_grad_(True)
    return net


@pytest.mark.parametrize(
    ("make", "remedy"), [(with_opaque, "Exchange it for a plain parameter"), (trainable, "Freeze it")], ids=["opaque", "trained"]
)  # fmt: skip
def test_others_are_refused_by_name(make: Callable[[], nn.Module], remedy: str) -> None:
    with pytest.raises(
        ValueError, match=rf"'blocks.1.inner.weight' is of class (Opaque|Int8Tensor).*{remedy}.*keep_on_gpu="
    ):
        find_layers(make())
    found = find_layers(make(), keep_on_gpu=["blocks.1.inner.weight"])
    assert [name for name, _ in found.aside] == ["blocks.1.inner"]
    assert any("stays on the GPU whole" in note for note in found.notes)


class Named(nn.Parameter):
    """A subclass whose memory is plain: it streams as ever."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            return (
                F.linear(
                    *[a.as_subclass(Tensor) if type(a) is not Tensor and isinstance(a, Tensor) else a for a in args]
                )
                * 2
            )
        return super().__torch_function__(func, types, args, kwargs or {})  # fmt: skip


@pytest.mark.rest("takes tenths of a second")
def test_parameters_with_functions_of_their_own_stream() -> None:
    def make() -> Module:
        net = Stack()
        net.blocks[1].inner.weight = Named(net.blocks[1].inner.weight.detach())
        return Module(net)

    with poisoned():
        ours = fit(make, vectors(), superpipeline(k=1), val=vectors())
    assert_same(ours, fit(make, vectors(), val=vectors()))


def test_parts_of_nested_subclasses() -> None:
    plain = torch.ones(3)
    assert list(parts("weight", plain)) == [("weight", plain)]
    weight = partly_quantised().net.blocks[0].inner.weight
    assert [name for name, _ in parts("weight", weight)] == ["weight.qdata", "weight.scale", "weight.zero_point"]


def scaled_in_place(module: Module, step: int) -> None:
    for block in module.net.blocks:
        block.inner.weight.scale.mul_(1.1)


def copied(module: Module, step: int) -> None:
    for block, other in zip(module.net.blocks, module.net.blocks[1:], strict=False):
        block.inner.weight.copy_(other.inner.weight)


def loaded(module: Module, step: int) -> None:
    if step == 1:
        module.net.blocks.load_state_dict(partly_quantised().net.blocks.state_dict())


def through_data(module: Module, step: int) -> None:
    module.net.blocks[1].inner.weight.data.copy_(module.net.blocks[2].inner.weight)


def through_data_of_a_part(module: Module, step: int) -> None:
    module.net.blocks[1].inner.weight.scale.data.mul_(1.2)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "write", [scaled_in_place, copied, loaded, through_data, through_data_of_a_part], ids=lambda write: write.__name__
)
@pytest.mark.parametrize("when", ["training_step", "validation_step"])
def test_writes_inside_a_step_last(write: Callable[[Module, int], None], when: str) -> None:
    class Writes(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            if when == "training_step":
                with torch.no_grad():
                    write(self, batch_idx)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            if when == "validation_step":
                write(self, batch_idx)
            super().validation_step(batch, batch_idx)

    def make() -> Module:
        return partly_quantised(Writes)

    assert_same(fit(make, vectors(), superpipeline(k=1), val=vectors()), fit(make, vectors(), val=vectors()))


def test_a_part_that_is_exchanged_inside_a_step_is_refused() -> None:
    class Exchanges(Module):
        def loss(self, batch: Any) -> Tensor:
            weight = self.net.blocks[1].inner.weight
            weight.scale = weight.scale * 2
            return super().loss(batch)

    with pytest.raises(
        RuntimeError, match=r"'scale' of a wrapped parameter \(Int8Tensor\) was exchanged inside a step"
    ):
        fit(lambda: partly_quantised(Exchanges), vectors(), superpipeline(k=1))


@pytest.mark.long("takes a second or more")
def test_a_part_that_is_exchanged_between_batches_is_taken_in() -> None:
    class Exchanges(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            weight = self.net.blocks[1].inner.weight
            weight.scale = weight.scale * 2

    def make() -> Module:
        return partly_quantised(Exchanges)

    assert_same(fit(make, vectors(), superpipeline(k=1)), fit(make, vectors()))


def test_a_weight_that_is_to_be_trained_later_is_refused_by_name() -> None:
    class Thaws(Module):
        def on_train_batch_end(self, *_: Any) -> None:
            self.net.blocks[1].inner.weight.requires_grad_(True)

    with pytest.raises(ValueError, match=r"'net.blocks.1.inner.weight' is of class Int8Tensor.*Freeze it"):
        fit(lambda: partly_quantised(Thaws), vectors(), superpipeline(k=1))


@pytest.mark.rest("takes tenths of a second")
def test_parts_are_not_waited_for() -> None:
    """Nobody updates them: while their layer's adapters are updated in the background they are what they were."""
    kinds = []

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            layer = pl_module.net.base_model.model.model.layers[3]
            kinds.append(type(vars(layer.mlp.up_proj.weight)["qdata"]))

    strategy = superpipeline(k=1, optimizer_overlap="forward")
    fit(fused(adapted(Int8WeightOnlyConfig)), tokens(), strategy, recorded="losses", callbacks=[Looks()])
    assert set(kinds) == {Tensor}
