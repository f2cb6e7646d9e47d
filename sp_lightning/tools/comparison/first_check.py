"""``check`` without a model: small models in several modes, formulas and rates of this machine, in one file for a report."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from sp_lightning.core.device.accelerator import plain_steps_on
from sp_lightning.registry import is_installed, needed_for
from sp_lightning.tools.comparison import small_models
from sp_lightning.tools.comparison.check import check_variants
from sp_lightning.tools.comparison.options import MODES, SMALL
from sp_lightning.tools.comparison.report import Report
from sp_lightning.tools.comparison.runs import root_device, undisturbed
from sp_lightning.tools.comparison.subject import Subject

_SECONDS = 5.0  # for the rates, which repeat each measurement less often than the command ``rates``
_OPTIMIZERS = (torch.optim.AdamW, torch.optim.Adam, torch.optim.SGD, torch.optim.Adagrad)


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
        The highest status of the reports, the text for the user, and the contents of the file: rates for ``plan --rates``, the
        reports and the formulas.

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
    with undisturbed(trainer):
        device = root_device(trainer)
    print("check: rates of this machine", file=sys.stderr, flush=True)
    with needed_for("check without a model", can_leave_out=False):
        from sp_lightning.tools.planner.measured import run_rates

    # Without an accelerator, rates of the device stay those that plan assumes, unless the user names the CPU.
    on = "cpu" if trainer.get("accelerator") == "cpu" else None
    found: dict[str, Any] = json.loads(run_rates(argparse.Namespace(accelerator=on, disk=None, seconds=_SECONDS)))
    confirmed = formulas(device)
    found |= {"formulas": confirmed, "checks": {name: json.loads(each.as_json()) for name, each in reports.items()}}
    lines = [line for name, each in reports.items() for line in _lines(name, each)]
    lines += [f"Formulas of the GPU's optimizer steps: {_joined(confirmed) or 'not needed on a CPU'}."]
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


def formulas(device: torch.device) -> dict[str, str]:
    """Returns "confirmed" for each optimizer whose steps on the CPU have the bits of the GPU's, else the reason.

    Empty on a CPU.
    """
    gpu = plain_steps_on(device)
    if gpu is None:
        return {}
    if not is_installed("capabilities.kernels"):
        return {"all": "sp_lightning/capabilities/kernels is not installed"}
    from sp_lightning.capabilities.kernels.like_gpu import LikeGpu

    module = nn.Linear(8, 8)
    against = partial(LikeGpu(gpu, fuse=False).against, module=module, scaled=False)
    return {kind.__name__: against(kind(module.parameters(), lr=0.1)) or "confirmed" for kind in _OPTIMIZERS}
