"""A row of ``examples/results/README.md``, printed by the tests that take minutes to hours."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from pathlib import Path

import lightning
import torch

ROOT = Path(__file__).parents[2]
HEAD = "| claim | figure | machine, date | command | commit | page |"


def result_row(claim: str, figure: str, command: str) -> str:
    """Returns the row of a run on the CPU that ends now. The new row has no old page."""
    git = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    versions = f"Python {platform.python_version()}, torch {torch.__version__}, lightning {lightning.__version__}"
    machine = f"{platform.machine()}, {os.cpu_count()} cores, {versions}, {date.today()}"
    return f"| {claim} | {figure} | {machine} | `{command}` | {git.stdout.strip()} | – |"
