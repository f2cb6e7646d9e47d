"""What ``superpipeline plan`` answers, for programs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.arguments import Question, make_parser


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The answer; the exit status has to be that of its verdict."""
    status: Any = 0
    try:
        main(["plan", *arguments, "--json"])
    except SystemExit as ended:
        status = ended.code
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert status == (1 if found["best"] is None else 0)
    return found


def question(*arguments: str) -> Question:
    """What such a command line asks."""
    asked = make_parser().parse_args(["plan", *arguments], namespace=Question())
    asked.given = frozenset(vars(make_parser(usual=False).parse_args(["plan", *arguments])))
    return asked
