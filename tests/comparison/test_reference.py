"""Plain Lightning whose optimizers step copies on the host: what an accelerator's results are compared with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sp_lightning.tools.comparison.reference import StepsOnHost
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
