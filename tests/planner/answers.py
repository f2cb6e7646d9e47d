"""Two tables of the command line: ``answers.txt`` and ``refusals.txt``. After each command is what it prints.

A new row is a line that begins with ``$``, with a reason in a line above that begins with ``#``. Then

    python -m tests.planner.answers --write [WORDS]      (only the commands that contain the words)

runs the commands and writes what they print. Read the difference before you commit it.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers

from sp_lightning.__main__ import main
from sp_lightning.tools.planner import plan_command
from sp_lightning.tools.planner.answer import Answer
from sp_lightning.tools.planner.estimate import Estimate
from sp_lightning.tools.planner.report import as_fields

FOLDER = Path(__file__).parent
ANSWERS, REFUSALS = FOLDER / "answers.txt", FOLDER / "refusals.txt"


@dataclass(frozen=True)
class Row:
    """A command.

    Attributes:
        notes: the lines above it. One that begins with ``# long: `` moves the row to the third tier.
        command: its arguments.
        said: what it prints.
    """

    notes: tuple[str, ...]
    command: str
    said: tuple[str, ...]

    @property
    def slow(self) -> str:
        """Why the row is of the third tier; empty if it is not."""
        return next((note.removeprefix("# long: ") for note in self.notes if note.startswith("# long: ")), "")

    def lines(self) -> Iterator[str]:
        """Yields the row as it is written."""
        for note in self.notes:
            yield from (note, *[""] * note.startswith("# ---"))
        yield from (f"$ {self.command}", *(f"    {line}".rstrip() for line in self.said))


def read(table: Path) -> list[Row]:
    """Returns the rows of a table."""
    rows, notes = list[Row](), list[str]()
    for line in table.read_text().splitlines():
        if line.startswith("$ "):
            rows.append(Row(tuple(notes), line.removeprefix("$ "), ()))
            notes.clear()
        elif line.startswith("#"):
            notes.append(line)
        elif rows and not notes:
            rows[-1] = replace(rows[-1], said=(*rows[-1].said, line.removeprefix("    ")))
    return [replace(row, said=_trimmed(row.said)) for row in rows]


def versions() -> str:
    """The libraries whose models and operators the answers count, in the first line of a table."""
    return f"torch {torch.__version__.partition('+')[0]}, transformers {transformers.__version__}"


def differs(row: Row, said: tuple[str, ...], written_by: str) -> bool:
    """Returns True if a command prints something else now.

    With other libraries than those that a table was written by, their models may have other numbers, but not other words.
    """
    if written_by == versions() or ".models:" in row.command:
        return said != row.said
    return [_NUMBER.sub("", line) for line in said] != [_NUMBER.sub("", line) for line in row.said]


_NUMBER = re.compile(r" *[\d.]+(e[+-]\d+)?%?( [KMG]i?B| B)?")


def _trimmed(lines: tuple[str, ...]) -> tuple[str, ...]:
    return tuple("\n".join(lines).rstrip("\n").splitlines())


def run(command: str) -> tuple[str, ...]:
    """Returns what a command prints: its answer, numbers that only programs read, and its exit status if that is not 0."""
    found: list[Answer] = []
    out, errors, status = StringIO(), StringIO(), 0
    answer = plan_command.answer

    def noted(estimate: Estimate) -> Answer:
        found.append(answer(estimate))
        return found[-1]

    with (
        redirect_stdout(out), redirect_stderr(errors),
        mock.patch.object(plan_command, "answer", noted),
    ):  # fmt: skip
        try:
            main(shlex.split(command))
        except SystemExit as ended:
            status = int(ended.code or 0)
    lines = out.getvalue().splitlines()
    lines += [line for line in errors.getvalue().splitlines() if not line.startswith(("usage: ", "    "))]
    numbers = [line for each in found for line in _numbers(as_fields(each))]
    lines = [_COMMON.sub("…", line.rstrip()) for line in lines if line and not line.startswith(_OF_MOST)]
    return _trimmed((*lines, *numbers, *[f"exit status {status}"] * bool(status)))


# The rates that are assumed if none is given; and the text of an error of torch, which another version says otherwise.
_COMMON = re.compile(
    r"100 TFLOP/s, 1000 GB/s on the device, 25 GB/s each way, 60 GB/s of host memory \(.*?\)"
    r"|(?<=RuntimeError: ).*"
)
_OF_MOST = "note: No loss is counted, because the forward returns none; "  # most of the models here have no loss


def _numbers(found: dict[str, Any]) -> Iterator[str]:
    """Yields the numbers of an answer that its text does not have, with four digits."""
    window = found["windows"][0]
    sizes = {
        "plain": found["plain_bytes"],
        "checkpointed": found["checkpointed_bytes"],
        "device": window["device_bytes"],
    }
    sizes |= found["saved_bytes"] | {"offloaded": found["offloaded_bytes"], "FLOP": found["flops"]}
    yield f"numbers: {len(found['layers'])} layers, {len(found['tables'])} tables; {_rounded(sizes)}"
    yield f"host: {_rounded({**found['host_parts'], 'all': found['host_bytes']})}"
    yield f"seconds: {_rounded({'all': window['seconds'], **window['busy_seconds']})}; {window['binds']} binds"


def _rounded(values: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in values.items())


if __name__ == "__main__":
    from tests.planner.models import write_configs

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    words = " ".join(sys.argv[2:])
    assert sys.argv[1:2] == ["--write"], __doc__
    sys.path.insert(0, str(Path.cwd()))
    for table in (ANSWERS, REFUSALS):
        with tempfile.TemporaryDirectory() as folder, chdir(write_configs(Path(folder))):
            rows = [replace(r, said=run(r.command)) if words in r.command or not r.said else r for r in read(table)]
        table.write_text("\n\n".join([versions(), *("\n".join(row.lines()) for row in rows)]) + "\n")
