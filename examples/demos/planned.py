"""What ``python -m sp_lightning plan --hours`` chooses for a budget of time, and at the end that beside what was reached."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.demos.console import say


@dataclass(frozen=True)
class Planned:
    """What the plan chose and expects.

    Attributes:
        batch, accumulate: sequences of a batch, batches of a step.
        strategy: options of ``SuperpipelineStrategy``.
        precision: of the trainer.
        seconds, steps, seconds_per_step: of the time that it was asked for, as predicted; 0 where nothing was.
    """

    batch: int
    accumulate: int
    strategy: dict[str, Any]
    precision: str
    seconds: float = 0.0
    steps: int = 0
    seconds_per_step: float = 0.0


def read_plan(answer: str, source: str) -> Planned:
    """From the text of ``plan --hours … --json``.

    Raises:
        ValueError: it is something else.
    """
    try:
        plan = json.loads(answer)
        budget = plan["budget"]
        return Planned(
            batch=budget["batch_size"],
            accumulate=budget["accumulate_grad_batches"],
            strategy=plan["strategy"],
            precision=plan["precision"],
            seconds=3600 * budget["hours"],
            steps=budget["steps"],
            seconds_per_step=budget["seconds_per_step"],
        )
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{source} is no answer of `python -m sp_lightning plan --hours … --json`: {error!r}"
        ) from error


def ask_plan(config: Path, *, hours: float, **options: Any) -> Planned:
    """Asks in a process of its own, as one would by hand; an option that is None is left out.

    Raises:
        ValueError: there is no plan, with the reason.
    """
    asked = {name: str(value) for name, value in options.items() if value is not None}
    words = [word for name, value in asked.items() for word in ("--" + name.replace("_", "-"), value)]
    command = ["-m", "sp_lightning", "plan", str(config), "--hours", f"{hours:.6g}", *words, "--json"]
    ran = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False)
    if ran.returncode:
        said = " ".join(ran.stderr.split()[-60:]) or "It does not fit. The same without --json says what is missing."
        raise ValueError(f"`python {' '.join(command)}` ended with status {ran.returncode}: {said}")
    return read_plan(ran.stdout, f"What `python {' '.join(command)}` printed")


def say_reached(planned: Planned, *, seconds: float, steps: int, tokens: int) -> None:
    """The table.

    Args:
        seconds: of the steps, without validations.
        steps, tokens: trained in them.
    """
    tokens_planned = planned.steps * tokens // max(steps, 1)  # a step has as many as it was planned with
    say(f"{'':<20} {'planned':>11} {'reached':>11}")
    say(f"{'seconds of training':<20} {planned.seconds:>11.1f} {seconds:>11.1f}")
    say(f"{'seconds per step':<20} {planned.seconds_per_step:>11.4f} {seconds / max(steps, 1):>11.4f}")
    say(f"{'steps':<20} {planned.steps:>11,} {steps:>11,}")
    say(f"{'tokens':<20} {tokens_planned:>11,} {tokens:>11,}")
