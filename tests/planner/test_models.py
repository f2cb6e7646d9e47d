"""What ``plan`` says of models as they are: each with the config itself, on paper, and not a small copy of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from sp_lightning.__main__ import main
from sp_lightning.core.model.find import find_layers
from sp_lightning.tools.planner.fake import fake_tensors
from tests.support.planner import plan
from tests.support.tiers import some

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
VISION_AND_LANGUAGE: dict[str, Any] = dict(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
# What the checkpoints of these models have in their configs, and the library's defaults do not.
_HALF_ROTARY = {
    "text_config": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}}
}
MORE: dict[str, dict[str, Any]] = {
    "blip-2": {"image_token_index": 50265},
    "glm46v": _HALF_ROTARY,
    "glm4v": _HALF_ROTARY,
    "glm4v_moe": {"text_config": {**_HALF_ROTARY["text_config"], "head_dim": 128}},
    "glmga": _HALF_ROTARY,
    "instructblip": {"image_token_index": 32000},
}
# Models whose batch `plan` refuses, with the error that it names. A default config does not fit together, or `plan` does not
# know the inputs.
REFUSED = {
    "dots3_note": "Attempting to broadcast a dimension of length 1024",
    "idefics": "no image of 224 × 224 could be prepared",
    "instructblipvideo": "not enough values to unpack",  # it takes videos
    "llama4": "a and b must have same reduction dim",
    "molmo2": "Attempting to broadcast a dimension of length 1404928",
    "pi0": "missing 1 required positional argument: 'state'",  # it takes the state of a robot
    "qwen2_5_omni_thinker": "transformers has no image processor for it",
    "qwen3_omni_moe_thinker": "transformers has no image processor for it",
    "step3p7": "Could not find a `sliding_window` argument in the config",
    "udop": "no image of 224 × 224 could be prepared",
    "vision-encoder-decoder": "transformers has no image processor for it",
}


def default(kind: str, folder: Path) -> str:
    """A config that says what model it is for; the rest is the library's default, as far as that fits together."""
    file = folder / f"{kind}.json"
    named = {"architectures": [VISION_AND_LANGUAGE[kind]]} if kind in VISION_AND_LANGUAGE else {}
    file.write_text(json.dumps({"model_type": kind, **named, **MORE.get(kind, {})}))
    return str(file)


@pytest.mark.long("a model of 76 billion parameters is made on paper")
def test_of_the_blocks_of_a_vision_tower_all_travel() -> None:
    """17 of 32 stayed on the device, 5.6 GiB that did not fit, because together they were 1/50 of the model."""
    with fake_tensors():
        module = transformers.Qwen2_5_VLForConditionalGeneration(transformers.Qwen2_5_VLConfig())
        found = find_layers(module)
    assert sum(layer.name.startswith("model.visual.blocks.") for layer in found.layers) == 32
    assert sum(p.numel() * p.element_size() for _, p in found.residents.parameters) < 2**26


@pytest.mark.long("a model of 76 billion parameters is run on paper, twice; the second tier has others with images")
def test_images_of_a_model_with_patches_of_any_number_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It "takes no images", and without --image its vision tower's activations were left out without a word."""
    config = default("qwen2_5_vl", tmp_path)
    found = {size: plan(capsys, config, "--image", size, "--predict", "--k", "1") for size in ("448", "896")}
    assert found["448"]["batch"] == "1 × 2048 tokens, 1 image of 448 × 448"
    assert found["448"]["notes"] == found["896"]["notes"], "all is counted"
    # Each patch of 14 × 14 has 1280 numbers between blocks; a block multiplies it with 4 · 1280² and 3 · 1280 · 3420.
    patches = (896**2 - 448**2) / 14**2
    more = found["896"]["flops"] - found["448"]["flops"]
    assert more > 2 * patches * 32 * (4 * 1280**2 + 3 * 1280 * 3420)


