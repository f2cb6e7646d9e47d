"""The parts of ``plan --hours`` and ``--rates`` by themselves, without a run, and mostly without a plan."""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.tools.planner import measured, rates
from sp_lightning.tools.planner.answer import Answer, answer
from sp_lightning.tools.planner.arguments import command
from sp_lightning.tools.planner.budget import Budget, _accumulated, _epochs, in_words, trainer_call
from sp_lightning.tools.planner.estimate import estimate_model
from sp_lightning.tools.planner.remedies import _ways as remedies
from tests.support.answers import question


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.example_input_array = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


SMALL = "tests.planner.test_plan_measured:Small"


def answered(*options: str) -> Answer:
    return answer(estimate_model(question(SMALL, "--precision", "32-true", *options)))


# ---------------------------------------------------------------------- hours


@pytest.mark.rest("takes tenths of a second")
def test_what_is_given_and_what_does_not_fit_are_not_accumulated() -> None:
    given, open_ = (answered("--k", "1", "--k-prime", "1", *more) for more in (("--accumulate-grad-batches", "1"), ()))
    assert [each.question.accumulate_grad_batches for each in _accumulated(open_)] == [1, 4, 16]
    for alone in (given, replace(open_, best=None)):
        assert list(_accumulated(alone)) == [alone]


def test_windows_that_do_not_fit_are_not_accumulated() -> None:
    found = answered()
    slowest = max(found.rows, key=lambda row: row.prediction.seconds)
    rows = tuple(replace(row, fits=row is slowest) for row in found.rows)
    _, *more = _accumulated(replace(found, rows=rows, best=slowest))
    assert {row.plan.k for each in more for row in each.rows} == {slowest.plan.k}


def test_a_part_of_a_second_is_one_to_the_trainer() -> None:
    found = answered("--hours", "0.0001")
    assert 'max_time={"seconds": 1}' in trainer_call(Budget(found, 0.36, 1, "samples"))


def test_too_few_steps_are_said() -> None:
    asked = question(SMALL, "--hours", "1")
    found = answered("--hours", "1", "--k", "1", "--k-prime", "1")
    each = found.shown.prediction.seconds
    few, enough = ("\n".join(in_words([Budget(found, count * each, 1, "samples")], asked)) for count in (900, 1100))
    assert "No way that fits reaches 1,000 steps" in few
    assert "No way" not in enough


@pytest.mark.parametrize(("epochs", "said"), [(None, ""), (4, ", 4 epochs"), (5, ", 5 epochs; data repeated more")])
def test_how_often_the_data_comes(epochs: float | None, said: str) -> None:
    words = _epochs(SimpleNamespace(epochs=epochs))  # type: ignore[arg-type]
    assert words.startswith(said)
    assert ("repeated more than four times" in words) == (epochs == 5)


# ---------------------------------------------------------------------- rates

RATES: dict[str, Any] = {
    "kind": "rates",
    "machine": {"accelerator": "Loom", "processor": "Abacus", "cores": 8},
    "measured": {
        "tflops": {"fp32": 1, "bf16": 2, "fp16": 3}, "pcie": "5GB/s", "disk": "3GB/s", "synchronous": False,
        "python": {"training": [3e-5, 2e-6], "inference": [1e-5, 1e-6]},
    },
}  # fmt: skip


def with_rates(folder: Path, *options: str) -> Any:
    file = folder / "rates.json"
    file.write_text(json.dumps(RATES))
    return measured.with_rates(question(SMALL, "--rates", str(file), *options))


def test_a_command_names_the_file_and_not_what_is_in_it(tmp_path: Path) -> None:
    found = with_rates(tmp_path, "--host-bandwidth", "9GB/s")
    assert (found.pcie, found.tflops) == (5e9, 2)
    said = command(found)
    assert f"--rates {tmp_path}" in said
    assert "--host-bandwidth 9GB/s" in said
    assert "--pcie" not in said
    assert "--tflops" not in said


@pytest.mark.rest("takes tenths of a second")
def test_a_drive_that_was_measured_is_no_drive_that_was_asked_for(tmp_path: Path) -> None:
    """It is what a plan is told to try that lacks host memory."""
    found = with_rates(tmp_path, "--host-memory", "1KiB")
    assert found.disk is None
    assert 3e9 in [changes.get("disk") for changes in remedies(answer(estimate_model(found)))]
    assert with_rates(tmp_path, "--disk", "7GB/s").disk == 7e9


def test_an_accelerator_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match="--accelerator loom: torch finds "):
        measured.run_rates(Namespace(accelerator="loom", seconds=0.1, disk=None))


class Link(Device):
    """Copies beside each other, and counts what it page-locks."""

    synchronous = False

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room, self.locked = room, list[int]()

    def pin(self, memory: Tensor) -> bool:
        if len(self.locked) == self.room:
            return False
        self.locked.append(memory.data_ptr())
        return True

    def unpin(self, memory: Tensor) -> None:
        self.locked.remove(memory.data_ptr())


def test_a_link_is_measured_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, locked = Link(room=2), list[int]()

    def half_a_second(call: Any, seconds: float, device: Any) -> float:
        call()
        locked.extend(device.locked)
        return 0.5

    monkeypatch.setattr(rates, "median_seconds", half_a_second)
    assert rates.link_bytes(device, 2**16, 1) == 2**16 / 0.5
    assert len(set(locked)) == 2
    assert not device.locked, "it is given back"


def test_memory_that_is_not_locked_is_no_measure_of_a_link() -> None:
    device = Link(room=1)
    with pytest.raises(OSError, match="cannot page-lock 1 MiB of host memory: raise `ulimit -l`"):
        rates.link_bytes(device, 2**20, 1)
    assert not device.locked
