"""Plain Lightning whose optimizers step copies on the host: what an accelerator's results are compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision

from sp_lightning.tools.comparison.reference import StepsOnHost
from sp_lightning.trainer.scaler import HostGradScaler
from tests.support.models import CASES, Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused


class OnCopies(StepsOnHost):
    """Takes the CPU for a device that is not the host."""

    host = torch.device("meta")


def strategy(*, fuse: bool = False) -> StepsOnHost:
    return OnCopies(torch.device("cpu"), fuse=fuse)


@pytest.mark.parametrize("name", ["stack", "gan", "lbfgs", "sparse-embedding"])
def test_steps_of_copies_are_those_of_the_weights(name: str) -> None:
    case = CASES[name]
    ours = fit(case.make, case.batches(), strategy())
    assert_same(ours, fit(case.make, case.batches()))
    parameters = {id(parameter) for parameter in ours.module.parameters()}
    held = {
        id(each)
        for optimizer in ours.trainer.optimizers
        for group in optimizer.param_groups
        for each in group["params"]
    }
    assert held <= parameters, "the optimizers have the module's own parameters again"
    assert all(id(each) in parameters for optimizer in ours.trainer.optimizers for each in optimizer.state)


@pytest.mark.parametrize("options", [{"gradient_clip_val": 0.1}, {"accumulate_grad_batches": 2}])
def test_steps_run_fused_where_that_is_left_open(options: dict[str, Any]) -> None:
    ours = fit(lambda: Module(Stack()), vectors(), strategy(fuse=True), **options)
    plain = fit(fused(lambda: Module(Stack())), vectors(), **options)
    for state in (*ours.optimizers, *plain.optimizers):
        for group in state["param_groups"]:
            del group["fused"]
    assert_same(ours, plain)
    assert all(group["fused"] is None for each in ours.trainer.optimizers for group in each.param_groups)


class NotesClipping(Module):
    """Notes whether clipping finds the module's own parameters."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.own: list[bool] = []

    def configure_gradient_clipping(self, optimizer: Any, *given: Any, **options: Any) -> None:
        parameters = {id(parameter) for parameter in self.parameters()}
        self.own += [id(each) in parameters for group in optimizer.param_groups for each in group["params"]]
        self.clip_gradients(optimizer, *given, **options)


@pytest.mark.parametrize("kind", [OnCopies, StepsOnHost])
def test_copies_are_unscaled_and_clipped(kind: type[StepsOnHost]) -> None:
    """On a GPU, torch's own scaler copies its numbers to the CPU without blocking. On the CPU, it stays torch's."""

    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        return {"plugins": MixedPrecision("16-mixed", "cpu", scaler), "gradient_clip_val": 0.1}

    ours = fit(NotesClipping, vectors(), kind(torch.device("cpu"), fuse=False), **options())
    assert_same(ours, fit(lambda: Module(Stack()), vectors(), **options()))
    module: Any = ours.module
    scaler: Any = ours.trainer.precision_plugin
    on_copies = kind is OnCopies
    assert set(module.own) == {not on_copies}
    assert (type(scaler.scaler) is HostGradScaler) is on_copies
