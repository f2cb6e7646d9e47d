"""The recipe for diffusion models: its LoRA loaded again, 8 bits, images of several sizes, and wrong input."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from examples import finetune_diffusion as recipe
from tests.examples.small_recipes import SMALL, common, run


def velocity(transformer: Any) -> Tensor:
    """For an image of 4 × 4 patches and a prompt of 3 tokens."""
    torch.manual_seed(0)
    config = transformer.config
    ids = FluxPipeline._prepare_latent_image_ids(1, 4, 4, "cpu", torch.float32)
    with torch.no_grad():
        return transformer.eval()(
            hidden_states=torch.randn(1, 16, config.in_channels), timestep=torch.full((1,), 0.5), guidance=torch.ones(1),
            encoder_hidden_states=torch.randn(1, 3, config.joint_attention_dim), img_ids=ids, txt_ids=torch.zeros(3, 3),
            pooled_projections=torch.randn(1, config.pooled_projection_dim), return_dict=False,
        )[0]  # fmt: skip


@pytest.mark.long("takes a second or more")
def test_the_lora_loads_into_diffusers_and_has_its_keys(folder: Path) -> None:
    """ComfyUI reads these keys of Flux, too: those of diffusers, after the prefix of the transformer."""
    module = run("diffusion", "run", "--steps", "2", "--lora", "4")
    pipe = FluxPipeline.from_pretrained("flux", dtype=torch.float32)
    without = velocity(pipe.transformer)
    pipe.load_lora_weights("run")
    loaded = velocity(pipe.transformer)
    torch.testing.assert_close(loaded, velocity(module.transformer), rtol=0, atol=1e-6)
    assert (loaded - without).abs().max() > 1e-4
    saved = load_file("run/pytorch_lora_weights.safetensors")
    key = r"transformer\.(single_)?transformer_blocks\.\d+\..+\.lora_[AB]\.weight"
    assert [name for name in saved if not re.fullmatch(key, name)] == []
    assert {min(value.shape) for value in saved.values()} == {4}
    assert len(saved) == 2 * (2 * 12 + 4 * 5)  # the linear modules of two double and four single blocks


@pytest.mark.long("takes a second or more")
def test_the_base_has_8_bits(folder: Path) -> None:
    options = recipe.parse(
        [*SMALL["diffusion"].arguments, "--quantize-8bit", "--lora", "4", "--precision", "bf16-mixed"]
    )
    kinds = {name: type(each) for name, each in recipe.load_transformer(options).named_parameters()}
    quantised = {name for name, kind in kinds.items() if kind is not torch.nn.Parameter}
    assert quantised == {name for name in kinds if name.endswith("base_layer.weight")} != set()


@pytest.mark.long("takes a second or more")
def test_images_have_their_own_aspect_ratio(folder: Path) -> None:
    """What is encoded is in a file for each image, and is encoded once."""
    run("diffusion", "run", "--steps", "1")
    options = recipe.parse([*SMALL["diffusion"].arguments, "--output", "run", "--precision", "32-true"])
    items, missing = common.cached_images(options, common.read_pairs(folder / "photos"), 4)
    assert [size for _, size in items[4:6]] == [(32, 32), (40, 28)]
    assert missing == []
    one = torch.load(items[5][0], weights_only=True)
    assert one["latents"].shape == (10 * 7, 16)
    assert one["ids"][-1].tolist() == [0, 6, 9]


def test_captions_of_metadata(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    lines = [{"file_name": "a.png", "text": "black"}, {"file_name": "b.png", "text": "darker"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert common.read_pairs(tmp_path) == [(tmp_path / "a.png", "black"), (tmp_path / "b.png", "darker")]


FILES: dict[str, Any] = {"a.png": None, "a.txt": "black", "b.png": None, "b.txt": "black"}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"b.txt": ""}, "b.png has no caption. Expected b.txt"),
        ({"b.png": "no image"}, "b.png is not a readable image"),
        ({"b.png": "", "b.txt": ""}, "found 1 images"),
        ({"metadata.jsonl": '{"file_name": "a.png"}'}, 'Expected "file_name" and "text"'),
        ({"metadata.jsonl": '{"file_name": "c.png", "text": "black"}'}, "c.png"),
    ],
)
def test_wrong_data_is_refused(
    changed: dict[str, str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for name, content in (FILES | changed).items():
        if content is None:
            Image.new("RGB", (8, 8)).save(f"data/{name}")
        elif content:
            Path("data", name).write_text(content)
    with pytest.raises(SystemExit):
        recipe.main(["--data", "data", "--output", "run"])
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--lora 4 --full", "exclude each other"),
        ("--ema 1", "--ema 1.0: expected a decay between 0 and 1"),
        ("--ema 0.9 --steps 5", "--steps 5 is not a multiple of --validate-every 2"),
        ("--quantize-8bit --full", "for a frozen model under a LoRA"),
        ("--model classes", "model_index.json"),
    ],
)
def test_wrong_options_are_refused(arguments: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run("diffusion", "run", *arguments.split())
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
