"""``python -m sp_lightning fit``: Lightning's command line, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sp_lightning.__main__ import main

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  max_steps: 2
  logger: false
  enable_checkpointing: false
  enable_progress_bar: false
  strategy: superpipeline
  callbacks:
    - class_path: sp_lightning.SuperpipelineCallback
      init_args: {timeline: TIMELINE, every_n_steps: 1}
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: lightning.pytorch.demos.boring_classes.BoringDataModule
"""


@pytest.mark.long("a subprocess that imports torch twice; test_recipes has the command line in the second tier")
def test_lightnings_command_line(tmp_path: Path) -> None:
    config, timeline = tmp_path / "mine.yaml", tmp_path / "timeline.json"
    config.write_text(CONFIG.replace("TIMELINE", str(timeline)))
    for command in ("fit", "test"):
        (tmp_path / command).mkdir()  # Lightning saves the config where it runs
        ran = subprocess.run(
            [sys.executable, "-m", "sp_lightning", command, "--config", str(config)],
            capture_output=True, text=True, cwd=tmp_path / command, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "k = 2, k' = 1" in ran.stderr + ran.stdout
    assert json.loads(timeline.read_text())["traceEvents"]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(
        f"\n    {command} " in said for command in ("fit", "validate", "test", "predict", "plan", "convert", "check")
    )
