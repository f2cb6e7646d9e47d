"""Rows of one machine and commit → a Markdown report with two pictures. Nothing in it comes from elsewhere.

From the root of the repository::

    python -m examples.benchmarks.report runs/benchmarks/rows.jsonl --out runs/benchmarks
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path

from examples.benchmarks import pictures, rows
from examples.benchmarks.limit_model import prediction_seconds, training_seconds
from examples.benchmarks.rows import Row

GIB = 2**30
NONE = "–"
OURS = "superpipeline"


def limit_seconds(row: Row, limits: Row | None, tokens: float | None = None) -> dict[str, float]:
    """The limit model for a row's workload, or nothing where it does not apply: no accelerator, no language model.

    Args:
        tokens: per step, the workload's own by default.
    """
    workload = row["workload"]
    if limits is None or limits["host_to_device_bytes"] is None or workload["family"] != "llm":
        return {}
    flops = limits["matrix_flops"]["fp32" if workload["precision"] == "32-true" else "bf16"]
    pcie = min(limits["host_to_device_bytes"], limits["device_to_host_bytes"])
    # A copy also reads the lines that it overwrites, unseen: AdamW, which reads them anyway, may show more of the memory.
    dram = max(limits["dram_bytes"], limits["adamw_bytes"])
    tokens = workload["items"] if tokens is None else tokens
    if workload["task"] == "predict":
        return prediction_seconds(tokens, row["parameters"], flops, pcie)
    recompute = workload["checkpointing"]
    return training_seconds(tokens, row["parameters"], flops, pcie, dram, recompute=recompute)


def one_origin(found: Sequence[Row]) -> None:
    """Check that all rows come from one machine and commit.

    Raises:
        ValueError: they do not.
    """
    machines = {tuple(row["machine"][key] for key in ("accelerator", "processor", "cores")) for row in found}
    commits = {row["commit"] for row in found}
    for what, several in (("machines", machines), ("commits", commits)):
        if len(several) > 1:
            listed = "; ".join(sorted(map(str, several)))
            raise ValueError(f"The rows come from {len(several)} {what}: {listed}. Give one's rows, or --mixed.")


def render(found: Sequence[Row], drawn: Sequence[Path] = ()) -> str:
    """The report as Markdown; ``drawn`` are its pictures, beside it."""
    limits = _limits(found)
    groups = grouped(found)
    parts = ["# Benchmarks", _origin(found)]
    if limits is not None:
        parts.append("## Ceilings\n\n" + _ceilings(limits))
    for (name, device_gib), group in groups.items():
        if device_gib is None:
            parts.append(f"## {name[0].upper()}{name[1:]}\n\n" + _table(group, limits))
            parts += [split] if (split := _split(group)) else []
    capped = [row for (_, device_gib), group in groups.items() if device_gib is not None for row in group]
    if capped:
        parts.append("## Larger than the card\n\n" + _larger(capped))
    overhead = next((row for row in reversed(found) if row["kind"] == "overhead" and row["status"] == "ok"), None)
    if overhead is not None:
        parts.append("## Host time per visit of a layer, beyond the layer itself\n\n" + _overhead(overhead))
    others = [row for row in found if row["kind"] in ("limits", "overhead") and row["status"] != "ok"]
    if others:
        lines = [[row["kind"], row["status"], _cell(str(row["error"]))] for row in others]
        parts.append("## Did not run\n\n" + _markdown(["step", "status", "note"], lines))
    parts += [f"![{path.stem.replace('-', ' ')}]({path.name})" for path in drawn]
    return "\n\n".join(parts) + "\n"


def _limits(found: Sequence[Row]) -> Row | None:
    return next((row for row in reversed(found) if row["kind"] == "limits" and row["status"] == "ok"), None)


def grouped(found: Sequence[Row]) -> dict[tuple[str, float | None], list[Row]]:
    """Rows of contestants by workload and device memory; of a contestant that ran twice, the last row."""
    groups: dict[tuple[str, float | None], dict[str, Row]] = {}
    for row in found:
        if row["kind"] in ("train", "predict"):
            key = row["workload"]["name"], row["limits"]["device_gib"]
            groups.setdefault(key, {})[row["contestant"]] = row
    return {key: list(group.values()) for key, group in groups.items()}


def _origin(found: Sequence[Row]) -> str:
    lines = []
    for row in found:
        machine = row["machine"]
        device = machine["accelerator"] or "no accelerator"
        versions = ", ".join(f"{name} {version}" for name, version in row["versions"].items())
        lines.append(
            f"- {device}; {machine['processor']}, {machine['cores']} cores, {machine['host_bytes'] / GIB:.0f} GiB; "
            f"Python {row['python']}, {versions}; commit {row['commit']}"
        )
    dates = sorted(row["date"] for row in found)
    commands = [f"- `{command}`" for command in dict.fromkeys(row["command"] for row in found)]
    span = f"From {dates[0]} to {dates[-1]}, by"
    return "\n".join(dict.fromkeys(lines)) + f"\n\n{span}\n\n" + "\n".join(commands)


def _ceilings(limits: Row) -> str:
    lines = [[f"matrix product, {name}", f"{rate / 1e12:.3g} TFLOP/s"] for name, rate in limits["matrix_flops"].items()]
    names = {
        "host_to_device_bytes": "host to device, pinned",
        "device_to_host_bytes": "device to host, pinned",
        "duplex_bytes": "each way while both are busy",
        "dram_bytes": "host memory, read and written",
        "adamw_bytes": "fused AdamW on the CPU",
    }
    lines += [[text, f"{limits[key] / 1e9:.3g} GB/s"] for key, text in names.items() if limits[key] is not None]
    return _markdown(["ceiling", "rate"], lines)


def _table(group: Sequence[Row], limits: Row | None) -> str:
    done = [row for row in group if row["status"] == "ok"]
    plain = next((row for row in done if row["contestant"] == "plain"), None)
    ours = max((row for row in done if is_ours(row)), key=lambda row: row["items_per_second"], default=None)
    step = min((len(row["losses"]) for row in done), default=0)
    unit = group[0]["workload"]["unit"]
    head = [
        "contestant", "step, s", f"{unit}/s", "÷ plain", "our best ÷ it", "of the limit",
        "device, GiB", "reserved, GiB", "host, GiB", "pinned, GiB", f"loss, step {step}", "note",
    ]  # fmt: skip
    lines = []
    for row in group:
        if row["status"] != "ok":
            lines.append([row["label"], *[NONE] * (len(head) - 2), _note(row)])
            continue
        best = None if row is plain else limit_seconds(row, limits).get("best possible")
        lines.append([
            row["label"], f"{row['median_step_seconds']:.4g}", f"{row['items_per_second']:,.0f}",
            _ratio(row, plain), NONE if is_ours(row) else _ratio(ours, row),
            NONE if best is None else f"{best / row['median_step_seconds']:.2f}",
            *(_gib(row[key]) for key in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_host_bytes")),
            _pinned(row),
            f"{row['losses'][step - 1]:.5f}", "",
        ])  # fmt: skip
    return _markdown(head, lines)


def _split(group: Sequence[Row]) -> str:
    """Where a step's seconds go, as far as a contestant can tell."""
    lines = []
    for row in (row for row in group if row["status"] == "ok" and row.get("optimizer_seconds")):
        update = statistics.median(row["optimizer_seconds"])
        stalls = [
            statistics.median(step[name] for step in row["stats"]) if row.get("stats") else None
            for name in ("stall_seconds", "drain_stall_seconds")
        ]
        rest = row["median_step_seconds"] - update - sum(stall or 0.0 for stall in stalls)
        lines.append([row["label"], *(NONE if each is None else f"{each:.3g}" for each in (rest, *stalls, update))])
    head = ["contestant", "forward and backward, s", "fetch stall, s", "drain stall, s", "update, s"]
    return _markdown(head, lines) if lines else ""


