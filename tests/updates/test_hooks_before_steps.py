"""User code that runs between the beginning of an optimizer's step and its update, and that looks at weights or writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sp_lightning.core.layers.device_parameter import DeviceParameter
from sp_lightning.core.torch_compat.private import step_pre_hooks
from tests.support.mixed import scaled
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline
from tests.support.tiers import first

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


class TwoSteps(Module):
    """Manual optimization: two optimizers step after one backward. The first step ends with weights on the device.

    Args:
        when: where the weights are looked at.
        how: how they are looked at.
    """

    raw = False  # whether torch's optimizers are called, without Lightning's around them

    def __init__(self, when: str, how: str) -> None:
        super().__init__(Stack())
        self.automatic_optimization = False
        self.when = when
        self.how = how
        self.taken: list[Tensor] = []  # weights as this module held them when the batch began
        self.seen: list[Tensor] = []

    def look(self) -> None:
        weights = self.taken if self.how.startswith("taken in the step") else list(self.parameters())
        for weight in weights:
            if self.how.endswith("written"):
                weight.data.mul_(0.9)
            elif self.how == "kept":
                self.seen.append(weight.detach())
            else:
                self.seen.append((weight.data if self.how == "data" else weight.detach()).norm())

    def configure_optimizers(self) -> Any:
        layers = list(self.net.parameters())
        optimizers = [
            torch.optim.SGD(layers[: len(layers) // 2], lr=0.1),
            torch.optim.SGD(layers[len(layers) // 2 :], lr=0.1),
        ]
        if self.when == "torch's hook":
            optimizers[1].register_step_pre_hook(lambda *_: self.look())
        return optimizers

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.when == "Lightning's hook":
            self.look()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.taken = list(self.parameters())
        first, second = self.optimizers(use_pl_optimizer=not self.raw)  # type: ignore[misc]
        first.zero_grad()
        second.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        first.step()
        second.step(*([self.closure(batch)] if self.when == "closure" else []))
        self.seen += [each.sum() for each in self.seen]
        return loss.detach()

    def closure(self, batch: Any) -> Any:
        """A closure that evaluates anew, and looks."""

        def evaluate() -> Tensor:
            with torch.no_grad():
                loss = self.loss(batch)
            self.look()
            return loss

        return evaluate


class Raw(TwoSteps):
    raw = True


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "how", ["detached", "data", "written", "taken in the step", "taken in the step and written", "kept"]
)
@pytest.mark.parametrize(
    ("kind", "when"),
    first(
        [
            (TwoSteps, "Lightning's hook"),
            (TwoSteps, "torch's hook"),
            (TwoSteps, "closure"),
            (Raw, "torch's hook"),
            (Raw, "closure"),
        ],
        (TwoSteps, "Lightning's hook"),
        (TwoSteps, "closure"),
        (Raw, "torch's hook"),
        why="the same moments of the other kind of optimizer",
    ),
)
def test_an_update_survives_looks_at_weights_before_it(kind: Any, when: str, how: str) -> None:
    def make() -> Module:
        return kind(when, how)  # type: ignore[no-any-return]

    plain = fit(make, vectors(3))
    for ours in (superpipeline(k=1, k_prime=1), superpipeline(k=3), superpipeline(keep_on_gpu=["**"])):
        streamed = fit(make, vectors(3), ours)
        assert_same(streamed, plain)
        if (how, when) != ("kept", "closure"):  # what is kept of a weight of the device has the values of then
            seen: Any = streamed.module.seen, plain.module.seen
            assert all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


class Decays(torch.optim.SGD):
    """An optimizer that looks at a model's weights between two writes of its own."""

    module: Any = None

    def step(self, closure: Any = None) -> Any:
        torch.optim.SGD.step(self, closure)
        with torch.no_grad():
            self.module.seen.append(list(self.module.net.parameters())[-1].detach().sum())
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(0.9)


class StepsInSteps(TwoSteps):
    def configure_optimizers(self) -> Any:
        torch.optim.SGD([torch.zeros(1)])  # torch's hooks are around SGD's own step from now on, too
        first, second = super().configure_optimizers()
        second.__class__, second.module = Decays, self
        torch.optim.Optimizer._patch_step_function(second)
        return [first, second]


def test_a_look_at_a_weight_between_two_writes_of_an_optimizer_is_no_write() -> None:
    """It was refused, because the weight that was looked at could have been written on the device as well."""
    plain, ours = (
        fit(lambda: StepsInSteps("never", "detached"), vectors(3), strategy)
        for strategy in ("auto", superpipeline(k=1, k_prime=1))
    )
    assert_same(ours, plain)


