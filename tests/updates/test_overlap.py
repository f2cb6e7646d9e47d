"""Updates in the background: when they run, what they free, what the log says. User code is in ``tests/equality``."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.background_thread import Pieces
from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.gradient_roles import stored, unwidened
from sp_lightning.core.weights.layer import StreamedLayer
from tests.support.engine import at_once, taken_apart
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import as_on_a_gpu, assert_equal, fit, fused, loader, trainer_for
from tests.support.ways import overlapping

# ---------------------------------------------------------------------- what is chosen


class Hook(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Could look at gradients."""


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


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_overlap must be one of"):
        SuperpipelineStrategy(optimizer_overlap="always")  # type: ignore[arg-type]


# ---------------------------------------------------------------------- what runs where


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


def test_early_updates_run_under_backward_and_free_their_gradients() -> None:
    """At most k' + 1 layers' gradients wait; nothing is left when the step is over."""
    alive: list[int] = []
    submit = BackgroundUpdates.submit
    module = Module(Stack())

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, work, *then)
        self.limit_pending(2)
        alive.append(_gradients_of(module))

    with mock.patch.object(BackgroundUpdates, "submit", noted):
        trainer_for(overlapping("backward")).fit(module, loader(vectors()))
    assert not _gradients_of(module)
    assert len(alive) == 3 * 7
    assert max(alive) <= 2 * 4  # two blocks of four parameters, where the whole has 24


def _gradients_of(module: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        hosts = [getattr(each, "host", each) for each in module.parameters()]
        return sum(each.grad is not None for each in hosts)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(3,), (1000003,), (517, 1031), (8, 16, 33, 31)])
def test_norms_and_fused_steps_do_not_depend_on_the_threads(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """What lets the background, which leaves one core to Python, give the bits of the whole step."""

    def results(threads: int) -> list[Tensor]:
        torch.set_num_threads(threads)
        torch.manual_seed(0)
        found = []
        for make in (
            lambda p: torch.optim.AdamW(p, amsgrad=True, fused=True),
            lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
            lambda p: torch.optim.Adagrad(p, fused=True),
        ):
            memory = torch.channels_last if len(shape) == 4 else torch.contiguous_format
            parameter = nn.Parameter(torch.randn(shape).to(dtype, memory_format=memory))
            optimizer = make([parameter])
            for _ in range(2):
                parameter.grad = torch.randn(shape).to(dtype, memory_format=memory)
                found.append(torch.linalg.vector_norm(parameter.grad))
                optimizer.step()
            found.append(parameter.detach())
        return found

    before = torch.get_num_threads()
    try:
        one = results(1)
        for threads in (2, 3, 7):
            assert_equal(results(threads), one, f"{threads} threads")
    finally:
        torch.set_num_threads(before)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_resumes_runs_fused_again(tmp_path: Path) -> None:
    """What was saved has the user's own ``fused``, which is open."""
    make = CASES["stack"].make
    saver = ModelCheckpoint(tmp_path, filename="first")
    fit(make, vectors(), overlapping("forward"), recorded="losses", callbacks=[saver], enable_checkpointing=True)
    with taken_apart() as layers:
        fit(make, vectors(), overlapping("forward"), recorded="losses", ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert len(layers) == 3 * 7


def test_what_follows_an_update_is_done_once() -> None:
    """Backward bounds how many are under way, and waits for one before its parameters are allowed again."""
    followed, submit = list[int](), BackgroundUpdates.submit

    def counted(self: BackgroundUpdates, layer: StreamedLayer, work: Any, then: Any = None) -> None:
        def after() -> None:
            followed.append(layer.index)
            if then is not None:
                then()

        submit(self, layer, work, after)

    with mock.patch.object(BackgroundUpdates, "submit", counted):
        fit(fused(lambda: Module(Stack())), vectors(2), overlapping("backward"), recorded="nothing")
    assert max(map(followed.count, followed)) == 2, "once in each of two steps"


@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_update_declares_to_write_the_gradients_that_it_writes(precision: str, clip: float | None) -> None:
    """The simulated device finds races by these declarations."""
    submit, access = BackgroundUpdates.submit, Device.access
    declared: dict[int, bool] = {}  # by the address of a gradient
    checked: list[bool] = []

    def noted(self: Device, memory: Tensor | list[Tensor], by: Stream | None, *, write: bool) -> None:
        for each in [memory] if isinstance(memory, Tensor) else memory:
            if by is Stream.UPDATE:
                declared[each.data_ptr()] = write
        access(self, memory, by, write=write)

    def compared(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        found = [stored(parameter) for member in layer.with_masters for parameter in member.block.parameters]
        gradients = [unwidened(gradient) for gradient in found if gradient is not None]

        def update() -> None:
            before = [gradient.clone() for gradient in gradients]
            declared.clear()
            work()
            for gradient, earlier in zip(gradients, before, strict=True):
                written = not torch.equal(gradient, earlier)
                assert declared[gradient.data_ptr()] == written
                checked.append(written)

        submit(self, layer, update, *then)

    options: dict[str, Any] = {"recorded": "nothing", "precision": precision, "gradient_clip_val": clip}
    with (
        mock.patch.object(BackgroundUpdates, "submit", compared),
        mock.patch.object(Device, "access", noted),
        mock.patch.object(Device, "later", at_once),
    ):
        fit(fused(lambda: Module(Stack())), vectors(), overlapping("forward"), **options)
    assert set(checked) == {precision == "32-true" and clip is not None}, "narrow ones are clipped elsewhere"


def test_the_most_urgent_work_is_done_first() -> None:
    pieces, done = Pieces(), list[str]()

    def add(name: str, urgency: int | None) -> Future[None]:
        return pieces.add(lambda: done.append(name), urgency)

    add("last", 3)
    add("second", 1)
    add("in order", None)
    wanted = add("wanted", 2)
    also = add("in order, too", None)
    pieces.urge(wanted)
    pieces.urge(also)  # which changes nothing
    for _ in range(5):
        pieces.take().work()
    assert done == ["in order", "in order, too", "wanted", "second", "last"]
