"""``plan --loss-tokens``: a loss in chunks is counted before it is run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import transformers

from sp_lightning.__main__ import main
from tests.support.answers import plan

VOCABULARY, TOKENS, CHUNK = 20_000, 256, 32
WHOLE = TOKENS * VOCABULARY * 4  # bytes of the logits in float32


def shape(folder: Path) -> str:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=VOCABULARY, architectures=["LlamaForCausalLM"], **sizes)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder)


@pytest.mark.long("two plans of a whole model")
def test_it_takes_less_memory_and_more_operations(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = shape(tmp_path)
    asked = (model, "--tokens", str(TOKENS), "--precision", "bf16-true", "--k", "1", "--k-prime", "1")
    whole, chunks = (plan(capsys, *asked, *options) for options in ((), ("--loss-tokens", str(CHUNK))))
    # At its peak the whole loss has three tensors in float32; then there are a few chunks.
    assert 1.5 * WHOLE < whole["activation_bytes"] - chunks["activation_bytes"] < 4.1 * WHOLE
    assert chunks["flops"] - whole["flops"] == 2 * TOKENS * VOCABULARY * 64  # the head's second product
    assert "chunk_loss" not in whole["verdict"]
    assert f"and sp_lightning.chunk_loss(model, tokens={CHUNK}), " in chunks["verdict"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--loss-tokens", "32", "--predict"], "--loss-tokens does not work with --predict or --generate"),
        (["--loss-tokens", "32", "--generate", "4"], "--loss-tokens does not work with --predict or --generate"),
        (["--loss-tokens", "0"], "must be an integer of at least 1, got 0"),
    ],
)
def test_what_cannot_be_asked(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", shape(tmp_path), *options])
    assert error.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.rest("takes tenths of a second")
def test_a_vision_model_has_no_such_loss(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "resnet18", "--loss-tokens", "32"])
    assert "ResNet is not a causal language model of transformers" in capsys.readouterr().err
