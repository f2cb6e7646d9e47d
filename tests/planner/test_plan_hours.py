"""``plan --hours`` and ``--rates``."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sp_lightning.__main__ import main
from sp_lightning.core.device.device import Device
from sp_lightning.tools.planner import rates as measuring
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.budget import best_first, budgets
from tests.support.answers import plan
from tests.support.models import Module, Stack
from tests.support.tiers import first

FACTORY = "tests.planner.test_plan_hours:Example"
SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    return str(file)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------- hours


@pytest.mark.long("takes a second or more")
def test_what_a_time_is_enough_for_is_the_best_rows_arithmetic(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = ("--dataset-tokens", "100k", "--batch-size", "2", "--precision", "bf16-mixed")
    found = plan(capsys, config, "--hours", "0.5", *data)
    best, row = found["budget"], found["best"]
    step = best["batch_size"] * best["tokens"] * best["accumulate_grad_batches"]
    (chosen,) = [each for each in found["windows"] if (each["k"], each["k_prime"]) == (row["k"], row["k_prime"])]
    assert best["seconds_per_step"] == chosen["seconds"] * best["accumulate_grad_batches"]
    assert best["steps"] == int(1800 / best["seconds_per_step"])
    assert best["total_tokens"] == best["steps"] * step
    assert best["epochs"] == best["total_tokens"] / 100_000
    assert (
        f"accumulate_grad_batches={best['accumulate_grad_batches']}" in found["trainer"]
        or best["accumulate_grad_batches"] == 1
    )
    assert 'max_time={"seconds": 1800}' in found["trainer"]
    assert eval(found["trainer"], {"Trainer": dict, **globals()})["strategy"]._options.k == found["strategy"]["k"]


GIVEN = [
    ["--batch-size", "1", "--accumulate-grad-batches", "1"],
    ["--optimizer-on", "cpu", "--optimizer-overlap", "forward"],
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("given", first(GIVEN, GIVEN[0], why="looks for a batch among all, twice"))
def test_the_printed_command_answers_the_same(
    given: list[str], config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["plan", config, "--hours", "1", *given])
    said = capsys.readouterr().out
    (command,) = [line for line in said.splitlines() if line.startswith("  python -m sp_lightning plan")]
    main(shlex.split(command)[3:])
    assert capsys.readouterr().out.splitlines()[0] == said.splitlines()[0]


@pytest.mark.long("takes a second or more")
def test_what_fits_by_computing_again_alone_is_found(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = (config, "--precision", "bf16-mixed", "--gpu-memory", "1400KiB")
    assert plan(capsys, *asked, "--activations", "recompute")["best"] is not None
    found = plan(capsys, *asked, "--hours", "1", "--batch-size", "1")
    assert found["strategy"]["activations"] in ("auto", "recompute")


def test_less_than_a_step_is_refused(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--hours", "1e-9", "--batch-size", "1", "--precision", "bf16-mixed")
    assert "is less than one step, which takes" in refused(capsys, config, *asked)


@pytest.mark.long("takes a second or more")
def test_what_is_given_is_kept(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--batch-size",
        "3",
        "--accumulate-grad-batches",
        "2",
        "--precision",
        "32-true",
        "--optimizer-overlap",
        "forward",
    ]
    found = plan(capsys, config, "--hours", "1", "--optimizer-on", "cpu", *given)
    assert (found["budget"]["batch_size"], found["budget"]["accumulate_grad_batches"], found["precision"]) == (
        3,
        2,
        "32-true",
    )
    assert found["strategy"]["optimizer_overlap"] == "forward"


@pytest.mark.long("two searches over everything; the arithmetic of one is in the first tier")
def test_rounded_updates_are_no_default(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(capsys, config, "--hours", "1")["precision"] == "bf16-mixed"
    main(["plan", config, "--hours", "1", "--batch-size", "1", "--host-bandwidth", "1GB/s"])
    said = capsys.readouterr().out
    assert "bf16-true reaches " in said
    assert "rounded to 8 bits" in said


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--hours", "0"), "argument --hours"),
        (("--hours", "-1"), "argument --hours"),
        (
            ("--hours", "1", "--dataset-tokens", "10", "--batch-size", "1", "--precision", "32-true"),
            "The data has 10 tokens, and one step takes ",
        ),
        (("--hours", "1", "--predict"), "--hours does not work with --predict or --generate"),
        (("--dataset-tokens", "1M"), "--dataset-tokens needs another option. Add --hours 24"),
    ],
)
def test_a_time_that_cannot_be_is_refused(
    options: tuple[str, ...], why: str, config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert why in refused(capsys, config, *options)


@pytest.mark.long("seconds of planning; tests/planner/test_plan_measured.py has the parts of it")
def test_a_budget_in_which_nothing_fits_says_what_is_missing(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", config, "--hours", "1", "--gpu-memory", "100kB", "--precision", "bf16-true"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("It does not fit: at least ")


# ---------------------------------------------------------------------- rates


@pytest.fixture
def rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(
        measuring, "measure_host_seconds", lambda *, training: (1e-5, 2e-6) if training else (2e-5, 1e-6)
    )

    def measure(*options: str) -> dict[str, Any]:
        main(["rates", "--seconds", "0.1", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        (tmp_path / "rates.json").write_text(json.dumps(found))
        return found

    return measure


@pytest.mark.long("seconds of measuring")
def test_rates_are_measured_and_used(
    rates: Callable[..., dict[str, Any]], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rates("--accelerator", "cpu", "--disk", str(tmp_path))
    assert found["assumed"] == []
    measured, file = found["measured"], str(tmp_path / "rates.json")
    for precision, key in (("bf16-mixed", "bf16"), ("32-true", "fp32"), ("16-true", "fp16")):
        used = plan(capsys, config, "--rates", file, "--precision", precision)["assumed"]
        assert used["tflops"] == measured["tflops"][key] > 0
    for name in ("pcie", "host_bandwidth", "device_bandwidth"):
        assert used[f"{name.partition('_')[0]}_gbps"] == pytest.approx(float(measured[name].removesuffix("GB/s")))
    given = plan(capsys, config, "--rates", file, "--pcie", "7GB/s", "--precision", "32-true")["assumed"]
    assert given == {**used, "pcie_gbps": 7, "tflops": measured["tflops"]["fp32"]}, "what is given comes first"
    main(["plan", config, "--rates", file])
    said = capsys.readouterr().out
    assert f"({file}); assumed: AdamW (--optimizer)" in said
    assert "is of another machine" not in said


@pytest.mark.long("takes a second or more")
def test_without_an_accelerator_its_rates_stay_assumed(
    rates: Callable[..., dict[str, Any]], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    found = rates()
    assert found["assumed"] == ["tflops", "device_bandwidth", "pcie"]
    assert not set(found["assumed"]) & set(found["measured"])
    used = plan(capsys, config, "--rates", str(tmp_path / "rates.json"))["assumed"]
    assert (used["tflops"], used["pcie_gbps"]) == (100, 25)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "report"}', '{"kind": "rates", "measured": {}}'])
def test_another_file_is_refused(text: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    said = refused(capsys, config, "--rates", str(file))
    assert f"{file} is not a file of rates" in said
    assert "Make one: " in said
    assert "No such file" in refused(capsys, config, "--rates", str(tmp_path / "none.json"))


class Example(Module):
    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def test_a_disk_is_measured_by_whole_pages(tmp_path: Path) -> None:
    assert measuring.disk_bytes(tmp_path, 2**20) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_what_is_measured_counts_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "median_seconds", lambda call, seconds, device: 0.5)
    device = Device(torch.device("cpu"))
    assert measuring.copied_bytes(device, 2**20, 1) == 2 * 2**20 / 0.5
    assert measuring.link_bytes(device, 2**20, 1) == 2 * 2**20 / 0.5, (
        "one after the other, where copies are synchronous"
    )
    assert measuring.matrix_flops(torch.float32, device, 0.1) == 2 * 512**3 / 0.5


# ---------------------------------------------------------------------- which way comes first


def way(steps: int, count: int, precision: str = "bf16-mixed") -> Any:
    """A way to train with so many steps of so many tokens."""
    question = SimpleNamespace(stores_16_bits=precision == "bf16-true", predict=False)
    return SimpleNamespace(steps=steps, count=count, total=steps * count, answer=SimpleNamespace(question=question))


@pytest.mark.parametrize(
    ("first", "others"),
    [
        (way(1000, 10), [way(9000, 10, "bf16-true")]),  # whole updates
        (way(1, 10), [way(9000, 10, "bf16-true")]),  # even if the steps are too few
        (way(1000, 10), [way(999, 90), way(1, 90_000)]),  # enough steps
        (way(900, 10), [way(800, 90)]),  # of too few the most
        (way(1000, 20), [way(1500, 10)]),  # the most tokens
        (way(3930, 5), [way(1000, 20), way(2000, 10)]),  # of nearly as many the smallest step
    ],
)
def test_the_order_of_ways(first: Any, others: list[Any]) -> None:
    for found in ([first, *others], [*others, first]):
        ordered = best_first(found)
        assert ordered[0] is first
        assert sorted(map(id, ordered)) == sorted(map(id, found))
    assert best_first([]) == []


@pytest.mark.long("takes a second or more")
def test_larger_batches_are_tried_until_they_are_no_faster(config: str) -> None:
    asked = make_parser().parse_args(["plan", config, "--hours", "1", "--tflops", "0.01"], namespace=Question())
    asked.given = frozenset({"precision", "accumulate_grad_batches", "optimizer_overlap", "optimizer_on"})
    said: list[str] = []
    tried = {each.answer.question.batch_size for each in budgets(asked, said.append)}
    assert len(said) == len(tried) < 5, "of seven"
