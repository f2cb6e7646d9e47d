"""Updates in the background beside code of users that changes optimizers, gradients and weights."""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch.callbacks import Callback, StochasticWeightAveraging
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.updating import Updating
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.updates.background import BackgroundUpdates
from tests.support.models import Module, Stack, vectors
from tests.support.overlapping import OVERLAP, at_once, overlapping
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

# ---------------------------------------------------------------------- what an attack found


def both(make: Any, mode: Any = "forward", *, lazy: bool = True, **options: Any) -> tuple[Any, Any]:
    """Ours and plain; ``lazy`` updates are done when somebody waits for them, on the simulated device."""
    plain = fit(make, vectors() * 2, recorded="losses", **options)
    with simulated() if lazy else nullcontext():
        ours = fit(make, vectors() * 2, overlapping(mode), recorded="losses", **options)
    assert_same(ours, plain)
    return ours, plain


class EveryStep(Callback):
    """Does something after each step."""

    def __init__(self, what: Callable[[Any, Any], Any]) -> None:
        self.what = what

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.what(trainer, pl_module)


def rolls_back(trainer: Any, pl_module: Any) -> None:
    """As a callback does that returns to an earlier state; torch's loading never reads the present one."""
    optimizer = trainer.optimizers[0]
    if trainer.global_step == 2:
        pl_module.kept = copy.deepcopy(optimizer.state_dict())
    elif trainer.global_step == 4:
        optimizer.load_state_dict(pl_module.kept)
    elif trainer.global_step == 5:
        trainer.strategy.load_optimizer_state_dict({"optimizer_states": [pl_module.kept]})
        for group in optimizer.param_groups:
            group["fused"] = True  # which plain does not switch on again


def exchanges_groups(trainer: Any, pl_module: Any) -> None:
    optimizer = trainer.optimizers[0]
    optimizer.param_groups = [{**group, "lr": group["lr"] / 2} for group in optimizer.param_groups]


def writes_into_settings(trainer: Any, pl_module: Any) -> None:
    for group in trainer.optimizers[0].param_groups:
        group["betas"][0] /= 2


def copies(trainer: Any, pl_module: Any) -> None:
    pl_module.copied = copy.deepcopy(pl_module.net.head.weight)
    assert type(pl_module.copied) is nn.Parameter


def starts_anew(trainer: Any, pl_module: Any) -> None:
    if trainer.global_step == 3:
        trainer.optimizers[0].state = defaultdict(dict)


def exchanges_optimizers(trainer: Any, pl_module: Any) -> None:
    """Lightning's wrapper takes the class that the optimizer has at this moment."""
    trainer.optimizers = trainer.optimizers
    pl_module.kept = pl_module.optimizers().state[pl_module.net.head.weight]["exp_avg"].clone()


def makes_parameters(trainer: Any, pl_module: Any) -> None:
    """``type(p)`` is the class of a parameter that waits."""
    weight = pl_module.net.head.weight
    pl_module.kept = type(weight)(weight.data * 2) * 2


def exchanges_groups_in_steps(trainer: Any, pl_module: Any) -> None:
    if trainer.global_step == 1:
        trainer.optimizers[0].register_step_post_hook(lambda *_: exchanges_groups(trainer, pl_module))


class ListOfBetas(Module):
    def __init__(self) -> None:
        super().__init__(Stack())

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, fused=True)
        optimizer.param_groups[0]["betas"] = [0.9, 0.99]
        return optimizer


