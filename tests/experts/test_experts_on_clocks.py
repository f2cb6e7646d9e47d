"""A step with packed experts takes as long as ``plan`` says: the real engine on a device whose streams are clocks."""

from __future__ import annotations

import pytest

from tests.experts import on_clocks


@pytest.mark.long("a model with 24 layers of 32 experts is trained")
@pytest.mark.parametrize("card", list(on_clocks.CARDS))
def test_a_step_takes_as_long_as_planned(card: str) -> None:
    """On the large card all layers have a slot, and a step took a quarter longer: each batch waited for all its uploads."""
    found = on_clocks.measure("gpt-oss-20b", card, "mxfp4")
    assert 0.9 < found.measured / found.planned < 1.1
