"""What follows optimizer state to the disk, and in which order."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

from sp_lightning.capabilities.disk.host_budget import MARGIN
from sp_lightning.capabilities.disk.state_placement import WINDOW, OnDisk, choose_on_disk, least_room, place_state
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import Plan, make_plan
from sp_lightning.core.plan.units import human_bytes, parse_bytes

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


# ---------------------------------------------------------------------- optimizer state


SIZES: list[dict[str, int]] = [
    {"large": 5 * 2**20, "b": 2**20, "c": 2**20},
    {"large": 5 * 2**20, **dict.fromkeys("bcdefgh", 2**20)},
    dict.fromkeys("abcdefgh", 2**20),
    {"a": 2**20},
    {},  # an optimizer without state: then nothing is asked of the disk, and memory alone helps
]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("room", [0, 2**18, -(2**22)])
@pytest.mark.parametrize("sizes", SIZES)
def test_memory_that_is_missing_is_enough_if_it_is_given(sizes: dict[str, int], room: int) -> None:
    if not sizes and room >= 0:
        assert place_state(sizes, room).memory_bytes == 0
        return
    missing = least_room(sizes) - room
    for given, remedy in ((None, "free (.*?)\\."), (2**30, 'host_memory="(.*?)" is enough')):
        with pytest.raises(MemoryError, match=re.escape(f"CPU memory is {human_bytes(missing)} too small")) as refused:
            place_state(sizes, room, given)
        (enough,) = re.findall(remedy, str(refused.value))
        more = parse_bytes("more", enough) - (given or 0)
        assert missing <= (1 - MARGIN) * more  # a share of what is given, and of what is free, is left to the process
        assert more < 1.1 * missing + 18 * 2**20
    placement = place_state(sizes, least_room(sizes))
    assert placement.memory_bytes <= least_room(sizes)
    assert placement.staging >= 2 * max(placement.on_disk.values(), default=0)
    with pytest.raises(MemoryError):
        place_state(sizes, least_room(sizes) - 1)


@pytest.mark.parametrize("sizes", SIZES)
def test_less_memory_puts_no_less_on_the_disk(sizes: dict[str, int]) -> None:
    rooms = range(least_room(sizes), sum(sizes.values()) + 1, 2**17)
    placements = [place_state(sizes, room) for room in rooms]
    assert all(each.memory_bytes <= room for each, room in zip(placements, rooms, strict=True))
    below = [each.disk_bytes for each in placements]
    assert below == sorted(below, reverse=True)


def test_state_of_the_largest_layers_stays() -> None:
    sizes = {"large": 8 * 2**20, "small": 2**20, "other": 2**20, "last": 2**20}
    placement = place_state(sizes, 8 * 2**20 + 2 * 2**20)
    assert list(placement.in_memory) == ["large"]
    assert placement.staging == 2 * 2**20


def test_a_placement_says_what_is_where_and_why() -> None:
    sizes = {"a": 2**20, "b": 2**20, "c": 2**20, "d": 2**20}
    assert str(place_state(sizes, 3 * 2**20)) == (
        "4.0 MiB of optimizer state, of 4 layers, are on the disk and pass through 3.0 MiB of CPU memory; 0 B stay in memory, "
        "because 3.0 MiB of CPU memory are left for both."
    )
    assert str(place_state(sizes, 2**22)) == (
        "All 4.0 MiB of optimizer state are in CPU memory; nothing is on the disk, because 4.0 MiB of CPU memory are left "
        "for it."
    )
    assert str(place_state(sizes, None)) == "All 4.0 MiB of optimizer state are in CPU memory; nothing is on the disk."
