"""``superpipeline fit``: Lightning's command line, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.lightning_cli import SuperpipelineCLI
from sp_lightning.trainer.strategy import SuperpipelineStrategy

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
      init_args: {plot: PICTURE, every_n_steps: 1}
model:
  class_path: lightning.pytorch.demos.boring_classes.BoringModel
data:
  class_path: lightning.pytorch.demos.boring_classes.BoringDataModule
"""


@pytest.mark.long("a subprocess that imports torch twice; test_recipes has the command line in the second tier")
def test_lightnings_command_line(tmp_path: Path) -> None:
    config, picture = tmp_path / "mine.yaml", tmp_path / "run.png"
    config.write_text(CONFIG.replace("PICTURE", str(picture)))
    for command in ("fit", "test"):
        (tmp_path / command).mkdir()  # Lightning saves the config where it runs
        ran = subprocess.run(
            [sys.executable, "-m", "sp_lightning", command, "--config", str(config)],
            capture_output=True, text=True, cwd=tmp_path / command, timeout=300,
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "k = 2, k' = 1" in ran.stderr + ran.stdout
    assert picture.stat().st_size


def settings(tmp_path: Path, *changes: tuple[str, str]) -> list[str]:
    """The arguments of ``fit`` without a strategy, changed."""
    without = CONFIG.replace("  strategy: superpipeline\n", "")
    text = "seed_everything: 7" + without[: without.index("  callbacks")] + without[without.index("model:") :]
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (tmp_path / "mine.yaml").write_text(text)
    return ["fit", "--config", str(tmp_path / "mine.yaml")]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("", ""),
        ("  strategy: {class_path: sp_lightning.SuperpipelineStrategy}\n", ""),
        (
            "  strategy: auto\n",
            "Superpipeline: strategy: auto was given, so plain Lightning runs. Without it, SuperpipelineStrategy runs.",
        ),
    ],
)
def test_the_strategy_of_a_config_without_one(
    given: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``fit --config`` with a config of plain Lightning ran plain Lightning, and said nothing."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["superpipeline"])
    arguments = settings(tmp_path, ("model:\n", f"{given}model:\n"))
    lines: list[str] = []
    monkeypatch.setattr("sp_lightning.tools.planner.lightning_cli.rank_zero_info", lines.append)
    trainer = SuperpipelineCLI(args=arguments, save_config_callback=None).trainer
    assert isinstance(trainer.strategy, SuperpipelineStrategy) is not bool(said)
    assert lines == [said] * bool(said)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("max_steps: 2", "max_step: 2", "Subcommand 'fit' does not accept option 'trainer.max_step'"),
        ("max_steps: 2", "max_steps: two", "\"trainer.max_steps\": Expected a <class 'int'>. Got value: two"),
        (
            "model:\n",
            "  strategy: {class_path: sp_lightning.SuperpipelineStrategy, init_args: {gpu_mem: 4}}\nmodel:\n",
            "\"trainer.strategy\": Problem with given class_path 'sp_lightning.SuperpipelineStrategy': Option 'gpu_mem' is not",
        ),
        ("BoringModel", "Typo", "'lightning.pytorch.demos.boring_classes' has no attribute 'Typo'"),
    ],
)
def test_a_typo_in_a_config_is_one_line(
    before: str,
    after: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It was sixty lines, of which the usage took 56."""
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setattr(sys, "argv", ["superpipeline"])
    with pytest.raises(SystemExit) as ended:
        main(settings(tmp_path, (before, after)))
    (line,) = capsys.readouterr().err.splitlines()
    assert (ended.value.code, said in line) == (2, True), line


def test_lightnings_commands_need_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["fit"])
    assert "fit: no model. Expected --config FILE or --model package.Class" in capsys.readouterr().err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert all(f"\n    {command} " in said for command in ("fit", "validate", "test", "predict", "plan", "check"))
