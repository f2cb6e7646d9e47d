"""Sizes as people write and read them."""

from __future__ import annotations

import pytest

from sp_lightning.plan.units import exact_bytes, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (96 * 2**30, "96GiB"),
        (2500 * 2**20, "2500MiB"),
        (24 * 10**9, "24GB"),
        (3 * 2**40, "3TiB"),
        (2**20 + 1, "1048577B"),
        (1, "1B"),
    ],
)
def test_a_size_is_written_as_it_was_read(nbytes: int, text: str) -> None:
    assert exact_bytes(nbytes) == text
    assert parse_bytes("it", text) == nbytes
