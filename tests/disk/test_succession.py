"""What comes next is what came the last time after the same ones."""

from __future__ import annotations

from itertools import islice

from sp_lightning.capabilities.disk.state_placement import AccessPredictor


def after(depth: int, used: str) -> str:
    succession = AccessPredictor[str](depth)
    for each in used:
        succession.note(each)
    return "".join(islice(succession.coming(), 9))


def test_it_goes_round_once() -> None:
    assert after(1, "abcda") == "bcd"
    assert after(2, "abcdab") == "cda"


def test_what_is_used_now_comes_last_for_who_needs_it_anew() -> None:
    """Weights in files are read anew for each fetch: where one layer alone is there, the next read is its own."""
    for used, coming in (("aaaa", "a"), ("ababab", "ab"), ("abcabc", "abc")):
        succession = AccessPredictor[str](2)
        for each in used:
            succession.note(each)
        assert "".join(succession.coming(itself=True)) == coming


def test_nothing_is_guessed_at_first() -> None:
    assert after(1, "") == after(1, "a") == after(1, "abc") == ""


def test_two_tell_forwards_from_backwards() -> None:
    """With one, what is guessed after the second layer in a forward is what came after it in backward."""
    assert after(2, "abccbaab") == "ccbaa"
    assert after(1, "abccbaab") == "a"


def test_it_ends_although_the_order_changes() -> None:
    """Each guess was used later than the one before, so that none comes twice."""
    for order in ("abcacbab", "aab", "abab", "abbca", "cabacbbca"):
        assert len(after(1, order)) < len(set(order))
