"""``plan`` of models of diffusers: a config, its folder, or a pipeline, with inputs of the right size."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import nn

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.arguments import command
from sp_lightning.tools.planner.diffusion import LatentInputs, squared_error
from tests.support.answers import plan, question
from tests.support.tiers import first
from tests.support.zoo import DIFFUSION, diffusers

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
ZOO = {entry.name: entry for entry in DIFFUSION}

BATCHES = {
    "unet": "2 images of 64 × 64 (latents 8 × 8), prompts of 7 tokens",
    "sdxl": "2 images of 64 × 64 (latents 8 × 8), prompts of 7 tokens",
    "sd3": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "flux": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "flux2": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "qwen_image": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "z_image": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "lumina2": "2 images of 64 × 64 (latents 8 × 8, 16 tokens), prompts of 7 tokens",
    "sana": "2 images of 64 × 64 (latents 2 × 2, 4 tokens), prompts of 7 tokens",
    "wan": "2 videos of 64 × 64 × 9 frames (latents 8 × 8 × 3 frames, 48 tokens), prompts of 7 tokens",
    "ltx": "2 videos of 64 × 64 × 9 frames (latents 2 × 2 × 2 frames, 8 tokens), prompts of 7 tokens",
    "hunyuan_video": "2 videos of 64 × 64 × 9 frames (latents 8 × 8 × 3 frames, 48 tokens), prompts of 7 tokens",
}
"""By the name of a tiny model, what two images or videos of 64 × 64 pixels are to it."""

MORE: dict[str, dict[str, Any]] = {
    "ChromaTransformer2DModel": {
        "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4, "in_channels": 4,
        "joint_attention_dim": 32, "axes_dims_rope": (2, 2, 4), "approximator_hidden_dim": 32, "approximator_layers": 1,
    },
    "AuraFlowTransformer2DModel": {
        "num_mmdit_layers": 1, "num_single_dit_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4,
        "joint_attention_dim": 32, "caption_projection_dim": 32, "sample_size": 8, "pos_embed_max_size": 64,
    },
    "WanTransformer3DModel": {  # from a first frame
        "num_layers": 1, "attention_head_dim": 8, "num_attention_heads": 4, "in_channels": 36, "text_dim": 32, "freq_dim": 16,
        "ffn_dim": 48, "image_dim": 16, "added_kv_proj_dim": 32,
    },
}  # fmt: skip
"""Other models, by their class, and the same in another form."""


def saved(module: Any, folder: Path) -> str:
    module.save_config(folder)
    return str(folder)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command line that cannot be answered."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def sized(name: str) -> list[str]:
    frames = ["--frames", "9"] if "videos" in BATCHES[name] else []
    tokens = ["--tokens", "7"] if "7 tokens" in BATCHES[name] else []
    return ["--image", "64", "--batch-size", "2", "--k", "1", *frames, *tokens]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(BATCHES, "flux", "sdxl", "wan", why="other families of the same"))
def test_a_folder_with_a_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = ZOO[name].make().net
    found = plan(capsys, saved(net, tmp_path), *sized(name))
    assert found["batch"] == BATCHES[name]
    assert found["parameters"] == sum(weight.numel() for weight in net.parameters())
    assert found["activation_bytes"]
    assert not any("No loss" in note for note in found["notes"])
    what = "videos/s" if "videos" in BATCHES[name] else "images/s"
    assert what in found["verdict"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kind", first(MORE, "AuraFlowTransformer2DModel", why="other families of the same"))
def test_other_models(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diffusers()
    (tmp_path / "config.json").write_text(json.dumps({"_class_name": kind, **MORE[kind]}))
    found = plan(capsys, str(tmp_path), "--image", "64", "--k", "1")
    assert found["activation_bytes"]


@pytest.mark.parametrize("name", first(BATCHES, "flux", why="other families of the same"))
def test_inputs_are_those_of_a_run(name: str, tmp_path: Path) -> None:
    """The model itself takes them, and returns a prediction of the size of the latents."""
    net = ZOO[name].make().net.eval()
    tokens = 7 if "7 tokens" in BATCHES[name] else None
    inputs = LatentInputs(net, tmp_path, 2, tokens, 9 if "videos" in BATCHES[name] else None)
    arguments = inputs.arguments((64, 64))
    with torch.no_grad():
        output = net(**arguments).sample
    latents = arguments[next(iter(arguments))]
    for made, given in zip(*(each if isinstance(each, list) else [each] for each in (output, latents)), strict=True):
        if name == "qwen_image":  # its channels out are those of a latent, and a token has four
            assert made.shape[:2] == given.shape[:2]
        else:
            assert made.shape == given.shape


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "name", first(("flux", "sd3", "z_image", "wan", "ltx"), "flux", why="other families of the same")
)
def test_activations_are_those_that_a_run_saves(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Byte for byte: what autograd saves in a forward on the CPU, without weights."""
    net = ZOO[name].make().net.train()
    found = plan(capsys, saved(net, tmp_path), *sized(name), "--precision", "32-true")
    weights = {weight.untyped_storage().data_ptr() for weight in net.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        memory = tensor.untyped_storage()
        if memory.data_ptr() not in weights:
            kept[memory.data_ptr()] = memory
        return tensor

    inputs = LatentInputs(net, tmp_path, 2, 7, 9 if "videos" in BATCHES[name] else None)
    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        output = net(**inputs.arguments((64, 64))).sample
        squared_error(output if isinstance(output, list) else [output])
    assert found["saved_bytes"]["keep"] == sum(memory.nbytes() for memory in kept.values())


@pytest.mark.long("takes a second or more")
def test_gradient_checkpointing_has_its_own_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """diffusers calls it enable_gradient_checkpointing."""
    model = saved(ZOO["flux"].make().net, tmp_path)
    kept = plan(capsys, model, "--image", "256", "--k", "1")
    found = plan(capsys, model, "--image", "256", "--k", "1", "--gradient-checkpointing")
    assert found["activation_bytes"] < kept["activation_bytes"]
    assert "the model's enable_gradient_checkpointing()" in found["verdict"]


# ---------------------------------------------------------------------- pipelines


def pipeline(folder: Path) -> nn.Module:
    """A folder as ``FluxPipeline.save_pretrained`` writes, without weights. Returns the transformer."""
    net = ZOO["flux"].make().net
    saved(net, folder / "transformer")
    index = {
        "_class_name": "FluxPipeline",
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "transformer": ["diffusers", "FluxTransformer2DModel"],
        "image_encoder": [None, None],
    }
    (folder / "model_index.json").write_text(json.dumps(index))
    return net


def count(module: nn.Module) -> int:
    return sum(weight.numel() for weight in module.parameters())


@pytest.mark.long("takes a second or more")
def test_a_pipeline_is_planned_by_its_trained_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = pipeline(tmp_path)
    found = plan(capsys, str(tmp_path), "--image", "64", "--k", "1")
    assert found["parameters"] == count(net)
    assert any("FluxPipeline: these sizes are of its transformer. Its other parts" in note for note in found["notes"])
    again = plan(capsys, str(tmp_path / "model_index.json"), "--image", "64", "--k", "1")
    assert again["notes"] == found["notes"]


def test_a_pipeline_without_a_known_part(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diffusers()
    (tmp_path / "model_index.json").write_text('{"_class_name": "StableCascadePipeline"}')
    assert "expected transformer/config.json or unet/config.json beside it" in refused(capsys, str(tmp_path))


@pytest.mark.long("takes a second or more")
def test_a_name_of_the_hub_may_be_a_pipeline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline(tmp_path)
    cached = {"model_index.json": str(tmp_path / "model_index.json")}
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: cached.get(file))
    assert plan(capsys, "some/pipeline", "--image", "64", "--k", "1")["activation_bytes"]
    cached.clear()
    assert "hf download some/pipeline config.json, or for a pipeline of diffusers" in refused(capsys, "some/pipeline")


# ---------------------------------------------------------------------- adapters


@pytest.mark.long("three plans")
def test_a_frozen_base_has_the_dtype_of_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = ZOO["flux"].make().net
    options = ("--lora", "4", "--image", "64", "--k", "1")
    wide = plan(capsys, saved(net, tmp_path), *options)
    assert any("does not name the dtype" in note for note in wide["notes"])
    net.to(torch.bfloat16).save_pretrained(tmp_path)
    narrow = plan(capsys, str(tmp_path), *options)
    assert any("the frozen base has bfloat16 weights" in note for note in narrow["notes"])
    # 16 bits of each weight, and places that begin at multiples of some bytes.
    assert 2 * count(net) < narrow["host_parts"]["weights"] < 4 * count(net)
    assert wide["host_parts"]["weights"] > 4 * count(net)
    (tmp_path / "diffusion_pytorch_model.safetensors").unlink()
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"torch_dtype": "bfloat16"}))
    assert plan(capsys, str(config), *options)["host_parts"] == narrow["host_parts"]


