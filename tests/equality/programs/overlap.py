"""User code beside updates that run in the background: it changes optimizers, gradients and weights, or looks at them."""

from __future__ import annotations

import copy
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from lightning.pytorch.callbacks import (
    Callback,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    StochasticWeightAveraging,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.updates.updating import Updating
from sp_lightning.core.weights.layer import StreamedLayer
from tests.equality.rows import Tiers, program, tiers
from tests.support.engine import at_once
from tests.support.models import CASES, Block, vectors
from tests.support.moments import At
from tests.support.runs import Outcome, fit

LATE = tiers(long=["forward, simulated", "backward, simulated"])
EACH = {"forward": 3, "backward": 3, **LATE}
ONE = {**LATE, "forward, simulated": 2}
AROUND = {**EACH, "forward, k=all, simulated": 3, "backward, k=all": 3}
BACKWARD = tiers("backward", long=["backward, simulated", "backward, k=all", "backward, k=all, simulated"])
CLIPPED = tiers(rest=["forward, clipped"])
Deep = partial(At, Block, depth=5)


def six() -> Any:
    return vectors(6)


def overlap(name: str, variants: Tiers, **more: Any) -> Callable[[Any], Any]:
    return program(f"overlap: {name}", variants, **more)


# ---------------------------------------------------------------------- code between two steps


class Listed(At):
    """Its optimizer's betas are a list, which code can write into."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return optimizer


def after_step(name: str, variants: Tiers = LATE, **more: Any) -> Callable[[Any], Any]:
    return overlap(name, variants, at="on_train_batch_end", on=partial(Listed, Block, depth=5), batches=six, **more)


@after_step("state of an earlier step loaded", ONE)
def _(m: Any) -> None:
    """As a callback does that returns to an earlier state; torch's loading never reads the present one."""
    if m.batch == 1:
        m.kept[:] = [copy.deepcopy(m.optimizer.state_dict())]
    elif m.batch == 3:
        m.optimizer.load_state_dict(m.kept[0])
    elif m.batch == 4:
        m.trainer.strategy.load_optimizer_state_dict({"optimizer_states": [m.kept[0]]})
        m.optimizer.param_groups[0]["fused"] = True  # which plain does not switch on again


@after_step("groups exchanged", ONE)
def exchanges_groups(m: Any) -> None:
    """The step is that of the groups that are there then."""
    m.optimizer.param_groups = [{**group, "lr": group["lr"] / 2} for group in m.optimizer.param_groups]


@after_step("groups exchanged in a hook of the step")
def _(m: Any) -> None:
    """While updates are under way."""
    if m.batch == 0:
        m.optimizer.register_step_post_hook(lambda *_: exchanges_groups(m))


@after_step("settings written in place")
def _(m: Any) -> None:
    """An update has the settings of its step."""
    m.optimizer.param_groups[0]["betas"][0] /= 2


@after_step("a weight copied")
def _(m: Any) -> None:
    """The copy is an ordinary parameter."""
    m.copied = [copy.deepcopy(m.net[4].inner.weight)]
    assert type(m.copied[0]) is nn.Parameter


@after_step("state made anew")
def _(m: Any) -> None:
    """What was noted of the old one is not written into the new one."""
    if m.batch == 2:
        m.optimizer.state = defaultdict(dict)


@after_step("optimizers exchanged for themselves")
def _(m: Any) -> None:
    """Lightning's wrapper takes the class that the optimizer has at this moment."""
    m.trainer.optimizers = m.trainer.optimizers
    m.seen.append(m.optimizers().state[m.net[4].inner.weight]["exp_avg"].clone())


@after_step("parameters made of a weight's class")
def _(m: Any) -> None:
    """``type(p)`` is the class of a parameter that waits."""
    weight = m.net[4].inner.weight
    m.seen.append((type(weight)(weight.data * 2) * 2).detach())


@overlap("weights as keys", EACH, at="after_forward", on=Deep, batches=six)
def _(m: Any) -> None:
    """A dictionary of parameters is asked while some of its keys are being updated."""
    m.kept[:] = m.kept or [{p: p.detach().clone() for p in m.parameters()}]
    m.seen.append([(p - m.kept[0][p]).detach().norm() for p in m.parameters() if p in m.kept[0]])


@overlap("the trainer copied within a step", tiers(rest=["forward"], long=["off"]), at="on_before_zero_grad", on=Deep)
def _(m: Any) -> None:
    """Locks and threads of updates are not copied."""
    copy.deepcopy(m.trainer)


class Looks(At):
    """Looks at one thing in each batch, by an old reference, through the optimizer or through Lightning."""

    def __init__(self) -> None:
        super().__init__(Block, depth=5, start=Looks.look)
        self.kept.append(self.net[4].inner.weight)

    def look(self) -> None:
        (weight,), optimizer = self.kept, self.optimizer
        looks: list[Callable[[], Any]] = [
            lambda: torch._foreach_norm([weight]),
            lambda: weight.detach().clone(),
            lambda: weight.grad.clone(),
            lambda: weight.data.sum(),
            lambda: [value["exp_avg"].clone() for value in optimizer.state.values()],
            lambda: optimizer.state_dict()["state"][3]["exp_avg_sq"].clone(),
            lambda: [p.detach().clone() for p in self.parameters()],
        ]
        self.seen += [looks[self.batch]()] if self.batch else []


overlap(
    "looks at anything", tiers(rest=["forward", "forward, simulated"]), batches=lambda: vectors(7),
    covers="who looks waits for the update, and sees plain Lightning's values",
)(Looks)  # fmt: skip

# ---------------------------------------------------------------------- state that user code holds

STATE: dict[str, Callable[[Any], Any]] = {
    "state": lambda optimizer: optimizer.state,
    "entries": lambda optimizer: [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]],
    "state_dict": lambda optimizer: optimizer.state_dict()["state"],
    "tensors": lambda optimizer: [each for entry in optimizer.state.values() for each in entry.values()],
    "vars": lambda optimizer: partial(vars(optimizer).get, "state"),
    "vars, later": lambda optimizer: lambda: vars(optimizer)["state"],
    "groups": lambda optimizer: [group["lr"] for group in optimizer.param_groups],
}
HOLDERS = (
    "backward", "forward", "forward, half stays", "forward, on the GPU, simulated", "backward, on the GPU, simulated",
)  # fmt: skip
FREEING = ("backward, no callback", "backward, on the GPU, simulated")


