"""Several models on one card: budgets, the table, failures, and the same weights as alone."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Any

import pytest

from examples.demos import many_models
from tests.support.repository import ROOT

REPORT = {
    "run": "fit",
    "loss": 2.5,
    "weights": "0123456789abcdef" * 4,
    "peak_host_bytes": 2**20,
    "peak_allocated_bytes": 0,
}
WRITES = f"""
import json, pathlib, sys
device, host, report = sys.argv[1:]
print(device, host)
line = {REPORT!r} | {{"peak_device_bytes": int(device.removesuffix("MiB")) << 20}}
pathlib.Path(report).write_text("".join(json.dumps(line | each) + "\\n" for each in [{{}}, {{"run": "validate", "loss": None}}]))
"""
FAILS = "import sys; print('a step'); sys.exit('ValueError: no such layer')"


def command(program: str, *more: str) -> str:
    return shlex.join([sys.executable, "-S", "-c", program, "{gpu_memory}", "{host_memory}", "{report}", *more])


def test_each_process_has_its_budget_and_its_row(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The process that fails leaves the others running."""
    arguments = [
        "--gpu-memory",
        "3MiB,7MiB,9MiB,5MiB",
        "--host-memory",
        "2GiB",
        "--output",
        str(tmp_path / "a b"),
    ]
    missing = "/no/such/program {report}"
    together, alone = many_models.main(
        [command(WRITES), command(FAILS), missing, command(WRITES), "--compare", *arguments]
    )
    logs = [(tmp_path / "a b" / f"{number}.log").read_text().strip() for number in (1, 2, 4)]
    assert logs == ["3MiB 2GiB", "a step\nValueError: no such layer", "5MiB 2GiB"]
    for ended in (together, alone):
        assert [each.report.get("run") for each in ended] == ["fit", None, None, "fit"]
        assert ended[1].error.startswith("ValueError: no such layer (exit status 1, ")
        assert "No such file" in ended[2].error
    said = capsys.readouterr().out
    assert said.count("failed: ValueError: no such layer") == 2
    assert said.count("       3.0 MiB       1.0 MiB     2.5000  0123456789abcdef") == 2
    assert "2 of 4 models have the same weights as alone, bit for bit." in said


def test_without_budgets_each_gets_an_equal_part_of_what_is_free() -> None:
    assert many_models.budgets([], 16 << 30, 3) == ["5120MiB"] * 3
    assert many_models.budgets(["1GiB"], 0, 2) == ["1GiB"] * 2
    assert many_models.budgets(["1GiB", "2GiB"], 0, 2) == ["1GiB", "2GiB"]


def test_a_command_without_a_report_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        many_models.main(["python train.py"])
    assert "'python train.py' has no {report}" in capsys.readouterr().err


def test_memory_that_processes_share_counts_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for process, pss in ((1, 300), (2, 500)):
        (tmp_path / str(process)).mkdir()
        (tmp_path / str(process) / "smaps_rollup").write_text(
            f"00-ff ---p 00 00:00 0 [rollup]\nRss: 700 kB\nPss: {pss} kB\n"
        )
    made: Any = many_models.Path
    monkeypatch.setattr(many_models, "Path", lambda path: made(path.replace("/proc", str(tmp_path))))
    assert many_models.memory_of([1, 2, 3]) == (800 * 1024, 600 * 1024)


@pytest.mark.long("six processes that import torch and train")
def test_a_llama_a_vit_and_a_vlm_at_once_have_the_weights_of_their_runs_alone(folder: Path) -> None:
    from tests.examples.small_recipes import SMALL  # slow to import

    commands = []
    for name in ("llm", "vision", "vlm"):
        small = SMALL[name]
        recipe = [
            sys.executable,
            str(ROOT / "examples" / f"finetune_{name}.py"),
            *small.arguments,
            *small.trains.split(),
        ]
        given = ["--gpu-memory", "{gpu_memory}", "--host-memory", "{host_memory}", "--report", "{report}"]
        where = ["--precision", "32-true", "--accelerator", "cpu", "--output", str(folder / name)]
        commands.append(shlex.join([*recipe, *given, *where]))
    together, alone = many_models.main(
        [*commands, "--compare", "--gpu-memory", "64MiB", "--output", str(folder / "many")]
    )
    assert [each.error for each in (*together, *alone)] == [""] * 6
    digests = [each.report["weights"] for each in together]
    assert digests == [each.report["weights"] for each in alone]
    assert [each.report["loss"] for each in together] == [each.report["loss"] for each in alone]
    assert len({*digests}) == 3
