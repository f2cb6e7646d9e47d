"""Updates in the background: bitwise what the whole step gives, seen by nobody, and refused where that cannot be."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.device.device import Device
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.overlapping import at_once, overlapping, taken_apart
from tests.support.runs import Outcome, assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated


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


@pytest.mark.long("the registry clips in the first tier")
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
        return fit(make, vectors() * 2, strategy, recorded="losses", **options), keeps.found

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


@pytest.mark.long("takes a second or more")
def test_gradients_of_one_layer_from_nested_backwards() -> None:
    options: dict[str, Any] = {"recorded": "losses", "max_epochs": 2}
    for outside_last in (False, True):
        make = fused(partial(SharedWithCheckpoint, outside_last))
        clipped = {**options, "gradient_clip_val": 0.01}
        with mock.patch.object(Device, "later", at_once):  # norms are measured before the second gradient comes
            ours = fit(make, vectors(), overlapping("forward"), **clipped)
        assert_same(ours, fit(make, vectors(), **clipped))
    early = fused(partial(SharedWithCheckpoint, False))
    assert_same(fit(early, vectors(), overlapping("backward"), **options), fit(early, vectors(), **options))
    late = fused(partial(SharedWithCheckpoint, True))
    for k in (1, 99):
        with pytest.raises(RuntimeError, match=r"net\.blocks\.0.*its weights were needed again"):
            fit(late, vectors(), overlapping("backward", k=k), **options)


class BackwardLate(Module):
    """A hook at the end of backward calls the backward of another loss, which was computed before: ``called`` by the module."""

    def __init__(self, *, called: bool) -> None:
        super().__init__(Stack())
        self.called = called

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        head: Any = self.net.head
        predicted = head(batch) if self.called else nn.functional.linear(batch, head.weight, head.bias)
        other = predicted.square().mean()
        batch = batch.clone().requires_grad_()
        batch.register_hook(lambda gradient: other.backward())
        return self.loss(batch)


def test_a_gradient_for_a_layer_that_is_updated_already_is_refused() -> None:
    for k in (1, 99):
        with pytest.raises(RuntimeError, match=r"net\.head.*(another gradient arrived|its weights were needed again)"):
            fit(fused(lambda: BackwardLate(called=False)), vectors(), overlapping("backward", k=k), recorded="losses")


@pytest.mark.rest("takes tenths of a second")
def test_a_layer_whose_other_backward_is_to_come_is_not_updated_yet() -> None:
    make = fused(lambda: BackwardLate(called=True))
    plain = fit(make, vectors(), recorded="losses")
    for k in (1, 99):
        assert_same(fit(make, vectors(), overlapping("backward", k=k), recorded="losses"), plain)


# ---------------------------------------------------------------------- what runs where


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
