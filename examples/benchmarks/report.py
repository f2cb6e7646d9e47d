"""Rows of one machine and commit → a Markdown report with a picture. Nothing in it comes from elsewhere.

Rows of different runs never share a table.

From the root of the repository::

    python -m examples.benchmarks.report runs/benchmarks/rows.jsonl
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from examples.benchmarks import pictures, rows
from examples.benchmarks.pictures import Picture, is_ours
from examples.benchmarks.rows import Row
from sp_lightning.core.plan.units import human_bytes

GIB = 2**30
NONE = "–"
FAMILIES = {
    "llm": "Llama-shaped language model",
    "vision": "Vision Transformer",
    "vlm": "LLaVA-shaped vision-language model",
}
STALLS = {  # counters of superpipeline, and their columns
    "stall_seconds": "fetch stall, s",
    "gradient_stall_seconds": "gradient stall, s",
    "update_stall_seconds": "wait for updates, s",
    "activation_stall_seconds": "wait for activations, s",
}
NO_PICTURE = "No picture: it needs matplotlib, and device memory figures of training, that is, an accelerator."


def one_origin(found: Sequence[Row]) -> None:
    """Check that all rows come from one machine and commit.

    Raises:
        ValueError: they do not.
    """
    machines = {_machine(row) for row in found}
    commits = {row["commit"] for row in found}
    for what, several in (("machines", machines), ("commits", commits)):
        if len(several) > 1:
            listed = "; ".join(sorted(map(str, several)))
            raise ValueError(f"The rows come from {len(several)} {what}: {listed}. Give one's rows, or --mixed.")


def render(found: Sequence[Row], drawn: Picture | None = None) -> str:
    """The report as Markdown; ``drawn`` is its picture, beside it."""
    several = len({row["run"] for row in found}) > 1

    def section(title: str, row: Row, *parts: str) -> str:
        run = f", run {row['run']}" if several else ""
        return "\n\n".join([f"## {title}{run}", *filter(None, parts)])

    sections = ["# Benchmarks", _origin(found)]
    sections.append("{1}\n\n![{0.stem}]({0.name})".format(*drawn) if drawn else NO_PICTURE)
    groups = grouped(found)
    capped = [row for group in groups if group[0]["limits"]["device_gib"] is not None for row in group]
    sections += ["## Larger than the card\n\n" + _larger(capped)] if capped else []
    for group in (group for group in groups if group[0]["limits"]["device_gib"] is None):
        row, name = group[0], group[0]["workload"]["name"]
        title = name[0].upper() + name[1:]
        sections.append(section(title, row, _what(row), _table(group), _split(group)))
    visit = "Host time per visit of a layer, beyond the layer itself"
    sections += [section(visit, row, _overhead(row)) for row in _measured(found, "overhead")]
    others = [row for row in found if "contestant" not in row and row["status"] != "ok"]
    sections += [section(f"Did not run: {row['kind']}", row, _note(row)) for row in others]
    return "\n\n".join(sections) + "\n"


def _measured(found: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in found if row["kind"] == kind and row["status"] == "ok"]


def _machine(row: Row) -> tuple[Any, ...]:
    return tuple(row["machine"][key] for key in ("accelerator", "processor", "cores"))


def grouped(found: Sequence[Row]) -> list[list[Row]]:
    """Rows of contestants, of one workload, device memory and run each."""
    groups: dict[tuple[Any, ...], list[Row]] = {}
    for row in found:
        if "contestant" in row:
            groups.setdefault((row["workload"]["name"], row["limits"]["device_gib"], row["run"]), []).append(row)
    return list(groups.values())


def _what(row: Row) -> str:
    """What was measured, in words."""
    workload, count = row["workload"], row["parameters"]
    size, unit = next(each for each in ((1e9, "B"), (1e6, "M"), (1e3, "K")) if count >= each[0])
    length = "" if workload["family"] == "vision" else f" sequences of {workload['length']} tokens,"
    kept = "computed again in backward (checkpointing)" if workload["checkpointing"] else "kept (no checkpointing)"
    kept = f", activations {kept} unless a contestant says otherwise" if workload["task"] == "train" else ""
    family = FAMILIES[workload["family"]]
    return f"{family}, {count / size:.3g} {unit} parameters,{length} {workload['precision']}{kept}."


def _origin(found: Sequence[Row]) -> str:
    lines = []
    for row in found:
        machine = row["machine"]
        memory = f", {machine['accelerator_bytes'] / GIB:.1f} GiB" if machine["accelerator"] else ""
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append(
            f"- {machine['accelerator'] or 'no accelerator'}{memory}; {machine['processor']}, {machine['cores']} cores, "
            f"{machine['threads']} threads, {machine['host_bytes'] / GIB:.0f} GiB; "
            f"Python {row['python']}, {versions}; commit {row['commit']}; run {row['run']}"
        )
    dates = sorted(row["date"] for row in found)
    commands = [f"- `{command}`" for command in dict.fromkeys(row["command"] for row in found)]
    span = f"From {dates[0]} to {dates[-1]}, by"
    return "\n".join(dict.fromkeys(lines)) + f"\n\n{span}\n\n" + "\n".join(commands)


def _table(group: Sequence[Row]) -> str:
    done = [row for row in group if row["status"] == "ok"]
    plain = next((row for row in done if row["contestant"] == "plain"), None)
    ours = max((row for row in done if is_ours(row)), key=lambda row: row["items_per_second"], default=None)
    step = min((len(row["losses"]) for row in done), default=0)
    unit = group[0]["workload"]["unit"]
    head = [
        "contestant", "step, s", "quartiles, s", f"{unit}/s", "÷ plain", "our best ÷ it",
        "weights and gradients on the device", "device, GiB", "device ÷ plain", "reserved, GiB", "host, GiB", "pinned, GiB",
        f"loss, step {step}", "note",
    ]  # fmt: skip
    lines = []
    for row in group:
        if row["status"] != "ok":
            lines.append([row["label"], *[NONE] * (len(head) - 2), _note(row)])
            continue
        lines.append([
            row["label"], f"{row['median_step_seconds']:.4g}", _quartiles(row), f"{row['items_per_second']:,.0f}",
            _ratio(row, plain), NONE if is_ours(row) else _ratio(ours, row),
            human_bytes(row["counted_peak_bytes"]) if "counted_peak_bytes" in row else NONE,
            _gib(row["peak_allocated_bytes"]), _memory_ratio(row, plain),
            *(_gib(row[key]) for key in ("peak_reserved_bytes", "peak_host_bytes")),
            _pinned(row),
            f"{row['losses'][step - 1]:.5f}", "",
        ])  # fmt: skip
    return _markdown(head, lines)


def _larger(capped: Sequence[Row]) -> str:
    """Who trained where a card of that size would have ended; nothing is compared, so runs may stand together."""
    lines = []
    for row in capped:
        ran = row["status"] == "ok"
        came = f"{row['median_step_seconds']:.4g} s per step, loss {row['losses'][-1]:.4f}" if ran else row["status"]
        allowed, peak = f"{row['limits']['device_gib']:g}", _gib(row.get("peak_allocated_bytes"))
        lines.append([allowed, row["workload"]["name"], row["label"], came, peak, "" if ran else _note(row)])
    return _markdown(["device memory allowed, GiB", "workload", "contestant", "came to", "peak, GiB", "note"], lines)


def _split(group: Sequence[Row]) -> str:
    """Where a step's seconds go, as far as a contestant can tell."""
    lines = []
    for row in (row for row in group if row["status"] == "ok" and row.get("optimizer_seconds")):
        update = statistics.median(row["optimizer_seconds"])
        stalls = [
            statistics.median(step.get(name, 0.0) for step in row["stats"]) if row.get("stats") else None
            for name in STALLS
        ]
        rest = row["median_step_seconds"] - update - sum(stall or 0.0 for stall in stalls)
        lines.append([row["label"], *(NONE if each is None else f"{each:.3g}" for each in (rest, *stalls, update))])
    head = ["contestant", "forward and backward, s", *STALLS.values(), "update, s"]
    return _markdown(head, lines) if lines else ""


