"""Everything is closed, whatever one of its parts raises."""

from __future__ import annotations

import pytest

from sp_lightning.core.device.closing import close_all


def test_an_interrupt_in_one_part_leaves_out_no_other() -> None:
    """The part that was interrupted has another try."""
    done: list[str] = []
    interrupts = [KeyboardInterrupt()]

    def interrupted() -> None:
        if interrupts:
            raise interrupts.pop()
        done.append("b")

    with pytest.raises(KeyboardInterrupt):
        close_all(lambda: done.append("a"), interrupted, lambda: done.append("c"))
    assert done == ["a", "a", "b", "c"]


def test_a_part_that_fails_each_time_leaves_out_no_other() -> None:
    done: list[str] = []

    def fails() -> None:
        raise KeyError("b")

    with pytest.raises(KeyError, match="b"):
        close_all(lambda: done.append("a"), fails, lambda: done.append("c"))
    assert done == ["a", "a", "c"]
