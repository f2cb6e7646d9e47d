"""How many threads the primary's updates take."""

from __future__ import annotations

from unittest import mock

import pytest

from sp_lightning.experimental.ranks.placement import update_threads


@pytest.mark.parametrize(
    ("own", "processes", "cores", "expected"),
    [
        (12, 8, 96, 88),  # Lightning's part of the processors for each of eight
        (1, 8, 96, 8),  # torchrun's
        (12, 8, 12, 11),  # each process is bound to processors of its own
        (1, 2, 2, 1),
    ],
)
def test_updates_take_the_threads_of_all_processes(own: int, processes: int, cores: int, expected: int) -> None:
    with (
        mock.patch("torch.get_num_threads", return_value=own),
        mock.patch("os.sched_getaffinity", return_value=set(range(cores))),
    ):
        assert update_threads(processes) == expected
