"""Gradients that land on the host: their rows, their memory, and what their backward lets go."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.torch_compat.private import sparse_rows
from sp_lightning.core.weights.gradients import Gradients, each_row_once
from tests.support.engine import step, streamed


def test_a_sparse_gradient_gets_each_row_once() -> None:
    values = torch.randn(3, 4)
    twice = sparse_rows(torch.tensor([[2, 0, 2]]), values, torch.Size((3, 4)), once=False)
    once = each_row_once(twice)
    assert torch.equal(once._indices(), torch.tensor([[0, 2]]))
    assert torch.equal(once._values(), torch.stack([values[1], values[0] + values[2]]))
    assert each_row_once(once) is once


def test_gradients_of_the_parameters_dtype_come_without_staging_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    staged: list[bool] = []
    place = Gradients._place

    def note(self: Gradients, gradients: Any) -> Any:
        placed = place(self, gradients)
        staged.append(placed[1] is not None)
        return placed

    monkeypatch.setattr(Gradients, "_place", note)
    net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        step(engine, lambda: net(torch.ones(1, 4)).sum().backward())
        assert all(p.grad is not None for p in net.parameters())
        step(engine, lambda: net(torch.ones(1, 4)).sum().backward())  # added to the first ones
    assert staged == [False] * 3 + [True] * 3


def test_a_backward_that_meets_nothing_but_a_saved_weight_releases_its_layer() -> None:
    """No hook of a module and no gradient tells that it has begun."""
    net, x = (
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).requires_grad_(False),
        torch.ones(1, 4).requires_grad_(),
    )
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:

        def use() -> list[Any]:
            F.linear(x, net[0].weight).square().sum().backward()  # type: ignore[arg-type]
            return list(engine.residency.used)

        assert step(engine, use) == []
    assert x.grad is not None
