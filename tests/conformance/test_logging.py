"""Loggers, metrics and profilers."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.core.saving import load_hparams_from_yaml
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor

from tests.conformance.features import LOGGING, feature
from tests.support.models import CASES, Classifier, images
from tests.support.nets import Net, Summarized, WithExtras, middle
from tests.support.runs import loader
from tests.support.ways import LATE, RunVariant, Seen, compare, left


@pytest.mark.long("takes a second or more")
@feature(LOGGING, "`CSVLogger`")
def test_csv_logger(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        logger = CSVLogger(way.folder, "csv", 0, flush_logs_every_n_steps=1)
        seen = way.fit(partial(WithExtras, 4), logger=logger, max_epochs=2)
        with (way.folder / "csv/version_0/metrics.csv").open() as lines:
            rows = [sorted((name, value) for name, value in row.items() if value) for row in csv.DictReader(lines)]
        hparams = dict(load_hparams_from_yaml(way.folder / "csv/version_0/hparams.yaml"))
        return {**seen, "rows": rows, "hparams": hparams}

    seen = compare(run, tmp_path)
    assert len(seen["rows"]) > 10
    assert seen["hparams"] == {"depth": 4, "rate": 1e-2}


class Drawn(Summarized):
    """Logs more than numbers."""

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_histogram("weights", middle(self), self.current_epoch)


def board(way: RunVariant, *, graph: bool) -> Seen:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    logger = TensorBoardLogger(way.folder, "board", 0, log_graph=graph)
    seen = way.fit(Drawn, logger=logger, max_epochs=2)
    logger.experiment.flush()
    events = reader.EventAccumulator(logger.log_dir, {"scalars": 0, "histograms": 0, "graph": 1}).Reload()
    scalars = {
        tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in sorted(events.Tags()["scalars"])
    }
    histograms = [(each.step, list(each.histogram_value.bucket)) for each in events.Histograms("weights")]
    nodes = sorted((node.name, node.op, tuple(node.input)) for node in events.Graph().node) if graph else []
    return {**seen, "scalars": scalars, "graph": nodes, "histograms": histograms}


@pytest.mark.long("takes a second or more")
@feature(LOGGING, "`TensorBoardLogger`")
def test_tensorboard_logger(tmp_path: Path) -> None:
    seen = compare(partial(board, graph=False), tmp_path)
    assert len(seen["scalars"]["train_loss_step"]) == 12
    assert seen["histograms"][0] != seen["histograms"][1]


@pytest.mark.rest("takes tenths of a second")
@feature(LOGGING, "`TensorBoardLogger(log_graph=True)`")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit.trace.*` is deprecated")
@pytest.mark.xfail(
    strict=True,
    raises=RuntimeError,
    reason="refused by name: a trace would hold memory through which other layers pass",
)
def test_tensorboard_graph(tmp_path: Path) -> None:
    assert len(compare(partial(board, graph=True), tmp_path, ["off"])["graph"]) > 20


PROFILERS: dict[str, Callable[[Path], Any]] = {
    "simple": lambda folder: SimpleProfiler(folder, "profile", extended=True),
    "advanced": lambda folder: AdvancedProfiler(folder, "profile"),
    "pytorch": lambda folder: PyTorchProfiler(
        folder, "profile", export_to_chrome=False, schedule=torch.profiler.schedule(wait=0, warmup=1, active=2),
        with_stack=False,
    ),
}  # fmt: skip


@pytest.mark.rest("takes tenths of a second")
@feature(LOGGING, *(f"profiler: {name}" for name in PROFILERS))
@pytest.mark.filterwarnings("ignore:Profiler.*:UserWarning", "ignore:.*profiler.*:UserWarning")
@pytest.mark.parametrize("name", PROFILERS)
def test_profilers(name: str, tmp_path: Path) -> None:
    """What is timed is the same, but for the strategy's name and our callback."""

    def run(way: RunVariant) -> Seen:
        profiler = PROFILERS[name](way.folder)
        seen = way.fit(profiler=profiler)
        tables = way.folder.glob("fit-*.txt") if name != "pytorch" else ()  # whose table has the longest only
        profile = "".join(path.read_text() for path in tables)
        timed = sorted(set(re.findall(r"\[[A-Z][A-Za-z]+\][A-Za-z]+(?:\{[^}]*\})?\.\w+", profile)))
        timed = [each.replace("SuperpipelineStrategy", "SingleDeviceStrategy") for each in timed]
        written = [path.name for path in way.folder.iterdir() if path.stat().st_size]
        return {**seen, "timed": [each for each in timed if "SuperpipelineCallback" not in each], "files": written}

    seen = compare(run, tmp_path, LATE)
    assert seen["files"]
    assert name == "pytorch" or "[Strategy]SingleDeviceStrategy.training_step" in seen["timed"]


class Metrics(Classifier, Net):
    """Module attributes and a collection, logged as metrics and by their values."""

    def __init__(self) -> None:
        Net.__init__(self, CASES["vit"].make().net)
        kinds = torchmetrics.classification
        self.accuracy = kinds.MulticlassAccuracy(5)
        self.mean = torchmetrics.MeanMetric()
        self.collection = torchmetrics.MetricCollection(
            [kinds.MulticlassPrecision(5), kinds.MulticlassRecall(5), kinds.MulticlassF1Score(5)], prefix="val_"
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        outputs = self.net(batch[0])
        loss = F.cross_entropy(outputs, batch[1])
        self.accuracy(outputs, batch[1])
        self.mean(loss)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.collection.update(self.net(batch[0]), batch[1])
        self.log_dict(self.collection, batch_size=4)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"{name}_sum": value for name, value in self.collection.compute().items()})


@pytest.mark.long("takes a second or more")
@feature(LOGGING, "torchmetrics: attributes, `MetricCollection`")
def test_metrics(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(max_epochs=3)
        module = Metrics()
        trainer.fit(module, loader(images(16, 4)), loader(images(16, 3)))
        states = [{key: getattr(each, key) for key in each._defaults} for each in (module.accuracy, module.mean)]
        return {**left(trainer), "states": states}

    logged = compare(run, tmp_path)["logged"][0][0]
    assert len({line["accuracy_step"] for _, line in logged if "accuracy_step" in line}) > 1
    assert any("val_MulticlassF1Score" in line for _, line in logged)
