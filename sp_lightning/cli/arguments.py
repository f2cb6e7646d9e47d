"""The arguments of ``plan``, as a :class:`Question`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

import torch

from sp_lightning.plan.activation_policy import Mode
from sp_lightning.plan.units import parse_bytes

_DESCRIPTION = (
    "``python -m sp_lightning plan MODEL``: does it fit, with which k, and how fast? And Lightning's CLI, the name "
    "registered."
)
LIGHTNING = ("fit", "validate", "test", "predict")
"""The commands of Lightning's CLI."""
WANTED = (
    "a factory (package.module:Factory), a transformers config (a folder with config.json, or such a file), or the name of "
    "a torchvision model (vit_h_14)"
)
"""The ways to name a model on the command line."""
PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
"""By Lightning's name: the dtype of the parameters, and the dtype of autocast, if there is one."""
MODES: tuple[Mode, ...] = get_args(Mode)


_GENERATE = (
    "predict N tokens for each of --batch sequences (those times beams) after prompts of --tokens: times are of the last "
    "token, memory has the cache of keys and values"
)
_SHAPE = "shape of what a factory's module takes"
_ACCUMULATE = "as Trainer(accumulate_grad_batches=N): times are of one of these batches, on average (%(default)s)"
_CLIP = "as Trainer(gradient_clip_algorithm=…) (no clipping)"
_LOSS_TOKENS = "the loss is computed from so many tokens' logits at a time, by sp_lightning.chunk_loss(model, tokens=N)"
_STEP_SECONDS = (
    "what the optimizer's step takes on the host, if it is none of torch's fused ones (8-bit states, Shampoo): measure a "
    "smaller one, it grows with the parameters"
)
_PCIE = "between host and each device, each way, GB/s (%(default)s)"
_TRANSFER = "how the devices of a node upload layers, as SuperpipelineStrategy(transfer=…) (whole)"
_NETWORK = "from each node to the others, each way, in bytes or, as 200Gb/s, in bits (25GB/s)"
_DISK = "of a drive below --host-memory, for example 7GB/s (7 is the same), as SuperpipelineStrategy(disk=…) (no disk)"
_MEASURE_HOST = (
    "measure what Python takes of this machine's processor for each visit of a layer, in some seconds (assumed)"
)


