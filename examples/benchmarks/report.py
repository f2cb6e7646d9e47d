"""Rows of one machine and commit → a Markdown report with two pictures. Nothing in it comes from elsewhere.

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

from examples.benchmarks import cli, pictures, rows
from examples.benchmarks.limit_model import prediction_seconds, training_seconds
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
NO_PICTURES = "No pictures: they need matplotlib, and device memory figures of training, that is, an accelerator."


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
    machines = {_machine(row) for row in found}
    commits = {row["commit"] for row in found}
    for what, several in (("machines", machines), ("commits", commits)):
        if len(several) > 1:
            listed = "; ".join(sorted(map(str, several)))
            raise ValueError(f"The rows come from {len(several)} {what}: {listed}. Give one's rows, or --mixed.")


def render(found: Sequence[Row], drawn: Sequence[Picture] = ()) -> str:
    """The report as Markdown; ``drawn`` are its pictures, beside it."""
    several = len({row["run"] for row in found}) > 1

    def section(title: str, row: Row, *parts: str) -> str:
        run = f", run {row['run']}" if several else ""
        return "\n\n".join([f"## {title}{run}", *filter(None, parts)])

    sections = ["# Benchmarks", _origin(found)]
    sections += _tables_of_one_machine(found)
    sections += [section("Ceilings", row, _ceilings(row)) for row in _measured(found, "limits")]
    sections += [f"{caption}\n\n![{path.stem.replace('-', ' ')}]({path.name})" for path, caption in drawn]
    sections += [] if drawn else [NO_PICTURES]
    groups = grouped(found)
    capped = [row for group in groups if group[0]["limits"]["device_gib"] is not None for row in group]
    sections += ["## Larger than the card\n\n" + _larger(capped)] if capped else []
    for group in (group for group in groups if group[0]["limits"]["device_gib"] is None):
        row, name = group[0], group[0]["workload"]["name"]
        title = name[0].upper() + name[1:]
        sections.append(section(title, row, _what(row), _table(group, _limits(row, found)), _split(group)))
    visit = "Host time per visit of a layer, beyond the layer itself"
    sections += [section(visit, row, _overhead(row)) for row in _measured(found, "overhead")]
    sections += [section("Layers that are compiled", row, _compiled(row)) for row in _measured(found, "compiled")]
    sections += [section("Stacked experts in generation", row, by_routing(row)) for row in _measured(found, "experts")]
    sections += [section("Updates on the host", row, _update(row)) for row in _measured(found, "update")]
    together = _measured(found, "ranks")
    for run in dict.fromkeys(row["run"] for row in together):
        rows_of_run = [row for row in together if row["run"] == run]
        sections.append(section("Several devices of one node", rows_of_run[0], _ranks(rows_of_run)))
    others = [row for row in found if "contestant" not in row and row["status"] != "ok"]
    sections += [section(f"Did not run: {row['kind']}", row, _note(row)) for row in others]
    return "\n\n".join(sections) + "\n"


def _tables_of_one_machine(found: Sequence[Row]) -> list[str]:
    """What gpu.sh finds before it measures contestants: one table for each kind of row."""
    head = {
        "first-light": ("First light", ("stage", "seconds")),
        "beside-plan": (
            "Beside the plan",
            ("what", "k", "k_prime", "planned_peak_bytes", "peak_allocated_bytes", "budget", "hidden_share"),
        ),
        "foresight": ("Step time, measured and predicted", ("k", "k_prime", "measured", "predicted")),
    }
    tables = []
    for kind, (title, names) in head.items():
        lines = [[_plain(row.get(name)) for name in names] for row in _measured(found, kind)]
        if lines:
            tables.append(f"## {title}\n\n{_markdown([name.replace('_', ' ') for name in names], lines)}")
    return tables


def _plain(value: Any) -> str:
    return NONE if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _measured(found: Sequence[Row], kind: str) -> list[Row]:
    return [row for row in found if row["kind"] == kind and row["status"] == "ok"]


def _machine(row: Row) -> tuple[Any, ...]:
    return tuple(row["machine"][key] for key in ("accelerator", "processor", "cores"))


def _limits(row: Row, found: Sequence[Row]) -> Row | None:
    """The ceilings for a row: its run's, otherwise the last that its machine showed."""
    same = [each for each in _measured(found, "limits") if _machine(each) == _machine(row)]
    return max(reversed(same), key=lambda each: each["run"] == row["run"], default=None)


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


def _ceilings(limits: Row) -> str:
    lines = [[f"matrix product, {name}", f"{rate / 1e12:.3g} TFLOP/s"] for name, rate in limits["matrix_flops"].items()]
    names = {
        "host_to_device_bytes": "host to device, registered memory",
        "device_to_host_bytes": "device to host, registered memory",
        "duplex_bytes": "each way while both are busy",
        "host_to_device_bytes_allocated": "host to device, memory allocated pinned",
        "device_to_host_bytes_allocated": "device to host, memory allocated pinned",
        "duplex_bytes_allocated": "each way while both are busy, memory allocated pinned",
        "dram_bytes": "host memory, read and written",
        "device_bytes": "device memory, read and written",
        "adamw_bytes": "the same, by fused AdamW on the CPU",
    }
    lines += [[text, f"{limits[key] / 1e9:.3g} GB/s"] for key, text in names.items() if limits.get(key)]
    update = {"adamw": "fused AdamW on the CPU", "default_adamw": "AdamW as users write it, on the CPU"}
    lines += [
        [text, f"{1e9 * limits[f'{key}_seconds_per_parameter']:.3g} ns per parameter"] for key, text in update.items()
    ]
    return _markdown(["ceiling", "rate"], lines)


