"""Weights written through what somebody has taken within a step and kept: as on plain Lightning, or refused by name.

A view of a plain weight is the weight's memory. Here a view that was taken in a step is device memory, and the optimizer
writes the host's. What was written through such a view after backward was dropped without a word: the engine forgot the slot
as it marked the copies on the device as out of date. WGAN's clipping loop over ``list(self.net.parameters())``, taken in the
first step and run in ``on_train_batch_end``, was lost in the same way.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.trainer.optimizer_steps import OptimizerSteps
from tests.support.engine import step, streamed
from tests.support.models import Module, vectors
from tests.support.poison import poisoned
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import first, some

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

TAKE: dict[str, Any] = {
    "data": lambda weights: [w.data for w in weights],
    "detach": lambda weights: [w.detach() for w in weights],
    "view": lambda weights: [w[0] for w in weights],
    "data of a view": lambda weights: [w[0].data for w in weights],
    "parameters": lambda weights: list(weights),
    "data of parameters": lambda weights: list(weights),
    "numpy": lambda weights: [w.detach().numpy() for w in weights],
    "storage": lambda weights: [(w.untyped_storage(), w.storage_offset(), w.shape) for w in weights],
}


def scale(kept: Any, kind: str) -> None:
    with torch.no_grad():
        for each in kept:
            if kind == "numpy":
                each *= 0.9
            elif kind == "storage":
                torch.empty(0).set_(*each).mul_(0.9)
            else:
                (each.data if kind == "data of parameters" else each).mul_(0.9)


class Keeps(Module):
    """Takes weights at one moment of a batch, writes them at another one, and drops them then."""

    def __init__(self, kind: str, taken: str, written: str, manual: bool) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))))
        self.kind, self.taken, self.written = kind, taken, written
        self.automatic_optimization = not manual
        self.kept: list[Any] = []  # a list, because what is taken may be no attribute that Lightning likes

    def at(self, moment: str) -> None:
        if moment == self.taken and not self.kept:
            self.kept.append(TAKE[self.kind]([layer[0].weight for layer in self.net]))
        if moment == self.written and self.kept:
            scale(self.kept.pop(), self.kind)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at("next batch")
        self.at("start")
        loss = self.loss(batch)
        self.at("after forward")
        self.at("before backward")
        if not self.automatic_optimization:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.at("after backward")
            self.at("before step")
            optimizer.step()
            self.at("after step")
        return loss

    def on_after_backward(self) -> None:
        if self.automatic_optimization:
            self.at("after backward")
            self.at("before step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("batch end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


WAYS = {
    f"{kind}, {taken}, {written}, {'manual' if manual else 'automatic'}": (kind, taken, written, manual)
    for kind, taken, written, manual in product(
        TAKE,
        ("start", "after forward", "after backward"),
        ("before backward", "before step", "after step", "batch end", "next batch"),
        (False, True),
    )
    if (manual or written != "after step") and (taken, written) != ("after backward", "before backward")
}
# While a step runs, debug_writes alone finds what torch shows no sign of (limits.md): writes to the .data of a view, numpy's,
# a storage's, and those of the host's weights, which modules hold after backward.
UNSEEN = {
    name
    for name, (kind, taken, written, manual) in WAYS.items()
    if (kind in ("data of a view", "numpy", "storage") and written == "before backward")
    or (kind == "data of a view" and (taken, written, manual) == ("after backward", "before step", True))
    or (kind not in ("detach", "view", "parameters") and (taken, written) == ("after backward", "next batch"))
}
FIRST = [
    "data, start, before step, manual",
    "detach, after forward, after step, manual",
    "data, start, batch end, automatic",
    "numpy, start, next batch, automatic",
    "data of parameters, start, batch end, automatic",
]


def judge(way: str, precision: Any, **options: Any) -> None:
    """Bitwise equality with plain Lightning, an error where plain has one, or an error that names the weight."""

    def make() -> Module:
        return Keeps(*WAYS[way])

    try:
        plain = fit(make, vectors(4), precision=precision)
    except RuntimeError:  # a weight that was written in place before backward
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fit(make, vectors(4), superpipeline(**options), precision=precision)
        return
    try:
        ours = fit(make, vectors(4), superpipeline(**options), precision=precision)
    except RuntimeError as error:
        assert "Parameter 'net." in str(error)  # noqa: PT017 - equal or refused: both are right
        return
    assert_same(ours, plain)


OPTIONS: list[dict[str, Any]] = [{"k": 1, "k_prime": 1}, {"k": 4, "k_prime": 1}, {"k": 2, "keep_on_gpu": ["net.1"]}]


@pytest.mark.parametrize("way", first(WAYS, *FIRST, second=list(WAYS)[::18], why="the same at other moments"))
def test_writes_of_what_was_kept(way: str) -> None:
    for options in OPTIONS:
        if way not in UNSEEN:
            judge(way, "32-true", **options)
        judge(way, "32-true", debug_writes=True, **options)


@pytest.mark.rest("the same where weights travel as casts")
@pytest.mark.parametrize("way", some(WAYS, *list(WAYS)[4::40], why="the same at other moments"))
def test_in_mixed_precision(way: str) -> None:
    for options in OPTIONS[:2]:
        if way not in UNSEEN:
            judge(way, "bf16-mixed", **options)
        judge(way, "bf16-mixed", debug_writes=True, **options)


# After backward modules hold the host's weights, which a device may be reading from the next forward on.
ON_A_DEVICE = [
    way
    for way in WAYS
    if way not in UNSEEN and not ("after backward, after step" in way or "after backward, next batch" in way)
]


@pytest.mark.parametrize(
    "way",
    first(
        ON_A_DEVICE,
        *FIRST[1:3],
        second=ON_A_DEVICE[::24],
        why="the same at other moments",
    ),
)
def test_on_a_device_of_its_own(way: str) -> None:
    for options in OPTIONS:
        with simulated():
            judge(way, "32-true", **options)


@pytest.mark.parametrize("way", FIRST[:4])
def test_equal_and_not_only_refused(way: str) -> None:
    def make() -> Module:
        return Keeps(*WAYS[way])

    plain = fit(make, vectors(4))
    for options in OPTIONS:
        assert_same(fit(make, vectors(4), superpipeline(**options)), plain)
    with poisoned():
        assert_same(fit(make, vectors(4), superpipeline(**OPTIONS[0])), plain)


class WritesCaptured(Module):
    """Weights are written in place after a forward of the same step, which may be going on on a device.

    The write did not wait for the transfers, so the first forward could read weights in the middle of it. Schedule-free
    optimizers' ``train()``, averages that are put back, and evolution strategies write so if they are called in a step.
    """

    automatic_optimization = False
    through = "optimizer"

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        with torch.no_grad():
            self.seen = self.loss(batch)
            weights = optimizer.param_groups[0]["params"] if self.through == "optimizer" else self.parameters()
            for p in weights:
                p.add_(0.01)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("through", ["optimizer", "module"])
def test_the_hosts_weights_are_not_written_while_a_forward_may_read_them(through: str, options: dict[str, Any]) -> None:
    def make() -> Module:
        module = WritesCaptured(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))))
        module.through = through
        return module

    plain = fit(make, vectors())
    assert_same(fit(make, vectors(), superpipeline(**options)), plain)
    with simulated():
        assert_same(fit(make, vectors(), superpipeline(**options)), plain)


class Clips(Module):
    """WGAN: weights are taken lazily, in the first step, and clipped after each batch."""

    mine: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.mine is None:
            self.mine = [list(self.net.parameters())]
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        for p in self.mine[0]:
            p.data.clamp_(-0.1, 0.1)
        torch._foreach_mul_([p.data for p in self.mine[0]], 0.9)
        with torch.no_grad():
            self.mine[0][0].add_(self.mine[0][0].grad)
        assert torch.equal(self.mine[0][0], next(self.net.parameters()))  # it is the weight that modules hold


@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "32-true", why="the same in mixed precision"))
def test_parameters_that_were_taken_in_a_step_are_the_hosts_between_steps(precision: Any) -> None:
    def make() -> Module:
        return Clips(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))))

    plain = fit(make, vectors(4), precision=precision)
    for options in OPTIONS:
        assert_same(fit(make, vectors(4), superpipeline(debug_writes=True, **options), precision=precision), plain)
    with simulated():
        assert_same(fit(make, vectors(4), superpipeline(k=1, k_prime=1), precision=precision), plain)


class WritesBoth(Keeps):
    """The host's weight is written through ``.data``, and a view of the device's that was taken before."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.kept:
            self.net[1][0].weight.data.add_(0.1)
            scale(self.kept.pop(), self.kind)


