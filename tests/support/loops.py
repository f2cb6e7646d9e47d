"""Loops without a Trainer: the same function runs with a stream and without one, and returns what it has computed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from sp_lightning import stream
from tests.support.runs import assert_equal

Loss = Callable[[Any], Tensor]


@dataclass
class Loop:
    """A training loop in one of the usual forms.

    Attributes:
        clip: the largest norm of all gradients; None for none.
        accumulate: the batches of one optimizer step.
        scale: True for a ``GradScaler`` and autocast to float16.
        bf16: True for autocast to bfloat16.
        schedule: True to step a scheduler.
        zero_first: True to reset gradients between forward and backward.
        evaluate: True to run a batch without gradients after each step.
        closure: True to run forward and backward in the optimizer's closure.
    """

    clip: float | None = None
    accumulate: int = 1
    scale: bool = False
    bf16: bool = False
    schedule: bool = False
    zero_first: bool = False
    evaluate: bool = False
    closure: bool = False

    def run(self, root: nn.Module, loss_of: Loss, optimizer: torch.optim.Optimizer, batches: Any) -> dict[str, Any]:
        losses, gradients = [], []
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2, enabled=self.scale)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer) if self.schedule else None
        cast: Any = nullcontext()
        if self.scale or self.bf16:
            cast = torch.autocast("cpu", torch.float16 if self.scale else torch.bfloat16)

        def forward_backward(batch: Any) -> Tensor:
            with cast:
                loss = loss_of(batch) / self.accumulate
            if self.zero_first:
                optimizer.zero_grad()
            scaler.scale(loss).backward()
            losses.append(loss.detach().clone())
            return loss

        for index, batch in enumerate(batches):
            if self.closure:
                optimizer.zero_grad()
                optimizer.step(partial(forward_backward, batch))
                continue
            forward_backward(batch)
            if (index + 1) % self.accumulate:
                continue
            if self.clip is not None:
                scaler.unscale_(optimizer)
                losses.append(torch.nn.utils.clip_grad_norm_(root.parameters(), self.clip))
            gradients.append([None if p.grad is None else p.grad.to_dense().clone() for p in root.parameters()])
            scaler.step(optimizer)
            scaler.update()
            if scheduler is not None:
                scheduler.step()
            if not self.zero_first:
                optimizer.zero_grad()
            if self.evaluate:
                root.eval()
                with torch.no_grad():
                    losses.append(loss_of(batch).clone())
                root.train()
        return {"losses": losses, "gradients": gradients, "scaler": scaler.state_dict()}


def trained(make: Callable[[], Any], batches: Any, loop: Loop, streamed: Callable[..., Any]) -> dict[str, Any]:
    """Trains a module in a loop, in a context that ``streamed`` makes. Returns all results, and whether weights are ordinary."""
    seed_everything(7, verbose=False)
    module = make()
    root = getattr(module, "net", module)
    optimizer = module.configure_optimizers()
    batches = copy.deepcopy(batches)
    with streamed(root, optimizer):
        found = loop.run(root, module.loss, optimizer, batches)
    ordinary = {type(p) for p in module.parameters()}
    return {
        **found,
        "state": dict(module.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "rng": torch.get_rng_state(),
        "classes": ordinary == {nn.Parameter} or ordinary,
    }


def assert_streams(make: Callable[[], Any], batches: Any, loop: Loop, **options: Any) -> None:
    """Asserts that a loop with a stream has the bits of the same loop without one."""
    ours = trained(make, batches, loop, partial(stream, **options))
    assert_equal(ours, trained(make, batches, loop, lambda *_: nullcontext()), "loop")


def tie(player: Any, agent: Any) -> None:
    """As sheeprl's agents do."""
    for own, other in zip(player.parameters(), agent.parameters(), strict=True):
        own.data = other.data


def acts(agent: Any, player: Any, optimizer: Any, x: Tensor, backward: Any = Tensor.backward) -> Tensor:
    """Calls the player, on the CPU, and then trains the agent."""
    with torch.no_grad():
        found: Tensor = player(x)
    backward(agent(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    return found