class Holds(At):
    """Takes a part of its optimizer, and looks at it in each step and, with ``after``, after each step."""

    def __init__(self, what: str, *, after: bool, **moments: Any) -> None:
        ends = {"on_train_batch_end": Holds.hold} if after else {}
        super().__init__(Block, depth=5, **{"on_train_start": Holds.hold, "start": Holds.look, **ends, **moments})
        self.what = what

    def hold(self, before: int = 1) -> None:
        if self.batch >= 0:  # state has been looked at before it is taken
            self.look()
        if self.batch < before:
            self.kept[:] = [STATE[self.what](self.optimizer)]

    def look(self) -> None:
        (held,) = self.kept or [()]
        held = held() if callable(held) else held
        self.seen.append(copy.deepcopy(list(held.values()) if isinstance(held, dict) else held))


class HoldsInBackward(Holds):
    """Takes it before each of the first two steps, of which the second has state, and looks at it in backward as well."""

    def __init__(self, what: str) -> None:
        super().__init__(what, after=False, start=partial(Holds.hold, before=2))
        self.net[1].register_forward_hook(lambda *call: call[2].register_hook(lambda _: self.look()) and None)


@contextmanager
def logged() -> Iterator[list[str]]:
    """The strategy's log."""
    found, log = list[str](), logging.getLogger("lightning.pytorch.superpipeline")
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield found
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def held(times: int, ours: Outcome) -> None:
    assert "".join(ours.extra["inside"]).count("other code holds AdamW.state") == times


for what in STATE:
    one = what in ("state", "entries")
    overlap(
        f"{what} of an optimizer held from its first step on", {**dict.fromkeys(HOLDERS, 3), "backward": 2 if one else 3,
        "forward, half stays": 2 if one else 3}, inside=logged,
        also=partial(held, 1) if what == "state" else partial(held, 0) if what == "groups" else lambda ours: None,
        covers="state that user code holds is up to date whenever it looks, and costs the overlap only then",
    )(lambda what=what: Holds(what, after=True))  # fmt: skip
    overlap(
        f"{what} of an optimizer held, and gradients freed", tiers(*["backward, no callback"] * (what == "state"),
        long=["backward, on the GPU, no callback, simulated"]),
        covers="nothing looks after the step, so that gradients are freed in backward",
    )(lambda what=what: Holds(what, after=False))  # fmt: skip
    if what != "vars, later":  # refused, as "state needed in backward" is
        overlap(
            f"{what} of an optimizer held and read in backward", {**dict.fromkeys(FREEING, 3),
            "backward, on the GPU, simulated": 2 if one else 3},
            covers="a layer whose state user code holds is updated after backward, if its gradients were to be freed as well",
        )(partial(HoldsInBackward, what))  # fmt: skip

# ---------------------------------------------------------------------- code around backward


@overlap("settings written in the step and before backward", AROUND, batches=six)
class SetsInStep(At):
    """A warm-up by hand."""

    def __init__(self) -> None:
        super().__init__(Block, start=SetsInStep.rate)

    def rate(self) -> None:
        self.optimizer.param_groups[0]["lr"] = 1e-2 / (self.batch + 1)

    def on_before_backward(self, loss: Tensor) -> None:
        self.optimizer.param_groups[0]["weight_decay"] = 0.1 * float(self.trainer.global_step)