@pytest.mark.parametrize(
    "kind",
    some(
        VISION_AND_LANGUAGE,
        "llava",
        "qwen3_vl",
        "llava_next",
        "glm4v_moe",
        "gemma3",
        "fuyu",
        why="one of a hundred models",
    ),
)
@pytest.mark.long("models of billions of parameters")
def test_each_model_of_vision_and_language_counts_or_says_what_it_does_not(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        main(["plan", default(kind, tmp_path), "--precision", "bf16-true", "--k", "1", "--json"])
        status: Any = 0
    except SystemExit as ended:
        status = ended.code
    said = capsys.readouterr()
    if status == 2:
        if kind in REFUSED:
            assert "cannot take its batch" in said.err
            assert REFUSED[kind] in said.err
        else:
            assert re.search("transformers cannot make a model from|could be run without values", said.err)
        return
    found = json.loads(said.out)
    uncounted = any("The images are not counted" in note for note in found["notes"])
    assert status == 0
    config = transformers.AutoConfig.for_model(kind)
    without_tower = getattr(config, "vision_config", config) is None or kind in ("evolla", "mistral4")
    assert uncounted or without_tower or " image of " in found["batch"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("shape", "options"),
    [
        pytest.param("qwen3-30b-a3b", (), marks=pytest.mark.rest("a model of 30 billion parameters")),
        *(
            pytest.param(shape, options, marks=pytest.mark.long("a model of many billions of parameters"))
            for shape in (
                "qwen3-30b-a3b",
                "mixtral-8x7b",
                "gpt-oss-20b",
                "glm-4.5-air",
                "deepseek-v2-lite",
                "llama-3-70b",
            )
            for options in ((), ("--generate", "4"))
            if (shape, options) != ("qwen3-30b-a3b", ())
        ),
    ],
)
def test_shapes_are_run(shape: str, options: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Qwen3's experts train in bf16-mixed, and torch 2.14 says without values that it takes bfloat16 alone."""
    found = plan(capsys, str(SHAPES / f"{shape}.json"), "--tokens", "512", "--k", "1", *options)
    assert found["activation_bytes"]


@pytest.mark.long("a model of real size is run on paper")
def test_a_model_of_few_positions_is_given_no_more_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """CLIP was told that 2048 tokens are more than 77, though nobody said 2048."""
    config = default("clip", tmp_path)
    assert plan(capsys, config, "--k", "1")["batch"] == "1 × 77 tokens, 1 image of 224 × 224"
    with pytest.raises(SystemExit) as ended:
        main(["plan", config, "--tokens", "2048"])
    assert ended.value.code == 2
    assert "has 77 positions. Use --tokens 77." in capsys.readouterr().err


class ReadsValues(nn.Sequential):
    """As timm's models, which give each block its part of a range of rates."""

    def __init__(self) -> None:
        rates = [rate.item() for rate in torch.linspace(0, 0.5, 4)]
        super().__init__(*(nn.Sequential(nn.Linear(16, 16), nn.Dropout(rate)) for rate in rates))


@pytest.mark.rest("takes tenths of a second")
def test_a_factory_may_read_values_that_it_has_made(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, f"{__name__}:ReadsValues", "--input", "2", "16", "--k", "1")
    assert len(found["layers"]) == 4


class WithLoss(nn.Module):
    """A factory's model that has a loss of its own if it is given labels, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(512, 16)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(16, 512)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.head(self.blocks(self.embedding(ids)))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class WithoutLoss(WithLoss):
    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids)["logits"]


@pytest.mark.rest("takes tenths of a second")
def test_labels_of_a_factorys_model_count(capsys: pytest.CaptureFixture[str]) -> None:
    """Its loss was left out, without a word, and "it fits"."""
    model = f"{__name__}:WithLoss"
    found = plan(capsys, model, "--input", "1", "2048", "--precision", "32-true", "--k", "1")
    assert found["batch"] == "a batch of 1 × 2048 integers, which are also the labels"
    assert not any("No loss is counted" in note for note in found["notes"])
    bare = plan(capsys, f"{__name__}:WithoutLoss", "--input", "1", "2048", "--precision", "32-true", "--k", "1")
    assert found["activation_bytes"] > bare["activation_bytes"]
    assert any("No loss is counted, because the forward returns none" in note for note in bare["notes"])
    assert "labels" not in plan(capsys, model, "--input", "1", "2048", "--predict", "--k", "1")["batch"]


@pytest.mark.rest("takes tenths of a second")
def test_tokens_of_a_factorys_model(capsys: pytest.CaptureFixture[str]) -> None:
    """They were ignored: "no batch known"."""
    found = plan(capsys, f"{__name__}:WithLoss", "--tokens", "64", "--batch-size", "2", "--k", "1")
    assert found["batch"] == "a batch of 2 × 64 integers, which are also the labels"
    with pytest.raises(SystemExit) as ended:
        main(["plan", f"{__name__}:WithLoss", "--tokens", "64", "--input", "1", "64"])
    assert ended.value.code == 2
    assert "--tokens cannot be used with" in capsys.readouterr().err