@pytest.mark.long("the registry has updates in the background in the first tier")
@pytest.mark.parametrize(
    "what",
    [
        rolls_back, exchanges_groups, exchanges_groups_in_steps, writes_into_settings, copies, starts_anew,
        exchanges_optimizers, makes_parameters,
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", first(OVERLAP, "forward", why="the same under backward"))
def test_whatever_a_callback_does_to_the_optimizer(mode: str, what: Callable[[Any, Any], Any]) -> None:
    both(ListOfBetas, mode, callbacks=[EveryStep(what)])


STATE: dict[str, Callable[[Any], Any]] = {
    "state": lambda optimizer: optimizer.state,
    "entries": lambda optimizer: [optimizer.state[p] for group in optimizer.param_groups for p in group["params"]],
    "state_dict": lambda optimizer: optimizer.state_dict()["state"],
    "tensors": lambda optimizer: [each for entry in optimizer.state.values() for each in entry.values()],
    "vars": lambda optimizer: partial(vars(optimizer).get, "state"),
    "vars, later": lambda optimizer: lambda: vars(optimizer)["state"],
    "groups": lambda optimizer: [group["lr"] for group in optimizer.param_groups],
}
HOLDS: dict[str, dict[str, Any]] = {
    "forward": {"optimizer_overlap": "forward"},
    "backward": {"optimizer_overlap": "backward"},
    "stays": {"gpu_layers": 0.5},
    "stays, forward": {"gpu_layers": 0.5, "optimizer_overlap": "forward"},
    "gpu, forward": {"optimizer_on": "gpu", "optimizer_overlap": "forward"},
    "gpu, backward": {"optimizer_on": "gpu", "optimizer_overlap": "backward"},
}


class Holds(Module):
    """Takes a part of its optimizer after some steps, and looks at it in each step, in backward, and after each step."""

    def __init__(self, what: str, since: int) -> None:
        super().__init__(Stack())
        self.what, self.since = what, since
        self.seen: list[Any] = []

    def hold(self) -> None:
        if self.trainer.global_step == self.since:
            self.__dict__["held"] = STATE[self.what](self.trainer.optimizers[0])

    def look(self) -> None:
        held = self.__dict__.get("held", ())
        held = held() if callable(held) else held
        self.seen.append(copy.deepcopy(list(held.values()) if isinstance(held, dict) else held))

    def on_train_start(self) -> None:
        self.hold()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.look()
        output = self.net(batch)
        self.net.blocks[1](batch).register_hook(lambda _: self.look())
        return output.square().mean()


class HoldsAfter(Holds):
    """Looks after each step, too."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()
        self.hold()


@pytest.mark.parametrize("since", first([1, 0], 0, why="state that exists already, and that is new"))
@pytest.mark.parametrize("what", first(list(STATE), "state", "entries", why="parts of the same"))
@pytest.mark.parametrize("way", first(list(HOLDS), "backward", "stays, forward", why="other ways to the same check"))
def test_state_that_user_code_holds_is_plains_whenever_it_looks(way: str, what: str, since: int) -> None:
    make: Any = Holds if since == 0 and "backward" in way else HoldsAfter  # with Holds, "backward" frees gradients
    plain = fit(fused(lambda: make(what, since)), vectors(), recorded="nothing")
    with simulated() if "gpu" in way else nullcontext():
        ours = fit(
            fused(lambda: make(what, since)), vectors(), SuperpipelineStrategy(k=1, **HOLDS[way]), recorded="nothing"
        )
    assert_same(ours, plain)
    assert_equal(ours.module.seen, plain.module.seen, "held")


@pytest.mark.parametrize("way", first([each for each in HOLDS if each != "stays"], "backward", why="the same check"))
@pytest.mark.parametrize("what", ["state", "groups"])
def test_only_state_that_is_held_costs_the_overlap(way: str, what: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "lightning.pytorch.superpipeline")
    fit(fused(lambda: HoldsAfter(what, 0)), vectors(), SuperpipelineStrategy(k=1, **HOLDS[way]), recorded="nothing")
    assert caplog.text.count("other code holds AdamW.state") == (what == "state")


class ReadsLate(Module):
    """Reads the state in backward, when layers are updated."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.net.blocks[1].register_forward_hook(lambda *call: call[2].register_hook(self.read) and None)
        return super().training_step(batch, batch_idx)

    def read(self, _: Tensor) -> None:
        assert self.trainer.optimizers[0].state is not None


def test_state_that_backward_has_updated_already_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"had updated layer 'net\..*the optimizer's state was needed"):
        fit(fused(lambda: ReadsLate(Stack())), vectors(), overlapping("backward"), recorded="nothing")


class Late(Module):
    """One weight of a layer is used from the third step on: SGD has momentum for its others by then."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.head.late = nn.Parameter(torch.ones(16))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output = self.net(batch)
        return (output * self.net.head.late if batch_idx > 1 else output).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("mode", OVERLAP)
def test_a_first_gradient_that_comes_late(mode: str) -> None:
    """torch's fused SGD fails then: that step runs as the user's optimizer would."""
    off = fit(Late, vectors() * 2, overlapping("off"), recorded="losses")
    assert_same(fit(Late, vectors() * 2, overlapping(mode), recorded="losses"), off)


class SetsInStep(Module):
    """A warm-up by hand, in the training step and in hooks before backward."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.optimizers[0].param_groups[0]["lr"] = 1e-2 / (batch_idx + 1)
        return super().training_step(batch, batch_idx)

    def on_before_backward(self, loss: Tensor) -> None:
        self.trainer.optimizers[0].param_groups[0]["weight_decay"] = 0.1 * float(self.trainer.global_step)


class BackwardBefore(Module):
    """Another backward in the training step, as adversarial training has it."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch.clone().requires_grad_()
        self.loss(x).backward()
        assert x.grad is not None
        self.zero_grad()
        return self.loss(batch + 0.1 * x.grad.sign())


class StraysFromOptimizer(Module):
    """Parameters that the optimizer does not have keep their gradients, step after step."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.sums: list[Tensor] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for name, p in self.named_parameters() if "inner" in name], lr=0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.sums += [p.grad.clone() for name, p in self.named_parameters() if "inner" not in name]


@pytest.mark.long("the registry has updates in the background in the first tier")
@pytest.mark.parametrize("k", first([1, 99], 1, why="the same where all layers stay"))
@pytest.mark.parametrize("make", [SetsInStep, BackwardBefore, StraysFromOptimizer])
@pytest.mark.parametrize("mode", OVERLAP)
def test_whatever_happens_around_backward(mode: str, make: Any, k: int) -> None:
    plain = fit(fused(make), vectors() * 2, recorded="losses")
    for device in (nullcontext, simulated):
        with device():
            ours = fit(fused(make), vectors() * 2, overlapping(mode, k=k), recorded="losses")
        assert_same(ours, plain)
        assert_equal(getattr(ours.module, "sums", None), getattr(plain.module, "sums", None), "gradients")


class ScalesInBackward(Module):
    """Writes gradients where no version shows it, right after they have come."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        for p in self.parameters():
            p.grad.data.mul_(3)


class WritesUpdated(Module):
    """A hook in backward writes a weight of the last layer, which is updated by then, through a captured reference."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.captured = [next(self.net.blocks[4].parameters())]
        handle = self.net.blocks[1].register_forward_hook(lambda *call: call[2].register_hook(self.late) and None)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            handle.remove()

    def late(self, gradient: Tensor) -> None:
        self.captured[0].data.mul_(1.5)


@pytest.mark.parametrize("k", [1, 8])
def test_a_write_to_a_weight_that_is_updated_already_is_refused(k: int) -> None:
    """While the layer was on the device still (k=8), the write and the update were in a race, and one was lost."""
    make = fused(lambda: WritesUpdated(Stack()))
    with pytest.raises(RuntimeError, match=r"had updated layer 'net.blocks.4' when.*its weights were needed again"):
        fit(make, vectors(), overlapping("backward", k=k), recorded="losses")


def writes_data(parameter: nn.Parameter) -> None:
    parameter.data.mul_(1.5)


def writes_in_place(parameter: nn.Parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def reads(parameter: nn.Parameter) -> None:
    parameter.detach().sum()


def copies_it(parameter: nn.Parameter) -> None:
    copy.deepcopy(parameter)


def takes_its_gradient(parameter: nn.Parameter) -> None:
    assert parameter.grad is not None


class UsesCaptured(Module):
    """A hook in backward uses a weight of the last layer, which is updated by then, captured before the run."""

    def __init__(self, use: Callable[[nn.Parameter], None]) -> None:
        super().__init__(Stack())
        net: Any = self.net
        self.captured = [next(net.blocks[4].parameters())]
        net.blocks[1].register_forward_hook(lambda *call: call[2].register_hook(self.late) and None)
        self.use = use

    def late(self, gradient: Tensor) -> None:
        self.use(self.captured[0])


@pytest.mark.parametrize("use", [writes_data, writes_in_place, reads, copies_it, takes_its_gradient])
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("k", [1, 8])
def test_a_captured_weight_that_is_updated_already_is_refused(k: int, lazy: bool, use: Any) -> None:
    """A write to the host's memory came after the update that it had to come before, or was lost in it."""
    with (
        simulated() if lazy else nullcontext(),
        pytest.raises(RuntimeError, match=r"had updated layer 'net.blocks.4' when.*its weights were needed again"),
    ):
        fit(fused(lambda: UsesCaptured(use)), vectors(), overlapping("backward", k=k), recorded="losses")


class TakesData(nn.Linear):
    """Without gradients its forward takes the weight's ``.data``, which could be written."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight if torch.is_grad_enabled() else self.weight.data, self.bias)


class CallsUpdated(Module):
    """A hook at the end of backward calls the last layer, which is updated by then."""

    def __init__(self) -> None:
        net: Any = Stack()
        net.head = TakesData(16, 16)
        super().__init__(net)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        batch.register_hook(lambda gradient: self.late(batch))
        return self.loss(batch)

    def late(self, batch: Tensor) -> None:
        net: Any = self.net
        with torch.no_grad():
            net.head(batch.detach())


@pytest.mark.parametrize("k", [1, 8])
def test_a_call_of_a_layer_that_is_updated_already_is_refused(k: int) -> None:
    """Where its slot still had the weights (k=8), those were taken for written, and the update was lost."""
    with pytest.raises(RuntimeError, match=r"had updated layer 'net.head' when.*its weights were needed again"):
        fit(fused(CallsUpdated), vectors(), overlapping("backward", k=k), recorded="losses")


class Adapted(nn.Module):
    """A frozen weight with two adapters, of which one is used and trained."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16).requires_grad_(False)
        self.adapters = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(2))
        self.used = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x) + self.adapters[self.used](x))