@overlap("another backward in the step", AROUND, batches=six)
class BackwardBefore(At):
    """As adversarial training has it."""

    def loss(self, batch: Any) -> Tensor:
        x = batch.clone().requires_grad_()
        super().loss(x).backward()
        self.zero_grad()
        return super().loss(batch + 0.1 * x.grad.sign())


@overlap("gradients of weights that no optimizer has", AROUND, batches=six)
class StraysFromOptimizer(At):
    """They stay, step after step."""

    def __init__(self) -> None:
        super().__init__(Block, on_train_batch_end=StraysFromOptimizer.look)

    def look(self) -> None:
        self.seen += [p.grad.clone() for name, p in self.named_parameters() if "inner" not in name]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if "inner" in name], lr=0.1)


@overlap("gradients that are never set to None", EACH, batches=six)
class OwnZeroGrad(At):
    """They add up."""

    def optimizer_zero_grad(self, *args: Any) -> None:
        """Gradients go on from step to step."""


def triples(m: Any) -> None:
    for p in m.parameters():
        p.grad.data.mul_(3)


@overlap(
    "gradients written at the end of backward", {**CLIPPED, "forward, simulated": 3, "backward": 2},
    inside=lambda: mock.patch.object(Device, "later", at_once),
    refused={"backward": "ValueError: .*ScalesInBackward.backward may look at gradients or weights before the step"},
)  # fmt: skip
class ScalesInBackward(At):
    """No version shows it, and their norms are computed already."""

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        triples(self)


@overlap("gradients written in a hook of a weight", CLIPPED, inside=lambda: mock.patch.object(Device, "later", at_once))
class HooksLate(At):
    """The hook is registered in the first step, and their norms are computed already."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.net[0].first.weight.register_post_accumulate_grad_hook(lambda _: self.scale())
        return super().training_step(batch, batch_idx)

    def scale(self) -> None:
        for p in self.net[3].parameters():
            p.grad.data.mul_(3)


@overlap(
    "a step of the module's own", {"forward, simulated": 3, "backward": 2},
    refused={"backward": "ValueError: .*OwnStep.optimizer_step may look at gradients or weights before the step"},
)  # fmt: skip
class OwnStep(At):
    """It could decide on gradients before the step."""

    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@overlap("memory given to weights before a forward", {
    **tiers("backward", "backward, bf16-mixed"), **tiers(rest=["forward", "off"], long=["forward, bf16-mixed",
    "off, bf16-mixed"]),
}, at="start")  # fmt: skip
def _(m: Any) -> None:
    """``vector_to_parameters``: at the end of the step its value was taken once more, over the update of backward."""
    weights = [m.net[2].first.weight, m.net[2].second.weight]
    m.kept[:] = [1.001 * nn.utils.parameters_to_vector(weights).detach()]
    nn.utils.vector_to_parameters(m.kept[0], weights)


class Scheduled(At):
    """The schedule writes a learning rate, which is a tensor, right after each step, while its updates are under way."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(1e-2), weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


overlap(
    "a learning rate that is a tensor", {**LATE, "off, on the GPU, simulated": 3, "forward, on the GPU, simulated": 3},
    covers="it is that of the step",
)(Scheduled)  # fmt: skip


@overlap("hooks of the step", {"forward": 1, "backward": 2}, refused={"backward": "ValueError: .*step hooks"})
class HooksSteps(At):
    """They run once for each step, around all of it."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        for place in ("pre", "post"):
            getattr(optimizer, f"register_step_{place}_hook")(partial(self.look, place))
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def look(self, place: str, optimizer: Any, *_: Any) -> None:
        state = [copy.deepcopy(dict(values)) for values in optimizer.state.values()]
        self.seen.append([place, self.trainer.global_step, len(optimizer.param_groups), state])


class Late(At):
    """One weight of a layer is used from the third step on."""

    def __init__(self) -> None:
        super().__init__()
        self.net[3].late = nn.Parameter(torch.ones(16))

    def loss(self, batch: Any) -> Tensor:
        output = self.net(batch)
        return (output * self.net[3].late if self.batch > 1 else output).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


overlap(
    "a first gradient that comes late", tiers(rest=["forward", "backward", "by default, simulated"]), batches=six, fusible=False,
    covers="torch's fused SGD fails then, so that this step is the user's",
)(Late)  # fmt: skip


@overlap(
    "a step without a backward of its second batch",
    tiers(rest=["forward, accumulated, bf16-mixed, simulated"], long=["forward, accumulated, simulated",
    "backward, accumulated, simulated",
                "backward, accumulated, bf16-mixed, simulated"]), batches=six,
)  # fmt: skip
class SkipsBackward(At):
    """Its forward has fetched layers, and their updates wait for that."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


# ---------------------------------------------------------------------- gradients of scaled steps