# ---------------------------------------------------------------------- what cannot be answered


def test_diffusers_may_be_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    monkeypatch.setitem(sys.modules, "diffusers", None)
    said = refused(capsys, str(tmp_path))
    assert (
        "is a config of diffusers (FluxTransformer2DModel), and diffusers is not installed: pip install diffusers"
        in said
    )


@pytest.mark.rest("takes tenths of a second")
def test_models_whose_inputs_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, saved(ZOO["autoencoder_kl"].make().net, tmp_path))
    assert "does not know the inputs of AutoencoderKL. It reads FluxTransformer2DModel, " in said
    assert "plan my_file:make_model" in said
    (tmp_path / "config.json").write_text('{"_class_name": "OfTomorrow"}')
    assert "got 'OfTomorrow'. If it is newer: pip install -U diffusers" in refused(capsys, str(tmp_path))
    (tmp_path / "config.json").write_text('{"_class_name": "FluxTransformer2DModel", "num_layers": "many"}')
    assert "diffusers cannot make a model from" in refused(capsys, str(tmp_path))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        (
            "flux",
            ["--image", "1000"],
            "--image 1000: FluxTransformer2DModel takes multiples of 16 pixels. Use --image 992.",
        ),
        ("flux", ["--image", "8"], "Use --image 16."),
        (
            "flux",
            ["--image", "1000x1001"],
            "--image 1000x1001: FluxTransformer2DModel takes multiples of 16 pixels. Use --image 992x992.",
        ),
        ("flux", ["--image", "32x40"], "Use --image 32x32."),
        ("flux", ["--frames", "9"], "--frames 9: FluxTransformer2DModel takes images. Leave --frames out."),
        ("flux", ["--input", "2", "4"], "--input cannot be used with"),
        ("flux", ["--generate", "4"], "is not a language model of transformers"),
        ("wan", ["--frames", "8"], "takes 1 frame and a multiple of 4. Use --frames 5."),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else value if value in ZOO else "",
)
def test_sizes_that_a_model_cannot_take(
    name: str, options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in refused(capsys, saved(ZOO[name].make().net, tmp_path), *options)


@pytest.mark.long("takes a second or more")
def test_images_that_are_not_square(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, saved(ZOO["flux"].make().net, tmp_path), "--image", "32x64", "--k", "1")
    assert found["batch"].startswith("1 image of 32 × 64 (latents 4 × 8, 8 tokens)")
    said = refused(capsys, "resnet18", "--image", "32x64")
    assert "--image 32x64: 'resnet18' is planned with square images. Use --image 64." in said
    assert "'0x64' is not a size in pixels. For example 1024 or 480x832" in refused(
        capsys, "resnet18", "--image", "0x64"
    )
    asked = question("resnet18", "--image", "32x64")
    assert command(asked).endswith("plan resnet18 --image 32x64")


@pytest.mark.rest("takes tenths of a second")
def test_frames_are_for_videos(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--frames 9: 'resnet18' takes no videos. Leave --frames out." in refused(capsys, "resnet18", "--frames", "9")


# ---------------------------------------------------------------------- models as they are


@pytest.mark.parametrize(
    ("shape", "parameters", "batch"),
    [
        ("flux-dev", 11_901_408_320, "1 image of 1024 × 1024 (latents 128 × 128, 4096 tokens), a prompt of 512 tokens"),
        ("sdxl-unet.json", 2_567_463_684, "1 image of 1024 × 1024 (latents 128 × 128), a prompt of 77 tokens"),
        (
            "wan-2.1-14b.json",
            14_288_491_584,
            "1 video of 480 × 832 × 81 frames (latents 60 × 104 × 21 frames, 32760 tokens), a prompt of 512 tokens",
        ),
    ],
    ids=["flux", "sdxl", "wan"],
)
@pytest.mark.long("models of billions of parameters")
def test_shapes(shape: str, parameters: int, batch: str, capsys: pytest.CaptureFixture[str]) -> None:
    diffusers()
    found = plan(capsys, str(SHAPES / shape), "--k", "1")
    assert found["parameters"] == parameters
    assert found["batch"] == batch
    assert found["activation_bytes"]