def _overhead(row: Row) -> str:
    """The engine's own cost beside FSDP2's."""
    lines = []
    for kind, found in row["models"].items():
        ours, theirs = (found["visit_seconds"][name] for name in ("superpipeline-2:1", "fsdp2"))
        plain = found["step_seconds"]["plain"] / (2 * row["layers"])
        lines.append([kind, *(f"{1e6 * each:.0f}" for each in (plain, ours, theirs)), f"{ours / theirs:.2f}"])
    head = ["layer", "the layer itself, µs", "superpipeline 2:1, µs", "FSDP2, µs", "superpipeline ÷ FSDP2"]
    table = _markdown(head, lines)
    if "generation" not in row:  # an older row
        return table
    seconds = row["generation"]["step_seconds"]
    speeds = [[name, f"{row['generated_tokens'] / each:.3g}"] for name, each in seconds.items()]
    return table + "\n\n" + _markdown(["generation with a cache", "tokens per second"], speeds)


def _quartiles(row: Row) -> str:
    """Between which seconds the middle half of the measured steps lies."""
    if len(row["step_seconds"]) < 2:
        return NONE
    low, _, high = statistics.quantiles(row["step_seconds"], n=4, method="inclusive")
    return f"{low:.4g} to {high:.4g}"


def _note(row: Row) -> str:
    return _cell(f"{row['status']}: {row['error']}")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _ratio(row: Row | None, other: Row | None) -> str:
    return NONE if row is None or other is None else f"{row['items_per_second'] / other['items_per_second']:.2f}"


