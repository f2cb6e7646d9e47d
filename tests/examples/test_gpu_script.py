"""The script that runs tests and benchmarks on a machine with a GPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from examples.benchmarks import __main__ as everything
from examples.benchmarks import agenda, each_contestant, rows
from examples.benchmarks.workloads import Workload
from tests.support.tiers import some


@pytest.fixture
def on_a_machine(tmp_path: Path) -> Callable[..., tuple[int, list[str]]]:
    """Runs the script with a Python that notes what it is to do, and fails where the test wants it to."""

    def run(*arguments: str, failing: str = "nothing") -> tuple[int, list[str]]:
        python, log = tmp_path / "python", tmp_path / "log"
        python.write_text(f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *{failing}*) exit 1;; esac\n')
        python.chmod(0o755)
        script = Path(everything.__file__).with_name("gpu.sh")
        environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path / "out")}
        status = subprocess.run(["bash", script, *arguments], env=environment, capture_output=True).returncode
        return status, log.read_text().splitlines()

    return run


@pytest.mark.parametrize(("arguments", "asked"), [
    (["now"], "-m examples.benchmarks --list now --minutes 9 --out"),
    (["now", "--dry-run"], "-m examples.benchmarks --list now --dry-run --out"),
    (["now", "--pretend"], "-m examples.benchmarks --list pretend --minutes 30 --out"),
    (["--pretend"], "-m examples.benchmarks --list pretend --minutes 30 --out"),
    (["ranks"], "-m examples.benchmarks --list ranks --minutes 9 --out"),
])  # fmt: skip
def test_a_list_is_run_in_nine_minutes_and_ends_as_it_does(arguments: list[str], asked: str, on_a_machine: Any) -> None:
    assert on_a_machine(*arguments)[0] == 0
    status, done = on_a_machine(*arguments, failing="benchmarks")
    assert status == 1
    assert asked in done[-1]


# ---------------------------------------------------------------------- the list


FIRST = ["train llm 1.5B, bf16-mixed", "train llm 8B, bf16-true", "AdamW"]


@pytest.mark.long("a process that collects tests")
def test_the_tests_of_the_lists_exist() -> None:
    items = [item for make in agenda.LISTS.values() for item in make() if isinstance(item, agenda.Tests)]
    single = [f"tests/gpu/{test}" for item in items for test in item.tests if "::" in test]
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-o", "addopts=", *single]
    run = subprocess.run(command, capture_output=True, text=True, cwd=rows.REPOSITORY)
    assert run.returncode == 0, run.stdout
    assert "not found" not in run.stderr


def test_every_file_of_the_gpus_tests_is_in_a_list_and_names_folders_that_exist() -> None:
    files = {path.name for path in (rows.REPOSITORY / "tests/gpu").glob("test_*.py")}
    items = [item for make in agenda.LISTS.values() for item in make()]
    assert files == set(agenda.GPU_TESTS) == {f for item in items if isinstance(item, agenda.Tests) for f in item.files}
    assert all((rows.REPOSITORY / path).exists() for item in items for path in agenda.paths(item))
    assert len({item.name for item in agenda.now()}) == len(agenda.now())


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Small files in place of the package's and the tests', on a machine with a GPU."""
    for path in [f"sp_lightning/{name}/a.py" for name in (*agenda.CORE, "capabilities/gpu_steps")] + [
        "tests/gpu/test_fork.py"
    ]:
        (tmp_path / path).parent.mkdir(parents=True)
        (tmp_path / path).write_text("a = 1\n")
    monkeypatch.setattr(rows, "REPOSITORY", tmp_path)
    monkeypatch.setattr(rows, "machine", lambda: {"accelerator": "a GPU"})
    monkeypatch.setattr(rows, "_code", rows._code.__wrapped__)  # which is cached
    return tmp_path


WORKLOAD = agenda.train("llm", "1.5B", 16384)
ITEMS = [
    agenda.Module("sp_lightning", folders=("capabilities/gpu_steps",)),
    agenda.Contest(WORKLOAD, ("plain", "default"), 40, folders=("capabilities/gpu_steps",)),
    agenda.Tests("forks", ("test_fork.py",)),
]


