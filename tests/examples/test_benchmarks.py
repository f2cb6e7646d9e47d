"""The benchmark suite at its smallest: rows are honest, the report's numbers follow from them."""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from examples.benchmarks import __main__ as everything
from examples.benchmarks import (
    agenda,
    beside_plan,
    cards,
    cli,
    compiled,
    contest,
    contestants,
    experiments,
    experts,
    foresight,
    limits,
    measure,
    overhead,
    predict,
    report,
    rows,
    train,
    update,
    workloads,
)
from examples.benchmarks.limit_model import prediction_seconds, training_seconds
from examples.benchmarks.workloads import Workload
from sp_lightning.core.device.timeline import Interval
from tests.support.made_up_rows import cells, made_up

SHORT = ["--precision", "32-true", "--steps", "5", "--k-and-k-prime", "2:1"]
GIB = 2**30


@pytest.fixture(autouse=True)
def _any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "host_bytes_free", lambda: 65 * GIB)  # the tests' models are tiny, whatever is free
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def test_the_limit_model_is_the_one_of_the_design() -> None:
    # 7.6 billion parameters, 32k tokens kept, an H200's guessed ceilings: 1.89 best, 2.48 with clipping, 3.11 serial.
    seconds = training_seconds(32768, 7.6e9, 790e12, 52.5e9, 175e9)
    assert {name: round(value, 2) for name, value in seconds.items()} == {
        "nothing overlapped": 3.69,
        "transfers overlapped": 3.11,
        "step under next forward": 2.48,
        "step under backward": 1.89,
        "best possible": 1.89,
    }
    recomputed = training_seconds(32768, 7.6e9, 790e12, 52.5e9, 175e9, recompute=True)
    assert recomputed["best possible"] == pytest.approx(8 * 7.6e9 * 32768 / 790e12)
    assert training_seconds(1, 7.6e9, 790e12, 52.5e9, 175e9)["best possible"] == pytest.approx(34 * 7.6e9 / 175e9)
    assert prediction_seconds(1, 7.6e9, 790e12, 52.5e9)["best possible"] == pytest.approx(2 * 7.6e9 / 52.5e9)


@pytest.mark.long("it measures the machine for seconds")
def test_limits_are_one_row(tmp_path: Path) -> None:
    limits.main(["--seconds", "0.1", "--out", str(tmp_path / "rows.jsonl")])
    (row,) = rows.read(tmp_path / "rows.jsonl")
    assert row["kind"] == "limits"
    assert min(row["matrix_flops"].values()) > 1e6
    assert row["dram_bytes"] > 1e8
    assert (row["device_bytes"] is None) == (not torch.cuda.is_available())
    assert row["adamw_bytes"] == pytest.approx(28 / row["adamw_seconds_per_parameter"])
    assert row["default_adamw_seconds_per_parameter"] > 0
    for kind in ("", "_allocated"):  # registered, as ours is, and allocated pinned
        assert (row[f"host_to_device_bytes{kind}"] is None) == (not torch.cuda.is_available())


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
    done = train.main([*SHORT, "--contestants", "plain", "superpipeline", "deepspeed", "--out", str(out)])
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


