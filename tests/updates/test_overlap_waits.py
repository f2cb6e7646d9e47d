"""Who looks at a weight, saves it or fails waits for its update in the background, and never sees half of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from time import sleep
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device, Stream
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.narrow_gradient import stored, unwidened
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.engine import streamer_of
from tests.support.models import (
    Module,
    Stack,
    vectors,
)
from tests.support.overlapping import OVERLAP, Looks, at_once, overlapping
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated

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


class _Interrupted(dict[Any, Any]):
    """Notes of updates. The tenth is interrupted."""

    notes = 0

    def __setitem__(self, key: Any, value: Any) -> None:
        self.notes += 1
        if self.notes == 10:
            raise KeyboardInterrupt
        super().__setitem__(key, value)


class LooksAtTheEnd(Callback):
    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.seen = [parameter.detach().clone() for parameter in pl_module.parameters()]


@pytest.mark.rest("takes tenths of a second")
def test_an_interrupt_while_an_update_is_submitted_leaves_none_that_goes_on() -> None:
    """It was submitted and not noted, so that what an interrupted run saved was in the midst of an update."""
    make, later, looks = BackgroundUpdates.__init__, Device.later, LooksAtTheEnd()

    def made(self: BackgroundUpdates, *arguments: Any) -> None:
        make(self, *arguments)
        self._under_way = _Interrupted()

    def slowly(self: Device, work: Callable[[], None], urgency: int | None = None) -> Any:
        def delayed() -> None:
            sleep(0.1)
            work()

        return later(self, delayed, urgency)

    module = fused(lambda: Module(Stack()))()
    with mock.patch.object(BackgroundUpdates, "__init__", made), mock.patch.object(Device, "later", slowly):
        with pytest.raises(SystemExit):
            trainer_for(overlapping("forward"), callbacks=[looks]).fit(module, loader(vectors() * 2))
        sleep(0.3)
    assert_equal(list(map(Tensor.detach, module.parameters())), looks.seen, "weights after the interrupt")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("device", ["cpu", "simulated"])
def test_whoever_looks_waits(device: str) -> None:
    batches = vectors() * 3
    with simulated() if device == "simulated" else nullcontext():
        ours = fit(fused(Looks), batches, overlapping("forward"), recorded="losses")
    plain = fit(fused(Looks), batches, recorded="losses")
    assert_same(ours, plain)
    assert len(plain.module.seen) == 8
    assert_equal(ours.module.seen, plain.module.seen, "seen")


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_what_is_saved_waits_and_resumes_from_and_to_plain_in_mid_epoch(tmp_path: Path) -> None:
    def run(strategy: Any, resume: Path | None = None, folder: str = "a") -> Outcome:
        saver = ModelCheckpoint(tmp_path / folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        return fit(
            fused(Scheduled),
            vectors()[:1] * 6,
            strategy,
            ckpt_path=resume,
            recorded="losses",
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


@pytest.mark.long("takes a second or more")
def test_a_learning_rate_that_is_a_tensor_is_that_of_the_step() -> None:
    class WithTensor(Scheduled):
        @property
        def rate(self) -> Tensor:
            return torch.tensor(1e-2)  # the schedule writes it in place

    reference = fit(fused(WithTensor), vectors(), recorded="losses")
    for mode in OVERLAP:
        with simulated():
            assert_same(fit(fused(WithTensor), vectors(), overlapping(mode), recorded="losses"), reference)


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

    ours = fit(Counted, vectors(), overlapping("forward"), recorded="losses")
    assert fired == ["before", "after, 1 group"] * 3
    assert ours.trainer.global_step == 3
    with pytest.raises(ValueError, match="step hooks"):
        fit(Counted, vectors(), overlapping("backward"), recorded="losses")
    assert_same(ours, fit(Counted, vectors(), recorded="losses"))


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


def test_after_an_update_that_failed_no_layer_is_fetched() -> None:
    """Here code that must not fail has waited for all updates, so no layer has an update under way any more."""
    forwards: list[int] = []

    class Counts(Module):
        def __init__(self) -> None:
            super().__init__(Stack())

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            forwards.append(batch_idx)
            return loss

    class Joins(Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            streamer_of(trainer.strategy).updates.join()

    with failing(1, 2), pytest.raises(FloatingPointError, match="in the update"):
        trainer_for(overlapping("forward"), callbacks=[Joins()]).fit(Counts(), loader(vectors()))
    assert forwards == [0]


@pytest.mark.rest("takes tenths of a second")
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
    with pytest.raises(KeyError, match="in backward") as raised:
        trainer.fit(module, loader(vectors()))
    said = "".join(raised.value.__notes__)
    assert "These weights are not those of any whole step" in said, "who fits again reads it"
    layers = ", ".join(f"'net.{name}'" for name in ("head", *(f"blocks.{i}" for i in (4, 3, 2, 1, 0))))
    assert f"Updated: {layers}. Go on from the last checkpoint, or with a new model" in said
    with pytest.raises(RuntimeError, match="not those of any whole step"):
        trainer.save_checkpoint(tmp_path / "torn.ckpt")
    trainer = trainer_for(overlapping("forward"))
    with pytest.raises(KeyError, match="in backward"):
        trainer.fit(FailsInBackward(), loader(vectors()))
    trainer.save_checkpoint(tmp_path / "whole.ckpt")  # the first step is whole
    saver = ModelCheckpoint(tmp_path / "saved", every_n_train_steps=1)
    trainer = trainer_for(overlapping("backward"), callbacks=[saver], enable_checkpointing=True)
    with pytest.raises(KeyError, match="in backward") as raised:
        trainer.fit(FailsInBackward(), loader(vectors()))
    assert f"trainer.fit(model, ckpt_path={saver.best_model_path!r})" in "".join(raised.value.__notes__)


@pytest.mark.rest("takes tenths of a second")
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
        fit(fused(Detached), vectors(), overlapping("backward"), recorded="losses")
    reference = fit(fused(Detached), vectors(), recorded="losses")
    assert_same(fit(fused(Detached), vectors(), overlapping("forward"), recorded="losses"), reference)
    assert_same(fit(fused(Detached), vectors(), overlapping("backward", k=99), recorded="losses"), reference)


class SkipsBackward(Module):
    """The second micro-batch of a step runs forward, and has no loss."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("mode", OVERLAP)
