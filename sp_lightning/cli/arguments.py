"""The arguments of ``plan``, as a :class:`Question`."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any, Literal, get_args

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


class Question(argparse.Namespace):
    """What ``plan`` is asked: one attribute for each argument of the command line. Memory is in bytes."""

    model: str
    predict: bool
    generate: int | None
    precision: str
    batch: int
    tokens: int
    image: int | None
    input: list[int] | None
    checkpointing: bool
    accumulate: int
    clip: Literal["norm", "value"] | None
    loss_tokens: int | None
    keep_logits: bool
    activations: Mode | Literal["auto"]
    overlap: Literal["off", "forward", "backward"]
    optimizer: Literal["adamw", "adamw8bit", "sgd", "muon"]
    step_seconds: float | None
    host_tflops: float
    layers: list[str] | None
    resident: list[str] | None
    k: list[int] | None
    k_prime: list[int] | None
    devices: int
    gpu_memory: int | None
    host_memory: int | None
    tflops: float
    device_bandwidth: float
    pcie: float
    links: float
    transfer: Literal["whole", "sliced"]
    nodes: int
    network: float
    dram: float
    disk: float | None
    measure_host: bool
    json: bool
    plot: Path | None


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
    _add_model(plan)
    _add_window(plan)
    _add_machine(plan)
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="seconds against memory; needs matplotlib")
    return parser


def _add_model(plan: argparse.ArgumentParser) -> None:
    """The model, its batch, and what is done with it."""
    plan.add_argument("model", help=WANTED)
    plan.add_argument("--predict", action="store_true", help="no training")
    plan.add_argument(
        "--generate",
        type=_count,
        metavar="N",
        help="predict N tokens for each of --batch sequences (those times beams) after prompts of --tokens: times are of "
        "the last token, memory has the cache of keys and values",
    )
    plan.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed", help="(%(default)s)")
    plan.add_argument("--batch", type=_count, default=1, help="sequences or images at once on a device (%(default)s)")
    plan.add_argument("--tokens", type=_count, default=2048, help="per sequence (%(default)s)")
    plan.add_argument("--image", type=_count, help="pixels on each side (what the model is made for)")
    plan.add_argument("--input", type=_count, nargs="+", metavar="SIZE", help="shape of what a factory's module takes")
    plan.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, of transformers' models")
    plan.add_argument(
        "--accumulate",
        type=_count,
        metavar="N",
        default=1,
        help="as Trainer(accumulate_grad_batches=N): times are of one of these batches, on average (%(default)s)",
    )
    plan.add_argument("--clip", choices=("norm", "value"), help="as Trainer(gradient_clip_algorithm=…) (no clipping)")
    plan.add_argument(
        "--loss-tokens",
        type=_count,
        metavar="N",
        help="the loss is computed from so many tokens' logits at a time, by sp_lightning.chunk_loss(model, tokens=N)",
    )
    plan.add_argument("--keep-logits", action="store_true", help="with --loss-tokens: chunk_loss(…, keep_logits=True)")


def _add_window(plan: argparse.ArgumentParser) -> None:
    """The options of the strategy."""
    plan.add_argument("--activations", choices=(*MODES, "auto"), default="keep", help="of all layers (%(default)s)")
    plan.add_argument(
        "--overlap", choices=("off", "forward", "backward"), default="forward", help="optimizer_overlap (%(default)s)"
    )
    plan.add_argument(
        "--optimizer", choices=("adamw", "adamw8bit", "sgd", "muon"), default="adamw", help="(%(default)s)"
    )
    plan.add_argument(
        "--step-seconds",
        type=_rate,
        metavar="S",
        help="what the optimizer's step takes on the host, if it is none of torch's fused ones (8-bit states, Shampoo): "
        "measure a smaller one, it grows with the parameters",
    )
    plan.add_argument("--layers", nargs="+", help="as SuperpipelineStrategy(layers=…)")
    plan.add_argument("--resident", nargs="+", help="as SuperpipelineStrategy(resident=…)")
    plan.add_argument("--k", type=_count, nargs="+", help="(a range)")
    plan.add_argument("--k-prime", type=_count, nargs="+", help="(1 2)")


def _add_machine(plan: argparse.ArgumentParser) -> None:
    """Memory and speed of the machine."""
    plan.add_argument("--devices", type=_count, default=1, help="of each node, as Trainer(devices=…) (%(default)s)")
    plan.add_argument("--nodes", type=_count, default=1, help="as Trainer(num_nodes=…) (%(default)s)")
    plan.add_argument("--gpu-memory", type=_size, help="of each device, for example 24GiB (no limit)")
    plan.add_argument("--host-memory", type=_size, help="of the node, for example 512GiB (no limit)")
    plan.add_argument("--tflops", type=_rate, default=100, help="of the device, TFLOP/s (%(default)s)")
    plan.add_argument("--device-bandwidth", type=_gigabytes, default=1000, help="of its memory, GB/s (%(default)s)")
    plan.add_argument(
        "--pcie", type=_gigabytes, default=25, help="between host and each device, each way, GB/s (%(default)s)"
    )
    plan.add_argument("--links", type=_gigabytes, help="from each device to the others, and back, GB/s (200)")
    plan.add_argument(
        "--transfer",
        choices=("whole", "sliced"),
        help="how the devices of a node upload layers, as SuperpipelineStrategy(transfer=…) (whole)",
    )
    plan.add_argument(
        "--network",
        type=_bytes_rate,
        metavar="SPEED",
        help="from each node to the others, each way, in bytes or, as 200Gb/s, in bits (25GB/s)",
    )
    plan.add_argument("--host-tflops", type=_rate, default=1, help="of the host, for Muon (%(default)s)")
    plan.add_argument(
        "--disk",
        type=_bytes_rate,
        metavar="SPEED",
        help="of a drive below --host-memory, for example 7GB/s (7 is the same), as SuperpipelineStrategy(disk=…) (no disk)",
    )
    plan.add_argument("--dram", type=_gigabytes, default=60, help="of host memory, GB/s (%(default)s)")
    plan.add_argument(
        "--measure-host",
        action="store_true",
        help="measure what Python takes of this machine's processor for each visit of a layer, in some seconds (assumed)",
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
