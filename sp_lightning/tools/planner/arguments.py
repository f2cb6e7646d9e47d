"""The arguments of the command line. The arguments of ``plan`` are a :class:`Question`.

This file does not import torch, so that ``--help`` is fast (see ``_public``).
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_type_hints

from sp_lightning.core.plan.choices import Mode, Packing, Place, Share
from sp_lightning.core.plan.choices import Overlap as AskedOverlap
from sp_lightning.core.plan.units import parse_bytes
from sp_lightning.registry import check_command, is_installed

PROGRAM = "superpipeline"
"""The name of the program in usage texts and messages. ``python -m sp_lightning`` runs the same."""
LIGHTNING = ("fit", "validate", "test", "predict")
"""The commands of Lightning's CLI."""
WANTED = (
    "a factory (package.module:Factory), a config of transformers (a folder with config.json, or such a file), a name of the "
    "Hugging Face hub whose config.json is in the cache (Qwen/Qwen2.5-0.5B), or the name of a torchvision model (vit_h_14)"
)
"""The ways to name a model on the command line, in the words of ``--help``."""
EXPECTED = "Expected package.module:Factory, a config.json, a folder with one, a hub name or a torchvision model"
"""The ways to name a model, in the words of a message."""
PRECISIONS = {
    "32-true": ("float32", None),
    "bf16-true": ("bfloat16", None),
    "16-true": ("float16", None),
    "bf16-mixed": ("float32", "bfloat16"),
    "16-mixed": ("float32", "float16"),
}
"""By Lightning's name of a precision: torch's names of the dtypes of parameters and of autocast (None: no autocast)."""
MODES: tuple[Mode, ...] = get_args(Mode)
Overlap = Literal["off", "forward", "backward"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
PLACES: tuple[Place, ...] = get_args(Place)
"""The values of ``optimizer_overlap`` and ``optimizer_on``, without ``auto``."""

_GENERATE = (
    "predict N tokens for each of --batch-size sequences, after prompts of --tokens; times are of the last token"
)
_IMAGE = "pixels on each side of an image (the model's default)"
_CLIP = "gradients are clipped: by norm, as Trainer(gradient_clip_val=1.0), or by value (gradient_clip_algorithm)"
_GPU_LAYERS = (
    "layers that stay in GPU memory with their optimizer state, as SuperpipelineStrategy(gpu_layers=…): a number (8), a share "
    "(0.5), or auto for as many as fit (%(default)s)"
)
_ACTIVATIONS = "of all layers; auto keeps them, and offloads the oldest if not all fit into --gpu-memory (%(default)s)"
_OPTIMIZER = "(the one of a factory's configure_optimizers, if it can be run; else adamw)"
_PCIE = "between host and each device, each way (%(default)s)"
_LINKS = "from each device to the others, and back (%(default)s)"
_DISK = "of a drive below --host-memory, for example 7GB/s, as SuperpipelineStrategy(disk=…) (no disk)"
_PACKED = (
    "stacked experts in 4 bits, by sp_lightning.pack_experts(model, …); if the config says MXFP4, they are planned so without "
    "this option"
)
_LORA = (
    'adapters of this rank, which alone are trained: PEFT\'s LoraConfig(r=N, target_modules="all-linear"), not merged'
)
_STATUS = (
    "exit status: 0 if it fits as asked, with plain Lightning or this strategy; 1 if it does not, even if a change would help; "
    "2 if an error occurs, for example because the model cannot be run without values."
)
_RATES = "rates measured by `superpipeline rates > FILE`, for all rates that are not given here"
REMOVED = {
    "--loss-tokens": "plan a module (package.module:Factory) with example_input_array, whose forward computes the loss in chunks "
    "(examples/guide/memory.md)",
    "--hours": "plan each --batch-size that you consider, and divide the hours by its seconds per batch. "
    "Trainer(max_time={'hours': 24}) ends the run in time",
    "--frames": "write a factory whose example_input_array has the latents of a video (examples/guide/vision.md)",
    "--dataset-tokens": "divide the tokens of the run by those of the data",
}
"""The removed options of ``plan``, each with what to do instead."""


def _size(text: str) -> int:
    """Parses a size by the rule of the strategy's options. A share has no meaning, because free memory is not known."""
    try:
        return parse_bytes("it", text)
    except ValueError as error:
        share = " A share has no meaning here, because free memory is not known." if "%" in text else ""
        raise argparse.ArgumentTypeError(
            str(error).replace("it takes", "expected").replace("it=", "") + share
        ) from error


def _rate(text: str) -> float:
    """Parses bytes per second: ``7GB/s``, bits as in ``56Gb/s`` or ``56Gbit/s``, or a number of GB/s."""
    match = re.fullmatch(r"(\d*\.?\d+(?:e[+-]?\d+)?) *(?:([kMGT]?)(i?)(B|b|bit)(?:/s|ps)?)?", text)
    if match is None or not float(match[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a rate. For example 25 (GB/s), 25GB/s or 200Gb/s")
    number, prefix, binary, unit = match.groups(default="")
    # The index of the prefix is the exponent: kilo 1, mega 2, giga 3, tera 4.
    scale = (1024 if binary else 1000) ** " kMGT".index(prefix or " ") if unit else 1e9
    return float(number) * scale / (8 if unit in ("b", "bit") else 1)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of at least 1, got {text}")
    return int(text)


def _share(text: str) -> Share | Literal["auto"]:
    """Parses a number of layers (``8``), a share of the layers (``0.5``; ``1.0`` is all of them, ``1`` is one), or ``auto``."""
    with suppress(ValueError):
        if text == "auto":
            return "auto"
        if text.isdecimal():
            return int(text)
        if 0 <= (share := float(text)) <= 1:
            return share
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of layers. For example 8, 0.5 (half of them) or auto")


def _precision(text: str) -> str:
    """Returns Lightning's full name of a precision for its full or short name. An unknown name is returned unchanged."""
    return {"bf16": "bf16-mixed", "16": "16-mixed", "32": "32-true", "fp32": "32-true"}.get(text, text)


def _clip(text: str) -> str:
    """Returns the algorithm of gradient clipping for its name. A number stands for ``norm``, as in ``gradient_clip_val=1.0``."""
    return "norm" if re.fullmatch(r"\d*\.?\d+", text) else text


def positive_number(text: str) -> float:
    """Parses a number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return number


def _option(meaning: str, **how: Any) -> dict[str, Any]:
    """Returns the keyword arguments of :meth:`argparse.ArgumentParser.add_argument`."""
    return {"help": meaning, **how}


class DefaultSize(int):
    """A number of tokens that the user did not give.

    If the model takes fewer, the number is lowered. A number that the user gave raises an error instead.
    """


class _Removed(argparse.Action):
    """An option of :data:`REMOVED`. If it is given, the command ends with an error."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        flag = self.option_strings[0]
        parser.error(f"{flag} was removed: {REMOVED[flag]}.")


@dataclass(frozen=True)
class Measured:
    """Measurements of a machine that are not arguments.

    Attributes:
        names: the arguments whose values were measured.
        tflops: TFLOP/s of the device, by torch's name of the dtype.
        python: seconds of Python for each layer call, and for each weight of its layers; None if they were not measured.
        synchronous: True if nothing else runs during a copy, as on the CPU.
    """

    names: frozenset[str] = frozenset()
    tflops: Mapping[str, float] = field(default_factory=dict)
    python: tuple[float, float] | None = None
    synchronous: bool = False


class Question(argparse.Namespace):
    """A question to ``plan``. Memory is in bytes, rates in bytes/s.

    Each annotated attribute is an argument of the command line (see ``_arguments``). ``given`` and ``measured`` are not.
    """

    # The model, its batch, and the task.
    model: Annotated[str, _option(WANTED)]
    predict: Annotated[bool, _option("no training", action="store_true")]
    generate: Annotated[int | None, _option(_GENERATE, type=_count, metavar="N")]
    precision: Annotated[str, _option("(%(default)s)", type=_precision, choices=PRECISIONS, default="bf16-mixed")]
    batch_size: Annotated[int, _option("sequences or images at once on a device (%(default)s)", type=_count, default=1)]
    tokens: Annotated[int, _option("per sequence or prompt (%(default)s)", type=_count, default=DefaultSize(2048))]
    image: Annotated[int | None, _option(_IMAGE, type=_count, metavar="SIZE")]
    input: Annotated[list[int] | None, _option("shape of the input of a factory's module", type=_count, nargs="+")]
    gradient_checkpointing: Annotated[
        bool, _option("the model's own gradient checkpointing, as in transformers and diffusers", action="store_true")
    ]
    pack_experts: Annotated[Packing | None, _option(_PACKED, choices=get_args(Packing))]
    accumulate_grad_batches: Annotated[
        int, _option("as Trainer(accumulate_grad_batches=…) (%(default)s)", type=_count, default=1)
    ]
    gradient_clip: Annotated[str | None, _option(_CLIP, type=_clip, choices=("norm", "value"))]
    lora: Annotated[int | None, _option(_LORA, type=_count, metavar="N")]
    # The options of the strategy.
    activations: Annotated[
        Mode | Literal["auto"],
        _option(_ACTIVATIONS, choices=(*MODES, "auto"), default="auto"),
    ]
    optimizer_overlap: Annotated[
        AskedOverlap,
        _option("optimizer_overlap (%(default)s)", choices=("auto", *OVERLAPS), default="auto"),
    ]
    optimizer_on: Annotated[Place, _option("where the optimizer steps (%(default)s)", choices=PLACES, default="cpu")]
    gpu_layers: Annotated[Share | Literal["auto"], _option(_GPU_LAYERS, type=_share, default=0, metavar="N")]
    optimizer: Annotated[str | None, _option(_OPTIMIZER, choices=("adamw", "adamw8bit", "sgd"))]
    layers: Annotated[list[str] | None, _option("as SuperpipelineStrategy(layers=…)", nargs="+")]
    keep_on_gpu: Annotated[list[str] | None, _option("as SuperpipelineStrategy(keep_on_gpu=…)", nargs="+")]
    k: Annotated[list[int] | None, _option("(a range)", type=_count, nargs="+")]
    k_prime: Annotated[list[int] | None, _option("(1 2)", type=_count, nargs="+")]
    # Memory and speed of the machine.
    devices: Annotated[int, _option("as Trainer(devices=…) (%(default)s)", type=_count, default=1)]
    gpu_memory: Annotated[int | None, _option("of each device, for example 24GiB (no limit)", type=_size)]
    host_memory: Annotated[int | None, _option("for example 512GiB (no limit)", type=_size)]
    tflops: Annotated[float, _option("of the device, TFLOP/s (%(default)s)", type=positive_number, default=100)]
    device_bandwidth: Annotated[float, _option("of its memory (%(default)s)", type=_rate, default="1000GB/s")]
    pcie: Annotated[float, _option(_PCIE, type=_rate, default="25GB/s")]
    links: Annotated[float, _option(_LINKS, type=_rate, default="200GB/s")]
    disk: Annotated[float | None, _option(_DISK, type=_rate)]
    host_bandwidth: Annotated[float, _option("of host memory (%(default)s)", type=_rate, default="60GB/s")]
    rates: Annotated[Path | None, _option(_RATES, type=Path, metavar="FILE")]
    # The output.
    json: Annotated[bool, _option("for programs", action="store_true")]

    given = frozenset[str]()
    """The names of the arguments that the user gave."""
    measured = Measured()
    """The measurements of ``--rates`` that are not arguments."""

    @property
    def mode(self) -> Overlap:
        """When updates run.

        ``auto`` is replaced by the choice of a run whose module and callbacks have no hooks that run before the step.
        """
        if self.optimizer_overlap != "auto":
            return self.optimizer_overlap
        waits = self.gradient_clip == "norm" or self.precision == "16-mixed"  # a step waits for all gradients
        waits |= self.devices > 1 or self.disk is not None
        if self.optimizer_on == "gpu":
            waits |= self.gradient_clip is not None or self.stores_16_bits
        return "forward" if waits else "backward"

    @property
    def frees(self) -> bool:
        """True if a layer's gradients are freed right after its update in backward. On the CPU, ``auto`` keeps them."""
        return self.mode == "backward" and (self.optimizer_overlap == "backward" or self.optimizer_on == "gpu")

    def but(self, **changes: Any) -> Question:
        """Returns the question with other values of some arguments. A measured ``tflops`` is set to that of the precision."""
        asked = Question(**{**vars(self), **changes})
        if "tflops" in asked.measured.names:
            dtype, autocast = PRECISIONS[asked.precision]
            asked.tflops = asked.measured.tflops[autocast or dtype]
        return asked

    @property
    def stores_16_bits(self) -> bool:
        """True if weights and optimizer state have 16 bits."""
        return self.precision in ("bf16-true", "16-true")


def contradictions(question: Question) -> Iterator[str]:
    """Yields messages about arguments that exclude or need each other, as far as they do not depend on the model."""
    asked, inference = question, "--predict or --generate"
    several, gpu, early = asked.devices > 1, asked.optimizer_on == "gpu", asked.optimizer_overlap == "backward"
    exclude: dict[tuple[str, str], object] = {
        ("--accumulate-grad-batches", inference): asked.predict and asked.accumulate_grad_batches > 1,
        ("--gradient-clip", inference): asked.predict and asked.gradient_clip,
        ("--gpu-layers", inference): asked.predict and asked.gpu_layers,
        ("--gpu-layers", "--devices"): several and asked.gpu_layers,
        ("--gpu-layers", "--disk"): asked.disk and asked.gpu_layers,
        ("--optimizer-on gpu", "--devices"): several and gpu,
        # An early update of a layer would not know the norm of all gradients.
        ("--optimizer-overlap backward", "--gradient-clip norm"): early and asked.gradient_clip == "norm",
        # Such steps run in optimizer.step().
        ("--optimizer-overlap backward", f"--optimizer-on gpu and --precision {asked.precision}"): (
            early and gpu and asked.stores_16_bits
        ),
        # With several devices, all weights are in memory.
        ("--disk", f"{inference} on several devices"): several and asked.predict and asked.disk,
    }
    need = {
        ("--links", "--devices 2"): asked.devices == 1 and asked.links != _usual().links,
        ("--gpu-layers auto", "--gpu-memory 22GiB"): asked.gpu_layers == "auto" and asked.gpu_memory is None,
    }
    for (one, other), found in exclude.items():
        if found:
            yield f"{one} does not work with {other}. Leave one of them out."
    for (one, other), found in need.items():
        if found:
            yield f"{one} needs another option. Add {other}, for example, or leave {one} out."


@cache
def _arguments() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Returns the arguments of ``plan``, each with the keywords of :meth:`argparse.ArgumentParser.add_argument`."""
    return tuple((name, get_args(it)[1]) for name, it in get_type_hints(Question, include_extras=True).items())


def number_of(name: str, text: str) -> float:
    """Returns the value of a numeric argument of ``plan``, for example bytes/s of ``disk`` for ``7GB/s``."""
    return float(dict(_arguments())[name]["type"](text))


def read(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Reads the arguments of a command other than Lightning's.

    Raises:
        SystemExit: with status 2, after a message with the command's usage.
        MissingCapabilityError: the folder of the package that has the command is missing.
    """
    # The parser lacks the command if its folder is missing. Its error would not give this reason.
    if arguments[:1] in (["check"], ["dial"]):
        check_command(f"The command {arguments[0]}")
    return parser.parse_args(arguments, namespace=Question())


def _flag(name: str) -> str:
    """Returns the option of an argument."""
    return f"--{name.replace('_', '-')}"


@cache
def _usual() -> argparse.Namespace:
    """Returns the default arguments of ``plan``."""
    return make_parser().parse_args(["plan", "a model"])


def make_parser(*, usual: bool = True) -> argparse.ArgumentParser:
    """Returns the parser of the whole command line. Lightning's own commands are included only for ``--help``.

    Args:
        usual: True to set arguments of ``plan`` that are not given to their defaults. False to leave them out of the namespace.
    """
    parser = argparse.ArgumentParser(prog=PROGRAM)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in LIGHTNING:
        commands.add_parser(name, help=f"Lightning's CLI, with this strategy registered: {name} --config FILE")
    if is_installed("tools.comparison"):
        command = check_command("check")
        command.add_arguments(commands.add_parser("check", help=command.HELP))
        command.add_dial_arguments(commands.add_parser("dial", help=command.DIAL_HELP))
    rates = commands.add_parser("rates", help="measure this machine for superpipeline plan --rates, in about a minute")
    rates.add_argument("--accelerator", help="where layers compute, cuda or cpu (the accelerator that torch finds)")
    rates.add_argument("--disk", type=Path, help="a folder on a drive to measure as well (none)")
    rates.add_argument("--seconds", type=positive_number, default=30, help="for repeated measurements (%(default)s)")
    plan = commands.add_parser(
        "plan",
        help="estimate memory and speed of a model, without loading its weights",
        # The model is first: an option with several values would read a model after it as another value.
        usage="%(prog)s MODEL [options]",
        epilog=_STATUS,
    )
    for name, how in _arguments():
        named = {} if name == "model" else {"dest": name}
        plan.add_argument(
            _flag(name) if named else name, **{**how, **named, **({} if usual else {"default": argparse.SUPPRESS})}
        )
    for flag in REMOVED:
        plan.add_argument(flag, action=_Removed, nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