def _table(group: Sequence[Row], limits: Row | None) -> str:
    done = [row for row in group if row["status"] == "ok"]
    plain = next((row for row in done if row["contestant"] == "plain"), None)
    ours = max((row for row in done if is_ours(row)), key=lambda row: row["items_per_second"], default=None)
    step = min((len(row["losses"]) for row in done), default=0)
    unit = group[0]["workload"]["unit"]
    head = [
        "contestant", "step, s", "quartiles, s", f"{unit}/s", "÷ plain", "our best ÷ it", "of the limit",
        "weights and gradients on the device", "device, GiB", "device ÷ plain", "reserved, GiB", "host, GiB", "pinned, GiB",
        f"loss, step {step}", "note",
    ]  # fmt: skip
    lines = []
    for row in group:
        if row["status"] != "ok":
            lines.append([row["label"], *[NONE] * (len(head) - 2), _note(row)])
            continue
        resident = row["contestant"].startswith("plain")  # nothing of the limit model's traffic
        best = None if resident else limit_seconds(row, limits).get("best possible")
        lines.append([
            row["label"], f"{row['median_step_seconds']:.4g}", _quartiles(row), f"{row['items_per_second']:,.0f}",
            _ratio(row, plain), NONE if is_ours(row) else _ratio(ours, row),
            NONE if best is None else f"{best / row['median_step_seconds']:.2f}",
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


def _compiled(row: Row) -> str:
    """A training step with compiled layers and without."""
    eager = row["ways"]["plain"]["step_seconds"]
    lines = [
        [way, f"{found['step_seconds']:.3g}", f"{eager / found['step_seconds']:.2f}", f"{found['first_seconds']:.3g}"]
        for way, found in row["ways"].items()
    ]
    return _markdown(["way", "step, s", "times as fast as plain", "first steps, s"], lines)


def by_routing(row: Row) -> str:
    """Stacked experts in generation, for each kind of routing and each contestant."""
    lines = []
    for kind, found in row["routing"].items():
        least = f"{found['least'] / 1024:.0f}"
        for way, each in found["ways"].items():
            kib = [f"{each[key] / 1024:.0f}" if key in each else "" for key in ("bytes", "expert_bytes")]
            hits = f"{each['hits']:.0%}" if "hits" in each else ""
            lines.append([kind, way, *kib, least, hits, f"{1000 * each['seconds']:.1f}"])
    head = ["routing", "way", "KiB per token", "of that experts", "routed to", "hits", "ms per token"]
    return _markdown(head, lines)


def _update(row: Row) -> str:
    """The optimizer's step in one pass and in pieces, beside the same in walks, and beside the optimizer alone."""
    lines, cases = [], [case for found in row["threads"].values() for case in found["cases"].values()]
    ours = ("pieces", *["one pass"] * any("one pass" in case for case in cases))  # rows from before it have none
    for threads, found in row["threads"].items():
        for case, seconds in found["cases"].items():
            times = [seconds.get(way) for way in ("alone", "walks", "operators", *ours)]
            lines.append([threads, case])
            lines[-1] += [NONE if each is None else f"{1e9 * each / row['parameters']:.3f}" for each in times]
            lines[-1] += [f"{seconds[way] / seconds['alone']:.2f}" for way in ("walks", *ours)]
    ways = ("AdamW alone", "in walks", "pieces' operators", *(f"in {way}" for way in ours))
    ratios = (f"{way} ÷ alone" for way in ("walks", *ours))
    head = ["threads", "precision", *(f"{way}, ns per parameter" for way in ways), *ratios]
    return _markdown(head, lines)


def _ranks(measured: Sequence[Row]) -> str:
    """Several devices, with one way after the other."""
    lines = []
    for row in sorted(measured, key=lambda row: -row["parameters"]):
        numbers = (row["median_step_seconds"], row["ranks"] * row["tokens"] / row["median_step_seconds"])
        told = [*(f"{each:.3g}" for each in numbers), _gib(row["setup_bytes"]), _gib(row["after_bytes"])]
        lines.append([row["way"], f"{row['parameters'] / 1e6:.3g} M", str(row["ranks"]), *told, f"{row['loss']:.5f}"])
    memory = ("host in set-up, GiB", "host after the last step, GiB")
    head = ["way", "parameters", "devices", "step, s", "tokens/s of all", *memory, "loss of rank 0"]
    return _markdown(head, lines)


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
    """The report and its pictures in a folder; the path of the report.

    Raises:
        ValueError: there are no rows, or they come from several machines or commits and ``mixed`` is not said.
    """
    if not found:
        raise ValueError("There are no rows to report. Measure first: python -m examples.benchmarks --out FOLDER.")
    if not mixed:
        one_origin(found)
    folder.mkdir(parents=True, exist_ok=True)
    free = [group for group in grouped(found) if group[0]["limits"]["device_gib"] is None]
    drawn = pictures.draw(free, lambda row, tokens: limit_seconds(row, _limits(row, found), tokens), folder)
    path = folder / "report.md"
    path.write_text(render(found, drawn), encoding="utf-8")
    return path


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("rows", type=Path, nargs="+", help="files of rows, or folders with a rows.jsonl")
    parser.add_argument("--out", type=cli.report_folder, help="folder (the first rows' own)")
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
