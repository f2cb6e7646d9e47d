"""What fits on which card, and how fast: predictions of ``plan``, as the page ``examples/guide/cards.md``.

From the root of the repository::

    python -m examples.benchmarks.cards            # writes the page; some minutes
    python -m examples.benchmarks.cards Flux       # prints the rows whose model has this word
"""

from __future__ import annotations

import contextlib
import datetime
import io
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from sp_lightning.__main__ import main as run_command

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples/guide/cards.md"
COMMAND = "python -m examples.benchmarks.cards"
GIB = 2**30
WRITTEN_BY_HAND = "\n## Other tools\n"
"""The section that ends the page: the program leaves it as it is."""


class Card(NamedTuple):
    """A machine: its title, and the options of ``plan`` with its rates and memory."""

    title: str
    options: str


class Case(NamedTuple):
    """A training: the model (a config in ``examples`` or a factory), its trained weights, ``plan``'s options, the command."""

    model: str
    what: str
    options: str
    run: str

    @property
    def name(self) -> str:
        """The name of the config's file, or of the factory ``make_NAME``."""
        return self.model.rpartition(":make_")[2] if ":" in self.model else Path(self.model).stem


CARDS = {
    # NVIDIA's data sheet: 165 TFLOP/s in bfloat16, of which 150 are assumed, and 1,008 GB/s. PCIe 4.0 x 16 has 31.5 GB/s each
    # way, of which 25 are assumed. Two channels of DDR4-3200 have 51 GB/s, of which 45 are assumed.
    "24": Card(
        "One 24 GB card, 64 GB of RAM (RTX 4090)",
        "--tflops 150 --device-bandwidth 1008GB/s --pcie 25GB/s --host-bandwidth 45GB/s --gpu-memory 22GiB --host-memory 62GiB",
    ),
    # NVIDIA's data sheet: 97.5 TFLOP/s in bfloat16, of which 88 are assumed, and 717 GB/s. The rest as above.
    "16": Card(
        "One 16 GB card, 32 GB of RAM (RTX 4080)",
        "--tflops 88 --device-bandwidth 717GB/s --pcie 25GB/s --host-bandwidth 45GB/s --gpu-memory 14.5GiB --host-memory 30GiB",
    ),
    # Measured on the machine of 2026-11-26 (examples/results/README.md), except the data sheet's 3,350 GB/s.
    "80": Card(
        "One 80 GB card, 128 GB of RAM (H100)",
        "--tflops 662.8 --device-bandwidth 3350GB/s --pcie 46.75GB/s --host-bandwidth 85.11GB/s --gpu-memory 74GiB "
        "--host-memory 126GiB",
    ),
}
"""Drivers, the system and Python need the rest of the memory."""

_LLM = "--tokens 4096 --gradient-checkpointing"
_FOUR, _CLIP = "--batch-size 4", "--gradient-clip norm"
_LORA = f"--lora 16 --gradient-checkpointing {_CLIP}"
_TRUE, _BACKWARD = "--precision bf16-true", "--optimizer-overlap backward"


def _llm(model: str, more: str = "") -> str:
    return f"`finetune_llm.py --model {model} --data my.jsonl --length 4096 --batch-size 1{more}`"


def _image(model: str) -> str:
    return f"`finetune_diffusion.py --model {model} --data photos --resolution 1024 --gradient-checkpointing`"


_FLUX = Case("examples.shapes.flux:make_flux", "LoRA, 1 image of 1024²", _LORA, _image("black-forest-labs/FLUX.1-dev"))
_LLAMA_LORA = Case(
    "shapes/llama-3-8b.json", "LoRA", f"{_LLM} {_LORA}", _llm("meta-llama/Llama-3.1-8B-Instruct", " --lora 16")
)
_UNCLIPPED = f" {_TRUE} {_BACKWARD} --gradient-clip 0"
_ALL_16, _ABOVE = "all weights, `bf16-true`", "`finetune_llm.py`, as above"

