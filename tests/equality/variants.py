"""The registry of variants: how a case is trained, and what each variant covers, in words.

Most names begin with what becomes of activations (``keep``, ``recompute``, ``offload``), with when updates run (``off``,
``forward``, ``backward``, ``by default``), or with ``users`` where no callback of the tests notes anything; then come the window,
what stays, the precision, what is done before a step, epochs, and the memory. ``python -m tests.equality.variants WORD …`` lists
those with all these words in their names. :data:`VARIANTS` are for cases and programs, :data:`OF_PROGRAMS` for programs alone.

:func:`pairs` says in which tier a pair of a case and a variant runs.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import cycle, product
from typing import Any, Literal

from tests.equality.cases import CASES

ALL = 99
"""A window that is larger than any model here."""
TABLES = frozenset(name for name in CASES if name.startswith("rows/"))
EXPERTS = frozenset(name for name in CASES if name.startswith("experts/"))
QUANTISED = frozenset(name for name in CASES if name.startswith("quantised/"))
UNEVEN = frozenset(name for name in CASES if name.startswith("uneven/"))
EVERY = frozenset(CASES) - UNEVEN
"""Those with blocks that are divided take tenths of a second, and have variants of their own."""
BASIC = EVERY - TABLES - EXPERTS - QUANTISED
QUICK = frozenset(name for name, case in CASES.items() if case.quick)
ONE_OF_EACH_KIND = frozenset({"stack", "llama-dropout", "rows/looked-up", "experts/mixture", "quantised/int8"})
NONE: frozenset[str] = frozenset()

Memory = Literal["plain", "poisoned", "simulated", "crowded"]
Below = Literal["", "state", "weights", "gradients", "everything", "frozen"]


@dataclass(frozen=True)
class Variant:
    """How a case is trained.

    Args:
        name: what its tests are called.
        covers: what would fail here and in no other variant.
        strategy: options of the strategy.
        trainer: options of the trainer; those that plain Lightning refuses with a module are left out for it.
        memory: plain, with NaN wherever nobody may read, or on the simulated asynchronous device, where nothing may race; crowded
            is such a device on which activations do not fit into memory that was not measured.
        seen: what a callback notes; with a hook on gradients the engine keeps no copies and fetches nothing early.
        cases: those that it is for.
        quick: those of them that are in the first tier, or in the second if they take longer (:func:`pairs`).
        refused: cases that are refused by name, with what is said; ``"*"`` stands for all others.
        below: what is on a disk: optimizer state, or that and gradients, trained weights, or both; frozen weights in their files.
        elsewhere: whether backward runs in another thread than forward.
        compiled: whether blocks are compiled, on plain Lightning as well.
    """

    name: str
    covers: str
    strategy: dict[str, Any]
    trainer: dict[str, Any] = field(default_factory=dict)
    memory: Memory = "plain"
    seen: Literal["gradients", "losses", "nothing"] = "gradients"
    cases: frozenset[str] = EVERY
    quick: frozenset[str] = QUICK
    refused: dict[str, str] = field(default_factory=dict)
    below: Below = ""
    elsewhere: bool = False
    compiled: bool = False

    @property
    def background(self) -> bool:
        """Whether updates run in the host's background, where optimizers run fused."""
        return self.strategy.get("optimizer_overlap", "off") != "off" and "optimizer_on" not in self.strategy


def windows() -> Iterator[Variant]:
    """Sizes of the window, in float32."""
    yield Variant(
        "k=1", "the smallest window: each layer goes before the next but one comes, and nobody reads what is gone",
        {"k": 1, "k_prime": 1}, memory="poisoned", quick=EVERY,
    )  # fmt: skip
    yield Variant(
        "k=2, k'=2", "layers that move in pairs, of which one may be in use when the other goes", {"k": 2, "k_prime": 2},
        memory="poisoned",
    )  # fmt: skip
    for k, k_prime, covers in (
        (1, 2, "a transfer that is larger than the window"),
        (2, 1, "the window that the CPU has by default"),
        (3, 2, "a window that is no multiple of a transfer"),
        (ALL, 1, "all layers stay: nothing but gradients moves"),
    ):
        name = f"k={'all' if k == ALL else k}, k'={k_prime}"
        quick = frozenset({"stack", "conditional"}) if k != ALL else QUICK
        yield Variant(name, covers, {"k": k, "k_prime": k_prime}, cases=BASIC, quick=quick)
    for k, k_prime in ((1, 1), (2, 2), (ALL, 1)):
        yield Variant(
            f"users, k={'all' if k == ALL else k}, two epochs",
            "what users have: no hook on gradients, so that copies are kept and the next batch's layers are fetched early",
            {"k": k, "k_prime": k_prime}, {"max_epochs": 2}, seen="nothing", cases=BASIC - {"checkpoint-whole"},
            quick=QUICK if k == 2 else frozenset({"stack", "reused"}),
        )  # fmt: skip