@pytest.mark.parametrize("resident", [[], ["net.1"]])
def test_a_weight_that_is_written_in_both_ways_is_refused(resident: list[str]) -> None:
    with pytest.raises(RuntimeError, match=r"'net\.1\.0\.weight' was written .* on the CPU, and .*kept"):
        fit(lambda: WritesBoth("data", "start", "", False), vectors(), superpipeline(k=1, keep_on_gpu=resident))


def test_a_long_kept_view_follows_its_weight() -> None:
    """It is read in each batch, and never written."""

    class Reads(Keeps):
        seen: Any = ()

        def on_train_batch_end(self, *_: Any) -> None:
            self.seen = (*self.seen, *(view.sum().item() for view in self.kept[0]))

    def make() -> Module:
        return Reads("data", "start", "", False)

    plain = fit(make, vectors(4))
    for options in OPTIONS:
        ours = fit(make, vectors(4), superpipeline(**options))
        assert_same(ours, plain)
        assert ours.module.seen == plain.module.seen


class _ReadsAfterStep(Module):
    """Reads a view that it took before its own optimizer step, after the step, and after a write of the weight."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))))
        self.automatic_optimization = False
        self.seen: list[list[float]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        weights = [self.net[at][0].weight for at in (0, 2)]
        views = TAKE["view"](weights)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen.append([view.sum().item() for view in views])
        with torch.no_grad():
            self.net[0][0].weight.mul_(0.5)
        self.seen.append([view.sum().item() for view in views])
        optimizer.zero_grad()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_view_is_read_after_an_optimizer_step_of_user_code(options: dict[str, Any]) -> None:
    """The slots are uploaded again then, and computation has to wait for it."""
    plain = fit(_ReadsAfterStep, vectors(4))
    with simulated():
        ours = fit(_ReadsAfterStep, vectors(4), superpipeline(**options))
    assert_same(ours, plain)
    assert ours.module.seen == plain.module.seen


class _WritesInBackward(Module):
    """Writes what it has kept in a hook of the first layer, when backward has updated the last one."""

    def __init__(self, kind: str, taken: int, written: int) -> None:
        super().__init__(nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4))))
        self.kind, self.batches = kind, (taken, written)
        self.kept: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == self.batches[0]:
            self.kept.append(TAKE[self.kind]([self.net[-1][0].weight]))
        hidden = self.net[0](batch)
        if batch_idx == self.batches[1]:
            hidden.register_hook(lambda _: scale(self.kept.pop(), self.kind))
        return self.net[1:](hidden).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, fused=True)


@pytest.mark.parametrize("frees", [True, False])
@pytest.mark.parametrize(("taken", "written"), [(0, 0), (0, 1)])
@pytest.mark.parametrize("kind", ["data", "detach", "view"])
@pytest.mark.parametrize("k", [1, 4])
def test_what_is_written_in_a_backward_that_updates(
    kind: str, k: int, taken: int, written: int, frees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was lost: the update leaves nothing that may have been written, but a view does not end with it.

    The layer is updated after backward then. Where its gradients are to be freed, it is not, and the write is an error.
    """
    collect = OptimizerSteps._collect
    facts = lambda self: replace(collect(self), read_after_step=not frees)  # noqa: E731
    monkeypatch.setattr(OptimizerSteps, "_collect", facts)
    make = lambda: _WritesInBackward(kind, taken, written)  # noqa: E731
    ours = partial(
        fit, make, vectors(4), superpipeline(k=k, k_prime=1, optimizer_overlap="backward"), recorded="losses"
    )
    if frees:
        refused = r"Parameter 'net\.3\.0\.weight' was written|modified by an inplace operation"
        with pytest.raises(RuntimeError, match=refused):
            ours()
    else:
        assert_same(ours(), fit(make, vectors(4), recorded="losses"))


