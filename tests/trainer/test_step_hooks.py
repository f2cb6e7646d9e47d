"""Other code removes or wraps what a run has put around optimizers' steps and clipping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.optim import optimizer as torch_optimizer

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused
from tests.support.tiers import first


def of_a_stack() -> Module:
    return Module(Stack())


class RemovesHooks(Callback):
    """Profilers and tests of others clear the hooks of all optimizers."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch_optimizer._global_optimizer_pre_hooks.clear()
        torch_optimizer._global_optimizer_post_hooks.clear()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["backward", "forward", "off"], "backward", why="the other modes"))
def test_other_code_removes_the_hooks_of_all_optimizers(overlap: Any, tmp_path: Path) -> None:
    make = fused(of_a_stack)
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    ours = fit(make, vectors(5), strategy, callbacks=[RemovesHooks()], recorded="losses")
    assert_same(ours, fit(make, vectors(5), callbacks=[RemovesHooks()], recorded="losses"))
    ours.trainer.save_checkpoint(tmp_path / "whole.ckpt")


class Clips(Callback):
    """Puts a clipping of its own on the precision plugin."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def clip(optimizer: Any, value: float) -> None:
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], value / 2)

        trainer.precision_plugin.clip_grad_by_norm = clip


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", first(["forward", "backward", "off"], "forward", why="the other modes"))
def test_other_code_clips_in_its_own_way(overlap: Any) -> None:
    """A method on the plugin itself is no other than that of a class."""
    make, options = fused(of_a_stack), {"gradient_clip_val": 0.02}
    plain = fit(make, vectors(5), callbacks=[Clips()], recorded="losses", **options)
    if overlap == "backward":
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        with pytest.raises(ValueError, match="gradient_clip_val"):
            fit(make, vectors(5), strategy, callbacks=[Clips()], recorded="losses", **options)
        return
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    assert_same(fit(make, vectors(5), strategy, callbacks=[Clips()], recorded="losses", **options), plain)


class Halves(torch.optim.SGD):
    """Its step and its hook are in no module, as functions that `exec` has made in a namespace of its own."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        made: dict[str, Any] = {}
        exec("def hook(optimizer, args, options):\n    return None", made)
        self.register_step_pre_hook(made["hook"])

    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


Halves.step.__module__ = None  # type: ignore[assignment]


class Halved(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Halves(self.parameters(), lr=0.1)


@pytest.mark.rest("takes tenths of a second")
def test_steps_and_hooks_without_a_module() -> None:
    ours = fit(lambda: Halved(Stack()), vectors(3), SuperpipelineStrategy(k=1), recorded="losses")
    assert_same(ours, fit(lambda: Halved(Stack()), vectors(3), recorded="losses"))
