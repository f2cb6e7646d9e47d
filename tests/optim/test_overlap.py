"""Updates in the background: bitwise what the whole step gives, seen by nobody, and refused where that cannot be."""

from __future__ import annotations

import copy
import logging
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from sp_lightning.device.device import Device
from sp_lightning.engine.access import Access
from sp_lightning.optim import layerwise
from sp_lightning.optim.background import BackgroundUpdates
from sp_lightning.optim.layerwise import LayerwiseStep
from sp_lightning.weights.layer import StreamedLayer
from sp_lightning.weights.slots import Slots
from tests.support.engine import streamer_of
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import Make, Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated

OVERLAP = ("forward", "backward")
_plain: dict[Any, Outcome] = {}


def run(name: str, strategy: Any, **options: Any) -> Outcome:
    case = CASES[name]
    if options.get("precision") == "16-mixed":
        options.pop("precision")
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
    convert = {"bf16-true": torch.bfloat16, "16-true": torch.float16}.get(options.get("precision", ""))

    def make() -> pl.LightningModule:
        module = case.make() if name == "sparse-embedding" else fused(case.make)()  # fused takes no sparse gradients
        return module if convert is None else module.to(convert)

    batches = case.batches()
    val = None if any(getattr(batch, "requires_grad", False) for batch in batches) else case.batches()[:2]
    return fit(make, batches, strategy, val=val, gradients=False, **options)


def plain(name: str, **options: Any) -> Outcome:
    key = (name, *sorted(options.items()))
    if key not in _plain:
        _plain[key] = run(name, "auto", **options)
    return _plain[key]


def overlapping(mode: Any, **options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "optimizer_overlap": mode, **options})


@contextmanager
def taken_apart() -> Iterator[list[int]]:
    """The layers that are updated by themselves, in order."""
    layers: list[int] = []
    submit = BackgroundUpdates.submit

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        layers.append(layer.index)
        submit(self, layer, work, *then)

    with mock.patch.object(BackgroundUpdates, "submit", noted):
        yield layers


# ---------------------------------------------------------------------- equality


@pytest.mark.parametrize("device", ["cpu", "simulated"])
@pytest.mark.parametrize("mode", OVERLAP)
@pytest.mark.parametrize("name", [name for name in CASES if name != "lbfgs"])
def test_updates_in_the_background_are_bitwise_those_of_the_step(name: str, mode: str, device: str) -> None:
    options: dict[str, Any] = {"max_epochs": 2}
    if name != "gan":
        options |= {"accumulate_grad_batches": 2}
        if mode == "forward" and name != "sparse-embedding":  # torch cannot clip sparse gradients
            options |= {"gradient_clip_val": 0.05}
    refused = {"gan": "manual", "sparse-embedding": "sparse", "parameter-hooks": "post-accumulate"}
    if mode == "backward" and name in refused:
        with pytest.raises((ValueError, RuntimeError), match=refused[name]):
            run(name, overlapping(mode), max_epochs=2)
        return
    with simulated() if device == "simulated" else nullcontext(), taken_apart() as layers:
        ours = run(name, overlapping(mode), **options)
    assert layers or name == "sparse-embedding"
    assert_same(ours, plain(name, **options))


CLIPS: list[dict[str, Any]] = [
    {},
    {"gradient_clip_val": 0.05},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
]


