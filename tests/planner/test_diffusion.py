"""``plan`` of models of diffusers: by a factory, as in the guide. Their configs are an error that says so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch

from sp_lightning.__main__ import main
from tests.support.planner import plan
from tests.support.repository import ROOT, blocks
from tests.support.zoo import DIFFUSION, diffusers

FACTORY = "examples.shapes.flux:make_flux"


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The message of a command line that cannot be answered."""
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


def tiny() -> Any:
    """A factory: a small Flux and what its forward takes."""
    net: Any = next(each for each in DIFFUSION if each.name == "flux").make().net
    config = net.config
    net.example_input_array = {
        "hidden_states": torch.zeros(2, 16, config.in_channels),
        "encoder_hidden_states": torch.zeros(2, 7, config.joint_attention_dim),
        "pooled_projections": torch.zeros(2, config.pooled_projection_dim),
        "timestep": torch.zeros(2),
        "img_ids": torch.zeros(16, 3),
        "txt_ids": torch.zeros(7, 3),
    }
    return net


@pytest.mark.long("takes a second or more")
def test_a_factory_of_diffusers_enables_its_own_checkpoints(capsys: pytest.CaptureFixture[str]) -> None:
    """diffusers calls the method enable_gradient_checkpointing."""
    asked = (f"{__name__}:tiny", "--k", "1", "--precision", "32-true")
    kept, found = plan(capsys, *asked), plan(capsys, *asked, "--gradient-checkpointing")
    assert found["batch"] == "its example_input_array"
    assert found["activation_bytes"] < kept["activation_bytes"]
    assert "the model's enable_gradient_checkpointing()" in found["verdict"]
    assert "checkpointing" not in kept["verdict"]


@pytest.mark.long("a model of billions of parameters")
def test_the_factory_of_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    diffusers()
    found = plan(capsys, FACTORY, "--lora", "16", "--k", "1")
    assert found["parameters"] - found["trained_parameters"] == 11_901_408_320
    assert found["host_parts"]["weights"] == pytest.approx(
        2 * 11_901_408_320 + 4 * found["trained_parameters"], rel=0.01
    )


def test_the_guide_shows_the_factory() -> None:
    shown = blocks(ROOT / "examples" / "guide" / "vision.md", "python")
    (factory,) = (block for block in shown if "def make_flux" in block)
    assert (ROOT / "examples" / "shapes" / "flux.py").read_text().endswith(f"\n\n{factory}")


def test_a_config_of_diffusers_says_to_write_a_factory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model, of a pipeline, and by their names on the hub."""
    for name, kind in (("config.json", "FluxTransformer2DModel"), ("model_index.json", "FluxPipeline")):
        (tmp_path / name).write_text(json.dumps({"_class_name": kind}))
        for model in (str(tmp_path), str(tmp_path / name)):
            said = refused(capsys, model)
            assert f"{name}' is of diffusers ({kind}), and `plan` does not know its inputs." in said
            assert "plan my_file:make_model. examples/guide/vision.md has one for Flux." in said
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda name, file: None)
    assert "A model of diffusers needs a factory (examples/guide/vision.md)." in refused(capsys, "some/pipeline")
