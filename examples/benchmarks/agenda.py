"""What one run does, in the order of its worth: whatever is cut off at the end is what matters least."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass

import torch

from examples.benchmarks.contestants import THREADS
from examples.benchmarks.rows import Row, digest
from examples.benchmarks.workloads import SIZES, Workload

CORE = ("core/device", "core/engine", "core/weights", "core/plan", "core/store", "trainer", "core/updates")
"""Folders of the package that every training runs."""


@dataclass(frozen=True)
class Module:
    """A module that is run as it is.

    Attributes:
        module: its name, as for ``python -m``.
        arguments: of its command line, beyond ``--out`` for rows. ``{out}`` in them is the folder for results.
        expected: seconds, as long as no run has told them.
        folders: of the package that it is about; all others may change, and its row still counts.
        writes: it appends its own rows to ``--out``. Otherwise its row keeps the end of what it says.
    """

    module: str
    arguments: tuple[str, ...] = ()
    expected: float = 60
    folders: tuple[str, ...] = CORE
    writes: bool = False

    @property
    def name(self) -> str:
        return " ".join([self.module, *self.arguments])


@dataclass(frozen=True)
class Contest:
    """Some contestants on one workload.

    Attributes:
        contestants: by name.
        expected: seconds of each of them, as long as no run has told them.
        device_gib: GiB of device memory for each, None for all.
        folders: see :class:`Module`.
    """

    workload: Workload
    contestants: tuple[str, ...]
    expected: float = 40
    device_gib: float | None = None
    folders: tuple[str, ...] = (
        *CORE,
        "capabilities/activations",
        "capabilities/gpu_steps",
        "capabilities/tuning",
    )

    @property
    def name(self) -> str:
        within = "" if self.device_gib is None else f" in {self.device_gib:g} GiB"
        return f"{self.workload.name}{within}: {', '.join(self.contestants)}"


@dataclass(frozen=True)
class Tests:
    """Tests that ``pytest`` runs, in several processes; those that have passed before are left out.

    Attributes:
        name: of the row.
        tests: files of ``tests/gpu``, or tests in them (``test_cuda.py::test_copies_overlap_compute``).
        expected: seconds, as long as no run has told them.
        needs: distributions that they test.
    """

    name: str
    tests: tuple[str, ...]
    expected: float = 60
    needs: tuple[str, ...] = ()

    @property
    def folders(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(folder for name in self.files for folder in (*CORE, *GPU_TESTS[name])))

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.partition("::")[0] for each in self.tests))


GPU_TESTS: dict[str, tuple[str, ...]] = {
    "test_steps_on_host.py": ("tools/comparison",),
    "test_layers_that_stay.py": ("capabilities/gpu_steps",),
    "test_everyday.py": (
        "capabilities/activations",
        "capabilities/experts",
        "capabilities/gpu_steps",
        "core/model",
        "capabilities/tuning",
    ),
    "test_compiled_blocks.py": ("capabilities/activations", "capabilities/gpu_steps", "core/model"),
    "test_models.py": ("core/model",),
    "test_user_code.py": ("capabilities/activations", "capabilities/gpu_steps"),
    "test_steps_on_device.py": ("capabilities/gpu_steps",),
    "test_fork.py": (),
    "test_cuda.py": ("capabilities/activations", "capabilities/tuning"),
    "test_delays.py": ("capabilities/activations", "capabilities/experts", "capabilities/gpu_steps"),
    "test_several_devices.py": ("experimental/ranks",),
}
"""Files of ``tests/gpu``, with the folders that each is about beyond :data:`CORE`."""

Item = Module | Contest | Tests
Agenda = list[Item]

TRAINING = (
    "plain", "superpipeline-2:1", "superpipeline-4:2", "fsdp2", "deepspeed", "fsdp2-exact", "torchao", "fsdp"
)  # fmt: skip
PREDICTION = ("plain", "superpipeline-2:1", "accelerate", "diffusers")
PAIR = ("plain", "superpipeline-2:1")
DIAL = ("plain", *(f"superpipeline-{k}:{k_prime}" for k in (1, 2, 4) for k_prime in (1, 2)))
"""The table of k and k'. No GPU has run it yet."""
PREDICTION_DIAL = (*DIAL, *PREDICTION[2:])
FLASH = ("plain-flash", "recompute-flash")
ACTIVATIONS = (
    "plain", "superpipeline-2:1-keep", "superpipeline-2:1-recompute", "superpipeline-2:1-offload",
    "superpipeline-2:1-auto", "plain-recompute", "plain-offload",
)  # fmt: skip
OVERHEAD = Module("examples.benchmarks.overhead", expected=40, writes=True)
QUANTISERS = ("torchao", "bitsandbytes")


