"""What the user sees: the plan as a table, the counters at the end, metrics in the logger."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger

from sp_lightning import SuperpipelineCallback, SuperpipelineStrategy
from sp_lightning.plan import human_bytes
from tests.support.models import Module, Stack, llama, tokens, vectors
from tests.support.runs import loader, trainer_for


def test_plan_and_counters_are_shown(caplog: pytest.LogCaptureFixture) -> None:
    log = logging.getLogger("lightning.pytorch")
    log.addHandler(caplog.handler)
    log.setLevel(logging.INFO)
    try:
        trainer = trainer_for(SuperpipelineStrategy(k=1))
        module = llama(layers=20)
        trainer.fit(module, loader(tokens()), loader(tokens()))
        trainer.validate(module, loader(tokens()), verbose=False)
    finally:
        log.removeHandler(caplog.handler)
        log.setLevel(logging.ERROR)
    text = caplog.text
    assert text.count("Superpipeline: 22 layers, k = 1, k' = 1") == 1, "the same plan is shown once"
    assert "net.model.layers.0 " in text
    assert "… 10 more" in text
    assert "peak on the device" in text
    assert text.count("layers fetched") == 2
    assert "on demand" in text


def test_counters_go_to_the_users_logger(tmp_path: Path) -> None:
    trainer = trainer_for("superpipeline", logger=CSVLogger(tmp_path), log_every_n_steps=2)
    trainer.fit(Module(Stack()), loader(vectors(6)))
    header, *rows = (Path(trainer.log_dir or "") / "metrics.csv").read_text().splitlines()
    assert "superpipeline/fetched_layers" in header
    assert "superpipeline/peak_device_bytes" in header
    assert len(rows) == 3


@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"log_every_n_steps": 4}, [3, 7, 11]),
        ({"log_every_n_steps": 1, "accumulate_grad_batches": 4}, [0, 1, 2]),
        ({"log_every_n_steps": 0}, []),
    ],
)
def test_counters_come_with_what_lightning_logs(options: dict[str, Any], steps: list[int], tmp_path: Path) -> None:
    class Logs(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            return loss

    logged: dict[str, list[int | None]] = {"loss": [], "superpipeline/window": []}

    class Notes(CSVLogger):
        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            for name in logged.keys() & metrics.keys():
                logged[name].append(step)

    trainer = trainer_for("superpipeline", logger=Notes(tmp_path), **options)
    trainer.fit(Logs(Stack()), loader(vectors(12)))
    assert logged == {"loss": steps, "superpipeline/window": steps}


def test_attached_once_and_only_if_wanted() -> None:
    def count(strategy: SuperpipelineStrategy, *callbacks: pl.Callback) -> int:
        trainer = trainer_for(strategy, callbacks=list(callbacks))
        for _ in range(2):
            trainer.fit(Module(Stack()), loader(vectors(1)))
        return sum(isinstance(each, SuperpipelineCallback) for each in trainer.callbacks)  # type: ignore[attr-defined]

    assert count(SuperpipelineStrategy()) == 1
    assert count(SuperpipelineStrategy(), SuperpipelineCallback()) == 1
    assert count(SuperpipelineStrategy(callback=False)) == 0


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
