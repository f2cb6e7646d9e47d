"""What the user sees: a line when a run begins and one at its end, and the rest where it is asked for."""

from __future__ import annotations

import csv
import logging
import re
import warnings
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.core.observe.metrics import METRICS, counters_line
from sp_lightning.core.plan.units import human_bytes
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.needs import needs
from tests.support.runs import as_on_a_gpu, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first


@pytest.fixture
def heard(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Our messages at the level that Lightning gives its logger, as a process that has said nothing yet shows them."""
    monkeypatch.setattr("sp_lightning.core.observe.messages._SAID", set())
    caplog.set_level(logging.INFO, "lightning.pytorch")
    caplog.handler.setLevel(logging.NOTSET)  # as Lightning's own handler
    return lambda: [each.getMessage() for each in caplog.records if each.name == "lightning.pytorch.superpipeline"]


TRAINING = (
    "Superpipeline: 22 layers, k = 1, k' = 1: weights and gradients take 0.122 MiB of a GPU's memory, "
    "plain Lightning 2.4 MiB with optimizer state, both without activations."
)


@pytest.mark.long("takes a second or more")
def test_the_log_of_a_default_run_is_one_line(heard: Any) -> None:
    """For each trainer, because a notebook's third trainer said nothing; and one for each other thing that a trainer does."""
    for _ in range(3):
        trainer = trainer_for(SuperpipelineStrategy(k=1))
        module = llama(layers=20)
        for _ in range(2):
            trainer.fit(module, loader(tokens()), loader(tokens()))
    assert heard() == [TRAINING] * 3
    trainer.validate(module, loader(tokens()), verbose=False)
    trainer.predict(module, loader(tokens()))
    assert heard()[3:] == [
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


def test_more_layers_per_transfer_than_there_are_is_remarked_on(heard: Any) -> None:
    strategy = SuperpipelineStrategy(k=2, k_prime=50)
    trainer_for(strategy).fit(Module(Stack()), loader(vectors(2)))
    rest = len(strategy.plan.layers) - 2
    assert heard()[0].endswith(f" k_prime=50 is more than the {rest} layers beyond k=2: each layer has its own slot.")
    assert strategy.plan.never_evicted == set(range(rest + 2))


def test_more_layers_than_there_are_is_remarked_on_once(heard: Any) -> None:
    strategy = SuperpipelineStrategy(k=1000)
    trainer_for(strategy).fit(Module(Stack()), loader(vectors(2)))
    assert strategy.plan.k == len(strategy.plan.layers)
    assert len(heard()) == 1
    assert heard()[0].endswith(
        f"k=1000 is capped at {strategy.plan.k}, the number of layers: all are on the GPU at once."
    )


@pytest.mark.long("takes a second or more")
def test_the_rest_is_there_for_whom_it_interests(heard: Any) -> None:
    trainer = trainer_for(SuperpipelineStrategy(k=1), callbacks=[SuperpipelineCallback(verbose=True)])
    module = llama(layers=20)
    trainer.fit(module, loader(tokens()), loader(tokens()))
    text = "\n".join(heard())
    assert text.count("net.model.layers.0 ") == 1
    assert "… 10 more" in text
    assert "peak on the GPU" in text
    assert "bytes per parameter" in text
    assert "updates in the background: off (they would compete" in text
    assert text.count("layers uploaded") == 1
    assert "on demand" in text


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
        return loss


@pytest.mark.parametrize(
    ("every", "accumulate", "steps"), [(4, 1, [3, 7, 11]), (1, 4, [0, 1, 2]), (2, 3, [1, 3]), (50, 1, [])]
)
def test_metrics_come_every_n_steps(every: int, accumulate: int, steps: list[int], tmp_path: Path) -> None:
    trainer = trainer_for(
        "superpipeline",
        logger=CSVLogger(tmp_path),
        accumulate_grad_batches=accumulate,
        callbacks=[SuperpipelineCallback(metrics="all", every_n_steps=every)],
    )
    trainer.fit(Logs(Stack()), loader(vectors(12)))
    file = Path(trainer.log_dir or "") / "metrics.csv"
    rows = list(csv.DictReader(file.read_text().splitlines())) if file.exists() else []
    assert [int(row["step"]) for row in rows if row.get("superpipeline/fetched_layers")] == steps
    logged = [row for row in rows if row.get("superpipeline/window")]
    for part in ("device", "weight", "gradient", "activation"):
        assert all(float(row[f"superpipeline/peak_{part}_bytes"]) > 0 for row in logged)
    assert all(float(row["superpipeline/peak_optimizer_bytes"]) == 0 for row in logged)  # steps run on the CPU


class Exchanges(Module):
    """Its engine is built again in the run, and counts from 0."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            self.net.head.bias = nn.Parameter(self.net.head.bias.detach().clone())


def test_rates_after_a_parameter_was_exchanged(tmp_path: Path) -> None:
    callback = SuperpipelineCallback(metrics="all", every_n_steps=1)
    trainer = trainer_for("superpipeline", logger=CSVLogger(tmp_path), callbacks=[callback])
    trainer.fit(Exchanges(Stack()), loader(vectors(6)))
    rows = list(csv.DictReader((Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()))
    rates = [float(row["superpipeline/fetch_gbps"]) for row in rows if row.get("superpipeline/fetch_gbps")]
    assert len(rates) == 6
    assert min(rates) > 0
    counted = trainer.strategy.stats()  # type: ignore[attr-defined]
    counted.fetches.clear()
    assert trainer.strategy.stats().fetches, "each call returns a copy of its own"  # type: ignore[attr-defined]


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
    callback = SuperpipelineCallback(metrics=metrics, every_n_steps=2)
    trainer = trainer_for("superpipeline", logger=CSVLogger(tmp_path), log_every_n_steps=2, callbacks=[callback])
    trainer.fit(Logs(Stack()), loader(vectors(4)))
    header = (Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()[0].split(",")
    ours = {name.removeprefix("superpipeline/") for name in header if name.startswith("superpipeline/")}
    assert ours == columns


@pytest.mark.parametrize("metrics", first(["stalls", ["stalls"], 3], ["stalls"], why="the same check"))
def test_metrics_that_there_are_none_of_are_refused(metrics: Any) -> None:
    with pytest.raises(
        ValueError, match=r'metrics= takes True, False, "all" or a list of names.*The names are waited, window'
    ):
        SuperpipelineCallback(metrics=metrics)


def test_the_guide_has_a_table_of_all_metrics() -> None:
    guide = (Path(__file__).parents[2] / "examples" / "guide" / "logging.md").read_text()
    table = [
        name
        for cell in re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", guide, flags=re.M)
        for name in re.findall(r"\w+", cell)
    ]
    assert sorted(table) == sorted(METRICS)


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
    def count(strategy: SuperpipelineStrategy, *callbacks: pl.Callback) -> int:
        trainer = trainer_for(strategy, callbacks=list(callbacks))
        before = list(trainer.callbacks)  # type: ignore[attr-defined]
        module = Notices(Stack())
        for _ in range(2):
            trainer.fit(module, loader(vectors(1)))
            trainer.predict(module, loader(vectors(1)))
            assert trainer.callbacks == before  # type: ignore[attr-defined]
        return module.seen

    assert count(SuperpipelineStrategy()) == 1
    assert count(SuperpipelineStrategy(), SuperpipelineCallback()) == 1
    assert count(SuperpipelineStrategy(callback=False)) == 0


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
    trainer.fit(Module(Stack()), loader(vectors(1)))
    assert attached(trainer) == []


def test_layers_come_early_only_where_that_is_safe() -> None:
    """With a hook between batches that could write weights, nothing is fetched before it has run."""

    class Quiet(Module):
        pass

    class Hooked(Module):
        def on_train_batch_end(self, *args: object) -> None:
            self.fetched = self.trainer.strategy.stats().fetched_layers  # type: ignore[attr-defined]

    def fetched(module: Module) -> int:
        strategy = SuperpipelineStrategy(k=2)
        trainer_for(strategy).fit(module, loader(vectors(4)))
        return strategy.stats().fetched_layers

    early = fetched(Quiet(Stack())) - fetched(Hooked(Stack()))
    assert early == 3, "k + k' layers for a batch that did not come"


def test_bytes_read_well() -> None:
    assert [human_bytes(n) for n in (0, 1023, 1024, 1.5 * 2**20, 3 * 2**30, 2**41)] == [
        "0 B", "1023 B", "1.0 KiB", "1.5 MiB", "3.0 GiB", "2.0 TiB",
    ]  # fmt: skip


class LooksUp(Stack):
    """With a table, of which only rows travel."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.table(x[:, 0].abs().mul(50).long() % 300))


class ClampsOnTheDevice(Stack):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.stem.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


class SparseRows(LooksUp):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 16, sparse=True)


class Descends(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize(
    ("net", "waits"), [(Stack, 0), (LooksUp, 3), (SparseRows, 3), (ClampsOnTheDevice, 3)], ids=lambda each: str(each)
)
def test_what_keeps_the_host_from_running_ahead_is_counted(net: Any, waits: int) -> None:
    """In each of three batches: the indices of rows, or a weight that was written on the device."""
    if issubclass(net, LooksUp):
        needs("capabilities.experts")
    strategy = SuperpipelineStrategy(k=1)
    trainer_for(strategy).fit(Descends(net()), loader(vectors(3)))
    stats = strategy.stats()
    assert stats.host_waits == waits
    assert (f"; the CPU waited for the GPU {waits} times." in counters_line(stats)) == (waits > 0)
