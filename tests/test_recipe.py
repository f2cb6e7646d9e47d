"""The recipe runs end to end at a small size: trains, saves, resumes, generates."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples import finetune_llm

SIZE = ["--layers", "2", "--hidden", "32", "--length", "16", "--batch-size", "2"]


def test_trains_saves_and_resumes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = finetune_llm.main(["--steps", "6", *SIZE, "--output", str(tmp_path / "run")])
    assert result.resumed_step == 3
    assert result.peak_device_bytes < result.plain_device_bytes
    assert (tmp_path / "run").exists()
    printed = capsys.readouterr().out
    assert "peak" in printed


def test_continues_from_a_local_folder(tmp_path: Path) -> None:
    first = finetune_llm.main(["--steps", "4", *SIZE, "--output", str(tmp_path / "run")])
    size = ["--length", "16", "--batch-size", "2"]
    second = finetune_llm.main(
        ["--steps", "4", "--model", str(tmp_path / "run" / "model"), *size, "--output", str(tmp_path / "again")]
    )
    assert second.first_loss < first.first_loss + 0.5


@pytest.mark.parametrize("arguments", [["--steps", "1"], ["--text", "/no/such/file"], ["--model", "/no/such/folder"]])
def test_bad_input_is_refused_before_any_work(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        finetune_llm.main([*arguments, "--output", str(tmp_path / "run")])
    assert stop.value.code == 2
    assert "error:" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