class SwitchesAdapters(Module):
    """A forward with each adapter in one step: the backward of the second one's comes first. ``drops`` the first one's graph."""

    def __init__(self, *, drops: bool) -> None:
        stack = Stack()
        stack.blocks = nn.ModuleList(Adapted() for _ in range(5))
        super().__init__(stack)
        self.drops = drops

    def use(self, number: int) -> None:
        for block in self.net.blocks:  # type: ignore[union-attr]
            block.used = number
            for index, adapter in enumerate(block.adapters):
                adapter.requires_grad_(index == number)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.use(0)
        first_loss = self.loss(batch)
        self.use(1)
        return self.loss(batch) + (float(first_loss.detach()) if self.drops else first_loss)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("lazy", [False, True])
def test_no_layer_is_updated_before_the_backward_of_all_its_calls(lazy: bool, drops: bool) -> None:
    """Frozen weights were refused to the first forward's part of backward, after some layers had been updated."""
    early: set[str] = set()
    begin = Updating.before_early_update

    def noted(self: Updating, layer: StreamedLayer) -> None:
        early.add(layer.name)
        begin(self, layer)

    with mock.patch.object(Updating, "before_early_update", noted):
        both(fused(lambda: SwitchesAdapters(drops=drops)), "backward", lazy=lazy)
    assert ("net.blocks.2" in early) == drops  # where nothing comes after it, it is updated in backward