def _overhead(row: Row) -> str:
    """The engine's own cost beside FSDP2's."""
    lines = []
    for kind, found in row["models"].items():
        ours, theirs = (found["visit_seconds"][name] for name in ("superpipeline-2:1", "fsdp2"))
        plain = found["step_seconds"]["plain"] / (2 * row["layers"])
        lines.append([kind, *(f"{1e6 * each:.0f}" for each in (plain, ours, theirs)), f"{ours / theirs:.2f}"])
    head = ["layer", "the layer itself, µs", "superpipeline 2:1, µs", "FSDP2, µs", "superpipeline ÷ FSDP2"]
    return _markdown(head, lines)


def is_ours(row: Row) -> bool:
    """Whether the row is this project's."""
    return row["contestant"].startswith(OURS)


def _larger(group: Sequence[Row]) -> str:
    head = ["device memory allowed, GiB", "workload", "contestant", "came to", "device, GiB", "note"]
    lines = []
    for row in group:
        ran = row["status"] == "ok"
        came = f"{row['median_step_seconds']:.4g} s per step, loss {row['losses'][-1]:.4f}" if ran else row["status"]
        peak = _gib(row.get("peak_allocated_bytes"))
        note = "" if ran else _note(row)
        lines.append([f"{row['limits']['device_gib']:g}", row["workload"]["name"], row["label"], came, peak, note])
    return _markdown(head, lines)


def _note(row: Row) -> str:
    return _cell(f"{row['status']}: {row['error']}")


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())[:300]


def _ratio(row: Row | None, other: Row | None) -> str:
    return NONE if row is None or other is None else f"{row['items_per_second'] / other['items_per_second']:.2f}"


def _gib(size: float | None) -> str:
    return NONE if size is None else f"{size / GIB:.2f}"


def _pinned(row: Row) -> str:
    """What torch's allocator pinned, or what was found pinned under the parameters, if that is more."""
    if row["pinned_bytes"] is None:
        return NONE
    return _gib(max(row["pinned_bytes"], row.get("registered_bytes", 0)))


def _markdown(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table; columns that nobody filled are left out."""
    filled = [index for index in range(len(head)) if any(line[index] not in ("", NONE) for line in lines)]
    table = [head, ["---"] * len(head), *lines]
    return "\n".join("| " + " | ".join(line[index] for index in filled) + " |" for line in table)


def write(found: Sequence[Row], folder: Path, *, mixed: bool = False) -> Path:
    """The report and its pictures in a folder; the path of the report.

    Raises:
        ValueError: there are no rows, or they come from several machines or commits and ``mixed`` is not said.
    """
    if not found:
        raise ValueError("There are no rows to report. Measure first: python -m examples.benchmarks --out FOLDER.")
    if not mixed:
        one_origin(found)
    folder.mkdir(parents=True, exist_ok=True)
    limits = _limits(found)
    free = [group for (_, device_gib), group in grouped(found).items() if device_gib is None]
    drawn = pictures.draw(free, lambda row, tokens: limit_seconds(row, limits, tokens), folder)
    path = folder / "report.md"
    path.write_text(render(found, drawn), encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmarks"), help="folder (%(default)s)")
    parser.add_argument("--mixed", action="store_true", help="rows may come from several machines and commits")
    options = parser.parse_args(argv)
    try:
        path = write([row for file in options.rows for row in rows.read(file)], options.out, mixed=options.mixed)
    except ValueError as error:
        parser.error(str(error))
    print(path, flush=True)


if __name__ == "__main__":
    main()
