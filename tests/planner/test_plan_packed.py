"""``plan`` with experts in 4 bits: packed bytes, and the time of dequantisation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import sp_lightning
from sp_lightning.__main__ import main
from tests.support.answers import plan

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2,
    "vocab_size": 64, "head_dim": 32,
}  # fmt: skip
EXPERTS = 2 * 4 * (64 * 2 * 96 + 96 * 64)
"""Values of the experts: of two layers with four experts each."""


def write(folder: Path, **more: Any) -> str:
    config = transformers.GptOssConfig(
        architectures=["GptOssForCausalLM"], num_local_experts=4, num_experts_per_tok=2, **SIZES
    ).to_dict()
    (folder / "config.json").write_text(json.dumps(config | more))
    return str(folder)


OPTIONS = ("--tokens", "64", "--k", "1", "--k-prime", "1", "--lora", "4", "--precision", "bf16-true")


@pytest.mark.long("takes a second or more")
def test_a_config_in_mxfp4_is_planned_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense = plan(capsys, write(tmp_path), *OPTIONS)
    packed = plan(capsys, write(tmp_path, quantization_config={"quant_method": "mxfp4"}), *OPTIONS)
    assert dense["host_parts"]["weights"] - packed["host_parts"]["weights"] == pytest.approx(
        EXPERTS * (2 - 0.53125), rel=0.02
    )
    assert any("load_mxfp4" in note for note in packed["notes"])
    assert packed["parameters"] > 0
    assert packed["plain_bytes"] < dense["plain_bytes"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("kind", "nbytes"), [("nvfp4", 0.5625), ("mxfp4", 0.53125)])
def test_packing_is_an_option(kind: str, nbytes: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dense, packed = (plan(capsys, write(tmp_path), *OPTIONS, *more) for more in ((), ("--pack-experts", kind)))
    assert dense["host_parts"]["weights"] - packed["host_parts"]["weights"] == pytest.approx(
        EXPERTS * (2 - nbytes), rel=0.02
    )
    assert f'sp_lightning.pack_experts(model, "{kind}")' in packed["verdict"]


@pytest.mark.long("takes a second or more")
def test_a_factory_that_packs_on_the_meta_device(capsys: pytest.CaptureFixture[str]) -> None:
    real, meta = (
        plan(capsys, f"{__name__}:{make.__name__}", "--tokens", "8", "--k", "1") for make in (packed, packed_on_meta)
    )
    assert meta["host_parts"]["weights"] == real["host_parts"]["weights"]


def packed() -> Any:
    config = transformers.GptOssConfig(num_local_experts=4, num_experts_per_tok=2, **SIZES)
    net = transformers.GptOssForCausalLM(config)
    sp_lightning.pack_experts(net)
    net.lm_head.requires_grad_(True)
    return net


def packed_on_meta() -> Any:
    with torch.device("meta"):
        return packed()


@pytest.mark.long("takes a second or more")
def test_dequantisation_takes_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow = (*OPTIONS, "--device-bandwidth", "0.001GB/s", "--pcie", "1000GB/s")
    dense, packed = (plan(capsys, write(tmp_path), *slow, *more) for more in ((), ("--pack-experts", "nvfp4")))
    more = packed["windows"][0]["busy_seconds"]["compute"] - dense["windows"][0]["busy_seconds"]["compute"]
    least = 2 * EXPERTS * 8 / 1e6  # in forward and backward; at least 8 bytes for each value
    assert least < more < 4 * least


def test_a_model_without_experts(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "tests.planner.test_plan_rates:Small", "--pack-experts", "nvfp4"])
    assert "has no stacked experts to pack" in capsys.readouterr().err