def scales(init: float) -> Callable[[Any], None]:
    def scale(m: Any) -> None:
        scaler = m.trainer.precision_plugin.scaler
        scaler.load_state_dict({**scaler.state_dict(), "scale": init, "backoff_factor": 2.0**-20})

    return scale


class KeepsGradients(At):
    """What ``p.grad`` is after each step. ``stray``: with a parameter that is not the module's."""

    def __init__(self, optimizer: str = "AdamW", **moments: Any) -> None:
        super().__init__(Block, on_train_batch_end=KeepsGradients.look, **moments)
        self.how, self.stray = optimizer, [nn.Parameter(torch.ones(16))] if optimizer == "stray" else []

    def look(self) -> None:
        self.seen += [p.grad.clone() for p in self.parameters() if p.grad is not None]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch * self.stray[0] if self.stray else batch)

    def configure_optimizers(self) -> Any:
        fused = {"fused": True} if self.how != "AdamW" else {}
        return torch.optim.AdamW([*self.parameters(), *self.stray], lr=1e-2, **fused)


for init in (2.0**8, 2.0**40):
    for how in ("AdamW", "unscales by itself"):
        ways = ["forward, 16-mixed, simulated", *["forward, 16-mixed, clipped, simulated"] * (how == "AdamW")]
        overlap(
            f"gradients after a step, {how}, scaled by {init:g}", tiers(long=ways),
            batches=six, covers="after whole steps and, with the larger scale, after skipped ones",
        )(lambda how=how, init=init: KeepsGradients(how, on_train_start=scales(init)))  # fmt: skip
overlap(
    "gradients after a step that is not taken apart", tiers(rest=["forward, clipped"], long=["forward"]), batches=six,
    covers="a parameter that is not the module's keeps a step whole, and its gradients are clipped all the same",
)(lambda: KeepsGradients("stray"))  # fmt: skip

# ---------------------------------------------------------------------- what is used after its update

UPDATED = r"RuntimeError: .*had updated layer 'net\.{}' when.*its weights were needed again"


class UsesUpdated(At):
    """A hook in backward uses a weight of the last layer, which is updated by then, captured before the run or in the step."""

    def __init__(self, use: Callable[[Any], None], *, anew: bool) -> None:
        super().__init__(Block, depth=5, **{"start" if anew else "init": UsesUpdated.take})
        self.use = use
        self.net[1].register_forward_hook(lambda *call: call[2].register_hook(self.late) and None)

    def take(self) -> None:
        self.kept[:] = [next(self.net[4].parameters())]

    def late(self, _: Tensor) -> None:
        self.use(self.kept[0])


USES: dict[str, Callable[[Any], Any]] = {
    "its data written": lambda p: p.data.mul_(1.5),
    "read": lambda p: p.detach().sum(),
    "copied": copy.deepcopy,
    "asked for its gradient": lambda p: p.grad,
}


@torch.no_grad()
def in_place(p: Any) -> None:
    p.mul_(1.5)


for name, use in {**USES, "written in place": in_place}.items():
    overlap(
        f"a weight that is updated, {name}", BACKWARD, refused=dict.fromkeys(BACKWARD, UPDATED.format(4)),
        covers="a write to the host's memory came after the update that it had to come before, or was lost in it",
    )(lambda use=use: UsesUpdated(use, anew=False))  # fmt: skip
overlap(
    "a weight that is updated, taken in the step and written", BACKWARD, refused=dict.fromkeys(BACKWARD, UPDATED.format(4)),
    covers="while the layer was on the device still, the write and the update were in a race, and one was lost",
)(lambda: UsesUpdated(USES["its data written"], anew=True))  # fmt: skip


class AtTheEnd(At):
    """Code runs when the gradient of the batch arrives, and all layers are updated."""

    def __init__(self, block: Callable[[], nn.Module] = Block, **more: Any) -> None:
        super().__init__(block, loss=AtTheEnd.followed, **more)

    def followed(self, batch: Tensor) -> Tensor:
        batch = batch.clone().requires_grad_()
        batch.register_hook(lambda _: self.late(batch))
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def late(self, batch: Tensor) -> None:
        raise NotImplementedError


class TakesData(nn.Linear):
    """Without gradients its forward takes the weight's ``.data``, which could be written."""

    def __init__(self) -> None:
        super().__init__(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight if torch.is_grad_enabled() else self.weight.data, self.bias)


TWO = tiers("backward", rest=["backward, k=all"])


@overlap("a layer that is updated, called", TWO, refused=dict.fromkeys(TWO, UPDATED.format(3)))
class CallsUpdated(AtTheEnd):
    """Where its slot still had the weights, those were taken for written, and the update was lost."""

    def __init__(self) -> None:
        super().__init__(TakesData)

    def late(self, batch: Tensor) -> None:
        with torch.no_grad():
            self.net[3](batch.detach())


