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

from tests.planner.models import encoder
from tests.support.planner import plan
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
def test_attention_of_torch_has_adapters_that_it_does_not_call(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.models:encoder", "--input", "2", "8", "16", "--lora", "2", "--k", "1")
    assert found["activation_bytes"]
    real = peft.get_peft_model(encoder(), peft.LoraConfig(r=2, target_modules="all-linear"))
    assert (found["trained_parameters"], found["parameters"]) == real.get_nb_trainable_parameters()
