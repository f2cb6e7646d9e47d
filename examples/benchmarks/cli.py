"""What the command lines share: options that are checked before anything is measured, and an orderly end."""

from __future__ import annotations

import math
import os
import shlex
import signal
from argparse import ArgumentTypeError
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.benchmarks import rows

ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def positive(text: str) -> float:
    """A finite number above zero."""
    number = float(text)
    if not 0 < number < math.inf:
        raise ArgumentTypeError(f"{text} is not above zero")
    return number


def rows_file(text: str) -> Path:
    """A file that rows can be appended to; of a folder, its ``rows.jsonl``."""
    path = Path(text)
    path = _writable(path / "rows.jsonl" if path.is_dir() or text.endswith("/") else path)
    if path.is_file():
        try:
            rows.read(path)  # appended to a broken file, rows could not be reported
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from error
    return path


def report_folder(text: str) -> Path:
    """A folder that a report can be written to."""
    path = Path(text)
    if path.is_file():
        raise ArgumentTypeError(f"{path} is a file, expected a folder. For example {path.parent}.")
    _writable(path / "report.md")
    return path


def rows_folder(text: str) -> Path:
    """A folder for rows and their report."""
    return rows_file(f"{text}/").parent


def _writable(path: Path) -> Path:
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if there.is_dir() == (there is path):
        raise ArgumentTypeError(f"{there} is a {'folder, expected a file' if there is path else 'file, not a folder'}")
    if not os.access(there, os.W_OK):
        raise ArgumentTypeError(f"{there} cannot be written to. Choose another --out.")
    return path


def report_command(file: Path) -> str:
    """What makes the report of a file of rows."""
    return f"python -m examples.benchmarks.report {shlex.quote(str(file))}"


@contextmanager
def orderly(file: Path) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP end the block through its ``finally`` clauses, then the process with exit code 130.

    A second signal does not disturb the first one's work; one that was ignored (``nohup``) stays so.
    """

    def end(*_: object) -> None:
        for number in before:
            signal.signal(number, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = {number: old for number in ENDS if (old := signal.getsignal(number)) is not signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, end)
        yield
    except KeyboardInterrupt:
        count = len(rows.read(file)) if file.is_file() else 0
        print(f"\ninterrupted: {count} rows in {file}; report: {report_command(file)}", flush=True)
        raise SystemExit(130) from None
    finally:
        for number, old in before.items():
            signal.signal(number, old)