@pytest.mark.long("processes that measure for half a minute; the second tier has training's")
def test_prediction_is_measured_and_equal(tmp_path: Path) -> None:
    out = str(tmp_path / "rows.jsonl")
    plain, ours, other = predict.main([*SHORT, "--contestants", "plain", "superpipeline", "accelerate", "--out", out])
    assert plain["losses"] == ours["losses"]
    assert other["status"] == "missing" or other["losses"] == plain["losses"]


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
        with pytest.raises(SystemExit) as ended, cli.orderly(file):
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
    everything.run([agenda.Module("overhead")], everything.Budget(60), 1.0, tmp_path / "rows.jsonl")
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
@pytest.mark.parametrize("module", [train, predict, everything])
def test_the_exit_code_says_whether_anything_was_measured(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--minutes", "0.001"] if module is everything else ["--contestants", "plain", "--host-gib", "0.001"]
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


@pytest.mark.long("takes a second or more")
def test_what_no_longer_fits_the_budget_is_a_row(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    everything.run(agenda.pretended(), everything.Budget(0), 1.0, out)
    assert [row["item"] for row in rows.read(out)] == [item.name for item in agenda.pretended()]
    assert {row["status"] for row in rows.read(out)} == {"skipped"}


def test_all_contestants_of_the_lists_exist() -> None:
    lists = [item for make in agenda.LISTS.values() for item in make()]
    for item in [*lists, *agenda.of_size("tiny", "32-true"), *agenda.of_size("1.5B", "bf16-mixed")]:
        if isinstance(item, agenda.Contest):
            assert all(item.workload.task in contestants.by_name(name).host_copies for name in item.contestants)


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
        train.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("main", "arguments", "message"),
    [
        (predict.main, ["--gradient-checkpointing"], "unrecognized arguments: --gradient-checkpointing"),
        (everything.main, ["--list", "now", "--size", "3B"], "leave out --size"),
        (everything.main, ["--minutes", "0"], "0 is not above zero"),
        (everything.main, ["--out", "FILE"], "is a file"),
        (everything.main, ["--out", "BROKEN"], "line 1: is no row"),
        (limits.main, ["--out", "FILE/rows.jsonl"], "is a file, not a folder"),
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


@pytest.mark.long("compiles a model")
def test_compiled_layers_are_measured_and_told(tmp_path: Path) -> None:
    with torch.compiler.set_stance("force_eager"):  # graphs take their time, and are none of ours
        row = {**rows.origin(), **compiled.measure(0.1, width=32, tokens=8)}
    assert list(row["ways"]) == ["plain", "streamed", "plain compiled", "streamed compiled"]
    for way, seconds in zip(row["ways"].values(), (4.0, 5.0, 2.0, 3.2), strict=True):
        assert way["step_seconds"] > 0
        way["step_seconds"] = seconds
    text = report.write([row], tmp_path).read_text()
    assert [cells(text, way)[1:3] for way in row["ways"]] == [
        ["4", "1.00"],
        ["5", "0.80"],
        ["2", "2.00"],
        ["3.2", "1.25"],
    ]


@pytest.mark.long("a benchmark of seconds")
def test_experts_are_measured_and_told(tmp_path: Path) -> None:
    """By rows, the routed experts are uploaded, and those that were guessed; of whole blocks all are."""
    row = {**rows.origin(), **experts.measure(experts=16, routed=2, tokens=3, width=32, batches=1)}
    for kind, found in row["routing"].items():
        ways = found["ways"]
        assert 1 <= ways["by rows"]["expert_bytes"] / found["least"] < 1.3
        assert ways["whole blocks"]["bytes"] > found["stacks"]
        assert cells(report.write([row], tmp_path).read_text(), kind)[1] == "plain"


@pytest.mark.rest("takes tenths of a second")
def test_updates_are_measured_and_told(tmp_path: Path) -> None:
    row = {**rows.origin(), **update.measure(200_000, rounds=1)}
    found = row["threads"]["1"]["cases"]
    assert list(found) == [
        "bf16-mixed",
        "bf16-mixed, clipped by norm",
        "32-true",
        "32-true, clipped by norm",
        "bf16-true",
        "16-true",
    ]
    assert all(seconds > 0 for case in found.values() for seconds in case.values())
    seconds = {"alone": 2e-4, "walks": 4e-4, "operators": 2.5e-4, "pieces": 3e-4}
    row["threads"] = {"1": {"cases": {"bf16-mixed": seconds}}}
    row["parameters"] = 100_000
    text = report.write([row], tmp_path).read_text()
    assert cells(text, "1")[2:] == ["2.000", "4.000", "2.500", "3.000", "2.00", "1.50"]


@pytest.mark.parametrize("case", update.CASES)
def test_the_ways_of_updating_that_are_compared_do_thesame_tokens(case: str) -> None:
    dtype, half, clips = update.CASES[case]
    walks, pieces = update.Layers(100_000, dtype), update.Layers(100_000, dtype)
    walks.walks(half=half, clips=clips)
    pieces.pieces(half=half, clips=clips)
    assert all(map(torch.equal, walks.weights, pieces.weights))
    assert not half or all(map(torch.equal, walks.casts, pieces.casts))


def test_generation_is_compared_only_where_the_tokens_are_thesame_tokens() -> None:
    tokens = torch.arange(4)
    ways = {"plain": tokens.clone, "other": tokens.flip(0).clone}
    with pytest.raises(AssertionError, match="other generates other tokens"):
        overhead.same_tokens(ways)


def test_the_share_of_fetches_that_computation_hides() -> None:
    fetch, forward, backward = (
        Interval("fetch", 0, 0.0, 4.0), Interval("forward", 0, 1.0, 2.0), Interval("backward", 1, 3.0, 5.0)
    )  # fmt: skip
    assert beside_plan.hidden_share([fetch, forward, backward]) == 0.5
    assert beside_plan.hidden_share([forward]) is None


@pytest.mark.long("takes a second or more")
def test_a_window_that_takes_more_than_planned_is_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(beside_plan, "WINDOWS", ((2, 1), (1, 1)))
    monkeypatch.setattr(beside_plan, "_taken", lambda strategy: (2**40, None))
    monkeypatch.setattr(beside_plan, "window", lambda *_: {"what": "window", "within": True})
    monkeypatch.setattr(beside_plan, "timeline", lambda *_: {"what": "timeline"})
    arguments = ["--tokens", "64", "--seconds", "0.01", "--out", str(tmp_path)]
    assert beside_plan.main(arguments) == 0, "the first window's activations explain it"
    taken = iter([(2**30, None), (2**40, None)])
    monkeypatch.setattr(beside_plan, "_taken", lambda strategy: next(taken))
    assert beside_plan.main(arguments) == 1
    assert [row["status"] for row in rows.read(tmp_path / "rows.jsonl")][-4:] == ["ok", "failed", "ok", "ok"]


def test_a_machines_rates_are_arguments_of_plan() -> None:
    row = {"matrix_flops": {"bf16": 750e12}, "dram_bytes": 120e9, "duplex_bytes": 40e9, "device_bytes": 3e12}
    host = ["--tflops", "750", "--host-bandwidth", "120GB/s"]
    assert limits.plan_arguments(row) == [*host, "--pcie", "40GB/s", "--device-bandwidth", "3000GB/s"]
    assert limits.plan_arguments({**row, "duplex_bytes": None, "device_bytes": None}) == host


@pytest.mark.long("takes a second or more")
def test_foresight_measures_and_predicts_every_window(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    foresight.main(["--tokens", "64", "--windows", "1:1", "3:2", "--seconds", "0.1", "--out", str(file)])
    found = rows.read(file)
    assert [(each["k"], each["k_prime"]) for each in found] == [(1, 1), (3, 2)]
    for each in found:
        assert 0.2 < each["predicted"] / each["measured"] < 5, (
            "the same kind of number; its truth is a benchmark's matter"
        )
    assert capsys.readouterr().out.count("measured") == 2


def test_a_transfer_rate_is_bytes_over_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    there, back = (torch.empty(2**20, dtype=torch.uint8) for _ in range(2))
    monkeypatch.setattr(limits, "median_seconds", lambda call, seconds: call() or 0.5)
    found = limits._transfer_rates(there, back, torch.device("cpu"), 0.3)
    assert found == dict.fromkeys(limits.TRANSFERS, 2**21)
    assert there.sum() == back.sum() == 2**20, "both were touched before: the first touch of a page is no transfer"


@pytest.mark.long("processes that import torch")
def test_processes_that_are_bound_to_nodes_update_together(tmp_path: Path) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    for number in range(2):
        (tmp_path / f"node{number}").mkdir()
        (tmp_path / f"node{number}" / "cpulist").write_text(f"{cpus[number % len(cpus)]}\n")
    rates = experiments.numa(2**20, 0.1, tmp_path)
    assert set(rates) == {"anywhere", "each on its node"}
    assert min(rates.values()) > 0
    assert experiments.numa(2**20, 0.1, tmp_path / "node0") == {}
    assert experiments._numbers("0-3,8") == {0, 1, 2, 3, 8}