def row_of(item: agenda.Item, **other: Any) -> rows.Row:
    """The row that an item leaves on a GPU."""
    row = {"kind": "item", "item": item.name, "digest": rows.digest(agenda.paths(item)), "status": "ok", "seconds": 7.0}
    return {**rows.origin(), **row, **other}


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_what_has_a_row_of_the_present_code_is_done(item: agenda.Item, repository: Path) -> None:
    found = [row_of(item)]
    assert agenda.is_done(item, found)
    assert agenda.is_done(item, [row_of(item, status="missing")])
    assert not agenda.is_done(item, [row_of(item, machine={"accelerator": None}), row_of(item, status="failed")])
    assert not any(agenda.is_done(other, found) for other in ITEMS if other is not item)
    changed = repository / "sp_lightning" / item.folders[0] / "a.py"
    changed.write_text('"""A docstring."""\n\na = 1  # a comment\n')
    (repository / "sp_lightning/capabilities/disk").mkdir(parents=True, exist_ok=True)
    (repository / "sp_lightning/capabilities/disk/a.py").write_text("a = 2")
    assert agenda.is_done(item, found)
    changed.write_text("a = 2")
    assert not agenda.is_done(item, found)


def run_with(
    monkeypatch: pytest.MonkeyPatch, results: dict[str, str] | None, known: Any, out: Path, minutes: float
) -> Any:
    """Runs all items with made-up results of tests. Returns their rows, and the tests that were left out."""
    left_out = list[str]()

    def wait(command: Any, environment: dict[str, str], *_: Any) -> int:
        if "GPU_TEST_FOLDER" in environment:
            folder = Path(environment["GPU_TEST_FOLDER"])
            left_out.extend((folder / "passed").read_text().splitlines())
            (folder / "results").write_text("".join(json.dumps(each) + "\n" for each in (results or {}).items()))
        return 0

    monkeypatch.setattr(everything.contest, "wait", wait)
    monkeypatch.setattr(everything.contest, "compete", lambda *_: {"status": "missing", "error": ""})
    everything.run(ITEMS, everything.Budget(minutes), 1.0, out, known)
    return [row for row in rows.read(out) if row["kind"] == "item"][-len(ITEMS) :], left_out


ONE, TWO = ("tests/gpu/test_fork.py::test_one", "tests/gpu/test_fork.py::test_two[a b]")


def test_tests_that_have_passed_are_left_out(repository: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    (*_, late), left_out = run_with(monkeypatch, {ONE: "passed", TWO: "late"}, [], out, 60)
    assert (late["status"], late["tests"], left_out) == ("skipped", {"passed": 1, "late": 1}, [])
    assert not agenda.is_done(ITEMS[2], [late])
    (*_, done), left_out = run_with(monkeypatch, {TWO: "passed"}, rows.read(out), out, 60)
    assert (done["status"], left_out) == ("ok", [ONE])
    assert agenda.passed_before(ITEMS[2], rows.read(out)) == [ONE, TWO]  # type: ignore[arg-type]
    assert all(agenda.is_done(item, rows.read(out)) for item in ITEMS)
    (repository / "tests/gpu/test_fork.py").write_text("a = 2")
    assert agenda.passed_before(ITEMS[2], rows.read(out)) == []  # type: ignore[arg-type]


def test_what_needs_more_than_what_is_left_is_not_begun(repository: Path, monkeypatch: Any, tmp_path: Path) -> None:
    """But for tests, which keep what has passed; contestants are asked one by one."""
    quick = {"workload": asdict(WORKLOAD), "limits": {"device_gib": None}, "kind": "train", "process_seconds": 9.0}
    known = [{**rows.origin(), **quick, "contestant": "default", "status": "ok"}]
    (module, contest_, tests), _ = run_with(monkeypatch, {ONE: "passed"}, known, tmp_path / "rows.jsonl", 39 / 60)
    assert module["error"] == "needs about 60 s, 39 s are left: raise --minutes"
    assert contest_["status"] == "failed"
    assert contest_["error"] == "plain: needs about 40 s, 39 s are left: raise --minutes"
    assert tests["status"] == "skipped"
    (*_, tests), _ = run_with(monkeypatch, {ONE: "passed"}, known, tmp_path / "rows.jsonl", 50 / 60)
    assert tests["status"] == "ok"


@pytest.mark.rest("a time that has to pass")
def test_what_has_run_when_the_time_is_over_is_kept(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text((rows.REPOSITORY / "tests/gpu/conftest.py").read_text())
    (tmp_path / "passed").write_text("test_all.py::test_zero\n")
    tests = [
        "test_zero(): assert 0",
        "test_one(): pass",
        "test_two(): conftest.END = 0; assert 0",
        "test_three(): pass",
    ]
    (tmp_path / "test_all.py").write_text("import conftest\n" + "".join(f"def {test}\n" for test in tests))
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    environment = {**own, "GPU_TEST_END": "1e11", "GPU_TEST_FOLDER": str(tmp_path)}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert run.returncode == pytest.ExitCode.TESTS_FAILED
    found = [json.loads(line) for line in (tmp_path / "results").read_text().splitlines()]
    assert found == [[f"test_all.py::test_{name}", outcome] for name, outcome in
                     (("one", "passed"), ("two", "failed"), ("three", "late"))]  # fmt: skip


# ---------------------------------------------------------------------- a GPU that cannot be used


CUDA: dict[str, Any] = {
    "The NVIDIA driver on your system is too old (found version 12020)": "Update the driver",
    "CUDA error: out of memory": "List them: nvidia-smi",
    "Torch not compiled with CUDA enabled": "Install one that has",
}


@pytest.mark.parametrize("error", CUDA)
def test_a_gpu_that_cannot_be_used_is_said_before_anything_runs(
    error: str, monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "init", mock.Mock(side_effect=RuntimeError(error)))
    with pytest.raises(SystemExit, match="1"):
        everything.main(["--list", "now", "--out", str(tmp_path)])
    said = capsys.readouterr().err
    assert f"No GPU can be used: {error}" in said
    assert CUDA[error] in said
    assert not (tmp_path / "rows.jsonl").exists()


def test_a_gpu_that_other_programs_fill_is_said_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "init", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 << 30, 80 << 30))
    said = everything.obstacle()
    assert said is not None
    assert said.startswith("Other programs hold 20.0 GiB of the GPU's 80.0 GiB. List them: nvidia-smi.")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (79 << 30, 80 << 30))
    assert everything.obstacle() is None