class BackwardLate(AtTheEnd):
    """A hook at the end of backward runs the backward of another loss, which was computed before."""

    called = True

    def followed(self, batch: Tensor) -> Tensor:
        last: Any = self.net[3].second
        output = self.net[3](batch) if self.called else nn.functional.linear(batch, last.weight, last.bias)
        self.kept[:] = [output.square().mean()]
        return super().followed(batch)

    def late(self, batch: Tensor) -> None:
        self.kept[0].backward()


@overlap("another backward to come, of a called layer", tiers(rest=["backward", "backward, k=all"]))
class BackwardToCome(BackwardLate):
    """The layer is not updated before it."""

    def __init__(self) -> None:
        super().__init__(lambda: At().net[0])
        self.own_loss = BackwardToCome.followed


@overlap(
    "another backward to come, of a weight", TWO,
    refused=dict.fromkeys(TWO, r"RuntimeError: .*net\.3.*(another gradient arrived|its weights were needed again)"),
)  # fmt: skip
class GradientToCome(BackwardToCome):
    """Nothing told of it, and the layer is updated."""

    called = False


@overlap(
    "state needed in backward", tiers("backward"),
    refused={"backward": r"RuntimeError: .*had updated layer 'net\.\d.*the optimizer's state was needed"},
)  # fmt: skip
class ReadsState(At):
    """Layers are updated then."""

    def __init__(self) -> None:
        super().__init__(Block, depth=6)
        self.net[1].register_forward_hook(
            lambda *call: call[2].register_hook(lambda _: self.seen.append(len(self.optimizer.state))) and None
        )


NEEDED = {"backward": 2, "forward": 3, "backward, k=all": 3}


@overlap(
    "a weight used once more, detached",
    NEEDED,
    refused={"backward": r"RuntimeError: .*net\.4.*optimizer_overlap=\"forward\""},
)
class Detached(At):
    """Below its own layer: backward needs it again after its update, unless it is on the device still."""

    def __init__(self) -> None:
        super().__init__(Block, depth=5)

    def loss(self, batch: Any) -> Tensor:
        x = nn.functional.linear(self.net[0](batch), self.net[4].inner.weight[:16].detach())
        for block in self.net[1:]:
            x = block(x)
        return x.square().mean()


class SharedWithCheckpoint(At):
    """The first block is used inside a reentrant checkpoint, and outside, before or after it."""

    def __init__(self, *, last: bool) -> None:
        super().__init__(Block, depth=7)
        self.eval()
        self.last = last

    def loss(self, batch: Any) -> Tensor:
        net: Any = self.net
        first, second, third, *others = net
        x = third(batch) if self.last else first(third(batch))
        x = checkpoint(nn.Sequential(first, second), x, use_reentrant=True)
        for block in others:
            x = block(x)
        return (first(x) if self.last else x).square().mean()  # type: ignore[no-any-return]


for last in (False, True):
    both = {"backward": 3, "backward, k=all": 3}
    overlap(
        f"a layer in a checkpoint and {'after' if last else 'before'} it", {"forward, clipped": 3, **both},
        inside=lambda: mock.patch.object(Device, "later", at_once),
        covers="its second gradient comes after the norm of the first one",
        refused=dict.fromkeys(both, r"RuntimeError: .*net\.0.*its weights were needed again") if last else {},
    )(lambda last=last: SharedWithCheckpoint(last=last))  # fmt: skip


