"""What one run does, in the order of its worth: whatever is cut off at the end is what matters least."""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from examples.benchmarks.contestants import THREADS
from examples.benchmarks.rows import Row, code
from examples.benchmarks.workloads import SIZES, Workload


@dataclass(frozen=True)
class Module:
    """A module of this package that is run as it is and appends its own row.

    Attributes:
        name: of the module.
        arguments: of its command line, beyond ``--out``.
        time_out: seconds.
    """

    name: str
    arguments: tuple[str, ...] = ()
    time_out: float = 60


@dataclass(frozen=True)
class Contest:
    """Some contestants on one workload.

    Attributes:
        contestants: by name.
        time_out: seconds for each of them.
        device_gib: GiB of device memory for each, None for all.
    """

    workload: Workload
    contestants: tuple[str, ...]
    time_out: float = 75
    device_gib: float | None = None


@dataclass(frozen=True)
class Tests:
    """Tests that ``pytest`` runs, with a row that says how they ended.

    Attributes:
        name: of the row.
        arguments: of pytest.
        time_out: seconds.
    """

    name: str
    arguments: tuple[str, ...]
    time_out: float = 90


Agenda = list[Module | Contest | Tests]

TRAINING = (
    "plain", "superpipeline-2:1", "superpipeline-4:2", "fsdp2", "deepspeed", "fsdp2-exact", "torchao", "fsdp"
)  # fmt: skip
PREDICTION = ("plain", "superpipeline-2:1", "accelerate", "diffusers")
PAIR = ("plain", "superpipeline-2:1")
ACTIVATIONS = (
    "plain", "superpipeline-2:1-keep", "superpipeline-2:1-recompute", "superpipeline-2:1-offload",
    "superpipeline-2:1-auto", "plain-recompute", "plain-offload",
)  # fmt: skip


def of_size(size: str, precision: str) -> Agenda:
    """Everything at one size: two sequences per step; the families that have this size."""
    length, time_out = (64, 60.0) if size == "tiny" else (4096, 300.0)
    agenda: Agenda = [Module("limits", ("--seconds", "4" if size == "tiny" else "20"))]
    if size in SIZES["llm"]:
        items = 2 * length
        agenda += [
            Contest(Workload("train", "llm", size, precision, items, length), TRAINING, time_out),
            Contest(Workload("predict", "llm", size, precision, items, length), PREDICTION, time_out),
        ]
    if size in SIZES["vision"]:
        agenda.append(Contest(Workload("train", "vision", size, precision, 8), PAIR, time_out))
    if size in SIZES["vlm"]:
        agenda.append(Contest(Workload("train", "vlm", size, precision, 2 * length, length), PAIR, time_out))
    return [*agenda, Module("overhead")]


def train(family: str, size: str, items: int, precision: str = "bf16-mixed") -> Workload:
    """A few steps, each block's activations computed again in backward."""
    return Workload("train", family, size, precision, items, 4096, checkpointing=True, steps=8)


def _foresight(size: str, tokens: int) -> Module:
    """Predicted beside measured step time, of the window that the contest has."""
    sizes = f"--size {size} --tokens {tokens} --length 4096"
    arguments = f"{sizes} --precision bf16-mixed --gradient-checkpointing --windows 2:1 --seconds 5"
    return Module("foresight", tuple(arguments.split()), 80)


def small_on_one_card() -> Agenda:
    """1.5B beside its rivals: plain Lightning has room for it on 80 GB. Each list of one card ends within eight minutes."""
    contest = Contest(train("llm", "1.5B", 16384), ("plain", "superpipeline-2:1", "fsdp2", "deepspeed"), 90)
    return [contest, _foresight("1.5B", 16384)]


def middle_on_one_card() -> Agenda:
    """3B beside its rivals: plain takes nearly all of 80 GB."""
    contest = Contest(
        train("llm", "3B", 16384), ("superpipeline-2:1", "superpipeline-2:1-device", "plain", "fsdp2", "deepspeed"), 90
    )
    return [contest, _foresight("3B", 16384)]


