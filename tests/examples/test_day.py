"""The guide "A day on one card": each of its commands runs, on a small scale."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from examples.demos import cram_llm
from sp_lightning.__main__ import main
from tests.support.pages import ROOT, blocks
from tests.support.ticks import Ticks

GUIDE = ROOT / "examples" / "demos" / "day.md"


@pytest.mark.long(
    "measures the machine, trains and pretrains; tests/planner and test_cram_llm have the parts in the first tier"
)
def test_the_days_commands_follow_one_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As they stand there, but for the sizes: a tenth of a second for the rates, seconds in place of a day, a small model."""
    monkeypatch.chdir(tmp_path)
    rates, cram = (shlex.split(block.strip()) for block in blocks(GUIDE, "bash"))

    assert rates == ["superpipeline", "rates", ">", "rates.json"]
    capsys.readouterr()
    main(["rates", "--accelerator", "cpu", "--seconds", "0.1"])
    Path("rates.json").write_text(capsys.readouterr().out)

    assert cram[:2] == ["python", "examples/demos/cram_llm.py"]
    small = {"--hours": str(120 / 3600), "--length": "32"}
    Ticks(monkeypatch, 40.0)
    words = [small.get(before, word) for before, word in zip(cram[1:], cram[2:], strict=False)]
    given = dict(zip(words[::2], words[1::2], strict=True))
    assert (ROOT / given.pop("--config")).is_file()
    Path(given["--text"]).write_text("A day has hours, and an hour has minutes. " * 2000)
    cram_llm.main([*(word for pair in given.items() for word in pair), "--layers", "2", "--hidden", "32"])
    assert "3 steps of 512 tokens" in capsys.readouterr().out
