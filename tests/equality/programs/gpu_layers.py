"""User code with layers that stay on the GPU, whose steps are divided by place."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.optim import AdamW, Optimizer

from tests.equality.programs.gpu_steps import made
from tests.equality.rows import Tiers, program, tiers
from tests.support.models import Block, Module, vectors
from tests.support.nets import Stepped
from tests.support.runs import Outcome

FUSED = partial(AdamW, lr=1e-2, fused=True)  # on the simulated device, both places have its bits
OFF = "off, 2 stay, simulated"
EACH = tiers(rest=[OFF], long=["forward, 2 stay, simulated"])


def stays(name: str, variants: Tiers = EACH, said: str | dict[str, str] = "", **more: Any) -> Any:
    refused = said if isinstance(said, dict) else dict.fromkeys(variants, said) if said else {}
    return program(f"gpu_layers: {name}", variants, refused=refused, **{"batches": partial(vectors, 5), **more})


stays(
    "every precision and clipping",
    tiers(long=[f"off, half stays{way}, simulated" for way in (", bf16-true", ", accumulated", ", clipped by value",
    ", clipped")]),
    covers="a step that is divided by place is one step",
)(partial(Stepped, FUSED))  # fmt: skip


def halved(ours: Outcome) -> None:
    assert ours.trainer.precision_plugin.scaler.get_scale() == 256.0  # type: ignore[union-attr]


class Overflows(Stepped):
    """The gradient of one layer is infinite in the second batch."""

    def __init__(self, where: str) -> None:
        super().__init__(FUSED)
        self.where = where

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight: Any = self.net.get_submodule(self.where).weight
        return super().training_step(batch, batch_idx) + (weight.sum() * 1e38 if batch_idx == 1 else 0.0)


for where, place in (("stem", "stays"), ("head", "is streamed")):
    stays(
        f"an infinity in a layer that {place}", tiers(rest=["off, 2 stay, 16-mixed, simulated"]), also=halved,
        covers="both places skip the step"
    )(partial(Overflows, where))  # fmt: skip


class ByHand(Stepped):
    """Manual optimization, with torch's clipping of all gradients; the optimizer may get a closure."""

    def __init__(self, *, closure: bool) -> None:
        super().__init__(FUSED)
        self.automatic_optimization, self.closure = False, closure

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()

        def evaluate() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            torch.nn.utils.clip_grad_norm_(self.parameters(), 0.05)
            return loss

        if self.closure:
            optimizer.step(closure=evaluate)
        else:
            evaluate()
            optimizer.step()


for closure in (False, True):
    stays(
        f"manual optimization{', by a closure' if closure else ''}", tiers(rest=[OFF]), covers="torch's clipping of both places"
    )(partial(ByHand, closure=closure))  # fmt: skip


@stays("layers of both places unfrozen in mid-run")
class Unfreezes(Stepped):
    """Their parameters are added to the optimizer."""

    def __init__(self) -> None:
        super().__init__(lambda ps: FUSED([p for p in ps if p.requires_grad]))
        self.net.blocks.requires_grad_(False)  # type: ignore[union-attr, operator]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2:
            blocks: Any = self.net.blocks
            self.trainer.optimizers[0].add_param_group({"params": list(blocks.requires_grad_().parameters())})


class LeavesOut(Stepped):
    """The third batch has no loss, or uses only the last block, so that layers that stay are not stepped."""

    def __init__(self, *, last: bool) -> None:
        super().__init__(FUSED)
        self.last = last

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx != 2:
            return super().training_step(batch, batch_idx)
        return self.net.blocks[-1](batch).square().mean() if self.last else None  # type: ignore[index, operator, union-attr]


for last in (False, True):
    stays(
        f"a batch that steps {'only streamed layers' if last else 'no layer'}", covers="a place without a step"
    )(partial(LeavesOut, last=last))  # fmt: skip


@stays("state loaded and the GPU lent in mid-run", tiers(rest=[OFF]))
class LoadsAndLends(Stepped):
    """Layers that stay leave a GPU that is released."""

    def __init__(self) -> None:
        super().__init__(FUSED)
        self.saved: Any = None

    def on_train_batch_end(self, *_: Any) -> None:
        strategy, optimizer = self.trainer.strategy, self.trainer.optimizers[0]
        if self.trainer.global_step == 2:
            self.saved = copy.deepcopy(optimizer.state_dict())
        if self.trainer.global_step == 4:
            optimizer.load_state_dict(self.saved)
        if hasattr(strategy, "gpu_released"):
            with strategy.gpu_released() as staying:
                assert staying == 0