def large_on_one_card() -> Agenda:
    """8B in bfloat16, for which plain takes 64 GB beside its activations."""
    return [Contest(train("llm", "8B", 16384, "bf16-true"), ("superpipeline-2:1", "plain", "fsdp2"), 150)]


def others_on_one_card() -> Agenda:
    """What others have published of one card, at sizes and tokens like theirs.

    RoundPipe (arXiv 2604.27085), full fine-tuning on one RTX 4090 of 24 GB with 64k tokens per step: Qwen3-1.7B 8,881 and
    Llama-3.1-8B 3,142 tokens/s. MegaTrain on one H100: Qwen2.5-7B 272 TFLOPS.
    """

    def on_24_gb(size: str, time_out: float) -> Contest:
        workload = Workload("train", "llm", size, "bf16-true", 65536, 4096, steps=6)
        return Contest(workload, ("superpipeline-2:1-auto",), time_out, device_gib=24)

    seven = Workload("train", "llm", "7B", "bf16-true", 65536, 4096, checkpointing=True, steps=6)
    return [on_24_gb("8B", 190), Contest(seven, ("superpipeline-2:1",), 140), on_24_gb("1.5B", 110)]


def next_on_one_card() -> Agenda:
    """What has no row of the present code yet, most valuable first; what has one is left out (``is_done``).

    First whether steps on the CPU have this GPU's bits, then the figures of README, by README's own snippet, then what was mended
    since tests ran on a GPU last, then what helps to choose defaults, then rivals, then smaller cards and larger models.
    """
    small, large = train("llm", "1.5B", 16384), train("llm", "8B", 16384, "bf16-true")
    in_16_bits = Workload("train", "llm", "14B", "bf16-true", 8192, 4096, checkpointing=True, steps=6)
    on_24_gb = Workload("train", "llm", "8B", "bf16-true", 8192, 4096, checkpointing=True, steps=6)
    timeline = "--size 1.5B --tokens 16384 --length 4096 --seconds 4"
    return [
        Module("gpu_bits", ("--millions", "50"), 75),
        Tests("plain-bits", ("tests/gpu/test_plain_bits.py",), 90),
        Contest(small, ("plain", "default", "default-clipped", "plain-clipped"), 75),
        Tests("stay", ("tests/gpu/test_layers_that_stay.py",), 90),
        Contest(small, ("plain", "stay", "stay-clipped"), 75),
        Contest(large, ("plain", "default", "default-clipped", "stay-clipped"), 120),
        Tests("user-code", ("tests/gpu/test_user_code.py",), 90),
        Tests("device-paths", ("tests/gpu/test_sharing.py", "tests/gpu/test_steps_on_device.py"), 120),
        Tests("compiled", ("tests/gpu/test_compiled_blocks.py",), 90),
        Contest(small, ("plain-compiled", "default-compiled"), 110),
        Module("beside_plan", tuple(timeline.split()), 110),
        Module("second_runs", ("--width", "4096", "--tokens", "8192", "--precision", "bf16-true"), 60),
        Contest(small, tuple(f"superpipeline-2:1-threads{threads}" for threads in THREADS), 60),
        Contest(small, ("fsdp2", "deepspeed", "deepspeed-2"), 90),
        Contest(on_24_gb, ("default",), 120, device_gib=24),
        Contest(in_16_bits, ("default",), 200, device_gib=24),
        Contest(small, tuple(f"superpipeline-{k}:1-backward" for k in (1, 2, 4, 99)), 60),
        Contest(Workload("predict", "llm", "7B", "bf16-true", 8192, 4096, steps=12), PREDICTION, 60),
    ]