class _GivesANeighbourMemory(Module):
    """Keeps a view of one weight, gives another one of the layer other memory in the same step, and writes the view."""

    def __init__(self, kind: str, written: str) -> None:
        super().__init__(
            nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(4)))
        )
        self.kind, self.written = kind, written
        self.kept: list[Any] = []

    def at(self, moment: str) -> None:
        if moment == self.written and self.kept:
            scale(self.kept.pop(), self.kind)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            one, other = self.net[1][0].weight, self.net[1][2].weight
            self.kept.append(TAKE[self.kind]([other]))
            one.data = one.data * 0.5
        return self.loss(batch)

    def on_after_backward(self) -> None:
        self.at("after backward")

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("batch end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("written", ["after backward", "batch end"])
@pytest.mark.parametrize("kind", ["data", "detach"])
def test_a_view_whose_layer_has_left_its_memory_is_not_written(
    kind: str, written: str, options: dict[str, Any]
) -> None:
    """The layer leaves its slot as one of its weights is given other memory; a write to the slot was lost."""
    with pytest.raises(RuntimeError, match=r"Parameter 'net\.1\.2\.weight' was written through an old view"):
        fit(lambda: _GivesANeighbourMemory(kind, written), vectors(4), superpipeline(**options))


def test_an_extra_slot_is_not_freed_while_a_layer_comes_to_it() -> None:
    """A view had the layer fetched again, and was dropped before compute had waited for that: its memory was free too early."""
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with streamed(net, SimDevice(torch.device("cpu")), k=1, k_prime=1) as streamer:
        views = list[Any]()
        step(streamer, lambda: views.extend(layer.weight.data for layer in net))
        slots = streamer._slots
        extra = next(slot for slot in slots.all if slot.extra and slot.layer is not None)
        layer: Any = extra.layer
        slots.fetch([(layer, extra, streamer._source.stage(layer))])
        views.clear()
        slots.give_back_extra()
        assert extra not in slots.all