def _memory_ratio(row: Row, plain: Row | None) -> str:
    if plain is None or not plain["peak_allocated_bytes"]:
        return NONE
    return f"{row['peak_allocated_bytes'] / plain['peak_allocated_bytes']:.2f}"


def _gib(size: float | None) -> str:
    return NONE if size is None else f"{size / GIB:.2f}"


def _pinned(row: Row) -> str:
    """What torch's allocator pinned, or what was found pinned under the parameters, if that is more."""
    if row["pinned_bytes"] is None:
        return NONE
    return _gib(max(row["pinned_bytes"], row.get("registered_bytes", 0)))


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; columns without values are left out."""
    filled = [index for index in range(len(head)) if any(line[index] not in ("", NONE) for line in lines)]
    table = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line[index] for index in filled) + " |" for line in table)


def write(found: Sequence[Row], folder: Path, *, mixed: bool = False) -> Path:
    """The report and its picture in a folder; the path of the report.

    Raises:
        ValueError: there are no rows, or they come from several machines or commits and ``mixed`` is not said.
    """
    if not found:
        raise ValueError("There are no rows to report. Measure first: python -m examples.benchmarks --out FOLDER.")
    if not mixed:
        one_origin(found)
    folder.mkdir(parents=True, exist_ok=True)
    free = [group for group in grouped(found) if group[0]["limits"]["device_gib"] is None]
    drawn = pictures.draw(free, folder)
    path = folder / "report.md"
    path.write_text(render(found, drawn), encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows, or folders with a rows.jsonl")
    parser.add_argument("--out", type=rows.report_folder, help="folder (the first rows' own)")
    parser.add_argument("--mixed", action="store_true", help="rows may come from several machines and commits")
    options = parser.parse_args(argv)
    files = [each / "rows.jsonl" if each.is_dir() else each for each in options.rows]
    try:
        found = [row for file in files for row in rows.read(file)]
        path = write(found, options.out or files[0].parent, mixed=options.mixed)
    except ValueError as error:
        parser.error(str(error))
    print(path, flush=True)


if __name__ == "__main__":
    main()