def of_size(size: str, precision: str) -> Agenda:
    """Everything at one size: two sequences per step; the families that have this size."""
    length, expected = (64, 15.0) if size == "tiny" else (4096, 135.0)
    agenda: Agenda = [Module("sp_lightning", ("rates", "--seconds", "4" if size == "tiny" else "20"))]
    if size in SIZES["llm"]:
        items = 2 * length
        agenda += [
            Contest(Workload("train", "llm", size, precision, items, length), TRAINING, expected),
            Contest(Workload("predict", "llm", size, precision, items, length), PREDICTION, expected),
        ]
    if size in SIZES["vision"]:
        agenda.append(Contest(Workload("train", "vision", size, precision, 8), PAIR, expected))
    if size in SIZES["vlm"]:
        agenda.append(Contest(Workload("train", "vlm", size, precision, 2 * length, length), PAIR, expected))
    return [*agenda, OVERHEAD]


def train(family: str, size: str, items: int, precision: str = "bf16-mixed", steps: int = 8) -> Workload:
    """A few steps, each block's activations computed again in backward."""
    return Workload("train", family, size, precision, items, 4096, checkpointing=True, steps=steps)


def predict(family: str, size: str, items: int) -> Workload:
    """A few batches, weights in 16 bits."""
    return Workload("predict", family, size, "bf16-true", items, 4096, steps=12)


def first_call() -> Agenda:
    """What a first call has to give, as if no second one came: is it exact, and how fast are ordinary programs."""
    runs = ("plain", "clipped", "clipped by value", "accumulated, clipped")
    exact = [
        f"test_steps_on_host.py::test_a_program_that_steps_on_the_cpu_has_the_same_bits[AdamW-{run}-{precision}]"
        for run in runs
        for precision in ("32-true", "bf16-mixed", "bf16-true")
    ]
    everyday = ("plain", "default", "plain-clipped", "default-clipped")
    return [
        Contest(train("llm", "1.5B", 16384), (*everyday, "default-hooked"), 32),
        Contest(train("llm", "8B", 16384, "bf16-true", steps=6), everyday, 42),
        Tests("AdamW", tuple(exact), 45),
    ]


def now() -> Agenda:
    """The one list of a GPU: :func:`first_call`, then what has no row yet. What has one is left out (:func:`is_done`).

    First the tables of k and k', with all memory of the device, for three families in training and in prediction (there beside
    accelerate and diffusers). Then layers that stay, flash-attn, all other tests, figures that help to choose defaults, rivals,
    smaller cards and larger models. 24 GiB with 64k tokens are as in RoundPipe (arXiv 2604.27085), full fine-tuning on an RTX
    4090: Qwen3-1.7B 8,881 and Llama-3.1-8B 3,142 tokens/s. 7B with 64k are as in MegaTrain on one H100: Qwen2.5-7B 272 TFLOPS.
    """
    small = train("llm", "1.5B", 16384)
    others = [name for name in GPU_TESTS if name != "test_several_devices.py"]
    in_16_bits = train("llm", "14B", 8192, "bf16-true", steps=6)

    def published(size: str) -> Workload:
        return Workload("train", "llm", size, "bf16-true", 65536, 4096, steps=6)

    return [
        *first_call(),
        Contest(small, DIAL, 32),
        Contest(predict("llm", "7B", 8192), PREDICTION_DIAL, 40),
        Contest(train("vlm", "7B", 8192, "bf16-true", steps=6), DIAL, 45),
        Contest(predict("vlm", "7B", 8192), PREDICTION_DIAL, 40),
        Contest(train("vision", "giant", 64), DIAL, 40),
        # accelerate leaves weights on the meta device that torch's MultiheadAttention reads of a submodule without a call.
        Contest(predict("vision", "giant", 64), (*DIAL, "diffusers"), 25),
        Contest(small, ("plain", "stay", "plain-clipped", "stay-clipped"), 32),
        Contest(train("llm", "8B", 16384, "bf16-true", steps=6), ("plain", "stay"), 42),
        Contest(Workload("train", "llm", "1.5B", "bf16-true", 16384, 4096), FLASH, 32),
        Tests("everyday", ("test_compiled_blocks.py", "test_everyday.py"), 60),
        Tests("quantised", ("test_models.py::test_torchao", "test_models.py::test_bitsandbytes"), 40, QUANTISERS),
        Tests("all", tuple(others), 240),
        Module("sp_lightning", ("check", "--out", "{out}/check.json"), 60, (*CORE, "tools/comparison")),
        Contest(small, tuple(f"superpipeline-{k}:1-backward" for k in (1, 2, 4, 99)), 32),
        Contest(small, ("plain-compiled", "default-compiled"), 60),
        Module("sp_lightning", ("rates",), 45, ("tools/planner",)),
        Contest(small, tuple(f"superpipeline-2:1-threads{threads}" for threads in THREADS), 32),
        Contest(small, ("plain", "fsdp2", "deepspeed", "deepspeed-2", "torchao"), 45),
        Contest(train("llm", "8B", 8192, "bf16-true", steps=6), ("default",), 60, device_gib=24),
        Contest(in_16_bits, ("default",), 100, device_gib=24),
        Contest(Workload("train", "vision", "huge", "bf16-mixed", 96), ACTIVATIONS, 45),
        Contest(Workload("train", "llm", "1.5B", "bf16-mixed", 16384, 16384), ACTIVATIONS, 45),
        Contest(published("8B"), ("superpipeline-2:1-auto",), 120, device_gib=24),
        Contest(train("llm", "7B", 65536, "bf16-true", steps=6), ("superpipeline-2:1",), 90),
        Contest(train("vlm", "1.5B", 8192), PAIR, 45, device_gib=16),
        Contest(train("vision", "giant", 64), PAIR, 45, device_gib=16),
        OVERHEAD,
    ]


