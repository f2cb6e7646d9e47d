"""LitGPT's own ``litgpt finetune_full`` with the strategy and without it has the same losses and checkpoints, bit by bit."""

from __future__ import annotations

import csv
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.fabric.strategies import STRATEGY_REGISTRY
from tokenizers import Tokenizer, models, pre_tokenizers

import sp_lightning
from tests.support.runs import assert_equal
from tests.support.simdevice import simulated

gpt = pytest.importorskip("litgpt.model")
cli = pytest.importorskip("litgpt.__main__")

TEXT = "Below is an instruction that describes a task. Write a response. ### one two three four five six"


def write_model(folder: Path) -> None:
    """Writes a small Llama with random weights, its tokenizer, and a few rows."""
    folder.mkdir()
    words = TEXT.split()
    config = gpt.Config(
        name="tiny", block_size=256, vocab_size=64, padded_vocab_size=64, n_layer=3, n_head=2, n_embd=16, intermediate_size=32,
        bias=False, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP", rotary_percentage=1.0, parallel_residual=False,
    )  # fmt: skip
    torch.manual_seed(0)
    torch.save(gpt.GPT(config).state_dict(), folder / "lit_model.pth")
    (folder / "model_config.yaml").write_text(yaml.safe_dump(asdict(config)))
    vocabulary = {word: index for index, word in enumerate(["<unk>", "</s>", *dict.fromkeys(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    rows = [{"instruction": " ".join(words[i:]), "output": " ".join(words[-i:])} for i in range(1, 13)]
    (folder / "rows.json").write_text(json.dumps(rows))


def finetune(model: Path, out: Path, monkeypatch: pytest.MonkeyPatch, precision: str, *more: str) -> Any:
    """Runs the command. Returns the logged numbers and all checkpoints."""
    given = {
        "out_dir": out, "precision": precision, "data": "JSON", "data.json_path": model / "rows.json",
        "data.val_split_fraction": 0.25, "data.num_workers": 0, "train.global_batch_size": 4, "train.micro_batch_size": 2,
        "train.max_steps": 4, "train.epochs": 5, "train.lr_warmup_steps": 1, "train.save_interval": 2, "eval.interval": 2,
        "eval.max_new_tokens": 3, "eval.final_validation": True,
    }  # fmt: skip
    options = [f"--{name}={value}" for name, value in given.items()]
    monkeypatch.setattr(sys, "argv", ["litgpt", "finetune_full", str(model), *options, *more])
    cli.main()
    with next(out.glob("logs/**/metrics.csv")).open() as file:
        logged = [{name: value for name, value in row.items() if "time" not in name} for row in csv.DictReader(file)]
    files = sorted(out.rglob("lit_model.pth"))
    return [logged, {str(file.relative_to(out)): torch.load(file, weights_only=False) for file in files}]


@pytest.mark.long("trains for seconds, where LitGPT is installed")
@pytest.mark.filterwarnings("ignore")  # LitGPT's and jsonargparse's, of versions
@pytest.mark.parametrize(
    ("precision", "resumes"), [("32-true", False), ("bf16-mixed", False), ("bf16-true", False), ("32-true", True)]
)
def test_finetune_full(precision: str, resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accumulation, a scheduler, validation, a generated example, checkpoints. Both may resume the same checkpoint."""
    model, checkpoint = tmp_path / "model", tmp_path / "plain" / "step-000002" / "lit_model.pth"
    write_model(model)
    monkeypatch.setenv("LT_ACCELERATOR", "cpu")
    plain = finetune(model, tmp_path / "plain", monkeypatch, precision)
    more = [f"--resume={checkpoint}"] if resumes else []
    if resumes:
        plain = finetune(model, tmp_path / "resumed", monkeypatch, precision, *more)
    monkeypatch.setenv("LT_STRATEGY", "superpipeline")  # as a user does, after `import sp_lightning`
    strategy = sp_lightning.FabricStrategy(k=1)
    monkeypatch.setitem(STRATEGY_REGISTRY["superpipeline"], "strategy", lambda: strategy)
    with simulated():
        ours = finetune(model, tmp_path / "ours", monkeypatch, precision, *more)
    assert strategy.streams, "nothing was streamed"
    strategy.teardown()
    assert_equal(ours, plain, "finetuned")
    assert len(plain[1]) == (2 if resumes else 3), "checkpoints"