@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("clip", CLIPS, ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("mode", OVERLAP)
@pytest.mark.parametrize("name", ["llama-dropout", "stack"])
def test_every_precision_clipping_and_accumulation(
    name: str, mode: str, precision: str, clip: dict[str, Any], accumulate: int
) -> None:
    options = {"precision": precision, "accumulate_grad_batches": accumulate, "max_epochs": 2, **clip}
    if mode == "backward" and (clip or precision == "16-mixed"):
        with pytest.raises(ValueError, match='optimizer_overlap="backward" cannot be used'):
            run(name, overlapping(mode), **options)
        return
    with taken_apart() as layers:
        ours = run(name, overlapping(mode), **options)
    assert layers
    assert_same(ours, plain(name, **options))


@pytest.mark.parametrize("mode", OVERLAP)
@pytest.mark.parametrize("name", ["llama-dropout", "stack"])
def test_mixed_precision_on_the_simulated_device(name: str, mode: str) -> None:
    """Autocast's copies save backward a fetch: one that came early may be under way when its layer is updated."""
    options: dict[str, Any] = {"precision": "bf16-mixed", "max_epochs": 2}
    with simulated():
        ours = run(name, overlapping(mode), **options)
    assert_same(ours, plain(name, **options))


@pytest.mark.parametrize("clip", CLIPS[1:], ids=str)
def test_layers_without_gradients_are_not_clipped(clip: dict[str, Any]) -> None:
    assert_same(run("conditional", overlapping("forward"), **clip), plain("conditional", **clip))


class KeepsGradients(Callback):
    """What ``p.grad`` is after each step."""

    def __init__(self) -> None:
        self.found: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.found += [p.grad.clone() for p in pl_module.parameters() if p.grad is not None]


class Constructed(Module):
    """With a parameter from outside the module, so that no step can be taken apart, and one that unscales by itself."""

    def __init__(self, stray: bool) -> None:
        super().__init__(Stack())
        self.stray = [nn.Parameter(torch.ones(16))] if stray else []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch * self.stray[0] if self.stray else batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.stray], fused=True)