JOINED = r"Mixed: Expected all tensors to be on the same device.*gpu_layers keeps 'net\.stem'.*Leave gpu_layers out"
for name, join in (
    ("mixes both places", lambda self, *_: (self.net.stem.bias + self.net.head.bias, None)[1]),
    ("joins all weights", lambda self, *_: (parameters_to_vector(self.parameters()), None)[1]),
):
    stays(
        f"code that {name}", {OFF: 1, "users, k=1, simulated": 2}, {OFF: JOINED}, repairable=False,
        covers="torch's own error, on a GPU, with a note; without gpu_layers it works",
    )(type("Joins", (Stepped,), {"on_train_batch_end": join}))  # fmt: skip
    stays(f"code in a step that {name}", tiers(rest=[OFF]), covers="all weights are on the GPU")(
        type("Joins", (Stepped,), {"on_before_backward": join})
    )


def prunes(**options: Any) -> Any:
    return lambda: [ModelPruning("l1_unstructured", parameter_names=["weight"], amount=0.3, **options)]


PRUNED = partial(Stepped, partial(torch.optim.SGD, lr=0.1))
stays(
    "ModelPruning of all layers together", {OFF: 1}, {OFF: JOINED + ".*use_global_unstructured=False"}, repairable=False,
    callbacks=prunes(use_lottery_ticket_hypothesis=False), covers="it joins all weights between steps",
)(PRUNED)  # fmt: skip
stays(
    "ModelPruning of each layer by itself", tiers(rest=[OFF]), covers="the remedy that the error names",
    callbacks=prunes(use_global_unstructured=False, use_lottery_ticket_hypothesis=False),
)(PRUNED)  # fmt: skip


class Counts(Optimizer):
    """Writes a setting of its groups in each step."""

    steps_each_parameter_alone = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            group["count"] += 1
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=0.1)
        return loss


class OfItsOwn(Counts):
    """No one knows what it does."""

    steps_each_parameter_alone = False


def two_groups(parameters: Any) -> Counts:
    parameters = list(parameters)
    return Counts([{"params": parameters[:6]}, {"params": parameters[6:]}])


DIVIDED = "ValueError: .*gpu_layers=2 steps some layers on the GPU and the others on the CPU: {}"
for name, make, said in (
    ("settings of a divided group written", Counts,
    r"RuntimeError: .*gpu_layers divides param_groups by place, but Counts\.step writes settings"),
    ("random numbers drawn in an order of places", made(lambda self, group, p: p.add_(torch.rand_like(p))),
    r"RuntimeError: .*gpu_layers divides param_groups by place, but Declared\.step draws random numbers"),
    ("LBFGS", torch.optim.LBFGS, DIVIDED.format("LBFGS steps all parameters together")),
    ("an unknown optimizer", OfItsOwn, DIVIDED.format("OfItsOwn is not known to step each parameter by itself")),
):  # fmt: skip
    stays(name, tiers(OFF), said, covers="refused by name, because a step cannot be divided")(partial(Stepped, make))
stays(
    "settings of groups in one place written", tiers(rest=[OFF]), covers="each group is stepped once"
)(partial(Stepped, two_groups))  # fmt: skip


class Halves(Stepped):
    """The first layers are frozen, or have an optimizer of their own."""

    def __init__(self, *, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen
        for p in list(self.parameters())[: 6 * frozen]:
            p.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        parameters = list(self.parameters())
        return torch.optim.LBFGS(parameters[6:]) if self.frozen else torch.optim.SGD(parameters[:6], lr=0.1)


for frozen in (False, True):
    stays(
        f"an optimizer of the layers that {'are streamed' if frozen else 'stay'}", tiers(rest=[OFF]), covers="it may be any"
    )(partial(Halves, frozen=frozen))  # fmt: skip

# ---------------------------------------------------------------------- forwards that run twice


class Writes(Block):
    """Writes weights in its forward: its own, a frozen number that nothing reads, or the first block's."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.count = nn.Parameter(torch.zeros(1), requires_grad=False)
        self.other: list[Any] = []  # a list, so that the module is no child

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.what == "its weight":
                self.inner.weight.mul_(0.9)
            elif self.what == "a number":
                self.count.add_(1)
            elif self.what == "a number, by .data":
                self.count.data.add_(1)
            elif self.what == "another's number" and self.other:
                self.other[0].count.add_(1)
        if self.what == "gradients" and torch.is_grad_enabled():
            super().forward(x.detach()).square().mean().backward()
        return super().forward(x)


def writing(what: str) -> Module:
    blocks = [Writes(what) for _ in range(4)]
    blocks[3].other.append(blocks[0])
    return Module(nn.Sequential(*blocks))


for what in ("its weight", "a number", "a number, by .data", "another's number", "gradients"):
    for stay in (1, 4) if what != "a number, by .data" else (1,):  # nothing shows the write of a weight that stays
        stays(
            f"a forward that writes {what}, where {stay} stay", tiers(rest=["recompute, k=1, simulated"]),
            r"Unrepeatable: .*(has been modified|changes the gradient)",
            strategy={"gpu_layers": stay}, repairable=False,
            covers="it runs again in backward: without an error, numbers were counted twice",
        )(partial(writing, what))  # fmt: skip