def several_gpus() -> Agenda:
    """The tests of several GPUs. They have not run yet."""
    return [Tests("several", ("test_several_devices.py",), 90)]


def pretended() -> Agenda:
    """What a CPU, which may be busy, can do of :func:`now`, with tiny sizes: whether it works."""
    workload = Workload("train", "llm", "tiny", "bf16-mixed", 128, 64, checkpointing=True, steps=5)
    return [
        Tests("tests", ("test_fork.py",), 200),
        Module("sp_lightning", ("rates", "--seconds", "0.4"), 200),
        Contest(workload, ("deepspeed", "superpipeline-2:1"), 200),
        Module("examples.benchmarks.each_contestant", (), 400, writes=True),
    ]


def tiny_activations() -> Agenda:
    """The contests of activations in :func:`now` for any machine, with just enough in a batch that it is worth moving."""
    return [
        Contest(Workload("train", "vision", "tiny", "bf16-mixed", 64), ACTIVATIONS),
        Contest(Workload("train", "llm", "tiny", "bf16-mixed", 1024, 256), ACTIVATIONS),
    ]


LISTS: dict[str, Callable[[], Agenda]] = {
    "now": now,
    "ranks": several_gpus,
    "pretend": pretended,
    "activations-tiny": tiny_activations,
}
"""Lists chosen for a machine or a question, by name on the command line."""


def paths(item: Item) -> tuple[str, ...]:
    """The files and folders that an item is about, in the repository."""
    tests = tuple(f"tests/gpu/{name}" for name in item.files) if isinstance(item, Tests) else ()
    return (*tests, *(f"sp_lightning/{folder}" for folder in item.folders))


def on_accelerator(found: Iterable[Row]) -> list[Row]:
    """Rows of an accelerator; of this machine's, if it has one."""
    here = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return [row for row in found if row["machine"]["accelerator"] and here in (None, row["machine"]["accelerator"])]


def is_done(item: Item, found: Iterable[Row]) -> bool:
    """Whether an accelerator has given a row of an item, with the present code of what the item is about."""
    present = digest(paths(item))
    return any(
        row.get("item") == item.name and row["digest"] == present and row["status"] in ("ok", "missing")
        for row in on_accelerator(found)
    )


def expected(item: Item, found: Sequence[Row]) -> float:
    """Seconds that an item is expected to take: as in the last run; otherwise what is written here.

    Contestants are looked up one by one. Tests count as many as they took when all of them ran.
    """
    if isinstance(item, Contest):
        return sum(expected_of(item, name, found) for name in item.contestants)
    wanted = {"item": item.name, "status": "ok"} | ({"left_out": 0} if isinstance(item, Tests) else {})
    return _last(found, "seconds", wanted) or item.expected


def expected_of(item: Contest, contestant: str, found: Sequence[Row]) -> float:
    """The same of one contestant."""
    flat = [{**row, **row["workload"], **row["limits"]} for row in found if row.get("contestant") == contestant]
    wanted = {"status": "ok", "device_gib": item.device_gib, **asdict(item.workload)}
    return _last(flat, "process_seconds", wanted) or item.expected


def _last(found: Sequence[Row], key: str, wanted: Row) -> float | None:
    """A value of the last row that has it, of those with the wanted values."""
    matching = (
        row for row in reversed(found) if key in row and all(row.get(name) == value for name, value in wanted.items())
    )
    return next((float(row[key]) for row in matching), None)


def passed_before(item: Tests, found: Iterable[Row]) -> list[str]:
    """The tests of an item's files that have passed on an accelerator, with the present code of what their file is about."""
    present = digests(item)
    return [
        test
        for row in on_accelerator(found)
        for name, (its, tests) in row.get("passed", {}).items()
        if present.get(name) == its
        for test in tests
    ]


def digests(item: Tests) -> dict[str, str]:
    """A digest for each file of tests."""
    return {name: digest(paths(Tests(name, (name,)))) for name in item.files}