class Adapted(nn.Module):
    """A frozen weight with two adapters, of which one is used and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) + self.adapters[self.used](x))


class SwitchesAdapters(At):
    """A forward with each adapter in one step: the backward of the second one's comes first. ``drops`` the first one's graph."""

    def __init__(self, *, drops: bool) -> None:
        super().__init__(Adapted)
        self.drops = drops

    def used(self, number: int, batch: Any) -> Tensor:
        for block in self.net:
            block.used = number
            for index, adapter in enumerate(block.adapters):
                adapter.requires_grad_(index == number)
        return self.net(batch).square().mean()  # type: ignore[no-any-return]

    def loss(self, batch: Any) -> Tensor:
        first, second = self.used(0, batch), self.used(1, batch)
        return second + (float(first.detach()) if self.drops else first)


@contextmanager
def early() -> Iterator[set[str]]:
    """The layers that are updated in backward."""
    found, begin = set[str](), Updating.before_early_update

    def noted(self: Updating, layer: StreamedLayer) -> None:
        found.add(layer.name)
        begin(self, layer)

    with mock.patch.object(Updating, "before_early_update", noted):
        yield found


def some_early(ours: Outcome) -> None:
    assert ("net.2" in ours.extra["inside"]) == ours.module.drops  # where nothing comes after it


for drops in (False, True):
    overlap(
        f"two forwards of other weights{', of which one has no backward' if drops else ''}",
        tiers(rest=["backward"], long=["backward, simulated"]), inside=early, also=some_early,
        covers="no layer is updated before the backward of all its calls: frozen weights were refused to the first forward's",
    )(lambda drops=drops: SwitchesAdapters(drops=drops))  # fmt: skip

# ---------------------------------------------------------------------- what cannot be


class Steps(At):
    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make and self.make(self.parameters())


def no_overlap(name: str, mode: str, said: str, make: Any, **more: Any) -> None:
    overlap(
        f"none, {name}", tiers(mode), refused={mode: f"ValueError: .*{said}"}, covers="refused before the first step", **more
    )(make)  # fmt: skip


class Hook(Callback):
    def on_after_backward(self, *_: Any) -> None:
        """Could look at gradients."""


no_overlap(
    "not fused", "forward",
    r"AdamW does not run fused \(foreach=True\)\. Leave that out, and AdamW runs fused, as with fused=True, or use Sup",
    lambda: Steps(partial(torch.optim.AdamW, foreach=True)), fusible=False,
)  # fmt: skip
no_overlap("LBFGS", "forward", r"LBFGS is not one of torch's Adam.*\. Use Sup", CASES["lbfgs"].make, fusible=False)
no_overlap("manual optimization", "backward", "manual", CASES["gan"].make)
no_overlap("clipped by norm", "backward", "gradient_clip_val=1.0", At, gradient_clip_val=1.0)
no_overlap("a scaler", "backward, 16-mixed", "scaler", At)
no_overlap("a hook on gradients", "backward", r"Hook\.on_after_backward", At, callbacks=lambda: [Hook()])
no_overlap(
    "averages that step without a backward", "backward", r"StochasticWeightAveraging steps without a backward.*\"forward\"",
    At, callbacks=lambda: [StochasticWeightAveraging(swa_lrs=1e-3)], repairable=False,
)  # fmt: skip
overlap(
    "no optimizer", tiers("forward", "backward"), fusible=False, covers="there is nothing to update"
)(lambda: Steps(None))  # fmt: skip


@overlap("another run within a step", tiers(rest=["forward"]), at="on_train_start", on=Deep)
def _(m: Any) -> None:
    """Each run has hooks on all optimizers' steps; those of others are not users'."""
    fit(At, vectors(), SuperpipelineStrategy(optimizer_overlap="backward"), recorded="losses")


@contextmanager
def slow() -> Iterator[None]:
    """Each update takes its time."""
    submit = BackgroundUpdates.submit

    def late(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.002), work())[1], *then)  # type: ignore[func-returns-value]

    with mock.patch.object(BackgroundUpdates, "submit", late):
        yield


@overlap("weights read by other threads", tiers(long=["forward"]), inside=slow, batches=lambda: vectors(9))
class ReadsInThreads(At):
    """Several threads wait for the same updates: none goes on before they are done."""

    def __init__(self) -> None:
        super().__init__(Block, depth=5, on_fit_start=ReadsInThreads.begin, on_fit_end=ReadsInThreads.end)
        self.ended = threading.Event()
        self.kept += self.parameters()
        self.threads = [threading.Thread(target=self.read) for _ in range(3)]

    def begin(self) -> None:
        for thread in self.threads:
            thread.start()

    def read(self) -> None:
        try:
            while not self.ended.is_set():
                for each in self.kept:
                    each.detach().sum()
        except BaseException as error:
            self.seen.append(error)

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join()


# ---------------------------------------------------------------------- the default mode: the one that waits least

DEFAULT = tiers(rest=["by default, simulated"], long=["by default, clipped, simulated"])
DEFAULTS = {**DEFAULT, **tiers(long=["by default, accumulated, simulated", "by default, clipped by value, simulated"])}


class Watches(Callback):
    """Notes the mode of updates, and how many layers' are under way when a batch has ended. It looks at no weight."""

    def __init__(self) -> None:
        self.modes: list[str] = []
        self.under_way: list[int] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, SuperpipelineStrategy):
            run: Any = trainer.strategy._run
            self.modes.append(run.steps.overlap)
            self.under_way.append(len(run.engine.updates._under_way))


def chosen(mode: str, *, free: bool, ours: Outcome) -> None:
    (watch,) = (each for each in ours.trainer.callbacks if isinstance(each, Watches))
    by_norm = ours.trainer.gradient_clip_val and ours.trainer.gradient_clip_algorithm != "value"
    assert watch.modes[-1] == ("forward" if by_norm else mode)
    assert watch.modes[1] == watch.modes[-1] or "from the third step on" in ours.module.noted
    assert not free or watch.under_way[-1] > 1, "no hook looks at a weight, and nothing waits"


