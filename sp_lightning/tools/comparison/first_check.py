"""``check`` without a model: small models in several modes, and rates of this machine, in one file for a report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from sp_lightning.registry import needed_for
from sp_lightning.tools.comparison import small_models
from sp_lightning.tools.comparison.check import check_variants
from sp_lightning.tools.comparison.options import MODES, SMALL
from sp_lightning.tools.comparison.report import Report
from sp_lightning.tools.comparison.subject import Subject

_SECONDS = 5.0  # for the rates, which repeat each measurement less often than the command ``rates``


def first_check(
    every: bool, *, steps: int, seed: int, trainer: dict[str, Any], options: dict[str, Any]
) -> tuple[int, str, dict[str, Any]]:
    """Checks small models in all modes of :data:`MODES`, and measures this machine.

    Args:
        every: True for models of all installed packages, False for those that are made of torch alone.
        steps: the batches of each run.
        seed: the seed of all random states.
        trainer: arguments of ``Trainer``.
        options: options of the strategy.

    Returns:
        The highest status of the reports, the text for the user, and the contents of the file: rates for ``plan --rates``, and
        the reports.

    Raises:
        ValueError, TypeError: an option is invalid.
    """
    reports: dict[str, Report] = {}
    for name, package in SMALL.items():
        if package == "torch" or (every and find_spec(package)):
            print(f"check: {name}", file=sys.stderr, flush=True)
            subject = Subject(getattr(small_models, name), None, None, steps, seed, trainer)
            with small_models.one_thread():
                reports[name] = check_variants(subject, options, MODES)
    print("check: rates of this machine", file=sys.stderr, flush=True)
    with needed_for("check without a model", can_leave_out=False):
        from sp_lightning.tools.planner.measured import run_rates

    # Without an accelerator, rates of the device stay those that plan assumes, unless the user names the CPU.
    on = "cpu" if trainer.get("accelerator") == "cpu" else None
    found: dict[str, Any] = json.loads(run_rates(argparse.Namespace(accelerator=on, disk=None, seconds=_SECONDS)))
    found |= {"checks": {name: json.loads(each.as_json()) for name, each in reports.items()}}
    lines = [line for name, each in reports.items() for line in _lines(name, each)]
    rates = {name: value for name, value in found["measured"].items() if isinstance(value, (str, float))}
    lines += [f"Measured for plan: {_joined(rates)}."]
    return max(each.status for each in reports.values()), "\n".join(lines), found


def _lines(name: str, report: Report) -> Sequence[str]:
    if report.status:
        return [f"{name}:", str(report)]
    tensors = sum(row.tensors for row in report.rows.values())
    return [f"{name}: equal in all modes ({', '.join(MODES)}); {tensors:,} tensors compared.", *report.notes]


def _joined(values: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