def is_done(item: Module | Contest | Tests, found: Iterable[Row]) -> bool:
    """Whether an accelerator has given rows of the present code for all of an item.

    The contestants of a contest count if they ran in one run. A rival that is not installed is left out there.
    """
    rows_here = [row for row in found if row.get("code") == code() and row["machine"]["accelerator"] is not None]
    well = [row for row in rows_here if row["status"] == "ok"]
    if isinstance(item, Tests):
        return any(row["kind"] == "gpu-tests" and row["name"] == item.name for row in well)
    if isinstance(item, Module):
        commands = [shlex.split(row["command"]) for row in well if row["kind"] == item.name.replace("_", "-")]
        return any(set(item.arguments) <= set(command) for command in commands)
    wanted = asdict(item.workload)
    runs: defaultdict[str, set[str]] = defaultdict(set)
    for row in rows_here:
        shape = row.get("workload", {})
        same = all(shape.get(name) == value for name, value in wanted.items())
        if "contestant" in row and same and row["limits"]["device_gib"] == item.device_gib:
            runs[row["run"]] |= {row["contestant"]} if row["status"] in ("ok", "missing") else set()
    return any(set(item.contestants) <= names for names in runs.values())


def pretended() -> Agenda:
    """What a CPU can do of the lists of one card: whether they work."""
    workload = Workload("train", "llm", "tiny", "bf16-mixed", 128, 64, checkpointing=True, steps=5)
    foresight = Module("foresight", ("--tokens", "64", "--windows", "1:1", "2:1", "--seconds", "0.1"))
    return [Contest(workload, ("deepspeed", "superpipeline-2:1")), foresight]


def h200() -> Agenda:
    """Chosen for ten minutes on one H200 with 16 cores and 128 GiB of host memory."""
    large = train("llm", "3B", 32768)
    return [
        Module("limits", ("--seconds", "16")),
        Contest(
            large,
            ("plain", "superpipeline-2:1", "superpipeline-2:1-off", "superpipeline-4:2", "fsdp2", "deepspeed"),
            120,
        ),
        Contest(Workload("predict", "llm", "7B", "bf16-true", 8192, 4096, steps=12), PREDICTION, 60),
        Contest(train("llm", "3B", 8192), PAIR, 60, device_gib=16),
        Contest(train("vlm", "1.5B", 8192), PAIR, 60, device_gib=16),
        Contest(train("vision", "giant", 64), PAIR, 60, device_gib=16),
        Contest(train("llm", "7B", 8192, "bf16-true"), PAIR, 75, device_gib=24),
        Contest(train("llm", "1.5B", 32768), ("plain", "superpipeline-2:1", "fsdp2", "deepspeed"), 60),
        Module("overhead"),
        Contest(train("llm", "3B", 8192), (*PAIR, "fsdp2", "deepspeed"), 60),
        Contest(
            large, ("superpipeline-8:4", "superpipeline-4:1", "superpipeline-8:2", "torchao", "fsdp2-exact", "fsdp")
        ),
        Contest(train("vision", "huge", 256), PAIR, 60),
    ]


def activations() -> Agenda:
    """What becomes of activations where they dominate, for ten minutes on the machine of :func:`h200`.

    Estimated from what autograd saves in two layers on a CPU: about 34 GiB of activations in the first, 48 in the second.
    Plain Lightning has room for them, so has the host; 16 GiB, where ``"auto"`` chooses, have not.
    """
    return [
        Contest(Workload("train", "vision", "huge", "bf16-mixed", 96), ACTIVATIONS, 120),
        Contest(Workload("train", "llm", "1.5B", "bf16-mixed", 16384, 16384), ACTIVATIONS, 120),
    ]


def tiny_activations() -> Agenda:
    """The same for any machine, with just enough in a batch that what is saved is worth moving."""
    return [
        Contest(Workload("train", "vision", "tiny", "bf16-mixed", 64), ACTIVATIONS),
        Contest(Workload("train", "llm", "tiny", "bf16-mixed", 1024, 256), ACTIVATIONS),
    ]


LISTS: dict[str, Callable[[], Agenda]] = {
    "1.5B": small_on_one_card,
    "3B": middle_on_one_card,
    "8B": large_on_one_card,
    "card": others_on_one_card,
    "next": next_on_one_card,
    "pretend": pretended,
    "h200": h200,
    "activations": activations,
    "activations-tiny": tiny_activations,
}
"""Lists chosen for a machine or a question, by name on the command line."""
