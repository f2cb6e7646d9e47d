"""The recipe for Whisper: what it saves, labels and sound, errors in the input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from examples import finetune_speech as recipe
from tests.examples.small_recipes import common, run, write_rows, write_wave


def test_labels_are_padded_and_do_not_begin_with_the_start_token(folder: Path) -> None:
    config, extractor, tokenizer = recipe.read_config(recipe.parse([]))

    def starts(text: str) -> dict[str, list[int]]:  # as Whisper's own tokenizer does
        return {"input_ids": [config.decoder_start_token_id, *tokenizer(text)["input_ids"]]}

    rows = recipe.read_rows(folder / "sound" / "rows.jsonl", config, extractor, starts)
    assert rows == recipe.read_rows(folder / "sound" / "rows.jsonl", config, extractor, tokenizer)
    recordings = recipe.Recordings(rows, extractor)
    batch = recipe.collate([recordings[0], recordings[1]])
    assert batch["input_features"].shape == (2, 40, 300)
    short, long = batch["labels"]
    assert tokenizer.decode(long) == "one one 1</s>"
    assert tokenizer.decode(short[:6]) == "one 0</s>"
    assert short[6:].tolist() == [common.IGNORED] * 4


def test_padded_labels_do_not_count_in_the_loss(folder: Path) -> None:
    config, extractor, tokenizer = recipe.read_config(recipe.parse([]))
    rows = recipe.read_rows(folder / "sound" / "rows.jsonl", config, extractor, tokenizer)
    item = recipe.Recordings(rows, extractor)[0]
    longer = {**item, "labels": torch.cat([item["labels"], torch.full((5,), common.IGNORED)])}
    model = recipe.Whisper(config).eval()
    losses = [model(**recipe.collate([each]), use_cache=False).loss for each in (item, longer)]
    torch.testing.assert_close(*losses)


def test_channels_are_averaged(tmp_path: Path) -> None:
    write_wave(tmp_path / "a.wav", [[16384, 0], [-32768, -32768]], channels=2)
    assert common.read_wave(tmp_path / "a.wav").tolist() == [0.25, -1.0]


@pytest.mark.long("takes a second or more")
def test_the_default_data_are_recordings(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in common.write_tones(tmp_path).read_text().splitlines()]
    assert len(rows) == 1024
    assert all(set(row["text"]) <= set("0123456789 ") for row in rows)
    assert all(abs(common.read_wave(tmp_path / row["audio"])).max() > 0.05 for row in rows[:8])


ROW = {"audio": "0.wav", "text": "one"}


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (['{"audio": "0.wav"'], "line 2: not JSON"),
        (['["0.wav", "one"]'], 'line 2: expected "audio" and "text", got ['),
        ([{"path": "0.wav", "text": "one"}], 'line 2: expected "audio" and "text"'),
        ([{**ROW, "text": None}], 'line 2: expected "audio" and "text"'),
        ([{**ROW, "text": "one " * 9}], "line 2: the text has 37 tokens. Expected at most 32"),
        ([{**ROW, "audio": "no.wav"}], "line 2: no.wav does not exist"),
        ([{**ROW, "audio": "rows.jsonl"}], "line 2: rows.jsonl is not a WAV file"),
        ([{**ROW, "audio": "slow.wav"}], "slow.wav has 16 bits at 8,000 Hz. Expected 16 bits at 16,000 Hz. To convert: ffmpeg"),
        ([{**ROW, "audio": "bytes.wav"}], "bytes.wav has 8 bits at 16,000 Hz"),
        ([{**ROW, "audio": "long.wav"}], "long.wav has 4.0 s. Expected more than 0 and at most 3 s. To cut it: ffmpeg"),
        ([{**ROW, "audio": "empty.wav"}], "empty.wav has 0.0 s"),
        ([], "found 1 rows. Expected at least 2"),
    ],
    ids=lambda part: None if isinstance(part, list) else "".join(filter(str.isalpha, part))[:30],
)  # fmt: skip
def test_bad_rows_are_reported_before_any_work(
    rows: list[Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write_wave(tmp_path / "0.wav", np.zeros(100))
    write_wave(tmp_path / "slow.wav", np.zeros(100), rate=8_000)
    write_wave(tmp_path / "bytes.wav", np.zeros(100), width=1)
    write_wave(tmp_path / "long.wav", np.zeros(64_000))
    write_wave(tmp_path / "empty.wav", [])
    write_rows(tmp_path / "rows.jsonl", [ROW, *rows])
    with pytest.raises(SystemExit) as stop:
        run("speech", "run", "--data", "rows.jsonl")
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--model bert", "--model bert: expected a Whisper model, got bert"),
        ("--language english", "--language and --task: need --model"),
    ],
)
def test_wrong_options_are_reported_before_any_work(
    arguments: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("bert").mkdir()
    Path("bert/config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(SystemExit) as stop:
        run("speech", "run", *arguments.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