CASES: dict[str, tuple[Case, ...]] = {
    "24": (
        Case(
            "shapes/llama-3-8b.json", f'{_ALL_16}, `"backward"`', f"{_LLM} {_TRUE} {_BACKWARD}",
            _llm("meta-llama/Llama-3.1-8B-Instruct", _UNCLIPPED),
        ),
        Case(
            "shapes/llama-3.2-3b.json", "all weights, `bf16-mixed`", _LLM,
            _llm("meta-llama/Llama-3.2-3B", " --gradient-clip 0"),
        ),
        Case(
            "shapes/llama-3.2-3b.json", "the same, clipped by norm", f"{_LLM} {_CLIP}", _llm("meta-llama/Llama-3.2-3B")
        ),
        Case(
            "shapes/qwen3-30b-a3b.json", "LoRA, experts in 4 bits", f"{_LLM} {_LORA} --pack-experts nvfp4",
            "`finetune_moe.py --model Qwen/Qwen3-30B-A3B --data my.jsonl --length 4096 --batch-size 1 --lora 16 --experts 4bit`",
        ),
        _FLUX,
        _LLAMA_LORA,
        Case("shapes/qwen3-32b.json", "LoRA", f"{_LLM} {_LORA}", _llm("Qwen/Qwen3-32B", " --lora 16")),
    ),
    "16": (
        Case(
            "shapes/llama-3.2-3b.json", f'{_ALL_16}, `"backward"`', f"{_LLM} {_TRUE} {_BACKWARD}",
            _llm("meta-llama/Llama-3.2-3B", _UNCLIPPED),
        ),
        _LLAMA_LORA._replace(run=_ABOVE),
        _FLUX._replace(run="`finetune_diffusion.py`, as above"),
        Case(
            "shapes/qwen3-30b-a3b.json", "LoRA, experts in 4 bits", f"{_LLM} {_LORA} --pack-experts nvfp4",
            "`finetune_moe.py`, as above",
        ),
    ),
    "80": (
        Case("shapes/llama-3-8b.json", "all weights, `bf16-mixed`, clipped", f"{_LLM} {_FOUR} {_CLIP}", _ABOVE),
        Case("shapes/llama-3-8b.json", _ALL_16, f"{_LLM} {_FOUR} {_TRUE}", _ABOVE),
        Case("shapes/qwen3-32b.json", "LoRA", f"{_LLM} {_FOUR} {_LORA}", _ABOVE),
        Case(
            "shapes/llama-3-70b.json", "LoRA, the base on a disk of 7 GB/s", f"{_LLM} {_FOUR} {_LORA} --disk 7GB/s",
            "`disk=`, [mapped weights](files.md#weights-in-their-files)",
        ),
        Case("shapes/gpt-oss-120b.json", "LoRA, experts in MXFP4", f"{_LLM} {_FOUR} {_LORA}", "`finetune_moe.py`, as above"),
        Case(
            _FLUX.model, f"{_ALL_16}, clipped", f"--gradient-checkpointing {_TRUE} {_CLIP}",
            "your own LightningModule ([guide](vision.md#diffusion))",
        ),
    ),
}  # fmt: skip


