"""A run that begins inside of another one, in the same thread, as a callback does that trains a probe."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.models import Module, Stack, vectors
from tests.support.runs import Outcome, assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.tiers import first


class Probe(Module):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


class Outer(Module):
    """Trains a probe between two steps, or within one.

    Args:
        where: the hook.
        how: what the probe consists of: a copy of the network, another one, or the network itself and a layer more.
        strategy: makes that of the probe.
    """

    def __init__(self, where: str, how: str, strategy: Callable[[], Any]) -> None:
        super().__init__(Stack(3))
        self.where, self.how, self.strategy = where, how, strategy
        self.probed: list[list[Tensor]] = []

    def at(self, where: str, batch_idx: int) -> None:
        if where != self.where or batch_idx != 1:
            return
        net = {
            "copy": lambda: copy.deepcopy(self.net),
            "another": lambda: Stack(2),
            "itself": lambda: nn.Sequential(self.net, nn.Linear(16, 16)),
        }
        probe = Probe(net[self.how]())
        trainer_for(self.strategy(), max_steps=2).fit(probe, loader(vectors(2)))
        self.probed.append([p.detach().clone() for p in probe.parameters()])

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.at("start", batch_idx)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.at("step", batch_idx)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.at("after backward", self.trainer.global_step)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.at("end", batch_idx)


def outer(where: str, how: str, strategy: Any, inner: Callable[[], Any]) -> Outcome:
    outcome = fit(lambda: Outer(where, how, inner), vectors(), strategy)
    assert outcome.module.probed
    return outcome


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("on", first(["gpu", "cpu"], "gpu", why="the device alone refuses steps of others"))
@pytest.mark.parametrize(
    ("where", "how"),
    [
        ("start", "copy"), ("start", "itself"), ("after backward", "copy"), ("after backward", "itself"), ("end", "itself"),
        ("end", "another"), ("step", "copy"), ("step", "another"),
    ],
)  # fmt: skip
def test_both_are_what_they_are_on_plain_lightning(where: str, how: str, on: Any, overlap: Any) -> None:
    if on == "cpu":
        overlap = "off"

    def strategy() -> Any:
        return superpipeline(k=1, optimizer_on=on, optimizer_overlap="off")

    ours = outer(where, how, superpipeline(k=1, optimizer_on=on, optimizer_overlap=overlap), strategy)
    plain = outer(where, how, "auto", lambda: "auto")
    assert_same(ours, plain)
    assert_equal(ours.module.probed, plain.module.probed, "the probe")


def test_weights_that_are_in_a_step_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'net.0.stem.weight' of Probe is a weight of another run, .* copy.deepcopy"):
        outer("step", "itself", superpipeline(k=1), lambda: superpipeline(k=1))


def test_a_run_that_would_step_the_device_s_weights_on_the_host_is_refused() -> None:
    strategy = superpipeline(k=1, optimizer_on="gpu")
    with pytest.raises(RuntimeError, match=r"SGD is not what Outer.configure_optimizers .* on the CPU"):
        outer("end", "itself", strategy, lambda: superpipeline(k=1))
