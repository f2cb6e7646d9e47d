"""One row of a benchmark: a line of JSON that says what ran where, appended to a file at once; options for such files."""

from __future__ import annotations

import ast
import datetime
import hashlib
import json
import math
import os
import platform
import shlex
import signal
import subprocess
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from sp_lightning.tools.machine import processor

Row = dict[str, Any]

REPOSITORY = Path(__file__).parents[2]
RUN = "BENCHMARKS_RUN"  # the environment variable that tells a child whose run it is part of
DISTRIBUTIONS = (
    "torch", "lightning", "transformers", "torchvision", "accelerate", "diffusers", "deepspeed", "torchao"
)  # fmt: skip
# What every row has.
KEYS = ("kind", "status", "machine", "versions", "python", "commit", "date", "command")


def installed(distribution: str) -> str | None:
    """The version of a distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def cgroup_limit() -> int | None:
    """Bytes of host memory that the control group allows, or None. A container shows the host's memory elsewhere."""
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file() and (text := path.read_text().strip()).isdigit():
            return int(text)
    return None


def host_bytes() -> int:
    """Host memory that this machine has, in bytes."""
    total = psutil.virtual_memory().total
    return min(total, cgroup_limit() or total)


def host_bytes_free() -> int:
    """Host memory that a new process may take, in bytes."""
    free = psutil.virtual_memory().available
    limit = cgroup_limit()
    return free if limit is None else min(free, limit)


def machine() -> Row:
    """What the figures depend on. Memory in bytes."""
    accelerator = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "accelerator": accelerator.name if accelerator else None,
        "accelerator_bytes": accelerator.total_memory if accelerator else None,
        "processor": processor(),
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "host_bytes": host_bytes(),
    }


def commit() -> str:
    """The commit that ran, "+" where tracked files differ from it; of a copy without git, what ``$COMMIT`` says."""
    try:
        run = ["git", "-C", str(REPOSITORY), "describe", "--always", "--abbrev=12", "--exclude=*", "--dirty=+"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("COMMIT", "unknown")


def digest(paths: Iterable[str]) -> str:
    """A digest of the code in files and folders of the repository. Comments, docstrings and line breaks do not change it."""
    files = (path for name in paths for path in sorted(_files(REPOSITORY / name)))
    return hashlib.sha256(b"".join(_code(path) for path in files)).hexdigest()[:12]


def _files(path: Path) -> Iterable[Path]:
    if not path.exists():
        raise ValueError(
            f"{path}: there is no such file or folder, so that it has no digest. Expected one of the repository."
        )
    return path.rglob("*.py") if path.is_dir() else [path]


class _NoText(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.stmt | None:
        return None if isinstance(node.value, ast.Constant) else node


@cache
def _code(path: Path) -> bytes:
    return (
        path.relative_to(REPOSITORY).as_posix().encode()
        + ast.unparse(_NoText().visit(ast.parse(path.read_bytes()))).encode()
    )


def run() -> str:
    """What rows of one run have in common: when its first process started."""
    started = datetime.datetime.fromtimestamp(psutil.Process().create_time(), datetime.UTC)
    return os.environ.get(RUN) or started.isoformat(timespec="seconds")


def origin() -> Row:
    """Where and when a row comes from."""
    return {
        "run": run(),
        "machine": machine(),
        "versions": {name: found for name in DISTRIBUTIONS if (found := installed(name))},
        "python": platform.python_version(),
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": shlex.join(sys.orig_argv),
    }


def append(path: Path, row: Row) -> None:
    """Add a row to the file now: what comes later may be cut off."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def read(path: Path) -> list[Row]:
    """All rows of a file.

    Raises:
        ValueError: there is no such file, or a line is no row.
    """
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file. Measure first: python -m examples.benchmarks --out FOLDER.")
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            rows += [_parsed(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}. Delete it: sed -i {number}d {path}") from error
    return rows


def _parsed(line: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"is no JSON ({error.msg})") from error
    missing = [key for key in KEYS if key not in row] if isinstance(row, dict) else KEYS
    if missing:
        raise ValueError(f"is no row, which has {', '.join(missing)}")
    return {"run": "unknown", **row}


# ---------------------------------------------------------------------- command lines


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
            read(path)  # appended to a broken file, rows could not be reported
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
        count = len(read(file)) if file.is_file() else 0
        print(f"\ninterrupted: {count} rows in {file}; report: {report_command(file)}", flush=True)
        raise SystemExit(130) from None
    finally:
        for number, old in before.items():
            signal.signal(number, old)
