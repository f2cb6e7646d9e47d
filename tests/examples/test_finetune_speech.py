"""The recipe for Whisper: bitwise as plain Lightning, resumed runs, adapters, labels and sound, errors in the input."""

from __future__ import annotations

import json
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoTokenizer, WhisperFeatureExtractor, WhisperForConditionalGeneration

from examples import finetune_speech as recipe
from tests.support.tiers import first


def write_wave(file: Path, samples: Any, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(np.asarray(samples, dtype="<i2").tobytes())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Twelve recordings of a second, with texts of different lengths, in ``rows.jsonl``."""
    monkeypatch.chdir(tmp_path)
    rows = []
    for number in range(12):
        tone = np.sin(np.arange(16_000) * (0.1 + 0.02 * number))
        write_wave(tmp_path / f"{number}.wav", 20_000 * tone)
        rows.append({"audio": f"{number}.wav", "text": "one " * (1 + number % 3) + str(number)})
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return tmp_path


def run(output: str, *more: str) -> recipe.FineTune:
    """Trains the small model in float32 on the CPU."""
    size = ["--batch-size", "2", "--accumulate-grad-batches", "2", "--lr", "1e-2", "--every", "2"]
    run_on = ["--precision", "32-true", "--accelerator", "cpu"]
    return recipe.main(["--data", "rows.jsonl", *size, *run_on, "--output", output, *more])


def assert_same(one: recipe.FineTune, other: recipe.FineTune) -> None:
    torch.testing.assert_close(dict(one.state_dict()), dict(other.state_dict()), rtol=0, atol=0)
    assert one.trainer.callback_metrics == other.trainer.callback_metrics


# ---------------------------------------------------------------------- runs


@pytest.mark.parametrize(
    "more",
    first(
        [[], ["--no-gradient-checkpointing"], ["--precision", "bf16-mixed"], ["--precision", "bf16-true"]],
        [],
        why="the first tier has one precision",
    ),
    ids=" ".join,
)
def test_weights_are_those_of_plain_lightning(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run("ours", "--steps", "5", *more)
    printed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    plain = run("plain", "--steps", "5", "--strategy", "auto", *more)
    assert_same(ours, plain)
    assert ours.trainer.strategy.stats().fetched_layers
    assert [line.split()[1] for line in printed] == ["0/5", "2/5", "4/5", "5/5"]
    assert printed == [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run("whole", "--steps", "6")
    step = recipe.FineTune.training_step

    def interrupted(self: recipe.FineTune, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == 5:
            raise RuntimeError("interrupted")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(recipe.FineTune, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="interrupted"):
            run("part", "--steps", "6")
    assert torch.load("part/last.ckpt", weights_only=True)["global_step"] == 4
    assert_same(run("part", "--steps", "6", "--resume", "part/last.ckpt"), whole)


@pytest.mark.rest("the first tier resumes an interrupted run")
def test_a_finished_run_continues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("run", "--steps", "3")
    with pytest.raises(SystemExit):
        run("run", "--steps", "3", "--resume", "run/last.ckpt")
    assert "has 3 of 3 steps. For example: --steps 6" in capsys.readouterr().err
    assert run("run", "--steps", "5", "--resume", "run/last.ckpt").trainer.global_step == 5


def test_the_saved_model_loads_and_trains_further(folder: Path) -> None:
    trained = run("run", "--steps", "2")
    loaded = WhisperForConditionalGeneration.from_pretrained("run/model")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(trained.model.state_dict()), rtol=0, atol=0)
    assert WhisperFeatureExtractor.from_pretrained("run/model").feature_size == 40
    assert AutoTokenizer.from_pretrained("run/model").decode([52], skip_special_tokens=True) == "1"
    assert run("again", "--model", "run/model", "--steps", "1").trainer.global_step == 1


@pytest.mark.rest("the first tier trains every weight")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lora_saves_adapters_only(folder: Path, precision: str) -> None:
    run("base", "--steps", "1")
    arguments = ["--model", "base/model", "--lora", "4", "--precision", precision, "--steps", "4"]
    ours, plain = run("ours", *arguments), run("plain", *arguments, "--strategy", "auto")
    assert_same(ours, plain)
    saved = torch.load("ours/last.ckpt", weights_only=True)["state_dict"]
    assert saved
    assert all("lora_" in name for name in saved)
    assert not Path("ours/model").exists()
    base = WhisperForConditionalGeneration.from_pretrained("base/model")
    adapters = PeftModel.from_pretrained(base, "ours/adapter").state_dict()
    trained = {name: p for name, p in ours.model.state_dict().items() if "lora_" in name}
    assert any(bool(trained[name].any()) for name in trained if "lora_B" in name)
    torch.testing.assert_close({name: adapters[name] for name in trained}, trained, rtol=0, atol=0)


@pytest.mark.long("a training until it has learned")
def test_tones_are_learned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    module = recipe.main(["--accelerator", "cpu"])
    assert module.trainer.callback_metrics["val_loss"] < 1.0  # 1.15 without listening


# ---------------------------------------------------------------------- data


def test_labels_are_padded_and_do_not_begin_with_the_start_token(folder: Path) -> None:
    config, extractor, tokenizer = recipe.read_config(recipe.parse([]))

    def starts(text: str) -> dict[str, list[int]]:  # as Whisper's own tokenizer does
        return {"input_ids": [config.decoder_start_token_id, *tokenizer(text)["input_ids"]]}

    rows = recipe.read_rows(folder / "rows.jsonl", config, extractor, starts)
    assert rows == recipe.read_rows(folder / "rows.jsonl", config, extractor, tokenizer)
    recordings = recipe.Recordings(rows, extractor)
    batch = recipe.collate([recordings[0], recordings[1]])
    assert batch["input_features"].shape == (2, 40, 300)
    short, long = batch["labels"]
    assert tokenizer.decode(long) == "one one 1</s>"
    assert tokenizer.decode(short[:6]) == "one 0</s>"
    assert short[6:].tolist() == [recipe.IGNORED] * 4


def test_padded_labels_do_not_count_in_the_loss(folder: Path) -> None:
    config, extractor, tokenizer = recipe.read_config(recipe.parse([]))
    rows = recipe.read_rows(folder / "rows.jsonl", config, extractor, tokenizer)
    item = recipe.Recordings(rows, extractor)[0]
    longer = {**item, "labels": torch.cat([item["labels"], torch.full((5,), recipe.IGNORED)])}
    model = recipe.Whisper(config).eval()
    losses = [model(**recipe.collate([each]), use_cache=False).loss for each in (item, longer)]
    torch.testing.assert_close(*losses)


def test_channels_are_averaged(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", [[16384, 0], [-32768, -32768]], channels=2)
    assert recipe.read_wave(tmp_path / "a.wav").tolist() == [0.25, -1.0]


def test_the_default_data_are_recordings(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in recipe.write_tones(tmp_path).read_text().splitlines()]
    assert len(rows) == 512
    assert all(set(row["text"]) <= set("0123456789 ") for row in rows)
    assert all(abs(recipe.read_wave(tmp_path / row["audio"])).max() > 0.05 for row in rows[:8])


# ---------------------------------------------------------------------- errors


ROW = {"audio": "0.wav", "text": "one"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"audio": "0.wav"'], "line 2: not JSON"),
        (['["0.wav", "one"]'], 'line 2: expected "audio" and "text", got ["0.wav", "one"]. For example: {"audio"'),
        ([{"path": "0.wav", "text": "one"}], 'line 2: expected "audio" and "text"'),
        ([{**ROW, "text": None}], 'line 2: expected "audio" and "text"'),
        ([{**ROW, "text": "one " * 9}], "line 2: the text has 37 tokens. Expected at most 32"),
        ([{**ROW, "audio": "no.wav"}], "line 2: no.wav does not exist"),
        ([{**ROW, "audio": "rows.jsonl"}], "line 2: rows.jsonl is not a WAV file"),
        ([{**ROW, "audio": "slow.wav"}], "slow.wav has 16 bits at 8,000 Hz. Expected 16 bits at 16,000 Hz. To convert: ffmpeg"),
        ([{**ROW, "audio": "bytes.wav"}], "bytes.wav has 8 bits at 16,000 Hz"),
        ([{**ROW, "audio": "long.wav"}], "long.wav has 4.0 s. Expected more than 0 and at most 3 s. To cut it: ffmpeg"),
        ([{**ROW, "audio": "empty.wav"}], "empty.wav has 0.0 s"),
        ([], "has 0 recordings for training. Expected at least 4"),
    ],
    ids=lambda part: None if isinstance(part, list) else "".join(filter(str.isalpha, part))[:30],
)  # fmt: skip
def test_bad_rows_are_reported_before_any_work(
    rows: list[Any], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wave(folder / "slow.wav", np.zeros(100), rate=8_000)
    write_wave(folder / "bytes.wav", np.zeros(100), width=1)
    write_wave(folder / "long.wav", np.zeros(64_000))
    write_wave(folder / "empty.wav", [])
    lines = [row if isinstance(row, str) else json.dumps(row) for row in [ROW, *rows]]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    with pytest.raises(SystemExit) as stop:
        run("run")
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no.jsonl"], "--data no.jsonl: not a file"),
        (["--model", "/no/such/model"], "--model /no/such/model: expected a folder with config.json, or a hub name"),
        (["--model", "bert"], "--model bert: expected a Whisper model, got bert"),
        (["--language", "english"], "--language and --task: need --model"),
        (["--batch-size", "20"], "has 10 recordings for training. Expected at least 40"),
        (["--lora", "-1"], "--lora -1: expected a number above 0"),
        (["--resume", "no.ckpt"], "--resume no.ckpt: not a file"),
        (
            ["--resume", "other.ckpt"],
            "--resume other.ckpt: a checkpoint of another model or of a run with other options",
        ),
        (["--gpu-memory", "16"], "gpu_memory takes a number with a unit"),
        (["--strategy", "ddp_cpu"], "invalid choice: 'ddp_cpu'"),
        (["--output", "rows.jsonl"], "--output rows.jsonl: expected a folder, got a file"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_wrong_options_are_reported_before_any_work(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    state = {"state_dict": {"net.weight": torch.ones(2)}, "optimizer_states": [{"param_groups": [{"params": [0]}]}]}
    torch.save({"epoch": 0, "global_step": 1, **state}, "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        run("run", *arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