class WritesOnBoth(Module):
    """Writes each weight through the module, and then through a view that it has taken before the step, or anew."""

    def __init__(self, *, anew: bool) -> None:
        super().__init__(Stack())
        self.anew = anew

    def on_train_batch_start(self, *args: Any) -> None:
        self.views = [weight.detach() for weight in self.net.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for weight in self.net.parameters():
                weight.mul_(0.9)
            views = [weight.detach() for weight in self.net.parameters()] if self.anew else self.views
            for view in views:
                view.add_(0.01)
        return self.loss(batch)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("options", [{}, {"keep_on_gpu": ["net.head"]}], ids=str)
def test_a_weight_that_host_and_device_write_is_refused(options: dict[str, Any]) -> None:
    ours = superpipeline(k=1, k_prime=1, **options)
    with pytest.raises(RuntimeError, match=r"Parameter 'net\..*' was written on the CPU.*one of both would be lost"):
        fit(lambda: WritesOnBoth(anew=False), vectors(3), ours)
    plain, remedied = (
        fit(lambda: WritesOnBoth(anew=True), vectors(3), each)
        for each in ("auto", superpipeline(k=1, k_prime=1, **options))
    )
    assert_same(remedied, plain)


class Holds(TwoSteps):
    """Notes whether the modules hold the device's weights."""

    def note(self) -> None:
        self.held.append(all(isinstance(weight, DeviceParameter) for weight in self.net.parameters()))

    def __init__(self) -> None:
        super().__init__("closure", "detached")
        self.held: list[bool] = []

    look = note

    def closure(self, batch: Any) -> Any:
        evaluate = super().closure(batch)

        def noted() -> Any:
            self.note()
            return evaluate()

        return noted


def test_a_closure_finds_the_device_s_weights() -> None:
    """As it begins, and after a forward."""
    assert fit(Holds, vectors(2), superpipeline(k=1)).module.held == [True] * 4


class Skipped(Holds):
    """The second optimizer's step is skipped, because its gradients are not finite."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        first, second = self.optimizers()  # type: ignore[misc]
        self.manual_backward(self.loss(batch))
        second.param_groups[0]["params"][0].grad.fill_(torch.inf)
        for optimizer in (first, second):
            optimizer.step()
            optimizer.zero_grad()
            self.note()
        return self.loss(batch).detach()


def test_a_skipped_step_leaves_the_device_s_weights_in_modules() -> None:
    streamed = fit(Skipped, vectors(2), superpipeline(k=1), recorded="losses", **scaled())
    assert streamed.module.held == [True] * 4
    assert_same(streamed, fit(Skipped, vectors(2), recorded="losses", **scaled()))


class StepsByItself(Holds):
    """Automatic optimization with an optimizer of one's own, which steps before the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        self.own = torch.optim.SGD(list(self.net.parameters())[:2], lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for weight in self.own.param_groups[0]["params"]:
            weight.grad = torch.ones_like(weight)
        self.note()
        self.own.step()
        self.note()
        self.own.zero_grad()
        return self.loss(batch)


def test_an_optimizer_of_one_s_own_leaves_the_device_s_weights_in_modules() -> None:
    streamed = fit(StepsByItself, vectors(2), superpipeline(k=1))
    assert streamed.module.held == [True] * 4
    assert_same(streamed, fit(StepsByItself, vectors(2)))


class StepsInBackward(Holds):
    """Each weight has an optimizer that steps as soon as its gradient is there, while checkpointed code runs again."""

    def configure_optimizers(self) -> Any:
        self.own = {weight: torch.optim.SGD([weight], lr=0.1) for weight in self.net.parameters()}
        for weight in self.net.parameters():
            weight.register_post_accumulate_grad_hook(self.stepped)
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def stepped(self, weight: Tensor) -> None:
        self.own[weight].step()
        self.own[weight].zero_grad()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def noted(block: Any, x: Tensor) -> Tensor:
            self.note()
            out: Tensor = block(x)
            return out

        for block in self.net.blocks:  # type: ignore[union-attr]
            batch = checkpoint(noted, block, batch, use_reentrant=False)
        loss = batch.square().mean()
        self.manual_backward(loss)
        return loss.detach()


def test_a_step_in_backward_leaves_the_device_s_weights_in_modules() -> None:
    streamed = fit(StepsInBackward, vectors(2), superpipeline(k=1))
    assert streamed.module.held == [True] * len(streamed.module.held) != []
    assert_same(streamed, fit(StepsInBackward, vectors(2)))


def test_no_hook_stays_with_an_optimizer() -> None:
    """Nor with all of them."""
    before = step_pre_hooks(torch.optim.SGD([torch.zeros(1)]))
    ours = fit(lambda: TwoSteps("closure", "data"), vectors(2), superpipeline())
    assert [step_pre_hooks(each) for each in ours.trainer.optimizers] == [before, before]


class Counts(TwoSteps):
    """Counts the hooks of the second optimizer before each step."""

    def __init__(self) -> None:
        super().__init__("never", "detached")
        self.counts: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.counts.append(len(step_pre_hooks(self.trainer.optimizers[1]) or []))


def test_no_hook_stays_with_an_optimizer_between_steps() -> None:
    counts = fit(Counts, vectors(3), superpipeline()).module.counts
    assert counts == [counts[0]] * 3
