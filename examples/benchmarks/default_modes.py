"""What the defaults do with ordinary programs: the mode of updates, and the seconds of a step beside those of other modes.

The mode is the one that a real run chooses: each program trains a small model here, with the CPU treated as an accelerator.
The seconds are predicted by the package's own simulation, for machines whose times are given. All layers stay on the device, so
only updates and gradients cause waits. From the root of the repository::

    python -m examples.benchmarks.default_modes
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any, Literal, NamedTuple
from unittest import mock

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Wait
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan, make_plan
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Rates, Visit

LAYERS, STEPS = 28, 6
Mode = Literal["off", "forward", "backward"]


class Machine(NamedTuple):
    """Seconds of a forward, a backward, all updates on the host, and plain Lightning's step on the device."""

    forward: float
    backward: float
    updates: float
    plain_step: float


MACHINES = {
    "1.5B, bf16-mixed, 16,384 tokens, H100": Machine(0.157, 0.471, 1.54e9 * 28 / 175e9, 0.015),
    "8B, bf16-true, 16,384 tokens, H100": Machine(0.52, 1.55, 8.03e9 * 14 / 175e9, 0.034),
    "3B, bf16-mixed, 4,096 tokens, 24 GB": Machine(0.41, 1.23, 3.21e9 * 28 / 60e9, 0.09),
}
"""Forward and backward of 1.5B are those of the H100's record, updates what 28 or 14 bytes per parameter take of host memory."""

CLIPPING: dict[str, dict[str, Any]] = {
    "no clipping": {},
    "clip 1.0": {"gradient_clip_val": 1.0},
    "clip 1.0, accumulate 4": {"gradient_clip_val": 1.0, "accumulate_grad_batches": 4},
}


class Hooked(Callback):
    """Does something at a hook."""

    def __init__(self, hook: str, look: Callable[[Any], Any] = lambda module: None) -> None:
        setattr(self, hook, lambda trainer, module, *_: look(module))


def _norms(module: Any) -> list[Tensor]:
    return [p.grad.norm() for p in module.parameters() if p.grad is not None]


HOOKS: dict[str, tuple[Callable[[], list[Callback]], bool]] = {
    "no hook": (list, False),
    "on_validation_epoch_end": (lambda: [Hooked("on_validation_epoch_end")], False),
    "on_train_batch_end": (lambda: [Hooked("on_train_batch_end")], False),
    "EMA of each step": (lambda: [EMAWeightAveraging(decay=0.9)], True),
    "gradient norms before the step": (lambda: [Hooked("on_before_optimizer_step", _norms)], False),
}
"""A program's callbacks, and whether all weights are read after each step."""


class Small(pl.LightningModule):
    """A few layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.net(batch).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, fused=True)


def chosen(callbacks: list[Callback], options: dict[str, Any]) -> Mode:
    """The mode that a run of such a program chooses on an accelerator."""
    modes: list[Mode] = []

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
            modes.append(trainer.strategy._run.steps.overlap)

    trainer = pl.Trainer(
        strategy=SuperpipelineStrategy(k=1), accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[*callbacks, Looks()], **options,
    )  # fmt: skip
    with mock.patch("sp_lightning.trainer.update_facts._computes_on_host", return_value=False):
        trainer.fit(Small(), DataLoader(torch.ones(12, 2, 8), batch_size=None))  # type: ignore[arg-type]
    return modes[-1]


class _Read(Walk):
    """A hook reads all weights after each step."""

    def _end_step(self) -> None:
        super()._end_step()
        for done in self._source.updated.values():
            self.device.synchronize(done, Wait.READ_AFTER_UPDATE)


def seconds(plan: Plan, machine: Machine, mode: Mode, batches: int, *, reads: bool) -> float:
    """Returns the predicted seconds of one step, once steps take equally long.

    Args:
        plan: the layers.
        machine: its times.
        mode: when updates run.
        batches: the accumulated batches of a step.
        reads: whether all weights are read after each step.
    """
    visits = [Visit((layer,), machine.forward / LAYERS) for layer in plan.order]
    visits += [Visit((layer,), machine.backward / LAYERS, True, (layer,)) for layer in reversed(plan.order)]
    rate = plan.layers[0].gradient_bytes * LAYERS / machine.updates
    rates = Rates(upload=1e15, download=1e15, update=rate, host_memory=1e15)
    walk = (_Read if reads else Walk)(plan, visits * batches, rates, overlap=mode)
    for _ in range(STEPS):
        begun = walk.batch()
    return walk.ended - begun


def main() -> None:
    """Prints the table."""
    plan = make_plan(find_layers(nn.Sequential(*(nn.Linear(64, 64) for _ in range(LAYERS)))), k=LAYERS, k_prime=1)
    print("| | | mode | " + " | ".join(f"{name}: s, of plain, above the best" for name in MACHINES) + " |")
    print("|" + "---|" * (3 + len(MACHINES)))
    for clipping, options in CLIPPING.items():
        batches = options.get("accumulate_grad_batches", 1)
        for hook, (callbacks, reads) in HOOKS.items():
            mode, cells = chosen(callbacks(), options), []
            exact: tuple[Mode, ...] = ("off", "forward")  # by hand; "backward" is refused where it is not chosen here
            for machine in MACHINES.values():
                ours = seconds(plan, machine, mode, batches, reads=reads)
                best = min(seconds(plan, machine, each, batches, reads=reads) for each in {*exact, mode})
                plain = batches * (machine.forward + machine.backward) + machine.plain_step
                cells.append(f"{ours:.3f}, {plain / ours:.0%}, {ours / best - 1:.1%}")
            print(f"| {clipping} | {hook} | {mode} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore")
    main()
