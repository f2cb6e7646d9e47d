"""The script that runs tests and benchmarks on a machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as everything


@pytest.fixture
def on_a_machine(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the script with a Python that notes what it is to do, and fails with a status of the test's."""

    def run(*arguments: str, tests: int = 0) -> tuple[int, list[str]]:
        python, log = tmp_path / "python", tmp_path / "log"
        python.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *pytest*) exit {tests};; esac\n')
        python.chmod(0o755)
        script = Path(everything.__file__).with_name("gpu.sh")
        environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
        status = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True).returncode
        return status, log.read_text().splitlines()

    return run


@pytest.mark.parametrize("part", ["tests1", "tests2", "tests3", "tests4", "tests5", "tests6"])
def test_a_part_of_the_gpus_tests_ends_as_they_do(part: str, on_a_machine: Any, tmp_path: Path) -> None:
    status, (done,) = on_a_machine(part, tests=1)
    assert status == 1
    assert "-m pytest -ra" in done
    assert (tmp_path / "out" / f"{part}.txt").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there everything runs")
def test_several_devices_are_as_many_as_there_are(on_a_machine: Any, tmp_path: Path) -> None:
    status, (tests, done) = on_a_machine("ranks")
    assert status == 0
    assert "test_several_devices.py" in tests
    assert "-m examples.benchmarks.ranks --ranks 1 --width" in done, "no GPU is here"
    assert (tmp_path / "out" / "ranks.txt").exists()


def test_a_failing_test_costs_no_figures_and_is_told(on_a_machine: Any) -> None:
    status, done = on_a_machine(tests=1)
    assert status == 1
    assert [each.split()[1] for each in done] == ["pytest", "examples.benchmarks.foresight", "examples.benchmarks"]


def test_every_file_of_the_gpus_tests_has_its_part(on_a_machine: Any) -> None:
    root = Path(everything.__file__).parents[2]
    parts = ["ranks", *(f"tests{part}" for part in range(1, 7))]
    done = [line for part in parts for line in on_a_machine(part)[1]]
    for file in (root / "tests/gpu").glob("test_*.py"):
        assert any(f"tests/gpu/{file.name}" in line for line in done), file


@pytest.mark.rest("a time that has to pass")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there everything runs")
def test_what_has_run_when_the_time_is_over_is_reported(tmp_path: Path) -> None:
    root = Path(everything.__file__).parents[2]
    (tmp_path / "conftest.py").write_text((root / "tests/gpu/conftest.py").read_text())
    (tmp_path / "test_two.py").write_text(
        "import conftest\ndef test_one(): conftest._begun -= 2000; assert 0\ndef test_two(): pass\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-v", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "GPU_TEST_SECONDS": "1000"}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert "FAILED test_two.py::test_one" in run.stdout
    assert "test_two.py::test_two and what follows has not run" in run.stdout