def test_updates_after_a_forward_without_backward_wait_for_its_fetches(mode: str, precision: str) -> None:
    batches = vectors() * 2
    options: dict[str, Any] = {"recorded": "losses", "accumulate_grad_batches": 2, "precision": precision}
    plain = fit(fused(SkipsBackward), batches, **options)
    with simulated():
        assert_same(fit(fused(SkipsBackward), batches, overlapping(mode), **options), plain)


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


@pytest.mark.rest("takes tenths of a second")
def test_validation_waits_first() -> None:
    waiting: list[int] = []

    class Looks(Callback):
        def on_validation_batch_start(self, trainer: Any, *_: Any) -> None:
            streamer = streamer_of(trainer.strategy)
            waiting.append(sum(layer.update is not None for layer in streamer._moving[:7]))

    with simulated():
        fit(
            lambda: Module(Stack()),
            vectors(),
            overlapping("forward"),
            vectors()[:1],
            recorded="losses",
            callbacks=[Looks()],
        )
    assert waiting == [0]


@pytest.mark.rest("takes tenths of a second")
def test_the_trainer_can_be_copied_inside_a_step() -> None:
    class Copies(Module):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            copy.deepcopy(self.trainer)

    plain = fit(fused(lambda: Copies(Stack())), vectors(), recorded="losses")
    for overlap in ("off", "forward"):
        strategy = SuperpipelineStrategy(optimizer_overlap=overlap)
        assert_same(fit(fused(lambda: Copies(Stack())), vectors(), strategy, recorded="losses"), plain)


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
