"""The benchmark suite at its smallest: rows are honest, the report's numbers follow from them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as everything
from examples.benchmarks import (
    agenda,
    cards,
    contest,
    contestants,
    measure,
    overhead,
    report,
    rows,
    workloads,
)
from examples.benchmarks.workloads import Workload
from tests.examples.made_up_rows import cells, made_up

SHORT = ["--precision", "32-true", "--steps", "5", "--k-and-k-prime", "2:1"]
GIB = 2**30


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "host_bytes_free", lambda: 65 * GIB)  # the tests' models are tiny, whatever is free
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


@pytest.mark.long("takes a second or more")
def test_weights_and_data_are_the_same_every_time() -> None:
    for family in workloads.SIZES:
        items = 4 if family == "vision" else 64
        workload = Workload("train", family, items=items, precision="32-true")
        one, two = workloads.build_net(workload), workloads.build_net(workload)
        assert all(torch.equal(p, q) for p, q in zip(one.parameters(), two.parameters(), strict=True))
        assert sum(p.numel() for p in one.parameters()) == workloads.parameter_count(family, "tiny")
        batch = workloads.build_batches(workload, lambda: False).batches[0]
        kept = one(**batch)
        checkpointed = workloads.build_net(
            Workload("train", family, items=items, precision="32-true", checkpointing=True)
        )
        assert torch.equal(kept, checkpointed(**batch))


@pytest.mark.long("takes a second or more")
def test_the_real_shapes_have_the_real_sizes() -> None:
    assert workloads.parameter_count("llm", "3B") == 3_212_749_824  # meta-llama/Llama-3.2-3B
    assert workloads.parameter_count("llm", "7B") == 6_738_415_616  # meta-llama/Llama-2-7b
    assert workloads.parameter_count("vision", "huge") == 632_045_800  # torchvision's vit_h_14


@pytest.mark.long("takes a second or more")
def test_a_row_of_the_page_on_cards_is_predicted(tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, **size}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = f"--tokens 64 --gradient-checkpointing {cards._CLIP}"
    case = cards.Case(str(tmp_path / "config.json"), "all", options, "how")
    name, gpu, cpu, seconds, share, how = cards.cells(case, cards.CARDS["24"])
    assert (name, how) == ("config, all", "how; plain Lightning fits, too, and is faster")
    assert (gpu.split()[1], cpu.split()[1], seconds.split()[1]) == ("GiB", "GiB", "s")
    assert 0 < float(share) <= 1
    assert f"`{cards.COMMAND}`" in cards.PAGE.read_text()


@pytest.mark.long("processes that measure for a minute")
def test_training_is_measured_and_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "rows.jsonl"
    done = contest.main(["train", *SHORT, "--contestants", "plain", "superpipeline", "deepspeed", "--out", str(out)])
    plain, ours, other = done
    assert rows.read(out) == json.loads(json.dumps(done))
    assert [plain["status"], ours["status"]] == ["ok", "ok"], (plain, ours)
    assert other["status"] in ("missing", "skipped")
    assert plain["losses"] == ours["losses"]
    assert len(ours["losses"]) == 5
    assert len(ours["step_seconds"]) == len(ours["optimizer_seconds"]) == len(ours["stats"]) == 3
    assert ours["items_per_second"] == pytest.approx(128 / sorted(ours["step_seconds"])[1])
    assert ours["stats"][0]["fetched_layers"] > 0
    assert 0 < ours["counted_peak_bytes"] <= ours["planned_peak_bytes"]
    assert ours["peak_host_bytes"] > 2**20
    assert "superpipeline 2:1" in (printed := capsys.readouterr().out)
    assert printed.splitlines()[-1] == f"Report: python -m examples.benchmarks.report {out}"
    assert not any(name.startswith("peak") for name in ours["stats"][0])
    if not torch.cuda.is_available():  # its update is on the host there
        assert len(plain["optimizer_seconds"]) == 3


@pytest.mark.long("processes that measure for seconds; the second tier has training's")
def test_ways_of_activations_are_measured_and_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As on the command line, but in this process: fourteen would take a minute to start.
    monkeypatch.setattr(contest, "wait", lambda command, *_: measure.main(command[3:]))
    checkpointed = []

    def build(workload: Workload) -> torch.nn.Module:
        checkpointed.append(workload.checkpointing)
        return workloads.build_net(workload)

    monkeypatch.setattr(measure, "build_net", build)
    done = everything.main(["--list", "activations-tiny", "--seconds", "0.01", "--out", str(tmp_path)])
    done = [row for row in done if row["kind"] != "item"]
    assert [row["contestant"] for row in done] == [*agenda.ACTIVATIONS] * 2
    assert [row.get("error") for row in done] == [None] * len(done)
    assert checkpointed == [row["contestant"] == "plain-recompute" for row in done]
    text = (tmp_path / "report.md").read_text()
    for plain, *others in (done[:7], done[7:]):
        steps = min(len(row["losses"]) for row in (plain, *others))
        assert {tuple(row["losses"][:steps]) for row in others} == {tuple(plain["losses"][:steps])}
        moved = {
            row["contestant"] for row in others if "stats" in row and row["stats"][0]["offloaded_activation_bytes"]
        }
        assert moved == {"superpipeline-2:1-offload"}  # 16 GiB are enough for "auto" to keep all
    assert all(cells(text, row["label"])[4] not in ("", report.NONE) for row in done)


def test_a_failing_contestant_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "build_net", lambda _: {}["weights"])
    job = {"workload": {"task": "train"}, "contestant": "plain", "seconds": 1, "device_gib": None}
    measure.main(["--row", str(tmp_path / "row.json"), "--job", json.dumps(job)])
    row = json.loads((tmp_path / "row.json").read_text())
    assert (row["status"], row["error"]) == ("failed", "KeyError: 'weights'")
    assert "Traceback" in row["traceback"]


def test_a_killed_process_is_a_row() -> None:
    row = contest.compete(Workload("train"), "plain", contest.Limits(time_out=0.01))
    assert row["status"] == "failed"
    assert "more than" in row["error"]
    assert "memory" in contest.how_it_ended(-9)


@pytest.mark.long("processes of its own")
def test_a_signal_ends_the_run_and_its_child(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # SIGTERM to the parent left the measuring child, which leads a session of its own, running.
    file, child = tmp_path / "rows.jsonl", tmp_path / "child"
    rows.append(file, made_up("plain", 1.0))
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as nohup does
    # It waits first: on a busy machine the signal came before the parent had the child's number.
    write = f"pathlib.Path({str(child)!r}).write_text(str(os.getpid()))"
    script = f"import os, pathlib, time; time.sleep(0.5); {write}; time.sleep(60)"

    def kill() -> None:
        while not (child.is_file() and child.read_text()):
            pass
        os.kill(os.getpid(), signal.SIGHUP)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        with pytest.raises(SystemExit) as ended, rows.orderly(file):
            contest.wait([sys.executable, "-c", script], dict(os.environ), subprocess.DEVNULL, 30)
        thread.join()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)
    assert ended.value.code == 130
    expected = f"interrupted: 1 rows in {file}; report: python -m examples.benchmarks.report {file}"
    assert capsys.readouterr().out.strip() == expected
    with pytest.raises(ProcessLookupError):
        os.kill(int(child.read_text()), 0)


def test_an_interrupted_run_reports_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: Any) -> None:
        rows.append(tmp_path / "rows.jsonl", made_up("plain", 1.0))
        raise KeyboardInterrupt

    monkeypatch.setattr(everything, "run", interrupted)
    with pytest.raises(SystemExit, match="130"):
        everything.main(["--out", str(tmp_path)])
    assert cells((tmp_path / "report.md").read_text(), "plain Lightning")[1] == "1"


def test_rows_of_one_run_say_so_wherever_they_are_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, str] = {}
    monkeypatch.setattr(contest, "wait", lambda command, environment, *_: given.update(environment) or 0)
    everything.run([agenda.OVERHEAD], everything.Budget(60), 1.0, tmp_path / "rows.jsonl")
    assert given[rows.RUN] == rows.origin()["run"]
    monkeypatch.setenv(rows.RUN, "the parent's")
    assert rows.origin()["run"] == "the parent's"


@pytest.mark.long("takes a second or more")
def test_a_later_run_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    for row in (made_up("plain", 1.0, 80), made_up("fsdp2", 3.0, 80)):
        rows.append(file, {**row, "run": "first", "commit": "older"})
    monkeypatch.setenv(rows.RUN, "second")
    monkeypatch.setattr(everything, "run", lambda *_: rows.append(file, made_up("fsdp2", 2.0, 80)))
    (row,) = everything.main(["--out", str(tmp_path)])
    assert row["run"] == "second"
    text = (tmp_path / "report.md").read_text()
    name = "Train llm 3B, bf16-mixed, 8192 tokens, run"
    first, second = text[text.index(f"## {name} first") :].split(f"## {name} second")
    assert cells(first, "FSDP2 CPUOffloadPolicy")[4] == "0.33"
    assert "÷ plain" not in second  # plain ran in another run


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("module", [contest, everything])
def test_the_exit_code_says_whether_anything_was_measured(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = (
        ["--minutes", "0.001"] if module is everything else ["train", "--contestants", "plain", "--host-gib", "0.001"]
    )
    monkeypatch.setattr(sys, "argv", ["benchmarks", *arguments, "--out", f"{tmp_path}/"])
    with pytest.raises(SystemExit, match="1"):
        runpy.run_path(str(module.__file__), run_name="__main__")
    assert {row["status"] for row in rows.read(tmp_path / "rows.jsonl")} == {"skipped"}
    assert contest.any_ok([{"status": "failed"}, {"status": "ok"}])


def test_too_little_host_memory_is_said_before_anything_is_built() -> None:
    workload = Workload("train", size="7B", items=8192, length=4096)
    row = contest.obstacle(workload, contestants.by_name("superpipeline-2:1"), contest.Limits(host_gib=64))
    assert row is not None
    # 16 bytes for each of 6,738,415,616 parameters, and 2 GiB for the process.
    assert "102.4 GiB" in row["error"]
    assert "bf16-true" in row["error"]
    small = Workload("train", precision="32-true")
    assert contest.obstacle(small, contestants.by_name("superpipeline-2:1"), contest.Limits()) is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--contestants", "nobody"], "There is no contestant 'nobody'"),
        (["--k-and-k-prime", "2"], "'2' is no pair"),
        (["--size", "5B"], "no llm of size '5B'"),
        (["--tokens", "100"], "--tokens 64"),
        (["--steps", "2"], "2 steps leave none to measure"),
        (["--seconds", "0"], "0 is not above zero"),
    ],
)
def test_bad_options_say_what_is_wrong(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        contest.main(["train", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (contest.main, ["predict", "--gradient-checkpointing"], "found predict, which has no backward"),
        (everything.main, ["--list", "now", "--size", "3B"], "leave out --size"),
        (everything.main, ["--minutes", "0"], "0 is not above zero"),
        (everything.main, ["--out", "FILE"], "is a file"),
        (everything.main, ["--out", "BROKEN"], "line 1: is no row"),
        (overhead.main, ["--out", "FILE/rows.jsonl"], "is a file, not a folder"),
        (report.main, ["BROKEN", "--out", "FILE"], "is a file"),
        (report.main, ["BROKEN"], "line 1: is no row"),
    ],
)
def test_nothing_is_measured_with_bad_options(
    main: Any, arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "FILE").touch()
    (tmp_path / "BROKEN").mkdir()
    (tmp_path / "BROKEN" / "rows.jsonl").write_text("[]\n")
    with pytest.raises(SystemExit):
        main([each.replace("FILE", f"{tmp_path}/FILE").replace("BROKEN", f"{tmp_path}/BROKEN") for each in arguments])
    assert message in capsys.readouterr().err


def test_generation_is_compared_only_where_the_tokens_are_thesame_tokens() -> None:
    tokens = torch.arange(4)
    ways = {"plain": tokens.clone, "other": tokens.flip(0).clone}
    with pytest.raises(AssertionError, match="other generates other tokens"):
        overhead.same_tokens(ways)
