"""User code that runs between the beginning of an optimizer's step and its update, and that looks at weights or writes them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline

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
        weights = self.taken if self.how == "taken in the step" else list(self.parameters())
        for weight in weights:
            if self.how == "written":
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


@pytest.mark.parametrize("how", ["detached", "data", "written", "taken in the step", "kept"])
@pytest.mark.parametrize(
    ("kind", "when"),
    [
        (TwoSteps, "Lightning's hook"),
        (TwoSteps, "torch's hook"),
        (TwoSteps, "closure"),
        (Raw, "torch's hook"),
        (Raw, "closure"),
    ],
)
def test_an_update_survives_looks_at_weights_before_it(kind: Any, when: str, how: str) -> None:
    def make() -> Module:
        return kind(when, how)  # type: ignore[no-any-return]

    plain = fit(make, vectors(3))
    for ours in (superpipeline(k=1, k_prime=1), superpipeline(k=3), superpipeline(resident=["**"])):
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


def test_a_weight_that_host_and_device_write_is_refused() -> None:
    with pytest.raises(RuntimeError, match=r"Parameter 'net\..*' was written on the host.*one of both would be lost"):
        fit(lambda: StepsInSteps("never", "detached"), vectors(3), superpipeline(k=1, k_prime=1))
