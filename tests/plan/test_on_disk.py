"""What follows optimizer state to the disk, and in which order."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sp_lightning.model.find import find_layers
from sp_lightning.plan.plan import Plan, make_plan
from sp_lightning.plan.state_placement import WINDOW, OnDisk, choose_on_disk

LAYERS = 8


def plan(layers: int = LAYERS, *, autocast: torch.dtype | None = None) -> Plan:
    module = nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers)))
    return make_plan(find_layers(module, autocast=autocast), k=1, k_prime=1)


def names(chosen: OnDisk) -> tuple[list[str], list[str]]:
    return [layer.name for layer in chosen.weights], [layer.name for layer in chosen.gradients]


def test_nothing_is_missing() -> None:
    assert choose_on_disk(plan(), 0, gradients=True) == OnDisk()
    assert choose_on_disk(plan(), -1, gradients=True) == OnDisk()


def test_gradients_go_before_weights_and_no_more_than_are_missing() -> None:
    found = plan()
    each = found.layers[0].gradient_bytes
    chosen = choose_on_disk(found, each, gradients=True)
    assert names(chosen) == ([], [str(i) for i in range(WINDOW + 1)])
    assert chosen.spared == each
    assert chosen.window == WINDOW * each


def test_weights_follow_if_gradients_are_not_enough() -> None:
    found = plan()
    each = found.layers[0].nbytes
    all_gradients = (LAYERS - WINDOW) * found.layers[0].gradient_bytes
    weights, gradients = names(choose_on_disk(found, all_gradients + each, gradients=True))
    assert len(gradients) == LAYERS
    assert weights == [str(i) for i in range(WINDOW + 1)]


def test_masters_go_first() -> None:
    found = plan(autocast=torch.bfloat16)
    everything = choose_on_disk(found, 2**60, gradients=True)
    assert everything.weights[: len(found.masters)] == found.masters
    assert everything.weights[len(found.masters) :] == found.layers
    few = choose_on_disk(found, found.masters[0].nbytes, gradients=True)
    assert few.gradients == ()
    assert few.weights == found.masters[: WINDOW + 1]


def test_gradients_of_few_layers_would_take_more_memory_than_they_leave() -> None:
    assert choose_on_disk(plan(WINDOW), 2**60, gradients=True).gradients == ()


def test_where_few_gradients_are_there_at_once_none_are_asked() -> None:
    assert choose_on_disk(plan(), 2**60, gradients=False).gradients == ()


@pytest.mark.parametrize("but", [(), ("3",)])
def test_layers_that_are_read_in_place_are_not_asked(but: tuple[str, ...]) -> None:
    weights, _ = names(choose_on_disk(plan(), 2**60, but, gradients=True))
    assert weights == [str(i) for i in range(LAYERS) if str(i) not in but]
