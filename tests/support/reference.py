"""Runs of a case under plain Lightning, each once."""

from __future__ import annotations

from typing import Any

from tests.support.models import CASES, Case
from tests.support.runs import Outcome, fit

_plain: dict[tuple[Any, ...], Outcome] = {}


def plain(name: str, **options: Any) -> Outcome:
    """The reference run, once for each case."""
    key = (name, *sorted(options.items()))
    if key not in _plain:
        _plain[key] = run(CASES[name], "auto", **options)
    return _plain[key]


def run(case: Case, strategy: Any, **options: Any) -> Outcome:
    batches = case.batches()
    # A batch that requires a gradient is a leaf of its own run; validation runs on copies without.
    val = None if any(getattr(batch, "requires_grad", False) for batch in batches) else case.batches()[:2]
    return fit(case.make, batches, strategy, val=val, **options)
