"""``sp_lightning.check``: what is equal is found to be, and each planted error is found and named."""

from __future__ import annotations

import logging
import os
import random
import re
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from lightning.pytorch import callbacks
from torch import Tensor

import sp_lightning
from sp_lightning.tools.comparison.record import Compared
from sp_lightning.tools.comparison.report import Report
from sp_lightning.tools.comparison.subject import NotRunError, Subject
from tests.support import planted
from tests.support.kernels import Block, with_one
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.tiers import first

OPTIONS: dict[str, Any] = {"steps": 2, "trainer": {"accelerator": "cpu"}, "k": 1, "k_prime": 1}
KINDS = {
    "losses", "logged values", "validation", "weights", "buffers", "optimizer state", "scheduler state", "random state",
    "checkpoints", "predictions", "continued",
}  # fmt: skip


def check(factory: Any, data: Any = planted.batches, **options: Any) -> Report:
    return sp_lightning.check(factory, data, **{**OPTIONS, **options})


def findings(report: Report) -> dict[str, str]:
    return {what: str(row.first) for what, row in report.rows.items() if row.first}


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folders for temporary files and for the process, which are empty."""
    for name in ("temporary", "working"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    monkeypatch.chdir(tmp_path / "working")
    return tmp_path


@pytest.mark.long("takes a second or more")
def test_everything_is_compared_and_nothing_is_left_behind(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[planted.Everything] = []

    def make() -> planted.Everything:
        made.append(planted.Everything())
        return made[-1]

    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    before = dict(os.environ), logging.root.manager.disable, set(vars(planted.Everything))
    report = check(make, None)
    assert report.status == 0, str(report)
    assert set(report.rows) == KINDS
    numbers = {what for what, row in report.rows.items() if not row.tensors}
    assert numbers == {"scheduler state", "validation"}, "the scheduler's, and that a validation step returns nothing"
    assert report.layers == 7
    assert 0.9 < report.streamed < 1
    assert [each.name for each in report.runs] == ["plain", "superpipeline"]
    assert all(each.seconds > 0 and each.device_bytes for each in report.runs)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == states
    assert (dict(os.environ), logging.root.manager.disable, set(vars(planted.Everything))) == before
    assert [path for folder in temporary.iterdir() for path in folder.iterdir()] == []
    plain, *others = (set(vars(module)) for module in made)
    assert all(other == plain for other in others)
    assert capsys.readouterr().err.count("check: run ") == 5, "plain twice, one mode, one checkpoint across"


def test_numbers_that_are_compared_are_counted() -> None:
    """The line "scheduler state 0 equal" read as if there were no scheduler. Its state are numbers."""
    report = Report(rows={"scheduler state": Compared(values=12), "losses": Compared(values=2, tensors=2)})
    assert "scheduler state        0  equal (12 values)\nlosses                 2  equal\n" in str(report)


@pytest.mark.long("two checks")
def test_scheduler_state_is_a_row_only_if_there_is_a_scheduler() -> None:
    assert "scheduler state" not in str(check(lambda: Module(Stack()), vectors))
    assert re.search(r"^scheduler state +0  equal \(\d+ values\)$", str(check(planted.Everything, None)), re.MULTILINE)


# ---------------------------------------------------------------------- planted errors


@pytest.mark.rest("takes tenths of a second")
def test_randomness_that_cannot_be_repeated_is_said_first() -> None:
    report = check(planted.Unrepeatable)
    assert report.status == 2
    assert not report.rows
    said = str(report)
    assert "Plain Lightning, run twice from the same seed, differs from itself: losses (" in said
    assert "Trainer(deterministic=True, benchmark=False)" in said


class CountsInAnObject(Block):
    """Counts its runs where no comparison looks."""

    def __init__(self) -> None:
        super().__init__()
        self.state = types.SimpleNamespace(runs=0)

    def forward(self, x: Tensor) -> Tensor:
        self.state.runs += 1
        return super().forward(x * self.state.runs)


@pytest.mark.rest("takes a second")
def test_what_torchs_checkpoint_changes_as_well_is_said_with_the_layer() -> None:
    report = check(with_one(CountsInAnObject), vectors, activations="recompute")
    assert report.status == 1
    assert "equals plain Lightning with torch's checkpoint around each layer, and not without" in str(report)
    assert "the forward of 'net.blocks.2' computes something else" in str(report)
    other = check(planted.OtherBuffer, vectors, activations="recompute")
    assert (other.status, "torch's checkpoint" in str(other)) == (1, False)


@pytest.mark.long("takes a second or more")
def test_an_error_of_one_mode_is_a_difference_and_a_refusal_is_said() -> None:
    """Every error but those of assertions was taken for a refusal, so that the other modes alone were equal."""
    report = check(lambda: planted.StopsOffloaded(Stack()), vectors, activations="all")
    assert report.status == 1
    assert "RuntimeError: kernel fault" in findings(report)["the run itself"]
    assert "layers found" in str(report)
    nothing = check(lambda: planted.StopsOffloaded(Stack()), vectors, activations="offload")
    assert (nothing.status, "layers found" in str(nothing)) == (1, False)
    manual = check(lambda: CASES["gan"].make(), vectors, optimizer_overlap="all")
    assert manual.status == 0, str(manual)
    assert any("optimization is manual" in note for note in manual.notes)


@pytest.mark.rest("takes tenths of a second")
def test_a_defect_of_the_strategy_is_no_refusal() -> None:
    """It ends in this package, too, but no line there has said what is wrong."""
    with mock.patch("sp_lightning.capabilities.activations.offload.WORTH_MOVING", "no number"):
        report = check(lambda: Module(Stack()), vectors, activations="offload")
    assert report.status == 1
    assert "TypeError" in findings(report)["the run itself"]


@pytest.mark.long("takes a second or more")
def test_steps_on_the_device_are_compared_with_plains_there() -> None:
    report = check(lambda: Module(Stack()), vectors, optimizer_on="gpu", optimizer_overlap="backward")
    assert report.status == 0, str(report)
    assert "fused on the CPU" not in report.reference


@pytest.mark.long("takes a second or more")
def test_kernels_are_chosen_as_before() -> None:
    assert check(lambda: Module(Stack()), vectors, trainer={"accelerator": "cpu", "deterministic": True}).status == 0
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("factory", "why"),
    [
        (planted.TrainsNothing, "nothing was trained"),
        (planted.AssertsInVain, "AssertionError: of the user"),
    ],
)
def test_what_plain_lightning_does_not_train_is_not_compared(factory: Any, why: str) -> None:
    report = check(lambda: factory(Stack()), vectors)
    assert report.status == 2
    assert why in str(report)


def test_without_batches_nothing_is_compared() -> None:
    report = check(lambda: Module(Stack()), lambda: torch.utils.data.DataLoader([]))
    assert report.status == 2
    assert "has trained no batch" in str(report)


@pytest.mark.long("takes a second or more")
def test_a_buffer_that_differs_is_named() -> None:
    report = check(planted.OtherBuffer)
    assert report.status == 1
    found = findings(report)
    assert set(found) == {"buffers", "checkpoints", "continued"}
    assert "seen, after training: values differ by up to 2" in found["buffers"]
    assert 'Result: different. How to find the cause: "A result differs" in examples/guide/' in str(report)


@pytest.mark.rest("takes tenths of a second")
def test_a_layer_that_computes_something_else_is_found() -> None:
    report = check(planted.OtherOutput)
    assert report.status == 1
    assert {"losses", "weights", "continued"} <= set(findings(report))


# ---------------------------------------------------------------------- what user code keeps by itself


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("place", "name"),
    first(
        [
            ("", ""),
            ("state", "state"),
            ("list", "held.list.0"),
            ("array", "held.1"),
            ("teacher", "teachers.0._parameters.weight"),
        ],
        ("", ""),
        ("list", "held.list.0"),
        why="other containers",
    ),
)
def test_tensors_in_plain_attributes_are_compared(place: str, name: str) -> None:
    report = check(lambda: planted.KeepsTensors(place))
    assert report.status == bool(place), str(report)
    assert report.rows["attributes"].tensors == 4
    assert not place or f": {name}, after training: values differ" in findings(report)["attributes"]


@pytest.mark.rest("takes tenths of a second")
def test_user_code_may_call_methods_of_its_own_logger(temporary: Path) -> None:
    """There was no logger, and such a module stopped in plain Lightning."""
    report = check(planted.LogsByItself)
    assert report.status == 0, str(report)
    assert [path for folder in temporary.iterdir() for path in folder.iterdir()] == []


@pytest.mark.long("the first tier has values that repeat")
def test_logged_values_that_do_not_repeat_are_named_and_left_out() -> None:
    """A time that is logged made two runs of plain Lightning differ, and nothing was compared."""
    report = check(planted.LogsTimes)
    assert report.status == 0, str(report)
    assert "Not compared, because plain Lightning logs others when run twice: seconds." in report.notes
    assert "loss" in findings(check(lambda: planted.LogsTimes(wrong=True)))["logged values"]


@pytest.mark.long("takes a second or more")
def test_callbacks_of_the_module_s_own_write_no_files(temporary: Path) -> None:
    report = check(planted.SavesByItself)
    assert report.status == 0, str(report)
    assert [path for folder in temporary.iterdir() for path in folder.iterdir()] == []


@pytest.mark.long("takes a second or more")
def test_steps_that_return_nothing_have_run_and_are_not_called_equal() -> None:
    """The validation had run, and the report said "none to compare"."""
    report = str(check(planted.Everything, None))
    assert re.search("^validation +0  ran, returned nothing to compare$", report, re.MULTILINE)
    assert re.search("^losses +2  equal$", report, re.MULTILINE)
    assert report.count("nothing to compare") == 1


@pytest.mark.long("takes a second or more")
def test_what_a_validation_logs_is_compared() -> None:
    report = check(planted.OtherValidation)
    assert set(findings(report)) == {"logged values", "continued"}
    assert "val_loss, after training: values differ" in findings(report)["logged values"]
    assert "have nothing for these" not in str(report), "steps that return an empty dictionary have run"


@pytest.mark.rest("takes tenths of a second")
def test_a_module_that_was_trained_before_is_not_compared() -> None:
    """A factory that returns the same module each time: run by run it began from other weights."""
    module = Module(Stack())
    report = check(lambda: module)
    assert report.status == 2
    assert "returns a module that has been trained. Each run needs a new one" in report.why


@pytest.mark.long("takes a second or more")
def test_callbacks_that_change_no_number_are_named() -> None:
    given = [callbacks.ModelCheckpoint(dirpath="checkpoints"), callbacks.GradientAccumulationScheduler({0: 2})]
    report = check(planted.Everything, trainer={"accelerator": "cpu", "callbacks": given})
    assert report.status == 0, str(report)
    assert any("files and devices: ModelCheckpoint." in note for note in report.notes)
    alone = Subject(planted.Everything, None, None, 1, 0, {"callbacks": callbacks.EarlyStopping("loss")}).make()
    assert len(alone.settings["callbacks"]) == 1


# ---------------------------------------------------------------------- what cannot be compared


@pytest.mark.parametrize(
    ("device", "remedy"), [("cuda:0", "on the CPU (--accelerator cpu, trainer="), ("cpu", "with fewer")]
)
def test_a_model_that_is_too_large_for_plain_lightning_is_not_compared(
    device: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sp_lightning.tools.comparison.check.root_device", lambda settings: torch.device(device))
    report = check(planted.TooLarge)
    assert report.status == 2
    assert f"Plain Lightning has too little memory for this model on {device}" in report.why
    assert f"Check it {remedy}" in report.why


@pytest.mark.rest("takes tenths of a second")
def test_a_second_plain_run_that_runs_out_of_memory_ends_as_the_first_would() -> None:
    """It left the check as an error."""
    planted.RunsOut.made = 0
    report = check(lambda: planted.RunsOut(lambda number: number == 2))
    assert (report.status, "too little memory for this model" in report.why) == (2, True)


@pytest.mark.long("takes a second or more")
def test_a_run_that_runs_out_of_memory_is_no_difference() -> None:
    planted.RunsOut.made = 0
    report = check(lambda: planted.RunsOut(lambda number: number in (4, 6)), activations="all")
    assert report.status == 0, str(report)
    assert "'superpipeline, recompute' had too little memory and shows nothing" in str(report)
    assert "Nothing went on from a checkpoint. too large" in str(report)


@pytest.mark.rest("takes tenths of a second")
def test_a_model_that_the_strategy_has_no_memory_for_either_is_not_compared() -> None:
    planted.RunsOut.made = 0
    report = check(lambda: planted.RunsOut(lambda number: number > 2))
    assert report.status == 2
    assert "The run 'superpipeline' had too little memory and shows nothing" in report.why


@pytest.mark.parametrize(
    ("factory", "data", "why"),
    [
        (lambda: Module(Stack()), None, "has no train_dataloader of its own. Give data"),
        (Stack, planted.batches, "returned a Stack; expected a LightningModule"),
        (lambda: 1 / 0, planted.batches, "ZeroDivisionError: division by zero"),
        (
            planted.NeedsArguments,
            planted.batches,
            "missing 1 required positional argument: 'width'. Give a function of your own",
        ),
        (planted.Refused, planted.batches, "The run 'superpipeline' stopped. ValueError: "),
        (
            planted.Everything,
            planted.Everything,
            "--data is a LightningModule. Expected a LightningDataModule, a DataLoader",
        ),
        (planted.Everything, lambda: 3, "--data is a int. Expected a LightningDataModule, a DataLoader or batches"),
        (lambda: Module(torch.nn.Linear(3, 3)), planted.batches, "The run 'plain' stopped. RuntimeError: mat1"),
    ],
)
def test_what_is_missing_is_said(factory: Any, data: Any, why: str) -> None:
    report = check(factory, data)
    assert report.status == 2
    assert why in report.why


@pytest.mark.long("takes a second or more")
def test_batches_may_be_a_list_and_are_predicted_as_they_are() -> None:
    report = check(lambda: Module(Stack()), vectors)
    assert report.status == 0
    assert report.rows["predictions"].tensors == 2


@pytest.mark.long("takes a second or more")
def test_a_prediction_that_stops_on_both_sides_ends_nothing_else() -> None:
    report = check(planted.CannotPredict)
    assert report.status == 0, str(report)
    assert report.rows["predictions"].tensors == 0
    assert "Plain Lightning, too: Prediction stopped. ValueError: nothing to see" in str(report)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"factory": None}, "Nothing to check"),
        (
            {"factory": "tests.support.planted:Nothing"},
            "'tests.support.planted:Nothing': .*Expected package.module:Factory",
        ),
        ({"data": "rows.jsonl"}, "'rows.jsonl': .*Expected package.module:Name, which makes a LightningDataModule"),
        ({"steps": 0}, "steps must be at least 1, found 0"),
        ({"k_primes": 1}, "no option 'k_primes'. Did you mean k_prime"),
        ({"activations": "alle"}, "activations must be one of"),
        (
            {"trainer": {"max_epochs": 3, "precision": "bf16-mixed"}},
            "trainer= has max_epochs. A check takes no other than accelerator",
        ),
        (
            {"trainer": {"strategy": "ddp", "devices": 2}},
            "trainer= has strategy, devices. A check takes no other than accelerator, ",
        ),
    ],
)
def test_what_cannot_be_is_refused_at_once(options: Any, why: str) -> None:
    with pytest.raises((ValueError, TypeError), match=why):
        check(**{"factory": planted.Everything, **options})


def test_a_subject_is_made_anew_for_each_run() -> None:
    subject = Subject("tests.support.planted:Everything", planted.Data, None, 1, 0, {})
    assert subject.make().module is not subject.make().module
    with pytest.raises(NotRunError, match="expected a LightningModule"):
        Subject(dict, None, None, 1, 0, {}).make()
