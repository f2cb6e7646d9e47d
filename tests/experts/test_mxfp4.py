"""Checkpoints in MXFP4: loaded with the bytes of their files, and the values that transformers gives them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import sp_lightning
from sp_lightning.capabilities.experts.packed_stacks import PackedStack, named_stacks
from sp_lightning.core.model.wrapped import parts
from tests.support import stacked
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, assert_same, fit, superpipeline
from tests.support.stacked import dense, files_of, write_files
from tests.support.tiers import first

STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
FIRST = f"model.layers.0.{STACKS[0]}"


def empty(dtype: torch.dtype = torch.bfloat16, *, tied: bool = False) -> Any:
    config = dense(tied=tied).config
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def expected(model: Any, tensors: dict[str, Tensor]) -> Any:
    """The model with the experts that transformers makes of the same files."""
    values = {name: tensors[name].to(model.dtype) for name in tensors if not name.endswith(("_blocks", "_scales"))}
    for name, *_ in named_stacks(model):
        values[name] = convert_moe_packed_tensors(
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], dtype=model.dtype
        )
    model.load_state_dict(values, strict=not model.config.tie_word_embeddings)
    return model.eval()


@pytest.mark.parametrize("tied", first([False, True], False, why="an embedding that is the head as well"))
@pytest.mark.parametrize("dtype", first([torch.bfloat16, torch.float32], torch.bfloat16, why="another dtype"))
@pytest.mark.parametrize("shards", [1, 3])
def test_loads_what_transformers_loads(tmp_path: Path, shards: int, dtype: torch.dtype, tied: bool) -> None:
    tensors = files_of(dense(tied=tied))
    model = empty(dtype, tied=tied)
    sp_lightning.load_mxfp4(model, write_files(tmp_path, tensors, shards))
    reference = expected(dense(dtype, tied=tied), tensors)
    stacks = [name for name, *_ in named_stacks(model)]
    assert stacks == [f"model.layers.{number}.{stack}" for number in range(2) for stack in STACKS]
    for name, parameter in reference.named_parameters():
        loaded: Any = model.get_parameter(name)
        if name in stacks:
            assert isinstance(loaded, PackedStack)
            assert not loaded.requires_grad
            values, scales = (part.view(torch.uint8) for _, part in parts("", loaded))
            assert torch.equal(values, tensors[f"{name}_blocks"].flatten(2))
            assert torch.equal(scales, tensors[f"{name}_scales"])
            loaded = loaded.dequantize()
            assert loaded.stride() == parameter.stride()
        assert_equal(loaded.detach(), parameter.detach(), name)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
    model.set_experts_implementation("grouped_mm")
    with torch.no_grad():
        for batch in stacked.tokens():
            assert_equal(model(**batch).logits, reference(**batch).logits, "logits")


def test_a_model_of_accelerate_and_a_part_of_a_model(tmp_path: Path) -> None:
    tensors = files_of(dense())
    with accelerate.init_empty_weights():
        module = stacked.Transformer(AutoModelForCausalLM.from_config(dense().config, dtype=torch.bfloat16))
    sp_lightning.load_mxfp4(module, write_files(tmp_path, tensors))
    reference = expected(dense(), tensors)
    for name, parameter in module.net.named_parameters():
        value = parameter.dequantize() if isinstance(parameter, PackedStack) else parameter.detach()
        assert_equal(value, reference.get_parameter(name).detach(), name)


@pytest.mark.rest("takes tenths of a second")
def test_the_loaded_model_is_trained(tmp_path: Path) -> None:
    folder = write_files(tmp_path, files_of(dense()))

    def make() -> stacked.Transformer:
        model = empty().train()
        sp_lightning.load_mxfp4(model, folder)
        return stacked.Transformer(peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"])))

    strategy = superpipeline(k=1)
    with poisoned():
        ours = fit(make, stacked.tokens(), strategy, precision="bf16-mixed")
    assert_same(ours, fit(make, stacked.tokens(), precision="bf16-mixed"))
    assert strategy.stats().expert_bytes < 6 * sum(layer.nbytes for layer in strategy.plan.layers if layer.rows)


def test_a_model_with_values_gets_those_of_the_files(tmp_path: Path) -> None:
    tensors = files_of(dense())
    model = stacked.transformer("gpt-oss", intermediate_size=64).net.bfloat16()
    for _ in range(2):  # the second time, its experts are packed
        sp_lightning.load_mxfp4(model, write_files(tmp_path, tensors))
    reference = expected(dense(), tensors)
    assert all(torch.equal(p, reference.get_parameter(n)) for n, p in model.named_parameters() if "proj" not in n)
    assert_equal(model.get_parameter(FIRST).dequantize(), reference.get_parameter(FIRST).detach(), "experts")


def _without(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


def _with(name: str, *shape: int, dtype: torch.dtype = torch.uint8) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({name: torch.zeros(shape, dtype=dtype)})


def _with_stack(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update(
        {f"{name}_{part}": tensors[f"{FIRST}_{part}"].clone() for part in ("blocks", "scales")}
    )


def _of_other_models(tensors: dict[str, Tensor]) -> None:
    for name in [*tensors]:
        tensors[f"transformer.{name}"] = tensors.pop(name)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_without("model.norm.weight"), r"='.*' does not fit Gpt.*\. It lacks 'model\.norm\.weight' of shape \(32,\)\."),
        (_with("more", 2), r"The module has no 'more' of shape \(2,\)\."),
        (_without(f"{FIRST}_scales"), rf"It lacks '{FIRST}' of .* The module has no '{FIRST}_blocks'"),
        (_of_other_models, r"It lacks .* and \d+ more\. The module has no 'transformer\..* and \d+ more\."),
        (_with("model.norm.weight", 5), r"It lacks 'model\.norm\.weight' .* no 'model\.norm\.weight' of shape \(5,\)"),
        (_with_stack("model.layers.7.x"), r"has model\.layers\.7\.x_blocks, and Gpt.* has no stacked experts of the name"),
        (_with(f"{FIRST}_blocks", 8, 128, 2, 16), r"gate_up_proj_blocks is torch\.uint8 of shape \(8, 128, 2, 16\)"),
        (_with(f"{FIRST}_scales", 8, 1), r"gate_up_proj_scales is .* Expected torch\.uint8 of shape \(8, 128, 1\)"),
        (_with(f"{FIRST}_scales", 8, 128, 1, dtype=torch.float32), r"gate_up_proj_scales is torch\.float32 of shape"),
    ],
    ids=["missing", "extra", "no scales", "other names", "shape", "no such stack", "shape of blocks", "shape of scales", "dtype"],
)  # fmt: skip
def test_files_of_another_model(change: Callable[[dict[str, Tensor]], Any], said: str, tmp_path: Path) -> None:
    tensors = files_of(dense())
    change(tensors)
    with pytest.raises(ValueError, match=said):
        sp_lightning.load_mxfp4(empty(), write_files(tmp_path, tensors))


def test_a_folder_without_files(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"load_mxfp4='.*': expected model\.safetensors"):
        sp_lightning.load_mxfp4(empty(), tmp_path)


def test_files_without_experts_in_mxfp4(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no experts in MXFP4: expected NAME_blocks"):
        sp_lightning.load_mxfp4(empty(), write_files(tmp_path, {"model.norm.weight": torch.ones(32)}))


def test_buffers_without_values(tmp_path: Path) -> None:
    model = empty()
    model.register_buffer("mine", torch.empty(2, device="meta"), persistent=False)
    with pytest.raises(ValueError, match="Buffer 'mine' is on the meta device"):
        sp_lightning.load_mxfp4(model, write_files(tmp_path, files_of(dense())))


def test_torchao_is_not_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, folder = empty(), write_files(tmp_path, files_of(dense()))
    monkeypatch.setitem(sys.modules, "torchao.prototype", None)
    sp_lightning.load_mxfp4(model, folder)
    assert isinstance(model.get_parameter(FIRST), PackedStack)
