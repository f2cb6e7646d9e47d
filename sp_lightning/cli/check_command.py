"""The command ``check``: its arguments, which are those of the strategy, too, and its exit status."""

from __future__ import annotations

import argparse
import ast
import sys
import traceback
from pathlib import Path
from typing import Any

from sp_lightning.comparison.check import check
from sp_lightning.comparison.subject import OPTIONS

_SUBJECT = ("factory", "data", "config", "steps", "seed")
_TRAINER = ("accelerator", "precision")
_SEVERAL = ("layers", "resident")
_ALL = {"activations": '; "all" tries every mode', "optimizer_overlap": '; "all" tries every mode'}


def _value(text: str) -> Any:
    """A Python value, or the text itself where it is none."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def add_check(commands: Any) -> None:
    """Adds the command to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "check", help="is your own model bitwise that of plain Lightning? (exit status 1: it differs, 2: not compared)"
    )
    parser.add_argument("factory", nargs="?", help="package.module:Factory, which makes the LightningModule")
    parser.add_argument("--data", help="package.module:Name, which makes a LightningDataModule or training batches")
    parser.add_argument("--config", type=Path, help="a config of Lightning's CLI, in place of both")
    parser.add_argument("--steps", type=int, default=4, help="how many batches are trained (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what randomness begins with (%(default)s)")
    parser.add_argument("--json", action="store_true", help="for programs")
    for name in _TRAINER:
        parser.add_argument(f"--{name}", type=_value, help=f"as Trainer({name}=…)")
    for name in OPTIONS:
        flags = [f"--{name.replace('_', '-')}", *(["--overlap"] if name == "optimizer_overlap" else [])]
        meaning = f"as SuperpipelineStrategy({name}=…){_ALL.get(name, '')}"
        parser.add_argument(*flags, dest=name, type=_value, nargs="+" if name in _SEVERAL else None, help=meaning)


def run_check(arguments: argparse.Namespace) -> None:
    """Checks, and prints the report on the standard output.

    Raises:
        ValueError, TypeError: an option cannot be.
        SystemExit: with status 1 if something differs, with status 2 if nothing was compared.
    """
    given = {name: value for name, value in vars(arguments).items() if value is not None}
    trainer = {name: given[name] for name in _TRAINER if name in given}
    named = {name: given[name] for name in (*_SUBJECT, *OPTIONS) if name in given}
    try:
        report = check(**named, trainer=trainer)
    except (ValueError, TypeError, ImportError, OSError):
        raise
    except BaseException as error:  # Lightning makes SystemExit(1) of Ctrl-C, and SystemExit(0) of SIGTERM
        if isinstance(error, Exception):
            traceback.print_exc()
        print(f"Nothing was compared. {type(error).__name__}: {error}", file=sys.stderr)
        raise SystemExit(2) from error
    print(report.as_json() if arguments.json else report, flush=True)
    if report.status:
        raise SystemExit(report.status)
