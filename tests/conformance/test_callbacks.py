"""Lightning's callbacks that watch, stop, time, summarize and write."""

from __future__ import annotations

import copy
import datetime
import json
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import callbacks as plc

from tests.conformance.features import feature
from tests.support.models import vectors
from tests.support.nets import Net, Scheduled, Summarized, assert_changing, clock, middle
from tests.support.runs import loader
from tests.support.tiers import first
from tests.support.ways import RunVariant, Seen, compare


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`EarlyStopping`")
@pytest.mark.parametrize(
    "options",
    [
        {"monitor": "val_loss", "mode": "max", "patience": 1},
        {"monitor": "train_loss", "stopping_threshold": 1e-2, "check_on_train_epoch_end": True, "patience": 9},
    ],
    ids=["patience", "threshold"],
)
def test_early_stopping(options: dict[str, Any], tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        stopping = plc.EarlyStopping(**options)
        seen = way.fit(callbacks=[stopping], max_epochs=20, batches=3)
        return {**seen, "stopping": stopping.state_dict(), "reason": str(stopping.stopping_reason)}

    seen = compare(run, tmp_path)
    assert 0 < seen["stopping"]["stopped_epoch"] < 19


@pytest.mark.rest("takes tenths of a second")
@feature("Callbacks", "`LearningRateMonitor`")
def test_learning_rate_monitor(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        monitor = plc.LearningRateMonitor(log_momentum=True, log_weight_decay=True)
        return {**way.fit(partial(Scheduled, "one cycle"), callbacks=[monitor]), "rates": monitor.lrs}

    lines = compare(run, tmp_path)["logged"][0][0]
    rates = [line["cycle"] for _, line in lines if "cycle" in line]
    assert len(set(rates)) > 3
    assert any("cycle-weight_decay" in line for _, line in lines)


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`ModelSummary`, `example_input_array`", "`RichModelSummary`")
@pytest.mark.parametrize("kind", [plc.ModelSummary, plc.RichModelSummary])
def test_summary(
    kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The same table, and the same run after it."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr("rich._console", None)  # rich has asked for the columns when it was first used
    name = plc.model_summary.__name__

    def run(way: RunVariant) -> Seen:
        caplog.clear()
        capsys.readouterr()
        with caplog.at_level(logging.INFO, name):
            seen = way.fit(Summarized, callbacks=[kind(max_depth=-1)], enable_model_summary=True)
        said = [record.getMessage() for record in caplog.records if record.name == name]
        return {**seen, "table": capsys.readouterr().out if kind is plc.RichModelSummary else said}

    table = str(compare(run, tmp_path)["table"])
    assert "blocks.1.inner" in table
    assert "[4, 32]" in table


@pytest.mark.rest("takes tenths of a second")
@feature("Callbacks", "`DeviceStatsMonitor`")
def test_device_stats(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        seen = way.fit(callbacks=[plc.DeviceStatsMonitor(cpu_stats=True)])
        lines = seen["logged"][0][0]
        timeless = [(step, {k: v for k, v in line.items() if "cpu" not in k} or list(line)) for step, line in lines]
        return {**seen, "logged": timeless}

    lines = compare(run, tmp_path)["logged"]
    assert any("cpu_percent" in str(line) for _, line in lines)
    assert any("train_loss_step" in line for _, line in lines)


@pytest.mark.rest("takes tenths of a second")
@feature("Callbacks", "`LambdaCallback`")
def test_lambda_callback(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        values: list[Any] = []

        def note(trainer: Any, pl_module: Any, *_: Any, **__: Any) -> None:
            values.append((trainer.global_step, middle(pl_module)))

        names = ["setup", "on_fit_start", "on_train_batch_start", "on_train_batch_end", "on_validation_end"]
        seen = way.fit(callbacks=[plc.LambdaCallback(**dict.fromkeys([*names, "on_train_end"], note))])
        assert_changing([value for _, value in values])
        return {**seen, "values": values}

    compare(run, tmp_path)


@pytest.mark.long("takes a second or more")
@feature("Callbacks", "`Timer`")
@pytest.mark.parametrize("interval", ["step", "epoch"])
def test_timer(interval: str, tmp_path: Path) -> None:
    """By a clock that goes on with each look at it, so that both runs stop at the same batch."""

    def run(way: RunVariant) -> Seen:
        timer = plc.Timer(datetime.timedelta(seconds=10), interval, verbose=False)
        with clock(plc.timer, "monotonic"):
            seen = way.fit(callbacks=[timer], max_epochs=20)
            return {**seen, "elapsed": timer.state_dict(), "start": timer.start_time("train")}

    seen = compare(run, tmp_path)
    assert 2 < seen["progress"][0] < 100


class Writes(plc.BasePredictionWriter):
    def __init__(self, interval: str) -> None:
        super().__init__(interval)
        self.written: list[Any] = []

    def write_on_batch_end(self, *args: Any) -> None:
        self.written.append(["batch", *copy.deepcopy(args[2:])])

    def write_on_epoch_end(self, *args: Any) -> None:
        self.written.append(["epoch", *copy.deepcopy(args[2:])])


@feature("Callbacks", "`BasePredictionWriter`", "`predict(return_predictions=False)`")
@pytest.mark.parametrize("interval", ["batch", "epoch", "batch_and_epoch"])
def test_prediction_writer(interval: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        writer = Writes(interval)
        trainer = way.trainer(callbacks=[writer])
        wants = interval != "batch"
        found = trainer.predict(Net(), loader(vectors(4)), return_predictions=wants)
        assert (found is None) == (not wants)
        return {"written": writer.written, "predictions": found, "random": torch.get_rng_state()}

    written = compare(run, tmp_path, ["off"])["written"]
    assert len(written) == {"batch": 4, "epoch": 1, "batch_and_epoch": 5}[interval]


@pytest.mark.rest("takes tenths of a second")
@feature("Callbacks", "`ThroughputMonitor`")
def test_throughput(tmp_path: Path) -> None:
    class Measured(Net):
        flops_per_batch = 1000

    def run(way: RunVariant) -> Seen:
        monitor = plc.ThroughputMonitor(len, lambda batch: batch.shape[1], window_size=3)
        with clock(plc.throughput_monitor, "perf_counter"):
            return way.fit(Measured, callbacks=[monitor], accumulate_grad_batches=2, val_check_interval=3)

    lines = compare(run, tmp_path)["logged"][0][0]
    assert any("train/device/samples_per_sec" in name for _, line in lines for name in line)


@pytest.mark.rest("takes tenths of a second")
@feature("Callbacks", "`SpikeDetection`")
@pytest.mark.parametrize("spike", [False, True])
def test_spike_detection(spike: bool, tmp_path: Path) -> None:
    batches = list(vectors(6))
    batches[4] = batches[4] * (1000 if spike else 1)

    def run(way: RunVariant) -> Seen:
        detection = plc.SpikeDetection(exclude_batches_path=way.folder / "bad.json", atol=1.0)
        trainer = way.trainer(callbacks=[detection])
        module = Net()
        try:
            trainer.fit(module, loader(batches), loader(vectors(1)))
            error = ""
        except RuntimeError as found:
            error = str(found)
        return {
            "error": error, "state": dict(module.state_dict()), "detection": detection.state_dict(),
            "bad": [json.loads(path.read_text()) for path in way.folder.glob("*.json")], "step": trainer.global_step,
        }  # fmt: skip

    seen = compare(run, tmp_path)
    assert bool(seen["error"]) == bool(seen["bad"]) == spike


def shown_by(kind: Any, shown: list[Any]) -> Any:
    """A progress bar that notes the metrics that it shows."""

    class Noting(kind):
        def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
            found = super().get_metrics(trainer, pl_module)
            shown.append(dict(found))
            return found

    return Noting(refresh_rate=1)


@feature("Callbacks", "`TQDMProgressBar`", "`RichProgressBar`")
@pytest.mark.parametrize(
    "kind", first([plc.TQDMProgressBar, plc.RichProgressBar], plc.TQDMProgressBar, why="the other bar")
)
def test_progress_bars(kind: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(way: RunVariant) -> Seen:
        shown: list[Any] = []
        bar = shown_by(kind, shown)
        seen = way.fit(callbacks=[bar], enable_progress_bar=True, num_sanity_val_steps=1)
        return {**seen, "shown": shown}

    shown = compare(run, tmp_path, ["forward"])["shown"]
    assert len({each.get("train_loss_step") for each in shown}) > 3
    assert "val_loss" in shown[-1]
