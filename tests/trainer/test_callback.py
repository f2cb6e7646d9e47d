"""What the user sees: a line when a run begins and one at its end, and the rest where it is asked for."""

from __future__ import annotations

import csv
import json
import logging
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.core.plan.units import human_bytes
from sp_lightning.trainer.callback import _digest
from sp_lightning.trainer.metrics import METRICS, counters_line
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.runs import as_on_a_gpu, loader, trainer_for
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import needs


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our messages at the level that Lightning gives its logger, as a process that has said nothing yet shows them."""
    monkeypatch.setattr("sp_lightning.core.messages._SAID", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    caplog.handler.setLevel(logging.NOTSET)  # as Lightning's own handler
    return lambda: [each.getMessage() for each in caplog.records if each.name == "lightning.pytorch.superpipeline"]


TRAINING = (
    "Superpipeline: 22 layers, k = 1, k' = 1: weights and gradients take 0.122 MiB of a GPU's memory, "
    "plain Lightning 2.4 MiB with optimizer state, both without activations."
)


@pytest.mark.rest("takes a second")
def test_the_log_of_a_default_run_is_one_line(heard: Any) -> None:
    """For each trainer, because a notebook's second trainer said nothing; and one for each other thing that a trainer does."""
    for _ in range(2):
        trainer = trainer_for(SuperpipelineStrategy(k=1))
        module = llama(layers=20)
        for _ in range(2):
            trainer.fit(module, loader(tokens()), loader(tokens()))
    assert heard() == [TRAINING] * 2
    trainer.validate(module, loader(tokens()), verbose=False)
    trainer.predict(module, loader(tokens()))
    assert heard()[2:] == [
        "Superpipeline: 22 layers, k = 1, k' = 1: weights take 0.0611 MiB of a GPU's memory, plain Lightning 0.607 MiB, both "
        "without activations."
    ]


def test_beside_another_strategy_the_callback_warns_once_and_does_nothing(tmp_path: Path) -> None:
    """It raised an error, so that a script could not compare strategies by the strategy's name alone."""
    callback = SuperpipelineCallback(
        plot=tmp_path / "run.png", every_n_steps=1, progress_bar=True, metrics="all", verbose=True
    )
    runs = []
    for callbacks in ([], [callback]):
        pl.seed_everything(1)
        trainer = trainer_for("auto", callbacks=callbacks, logger=CSVLogger(tmp_path / "logs"))
        module = Module(Stack())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.fit(module, loader(vectors(3)), loader(vectors(2)))
            trainer.validate(module, loader(vectors(2)), verbose=False)
            trainer.test(module, loader(vectors(2)), verbose=False)
            trainer.predict(module, loader(vectors(2)))
        said = [str(each.message) for each in caught if "SuperpipelineCallback" in str(each.message)]
        runs.append((module.state_dict(), said, sorted(trainer.progress_bar_metrics)))
    assert [len(said) for _, said, _ in runs] == [0, 1]
    assert "does nothing: the trainer has SingleDeviceStrategy" in runs[1][1][0]
    assert runs[0][2] == runs[1][2]
    assert all(torch.equal(value, runs[1][0][name]) for name, value in runs[0][0].items())
    assert not [*tmp_path.glob("*.png")]


@pytest.mark.rest("takes tenths of a second")
def test_what_a_run_waited_for_is_said_at_its_end(heard: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = SuperpipelineStrategy.stats
    monkeypatch.setattr(SuperpipelineStrategy, "stats", lambda self: replace(counted(self), stall_seconds=3600.0))
    trainer_for(SuperpipelineStrategy(k=1)).fit(llama(layers=20), loader(tokens()))
    assert heard()[0] == TRAINING
    assert [re.sub(r"of \d+\.\d s", "of 1.0 s", line) for line in heard()[1:]] == [
        "Superpipeline: waited 100% of 1.0 s for uploads. Use a larger k or gpu_memory, or more tokens or images per batch."
    ]


@pytest.mark.rest("takes tenths of a second")
def test_a_run_on_an_accelerator_says_what_it_is_compared_with(heard: Any) -> None:
    with simulated(capacity=2**30), as_on_a_gpu():
        trainer_for("superpipeline").fit(Module(Stack()), loader(vectors(4)))
    assert heard()[0].endswith(
        " k is doubled while uploads stall the batches. AdamW runs fused on the CPU: results are bitwise those "
        "of plain Lightning whose optimizer has fused=True and steps on the CPU; fused=False in the optimizer leaves it unfused. "
        "Optimizer steps overlap with backward and the next forward pass."
    )


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"k": 2, "k_prime": 50}, " k_prime=50 is more than the 5 layers beyond k=2: each layer has its own slot."),
        ({"k": 1000}, "k=1000 is capped at 7, the number of layers: all are on the GPU at once."),
    ],
)
def test_more_layers_than_there_are_is_remarked_on_once(options: Any, said: str, heard: Any) -> None:
    strategy = SuperpipelineStrategy(**options)
    trainer_for(strategy).fit(Module(Stack()), loader(vectors(2)))
    (line,) = heard()
    assert line.endswith(said)
    assert strategy.plan.never_evicted == set(range(7)) or strategy.plan.k == 7


