"""Small tensors have values in a dry run as long as all that they come from is known."""

from __future__ import annotations

import pytest
import torch

from sp_lightning.tools.planner.fake import VALUES_NEEDED, fake_tensors
from sp_lightning.tools.planner.known_values import answered, known_values


def test_what_a_vision_tower_asks_for_is_answered() -> None:
    with fake_tensors(), known_values():
        sizes = torch.tensor([[1, 4, 6], [1, 2, 2]])
        patches = torch.randn(28, 8)
        mask = torch.tensor([True, False, True, True])
        assert [*map(int, sizes.prod(1))] == [24, 4]
        assert torch.repeat_interleave(sizes[:, 1], sizes[:, 2]).shape == (8,)
        assert patches[:4][mask].shape == (3, 8)
        assert [*map(int, torch.nonzero(mask)[:, 0])] == [0, 2, 3]
        assert int(torch.tensor([sizes[0, 1], 3]).sum()) == 7
        assert float(torch.linspace(0, 3, 4)[2]) == 2.0


def test_what_is_written_in_place_changes_each_view() -> None:
    with fake_tensors(), known_values():
        ids = torch.zeros(6, dtype=torch.long)
        view = ids[2:4]
        ids[:3] = 4
        assert [*map(int, view)] == [4, 0]
        ids[5] = torch.randn(3).sum().long()
        for spoiled in (ids, view):
            with pytest.raises(VALUES_NEEDED):
                int(spoiled[0])


def test_what_comes_from_weights_has_no_values() -> None:
    with fake_tensors():
        weight = torch.ones(4)
        with known_values(), pytest.raises(VALUES_NEEDED):
            bool((weight > 0).all())


def test_values_are_kept_only_if_something_asks() -> None:
    """As a rule nothing does, and then a batch is run once."""
    runs = []

    def asks() -> int:
        runs.append(1)
        return int(torch.arange(3)[2])

    with fake_tensors():
        assert answered(asks) == 2
        assert len(runs) == 2
        runs.clear()
        assert answered(asks, at_once=True) == 2
        assert len(runs) == 1
