"""When updates run in the background: what is chosen, what is refused, and by which name."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.overlapping import overlapping, taken_apart
from tests.support.runs import Make, as_on_a_gpu, assert_same, fit, loader, superpipeline, trainer_for


class Hook(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Could look at gradients."""


# ---------------------------------------------------------------------- what is chosen


def unfused() -> Module:
    module = Module(Stack())
    module.configure_optimizers = lambda: torch.optim.AdamW(module.parameters(), fused=False)  # type: ignore[method-assign]
    return module


def chosen(caplog: pytest.LogCaptureFixture, module: pl.LightningModule, **options: Any) -> str:
    caplog.set_level(logging.DEBUG, logger="lightning.pytorch.superpipeline")
    caplog.clear()
    strategy = SuperpipelineStrategy(k=1)
    with as_on_a_gpu():
        trainer_for(strategy, **options).fit(module, loader(vectors()))
    found = [record.getMessage() for record in caplog.records if "background" in record.getMessage()]
    return found[-1] if found else ""


@pytest.mark.long("takes a second or more")
def test_auto_overlaps_where_nobody_would_wait_and_says_what_it_does(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = Module(Stack())
    assert "background: backward" in chosen(caplog, plain)
    monitor = [LearningRateMonitor()]
    assert "background: backward" in chosen(caplog, plain, callbacks=monitor, logger=CSVLogger(tmp_path))
    assert "forward (Hook.on_after_backward" in chosen(caplog, plain, callbacks=[Hook()])
    assert "does not run fused" in chosen(caplog, unfused())
    assert "LBFGS is not one of" in chosen(caplog, CASES["lbfgs"].make())
    assert "forward (optimization is manual" in chosen(caplog, CASES["gan"].make())
    hooked = Module(Stack())
    next(hooked.parameters()).register_post_accumulate_grad_hook(lambda parameter: None)
    assert "forward (parameters have post-accumulate hooks" in chosen(caplog, hooked)


def test_auto_is_off_where_the_cpu_computes_the_model() -> None:
    with taken_apart() as layers:
        fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy(k=1), recorded="losses")
    assert not layers


@pytest.mark.parametrize(
    ("mode", "make", "options", "message"),
    [
        ("forward", CASES["lbfgs"].make, {}, r"LBFGS is not one of torch's Adam.*\. Use Sup"),
        ("forward", unfused, {}, r"AdamW does not run fused \(fused=False\)\. Leave that"),
        ("backward", CASES["gan"].make, {}, "manual"),
        ("backward", None, {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ("backward", None, {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}, "scaler"),
        ("backward", None, {"callbacks": [Hook()]}, "Hook.on_after_backward"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    mode: str, make: Make | None, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        fit(make or (lambda: Module(Stack())), vectors(), overlapping(mode), recorded="losses", **options)


@pytest.mark.rest("takes tenths of a second")
def test_an_unfused_optimizer_is_told_both_ways_and_both_work() -> None:
    """``optimizer_overlap="off"`` was the only one that was named, and the slower one."""

    class Steps(Module):
        def __init__(self, **options: Any) -> None:
            super().__init__(Stack())
            self.options = options

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), **self.options)

    better = r"AdamW does not run fused \(foreach=True\)\. Leave that out, and AdamW runs fused, as with fused=True, or use Sup"
    with pytest.raises(ValueError, match=better):
        fit(lambda: Steps(foreach=True), vectors(), SuperpipelineStrategy(k=1, optimizer_overlap="forward"))
    for make in (Steps, partial(Steps, fused=True)):
        with taken_apart() as layers:
            fit(make, vectors(), SuperpipelineStrategy(k=1, optimizer_overlap="forward"), recorded="losses")
        assert layers
    fit(lambda: Steps(foreach=True), vectors(), SuperpipelineStrategy(k=1, optimizer_overlap="off"), recorded="losses")


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_overlap must be one of"):
        SuperpipelineStrategy(optimizer_overlap="always")  # type: ignore[arg-type]


def test_the_thread_leaves_the_number_of_other_threads_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before, others = torch.get_num_threads(), set(threading.enumerate())  # of earlier tests' scratch files
    torch.set_num_threads(3)
    threads: set[int] = set()
    submit = BackgroundUpdates.submit

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        def counted() -> None:
            threads.add(torch.get_num_threads())
            work()

        submit(self, layer, counted, *then)

    monkeypatch.setattr(BackgroundUpdates, "submit", noted)
    try:
        fit(lambda: Module(Stack()), vectors(), overlapping("forward"), recorded="losses")
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (threads, torch.get_num_threads(), elsewhere) == ({3}, 3, [3])
    finally:
        torch.set_num_threads(before)
    assert not [each for each in set(threading.enumerate()) - others if each.name.startswith("superpipeline")]


@pytest.mark.rest("takes tenths of a second")
def test_the_ledger_follows_what_is_unfrozen() -> None:
    seen: list[int] = []

    class Thaws(Module):
        def __init__(self) -> None:
            super().__init__(Stack())
            self.net.blocks.requires_grad_(False)

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            seen.append(self.trainer.strategy.ledger.gradients)
            if batch_idx == 1:
                self.net.blocks.requires_grad_(True)

    fit(Thaws, vectors(), overlapping("off"), recorded="losses")
    assert seen[2] > 3 * seen[0]


@pytest.mark.filterwarnings("ignore:`LightningModule.configure_optimizers` returned `None`")
@pytest.mark.parametrize("overlap", ["forward", "backward"])
def test_overlap_without_an_optimizer_has_nothing_to_do(overlap: Any) -> None:
    class Fixed(Module):
        def configure_optimizers(self) -> None:  # type: ignore[override]
            return None

    ours = fit(lambda: Fixed(Stack()), vectors(), superpipeline(k=1, optimizer_overlap=overlap))
    assert_same(ours, fit(lambda: Fixed(Stack()), vectors()))