@pytest.mark.long("processes that measure; the first tier has what a part reports")
def test_without_matplotlib_everything_is_measured_and_reported() -> None:
    """Where it was missing, a list ended before it measured anything."""
    code = (
        "import sys, lightning; sys.modules['matplotlib'] = None; import examples.benchmarks.__main__; "
        "from examples.benchmarks import pictures; assert pictures.draw([[]], None) is None"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(everything.__file__).parents[2])


@pytest.mark.long("the first call with tiny sizes: processes that start from nothing")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it pretends that there is none")
def test_a_list_runs_through_on_a_cpu() -> None:
    """So that it cannot rot. It keeps no figures."""
    script = Path(everything.__file__).with_name("gpu.sh")
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": "/nowhere", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(["bash", script, "--pretend"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    assert run.stdout.count(": ok, ") == len(agenda.pretended())
    files = run.stdout.rsplit("left: ", 1)[1].split()
    assert {"rows.jsonl", "report.md", "pretend.txt"} <= set(files)
    assert not Path("/nowhere").exists()


# Numbers of threads differ in a number alone. To compile takes longest. FSDP2 would start a process group here.
LEFT_OUT = re.compile(r"fsdp|.*(threads|compiled)")
PAIRS = [pair for pair in each_contestant.pairs() if not LEFT_OUT.match(pair[1])]
ONCE = [*{name: (workload, name) for workload, name in reversed(PAIRS)}.values()]


@pytest.mark.rest("networks that train")
@pytest.mark.skipif(torch.cuda.is_available(), reason="those of other libraries need more memory there")
@pytest.mark.parametrize(
    ("workload", "name"),
    some(PAIRS, *ONCE, why="the same with other models"),
    ids=lambda each: each if isinstance(each, str) else f"{each.task}-{each.family}",
)
def test_every_contestant_of_the_list_runs_on_a_cpu(workload: Workload, name: str) -> None:
    """Lightning refused one of them: it does not clip fused optimizers in mixed precision."""
    row = each_contestant.run(workload, name)
    assert each_contestant.works(row), row


@pytest.mark.parametrize("failing", [None, "superpipeline-2:1"])
def test_a_contestant_that_fails_fails_the_list(
    failing: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def run(workload: Workload, name: str) -> rows.Row:
        if name == failing:
            raise ValueError("it cannot clip")
        return {"status": "missing", "error": "not installed"}

    monkeypatch.setattr(each_contestant, "run", run)
    monkeypatch.setattr(each_contestant, "pairs", lambda: [*ONCE[:2], (WORKLOAD, "superpipeline-2:1")])
    assert each_contestant.main(["--out", f"{tmp_path}/"]) == (failing is None)
    said = capsys.readouterr().out
    assert ("failed: ValueError: it cannot clip" in said) == (failing is not None)
    assert len(rows.read(tmp_path / "rows.jsonl")) == 3
