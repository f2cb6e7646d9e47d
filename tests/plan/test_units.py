"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from sp_lightning.plan.units import enough_gib, exact_bytes, in_gib, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (96 * 2**30, "96GiB"),
        (2500 * 2**20, "2500MiB"),
        (24 * 10**9, "24GB"),
        (241 * 2**29, "120.5GiB"),
        (3 * 2**40, "3TiB"),
        (2**20 + 1, "1048577B"),
        (1, "1B"),
    ],
)
def test_a_size_is_written_as_it_was_read(nbytes: int, text: str) -> None:
    assert exact_bytes(nbytes) == text
    assert parse_bytes("it", text) == nbytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (119.7 * 2**30, "119.7 GiB"),
        (2**50, "1048576.0 GiB"),
        (1002 * 2**20, "0.979 GiB"),
        (192 * 2**20, "0.188 GiB"),
        (25 * 2**20, "25.0 MiB"),
        (2**10, "1.0 KiB"),
    ],
)
def test_figures_that_are_compared_have_one_unit(nbytes: float, text: str) -> None:
    assert in_gib(nbytes) == text


@pytest.mark.parametrize("nbytes", [1, 2**30, 2**30 + 1, 126_455_000_000])
def test_what_is_enough_is_the_least_thousandth(nbytes: int) -> None:
    assert nbytes <= parse_bytes("it", enough_gib(nbytes)) < nbytes + 2**30 / 1000 + 1