def by_default(
    name: str, make: Callable[[], Any], mode: str = "backward", *, variants: Tiers = DEFAULT, free: bool = False,
    callbacks: Callable[[], list[Callback]] = list, **more: Any,
) -> None:  # fmt: skip
    program(
        f"overlap by default: {name}", variants, batches=six, callbacks=lambda: [*callbacks(), Watches()],
        also=lambda ours: chosen(mode, free=free, ours=ours),
        **{"covers": "the mode that waits least and is exact, whatever user code looks at", **more},
    )(make)  # fmt: skip


class Hooked(Callback):
    """Looks at one hook."""

    def __init__(self, hook: str, look: Callable[[Any], Any]) -> None:
        setattr(self, hook, lambda trainer, module, *_: module.seen.append(look(module)))


def weights(m: Any) -> list[Tensor]:
    return [p.detach().clone() for p in m.parameters()]


def norms(m: Any) -> list[Tensor]:
    return [p.grad.norm() for p in m.parameters() if p.grad is not None]


def states(m: Any) -> list[Tensor]:
    return [each["exp_avg"].clone() for each in m.optimizer.state.values()]


by_default("no hook", Deep, free=True, variants={**DEFAULTS, "by default, simulated": 1})
by_default("accumulation by a schedule", Deep, callbacks=lambda: [GradientAccumulationScheduler({0: 2})])
by_default("averages of weights", Deep, callbacks=lambda: [EMAWeightAveraging(decay=0.9)])
for hook, look, mode, free in (
    ("on_train_epoch_end", weights, "backward", True),
    ("on_train_batch_end", lambda m: 0, "backward", True),
    ("on_train_batch_end", weights, "backward", False),
    ("on_train_batch_end", norms, "backward", False),
    ("on_train_batch_start", states, "backward", False),
    ("on_before_optimizer_step", norms, "forward", False),
):
    by_default(
        f"{look.__name__.replace('<lambda>', 'nothing')} in {hook}", Deep, mode, free=free, variants=DEFAULTS,
        callbacks=lambda hook=hook, look=look: [Hooked(hook, look)],  # type: ignore[misc]
    )  # fmt: skip
overlap(
    "gradients looked at after a step", tiers(long=["backward, simulated", "backward, accumulated, simulated"]),
    at="on_train_batch_end",
    on=Deep, covers="they are kept where a hook could look",
)(lambda m: m.seen.append(norms(m)))  # fmt: skip


def one_waits(ours: Outcome) -> None:
    (watch,) = (each for each in ours.trainer.callbacks if isinstance(each, Watches))
    assert watch.under_way[-1] == 4  # of five


overlap(
    "a look at one weight", tiers(rest=["by default, simulated"]), callbacks=lambda: [Hooked("on_train_batch_end",
    lambda m: m.net[4].inner.bias.sum()), Watches()],
    also=one_waits, covers="it waits for the weight's layer alone",
)(Deep)  # fmt: skip

TAKEN: dict[str, Callable[[Any], list[Any]]] = {
    "state_dict": lambda m: list(m.state_dict().values()),
    "views": lambda m: [p.data.view(-1)[1:] for p in m.parameters()],
    "arrays": lambda m: [np.asarray(p.detach()) for p in m.parameters()],
    "the optimizer's state": lambda m: [
        value for each in m.optimizer.state_dict()["state"].values() for value in each.values()
    ],
    "views of state": lambda m: [each["exp_avg"].view(-1) for each in m.optimizer.state.values()],
}


def keeps(take: Callable[[Any], list[Any]], *, again: bool) -> At:
    def begin(m: Any) -> None:
        m.kept[:] = take(m) if again or not m.kept else m.kept

    def end(m: Any) -> None:
        m.seen.append([torch.as_tensor(each).clone() for each in m.kept])

    return Deep(on_train_batch_start=begin, on_train_batch_end=end)


for what, take in TAKEN.items():
    for again in (False, True):
        program(
            f"overlap by default: {what} taken before {'each' if again else 'the first'} step",
            DEFAULT if again else {name: 5 - tier for name, tier in DEFAULT.items()}, batches=six,
            covers="reading such tensors does not show: a step waits at once for layers whose memory user code holds",
        )(lambda take=take, again=again: keeps(take, again=again))  # fmt: skip


class Reads(torch.autograd.Function):
    """Its backward reads a weight of a layer whose gradients are complete by then."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear) -> Tensor:  # type: ignore[override]
        ctx.layer = layer
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        return gradient * ctx.layer.weight.detach().mean(), None


class ReadsLater(At):
    """From batch ``since`` on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__(Block, depth=5)
        self.since = since

    def loss(self, batch: Any) -> Tensor:
        x = self.net[0](batch)
        if self.batch >= self.since:
            x = Reads.apply(x, self.net[4].inner)  # type: ignore[no-untyped-call]
        for block in self.net[1:]:
            x = block(x)
        return x.square().mean()


