"""``plan --lora R``: adapters in a model that has none are those of PEFT."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torchvision
import transformers
from torch import nn

from sp_lightning.__main__ import main
from tests.support.answers import plan
from tests.support.tiers import first

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
LANGUAGE_MODELS = [
    str(file) for file in sorted(SHAPES.glob("*.json")) if "architectures" in json.loads(file.read_text())
]
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 64,
}  # fmt: skip
VISION: dict[str, Any] = {**SIZES, "vocab_size": None, "image_size": 28, "patch_size": 14}
CONFIGS: dict[str, Any] = {
    "LlamaForCausalLM": lambda: transformers.LlamaConfig(**SIZES),
    "ViTForImageClassification": lambda: transformers.ViTConfig(**VISION),
    "LlavaForConditionalGeneration": lambda: transformers.LlavaConfig(
        vision_config={**VISION, "model_type": "clip_vision_model", "projection_dim": 16},
        text_config={**SIZES, "model_type": "llama"},
    ),
    "Qwen2_5_VLForConditionalGeneration": lambda: transformers.Qwen2_5_VLConfig(
        text_config={
            **SIZES,
            "num_key_value_heads": 2,
            # Sections of rotary embeddings for 16 numbers per head: 8 pairs of time, height and width.
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
        },
        vision_config={"depth": 2, "hidden_size": 32, "out_hidden_size": 32, "num_heads": 2},
    ),
    # Its linear layers have a class of their own, with the transposed weight.
    "GPT2LMHeadModel": lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2),
    # PEFT has adapters for experts of other models, and none for these.
    "GptOssForCausalLM": lambda: transformers.GptOssConfig(
        **{**SIZES, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 4}
    ),
}


def config_file(folder: Path, architecture: str) -> str:
    config = CONFIGS[architecture]()
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": [architecture]}))
    return str(folder / "config.json")


def counted_by_peft(name: str, rank: int) -> tuple[int, int]:
    """How many parameters are trained, and how many there are."""
    with torch.device("meta"):
        if name.endswith(".json"):
            raw = json.loads(Path(name).read_text())
            net = getattr(transformers, raw["architectures"][0])(transformers.AutoConfig.for_model(**raw))
        else:
            net = torchvision.models.get_model(name)
        real = peft.get_peft_model(net, peft.LoraConfig(r=rank, target_modules="all-linear"))
    return real.get_nb_trainable_parameters()  # type: ignore[no-any-return]


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model",
    first(
        [*CONFIGS, "vit_b_16", "resnet18", "vit_h_14", *LANGUAGE_MODELS],
        if_=lambda name: name in ("LlamaForCausalLM", "vit_b_16"),
        second=(*CONFIGS, "resnet18"),
        why="other models; the third tier has those of billions of parameters",
    ),
)
def test_as_many_are_trained_as_with_peft(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The linear layers of blocks alone were counted, and no projection of torch's attention."""
    name = config_file(tmp_path, model) if model in CONFIGS else model
    tokens = () if "vit" in model.lower() or model == "resnet18" else ("--tokens", "128")
    if model.startswith("Qwen2_5_VL"):
        tokens = ("--tokens", "512")  # an image has 256
    found = plan(capsys, name, *tokens, "--lora", "4", "--k", "1", "--k-prime", "1")
    if Path(name).stem in ("deepseek-v2-lite", "glm-4.5-air", "mixtral-8x7b", "qwen3-30b-a3b"):
        assert any("experts" in note and "are not counted" in note for note in found["notes"])
    else:
        assert (found["trained_parameters"], found["parameters"]) == counted_by_peft(name, 4)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", first([[], ["--generate", "4"]], [], why="a second forward"))
def test_in_inference_adapters_are_beside_the_weights(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were refused there."""
    asked = [
        config_file(tmp_path, "LlamaForCausalLM"),
        *["--tokens", "8", "--predict", "--k", "1", "--k-prime", "1"],
        *more,
    ]
    merged, beside = plan(capsys, *asked), plan(capsys, *asked, "--lora", "4")
    adapters = beside["parameters"] - merged["parameters"]
    assert adapters == 2 * 4 * (4 * (32 + 32) + 3 * (32 + 64))
    assert beside["host_bytes"] >= merged["host_bytes"] + 4 * adapters
    assert beside["flops"] > merged["flops"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", [[], ["--generate", "4"]])
def test_stacked_experts_without_adapters_are_named(
    more: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.Qwen3MoeConfig(
        vocab_size=64, hidden_size=32, moe_intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, head_dim=16, num_experts=4, num_experts_per_tok=2, architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    found = plan(capsys, str(tmp_path), "--tokens", "8", "--lora", "4", "--k", "1", *more)
    names = ", ".join(f"model.layers.*.mlp.experts.{name} (2)" for name in ("gate_up_proj", "down_proj"))
    said = "adapters of stacked experts and of their routers are not counted; name a factory that adds them (target_parameters)"
    assert f"{said}: {names}" in found["notes"]


@pytest.mark.rest("takes tenths of a second")
def test_adapters_that_cannot_be(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", "squeezenet1_1", "--lora", "4"])
    assert ended.value.code == 2
    assert "--lora: SqueezeNet has no linear layers" in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_attention_of_torch_has_adapters_that_it_does_not_call(capsys: pytest.CaptureFixture[str]) -> None:
    """``nn.MultiheadAttention`` reads the weight of its projection; PEFT adds adapters beside that, nevertheless."""
    found = plan(
        capsys, "tests.planner.test_plan_adapters:encoder", "--input", "2", "8", "16", "--lora", "2", "--k", "1"
    )
    assert found["activation_bytes"]
    real = peft.get_peft_model(encoder(), peft.LoraConfig(r=2, target_modules="all-linear"))
    assert (found["trained_parameters"], found["parameters"]) == real.get_nb_trainable_parameters()


def encoder() -> nn.Module:
    return nn.Sequential(*(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True) for _ in range(3)))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("stored", "nbytes"), [("bfloat16", 2), ("float32", 4), (None, 4)])
def test_the_base_has_the_dtype_that_transformers_loads_it_in(
    stored: str | None, nbytes: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """8B was planned with 44.5 GiB of host memory, of which the float32 base that nobody loads took 30."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=2, dtype=stored
    )
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    asked = (str(tmp_path), "--tokens", "8", "--k", "1", "--precision", "bf16-mixed")
    found = plan(capsys, *asked, "--lora", "4")
    frozen = found["parameters"] - found["trained_parameters"]
    assert found["host_parts"]["weights"] == pytest.approx(
        4 * found["trained_parameters"] + (nbytes + 2 * (nbytes == 4)) * frozen, rel=0.1
    )
    assert any("bfloat16 weights" in note for note in found["notes"]) == (nbytes == 2)


@pytest.mark.rest("takes tenths of a second")
def test_a_quantised_config_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    ).to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = plan(capsys, str(tmp_path), "--tokens", "8", "--k", "1", "--predict")
    assert any("quantization_config (bitsandbytes)" in note for note in found["notes"])


def adapted() -> nn.Module:
    net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
    peft.inject_adapter_in_model(peft.LoraConfig(target_modules=["0"], r=2), net)
    return net


def test_a_model_with_adapters_gets_no_more_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    """`plan` added a second set of adapters silently."""
    with pytest.raises(SystemExit):
        main(["plan", "tests.planner.test_plan_adapters:adapted", "--input", "2", "16", "--lora", "2"])
    assert "--lora: Sequential has adapters already (0.lora_A" in capsys.readouterr().err