def ask(case: Case, card: Card) -> dict[str, Any]:
    """What ``plan --json`` says of a training on a card."""
    model = case.model if ":" in case.model else str(ROOT / "examples" / case.model)
    words = ["plan", model, *card.options.split(), *case.options.split(), "--json"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        run_command(words)
    found: dict[str, Any] = json.loads(printed.getvalue())
    return found


def plain_seconds(said: dict[str, Any], window: dict[str, Any], *, clipped: bool) -> float:
    """Seconds of plain Lightning if the card had the memory: the same computation, and AdamW's step on the GPU.

    A step reads weight, gradient and state, and writes weight and state; clipping reads the gradient twice and writes it.
    """
    width = 2 if said["precision"] == "bf16-true" else 4
    passes = 3 + 2 * 2 + 3 * clipped
    step: float = passes * width * said["trained_parameters"] / (1e9 * said["assumed"]["device_gbps"])
    return window["busy_seconds"]["compute"] + step


def cells(case: Case, card: Card) -> list[str]:
    """A row of the table: what is trained, memory, time, and the share of plain Lightning's speed."""
    said = ask(case, card)
    name = f"{case.name}, {case.what}"
    if said["best"] is None:
        return [name, *["–"] * 4, said["verdict"].splitlines()[0].partition(" (")[0]]
    best = said["best"]
    (window,) = (row for row in said["windows"] if all(row[key] == best[key] for key in ("k", "k_prime")))
    limit = float(card.options.partition("--gpu-memory ")[2].partition("GiB")[0]) * GIB
    how = f"{case.run}; plain Lightning fits, too, and is faster" if said["plain_bytes"] <= limit else case.run
    share = plain_seconds(said, window, clipped=_CLIP in case.options) / window["seconds"]
    memory = (window["device_bytes"], said["host_bytes"])
    return [
        name,
        *(f"{_digits(size / GIB)} GiB" for size in memory),
        f"{_digits(window['seconds'])} s",
        f"{share:.2f}",
        how,
    ]


def _digits(number: float) -> str:
    """Two digits of a number."""
    rounded = float(f"{number:.2g}")
    return f"{rounded:.0f}" if rounded >= 10 else f"{rounded:.{1 + (rounded < 1)}f}"


def table(key: str, word: str = "") -> Iterator[str]:
    """The table of a card, or those of its rows whose model has the word."""
    yield "| model, what is trained | GPU memory | CPU memory | s per step | share of plain | how |"
    yield "|---|---|---|---|---|---|"
    for case in CASES[key]:
        if word.lower() in case.name:
            yield f"| {' | '.join(cells(case, CARDS[key]))} |"


def page(commit: str, date: str) -> Iterator[str]:
    """The page, line by line."""
    yield f"""# What fits on my card

Read this to see what fits on a card of 16, 24 or 80 GB, how fast a step is, and [how other tools compare](#other-tools).

```sh
superpipeline plan examples/shapes/llama-3-8b.json --lora 16 --tokens 4096 --gradient-checkpointing --gpu-memory 22GiB
```

This command [answers for your model and card](memory.md#does-it-fit). The tables are its answers: **predicted, not measured**,
to two digits, {date}, commit {commit}, `{COMMAND}`.

- Language models have one sequence of 4,096 tokens per step (four on 80 GB), AdamW and gradient checkpointing.
- *GPU memory* is that of the fastest window that fits. With `k=1` it is less, for example 11 GiB for 8B.
- *Share of plain* is the time of plain Lightning ÷ this time, as if the card had enough memory for plain Lightning.
- `bf16-true` [loses small updates](memory.md#bytes-per-parameter).
- Clipped runs of all weights wait for optimizer steps. [`accumulate_grad_batches`](language.md#pitfalls) makes these rarer.
- "–": it does not fit. Each row's options, and where the rates are from, are in [the script](../benchmarks/cards.py)."""
    for key, card in CARDS.items():
        yield f"\n## {card.title}\n"
        yield from table(key)
        yield f"\n`plan` was asked with `{card.options}`."


def main(argv: Sequence[str] | None = None) -> None:
    """Writes the page, or prints rows."""
    words = sys.argv[1:] if argv is None else argv
    if words:
        print("\n".join(line for key in CARDS for line in [f"{CARDS[key].title}", *table(key, words[0])]))
        return
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout.strip()
    predicted = "\n".join(page(commit, f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}")) + "\n"
    PAGE.write_text(predicted + "".join(PAGE.read_text().partition(WRITTEN_BY_HAND)[1:]))


if __name__ == "__main__":
    main()
