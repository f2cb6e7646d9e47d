"""Whether lent memory is still held decides whether it is overwritten: each way of holding it must count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.layout import Span
from sp_lightning.core.device.lease import MOST_SAVED, Lease, SavedView, SavedViews, lend
from sp_lightning.core.engine.saved_tensors import SavedTensors
from sp_lightning.core.weights.layer import StreamedLayer
from tests.support.engine import step, streamed

SPAN = Span("weight", 512, 64, torch.Size((4, 4)), (4, 1), torch.float32)


def graph(weight: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return (torch.ones(4, requires_grad=True) @ weight).grad_fn


def as_a_parameters_data(weight: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.empty(4, 4))
    parameter.data = weight
    return parameter


@pytest.mark.parametrize(
    "keep",
    [
        lambda weight: weight,
        lambda weight: weight[0],
        lambda weight: weight.data,
        lambda weight: weight.untyped_storage(),
        lambda weight: weight.detach().numpy(),
        lambda weight: lend(weight.view(torch.uint8)),
        lambda weight: torch.ops.aten.alias(weight),
        as_a_parameters_data,
        graph,
    ],
    ids=["itself", "view", "data", "storage", "numpy", "dlpack", "alias", "parameter", "graph"],
)
def test_each_way_of_holding_counts(keep: Callable[[Tensor], Any]) -> None:
    lease = Lease(torch.zeros(1024, dtype=torch.uint8))
    assert not lease.in_use
    [weight] = lease.views(0, [SPAN])
    assert not lease.in_use
    kept = keep(weight.detach())  # never the view itself
    assert lease.in_use
    del kept
    assert not lease.in_use


def test_views_are_made_once_and_lie_where_their_spans_say() -> None:
    memory = torch.arange(1024, dtype=torch.int32).to(torch.uint8)
    lease = Lease(memory)
    [weight] = lease.views("a", [SPAN])
    assert lease.views("a", [SPAN])[0] is weight
    assert torch.equal(weight.view(torch.uint8).flatten(), memory[512:576])
    lease.views("b", [SPAN, SPAN])
    assert not lease.in_use
    with torch.inference_mode():
        assert not Lease(memory).memory.is_inference()


def test_saved_views_count_as_use_one_by_one_and_only_some_are_kept_ready() -> None:
    memory = torch.arange(2048, dtype=torch.int32).to(torch.uint8)
    lease, views = Lease(memory), SavedViews()
    found: list[list[SavedView]] = [[], []]
    for each in found:
        for begin in range(MOST_SAVED + 8):
            expected = memory[512 + 4 * begin :][:16].view(torch.float32).view(2, 2).t()
            each.append(views.find(expected, 512 + 4 * begin))
            saved = lease.saved(each[-1])
            assert lease.in_use
            assert torch.equal(saved.view(torch.int32), expected.view(torch.int32))
            assert saved.stride() == (1, 2)
            del saved
            assert not lease.in_use
    again = [first is second for first, second in zip(*found, strict=True)]
    assert again == [True] * MOST_SAVED + [False] * 8


def test_views_of_one_place_are_told_apart() -> None:
    memory, views = torch.zeros(64, dtype=torch.uint8), SavedViews()
    whole = memory.view(torch.float32).view(4, 4)
    alike = [whole, whole.t(), whole[:2], whole.flatten(), whole.view(torch.int32)]
    assert len({views.find(each, 0) for each in alike}) == len(alike)
    assert all(views.find(each, 0) is views.find(each.detach(), 0) for each in alike)


def test_memory_that_was_moved_is_held_for_good() -> None:
    """``share_memory_`` exchanges the memory under a storage; what others have mapped must not be written again."""
    lease = Lease(torch.zeros(1024, dtype=torch.uint8))
    [weight] = lease.views(0, [SPAN])
    weight.detach().share_memory_()
    assert lease.in_use


def test_a_saved_weight_holds_its_slot_before_anybody_else_may_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its view was made after the lock was given back: another thread's backward could overwrite the slot in between."""
    held: list[bool] = []
    bring = SavedTensors._bring

    def watched(self: SavedTensors, layer: StreamedLayer, *rest: Any) -> Tensor:
        def make_room(layers: Any) -> None:
            held.append(self.engine.residency.used[layer].lease.in_use)

        with monkeypatch.context() as patch:
            patch.setattr(self.engine.backward, "make_room", make_room)
            return bring(self, layer, *rest)

    monkeypatch.setattr(SavedTensors, "_bring", watched)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(4)))
    with streamed(net, Device(torch.device("cpu")), k=1, k_prime=1) as engine:
        loss = step(engine, lambda: net(torch.ones(2, 4)).sum())
        loss.backward()
    assert held
    assert all(held)
