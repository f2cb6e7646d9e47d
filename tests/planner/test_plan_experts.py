"""``plan`` knows that of stacked experts only those travel that something is routed to."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from sp_lightning.__main__ import main

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "vocab_size": 64, "hidden_size": 64,
    "moe_intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 32, "num_experts_per_tok": 2, "max_position_embeddings": 512,
}  # fmt: skip


def kib_of_experts(tmp_path: Path, capsys: pytest.CaptureFixture[str], *more: str) -> list[float]:
    """What travels of the experts, for each share of them that is on the device already."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIG))
    main(["plan", str(config), "--k", "1", "--k-prime", "1", "--precision", "32-true", "--verbose", *more])
    said = capsys.readouterr().out
    assert "of which only those travel that something is routed to" in said
    sizes = re.findall(r"of that experts +([\d.]+) (KiB|MiB)", said)
    assert len(sizes) == 4
    return [float(size) * (1024 if unit == "MiB" else 1) for size, unit in sizes]


@pytest.mark.rest("a plan of prompts and of tokens")
def test_a_token_brings_its_experts_and_a_prompt_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    expert, count, layers = 3 * 64 * 64 * 4 / 1024, 32, 4
    one = kib_of_experts(tmp_path, capsys, "--generate", "4", "--tokens", "4")
    routed = CONFIG["num_experts_per_tok"]
    assert one == pytest.approx([layers * expert * routed * (1 - hits) for hits in (0, 0.25, 0.5, 0.75)], rel=0.003)
    prompt = kib_of_experts(tmp_path, capsys, "--predict", "--tokens", "512")
    assert prompt[0] == pytest.approx(layers * expert * count, rel=0.01)
    some = kib_of_experts(tmp_path, capsys, "--generate", "4", "--tokens", "4", "--batch-size", "2")
    assert some[0] == pytest.approx(layers * expert * count * (1 - (1 - routed / count) ** 2), rel=0.003)
