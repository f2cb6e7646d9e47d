"""Sizes as people write and read them."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sp_lightning.core.plan.units import enough_gib, exact_bytes, in_gib, in_one_unit, parse_bytes
from sp_lightning.tools.planner.arguments import make_parser
from sp_lightning.trainer.option_checks import checked_budget


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
    ("size", "nbytes"),
    [
        (size, 24 * 2**30)
        for size in (24, 24.0, np.int64(24), np.float32(24), "24", "24.0", "24GiB", "24 gib", "24Gi", "24G")
    ]
    + [("24GB", 24 * 10**9), (1.5, 3 * 2**29), ("1.5", 3 * 2**29), ("512MiB", 2**29), (9999, 9999 * 2**30)]
    + [(10_000, 10_000), (1e9, 10**9), ("8000000000", 8 * 10**9)],
)
def test_one_rule_reads_sizes(size: object, nbytes: int) -> None:
    """A number is GiB, and from 10,000 on bytes, in text, too. The options of the strategy and of `plan` agree."""
    assert parse_bytes("it", size) == checked_budget("it", size) == nbytes
    assert make_parser().parse_args(["plan", "it", "--gpu-memory", str(size)]).gpu_memory == nbytes


@pytest.mark.parametrize(
    "size", [0, -1, "0GiB", 0.8, 1.0, "0.5", "80%", "24 cows", "24GiBs", 10_000.5, math.inf, math.nan, ""]
)
def test_sizes_with_two_meanings_are_errors(size: object) -> None:
    with pytest.raises(ValueError, match="it takes a size"):
        parse_bytes("it", size)
    with pytest.raises(SystemExit):
        make_parser().parse_args(["plan", "it", "--host-memory", str(size)])


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


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((2**30, 20 * 2**30), ["1.0 GiB", "20.0 GiB"]),
        ((50 * 2**20, 2**30), ["0.0488 GiB", "1.0 GiB"]),
        ((125 * 2**10, 2.4 * 2**20), ["0.122 MiB", "2.4 MiB"]),
        ((0, 2048), ["0 KiB", "2.0 KiB"]),
        ((7,), ["7.0 B"]),
    ],
)
def test_sizes_in_one_sentence_have_the_unit_of_the_largest(sizes: tuple[float, ...], texts: list[str]) -> None:
    assert in_one_unit(*sizes) == texts


@pytest.mark.parametrize("nbytes", [1, 2**30, 2**30 + 1, 126_455_000_000])
def test_what_is_enough_is_the_least_thousandth(nbytes: int) -> None:
    assert nbytes <= parse_bytes("it", enough_gib(nbytes)) < nbytes + 2**30 / 1000 + 1
