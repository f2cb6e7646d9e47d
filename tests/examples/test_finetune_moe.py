"""The recipe for mixtures of experts: the router's loss, packed experts and their adapters, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from examples import finetune_moe
from sp_lightning.capabilities.experts.packed_stacks import PackedStack
from tests.examples.small_recipes import QWEN, assert_same, common, run, steps_in
from tests.support.stacked import dense, files_of, write_files
from tests.support.tiers import first


@pytest.mark.long("takes a second or more")
def test_the_router_learns_from_the_auxiliary_loss(folder: Path, tokenizer: Any) -> None:
    """With a model whose loss is constant, only the auxiliary loss has gradients."""
    arguments = ["--model", "qwen.json", "--precision", "32-true", "--length", "16", "--aux", "0.5"]
    options = finetune_moe.parse([*arguments, "--no-gradient-checkpointing"])
    config, _ = finetune_moe.read_config(options)
    module = finetune_moe.FineTune(finetune_moe.load_model(options, config), 1e-3, 4, options.aux)
    torch.nn.init.zeros_(module.model.lm_head.weight)
    window = common.pack([{"text": "word " * 40}], tokenizer, 16)[0][0]
    out = module({name: value[None] for name, value in window.items()})
    torch.testing.assert_close(out.loss, torch.tensor(2048.0).log() + 0.5 * out.aux_loss)
    assert out.aux_loss >= 2  # experts per token
    out.loss.backward()
    router = module.model.model.layers[0].mlp.gate.weight
    assert router.grad is not None
    assert router.grad.any()


@pytest.fixture
def base(folder: Path, tokenizer: Any) -> list[str]:
    """A folder with a small model, as adapters need one to be saved with."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**QWEN, eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained("base")
    tokenizer.save_pretrained("base")
    return ["--model", "base", "--lora", "4"]


EXPERTS = [["--experts", "4bit"], ["--lora-experts"], ["--experts", "4bit", "--lora-experts"]]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", first(EXPERTS, EXPERTS[-1], why="one of the two options"), ids=" ".join)
def test_adapters_beside_experts_in_4_bits_and_adapters_of_experts(
    more: list[str], base: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run("moe", "ours", *base, "--precision", "bf16-mixed", *more)
    said = steps_in(capsys.readouterr().out)
    assert_same(ours, run("moe", "plain", *base, "--precision", "bf16-mixed", *more, "--strategy", "auto"))
    assert said == steps_in(capsys.readouterr().out)
    adapters = load_file("ours/adapter/adapter_model.safetensors")
    assert any("self_attn" in name for name in adapters)
    of_experts = [bool(values.any()) for name, values in adapters.items() if "experts" in name and "lora_B" in name]
    assert of_experts == [True] * 4 * ("--lora-experts" in more)  # two stacks in each of two blocks
    saved = [torch.load(f"{each}/last.ckpt", weights_only=True)["state_dict"] for each in ("ours", "plain")]
    assert {name for name in saved[1] if "lora_" in name} == {*saved[0]}
    packed = [type(value).__name__ for value in saved[1].values()].count("PackedStack")
    assert packed == 4 * ("--experts" in more)


@pytest.mark.long("takes a second or more")
def test_experts_in_mxfp4_keep_the_values_of_their_files(
    folder: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a config and files like those of gpt-oss."""
    model = folder / "gpt-oss"
    write_files(model, files_of(dense(vocab_size=2048)))
    config = dense(vocab_size=2048).config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (model / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.save_pretrained(model)
    arguments = ["--model", str(model), "--lora", "4", "--experts", "4bit", "--steps", "2", "--precision", "bf16-mixed"]
    options = finetune_moe.parse([*arguments, "--length", "16", "--no-gradient-checkpointing"])
    loaded = finetune_moe.load_model(options, finetune_moe.read_config(options)[0])
    packed = [p for p in loaded.parameters() if isinstance(p, PackedStack)]
    assert [each.format for each in packed] == ["mxfp4"] * 4
    run("moe", "ours", *arguments)
    said = steps_in(capsys.readouterr().out)
    run("moe", "plain", *arguments, "--strategy", "auto")
    assert said == steps_in(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model llama.json", "a llama model, which has no auxiliary router loss"),
        ("--model llama.json --aux 0.1", "a llama model, which has no auxiliary router loss"),
        ("--aux -1", "--aux -1.0: expected 0 or more"),
        ("--lora-experts", "--lora-experts: only adapters can be trained then. For example: --lora-experts --lora 16"),
        ("--experts 4bit", "--experts 4bit: only adapters can be trained then"),
        ("--experts 4bit --lora 4 --model odd.json", "has 24 inputs. Expected a multiple of 16"),
        ("--experts 4bit --lora 4 --model llama.json --aux 0", "has no stacked experts to pack"),
        ("--lora-experts --lora 4 --model llama.json --aux 0", "has no experts.gate_up_proj"),
    ],
)
def test_errors_in_the_input_are_reported_before_any_work(
    arguments: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("odd.json").write_text(json.dumps(QWEN | {"moe_intermediate_size": 24}))
    with pytest.raises(SystemExit) as stop:
        run("moe", "run", *arguments.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