by_default(
    "a backward that needs a layer again", ReadsLater, "forward", variants=tiers(rest=["by default, simulated"]), inside=logged,
    covers="the first step shows it, and updates keep out of backward",
)  # fmt: skip
SINCE = "by default, simulated"
overlap(
    "a backward that begins to need a layer again", tiers(rest=[SINCE]), batches=six,
    refused={SINCE: r"RuntimeError: .*had updated layer 'net\.4' when, in the same backward"},
    covers="the first step has not shown it",
)(lambda: ReadsLater(3))  # fmt: skip

FREED = r"RuntimeError: .*param\.grad was read .* optimizer_overlap=\"backward\" has freed it"


def looks(m: Any) -> None:
    m.seen.append([p.grad if p.grad is None else p.grad.clone() for p in m.parameters()])


overlap("gradients read in the next step, freed", tiers(rest=["backward, no callback"]), refused={"backward, no callback": FREED},
    covers="the error says so")(
    partial(Deep, start=looks)
)  # fmt: skip
overlap(
    "gradients read in the next step and after the run", tiers(long=["by default, simulated"]), batches=six,
    covers="they are there if the mode was not asked for",
)(partial(Deep, start=looks, on_fit_end=looks))  # fmt: skip


@overlap(
    "a backward in the step without zero_grad", tiers("backward, no callback"), repairable=False,
    refused={"backward, no callback": r"RuntimeError: .*adds to param\.grad of 'net\..*zero_grad"},
)  # fmt: skip
class RunsBackward(At):
    """It would add to gradients that were freed."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.batch == 1:
            super().loss(batch).backward()
        return loss


@overlap("a backward in the step after zero_grad", tiers("backward, no callback"), covers="what the error advises")
class ResetsFirst(At):
    """Freed gradients are None from then on."""

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        if self.batch == 1:
            self.optimizer.zero_grad()
            self.seen.append([p.grad for p in self.parameters()])
            super().loss(batch).backward()
            self.seen.append([p.grad.clone() for p in self.parameters()])  # type: ignore[union-attr]
        return loss


# ---------------------------------------------------------------------- what changes in mid-run

Change = Callable[[Any], None]


def clips(value: float | None, algorithm: str) -> Change:
    def change(m: Any) -> None:
        m.trainer.gradient_clip_val, m.trainer.gradient_clip_algorithm = value, algorithm

    return change


def halves(m: Any) -> None:
    for p in m.parameters():
        p.grad.mul_(0.5)


def adds_callback(m: Any) -> None:
    m.trainer.callbacks.append(Hooked("on_before_optimizer_step", halves))


def adds_hook(m: Any) -> None:
    m.on_after_backward = lambda: halves(m)


def changing(hook: str, change: Change) -> At:
    def third(m: Any) -> None:
        if m.trainer.global_step == 2:
            change(m)
            m.noted.append("from the third step on")

    return Deep(**{hook: third})


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
CHANGES: dict[str, tuple[dict[str, Any], Change, str]] = {
    "clipping by another value": (BY_VALUE, clips(1e-4, "value"), "backward"),
    "no clipping any more": (BY_VALUE, clips(None, "value"), "backward"),
    "clipping by value": ({}, clips(1e-4, "value"), "backward"),
    "clipping by norm": ({}, clips(1e-3, "norm"), "forward"),
    "a callback": ({}, adds_callback, "forward"),
    "a hook": ({}, adds_hook, "forward"),
}
for what, (options, change, mode) in CHANGES.items():
    for hook in ("on_train_batch_start", "on_train_batch_end"):
        asked = what in ("clipping by norm", "a callback") and hook == "on_train_batch_end"
        said = r'ValueError: .*optimizer_overlap="backward" cannot be used: .*(clip_val=|on_before_optimizer)'
        by_default(
            f"{what} from the third step on, in {hook}", partial(changing, hook, change), mode,
            variants={"by default, simulated": 3, **({"backward": 2} if asked else {})},
            refused={"backward": said} if asked else {},
            covers="clipping by another value was ignored without a word, and a new hook got an error about a layer's weights",
            **options,
        )  # fmt: skip
for kind in ("value", "norm"):
    overlap(
        f"clipping by {kind} from within a step on", tiers(SINCE), covers="some layers are updated already", repairable=False,
        batches=six, refused={SINCE: "RuntimeError: Gradient clipping was changed within a training step"},
    )(lambda kind=kind: changing("start", clips(1e-4, kind)))  # fmt: skip


class WithAFlag(At):
    """Models keep flags as parameters of integers (pytorch_tabular's Node does)."""

    def __init__(self) -> None:
        super().__init__()
        self.flag = nn.Parameter(torch.tensor(0, dtype=torch.uint8), requires_grad=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.1)


by_default(
    "a parameter of integers", WithAFlag, variants=tiers(rest=["by default, simulated"]),
    covers="no optimizer steps it: the mode was off, and the reason named settings that nobody had made",
)  # fmt: skip