def _size(text: str) -> int:
    try:
        return parse_bytes("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _bytes_rate(text: str) -> float:
    """Bytes per second, from ``7GB/s``, from ``56Gb/s`` or ``56Gbit/s``, as networks are sold, or from a number of GB/s."""
    bits = re.fullmatch(r"([\d.]+) *([kMGT]?)(b|bit)(/s|ps)", text)
    if bits is not None:
        return _number(bits[1]) * 1000 ** " kMGT".index(bits[2] or " ") / 8
    try:
        return float(parse_bytes("it", text.removesuffix("/s")))
    except ValueError:
        return _number(text) * 1e9


def _gigabytes(text: str) -> float:
    """GB/s, from what :func:`_bytes_rate` reads."""
    return _bytes_rate(text) / 1e9


def _number(text: str) -> float:
    try:
        return _rate(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}; give GB/s, such as 25, 25GB/s or 200Gb/s") from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = -1.0
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return rate


def _option(meaning: str, **how: Any) -> dict[str, Any]:
    """An argument, as :meth:`argparse.ArgumentParser.add_argument` takes it."""
    return {"help": meaning, **how}


class Question(argparse.Namespace):
    """What ``plan`` is asked: each attribute is an argument of the command line. Memory is in bytes."""

    # The model, its batch, and what is done with it.
    model: Annotated[str, _option(WANTED)]
    predict: Annotated[bool, _option("no training", action="store_true")]
    generate: Annotated[int | None, _option(_GENERATE, type=_count, metavar="N")]
    precision: Annotated[str, _option("(%(default)s)", choices=PRECISIONS, default="bf16-mixed")]
    batch: Annotated[int, _option("sequences or images at once on a device (%(default)s)", type=_count, default=1)]
    tokens: Annotated[int, _option("per sequence (%(default)s)", type=_count, default=2048)]
    image: Annotated[int | None, _option("pixels on each side (what the model is made for)", type=_count)]
    input: Annotated[list[int] | None, _option(_SHAPE, type=_count, nargs="+", metavar="SIZE")]
    checkpointing: Annotated[bool, _option("gradient checkpointing, of transformers' models", action="store_true")]
    accumulate: Annotated[int, _option(_ACCUMULATE, type=_count, metavar="N", default=1)]
    clip: Annotated[Literal["norm", "value"] | None, _option(_CLIP, choices=("norm", "value"))]
    loss_tokens: Annotated[int | None, _option(_LOSS_TOKENS, type=_count, metavar="N")]
    keep_logits: Annotated[bool, _option("with --loss-tokens: chunk_loss(…, keep_logits=True)", action="store_true")]
    # The options of the strategy.
    activations: Annotated[
        Mode | Literal["auto"], _option("of all layers (%(default)s)", choices=(*MODES, "auto"), default="keep")
    ]
    overlap: Annotated[
        Literal["off", "forward", "backward"],
        _option("optimizer_overlap (%(default)s)", choices=("off", "forward", "backward"), default="forward"),
    ]
    optimizer: Annotated[
        Literal["adamw", "adamw8bit", "sgd", "muon"],
        _option("(%(default)s)", choices=("adamw", "adamw8bit", "sgd", "muon"), default="adamw"),
    ]
    step_seconds: Annotated[float | None, _option(_STEP_SECONDS, type=_rate, metavar="S")]
    layers: Annotated[list[str] | None, _option("as SuperpipelineStrategy(layers=…)", nargs="+")]
    resident: Annotated[list[str] | None, _option("as SuperpipelineStrategy(resident=…)", nargs="+")]
    k: Annotated[list[int] | None, _option("(a range)", type=_count, nargs="+")]
    k_prime: Annotated[list[int] | None, _option("(1 2)", type=_count, nargs="+")]
    # Memory and speed of the machine.
    devices: Annotated[int, _option("of each node, as Trainer(devices=…) (%(default)s)", type=_count, default=1)]
    nodes: Annotated[int, _option("as Trainer(num_nodes=…) (%(default)s)", type=_count, default=1)]
    gpu_memory: Annotated[int | None, _option("of each device, for example 24GiB (no limit)", type=_size)]
    host_memory: Annotated[int | None, _option("of the node, for example 512GiB (no limit)", type=_size)]
    tflops: Annotated[float, _option("of the device, TFLOP/s (%(default)s)", type=_rate, default=100)]
    device_bandwidth: Annotated[float, _option("of its memory, GB/s (%(default)s)", type=_gigabytes, default=1000)]
    pcie: Annotated[float, _option(_PCIE, type=_gigabytes, default=25)]
    links: Annotated[float, _option("from each device to the others, and back, GB/s (200)", type=_gigabytes)]
    transfer: Annotated[Literal["whole", "sliced"], _option(_TRANSFER, choices=("whole", "sliced"))]
    network: Annotated[float, _option(_NETWORK, type=_bytes_rate, metavar="SPEED")]
    host_tflops: Annotated[float, _option("of the host, for Muon (%(default)s)", type=_rate, default=1)]
    disk: Annotated[float | None, _option(_DISK, type=_bytes_rate, metavar="SPEED")]
    dram: Annotated[float, _option("of host memory, GB/s (%(default)s)", type=_gigabytes, default=60)]
    measure_host: Annotated[bool, _option(_MEASURE_HOST, action="store_true")]
    json: Annotated[bool, _option("for programs", action="store_true")]
    plot: Annotated[Path | None, _option("seconds against memory; needs matplotlib", type=Path, metavar="FILE.png")]


_OF_SEVERAL: dict[str, tuple[str, Any]] = {
    "links": ("devices", 200.0),
    "transfer": ("devices", "whole"),
    "network": ("nodes", 25e9),
}
"""Arguments that say something about several devices of a node, or about several nodes, and what holds without them."""


def complete(question: Question) -> None:
    """Fills in what was not asked.

    Raises:
        ValueError: an argument says nothing about this question.
    """
    for name, (several, default) in _OF_SEVERAL.items():
        given = getattr(question, name)
        if given is None:
            setattr(question, name, default)
        elif given != default and getattr(question, several) == 1:
            raise ValueError(
                f"--{name} counts with several {several} alone. Pass --{several} 2 or more too, or leave it out."
            )


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line. Lightning's own commands are in it for ``--help`` alone."""
    parser = argparse.ArgumentParser(prog="python -m sp_lightning", description=_DESCRIPTION)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in LIGHTNING:
        commands.add_parser(
            name, help=f"Lightning's CLI with this strategy registered: {name} --config FILE", add_help=False
        )
    commands.add_parser(
        "convert",
        help="a checkpoint that is a folder becomes a file, or the other way round: convert SOURCE TARGET",
        add_help=False,
    )
    plan = commands.add_parser(
        "plan", help="does a model fit, with which k, and how fast? (exit status 1: it does not fit)"
    )
    for name, annotated in get_type_hints(Question, include_extras=True).items():
        _, how = get_args(annotated)
        plan.add_argument(name if name == "model" else f"--{name.replace('_', '-')}", **how)
    return parser
