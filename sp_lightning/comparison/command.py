"""The command ``check`` of the command line. Nothing here imports torch before the command runs, so that ``--help`` is fast."""

from __future__ import annotations

import argparse
import ast
import sys
import traceback
from pathlib import Path
from typing import Any

from sp_lightning.comparison.options import STRATEGY_OPTIONS

HELP = "compare your own model with plain Lightning, bit for bit (exit status 1: different, 2: not compared)"

_CHECK_OPTIONS = ("factory", "data", "config", "steps", "seed")
_TRAINER_OPTIONS = ("accelerator", "precision")
_LISTS = ("layers", "keep_on_gpu")
_ALL_MODES = {"activations": '; "all" tries every mode', "optimizer_overlap": '; "all" tries every mode'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the command to its parser."""
    parser.add_argument("factory", nargs="?", help="package.module:Factory, which makes the LightningModule")
    parser.add_argument("--data", help="package.module:Name, which makes a LightningDataModule or training batches")
    parser.add_argument("--config", type=Path, help="a config of Lightning's CLI, in place of both")
    parser.add_argument("--steps", type=int, default=4, help="how many batches are trained (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="what randomness begins with (%(default)s)")
    parser.add_argument("--json", action="store_true", help="for programs")
    for name in _TRAINER_OPTIONS:
        parser.add_argument(f"--{name}", type=_value, help=f"as Trainer({name}=…)")
    for name in STRATEGY_OPTIONS:
        flags = [f"--{name.replace('_', '-')}"]
        meaning = f"as SuperpipelineStrategy({name}=…){_ALL_MODES.get(name, '')}"
        parser.add_argument(*flags, dest=name, type=_value, nargs="+" if name in _LISTS else None, help=meaning)


def _value(text: str) -> Any:
    """Returns a Python value, or the text itself if it is not a literal."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def run(arguments: argparse.Namespace) -> None:
    """Runs the check and prints its report on the standard output.

    Raises:
        ValueError, TypeError: an option is invalid.
        SystemExit: with status 1 if something differs, with status 2 if nothing was compared.
    """
    from sp_lightning.comparison.check import check

    given = {name: value for name, value in vars(arguments).items() if value is not None}
    trainer = {name: given[name] for name in _TRAINER_OPTIONS if name in given}
    options = {name: given[name] for name in (*_CHECK_OPTIONS, *STRATEGY_OPTIONS) if name in given}
    try:
        report = check(**options, trainer=trainer)
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
