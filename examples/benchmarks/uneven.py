"""What dividing uneven blocks changes: memory, uploads, and predicted seconds of a batch, before and after.

From the root of the repository::

    python -m examples.benchmarks.uneven              # the table; some minutes
    python -m examples.benchmarks.uneven resnet18     # the rows of these models
"""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from diffusers import UNet2DConditionModel

from examples.benchmarks.cards import CARDS
from sp_lightning.core.model.uneven import UnevenBlocks
from sp_lightning.tools.planner.arguments import Question, make_parser
from sp_lightning.tools.planner.estimate import Estimate, estimate_model

VISION = (
    "alexnet", "vgg16", "resnet18", "resnet50", "resnext50_32x4d", "wide_resnet50_2", "densenet121", "inception_v3", "googlenet",
    "squeezenet1_1", "mobilenet_v2", "mobilenet_v3_large", "shufflenet_v2_x1_0", "mnasnet1_0", "efficientnet_b0",
    "efficientnet_v2_s", "convnext_tiny", "swin_t", "maxvit_t", "vit_b_16",
)  # fmt: skip
"""RegNet is not among them: torchvision reads values while it makes one, which ``plan`` cannot do without memory."""
UNET, WHISPER = "examples.benchmarks.uneven:make_unet", "examples/shapes/whisper-large-v3.json"
OPTIONS = "--precision bf16-true --k 1 --k-prime 1 --optimizer-overlap backward"


def make_unet() -> UNet2DConditionModel:
    """The UNet of Stable Diffusion 1.5, with four images of 512 × 512 pixels."""
    model = UNet2DConditionModel(cross_attention_dim=768, attention_head_dim=8).to(torch.bfloat16)
    model.example_input_array = {
        "sample": torch.zeros(4, 4, 64, 64),
        "timestep": torch.zeros(4),
        "encoder_hidden_states": torch.zeros(4, 77, 768),
    }
    return model


def ask(model: str, card: str, *, predict: bool) -> Question:
    rates = CARDS[card].options.partition(" --gpu-memory")[0]
    batch = " --batch-size 32" if model in VISION else " --tokens 448" * (model == WHISPER)
    words = f"plan {model} {OPTIONS} {rates}{batch}{' --predict' if predict else ''}".split()
    question: Question = make_parser().parse_args(words, namespace=Question())
    question.given = frozenset(vars(make_parser(usual=False).parse_args(words)))
    return question


def estimates(model: str, *, predict: bool, divided: bool) -> list[Estimate]:
    """The estimates for an H100 and an RTX 4090, with and without divided blocks."""
    questions = [ask(model, card, predict=predict) for card in ("80", "24")]
    with mock.patch.object(UnevenBlocks, "next", UnevenBlocks.next if divided else lambda *_: []):
        first = estimate_model(questions[0])
        return [first, first.asked(questions[1]) or estimate_model(questions[1])]


def figures(model: str, *, predict: bool, divided: bool) -> list[Any]:
    """Layers, share of the weights (and gradients), share of everything, MiB that a batch uploads, and milliseconds."""
    made = estimates(model, predict=predict, divided=divided)
    plan = made[0].plan(1, 1)
    modes = made[0].modes(plan)
    predictions = [each.predict(plan, modes) for each in made]
    weights, gradients = plan.plain
    uploads = sum(each.nbytes for each in predictions[0].intervals if each.kind == "fetch")
    return [
        len(plan.layers),
        plan.peak_device_bytes / (weights + (0 if predict else gradients)),
        (plan.peak_device_bytes + made[0].activation_bytes) / made[0].plain_bytes,
        uploads / 2**20,
        *(1e3 * each.seconds for each in predictions),
    ]


def rows(models: Sequence[str]) -> Iterator[str]:
    """The table, line by line."""
    yield "| model | | layers | weights | total | uploads, MiB | H100, ms | RTX 4090, ms |"
    yield "|---|---|---|---|---|---|---|---|"
    for model in models:
        for predict in (False, True):
            before, after = (figures(model, predict=predict, divided=divided) for divided in (False, True))
            formats = ("{}", "{:.0%}", "{:.0%}", "{:.0f}", "{:.2f}", "{:.2f}")
            pairs = zip(formats, before, after, strict=True)
            texts = [[form.format(old), form.format(new)] for form, old, new in pairs]
            shown = [old if before == after else f"{old} → {new}" for old, new in texts]
            name = model.rpartition(":make_")[2].rpartition("/")[2].removesuffix(".json")
            yield f"| {name} | {'prediction' if predict else 'training'} | {' | '.join(shown)} |"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints the table."""
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    for row in rows((sys.argv[1:] if argv is None else argv) or [*VISION, UNET, WHISPER]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