@pytest.mark.rest("takes a second")
def test_the_rest_is_there_for_whom_it_interests(heard: Any) -> None:
    trainer = trainer_for(SuperpipelineStrategy(k=1), callbacks=[SuperpipelineCallback(verbose=True)])
    trainer.fit(llama(layers=20), loader(tokens()), loader(tokens()))
    text = "\n".join(heard())
    assert text.count("net.model.layers.0 ") == text.count("layers uploaded") == 1
    for part in ("… 10 more", "peak on the GPU", "bytes per parameter", "on demand",
                 "updates in the background: off (they would compete"):  # fmt: skip
        assert part in text


@pytest.mark.parametrize("fails", [False, True])
def test_the_log_is_as_quiet_as_before_once_a_verbose_run_is_over(fails: bool) -> None:
    class Fails(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            assert SuperpipelineStrategy.log.level == logging.DEBUG
            if fails:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    trainer = trainer_for("superpipeline", callbacks=[SuperpipelineCallback(verbose=True)])
    with pytest.raises(ArithmeticError) if fails else nullcontext():
        trainer.fit(Fails(Stack()), loader(vectors(2)))
    assert SuperpipelineStrategy.log.level == logging.NOTSET


def test_nothing_is_logged_that_nobody_asked_for(tmp_path: Path) -> None:
    """Neither columns in files nor calls of loggers."""
    files = []
    for name, strategy in (("plain", "auto"), ("ours", "superpipeline")):
        calls: list[tuple[int | None, list[str]]] = []

        class Notes(CSVLogger):
            def log_metrics(self, metrics: Any, step: int | None = None, calls: Any = calls) -> None:
                calls.append((step, sorted(metrics)))
                super().log_metrics(metrics, step)

        trainer = trainer_for(strategy, logger=Notes(tmp_path / name), log_every_n_steps=2)
        trainer.fit(Logs(Stack()), loader(vectors(6)))
        header = (Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()[0]
        files.append((header, calls))
    assert files[1] == files[0]
    assert files[0][0] == "epoch,loss,step"


class Logs(Module):
    """Logs its loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        self.last = loss.detach()
        return loss


def logged(
    folder: Path, batches: int, *, module: Any = None, options: Any = None, **settings: Any
) -> list[dict[str, str]]:
    """The rows of a file of metrics, with our columns alone and without their prefix."""
    trainer = trainer_for(
        "superpipeline", logger=CSVLogger(folder), callbacks=[SuperpipelineCallback(**settings)], **(options or {})
    )
    trainer.fit(module or Logs(Stack()), loader(vectors(batches)))
    file, prefix = Path(trainer.log_dir or "") / "metrics.csv", "superpipeline/"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    return [{name.removeprefix(prefix): value for name, value in row.items() if value and (prefix in name or name == "step")}
            for row in rows if any(value and prefix in name for name, value in row.items())]  # fmt: skip


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"), [(4, 1, [3, 7, 11]), (1, 4, [0, 1, 2]), (2, 3, [1, 3]), (50, 1, [])]
)
def test_metrics_come_every_n_steps(every: int, accumulate: int, steps: list[int], tmp_path: Path) -> None:
    rows = logged(tmp_path, 12, metrics="all", every_n_steps=every, options={"accumulate_grad_batches": accumulate})
    assert [int(row["step"]) for row in rows] == steps
    for part in ("device", "weight", "gradient"):
        assert all(float(row[f"peak_{part}_bytes"]) > 0 for row in rows)
    for part in ("optimizer", "activation"):  # steps run on the CPU, where no allocator counts activations
        assert all(float(row[f"peak_{part}_bytes"]) == 0 for row in rows)


class Exchanges(Module):
    """Its engine is built again in the run, and counts from 0."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net.head.bias = nn.Parameter(self.net.head.bias.detach().clone())


def test_rates_after_a_parameter_was_exchanged(tmp_path: Path) -> None:
    rows = logged(tmp_path, 6, module=Exchanges(Stack()), metrics="all", every_n_steps=1)
    assert len(rows) == 6
    assert all(float(row["fetch_gbps"]) > 0 for row in rows)


@pytest.mark.parametrize(
    ("metrics", "columns"),
    [
        (True, {"waited", "window"}),
        (["offloaded_gradient_bytes"], {"offloaded_gradient_bytes"}),
        ("all", set(METRICS) - {"tokens_per_second"}),  # these batches do not say how many tokens they have
        (False, set()),
    ],
)
def test_metrics_are_those_that_were_named(metrics: Any, columns: set[str], tmp_path: Path) -> None:
    rows = logged(tmp_path, 4, metrics=metrics, every_n_steps=2, options={"log_every_n_steps": 2})
    assert {name for row in rows for name in row} - {"step"} == columns


@pytest.mark.parametrize("metrics", [["stalls"], 3])
def test_metrics_that_there_are_none_of_are_refused(metrics: Any) -> None:
    said = r'metrics= takes True, False, "all" or a list of names.*The names are waited, window'
    with pytest.raises(ValueError, match=said):
        SuperpipelineCallback(metrics=metrics)


def test_the_guide_has_a_table_of_all_metrics() -> None:
    guide = (Path(__file__).parents[2] / "examples" / "guide" / "logging.md").read_text()
    cells = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", guide, flags=re.M)
    assert sorted(re.findall(r"\w+", " ".join(cells))) == sorted(METRICS)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("batches", [tokens(4), vectors(4)], ids=["tokens", "no number of tokens"])
def test_a_line_comes_every_n_steps_where_it_is_asked_for(batches: Any, heard: Any) -> None:
    module = llama(layers=2) if isinstance(batches[0], dict) else Module(Stack())
    trainer = trainer_for("superpipeline", callbacks=[SuperpipelineCallback(verbose=True, every_n_steps=2)])
    trainer.fit(module, loader(batches))
    lines = [line for line in heard() if "idle" in line]
    rate = r", \d+ tokens/s" if isinstance(batches[0], dict) else ""
    size = r"[\d.]+ [KMG]iB"
    for number, line in zip((2, 4), lines, strict=True):
        assert re.fullmatch(rf"Superpipeline: step {number}: idle \d+%{rate}, host {size} of {size}\.", line)


def test_tokens_per_second_are_those_of_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen tokens in each batch, over the time between two steps of two batches each."""
    seen, seconds = list[float](), [0.0]
    monkeypatch.setattr("sp_lightning.trainer.callback.perf_counter", lambda: seconds[0])

    class Notes(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            seen.extend(value for name, value in metrics.items() if name == "superpipeline/tokens_per_second")

    class TakesTwoSeconds(pl.Callback):
        def on_train_batch_start(self, *args: Any) -> None:
            seconds[0] += 2

    callbacks = [SuperpipelineCallback(metrics=["tokens_per_second"], every_n_steps=2), TakesTwoSeconds()]
    trainer_for("superpipeline", logger=Notes(tmp_path), callbacks=callbacks).fit(llama(layers=2), loader(tokens(6)))
    assert seen == [8.0, 8.0, 8.0]


# ---------------------------------------------------------------------- reports


def reports(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


class WritesAtTheEnd(pl.Callback):
    """After the hooks of the trainer's other callbacks, as one that averages weights does."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with torch.no_grad():
            pl_module.net.head.bias.add_(1)


def test_each_run_that_ends_appends_a_line_to_the_report(tmp_path: Path) -> None:
    file = tmp_path / "new" / "report.jsonl"
    callbacks = [SuperpipelineCallback(report=file), WritesAtTheEnd()]
    trainer = trainer_for("superpipeline", callbacks=callbacks, accumulate_grad_batches=2)
    module = Logs(Stack())
    trainer.fit(module, loader(vectors(4)), loader(vectors(1)))
    final = _digest(module)
    trainer.predict(module, loader(vectors(1)))
    fit, predict = reports(file)
    assert (fit["run"], fit["steps"], predict["run"]) == ("fit", 2, "predict")
    assert fit["loss"] == float(module.last)
    assert predict["loss"] is None
    assert fit["weights"] == predict["weights"] == final
    assert min(fit["seconds"], fit["peak_host_bytes"], fit["peak_device_bytes"]) > 0
    assert set(METRICS) - {"tokens_per_second"} <= fit.keys()


def test_a_run_that_fails_reports_nothing(tmp_path: Path) -> None:
    class Fails(Module):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            raise ArithmeticError

    trainer = trainer_for("superpipeline", callbacks=[SuperpipelineCallback(report=tmp_path / "report")])
    with pytest.raises(ArithmeticError):
        trainer.fit(Fails(Stack()), loader(vectors(1)), loader(vectors(1)))
    assert not (tmp_path / "report").read_text()


def test_a_digest_is_of_all_values_and_of_their_dtypes() -> None:
    def made(change: Any = None) -> nn.Module:
        module = nn.Module()
        module.a = nn.Parameter(torch.ones(2, 3, dtype=torch.bfloat16).t())
        module.register_buffer("b", torch.tensor(1.0), persistent=False)
        module.register_buffer("c", torch.tensor([True, False]))
        if change is not None:
            change(module)
        return module

    changes: list[Any] = [
        None,
        lambda m: m.a.data[0, 1].add_(1),
        lambda m: m.b.neg_(),
        lambda m: m.c.logical_not_(),
        lambda m: setattr(m, "c", m.c.to(torch.uint8)),
    ]
    assert _digest(made()) == _digest(made())
    assert len({_digest(made(change)) for change in changes}) == len(changes)


def test_a_report_is_not_a_folder(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name a file in it"):
        SuperpipelineCallback(report=tmp_path)


# ---------------------------------------------------------------------- a GPU that other programs use as well


@pytest.mark.parametrize(("options", "total", "said"), [({}, 9, 1), ({"gpu_memory": "0.25GiB"}, 9, 0), ({}, 4.4, 0)])
def test_the_log_says_that_other_programs_use_the_gpu(options: Any, total: float, said: int, heard: Any) -> None:
    """And that the run may fill what they leave, unless ``gpu_memory`` says how much it may use."""
    gib = 2**30
    with simulated(capacity=4 * gib), patch.object(SimDevice, "total_bytes", lambda self: int(total * gib)):
        trainer_for(SuperpipelineStrategy(**options)).fit(Module(Stack()), loader(vectors(2)))
    (line,) = heard()
    text = (
        " 4.0 GiB of the GPU's 9.0 GiB are free, and gpu_memory= is not set, so this run may use all that is free. "
        "If another program on this GPU needs more memory later, set gpu_memory= in both."
    )
    assert line.count(text) == said
    assert line.count("are free") == said


def attached(trainer: Any) -> list[pl.Callback]:
    return [each for each in trainer.callbacks if isinstance(each, SuperpipelineCallback)]


class Notices(Module):
    """How many partners its trainer has while it trains."""

    seen = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen = len(attached(self.trainer))
        return super().training_step(batch, batch_idx)


@pytest.mark.rest("takes tenths of a second")
def test_attached_once_and_only_if_wanted_and_while_it_runs() -> None:
    for strategy, callbacks, count in (
        (SuperpipelineStrategy(), [], 1),
        (SuperpipelineStrategy(), [SuperpipelineCallback()], 1),
        (SuperpipelineStrategy(callback=False), [], 0),
    ):
        trainer: Any = trainer_for(strategy, callbacks=callbacks)
        before, module = list(trainer.callbacks), Notices(Stack())
        for _ in range(2):
            trainer.fit(module, loader(vectors(1)))
            trainer.predict(module, loader(vectors(1)))
            assert trainer.callbacks == before
        assert module.seen == count


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "training_step", "on_train_epoch_end"])
def test_what_was_attached_leaves_after_an_error_too(hook: str) -> None:
    trainer, module = trainer_for("superpipeline"), Module(Stack())

    def fails(*_: Any, **__: Any) -> None:
        assert len(attached(trainer)) == 1
        raise ArithmeticError

    setattr(module, hook, fails)
    with pytest.raises(ArithmeticError):
        trainer.fit(module, loader(vectors(1)))
    assert attached(trainer) == []


def test_layers_come_early_only_where_that_is_safe() -> None:
    """With a hook between batches that could write weights, nothing is fetched before it has run."""

    class Hooked(Module):
        def on_train_batch_end(self, *args: object) -> None:
            self.fetched = self.trainer.strategy.stats().fetched_layers  # type: ignore[attr-defined]

    fetched = []
    for kind in (Module, Hooked):
        trainer_for(strategy := SuperpipelineStrategy(k=2)).fit(kind(Stack()), loader(vectors(4)))
        fetched.append(strategy.stats().fetched_layers)
    assert fetched[0] - fetched[1] == 3, "k + k' layers for a batch that did not come"


def test_bytes_read_well() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB", "2.0 TiB",
    ]  # fmt: skip


class LooksUp(Stack):
    """With a table, of which only rows travel."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16, sparse=sparse)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x[:, 0].abs().mul(50).long() % 300))


class ClampsOnTheDevice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stem.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class Descends(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("net", "waits"), [(Stack, 0), (LooksUp, 3), (partial(LooksUp, True), 3), (ClampsOnTheDevice, 3)], ids=str
)
def test_what_keeps_the_host_from_running_ahead_is_counted(net: Any, waits: int) -> None:
    """In each of three batches: the indices of rows, or a weight that was written on the device."""
    if net not in (Stack, ClampsOnTheDevice):
        needs("capabilities.experts")
    trainer_for(strategy := SuperpipelineStrategy(k=1)).fit(Descends(net()), loader(vectors(3)))
    stats = strategy.stats()
    assert stats.host_waits == waits
    assert (f"; the CPU waited for the GPU {waits} times." in counters_line(stats)) == (waits > 0)
    stats.fetches.clear()
    assert strategy.stats().fetches, "each call returns a copy of its own"