class HooksLate(Module):
    """A parameter's hook, registered in the first step, writes all gradients."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.net.stem.weight.register_post_accumulate_grad_hook(self.scale)
        return super().training_step(batch, batch_idx)

    def scale(self, parameter: Tensor) -> None:
        for p in self.net.head.parameters():
            if p.grad is not None:
                p.grad.data.mul_(3)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("make", [ScalesInBackward, HooksLate])
def test_norms_of_gradients_that_are_written_unseen(make: Any) -> None:
    with mock.patch.object(Device, "later", at_once):
        both(fused(make), lazy=False, gradient_clip_val=0.01)


class OwnZeroGrad(Module):
    def optimizer_zero_grad(self, *args: Any) -> None:
        """Gradients go on from step to step."""


class OwnStep(Module):
    def optimizer_step(self, epoch: Any, batch_idx: Any, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(("make", "name"), [(ScalesInBackward, "backward"), (OwnStep, "optimizer_step")])
def test_code_that_decides_on_gradients_before_the_step_is_refused(make: Any, name: str) -> None:
    build = fused(make if make is ScalesInBackward else lambda: make(Stack()))
    with pytest.raises(ValueError, match=f"{make.__name__}.{name} may look at gradients or weights before the step"):
        fit(build, vectors(), overlapping("backward"), recorded="losses")
    both(build)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", OVERLAP)
def test_gradients_that_nobody_sets_to_none_add_up(mode: str) -> None:
    both(fused(lambda: OwnZeroGrad(Stack())), mode)


@pytest.mark.long("takes a second or more")
def test_a_users_thread_that_reads_weights_waits_too() -> None:
    """Several threads wait for the same updates: none goes on before they are done."""
    errors: list[BaseException] = []
    stop = threading.Event()
    module = Module(Stack())
    references = list(module.parameters())

    def read() -> None:
        while not stop.is_set():
            try:
                for reference in references:
                    reference.detach().sum()
            except BaseException as error:
                errors.append(error)
                return

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    submit = BackgroundUpdates.submit

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.002), work())[1], *then)  # type: ignore[func-returns-value]

    try:
        with mock.patch.object(BackgroundUpdates, "submit", slow):
            trainer_for(overlapping("forward")).fit(module, loader(vectors() * 3))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not errors


class Remembers(Module):
    """A dictionary of parameters, asked before the forward: some of its keys are being updated."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_fit_start(self) -> None:
        self.old = {p: p.detach().clone() for p in self.parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        away = sum((p - self.old[p]).square().sum() for p in self.parameters() if p in self.old)
        return self.loss(batch) + away


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("mode", OVERLAP)
def test_parameters_that_are_being_updated_are_keys(mode: str) -> None:
    for lazy in (True, False):
        both(fused(Remembers), mode, lazy=lazy)


def test_weight_averaging_that_steps_without_a_backward_is_refused_where_gradients_are_gone() -> None:
    callbacks = [StochasticWeightAveraging(swa_lrs=1e-3)]
    with pytest.raises(ValueError, match=r"StochasticWeightAveraging steps without a backward.*\"forward\""):
        fit(lambda: Module(Stack()), vectors(), overlapping("backward"), callbacks=callbacks)


def test_an_interrupt_while_waiting_leaves_a_whole_step() -> None:
    """Ctrl-C comes while the host waits for an update: it is done all the same before anybody looks."""
    finish = Device.finish
    calls: list[int] = []

    def interrupted(self: Device, work: Any, why: Any) -> None:
        calls.append(1)
        if len(calls) == 12:
            raise KeyboardInterrupt
        finish(self, work, why)

    states: list[int] = []

    class Looks(Callback):
        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            assert all(type(p) is nn.Parameter for p in pl_module.parameters())
            states.append(len(trainer.optimizers[0].state_dict()["state"]))

    module = Module(Stack())
    with mock.patch.object(Device, "finish", interrupted), pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer_for(overlapping("forward"), callbacks=[Looks()]).fit(module, loader(vectors() * 2))
    assert states == [24]


class Reads(torch.utils.data.Dataset[Tensor]):
    """A data set that holds the module, and reads it in its workers."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Tensor:
        return vectors()[index] + 0 * next(self.module.parameters()).detach().sum()


@pytest.mark.long("takes a second or more")
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_workers_that_are_forked_while_updates_are_under_way() -> None:
    module = Module(Stack())
    submit = BackgroundUpdates.submit

    def slow(self: BackgroundUpdates, layer: StreamedLayer, work: Callable[[], None], *then: Any) -> None:
        submit(self, layer, lambda: (time.sleep(0.02), work())[1], *then)  # type: ignore[func-returns-value]

    batches = torch.utils.data.DataLoader(Reads(module), batch_size=None, num_workers=1)
    with mock.patch.object(BackgroundUpdates, "submit", slow):
        trainer_for(overlapping("forward"), max_epochs=2).fit(module, batches)


@pytest.mark.rest("takes tenths of a second")
def test_early_updates_beside_another_run() -> None:
    """Each run has hooks on all optimizers' steps; those of others are not users'."""

    class Other(SuperpipelineStrategy):
        pass

    class Nested(Module):
        def on_train_start(self) -> None:
            fit(
                lambda: Module(Stack()),
                vectors(),
                SuperpipelineStrategy(optimizer_overlap="backward"),
                recorded="losses",
            )

    fit(lambda: Nested(Stack()), vectors(), Other(k=1))


class GivenMemory(Callback):
    """Gives two weights memory that it keeps, as ``vector_to_parameters`` does, after forward."""

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        weights = [pl_module.net.blocks[2].inner.weight, pl_module.net.blocks[2].outer.weight]
        self.kept = 1.001 * nn.utils.parameters_to_vector(weights).detach()
        nn.utils.vector_to_parameters(self.kept, weights)


@pytest.mark.parametrize("mode", ["off", "forward", "backward"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_an_update_is_not_lost_to_the_memory_that_its_weight_was_given(mode: str, precision: Any) -> None:
    """At the end of the step its value was taken once more, over the update of backward."""
    make, options = fused(lambda: Module(Stack())), {"recorded": "losses", "precision": precision}
    plain = fit(make, vectors(), callbacks=[GivenMemory()], **options)  # type: ignore[arg-type]
    ours = fit(make, vectors(), overlapping(mode), callbacks=[GivenMemory()], **options)  # type: ignore[arg-type]
    assert_same(ours, plain)
