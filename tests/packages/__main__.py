"""Compares the models of all packages, plain and streamed: ``python -m tests.packages [--venv FOLDER] [NAME ...]``."""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from tests.support.repository import result_row

ROOT = Path(__file__).parents[2]
NAMES = sorted(
    file.stem
    for file in Path(__file__).parent.glob("*.py")
    if file.stem not in ("__init__", "__main__", "child", "modes") and not file.stem.startswith("test_")
)
WAYS = {
    "streamed": {"k": 1},
    "activations recomputed": {"k": 1, "activations": "recompute"},
}
"""Options of the strategy. Torch's own step is taken, because that is what plain Lightning takes."""


class Found(NamedTuple):
    """What is known of a package's models.

    Attributes:
        versions: the packages that were installed for it, with their versions.
        trained: the models that plain Lightning trains twice to the same bits, each with its number of layers.
        left: those that it does not, and why.
        differ: for each way, what differs: the model, and what.
        refused: for each way, the models that the strategy raised an error for, and which.
    """

    versions: str
    trained: dict[str, int]
    left: dict[str, str]
    differ: dict[str, list[str]]
    refused: dict[str, list[str]]


def main() -> None:
    """Prints what differs, and a row of ``examples/results/README.md``. The exit status is 1 if anything differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)} (all)")
    parser.add_argument("--venv", type=Path, help="where to install the packages, or where they are (a new folder)")
    asked = parser.parse_args()
    names = asked.names or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"no such package: {', '.join(sorted(unknown))}. There are {', '.join(NAMES)}.")
    python = _install(asked.venv or Path(tempfile.mkdtemp()), [_requires(name) for name in names])
    found = {}
    for name in names:
        found[name] = _compare(python, name)
        print(f"{name}: {len(found[name].trained)} models; {'; '.join(_counts(found[name]))}", flush=True)
    print("\n".join(_report(found)))
    models = sum(len(each.trained) for each in found.values())
    totals = (f"{way}: {sum(len(each.differ[way]) for each in found.values())} differ" for way in WAYS)
    print(result_row(f"{models} models of packages", "; ".join(totals), f"python -m tests.packages {' '.join(names)}"))
    sys.exit(any(any(each.differ.values()) for each in found.values()))


def _requires(name: str) -> list[str]:
    """What a file says it needs; the file cannot be imported before that is installed."""
    tree = ast.parse((Path(__file__).parent / f"{name}.py").read_text())
    said = next(
        each for each in tree.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "REQUIRES"
    )
    required: list[str] = ast.literal_eval(said.value)
    return required


def _install(venv: Path, required: list[list[str]]) -> Path:
    python = venv / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        wanted = sorted({each for some in required for each in some})
        subprocess.run(
            [python, "-m", "pip", "install", "-q", "-e", str(ROOT), "torchvision", "pytorch_lightning", *wanted],
            check=True,
        )
    return python


def _compare(python: Path, name: str) -> Found:
    reference, again = (_train(python, name, "plain") for _ in range(2))
    left = {model: seen["error"] for model, seen in reference.items() if seen["error"]}
    left |= {
        model: "plain Lightning has other bits each time" for model in reference if reference[model] != again.get(model)
    }
    trained = [model for model in reference if model not in left]
    layers: dict[str, int] = {}
    differ: dict[str, list[str]] = {}
    refused: dict[str, list[str]] = {}
    for way, options in WAYS.items():
        ours = _train(python, name, json.dumps(options))
        layers |= {
            model: max((loop.pop("layers") or 0 for loop in ours[model]["loops"]), default=0)
            for model in trained
            if model in ours and not ours[model]["error"]
        }
        errors = {model: ours[model]["error"] for model in trained if model in ours and ours[model]["error"]}
        refused[way] = [f"{model}: {error}" for model, error in errors.items()]
        pairs = ((model, _difference(reference[model], ours.get(model))) for model in trained if model not in errors)
        differ[way] = [f"{model}: {said}" for model, said in pairs if said]
    versions = ", ".join(f"{each} {_version(python, each)}" for each in _requires(name))
    return Found(versions, {model: layers.get(model, 0) for model in trained}, left, differ, refused)


def _train(python: Path, name: str, how: str) -> dict[str, Any]:
    """What a process of its own has seen of each model."""
    environment = {**os.environ, "PYTHONHASHSEED": "0", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [python.absolute(), "-W", "ignore", "-m", "tests.packages.child", name, how]
        ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    lines = [json.loads(line.removeprefix("SEEN ")) for line in ran.stdout.splitlines() if line.startswith("SEEN ")]
    if ran.returncode:
        print(f"{name}, {how}: exit status {ran.returncode}\n{ran.stderr[-2000:]}", file=sys.stderr)
    return {line.pop("model"): line for line in lines}


def _difference(plain: Any, ours: Any) -> str | None:
    if ours is None:
        return "the process ended before it"
    pairs = zip(plain["loops"], ours["loops"], strict=True)
    parts = [f"{one['loop']}: {key}" for one, other in pairs for key in other if one[key] != other[key]]
    return ", ".join(parts) or None


def _version(python: Path, requirement: str) -> str:
    script = f"from importlib.metadata import version; print(version({requirement.split('[')[0]!r}))"
    return subprocess.run([python, "-c", script], capture_output=True, text=True, check=True).stdout.strip()


def _counts(found: Found) -> list[str]:
    """In words, for each way, how many models differ."""
    refused = {way: f", {len(said)} refused" if said else "" for way, said in found.refused.items()}
    return [f"{way}: {len(said)} differ{refused[way]}" for way, said in found.differ.items()]


def _report(found: dict[str, Found]) -> Iterator[str]:
    """The models of each package, and everything that differs, was refused, or was left out."""
    for name, each in found.items():
        layers = f"{min(each.trained.values())} to {max(each.trained.values())} layers" if each.trained else "none"
        yield f"{name} ({each.versions}; {layers}): {', '.join(each.trained)}"
        for way in WAYS:
            yield from (f"  differs, {way}: {said}" for said in each.differ[way])
            yield from (f"  refused, {way}: {said}" for said in each.refused[way])
        yield from (f"  left out: {model} ({said[:150]})" for model, said in each.left.items())


if __name__ == "__main__":
    main()
