"""The recipe for mixtures of experts: bitwise as plain Lightning, resumed runs, the router's loss, adapters, wrong input."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from examples import finetune_moe
from sp_lightning.experts.packed_stacks import PackedStack
from tests.support.mxfp4 import dense, files_of, write
from tests.support.tiers import first

TINY: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 1024, "hidden_size": 32,
    "moe_intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 64,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "vocab_size": 1024, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "num_local_experts": 4, "max_position_embeddings": 64,
}  # fmt: skip
LLAMA: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 1024, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Trained on a part of the default data."""
    rows = list(itertools.islice(finetune_moe.python_functions(), 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune_moe, "python_functions", lambda: rows)
        return finetune_moe.small_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with configs, and rows of both kinds in ``rows.jsonl``."""
    monkeypatch.setattr(finetune_moe, "small_tokenizer", lambda: tokenizer)
    for name, config in (("qwen", TINY), ("mixtral", MIXTRAL), ("llama", LLAMA)):
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    rows = [{"prompt": "2 + 2 =", "completion": " 4"}, {"text": "A text. " * 8}]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 20))
    return tmp_path


def run(folder: Path, output: str, *more: str) -> Path:
    """Trains in float32 on the CPU, and returns the output folder."""
    if "--model" not in more:
        more = ("--model", str(folder / "qwen.json"), *more)
    size = ["--length", "16", "--batch-size", "2", "--accumulate-grad-batches", "2", "--lr", "1e-2", "--every", "2"]
    run_on = ["--precision", "32-true", "--accelerator", "cpu"]
    arguments = ["--data", str(folder / "rows.jsonl"), *size, *run_on, "--output", str(folder / output), *more]
    finetune_moe.main(arguments)
    return folder / output


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder / "model").state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def losses(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


@pytest.mark.parametrize(
    "more",
    first(
        [[], ["--no-gradient-checkpointing"], ["--precision", "bf16-mixed"], ["--aux", "0"], ["--model", "mixtral"]],
        [],
        why="the recipe's other options",
    ),
    ids=" ".join,
)
def test_weights_are_bitwise_those_of_plain_lightning(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if "mixtral" in more:
        more = ["--model", str(folder / "mixtral.json")]
    ours = run(folder, "ours", "--steps", "4", *more)
    said = losses(capsys)
    plain = run(folder, "plain", "--steps", "4", "--strategy", "auto", *more)
    assert said == losses(capsys)
    assert [line.split()[1] for line in said] == ["0/4", "2/4", "4/4"]
    assert all(("aux_loss" in line) == ("--aux" not in more) for line in said[1:])
    assert (ours / "logs" / "version_0" / "metrics.csv").read_text() == (
        plain / "logs" / "version_0" / "metrics.csv"
    ).read_text()
    assert_same(weights(ours), weights(plain))


@pytest.mark.rest("the recipe for language models resumes in the first tier")
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(folder, "whole", "--steps", "6")
    step = finetune_moe.FineTune.training_step

    def stops(self: finetune_moe.FineTune, *batch: Any) -> Tensor:
        if self.global_step == 5:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_moe.FineTune, "training_step", stops)
        with pytest.raises(RuntimeError, match="the power fails"):
            run(folder, "part", "--steps", "6")
    last = folder / "part" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 4
    assert_same(weights(run(folder, "part", "--steps", "6", "--resume", str(last))), weights(whole))


def test_the_router_learns_from_the_auxiliary_loss(folder: Path, tokenizer: Any) -> None:
    """With a model whose loss is constant, only the auxiliary loss has gradients."""
    arguments = ["--model", str(folder / "qwen.json"), "--precision", "32-true", "--length", "16", "--aux", "0.5"]
    options = finetune_moe.make_parser().parse_args([*arguments, "--no-gradient-checkpointing"])
    config, _ = finetune_moe.read_config(options)
    module = finetune_moe.FineTune(finetune_moe.load_model(options, config), 1e-3, 4, options.aux)
    torch.nn.init.zeros_(module.model.lm_head.weight)
    window = finetune_moe.pack([{"text": "word " * 40}], tokenizer, 16)[0]
    out = module({name: value[None] for name, value in window.items()})
    torch.testing.assert_close(out.loss, torch.tensor(1024.0).log() + 0.5 * out.aux_loss)
    assert out.aux_loss >= 2  # experts per token
    out.loss.backward()
    router = module.model.model.layers[0].mlp.gate.weight
    assert router.grad is not None
    assert router.grad.any()


@pytest.mark.rest("the first tier trains every weight")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lora_trains_attention_only(folder: Path, precision: str) -> None:
    base = run(folder, "base", "--steps", "2") / "model"
    arguments = ["--model", str(base), "--lora", "4", "--steps", "3", "--precision", precision]
    ours, plain = run(folder, "ours", *arguments), run(folder, "plain", *arguments, "--strategy", "auto")
    saved = torch.load(ours / "last.ckpt", weights_only=True)["state_dict"]
    assert saved
    assert all("lora_" in name and "self_attn" in name for name in saved)
    adapters = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), each / "adapter").state_dict()
        for each in (ours, plain)
    ]
    assert_same(*adapters)
    assert any(bool(adapters[0][name].any()) for name in adapters[0] if "lora_B" in name)


def pretrained(folder: Path, tokenizer: Any) -> str:
    """A folder with a small model, as adapters need one to be saved with."""
    torch.manual_seed(3)
    config = Qwen3MoeConfig(**TINY, eos_token_id=tokenizer.eos_token_id)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    return str(folder / "base")


EXPERTS = [["--experts", "4bit"], ["--lora-experts"], ["--experts", "4bit", "--lora-experts"]]


@pytest.mark.parametrize("more", first(EXPERTS, EXPERTS[-1], why="one of the two options"), ids=" ".join)
def test_adapters_beside_experts_in_4_bits_and_adapters_of_experts(
    more: list[str], folder: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    base = ["--model", pretrained(folder, tokenizer)]
    arguments = [*base, "--lora", "4", "--steps", "4", "--precision", "bf16-mixed", *more]
    ours = run(folder, "ours", *arguments)
    said = losses(capsys)
    plain = run(folder, "plain", *arguments, "--strategy", "auto")
    assert said == losses(capsys)
    adapters = [load_file(each / "adapter" / "adapter_model.safetensors") for each in (ours, plain)]
    assert_same(*adapters)
    assert any("self_attn" in name for name in adapters[0])
    of_experts = [bool(values.any()) for name, values in adapters[0].items() if "experts" in name and "lora_B" in name]
    assert of_experts == [True] * 4 * ("--lora-experts" in more)  # two stacks in each of two blocks
    saved = [torch.load(each / "last.ckpt", weights_only=True)["state_dict"] for each in (ours, plain)]
    assert {name for name in saved[1] if "lora_" in name} == {*saved[0]}
    packed = [type(value).__name__ for value in saved[1].values()].count("PackedStack")
    assert packed == 4 * ("--experts" in more)


@pytest.mark.rest("a checkpoint resumes in the tests of packed experts")
@pytest.mark.parametrize("strategy", ["superpipeline", "auto"])
def test_a_run_with_packed_experts_resumes(
    strategy: str, folder: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = ["--model", pretrained(folder, tokenizer), "--lora", "4", "--experts", "4bit", "--lora-experts"]
    arguments = [*base, "--strategy", strategy, "--steps"]
    # The learning rate is constant: the schedule of a run with fewer steps would be another one.
    monkeypatch.setattr(finetune_moe, "cosine_with_warmup", lambda optimizer, *_: LambdaLR(optimizer, lambda _: 1.0))
    whole = run(folder, "whole", *arguments, "6")
    last = run(folder, "part", *arguments, "4") / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 4
    part = run(folder, "part", *arguments, "6", "--resume", str(last))
    assert_same(*(load_file(each / "adapter" / "adapter_model.safetensors") for each in (whole, part)))


def test_experts_in_mxfp4_keep_the_values_of_their_files(
    folder: Path, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder with a config and files like those of gpt-oss."""
    model = folder / "gpt-oss"
    write(model, files_of(dense(vocab_size=1024)))
    config = dense(vocab_size=1024).config.to_dict() | {"quantization_config": {"quant_method": "mxfp4"}}
    (model / "config.json").write_text(json.dumps(config, default=str))
    tokenizer.save_pretrained(model)
    arguments = ["--model", str(model), "--lora", "4", "--experts", "4bit", "--steps", "2", "--precision", "bf16-mixed"]
    options = finetune_moe.parse([*arguments, "--length", "16", "--no-gradient-checkpointing"])
    loaded = finetune_moe.load_model(options, finetune_moe.read_config(options)[0])
    packed = [p for p in loaded.parameters() if isinstance(p, PackedStack)]
    assert [each.format for each in packed] == ["mxfp4"] * 4
    run(folder, "ours", *arguments)
    said = losses(capsys)
    run(folder, "plain", *arguments, "--strategy", "auto")
    assert said == losses(capsys)


def test_only_the_completion_counts(tokenizer: Any) -> None:
    tokens, labels = finetune_moe.encode({"prompt": "2 + 2 =", "completion": " 4"}, tokenizer)
    assert tokenizer.decode(tokens) == "2 + 2 = 4<|end|>"
    assert tokenizer.decode([label for label in labels if label != finetune_moe.IGNORED]) == " 4<|end|>"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no.jsonl"], "--data no.jsonl: not found"),
        (["--data", "."], "found a folder. Expected a .jsonl file"),
        (["--data", "qwen.json"], "found .json. Expected a .jsonl file"),
        (["--data", "columns.jsonl"], 'row 2: found the columns question. Expected "prompt"'),
        (["--data", "broken.jsonl"], "line 1: not JSON"),
        (["--data", "short.jsonl"], "has 0 training windows. Expected at least 8"),
        (["--model", "/no/such/model"], "--model /no/such/model: not found"),
        (["--model", "llama.json"], "a llama model, which has no auxiliary router loss"),
        (["--model", "llama.json", "--aux", "0.1"], "a llama model, which has no auxiliary router loss"),
        (["--length", "65"], "reads at most 64 tokens. For example: --length 64"),
        (["--steps", "0"], "--steps 0: expected a number above 0"),
        (["--aux", "-1"], "--aux -1.0: expected 0 or more"),
        (
            ["--lora-experts"],
            "--lora-experts: only adapters can be trained then. For example: --lora-experts --lora 16",
        ),
        (["--experts", "4bit"], "--experts 4bit: only adapters can be trained then"),
        (["--experts", "4bit", "--lora", "4", "--model", "odd.json"], "has 24 inputs. Expected a multiple of 16"),
        (["--experts", "4bit", "--lora", "4", "--model", "llama.json", "--aux", "0"], "has no stacked experts to pack"),
        (["--lora-experts", "--lora", "4", "--model", "llama.json", "--aux", "0"], "has no experts.gate_up_proj"),
        (["--resume", "no.ckpt"], "--resume no.ckpt: not found"),
        (
            ["--resume", "other.ckpt"],
            "--resume other.ckpt: a checkpoint of another model or of a run with other options",
        ),
        (["--gpu-memory", "16"], "gpu_memory takes a number with a unit"),
        (["--strategy", "ddp_cpu"], "invalid choice: 'ddp_cpu'"),
        (["--output", "rows.jsonl"], "--output rows.jsonl: expected a folder, got a file"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_errors_in_the_input_are_reported_before_any_work(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    Path("columns.jsonl").write_text('{"text": "fine"}\n{"question": "Why?"}\n')
    Path("broken.jsonl").write_text("not json\n")
    Path("odd.json").write_text(json.dumps(TINY | {"moe_intermediate_size": 24}))
    Path("short.jsonl").write_text('{"text": "short"}\n')
    state = {"state_dict": {"net.weight": torch.ones(2)}, "optimizer_states": [{"param_groups": [{"params": [0]}]}]}
    torch.save({"epoch": 0, "global_step": 1, **state}, "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        finetune_moe.main(
            ["--model", "qwen.json", "--data", "rows.jsonl", "--length", "16", "--output", "run", *arguments]
        )
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
