"""The script that runs tests and benchmarks on a machine with a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as everything
from examples.benchmarks import agenda, first_light, rows
from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors


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


@pytest.mark.parametrize("part", ["tests1", "tests2", "tests3", "tests4", "tests5", "tests6", "tests7", "tests8"])
def test_a_part_of_the_gpus_tests_ends_as_they_do(part: str, on_a_machine: Any, tmp_path: Path) -> None:
    status, (done,) = on_a_machine(part, failing="pytest")
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


def test_the_first_call_stops_where_the_first_light_fails(on_a_machine: Any) -> None:
    """A figure of a machine on which something computes the wrong thing is none."""
    status, done = on_a_machine(failing="first_light")
    assert status == 1
    assert [each.split()[1] for each in done] == ["examples.benchmarks.first_light"]


def test_a_part_that_fails_costs_no_other_part_and_is_told(on_a_machine: Any, tmp_path: Path) -> None:
    status, done = on_a_machine(failing="beside_plan")
    assert status == 1
    modules = ["first_light", "beside_plan", "limits"]
    assert [each.split()[1] for each in done] == [
        f"examples.benchmarks{each}" for each in (*(f".{m}" for m in modules), "")
    ]
    assert "--list 1.5B --minutes 5.0" in done[-1]
    assert all((tmp_path / "out" / f"{name}.txt").exists() for name in ("first", "memory", "limits", "1.5B"))


@pytest.mark.parametrize("part", ["3B", "8B", "card", "h200", "activations"])
def test_a_list_alone_ends_within_eight_minutes(part: str, on_a_machine: Any) -> None:
    status, (done,) = on_a_machine(part)
    assert status == 0
    assert f"--list {part} --minutes 7.5" in done


def test_what_is_next_ends_within_six_minutes(on_a_machine: Any) -> None:
    status, (done,) = on_a_machine("next")
    assert status == 0
    assert "--list next --minutes 5.5" in done


def rows_of(item: agenda.Contest | agenda.Module | agenda.Tests, **other: Any) -> list[rows.Row]:
    """The rows that an item leaves on a GPU."""
    origin = {"versions": {}, "python": "3", "commit": "a", "date": "2026-01-01", "command": "python", "run": "1"}
    origin |= {"code": rows.code(), "machine": {"accelerator": "a GPU"}, "status": "ok", **other}
    if isinstance(item, agenda.Tests):
        return [{**origin, "kind": "gpu-tests", "name": item.name}]
    if isinstance(item, agenda.Module):
        command = f"python -m examples.benchmarks.{item.name} {' '.join(item.arguments)}"
        return [{**origin, "kind": item.name.replace("_", "-"), "command": command}]
    shared = {"workload": asdict(item.workload), "limits": {"device_gib": item.device_gib}, "kind": "train"}
    return [{**origin, **shared, "contestant": name} for name in item.contestants]


def test_what_has_rows_of_the_present_code_is_not_next() -> None:
    for item in agenda.next_on_one_card():
        done = rows_of(item)
        assert agenda.is_done(item, done), item
        assert not agenda.is_done(item, rows_of(item, code="of before"))
        assert not agenda.is_done(item, rows_of(item, machine={"accelerator": None}))
        assert not agenda.is_done(item, rows_of(item, status="failed"))
        assert not agenda.is_done(item, [])
        if len(done) > 1:  # ratios are those of one run
            assert not agenda.is_done(item, [{**done[0], "run": "2"}, *done[1:]])
            assert agenda.is_done(item, [{**done[0], "status": "missing"}, *done[1:]])
    items = agenda.next_on_one_card()
    assert not any(agenda.is_done(other, rows_of(item)) for item in items for other in items if other is not item)


def test_the_next_call_goes_on_where_the_last_one_ended(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plan, ran = agenda.next_on_one_card(), list[Any]()
    monkeypatch.setattr(everything, "RESULTS", tmp_path)
    monkeypatch.setattr(everything, "run", lambda plan, *_: ran.extend(plan))
    monkeypatch.setattr(everything.report, "write", lambda *_, **__: "nowhere")
    (tmp_path / "a day").mkdir()
    for row in rows_of(plan[0]):
        rows.append(tmp_path / "a day" / "rows.jsonl", row)
    for row in rows_of(plan[1]):
        rows.append(tmp_path / "out" / "rows.jsonl", row)
    everything.main(["--list", "next", "--out", str(tmp_path / "out")])
    assert ran == plan[2:]


@pytest.mark.rest("a process that imports pytest")
def test_tests_on_the_list_leave_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    item = agenda.Tests("mended", ("tests/device/test_layout.py",))
    everything.run([item], everything.Budget(3), 1.0, out)
    everything.run([item], everything.Budget(0), 1.0, out)
    first, late = rows.read(out)
    assert (first["kind"], first["name"], first["status"]) == ("gpu-tests", "mended", "ok")
    assert "passed" in first["said"]
    assert late["status"] == "skipped"


def test_a_file_of_a_part_has_a_mebibyte_at_most(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nhead -c 3000000 /dev/zero\n")
    python.chmod(0o755)
    script = Path(everything.__file__).with_name("gpu.sh")
    environment = {**os.environ, "PYTHON": str(python), "OUT": str(tmp_path)}
    run = subprocess.run(["bash", script, "limits"], env=environment, capture_output=True)
    assert run.returncode == 0
    assert len(run.stdout) > 3_000_000
    assert (tmp_path / "limits.txt").stat().st_size == 2**20


@pytest.mark.rest("processes that measure; the first tier has what a part reports")
def test_without_matplotlib_everything_is_measured_and_reported() -> None:
    """Where it was missing, a list ended before it measured anything."""
    code = (
        "import sys, lightning; sys.modules['matplotlib'] = None; import examples.benchmarks.__main__; "
        "from examples.benchmarks import pictures; assert pictures.draw([[]], None, None) == []"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(everything.__file__).parents[2])


PARTS = {"first": "first_light", "memory": "beside_plan", "limits": "limits", "foresight": "foresight"}


@pytest.mark.parametrize(("part", "module"), PARTS.items())
def test_a_part_alone(part: str, module: str, on_a_machine: Any) -> None:
    status, (done,) = on_a_machine(part)
    assert status == 0
    assert f"-m examples.benchmarks.{module} " in done


@pytest.mark.rest("the first call with tiny sizes: processes that start from nothing")
@pytest.mark.skipif(torch.cuda.is_available(), reason="it pretends that there is none")
def test_the_first_call_runs_through_on_a_cpu() -> None:
    """So that it cannot rot. It keeps no figures."""
    script = Path(everything.__file__).with_name("gpu.sh")
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": "/nowhere", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(["bash", script, "--pretend"], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-5000:] + run.stderr[-2000:]
    for part in ("first", "memory", "limits", "pretend"):
        assert f"== {part}: exit status 0" in run.stdout
    assert "first light: all went well" in run.stdout
    files = run.stdout.rsplit("left: ", 1)[1].split()
    assert {"rows.jsonl", "rates.json", "timeline.json", "timeline.png", "report.md"} <= set(files)
    assert not Path("/nowhere").exists()


@pytest.mark.parametrize("failing", [0, 2])
def test_first_light_stops_at_the_first_failure_and_says_all_about_it(
    failing: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    called: list[int] = []

    def stage(number: int) -> Any:
        def runs(setting: Any) -> dict[str, int]:
            called.append(number)
            if number == failing:
                raise KeyError("of the machine")
            return {"number": number}

        return runs

    well = first_light.run(first_light.PRETENDED, [stage(number) for number in range(4)], tmp_path / "rows.jsonl")
    assert not well
    assert called == list(range(failing + 1))
    found = rows.read(tmp_path / "rows.jsonl")
    assert [row["status"] for row in found] == ["ok"] * failing + ["failed"]
    assert {"kernel", "host bytes free", "build of torch"} <= set(found[-1]["facts"])
    said = capsys.readouterr().out
    assert "FAILED" in said
    assert "of the machine" in said


class Differs(Module):
    """With this strategy alone it begins with another bias."""

    def on_train_start(self) -> None:
        if isinstance(self.trainer.strategy, SuperpipelineStrategy):
            net: Any = self.net
            with torch.no_grad():
                net.blocks[2].inner.bias.add_(1)


def test_first_light_sees_a_difference_and_says_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_light, "MODELS", {"Stack": (lambda: Differs(Stack()), vectors)})
    with pytest.raises(AssertionError, match=r"net\.blocks\.2") as raised:
        first_light.equality(first_light.PRETENDED)
    assert raised.value.__notes__ == ["This was Stack, 32-true."]


def test_every_file_of_the_gpus_tests_has_its_part(on_a_machine: Any) -> None:
    root = Path(everything.__file__).parents[2]
    parts = ["ranks", *(f"tests{part}" for part in range(1, 9))]
    done = [line for part in parts for line in on_a_machine(part)[1]]
    for file in (root / "tests/gpu").glob("test_*.py"):
        assert any(f"tests/gpu/{file.name}" in line for line in done), file


@pytest.mark.rest("a time that has to pass")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there everything runs")
def test_what_has_run_when_the_time_is_over_is_reported(tmp_path: Path) -> None:
    root = Path(everything.__file__).parents[2]
    (tmp_path / "conftest.py").write_text((root / "tests/gpu/conftest.py").read_text())
    (tmp_path / "test_two.py").write_text(
        "import conftest\ndef test_one(): conftest.END = 0; assert 0\ndef test_two(): pass\n"
    )
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-ra", "-v", "-p", "no:cacheprovider", "--rootdir", tmp_path, tmp_path],
        env={**os.environ, "GPU_TEST_END": "1e11"}, capture_output=True, text=True, cwd=tmp_path,
    )  # fmt: skip
    assert run.returncode == pytest.ExitCode.INTERRUPTED
    assert "FAILED test_two.py::test_one" in run.stdout
    assert "test_two.py::test_two and what follows has not run" in run.stdout
