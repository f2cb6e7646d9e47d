"""Raised messages follow the rules for messages, as far as a program can see (``python -m tests.repository.messages``)."""

from __future__ import annotations

import re

import pytest

from tests.repository.messages import Message, messages, raised

AVOIDED = re.compile(
    r"\b(?:is no|are no|none of|so many|on paper|but for|of yours|absorbed|on their way|for want of|anew)\b|, say\b",
    re.IGNORECASE,
)
MOST_WORDS = 30
MESSAGES = messages()


def words(message: Message) -> list[int]:
    """The words of each sentence. A value counts as one."""
    text = re.sub(r"\{[^}]*\}|<[^>]*>", "X", message.text)
    return [len(each.split()) for each in re.split(r"(?<=[.?!:;])\s", text)]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: f"{message.file}:{message.line}")
def test_a_message_is_plain_and_short(message: Message) -> None:
    assert AVOIDED.findall(message.text) == []
    assert max(words(message)) <= MOST_WORDS


def test_messages_are_found_and_read_as_people_see_them() -> None:
    assert len(MESSAGES) > 200
    source = """
_WHY = "of X."
def f(name):
    if name:
        raise ValueError(f"{name!r} is no name because " "of this: " + _WHY)
    raise KeyError(name)
"""
    (found,) = raised(source, "file.py")
    assert str(found) == "file.py:5 ValueError\n    {name} is no name because of this: of X."
    assert AVOIDED.findall(found.text) == ["is no"]