def precisions() -> Iterator[Variant]:
    """Autocast, and modules in other precisions."""
    mixed = {"precision": "bf16-mixed", "accumulate_grad_batches": 2}
    for k in (1, 3):
        yield Variant(
            f"bf16-mixed, k={k}",
            "weights that travel as their casts; autocast's copies live in backward, and what it leaves alone comes then",
            {"k": k}, mixed, memory="poisoned", quick=QUICK if k == 1 else ONE_OF_EACH_KIND,
        )  # fmt: skip
    for precision in ("bf16-true", "16-true", "64-true"):
        yield Variant(
            precision, "the module's own precision, in weights, gradients and the optimizer's state",
            {"k": 1, "k_prime": 2}, {"precision": precision}, memory="poisoned",
            # The recompute of t5 in float16 has another dtype on plain Lightning, too, and autograd refuses it.
            cases=frozenset({"llama-dropout", "resnet50", "lstm"}) | ({"t5-checkpoint"} if precision != "16-true" else NONE),
            quick=frozenset({"llama-dropout"}),
        )  # fmt: skip


def accumulation() -> Iterator[Variant]:
    """Accumulated and clipped gradients."""
    some = frozenset(
        {"llama-dropout", "llama-checkpoint-reentrant", "gpt2-tied", "resnet50", "reused", "frozen", "returns-view"}
    )
    for name, covers, options in (
        ("accumulated", "gradients that are added up on the host", {"accumulate_grad_batches": 2}),
        ("clipped by norm", "the norm is that of the sum", {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
        ("clipped by value", "each element is clipped", {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}),
        ("validated in between", "an evaluation between two steps of two epochs",
         {"gradient_clip_val": 0.1, "max_epochs": 2, "val_check_interval": 2}),
    ):  # fmt: skip
        cases = some | TABLES | {"quantised/int8-checkpoint"} if name == "clipped by norm" else some
        quick = frozenset({"llama-dropout", "reused", "rows/sparse"})
        yield Variant(name, covers, {"k": 2, "k_prime": 1}, options, memory="poisoned", cases=cases, quick=quick)


def asynchronous() -> Iterator[Variant]:
    """The simulated device, where whatever is not waited for is a race."""
    options = {"accumulate_grad_batches": 2, "max_epochs": 2}
    small = frozenset({"rows/looked-up", "rows/sparse", "rows/whole-as-well", "rows/written", "rows/hooked"})
    some = BASIC | small | {"experts/mixture", "quantised/int8"}
    quick = frozenset({"stack", "reused", "rows/sparse", "experts/mixture", "clamped-in-forward"})
    covers = "each wait for a copy: what comes too early is a race"
    yield Variant("simulated, k=1", covers, {"k": 1, "k_prime": 1}, options, "simulated", cases=some, quick=quick)
    yield Variant(
        "simulated, k=2, k'=2", f"{covers}, in pairs", {"k": 2, "k_prime": 2}, options, "simulated",
        cases=frozenset(sorted(BASIC)[::3]), quick=NONE,
    )  # fmt: skip
    yield Variant(
        "simulated, k=all", f"{covers}, when layers stay", {"k": ALL}, options, "simulated",
        cases=frozenset({"stack", "llama-dropout", "gan"}), quick=frozenset({"gan"}),
    )  # fmt: skip
    yield Variant(
        "simulated, bf16-mixed", f"{covers}, of casts", {"k": 1, "k_prime": 1}, {**options, "precision": "bf16-mixed"},
        "simulated", cases=BASIC, quick=frozenset({"stack", "frozen"}),
    )  # fmt: skip


def activations() -> Iterator[Variant]:
    """What becomes of what autograd saves."""
    of_each_kind = BASIC | {"rows/looked-up", "experts/mixture", "quantised/int8"}
    yield Variant(
        "recompute, k=1, poisoned", "each layer's forward a second time, as it was", {"k": 1, "activations": "recompute"},
        memory="poisoned", cases=of_each_kind - {"saved-objects"}, quick=QUICK,  # they are lost in torch's checkpoint
        refused={
            "clamped-in-forward": r"'inner.weight' of 'net.blocks.\d' has been modified by an inplace operation",
            "captured-in-forward": r"has been (modified by an inplace operation|exchanged) between forward and backward",
            "stacked/kept-views": r"changes the attribute 'net.layers.0.experts.kept'",
        },
    )  # fmt: skip
    yield Variant(
        "offload, k=1, simulated", "what is saved leaves and comes back in time, its memory is NaN in between",
        {"k": 1, "activations": "offload"}, memory="simulated", cases=of_each_kind,
        quick=frozenset({"stack", "reused", "gradient-penalty", "rows/looked-up", "experts/mixture"}),
    )  # fmt: skip
    for mode, precision in product(("recompute", "offload"), ("bf16-mixed", "bf16-true")):
        yield Variant(
            f"{mode}, k=1, {precision}, accumulated, clipped, simulated",
            "the same with other dtypes, where gradients are added up and clipped",
            {"k": 1, "activations": mode},
            {"precision": precision, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, memory="simulated",
            cases=frozenset({"llama-dropout", "lora-checkpoint", "gradient-penalty", "frozen"}),
            quick=frozenset({"frozen"}),
        )  # fmt: skip


def automatic() -> Iterator[Variant]:
    """The default where activations do not fit: each batch has them treated in another way."""
    quick = frozenset({"stack", "reused", "gan", "clamped-in-forward", "experts/mixture", "rows/looked-up"})
    for precision in ("32-true", "bf16-mixed"):
        yield Variant(
            f"crowded, {precision}",
            "all are offloaded after they were kept, then in time while forwards run twice, then recomputed, then kept",
            {"k": 1}, {"precision": precision, "max_epochs": 2}, memory="crowded",
            cases=BASIC | {"rows/looked-up", "experts/mixture", "quantised/int8"},
            quick=quick if precision == "32-true" else frozenset({"llama-dropout"}),
        )  # fmt: skip
    yield Variant(
        "crowded, backward, two epochs, elsewhere", "the same with backward in a thread of its own, and updates in it",
        {"k": 1, "optimizer_overlap": "backward"}, {"max_epochs": 2}, "crowded", "losses",
        frozenset({"llama-dropout", "stack", "reused"}), frozenset({"stack"}), elsewhere=True,
    )  # fmt: skip


EARLY: dict[str, str] = {"gan": "manual", "parameter-hooks": "post-accumulate"}
"""What cannot be updated inside backward, with what is said."""
CANNOT = 'optimizer_overlap="backward" cannot be used'


def updates() -> Iterator[Variant]:
    """Updates in the background."""
    of_each_kind = BASIC - {"lbfgs"} | {
        "rows/looked-up",
        "rows/padding",
        "rows/frozen",
        "experts/mixture",
        "quantised/int8",
    }
    quick = frozenset({"stack", "frozen", "gan", "sparse-embedding", "rows/padding", "experts/mixture"})
    memories: tuple[Memory, ...] = ("plain", "simulated")
    for mode, memory in product(("forward", "backward"), memories):
        options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
        early = mode == "backward"
        yield Variant(
            f"{mode}, accumulated{'' if early else ', clipped'}, two epochs{', simulated' if memory == 'simulated' else ''}",
            "each layer's update, done as late as somebody waits for it" if memory == "simulated" else
            "each layer's update in a thread of its own",
            {"k": 1, "optimizer_overlap": mode}, options if early else {**options, "gradient_clip_val": 0.05}, memory,
            "losses", of_each_kind, quick if memory == "plain" else frozenset({"stack", "rows/looked-up"}),
            refused=EARLY if early else {},
        )  # fmt: skip
        if memory == "simulated":
            for activations in ("recompute", "offload"):
                yield Variant(
                    f"{mode}, {activations}, simulated", "weights that a second forward or a stored activation needs",
                    {"k": 1, "optimizer_overlap": mode, "activations": activations}, {}, memory, "losses",
                    frozenset({"llama-dropout", "stack"}), frozenset({"stack"}),
                )  # fmt: skip
            yield Variant(
                f"{mode}, bf16-mixed, two epochs, simulated",
                "autocast's copies save backward a fetch: one that came early may be under way when its layer is updated",
                {"k": 1, "optimizer_overlap": mode}, {"precision": "bf16-mixed", "max_epochs": 2}, memory, "losses",
                frozenset({"llama-dropout", "stack"}), frozenset({"stack"}),
            )  # fmt: skip


def early_updates() -> Iterator[Variant]:
    """Updates inside backward of gradients that come but once, where sparse ones are refused."""
    yield Variant(
        "backward, two epochs", "a gradient is complete as soon as it comes, and freed at once",
        {"k": 1, "optimizer_overlap": "backward"}, {"max_epochs": 2}, seen="losses",
        cases=frozenset({"stack", "llama-dropout", "sparse-embedding", "reused", "conditional"}),
        quick=frozenset({"stack", "sparse-embedding"}), refused={"sparse-embedding": "sparse"},
    )  # fmt: skip


def updates_by_default() -> Iterator[Variant]:
    """What an accelerator does by default."""
    for name, options in (("", {}), (", clipped by norm", {"gradient_clip_val": 0.05})):
        yield Variant(
            f"by default{name}, two epochs, simulated",
            "the mode is chosen after a first step that tries whether backward can do without layers",
            {"k": 1, "optimizer_overlap": "auto"}, {"max_epochs": 2, **options}, "simulated", seen="losses",
            cases=EVERY - {"checkpoint-whole"} if not name else frozenset({"stack", "conditional", "gan"}),
            quick=frozenset({"stack", "gan", "sparse-embedding", "parameter-hooks"} if not name else {"stack"}),
        )  # fmt: skip


def updates_in_every_precision() -> Iterator[Variant]:
    """Updates in the background, with everything that comes between a gradient and its update."""
    clips: dict[str, dict[str, Any]] = {
        "": {},
        ", clipped by norm": {"gradient_clip_val": 0.05},
        ", clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    }
    precisions = ("32-true", "bf16-true", "16-true", "bf16-mixed", "16-mixed")
    for mode, precision, (clip, options), accumulate in product(
        ("forward", "backward"), precisions, clips.items(), (1, 4)
    ):
        if (mode, precision, clip, accumulate) == ("backward", "32-true", "", 1):
            continue  # early_updates() has it
        quick = {"stack"} if accumulate == 1 else NONE
        some = {"stack", "llama-dropout"} | (
            {"conditional"} if clip else set()
        )  # its layers without gradients are not clipped
        early = mode == "backward" and ("norm" in clip or precision == "16-mixed")
        yield Variant(
            f"{mode}, {precision}{clip}{', accumulated by 4' if accumulate > 1 else ''}, two epochs",
            "the update is the whole step's to the bit, whatever scales or clips its gradient",
            {"k": 1, "optimizer_overlap": mode},
            {"precision": precision, "accumulate_grad_batches": accumulate, "max_epochs": 2, **options},
            seen="losses", cases=frozenset({"stack"} if early else some), quick=frozenset(quick),
            refused={"*": CANNOT} if early else {},
        )  # fmt: skip


def one_pass() -> Iterator[Variant]:
    """Updates that take gradients as they came: no hook may look at them, so that nothing is noted."""
    clips: dict[str, dict[str, Any]] = {
        "": {},
        ", clipped by norm": {"gradient_clip_val": 0.05},
        ", clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    }
    some = frozenset({"stack", "llama-dropout", "conditional", "reused", "frozen", "gpt2-tied", "lora-checkpoint"})
    memories: tuple[Memory, ...] = ("plain", "simulated")
    for memory, (mode, clip) in product(memories, (*product(["forward"], clips), ("backward", ""))):
        yield Variant(
            f"one pass under {mode}{clip}{', simulated' if memory == 'simulated' else ''}",
            "gradients that are widened, clipped, used and cast piece by piece are those of the three walks",
            {"k": 1, "optimizer_overlap": mode}, {"precision": "bf16-mixed", "max_epochs": 2, **clips[clip]}, memory,
            "nothing", some, frozenset({"stack"} if memory == "plain" else () if clip else {"conditional"}),
        )  # fmt: skip
    for memory, clip in product(memories, clips):
        yield Variant(
            f"one pass under forward, 16-mixed{clip}{', simulated' if memory == 'simulated' else ''}",
            "gradients that are looked through as they came and unscaled piece by piece are those of torch's scaler",
            {"k": 1, "optimizer_overlap": "forward"}, {"precision": "16-mixed", "max_epochs": 2, **clips[clip]}, memory,
            "nothing", some, frozenset({"stack"} if memory == "plain" else () if clip else {"conditional"}),
        )  # fmt: skip


def below_memory() -> Iterator[Variant]:
    """State, gradients and trained weights on a disk."""
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "max_epochs": 2}
    clipped = {**options, "gradient_clip_val": 0.05}
    quick = frozenset({"stack", "rows/looked-up"})
    for name, mode, trainer in (
        ("everything on a disk, by default, accumulated, clipped, simulated", {}, clipped),
        ("everything on a disk, forward, accumulated, clipped, simulated", {"optimizer_overlap": "forward"}, clipped),
        (
            "everything on a disk, forward, bf16-mixed, accumulated, clipped, simulated",
            {"optimizer_overlap": "forward"},
            {**clipped, "precision": "bf16-mixed"},
        ),
        ("everything on a disk, backward, accumulated, simulated", {"optimizer_overlap": "backward"}, options),
    ):
        early = mode.get("optimizer_overlap") == "backward"
        yield Variant(
            name, "what comes back from the disk is what left, whoever wants it", {"k": 1, **mode}, trainer, "simulated",
            "losses", quick=quick if mode else frozenset({"stack"}), below="everything",
            refused={**({**EARLY, "rows/kept": CANNOT} if early else {}), "lbfgs": "LBFGS"},
        )  # fmt: skip


HAS_SPARSE = "updates layers one by one, but .* has sparse gradients"
ON_DEVICE = {
    "gan": "manual", "lbfgs": "LBFGS", "sparse-embedding": HAS_SPARSE, "rows/kept": HAS_SPARSE,
}  # fmt: skip
"""What is not stepped on the device, with what is said."""


def on_device() -> Iterator[Variant]:
    """Steps on the device, in the form that the optimizer's user chose."""
    once: dict[str, Any] = {"max_epochs": 2}
    clipped = {**once, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    early = EARLY | ON_DEVICE
    quick = {
        ("off", "bf16-mixed", "simulated"): frozenset({"stack", "rows/looked-up", "experts/mixture"}),
        ("backward", "bf16-mixed", "simulated"): frozenset({"stack", "frozen"}),
        ("forward", "bf16-mixed", "plain"): frozenset({"stack"}),
    }
    for mode, trainer, memory in (
        ("off", clipped, "plain"),
        ("off", {**clipped, "precision": "bf16-mixed"}, "simulated"),
        ("off", {**clipped, "precision": "16-mixed"}, "simulated"),
        ("forward", {**clipped, "precision": "bf16-mixed"}, "plain"),
        ("forward", {**clipped, "precision": "bf16-mixed"}, "simulated"),
        ("off", {**clipped, "precision": "bf16-true"}, "simulated"),
        ("backward", {**once, "precision": "bf16-mixed"}, "simulated"),
        ("backward", once, "plain"),
    ):
        yield Variant(
            f"stepped on the device, {mode}, {trainer.get('precision', '32-true')}, {memory}",
            "weights, gradients and state that pass through the device for their update are the whole step's to the bit",
            {"k": 1, "optimizer_on": "gpu", "optimizer_overlap": mode}, trainer, memory, "losses",
            BASIC | {"rows/looked-up", "rows/padding", "rows/frozen", "experts/mixture", "quantised/int8"},
            quick.get((mode, trainer.get("precision", "32-true"), memory), frozenset({"stack"})),
            refused=early if mode == "backward" else ON_DEVICE,
        )  # fmt: skip


def staying_refused(share: float, mode: str) -> dict[str, str]:
    """What is refused with steps on the device. The sparse embedding is the first layer, so it stays, and is plain."""
    refused = EARLY | ON_DEVICE if mode == "backward" else ON_DEVICE
    return {name: said for name, said in refused.items() if name != "sparse-embedding"}


def staying() -> Iterator[Variant]:
    """Layers that stay on the device with their optimizer state: some, half, or all that may."""
    clipped: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": 2, "gradient_clip_val": 0.05}
    whole: dict[str, Any] = {"optimizer_on": "gpu"}
    mixed: dict[str, Any] = {"optimizer_overlap": "off"}  # steps on the CPU are as users made them, too
    memories: dict[str, Memory] = {"plain": "poisoned", "simulated": "simulated"}
    for share, place, mode, trainer, memory in (
        (0.5, whole, "off", {**clipped, "precision": "bf16-mixed"}, "simulated"),
        (0.5, whole, "forward", clipped, "simulated"),
        (0.3, whole, "forward", {"max_epochs": 2, "precision": "16-mixed"}, "simulated"),
        (0.5, whole, "backward", {"max_epochs": 2, "precision": "bf16-mixed"}, "simulated"),
        (1.0, whole, "forward", {"max_epochs": 2, "precision": "bf16-mixed"}, "simulated"),
        (1.0, whole, "off", {**clipped, "precision": "bf16-true"}, "plain"),
        (0.5, mixed, "off", {**clipped, "precision": "bf16-mixed"}, "simulated"),
        (0.5, mixed, "off", {"max_epochs": 2}, "simulated"),
        (0.3, mixed, "off", {"max_epochs": 2, "precision": "16-mixed"}, "plain"),
        (1.0, mixed, "off", {**clipped, "gradient_clip_algorithm": "value"}, "simulated"),
    ):
        where = "all" if place is whole else "these"
        precision = trainer.get("precision", "32-true")
        yield Variant(
            f"{share:.0%} stay, {where} stepped on the device, {mode}, {precision}"
            f"{', clipped' if 'gradient_clip_val' in trainer else ''}, {memory}",
            "what never leaves the device is the whole step's to the bit, and comes to the host when somebody asks",
            {"k": 1, "gpu_layers": share, **place, "optimizer_overlap": mode}, trainer, memories[memory], "losses",
            BASIC | {"rows/looked-up", "rows/padding", "rows/frozen", "experts/mixture", "quantised/int8"},
            frozenset({"stack", "frozen"}) if precision == "bf16-mixed" else frozenset({"stack"}),
            refused=staying_refused(share, mode) if place is whole else {"lbfgs": "LBFGS"} if share < 1 else {},
        )  # fmt: skip


def elsewhere() -> Iterator[Variant]:
    """Backward in a thread of its own, as on an accelerator."""
    few = frozenset({"llama-dropout", "own-function", "stack"})
    more = {"llama-checkpoint-reentrant", "reused", "gradient-penalty", "resnet50", "experts/mixture", "rows/looked-up"}
    quick = {
        ("keep", "off"): few | {"gan"}, ("recompute", "forward"): few, ("offload", "backward"): few,
        ("offload", "off"): frozenset({"own-function"}),
    }  # fmt: skip
    precisions = cycle(("32-true", "bf16-mixed"))
    for (activations, mode), precision in zip(
        product(("keep", "recompute", "offload"), ("off", "forward", "backward")), precisions, strict=False
    ):
        background = {} if mode == "off" else {"optimizer_overlap": mode}
        yield Variant(
            f"backward elsewhere, {activations}, {mode}, {precision}",
            "what Python keeps by thread, and forward leaves behind, is not there in backward",
            {"k": 1, "activations": activations, **background}, {"precision": precision, "max_epochs": 2},
            "plain" if background else "poisoned", "losses" if background else "gradients",
            # One variant has every case.
            EVERY if (activations, mode) == ("keep", "off") else few | more | (NONE if background else {"gan"}),
            quick.get((activations, mode), frozenset({"stack"})),
            elsewhere=True,
        )  # fmt: skip


def compiled() -> Iterator[Variant]:
    """Compiled blocks, whose graphs get casts."""
    # What torch 2.14 cannot compile: the first two on the CPU in bfloat16, the others with a second backward.
    able = EVERY - {"vit", "lstm", "autograd-grad", "gradient-penalty", "rows/asked-for", "saved-objects"}
    # Not on the simulated device: torch compiles nothing under a dispatch mode, with which it watches memory.
    for name, strategy in (
        ("", {"k": 1}),
        (", recomputed", {"k": 1, "activations": "recompute"}),
        (", offloaded", {"k": 1, "activations": "offload"}),
    ):
        yield Variant(
            f"compiled, bf16-mixed{name}", "casts that are inputs of graphs, and weights that graphs need in float32",
            strategy, {"precision": "bf16-mixed", "accumulate_grad_batches": 2}, memory="poisoned",
            cases=able if not name else frozenset({"stack", "llama-dropout", "frozen", "reused"}),
            quick=frozenset({"stack"}), compiled=True,
        )  # fmt: skip


def divided() -> Iterator[Variant]:
    """Blocks that are divided into their parts."""
    for precision, activations in product(("32-true", "bf16-mixed", "bf16-true"), ("keep", "recompute", "offload")):
        yield Variant(
            f"divided, {precision}, {activations}",
            "parts of one block are layers of their own, and what is computed between them belongs to none",
            {"k": 1, "k_prime": 1, "activations": activations},
            {"precision": precision, "accumulate_grad_batches": 2, "max_epochs": 2}, "poisoned", cases=UNEVEN,
            quick=UNEVEN if (precision, activations) == ("bf16-mixed", "keep") else NONE,
        )  # fmt: skip
    yield Variant(
        "divided, simulated", "each wait for the copy of a part: what comes too early is a race",
        {"k": 1, "k_prime": 1, "activations": "offload"}, {"precision": "bf16-mixed", "max_epochs": 2}, "simulated",
        "losses", UNEVEN, NONE,
    )  # fmt: skip


VARIANTS: dict[str, Variant] = {
    variant.name: variant
    for family in (
        windows(), precisions(), accumulation(), asynchronous(), activations(), automatic(), updates(), early_updates(),
        updates_by_default(), updates_in_every_precision(), one_pass(), below_memory(), on_device(),
        staying(), elsewhere(), compiled(), divided(),
    )
    for variant in family
}  # fmt: skip


# ---------------------------------------------------------------------- for programs

CLIPPED: dict[str, dict[str, Any]] = {
    "clipped by norm": {"gradient_clip_val": 0.01},
    "clipped by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed, clipped": {"precision": "bf16-mixed", "gradient_clip_val": 0.01},
    "bf16-mixed, clipped, accumulated": {
        "precision": "bf16-mixed", "gradient_clip_val": 0.01, "accumulate_grad_batches": 2,
    },
    "accumulated, simulated": {"accumulate_grad_batches": 2},
    "simulated": {},
}  # fmt: skip
"""Ways to a step."""


def placed() -> Iterator[Variant]:
    """Something on a disk, in each mode of updates and each way to a step."""
    places: tuple[Below, ...] = ("state", "weights", "gradients", "everything")
    for place, mode, (way, options) in product(places, ("off", "forward", "backward"), {"": {}, **CLIPPED}.items()):
        if mode == "backward" and "gradient_clip_val" in options:
            continue  # clipping needs all gradients at once, and is refused
        yield Variant(
            f"{place} on a disk, {mode}{', ' if way else ''}{way}", f"{place} that is read when it is needed",
            {"k": 1, "optimizer_overlap": mode}, {"max_epochs": 1 if place == "state" else 2, **options},
            "simulated" if "simulated" in way else "plain", "losses", NONE, NONE, below=place,
        )  # fmt: skip


def updated() -> Iterator[Variant]:
    """Ways to a step, in each mode of updates and each place where layers are stepped."""
    ways: dict[str, dict[str, Any]] = {
        "": {}, ", bf16-mixed": {"precision": "bf16-mixed"}, ", bf16-true": {"precision": "bf16-true"},
        ", 16-mixed": {"precision": "16-mixed"}, ", accumulated": {"accumulate_grad_batches": 2},
        ", clipped": {"gradient_clip_val": 0.01}, ", 16-mixed, clipped": {"precision": "16-mixed", "gradient_clip_val": 0.01},
        ", clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        ", accumulated, bf16-mixed": {"accumulate_grad_batches": 2, "precision": "bf16-mixed"},
    }  # fmt: skip
    places: dict[str, dict[str, Any]] = {
        "": {"k": 1}, ", k=all": {"k": ALL}, ", on the GPU": {"k": 1, "optimizer_on": "gpu"},
        ", on the GPU, half stays": {"k": 1, "optimizer_on": "gpu", "gpu_layers": 0.5},
        ", half stays": {"k": 1, "gpu_layers": 0.5}, ", 2 stay": {"k": 1, "gpu_layers": 2},
    }  # fmt: skip
    memories: tuple[Memory, ...] = ("plain", "simulated")
    for mode, (place, strategy), (way, trainer), memory in product(
        ("off", "forward", "backward", "by default"), places.items(), ways.items(), memories
    ):
        overlap = "auto" if mode == "by default" else mode
        yield Variant(
            f"{mode}{place}{way}{', simulated' if memory == 'simulated' else ''}",
            "an update that runs while others compute, as user code finds it",
            {**strategy, "optimizer_overlap": overlap}, trainer, memory, "losses", NONE, NONE,
        )  # fmt: skip
    for place, memory in product(("", ", on the GPU"), memories):
        yield Variant(
            f"backward{place}, no callback{', simulated' if memory == 'simulated' else ''}",
            "nothing could look at gradients after a step, so that they are freed",
            {**places[place], "optimizer_overlap": "backward"}, {}, memory, "nothing", NONE, NONE,
        )  # fmt: skip


def treated() -> Iterator[Variant]:
    """What becomes of activations."""
    for mode in ("keep", "recompute", "offload"):
        covers = "a layer's forward runs a second time in backward, or what it saved comes back"
        yield Variant(f"{mode}, k=1", covers, {"k": 1, "activations": mode}, cases=NONE, quick=NONE)
        yield Variant(mode, f"{covers}, in the default window", {"activations": mode}, cases=NONE, quick=NONE)
        yield Variant(
            f"{mode}, k=1, bf16-mixed", f"{covers}, with casts", {"k": 1, "activations": mode},
            {"precision": "bf16-mixed"}, cases=NONE, quick=NONE,
        )  # fmt: skip
        yield Variant(
            f"{mode}, k=1, simulated", f"{covers}, on an asynchronous device", {"k": 1, "activations": mode}, {},
            "simulated", cases=NONE, quick=NONE,
        )  # fmt: skip


def in_part() -> Iterator[Variant]:
    """Activations of some layers alone, or as memory allows."""
    for name, strategy, seen in (
        ("recompute, k=2", {"k": 2, "activations": "recompute"}, "gradients"),
        (
            "net.blocks.0 recomputed, k=1",
            {"k": 1, "activations": {"net.blocks.0": "recompute", "**": "keep"}},
            "gradients",
        ),
        (
            "recompute, k=1, net.blocks.3 stays",
            {"k": 1, "activations": "recompute", "keep_on_gpu": ["net.blocks.3"]},
            "gradients",
        ),
        ("auto in 150 kB", {"activations": "auto", "gpu_memory": 150_000}, "gradients"),
        ("auto, k=1", {"k": 1, "k_prime": 1}, "gradients"),
        (
            "forward, recompute",
            {"k": 1, "activations": "recompute", "optimizer_overlap": "forward"},
            "losses",
        ),
    ):
        yield Variant(
            name, "layers that are treated in another way than others", strategy, {}, "plain", seen, NONE, NONE
        )
    memories: tuple[Memory, ...] = ("plain", "simulated")
    for memory in memories:
        yield Variant(
            f"recompute, k=1, {memory}, losses alone", "where a backward may fail, its gradients are not noted",
            {"k": 1, "activations": "recompute"}, {}, memory, "losses", NONE, NONE,
        )  # fmt: skip


def resident() -> Iterator[Variant]:
    """Everything stays on the GPU."""
    for mode in ("keep", "recompute"):
        yield Variant(
            f"nothing is streamed{', recompute' if mode != 'keep' else ''}", "the engine watches, and moves nothing",
            {"keep_on_gpu": ["**"], "activations": mode}, cases=NONE, quick=NONE,
        )  # fmt: skip


def in_files() -> Iterator[Variant]:
    """Frozen weights that are read in place from the user's files."""
    memories: tuple[Memory, ...] = ("plain", "simulated")
    ways: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
        ("", {}, {}), (", k=2", {"k": 2, "k_prime": 2}, {}), (", k'=9", {"k_prime": 9}, {}),
        *((f", {mode}", {"activations": mode}, {}) for mode in ("recompute", "offload")),
        *((f", {mode}", {"optimizer_overlap": mode}, {}) for mode in ("forward", "backward")),
        (", clipped", {"optimizer_overlap": "forward"}, {"gradient_clip_val": 0.01}),
        (", accumulated", {}, {"accumulate_grad_batches": 2}),
        *((f", {precision}", {}, {"precision": precision}) for precision in ("bf16-mixed", "bf16-true")),
    )  # fmt: skip
    for name, strategy, trainer in ways:
        for memory in memories:
            yield Variant(
                f"frozen weights in their files{name}{', simulated' if memory == 'simulated' else ''}",
                "what was never copied to host memory has the file's values", {"k": 1, **strategy}, trainer, memory,
                "losses", NONE, NONE, below="frozen",
            )  # fmt: skip


def as_users() -> Iterator[Variant]:
    """Nothing is noted, so that copies are kept, and the next batch's layers are fetched early."""
    memories: tuple[Memory, ...] = ("plain", "poisoned", "simulated")
    for memory, precision, (k, k_prime) in product(memories, ("32-true", "bf16-mixed"), ((1, 1), (2, 2), (ALL, 1))):
        more = ("", ", bf16-mixed")[precision != "32-true"] + ("" if memory == "plain" else f", {memory}")
        yield Variant(
            f"users, k={'all' if k == ALL else k}{more}", "what users have: no hook of the tests' on gradients",
            {"k": k, "k_prime": k_prime}, {"precision": precision}, memory, "nothing", NONE, NONE,
        )  # fmt: skip


def in_16_bits() -> Iterator[Variant]:
    """Modules in bfloat16."""
    options: dict[str, tuple[dict[str, Any], Memory]] = {
        "users, k=1": ({"k": 1}, "plain"),
        "users, k=1, bf16-true, simulated": ({"k": 1}, "simulated"),
        "users, k=all": ({"k": ALL}, "plain"),
        "offload, k=1": ({"k": 1, "activations": "offload"}, "plain"),
        "recompute, k=1": ({"k": 1, "activations": "recompute"}, "plain"),
        "stays: net.1": ({"k": 1, "keep_on_gpu": ["net.1"]}, "plain"),
    }
    for name, (strategy, memory) in options.items():
        yield Variant(
            name if "bf16-true" in name else f"{name}, bf16-true", "weights, gradients and state in bfloat16", strategy,
            {"precision": "bf16-true"}, memory, "nothing", NONE, NONE,
        )  # fmt: skip


def where_some_stay() -> Iterator[Variant]:
    """Layers that are copied once for each step."""
    options: dict[str, tuple[int, dict[str, Any], dict[str, Any], Memory]] = {
        "net": (1, {}, {}, "plain"),
        "net.1": (2, {}, {}, "plain"),
        "**.second": (2, {}, {}, "plain"),
        "target": (2, {}, {}, "plain"),
        "net.1, simulated": (2, {}, {}, "simulated"),
        "net.1.first, bf16-mixed": (1, {}, {"precision": "bf16-mixed"}, "plain"),
        "**.second, offload, simulated": (1, {"activations": "offload"}, {}, "simulated"),
        "net, simulated": (1, {}, {}, "simulated"),
    }
    for name, (k, strategy, trainer, memory) in options.items():
        yield Variant(
            f"stays: {name}", "what is copied once for a step is written where it was copied from",
            {"k": k, "k_prime": 1, "keep_on_gpu": [name.split(",")[0]], **strategy}, trainer, memory, "gradients", NONE,
            NONE,
        )  # fmt: skip


def compiled_in_part() -> Iterator[Variant]:
    """Compiled blocks with updates in the background, or on the simulated device, without the mode that watches operators."""
    for name, strategy, trainer in (
        ("k=1", {}, {}),
        ("validated", {}, {"max_epochs": 2, "gradient_clip_val": 0.05}),
        ("forward", {"optimizer_overlap": "forward"}, {"max_epochs": 2}),
        ("backward", {"optimizer_overlap": "backward"}, {"max_epochs": 2}),
        ("recompute", {"activations": "recompute"}, {}),
        ("offload", {"activations": "offload"}, {}),
        ("some stay", {"optimizer_on": "gpu", "gpu_layers": 2}, {}),
        ("some stay, recompute", {"optimizer_on": "gpu", "gpu_layers": 2, "activations": "recompute"}, {}),
    ):  # fmt: skip
        yield Variant(
            f"compiled, {name}", "graphs that have casts as inputs, or need weights in float32", {"k": 1, **strategy},
            {"precision": "bf16-mixed", **trainer}, "plain", "losses", NONE, NONE, compiled=True,
        )  # fmt: skip


OF_PROGRAMS: dict[str, Variant] = {
    variant.name: variant
    for family in (
        placed(), updated(), treated(), in_part(), resident(), in_files(), as_users(), in_16_bits(), where_some_stay(),
        compiled_in_part(),
    )
    for variant in family
}  # fmt: skip
"""Variants that programs name, and that no case is trained in."""


def _options(each: Variant) -> str:
    """What a variant does, whatever it is called."""
    options = [
        sorted(given.items()) for given in ({"k_prime": 1, **each.strategy}, {"precision": "32-true", **each.trainer})
    ]
    return repr((options, each.memory, each.seen, each.below, each.elsewhere, each.compiled))


_named: dict[str, str] = {}
for _each in (*VARIANTS.values(), *OF_PROGRAMS.values()):
    _other = _named.setdefault(_options(_each), _each.name)
    assert _other == _each.name, f"{_each.name!r} has the options of {_other!r}: name that one"
    assert _options(VARIANTS.get(_each.name, _each)) == _options(_each), f"two variants are called {_each.name!r}"

SLOW = frozenset({"resnet50", "t5", "t5-checkpoint"})
"""Cases that take seconds, and have no kind of layer that smaller cases lack."""


LIKE_OTHERS = frozenset(name for name in CASES if name.startswith("stacked/")) - {"stacked/qwen3", "stacked/gpt-oss"}
"""Cases whose kind of layer the second tier has in every variant with two others."""


TENTHS = frozenset(
    {"llama-dropout", "llama-checkpoint-reentrant", "gpt2-tied", "bert", "vit", "teacher", "gan", "own-function",
     "experts/mixture", "experts/switch", "quantised/int8"}
)  # fmt: skip
"""Cases that take tenths of a second. The first tier has them in one variant."""


def pairs() -> Iterator[tuple[str, str, int]]:
    """Case, variant, and the tier that they are in.

    The first tier has the quick cases of variants that need neither a simulated device, nor another thread, a compiler or a
    disk. The second has the quick ones that are slower, each case with every 47th variant (a number that no family of variants
    has as a period), and each variant with one case at least. The third has all others.
    """
    for number, variant in enumerate(VARIANTS.values()):
        slow = variant.memory in ("simulated", "crowded") or variant.elsewhere or variant.compiled or variant.below
        small = [name for name in CASES if name in variant.cases and name not in SLOW and name not in LIKE_OTHERS]
        second = {name for index, name in enumerate(CASES) if name in small and (number + index) % 47 == 0}
        quick = {name for name in CASES if name in variant.cases & variant.quick}
        if slow:
            second |= {name for index, name in enumerate(sorted(quick)) if (number + index) % 3 == 0}
            quick = set()
        elif number:
            second |= quick & TENTHS
            quick -= TENTHS
        if not second and not quick:
            second = set(small[:1])
        for name in CASES:
            if name in variant.cases:
                yield name, variant.name, 1 if name in quick else 2 if name in second else 3


if __name__ == "__main__":  # python -m tests.equality.variants WORD …
    for _each in (*VARIANTS.values(), *OF_PROGRAMS.values()):
        if all(word in _each.name for word in sys.argv[1:]):
            print(
                f"{_each.name!r}: {_each.strategy} {_each.trainer} {_each.memory}, notes {_each.seen}: {_each.covers}"
            )
