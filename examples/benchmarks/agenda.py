"""What one run does, in the order of its worth: whatever is cut off at the end is what matters least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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


Agenda = list[Module | Contest]

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


def h200() -> Agenda:
    """Chosen for ten minutes on one H200 with 16 cores and 128 GiB of host memory."""

    def train(family: str, size: str, items: int, precision: str = "bf16-mixed") -> Workload:
        return Workload("train", family, size, precision, items, 4096, checkpointing=True, steps=8)

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
    "h200": h200, "activations": activations, "activations-tiny": tiny_activations
}  # fmt: skip
"""Lists chosen for a machine or a question, by name on the command line."""
