"""Train several models on one card at once, each in a process of its own, and print a table of what each took.

    python examples/demos/many_models.py                     # a Llama, a ViT and a VLM, no download, a minute on a CPU
    python examples/demos/many_models.py --compare           # and the same one after the other
    python examples/demos/many_models.py --gpu-memory 30GiB,45GiB \\
        "python examples/finetune_llm.py --model A --gpu-memory {gpu_memory} --host-memory {host_memory} --report {report}" \\
        "python mine.py {gpu_memory} {host_memory} {report}"                        # not run

The commands may be any programs that train with the strategy. In each, ``{gpu_memory}`` and ``{host_memory}`` are replaced by its
budgets, and ``{report}`` by a file for ``SuperpipelineCallback(report=FILE)``, from which the table has its figures. The driver
divides the card's time. A process that fails leaves the others running. What each prints is in a log of its own.

Each model trains as it would alone, bit for bit: a budget changes where weights are, and no result.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

EXAMPLES = Path(__file__).parents[1]
BUDGETS = "--gpu-memory {gpu_memory} --host-memory {host_memory} --report {report}"
DEFAULTS = (
    "finetune_llm.py --steps 20 --validate-every 20",
    "finetune_vision.py --epochs 1",
    "finetune_vlm.py --steps 20 --validate-every 20",
)
ON_A_CPU = 2**30
"""Bytes that are divided without a GPU, where GPU memory is only counted."""
USED = 15 / 16
"""The share of free memory that is divided. The rest is for contexts of the driver, libraries and allocators."""
# In a process of its own: asking creates a context, which takes GPU memory until the process ends, as packages take CPU memory.
FREE = """
import torch
from sp_lightning.trainer.host_memory import available_bytes
print(torch.accelerator.get_memory_info()[0] if torch.accelerator.is_available() else 0, available_bytes() or 0)
"""


def parse(argv: Sequence[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    add("commands", nargs="*", help="command lines (default: three recipes with their small models)")
    for name in ("--gpu-memory", "--host-memory"):
        text = "of each, or one for all: 30GiB,45GiB (default: equal parts of what is free)"
        add(name, type=lambda sizes: sizes.split(","), default=[], metavar="SIZE,SIZE", help=text)
    add("--compare", action="store_true", help="run the same one after the other, too, with the same budgets")
    add("--output", type=Path, default=Path("runs/many_models"), help="(%(default)s)")
    options: Any = parser.parse_args(argv)
    options.commands = options.commands or [
        f"{shlex.join([sys.executable, str(EXAMPLES / recipe)])} {rest} {BUDGETS} --output "
        + shlex.quote(str(options.output / recipe.removesuffix(".py")))
        for recipe, rest in (default.split(" ", 1) for default in DEFAULTS)
    ]
    count = len(options.commands)
    for name in ("gpu_memory", "host_memory"):
        given, option = getattr(options, name), f"--{name.replace('_', '-')}"
        if len(given) not in (0, 1, count):
            parser.error(
                f"{option}: got {len(given)} sizes for {count} commands. Expected one for each, or one for all"
            )
    for command in options.commands:
        try:
            shlex.split(command)
        except ValueError as error:
            parser.error(f"{command!r}: {error}")
        if "{report}" not in command:
            parser.error(f"{command!r} has no {{report}}, the file for SuperpipelineCallback(report=FILE). Add it")
    return options


def budgets(given: Sequence[str], free: int, count: int) -> list[str]:
    """Returns a budget for each of ``count`` processes: those that are given, or equal parts of ``free`` bytes."""
    if given:
        return [*given] * (count if len(given) == 1 else 1)
    return [f"{int(free * USED / count) >> 20}MiB"] * count


def free_memory() -> tuple[int, int]:
    """Returns the bytes of GPU memory (without a GPU, :data:`ON_A_CPU`) and of CPU memory that are free."""
    answer = subprocess.run([sys.executable, "-c", FREE], capture_output=True, text=True, check=True).stdout
    device, host = map(int, answer.split()[-2:])
    return device or ON_A_CPU, host


def mib(nbytes: float) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"


class Ended(NamedTuple):
    """A process that has ended.

    Attributes:
        seconds: from its start to its end.
        report: the line of its training in the report; empty if there is none.
        error: why it failed; empty if it did not.
    """

    seconds: float
    report: dict[str, Any]
    error: str


class Memory(NamedTuple):
    """The most CPU memory that the processes of a command had at once, in bytes.

    Attributes:
        all: of all processes; pages that several of them use count once.
        shared: what these pages would take in addition if each process had its own.
    """

    all: int = 0
    shared: int = 0


def start(words: list[str], log: Path, report: Path, running: list[int]) -> Ended:
    """Runs a command to its end. Its output goes to ``log``, and its number is in ``running`` meanwhile."""
    log.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    begun = time.perf_counter()
    try:
        with log.open("wb") as output:
            process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)
            running.append(process.pid)
            code = process.wait()
            running.remove(process.pid)
    except OSError as error:
        return Ended(time.perf_counter() - begun, {}, str(error))
    seconds = time.perf_counter() - begun
    if code:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return Ended(seconds, {}, f"{lines[-1] if lines else 'no output'} (exit status {code}, {log})")
    runs = [json.loads(line) for line in report.read_text().splitlines()] if report.is_file() else []
    fits = [run for run in runs if run["run"] == "fit"] or runs
    return Ended(seconds, fits[-1], "") if fits else Ended(seconds, {}, f"no report ({log})")


def run(commands: Sequence[list[str]], output: Path, *, at_once: bool) -> tuple[list[Ended], float, Memory]:
    """Runs commands, whose words may have ``{report}``. Returns what each came to, the seconds of all, and their memory."""
    running, most, begun = list[int](), Memory(), time.perf_counter()
    with ThreadPoolExecutor(len(commands) if at_once else 1) as pool:
        waits = []
        for number, words in enumerate(commands, 1):
            report, log = (output / f"{number}{'' if at_once else '-alone'}.{kind}" for kind in ("jsonl", "log"))
            words = [word.replace("{report}", str(report)) for word in words]
            waits.append(pool.submit(start, words, log, report, running))
        while wait(waits, timeout=1).not_done:
            now = memory_of(running)
            most = Memory(*map(max, most, now))
    return [each.result() for each in waits], time.perf_counter() - begun, most


def memory_of(processes: Sequence[int]) -> Memory:
    """Returns the memory of these processes now; 0 if the system is not Linux."""
    resident = proportional = 0
    for process in list(processes):
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        found = {words[0]: int(words[1]) * 1024 for words in map(str.split, lines) if words[0] in ("Rss:", "Pss:")}
        resident, proportional = resident + found.get("Rss:", 0), proportional + found.get("Pss:", 0)
    return Memory(proportional, resident - proportional)


def row(command: str, ended: Ended) -> str:
    name = next((Path(word).name for word in shlex.split(command) if word.endswith(".py")), command[:20])
    if ended.error:
        return f"{name:20}  {ended.seconds:7.1f}  failed: {ended.error}"
    report = ended.report
    device = report["peak_allocated_bytes"] or report["peak_device_bytes"]
    memory = f"{mib(device):>12}  {mib(report['peak_host_bytes'] or 0):>12}"
    loss = "" if report["loss"] is None else f"{report['loss']:.4f}"
    return f"{name:20}  {ended.seconds:7.1f}  {memory}  {loss:>9}  {report['weights'][:16]}"


def main(argv: Sequence[str] | None = None) -> tuple[list[Ended], list[Ended]]:
    """Returns what each process came to, at once and (with ``--compare``) one after the other."""
    options = parse(argv)
    count, commands = len(options.commands), list[list[str]]()
    free = (0, 0) if options.gpu_memory and options.host_memory else free_memory()
    devices, hosts = budgets(options.gpu_memory, free[0], count), budgets(options.host_memory, free[1], count)
    for command, device, host in zip(options.commands, devices, hosts, strict=True):
        words = shlex.split(command)
        commands.append([word.replace("{gpu_memory}", device).replace("{host_memory}", host) for word in words])
    print(
        f"{count} processes at once. GPU memory of each: {', '.join(devices)}; CPU memory: {', '.join(hosts)}.",
        flush=True,
    )
    together, seconds, memory = run(commands, options.output, at_once=True)
    head = f"{'command':20}  seconds  {'GPU memory':>12}  {'CPU memory':>12}  last loss  weights (SHA-256)"
    print(head, *map(row, options.commands, together), sep="\n")
    shared = f"{mib(memory.all)} of CPU memory; sharing pages, libraries included, saved {mib(memory.shared)}"
    print(f"At once: {seconds:.1f} s" + (f", {shared}." if memory.all else "."))
    alone = list[Ended]()
    if options.compare:
        print("The same, one after the other", flush=True)
        alone, seconds_alone, _ = run(commands, options.output, at_once=False)
        print(head, *map(row, options.commands, alone), sep="\n")
        pairs = [
            (ours.report.get("weights"), its.report.get("weights")) for ours, its in zip(together, alone, strict=True)
        ]
        same = sum(ours is not None and ours == its for ours, its in pairs)
        print(f"One after the other: {seconds_alone:.1f} s. At once took {seconds / seconds_alone:.2f} of this time.")
        print(f"{same} of {count} models have the same weights as alone, bit for bit.")
    return together, alone


if __name__ == "__main__":
    sys.exit(any(ended.error for ended in main()[0]))