@pytest.mark.parametrize("init_scale", [2.0**8, 2.0**40])  # the larger one makes steps be skipped
@pytest.mark.parametrize("clip", [None, 1e-3])
@pytest.mark.parametrize("case", ["stack", "stray", "unscales by itself"])
def test_gradients_after_skipped_and_whole_steps_are_clipped_too(
    case: str, clip: float | None, init_scale: float
) -> None:
    if case == "unscales by itself" and clip:
        pytest.skip("Lightning refuses to clip for such an optimizer")

    def run(strategy: Any) -> tuple[Outcome, list[Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, growth_interval=2, backoff_factor=2.0**-20)
        plugins = [] if case == "stray" else [MixedPrecision("16-mixed", "cpu", scaler=scaler)]
        keeps = KeepsGradients()
        make = fused(CASES["stack"].make) if case == "stack" else lambda: Constructed(stray=case == "stray")
        options: dict[str, Any] = {"plugins": plugins, "gradient_clip_val": clip, "callbacks": [keeps]}
        return fit(make, vectors() * 2, strategy, gradients=False, **options), keeps.found

    plain, gradients = run("auto")
    with nullcontext() if case == "stray" else simulated():  # which would not let it meet the device's batch
        ours, our_gradients = run(overlapping("forward"))
    assert_same(ours, plain)
    assert gradients
    assert_equal(our_gradients, gradients, "gradients after steps")


class SharedWithCheckpoint(Module):
    """The first block is used inside a reentrant checkpoint, and outside, before or after it."""

    def __init__(self, outside_last: bool) -> None:
        super().__init__(Stack().eval())
        self.outside_last = outside_last

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, *others = list(self.net.blocks)
        x = self.net.stem(batch)
        x = x if self.outside_last else first(x)
        x = checkpoint(nn.Sequential(first, others[0]), x, use_reentrant=True)
        for block in others[1:]:
            x = block(x)
        return self.net.head(first(x) if self.outside_last else x).square().mean()


def test_gradients_of_one_layer_from_nested_backwards() -> None:
    options: dict[str, Any] = {"gradients": False, "max_epochs": 2}
    for outside_last in (False, True):
        make = fused(partial(SharedWithCheckpoint, outside_last))
        clipped = {**options, "gradient_clip_val": 0.01}
        with mock.patch.object(Device, "later", at_once):  # norms are measured before the second gradient comes
            ours = fit(make, vectors(), overlapping("forward"), **clipped)
        assert_same(ours, fit(make, vectors(), **clipped))
    early = fused(partial(SharedWithCheckpoint, False))
    assert_same(fit(early, vectors(), overlapping("backward"), **options), fit(early, vectors(), **options))
    late = fused(partial(SharedWithCheckpoint, True))
    for k, why in ((1, "its weights were needed again"), (99, "another gradient arrived")):
        with pytest.raises(RuntimeError, match=rf"net\.blocks\.0.*{why}"):
            fit(late, vectors(), overlapping("backward", k=k), **options)


def at_once(self: Device, work: Callable[[], None]) -> Future[None]:
    """In place of the background thread."""
    future: Future[None] = Future()
    work()
    future.set_result(None)
    return future


# ---------------------------------------------------------------------- what runs where


def test_updates_run_under_the_next_forward_and_each_fetch_waits_for_its_own() -> None:
    """On the simulated device, where updates are done as late as somebody waits for them."""
    happened: list[str] = []
    submit, fetch, enter = BackgroundUpdates.submit, Slots.fetch, Access.enter

    def note_submit(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        def noted() -> None:
            happened.append(f"update {layer.index}")
            work()

        submit(self, layer, noted, *then)

    def note_fetch(self: Slots, transfer: Any) -> None:
        happened.extend(f"fetch {layer.index}" for layer, *_ in transfer)
        fetch(self, transfer)

    def note_enter(self: Access, visits: Any, inputs: Any) -> Any:
        entered = enter(self, visits, inputs)
        happened.extend(f"forward {layer.index}" for layer in entered)
        return entered

    with (
        simulated(),
        mock.patch.object(BackgroundUpdates, "submit", note_submit),
        mock.patch.object(Slots, "fetch", note_fetch),
        mock.patch.object(Access, "enter", note_enter),
    ):
        fit(lambda: Module(Stack()), vectors()[:2], overlapping("forward"), gradients=False)
    first = happened.index("update 0")
    assert happened[first : first + 9] == [
        *("update 0", "fetch 0", "forward 0"),
        *("update 1", "fetch 1", "forward 1"),
        *("update 2", "fetch 2", "forward 2"),
    ]


def test_early_updates_run_under_backward_and_free_their_gradients() -> None:
    """At most k' + 1 layers' gradients wait; nothing is left when the step is over."""
    alive: list[int] = []
    submit = BackgroundUpdates.submit
    module = Module(Stack())

    def noted(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, work, *then)
        self.bound(2)
        alive.append(_gradients_of(module))

    class NothingLeft(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            assert all(p.grad is None for p in pl_module.parameters())

    with mock.patch.object(BackgroundUpdates, "submit", noted):
        strategy = overlapping("backward")
        trainer = trainer_for(strategy, callbacks=[NothingLeft()])
        trainer.fit(module, loader(vectors()))
    assert len(alive) == 3 * 7
    assert max(alive) <= 2 * 4  # two blocks of four parameters, where the whole has 24


def _gradients_of(module: nn.Module) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        hosts = [getattr(each, "host", each) for each in module.parameters()]
        return sum(each.grad is not None for each in hosts)


def test_the_norms_are_measured_while_backward_goes_on() -> None:
    measured: list[int] = []
    measure = LayerwiseStep._measure_layer

    def noted(self: LayerwiseStep, layer: StreamedLayer) -> None:
        measured.append(layer.index)
        measure(self, layer)

    options = {"gradient_clip_val": 0.05, "max_epochs": 2}
    known: list[int] = []
    total = layerwise.get_total_norm

    def note_total(norms: list[Tensor]) -> Tensor:
        known.append(sum(not each.ndim for each in norms))
        return total(norms)

    with (
        mock.patch.object(LayerwiseStep, "_measure_layer", noted),
        mock.patch.object(layerwise, "get_total_norm", note_total),
        mock.patch.object(Device, "later", at_once),
    ):
        ours = run("stack", overlapping("forward"), **options)
    assert measured[:7] == [6, 5, 4, 3, 2, 1, 0]
    assert known == [24] * 6  # and none twice
    assert_same(ours, plain("stack", **options))


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


# ---------------------------------------------------------------------- nobody sees it


class Looks(Module):
    """Looks at everything at once: weights and gradients by old references, state through the optimizer and through Lightning."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []
        self.references = [dict(self.named_parameters())["net.head.weight"]]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            self.look(batch_idx)
        return super().training_step(batch, batch_idx)

    def look(self, batch_idx: int) -> None:
        weight = self.references[0]
        optimizer: Any = self.optimizers()
        looks: list[Callable[[], Any]] = [
            lambda: weight.detach().clone(),
            lambda: weight.grad.clone(),
            lambda: weight.data.sum(),
            lambda: [value["exp_avg"].clone() for value in optimizer.state.values()],
            lambda: optimizer.optimizer.state_dict()["state"][3]["exp_avg_sq"].clone(),
            lambda: [p.detach().clone() for p in self.parameters()],
            lambda: torch._foreach_norm([weight]),
        ]
        self.seen.append(looks[batch_idx % len(looks)]())
        assert type(weight) is nn.Parameter


@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_whoever_looks_waits(device: str) -> None:
    batches = vectors() * 3
    with simulated() if device == "simulated" else nullcontext():
        ours = fit(fused(Looks), batches, overlapping("forward"), gradients=False)
    plain = fit(fused(Looks), batches, gradients=False)
    assert_same(ours, plain)
    assert len(plain.module.seen) == 8
    assert_equal(ours.module.seen, plain.module.seen, "seen")


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_what_is_saved_waits_and_resumes_from_and_to_plain_in_mid_epoch(tmp_path: Path) -> None:
    def run(strategy: Any, resume: Path | None = None, folder: str = "a") -> Outcome:
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        return fit(
            fused(Scheduled),
            vectors()[:1] * 6,
            strategy,
            ckpt_path=resume,
            gradients=False,
            callbacks=[saver],
            enable_checkpointing=True,
        )

    whole = {"auto": run("auto", folder="auto")}
    for mode in OVERLAP:
        whole[mode] = run(overlapping(mode), folder=mode)
        assert_same(whole[mode], whole["auto"])
    for source in whole:
        for target in ("auto", *OVERLAP):
            strategy = "auto" if target == "auto" else overlapping(target)
            resumed = run(strategy, tmp_path / source / "step=4.ckpt", "resumed")
            assert_equal(resumed.state, whole["auto"].state, f"from {source} to {target}")
            assert_equal(resumed.optimizers, whole["auto"].optimizers, f"from {source} to {target}")


def test_a_learning_rate_that_is_a_tensor_is_that_of_the_step() -> None:
    class WithTensor(Scheduled):
        @property
        def rate(self) -> Tensor:
            return torch.tensor(1e-2)  # the schedule writes it in place

    reference = fit(fused(WithTensor), vectors(), gradients=False)
    for mode in OVERLAP:
        with simulated():
            assert_same(fit(fused(WithTensor), vectors(), overlapping(mode), gradients=False), reference)


class Scheduled(Module):
    """The schedule moves the learning rate right after each step, while its updates are under way."""

    rate: Any = 1e-2

    def __init__(self) -> None:
        super().__init__(Stack().eval())  # a run that resumes has another random state: no dropout

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.rate, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_step_hooks_and_counters_fire_once_per_step() -> None:
    fired: list[str] = []

    class Counted(Module):
        def __init__(self) -> None:
            super().__init__(Stack())

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, fused=True)
            optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
            optimizer.register_step_post_hook(lambda o, *_: fired.append(f"after, {len(o.param_groups)} group"))
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    ours = fit(Counted, vectors(), overlapping("forward"), gradients=False)
    assert fired == ["before", "after, 1 group"] * 3
    assert ours.trainer.global_step == 3
    with pytest.raises(ValueError, match="step hooks"):
        fit(Counted, vectors(), overlapping("backward"), gradients=False)
    assert_same(ours, fit(Counted, vectors(), gradients=False))


# ---------------------------------------------------------------------- failures


@contextmanager
def failing(step: int, layer: int) -> Iterator[list[int]]:
    """The update of a layer raises in a step; the layers that are updated after it."""
    submit = BackgroundUpdates.submit
    seen: dict[int, int] = {}

    def noted(self: BackgroundUpdates, which: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        seen[which.index] = seen.get(which.index, 0) + 1

        def fails() -> None:
            failed.append(which.index)
            raise FloatingPointError("in the update")

        def goes_on() -> None:
            after.extend([which.index] if failed else [])
            work()

        submit(self, which, fails if which.index == layer and seen[which.index] == step else goes_on, *then)

    failed: list[int] = []
    after: list[int] = []
    with mock.patch.object(BackgroundUpdates, "submit", noted):
        yield after


@pytest.mark.parametrize("step", [1, 3])  # the last one is waited for when training ends
@pytest.mark.parametrize("mode", OVERLAP)
def test_an_error_in_the_background_reaches_the_user_and_nothing_is_saved(mode: str, step: int, tmp_path: Path) -> None:
    strategy = overlapping(mode)
    trainer = trainer_for(strategy)
    module = Module(Stack())
    with failing(step, 2) as after, pytest.raises(FloatingPointError, match="in the update") as raised:
        trainer.fit(module, loader(vectors()))
    assert not after
    assert "in the background, by the optimizer's update of layer 'net.blocks.1'" in raised.value.__notes__[0]
    assert any(entry.name == "fails" for entry in raised.traceback)
    assert all(type(p) is nn.Parameter for p in module.parameters())
    for weights_only in (False, True):
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "torn.ckpt", weights_only=weights_only)
    assert not list(tmp_path.iterdir())
    trainer = trainer_for(overlapping(mode))
    trainer.fit(module, loader(vectors()))  # and all is well again
    trainer.save_checkpoint(tmp_path / "whole.ckpt")


def test_a_backward_that_fails_after_early_updates_is_not_saved(tmp_path: Path) -> None:
    class FailsInBackward(Module):
        def __init__(self) -> None:
            super().__init__(Stack())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            stem = self.net.stem(batch)
            if batch_idx == 1:
                stem.register_hook(lambda gradient: (_ for _ in ()).throw(KeyError("in backward")))
            x = stem
            for block in self.net.blocks:
                x = block(x)
            return self.net.head(x).square().mean()

    module = FailsInBackward()
    trainer = trainer_for(overlapping("backward"))
    with pytest.raises(KeyError, match="in backward"):
        trainer.fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match="not those of any whole step"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    trainer = trainer_for(overlapping("forward"))
    with pytest.raises(KeyError, match="in backward"):
        trainer.fit(FailsInBackward(), loader(vectors()))
    trainer.save_checkpoint(tmp_path / "whole.ckpt")  # the first step is whole


def test_a_weight_that_backward_needs_after_its_update_is_refused_or_right() -> None:
    class Detached(Module):
        """The first block's weight is used once more, detached, below its own layer."""

        def __init__(self) -> None:
            super().__init__(Stack())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = self.net.stem(batch)
            x = nn.functional.linear(x, self.net.blocks[4].inner.weight[:16].detach())
            for block in self.net.blocks:
                x = block(x)
            return self.net.head(x).square().mean()

    with pytest.raises(RuntimeError, match=r"net\.blocks\.4.*optimizer_overlap=\"forward\""):
        fit(fused(Detached), vectors(), overlapping("backward"), gradients=False)
    reference = fit(fused(Detached), vectors(), gradients=False)
    assert_same(fit(fused(Detached), vectors(), overlapping("forward"), gradients=False), reference)
    assert_same(fit(fused(Detached), vectors(), overlapping("backward", k=99), gradients=False), reference)


# ---------------------------------------------------------------------- what is chosen


def chosen(caplog: pytest.LogCaptureFixture, module: pl.LightningModule, **options: Any) -> str:
    caplog.set_level(logging.DEBUG, logger="lightning.pytorch.superpipeline")
    caplog.clear()
    strategy = SuperpipelineStrategy(k=1, fused_optimizer=options.pop("fused_optimizer", True))
    with mock.patch("sp_lightning.trainer.update_policy._computes_on_host", return_value=False):  # as on an accelerator
        trainer_for(strategy, **options).fit(module, loader(vectors()))
    found = [record.getMessage() for record in caplog.records if "background" in record.getMessage()]
    return found[0] if found else ""


class Hook(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Could look at gradients."""


def test_auto_overlaps_where_nobody_would_wait_and_says_what_it_does(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    plain = Module(Stack())
    assert "background: forward" in chosen(caplog, plain)
    monitor = [LearningRateMonitor()]
    assert "background: forward" in chosen(caplog, plain, callbacks=monitor, logger=CSVLogger(tmp_path))
    assert "Hook.on_after_backward" in chosen(caplog, plain, callbacks=[Hook()])
    assert "does not run fused" in chosen(caplog, plain, fused_optimizer=False)
    assert "LBFGS is none of" in chosen(caplog, CASES["lbfgs"].make())
    assert "manual" in chosen(caplog, CASES["gan"].make())
    hooked = Module(Stack())
    next(hooked.parameters()).register_hook(lambda gradient: None)
    assert "parameters have hooks" in chosen(caplog, hooked)


def test_auto_is_off_where_the_cpu_computes_the_model() -> None:
    with taken_apart() as layers:
        fit(lambda: Module(Stack()), vectors(), SuperpipelineStrategy(k=1, fused_optimizer=True), gradients=False)
    assert not layers


@pytest.mark.parametrize(
    ("mode", "make", "options", "message"),
    [
        ("forward", CASES["lbfgs"].make, {}, "LBFGS is none of torch's Adam"),
        ("forward", None, {"fused_optimizer": False}, "AdamW does not run fused"),
        ("backward", CASES["gan"].make, {}, "manual"),
        ("backward", None, {"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),
        ("backward", None, {"plugins": MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))}, "scaler"),
        ("backward", None, {"callbacks": [Hook()]}, "Hook.on_after_backward"),
    ],
)
def test_what_cannot_be_is_refused_before_the_first_step(
    mode: str, make: Make | None, options: dict[str, Any], message: str
) -> None:
    options = dict(options)
    extra = {key: options.pop(key) for key in list(options) if key == "fused_optimizer"}
    with pytest.raises(ValueError, match=message):
        fit(make or (lambda: Module(Stack())), vectors(), overlapping(mode, **extra), gradients=False, **options)


def test_a_wrong_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="optimizer_overlap must be one of"):
        SuperpipelineStrategy(optimizer_overlap="always")  # type: ignore[arg-type]


def test_the_thread_leaves_one_core_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
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
        fit(lambda: Module(Stack()), vectors(), overlapping("forward"), gradients=False)
        elsewhere: list[int] = []
        thread = threading.Thread(target=lambda: elsewhere.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        assert (threads, torch.get_num_threads(), elsewhere) == ({2}, 3, [3])
    finally:
        torch.set_num_threads(before)
    assert not [each for each in threading.enumerate() if each.name.startswith("superpipeline")]


# ---------------------------------------------------------------------- what an attack found


def both(make: Any, mode: Any = "forward", *, lazy: bool = True, **options: Any) -> tuple[Any, Any]:
    """Ours and plain; ``lazy`` updates are done when somebody waits for them, on the simulated device."""
    plain = fit(make, vectors() * 2, gradients=False, **options)
    with simulated() if lazy else nullcontext():
        ours = fit(make, vectors() * 2, overlapping(mode), gradients=False, **options)
    assert_same(ours, plain)
    return ours, plain


class EveryStep(Callback):
    """Does something after each step."""

    def __init__(self, what: Callable[[Any, Any], Any]) -> None:
        self.what = what

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.what(trainer, pl_module)


def rolls_back(trainer: Any, pl_module: Any) -> None:
    """As a callback does that returns to an earlier state; torch's loading never reads the present one."""
    optimizer = trainer.optimizers[0]
    if trainer.global_step == 2:
        pl_module.kept = copy.deepcopy(optimizer.state_dict())
    elif trainer.global_step == 4:
        optimizer.load_state_dict(pl_module.kept)
    elif trainer.global_step == 5:
        trainer.strategy.load_optimizer_state_dict({"optimizer_states": [pl_module.kept]})
        for group in optimizer.param_groups:
            group["fused"] = True  # which plain does not switch on again


def exchanges_groups(trainer: Any, pl_module: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.param_groups = [{**group, "lr": group["lr"] / 2} for group in optimizer.param_groups]


def writes_into_settings(trainer: Any, pl_module: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["betas"][0] /= 2


def copies(trainer: Any, pl_module: Any) -> None:
    pl_module.copied = copy.deepcopy(pl_module.net.head.weight)
    assert type(pl_module.copied) is nn.Parameter


def starts_anew(trainer: Any, pl_module: Any) -> None:
    if trainer.global_step == 3:
        trainer.optimizers[0].state = defaultdict(dict)


def exchanges_optimizers(trainer: Any, pl_module: Any) -> None:
    """Lightning's wrapper takes the class that the optimizer has at this moment."""
    trainer.optimizers = trainer.optimizers
    pl_module.kept = pl_module.optimizers().state[pl_module.net.head.weight]["exp_avg"].clone()


def makes_parameters(trainer: Any, pl_module: Any) -> None:
    """``type(p)`` is the class of a parameter that waits."""
    weight = pl_module.net.head.weight
    pl_module.kept = type(weight)(weight.data * 2) * 2


def exchanges_groups_in_steps(trainer: Any, pl_module: Any) -> None:
    if trainer.global_step == 1:
        trainer.optimizers[0].register_step_post_hook(lambda *_: exchanges_groups(trainer, pl_module))


class ListOfBetas(Module):
    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return optimizer


@pytest.mark.parametrize(
    "what",
    [
        rolls_back, exchanges_groups, exchanges_groups_in_steps, writes_into_settings, copies, starts_anew,
        exchanges_optimizers, makes_parameters,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", OVERLAP)
def test_whatever_a_callback_does_to_the_optimizer(mode: str, what: Callable[[Any, Any], Any]) -> None:
    both(ListOfBetas, mode, callbacks=[EveryStep(what)])


class Late(Module):
    """One weight of a layer is used from the third step on: SGD has momentum for its others by then."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.head.late = nn.Parameter(torch.ones(16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch)
        return (output * self.net.head.late if batch_idx > 1 else output).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.parametrize("mode", OVERLAP)
def test_a_first_gradient_that_comes_late(mode: str) -> None:
    """torch's fused SGD fails then: that step runs as the user's optimizer would."""
    off = fit(Late, vectors() * 2, overlapping("off"), gradients=False)
    assert_same(fit(Late, vectors() * 2, overlapping(mode), gradients=False), off)


class SetsInStep(Module):
    """A warm-up by hand, in the training step and in hooks before backward."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 / (batch_idx + 1)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * float(self.trainer.global_step)


class BackwardBefore(Module):
    """Another backward in the training step, as adversarial training has it."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        self.loss(x).backward()
        assert x.grad is not None
        self.zero_grad()
        return self.loss(batch + 0.1 * x.grad.sign())


class StraysFromOptimizer(Module):
    """Parameters that the optimizer does not have keep their gradients, step after step."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.sums: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if "inner" in name], lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.sums += [p.grad.clone() for name, p in self.named_parameters() if "inner" not in name]


@pytest.mark.parametrize("k", [1, 99])
@pytest.mark.parametrize("make", [SetsInStep, BackwardBefore, StraysFromOptimizer])
@pytest.mark.parametrize("mode", OVERLAP)
def test_whatever_happens_around_backward(mode: str, make: Any, k: int) -> None:
    plain = fit(fused(make), vectors() * 2, gradients=False)
    for device in (nullcontext, simulated):
        with device():
            ours = fit(fused(make), vectors() * 2, overlapping(mode, k=k), gradients=False)
        assert_same(ours, plain)
        assert_equal(getattr(ours.module, "sums", None), getattr(plain.module, "sums", None), "gradients")


class ScalesInBackward(Module):
    """Writes gradients where no version shows it, right after they have come."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        for p in self.parameters():
            p.grad.data.mul_(3)


class HooksLate(Module):
    """A parameter's hook, registered in the first step, writes all gradients."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.net.stem.weight.register_post_accumulate_grad_hook(self.scale)
        return super().training_step(batch, batch_idx)

    def scale(self, parameter: Tensor) -> None:
        for p in self.net.head.parameters():
            if p.grad is not None:
                p.grad.data.mul_(3)


@pytest.mark.parametrize("make", [ScalesInBackward, HooksLate])
def test_norms_of_gradients_that_are_written_unseen(make: Any) -> None:
    with mock.patch.object(Device, "later", at_once):
        both(fused(make), lazy=False, gradient_clip_val=0.01)


class OwnZeroGrad(Module):
    def optimizer_zero_grad(self, *args: Any) -> None:
        """Gradients go on from step to step."""


class OwnStep(Module):
    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.parametrize(
    ("make", "name"),
    [(ScalesInBackward, "backward"), (OwnZeroGrad, "optimizer_zero_grad"), (OwnStep, "optimizer_step")],
)
def test_code_that_decides_on_gradients_is_refused_where_they_are_gone(make: Any, name: str) -> None:
    build = fused(make if make is ScalesInBackward else lambda: make(Stack()))
    with pytest.raises(ValueError, match=f"gradients are freed before {make.__name__}.{name}"):
        fit(build, vectors(), overlapping("backward"), gradients=False)
    both(build)


def test_a_users_thread_that_reads_weights_waits_too() -> None:
    """Several threads wait for the same updates: none goes on before they are done."""
    errors: list[BaseException] = []
    stop = threading.Event()
    module = Module(Stack())
    references = list(module.parameters())

    def read() -> None:
        while not stop.is_set():
            try:
                for reference in references:
                    reference.detach().sum()
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    submit = BackgroundUpdates.submit

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.002), work())[1], *then)  # type: ignore[func-returns-value]

    try:
        with mock.patch.object(BackgroundUpdates, "submit", slow):
            trainer_for(overlapping("forward")).fit(module, loader(vectors() * 3))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


class Remembers(Module):
    """A dictionary of parameters, asked before the forward: some of its keys are being updated."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_fit_start(self) -> None:
        self.old = {p: p.detach().clone() for p in self.parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        away = sum((p - self.old[p]).square().sum() for p in self.parameters() if p in self.old)
        return self.loss(batch) + away


@pytest.mark.parametrize("mode", OVERLAP)
def test_parameters_that_are_being_updated_are_keys(mode: str) -> None:
    for lazy in (True, False):
        both(fused(Remembers), mode, lazy=lazy)


def test_weight_averaging_that_steps_without_a_backward_is_refused_where_gradients_are_gone() -> None:
    callbacks = [StochasticWeightAveraging(swa_lrs=1e-3)]
    with pytest.raises(ValueError, match=r"StochasticWeightAveraging steps without a backward.*\"forward\""):
        fit(lambda: Module(Stack()), vectors(), overlapping("backward"), callbacks=callbacks)


def test_an_interrupt_while_waiting_leaves_a_whole_step() -> None:
    """Ctrl-C comes while the host waits for an update: it is done all the same before anybody looks."""
    finish = Device.finish
    calls: list[int] = []

    def interrupted(self: Device, work: Any, why: Any) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        finish(self, work, why)

    states: list[int] = []

    class Looks(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            assert all(type(p) is nn.Parameter for p in pl_module.parameters())
            states.append(len(trainer.optimizers[0].state_dict()["state"]))

    module = Module(Stack())
    with mock.patch.object(Device, "finish", interrupted), pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_for(overlapping("forward"), callbacks=[Looks()]).fit(module, loader(vectors() * 2))
    assert states == [24]


class Reads(torch.utils.data.Dataset[Tensor]):
    """A data set that holds the module, and reads it in its workers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return vectors()[index] + 0 * next(self.module.parameters()).detach().sum()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_that_are_forked_while_updates_are_under_way() -> None:
    module = Module(Stack())
    submit = BackgroundUpdates.submit

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.02), work())[1], *then)  # type: ignore[func-returns-value]

    batches = torch.utils.data.DataLoader(Reads(module), batch_size=None, num_workers=1)
    with mock.patch.object(BackgroundUpdates, "submit", slow):
        trainer_for(overlapping("forward"), max_epochs=2).fit(module, batches)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_run_that_resumes_runs_fused_again(tmp_path: Path) -> None:
    """What was saved has the user's own ``fused``, which is open."""
    make = CASES["stack"].make
    saver = ModelCheckpoint(tmp_path, filename="first")
    fit(make, vectors(), overlapping("forward"), gradients=False, callbacks=[saver], enable_checkpointing=True)
    with taken_apart() as layers:
        fit(make, vectors(), overlapping("forward"), gradients=False, ckpt_path=tmp_path / "first.ckpt", max_epochs=2)
    assert len(layers) == 3 * 7


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

    fit(Thaws, vectors(), overlapping("off"), gradients=False)
    assert seen[2] > 3 * seen[0]


class SkipsBackward(Module):
    """The second micro-batch of a step runs forward, and has no loss."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", OVERLAP)
def test_updates_after_a_forward_without_backward_wait_for_its_fetches(mode: str, precision: str) -> None:
    batches = vectors() * 2
    options: dict[str, Any] = {"gradients": False, "accumulate_grad_batches": 2, "precision": precision}
    plain = fit(fused(SkipsBackward), batches, **options)
    with simulated():
        assert_same(fit(fused(SkipsBackward), batches, overlapping(mode), **options), plain)


def test_validation_waits_first() -> None:
    waiting: list[int] = []

    class Looks(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            streamer = streamer_of(trainer.strategy)
            waiting.append(sum(streamer.updates.under_way(layer) for layer in streamer._moving[:7]))

    with simulated():
        fit(
            lambda: Module(Stack()),
            vectors(),
            overlapping("forward"),
            vectors()[:1],
            gradients=False,
            callbacks=[Looks()],
        )
    assert waiting == [0]
