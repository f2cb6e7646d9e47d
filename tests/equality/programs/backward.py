"""User code that runs in a backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.equality.rows import program, tiers
from tests.support.models import Module, Stack

# Not in poisoned variants: they hide the host's weights in a step, and these steps write them.
STEPS = tiers(
    "users' path, k=1, k'=1", rest=["users' path, k=all, k'=1", "simulated, k=1"], long=["simulated, k=2, k'=2"]
)


class StepsInBackward(Module):
    """Steps an optimizer of its fourth block when gradients arrive at the second one."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.late = torch.optim.SGD(self.net.blocks[3].parameters(), lr=0.1)
        self.listen()

    def listen(self) -> None:
        self.net.blocks[1].register_full_backward_pre_hook(lambda *_: self.late.step())

    def on_train_batch_end(self, *_: Any) -> None:
        self.late.zero_grad()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        late = {id(p) for group in self.late.param_groups for p in group["params"]}
        return torch.optim.SGD([p for p in self.parameters() if id(p) not in late], lr=0.1)


@program("backward: a step of a block whose backward is over, in a hook of another block", STEPS)
class InAnotherBlock(StepsInBackward):
    """The gradients were in flight then, and the step found none: the block was never trained."""


@program("backward: a step in a hook of a weight", STEPS)
class InATensorHook(StepsInBackward):
    """The hook runs before the weight's own gradient is accumulated."""

    def listen(self) -> None:
        weight = self.net.blocks[1].inner.weight
        weight.register_hook(lambda gradient: self.late.step())


@program("backward: a step of two blocks in a hook of the first one's accumulated gradient", STEPS)
class InAccumulation(StepsInBackward):
    """The other block's gradients may have arrived, but on plain Lightning they come after this hook."""

    def listen(self) -> None:
        self.late.add_param_group({"params": [*self.net.blocks[2].parameters()]})
        last = [*self.net.blocks[3].parameters()][-1]
        last.register_post_accumulate_grad_hook(lambda _: self.late.step())


@program("backward: a hook of another block uses what a hook of an accumulated gradient has noted", STEPS)
class UsesANote(Module):
    """The hook of the accumulated gradient ran later than the other one, when the gradient was in CPU memory."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.scale = 1.0
        self.net.blocks[2].inner.weight.register_post_accumulate_grad_hook(self.note)
        self.net.blocks[1].register_full_backward_pre_hook(lambda _, gradients: (gradients[0] * self.scale,))

    def note(self, weight: nn.Parameter) -> None:
        assert weight.grad is not None
        self.scale = 1 / (1 + float(weight.grad.norm()))


@program(
    "backward: gradients that a hook of another block changes if they are there",
    {**STEPS, "bf16-mixed, k=1": 2, "updated under backward, not accumulated": 2},
    refused={
        "updated under backward, not accumulated": 'RuntimeError: .*"backward" had updated layer .* when, in the same backward, '
        "a hook used p.grad of one of its weights"
    },
)  # fmt: skip
class ChangesGradients(Module):
    """Gradients in flight were not there for the hook, and changes of earlier ones had no effect."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.seen: list[Any] = []
        self.net.blocks[1].register_full_backward_hook(lambda *_: self.change())

    def change(self) -> None:
        for at in (3, 2, 1):
            for p in self.net.blocks[at].parameters():
                self.seen.append(None if p.grad is None else p.grad.clone())
                if at == 3:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.mul_(0.5)
