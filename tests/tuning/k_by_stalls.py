"""The k that ``k="auto"`` chooses by its stalls, beside the best k, for twelve models on links of three speeds: on clocks.

The rule that runs use (:class:`~sp_lightning.capabilities.tuning.choices.Doublings`) gets seconds and upload stalls from the
simulation of ``plan``: the engine's own schedule on a device that only counts time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from sp_lightning.capabilities.tuning.choices import Doublings
from sp_lightning.core.plan.plan import Plan
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.estimate import Estimate, estimate_model

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
CHECKPOINTS, PREDICT = "--gradient-checkpointing", "--predict --precision bf16-true"
MODELS = {
    "Llama 3.2 3B, LoRA, 512 tokens": f"{SHAPES}/llama-3.2-3b.json --lora 16 --tokens 512",
    "Llama 3.2 3B, bf16-mixed, 2,048 tokens": f"{SHAPES}/llama-3.2-3b.json --tokens 2048 {CHECKPOINTS}",
    "Llama 3 8B, LoRA, 512 tokens": f"{SHAPES}/llama-3-8b.json --lora 16 --tokens 512",
    "Llama 3 8B, bf16-true, 2,048 tokens": f"{SHAPES}/llama-3-8b.json --precision bf16-true --tokens 2048 {CHECKPOINTS}",
    "Llama 3 8B, predict, 8 × 128 tokens": f"{SHAPES}/llama-3-8b.json {PREDICT} --batch-size 8 --tokens 128",
    "Qwen3 32B, LoRA, 1,024 tokens": f"{SHAPES}/qwen3-32b.json --lora 16 --tokens 1024 {CHECKPOINTS}",
    "Llama 3 70B, LoRA, 2,048 tokens": f"{SHAPES}/llama-3-70b.json --lora 16 --tokens 2048 {CHECKPOINTS}",
    "gpt-oss 20B, LoRA, 1,024 tokens": f"{SHAPES}/gpt-oss-20b.json --lora 16 --tokens 1024 {CHECKPOINTS}",
    "LLaVA 7B, predict, 700 tokens": f"{SHAPES}/llava-1.5-7b.json {PREDICT} --tokens 700",
    "ViT-giant, bf16-mixed, 32 images": f"{SHAPES}/vit-giant.json --batch-size 32",
    "ViT-H/14 of torchvision, bf16-mixed, 8 images": "vit_h_14 --batch-size 8",
    "ResNet-152, bf16-mixed, 32 images": "resnet152 --batch-size 32",
}  # fmt: skip
LINKS = (12, 25, 50)
"""GB/s of uploads, and of downloads: PCIe 3, 4 and 5."""
MACHINE = "--tflops 150 --device-bandwidth 1000GB/s --host-bandwidth 60GB/s --gpu-memory 22GiB --activations keep"
"""A card of 24 GB."""
MOST = 1.02
"""The aim: seconds with the chosen k ÷ seconds with the best k that needs at most twice the memory."""


class Batch(NamedTuple):
    """A batch with one k: its seconds, the seconds that uploads stalled, and the bytes that it needs."""

    k: int
    seconds: float
    stalled: float
    nbytes: int


class Choice(NamedTuple):
    """What is chosen for a model on a link.

    Attributes:
        first, chosen, best: the smallest window, the chosen one, and the fastest that fits and needs at most twice the memory.
        early: the one after which a doubling first removes less than a tenth of the stalls.
        batches: how many batches run until k is chosen.
    """

    first: Batch
    chosen: Batch
    best: Batch
    early: Batch
    batches: int

    @property
    def times(self) -> float:
        """Seconds by those of the best k."""
        return self.chosen.seconds / self.best.seconds


class Card:
    """What :class:`Doublings` asks of a window, for a model whose memory is estimated."""

    k = "auto"

    def __init__(self, estimate: Estimate) -> None:
        self.count = len(estimate.found.layers)
        self.batch = cache(self._batch)
        self._estimate = estimate

    def plan(self, k: int) -> Plan:
        """Returns the plan with this k."""
        return self._estimate.plan(k, 1)

    def fits(self, plan: Plan) -> bool:
        """Returns True if a plan fits the card."""
        limit = self._estimate.question.gpu_memory
        return limit is None or self._bytes(plan) <= limit

    def _bytes(self, plan: Plan) -> int:
        return plan.peak_device_bytes + self._estimate.activation_bytes

    def _batch(self, k: int) -> Batch:
        plan = self.plan(k)
        found = self._estimate.predict(plan, self._estimate.modes(plan))
        stalled = sum(each for why, each in found.stalls.items() if isinstance(why, int) or why == "residents")
        return Batch(k, found.seconds, stalled, self._bytes(plan))


def choose(estimate: Estimate) -> Choice:
    """What the rule chooses, and the best of k = 1, 2, 3, 4, 6, 8, 12, … and the largest that fits."""
    card: Any = Card(estimate)
    doublings, tried = Doublings(card), list[Batch]()
    while not doublings.over:
        tried.append(batch := card.batch(doublings.k))
        doublings.measured(batch.seconds, batch.stalled)
    chosen = card.batch(doublings.k)
    fitting = [k for k in range(1, card.count + 1) if card.fits(card.plan(k))]
    some = {k for k in fitting if k & (k - 1) == 0 or (k % 3 == 0 and (k // 3) & (k // 3 - 1) == 0)}
    batches = [card.batch(k) for k in some | {fitting[-1]}]
    best = min((each for each in batches if each.nbytes <= 2 * chosen.nbytes), key=lambda each: each.seconds)
    early = next((less for less, more in pairwise(tried) if more.stalled > 0.9 * less.stalled), tried[-1])
    return Choice(tried[0], chosen, best, early, 2 * len(tried))


def estimates(model: str) -> Iterator[Estimate]:
    """A model on each link."""
    asked: Any = make_parser().parse_args(["plan", *f"{MODELS[model]} {MACHINE}".split()], namespace=Question())
    found = estimate_model(asked)
    for link in LINKS:
        yield replace(found, question=asked.but(pcie=link * 1e9))
