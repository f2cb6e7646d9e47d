"""Where a step begins and ends, though nobody says so; other code that copies it, or removes or wraps what is around it."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import Tensor, nn
from torch.optim import optimizer as torch_optimizer

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Does


def with_norm() -> Module:
    stack = Stack()
    stack.blocks[1] = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16))
    return Module(stack)


program(
    "begin and end: without a backward, in weight averaging", tiers(long=["keep, k=1, simulated"]), max_epochs=3,
    callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1)],
    covers="for batch statistics it runs an epoch forward only, and then writes the weights: a fetch was still under way",
)(with_norm)  # fmt: skip


@program(
    "begin and end: a backward that does nothing",
    tiers("keep, k=1"),
    batches=partial(vectors, 9),
    accumulate_grad_batches=4,
)
class Skips(Module):
    """With accumulation no optimizer's step came to end it, and the engine was built anew for the next batch."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[bool] = []

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        if self.trainer.fit_loop.epoch_loop.batch_idx % 3 != 1:
            loss.backward()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(all(type(p) is nn.Parameter for p in self.parameters()))


for hook in ("on_fit_start", "on_train_start", "on_train_batch_end"):

    def copies(trainer: pl.Trainer, module: Any, *_: Any) -> None:
        if not hasattr(module, "seen"):
            copied = copy.deepcopy(trainer)
            module.seen = [all(type(p) is nn.Parameter for p in copied.lightning_module.parameters())]
            assert type(copied.strategy) is type(trainer.strategy)

    program(
        f"begin and end: a trainer copied in {hook}", tiers("keep, k=1"), callbacks=lambda hook=hook: [Does(**{hook: copies})],
        covers="locks of the engine cannot be copied, and callbacks lead to the trainer",
    )(lambda: Module(Stack()))  # fmt: skip


# ---------------------------------------------------------------------- what other code does

BOTH = tiers(
    rest=["forward, accumulated, clipped, two epochs", "backward, accumulated, two epochs"], long=["keep, k=1"]
)


class RemovesHooks(Callback):
    """Profilers and tests of others clear the hooks of all optimizers."""

    def on_train_batch_end(self, *_: Any) -> None:
        torch_optimizer._global_optimizer_pre_hooks.clear()
        torch_optimizer._global_optimizer_post_hooks.clear()


def can_be_saved(ours: Any) -> None:
    ours.trainer.strategy.connect(ours.module)
    assert ours.trainer._checkpoint_connector.dump_checkpoint(weights_only=False)["optimizer_states"]


program(
    "begin and end: hooks of all optimizers removed", BOTH, callbacks=lambda: [RemovesHooks()], batches=lambda: vectors(5),
    also=can_be_saved, covers="a run notices its steps without the hooks",
)(lambda: Module(Stack()))  # fmt: skip


class Clips(Callback):
    """Puts a clipping of its own on the precision plugin."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        def clip(optimizer: Any, value: float) -> None:
            for group in optimizer.param_groups:
                torch.nn.utils.clip_grad_norm_(group["params"], value / 2)

        trainer.precision_plugin.clip_grad_by_norm = clip


program(
    "begin and end: a clipping of one's own", BOTH, callbacks=lambda: [Clips()], batches=lambda: vectors(5),
    gradient_clip_val=0.02, refused={"backward, accumulated, two epochs": "ValueError: .*gradient_clip_val"}, repairable=False,
    covers="a method on the plugin itself is no other than that of a class",
)(lambda: Module(Stack()))  # fmt: skip


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


@program("begin and end: steps and hooks without a module", tiers(rest=["keep, k=1"]))
class Halved(Module):
    """What asks where a function is from finds None."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Halves(self.parameters(), lr=0.1)
