"""``superpipeline check`` without a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sp_lightning.__main__ import main
from sp_lightning.tools.comparison import first_check, small_models
from sp_lightning.tools.comparison.options import MODES, SMALL
from sp_lightning.tools.comparison.record import Compared, Difference
from sp_lightning.tools.comparison.report import Report


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """One model, and rates that are measured at once."""
    monkeypatch.setattr(first_check, "SMALL", {"attention": "torch", "vit": "transformers"})
    rates = {"measured": {"host_bandwidth": "6GB/s", "tflops": {}}}
    monkeypatch.setattr("sp_lightning.tools.planner.measured.run_rates", lambda given: json.dumps(rates))


@pytest.mark.long("fifteen runs; .ci/run has the command")
def test_all_modes_of_a_small_model_are_equal(few: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "new" / "check.json"
    main(["check", "--accelerator", "cpu", "--steps", "1", "--out", str(file)])
    text = capsys.readouterr().out
    assert f"attention: equal in all modes ({', '.join(MODES)})" in text
    assert "Measured for plan: host_bandwidth 6GB/s." in text
    found = json.loads(file.read_text())
    assert [*found["checks"]] == ["attention"]
    names = [each["name"].removeprefix("superpipeline, ") for each in found["checks"]["attention"]["runs"]]
    assert names == ["plain", *MODES]


def test_a_difference_is_shown_and_is_the_exit_status(
    few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = Report(rows={"losses": Compared(1, Difference("loss", "after training", "other", "superpipeline"), 1)})
    monkeypatch.setattr(first_check, "check_variants", lambda *given: differs)
    with pytest.raises(SystemExit) as ended:
        main(["check", "--accelerator", "cpu", "--out", str(tmp_path / "check.json")])
    assert ended.value.code == 1
    assert str(differs) in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [["--data", "a:b"], ["tests.support.planted:Everything", "--all"]])
def test_options_of_a_check_with_or_without_a_model(wrong: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["check", *wrong])
    assert (ended.value.code, wrong[-2 if wrong[-1] == "a:b" else -1] in capsys.readouterr().err) == (2, True)


@pytest.mark.rest("the first tier has one model")
def test_each_small_model_has_a_function() -> None:
    assert all(isinstance(getattr(small_models, name)(), small_models.Small) for name in SMALL)
