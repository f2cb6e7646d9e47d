"""``python -m sp_lightning plan MODEL``: does it fit, with which k, and how fast? And Lightning's CLI, the name registered."""

from __future__ import annotations

import argparse
import json
import logging
import math
import sys
import warnings
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)

from sp_lightning.cli.model_source import WANTED, Subject, load
from sp_lightning.model.find import Found, find_layers
from sp_lightning.observe.plot import Point, draw_windows, require_matplotlib
from sp_lightning.plan.activation_policy import Call, Mode
from sp_lightning.plan.ledger import Ledger, make_ledger
from sp_lightning.plan.options import parse_bytes
from sp_lightning.plan.plan import Plan, human_bytes, make_plan
from sp_lightning.trainer.callback import remedy
from sp_lightning.tune.activation_choice import Balance
from sp_lightning.tune.dry_run import Work, cast, estimate, on_paper
from sp_lightning.tune.simulator import Prediction, Rates, Visit, predict, schedule_visits
from sp_lightning.tune.window import SAME

LIGHTNING = ("fit", "validate", "test", "predict")
PRECISIONS = {
    "32-true": (torch.float32, None),
    "bf16-true": (torch.bfloat16, None),
    "16-true": (torch.float16, None),
    "bf16-mixed": (torch.float32, torch.bfloat16),
    "16-mixed": (torch.float32, torch.float16),
}
# One fused AdamW pass reads and writes seven times the bytes of the gradients: weights, gradients, two moments.
_PASSES_OF_ADAMW = 7
_CHECKPOINTING = "gradient_checkpointing_enable"  # of transformers' models
MODES: tuple[Mode, ...] = get_args(Mode)
LOOKS_AT_VALUES = (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException)
# Nobody minds waiting for so small a share of the time.
_LITTLE = 0.05


@dataclass(frozen=True)
class Row:
    """One choice of k and k'.

    Attributes:
        plan: for it.
        device_bytes: weights, gradients and activations.
        prediction: of a batch.
        fits: whether the device has the memory.
    """

    plan: Plan
    device_bytes: int
    prediction: Prediction
    fits: bool


@dataclass(frozen=True)
class Answer:
    """What the command says.

    Attributes:
        subject, found: the model and its layers.
        work: what a batch computes; None if it could not be run without values.
        why_no_work: then, why.
        ledger: the host's memory; None for prediction.
        host_bytes: all of it.
        host_fits: whether that can be had, as far as it was said.
        rows: by k and k'.
        prompt_seconds: of generation, before the first token; None if nothing is generated.
    """

    subject: Subject
    found: Found
    work: Work | None
    why_no_work: str
    ledger: Ledger | None
    host_bytes: int
    host_fits: bool
    rows: tuple[Row, ...]
    prompt_seconds: float | None = None

    @property
    def best(self) -> Row | None:
        """The smallest among the fastest that fit."""
        fitting = [row for row in self.rows if row.fits and self.host_fits]
        if not fitting:
            return None
        enough = min(row.prediction.seconds for row in fitting) * SAME
        return min((r for r in fitting if r.prediction.seconds <= enough), key=lambda row: row.device_bytes)


def answer(options: argparse.Namespace) -> Answer:
    """Build the model on paper, run a batch, walk the schedule for a range of k and k'.

    Raises:
        ValueError, ImportError: a model that is not known.
    """
    dtype, autocast = PRECISIONS[options.precision]
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with on_paper(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject = _load(options, image=options.image)
            module = subject.module
            if not any(True for _ in module.parameters()):
                raise ValueError(f"{options.model!r} has no parameters, so there is nothing to stream.")
            cast(module, dtype)
            if options.checkpointing:
                _checkpoint(module)
            module.train(not options.predict)
            found = find_layers(module, layers=options.layers, resident=options.resident or (), autocast=autocast)
            prompts: Work | None = None
            if options.generate is None:
                subject, work, why = _work(subject, found, options, autocast)
            else:
                prompts, work, why = *_generating(subject, found, options, autocast), ""
            ledger = None
            if not options.predict:
                trained = [p for p in module.parameters() if p.requires_grad]
                if not trained:
                    raise ValueError(f"No parameter of {options.model!r} requires a gradient. Say --predict.")
                ledger = make_ledger(
                    make_plan(found, k=1, k_prime=1), [torch.optim.AdamW(trained)],
                    early=options.overlap == "backward", accumulate=1, clips=None, scales=False,
                )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    smallest = make_plan(found, k=1, k_prime=1)
    host = ledger.nbytes if ledger is not None else smallest.host_bytes - _gradients(smallest)
    host += _offloaded(work, options)
    rows = tuple(
        _row(found, k, k_prime, work, subject.uses, ledger, options) for k, k_prime in _choices(found, options)
    )
    host_fits = options.host_memory is None or host <= options.host_memory
    answered = Answer(subject, found, work, why, ledger, host, host_fits, rows)
    if prompts is None or answered.best is None:
        return answered
    return replace(
        answered, prompt_seconds=_predicted(answered.best.plan, prompts, subject.uses, ledger, options).seconds
    )


def _load(options: argparse.Namespace, *, image: int | None = None, whole: bool = False) -> Subject:
    sizes = {"batch": options.batch, "tokens": options.tokens, "shape": options.input}
    return load(options.model, **sizes, image=image, whole=whole)


def _work(
    subject: Subject, found: Found, options: argparse.Namespace, autocast: torch.dtype | None
) -> tuple[Subject, Work | None, str]:
    """What a batch computes; or else why nobody knows. Of --input, whole numbers are tried where others are refused.

    Raises:
        ValueError: the model cannot take the size that was asked for.
    """
    work = _tried(subject, found, options, autocast)
    if isinstance(work, Work):
        return subject, work, ""
    why = f"{type(work).__name__}: {str(work).strip().splitlines()[0] if str(work).strip() else ''}"
    if options.image is not None or options.input is not None:
        other = replace(_load(options, whole=options.input is not None), module=subject.module)
        again = _tried(other, found, options, autocast)
        if isinstance(again, Work) and options.input is not None:
            return other, again, ""
        if isinstance(again, Work):
            raise ValueError(
                f"--image {options.image}: {options.model!r} cannot take that ({why}). Leave --image out: it is run with "
                f"{other.items} then."
            )
        if options.input is not None and not isinstance(work, LOOKS_AT_VALUES):
            raise ValueError(
                f"--input {' '.join(map(str, options.input))}: {options.model!r} cannot take one tensor of that shape ({why}). "
                "Give the shape of a whole batch, or set example_input_array in the module to what its forward takes, and "
                "leave --input out."
            )
    return subject, None, why


def _tried(
    subject: Subject, found: Found, options: argparse.Namespace, autocast: torch.dtype | None
) -> Work | Exception:
    try:
        with torch.no_grad() if options.predict else nullcontext():
            return estimate(found, lambda: subject.run(training=not options.predict, autocast=autocast))
    except Exception as error:  # whatever a module raises that looks at values; the answer says so
        return error


def _generating(
    subject: Subject, found: Found, options: argparse.Namespace, autocast: torch.dtype | None
) -> tuple[Work, Work]:
    """The prompts, and the last token, which has the keys and values of all before it; with the memory of both."""
    if subject.generation is None:
        raise ValueError(
            f"{options.model!r} is no language model of transformers with a cache of keys and values (past_key_values); leave "
            "out --generate."
        )
    try:
        with torch.no_grad(), torch.autocast("cpu", autocast) if autocast is not None else nullcontext():
            prompts, token = (estimate(found, run) for run in subject.generation(options.generate))
    except Exception as error:
        raise ValueError(
            f"--generate: {options.model!r} could not be run without values ({type(error).__name__}: {error}). Leave it out."
        ) from error
    return prompts, replace(token, activation_bytes=max(prompts.activation_bytes, token.activation_bytes))


def _row(
    found: Found, k: int, k_prime: int, work: Work | None, uses: int, ledger: Ledger | None, options: argparse.Namespace
) -> Row:
    plan = make_plan(found, k=k, k_prime=k_prime)
    nbytes = plan.peak_device_bytes if not options.predict else plan.slot_bytes + plan.resident_bytes
    nbytes += _alive(work, options)
    prediction = _predicted(plan, work, uses, ledger, options)
    return Row(plan, nbytes, prediction, options.gpu_memory is None or nbytes <= options.gpu_memory)


def _predicted(
    plan: Plan, work: Work | None, uses: int, ledger: Ledger | None, options: argparse.Namespace, **rates: float
) -> Prediction:
    """With some of the ``rates`` other than asked for."""
    usual = {
        "upload": options.pcie * 1e9,
        "download": options.pcie * 1e9,
        "update": options.dram * 1e9 / _PASSES_OF_ADAMW,
        "host_memory": options.dram * 1e9,
    }
    found = Rates(**{**usual, **rates})
    traffic = sum(each.read + each.written for each in ledger.passes if each.what == "update") if ledger else 0
    return predict(
        plan, _visits(plan, work, uses, found, options), found, overlap=options.overlap, host_traffic=traffic
    )


def _visits(plan: Plan, work: Work | None, uses: int, rates: Rates, options: argparse.Namespace) -> list[Visit]:
    if work is not None:
        visits = work.visits(flops=options.tflops * 1e12, memory=options.device_bandwidth * 1e9)
        return _in_mode(plan, work.calls, visits, rates, options)
    calls = tuple(Call(layer.name, saved=0, inputs=0) for layer in plan.layers)
    counts = [sum(math.prod(span.shape) for span in (*layer.spans, *layer.casts)) for layer in plan.layers]
    seconds = [2 * n * uses / (options.tflops * 1e12) for n in counts]
    return _in_mode(plan, calls, schedule_visits(plan, seconds, training=not options.predict), rates, options)


def _in_mode(
    plan: Plan, calls: tuple[Call, ...], visits: list[Visit], rates: Rates, options: argparse.Namespace
) -> list[Visit]:
    """Second forwards, and what travels, where that is asked for."""
    index_of = {layer.name: index for index, layer in enumerate(plan.layers)}
    return Balance(calls, index_of, visits, rates).visited(dict.fromkeys((c.unit for c in calls), options.activations))


def _flops(answer: Answer, options: argparse.Namespace) -> int:
    """Of a batch, second forwards included."""
    work, plan = answer.work, answer.rows[0].plan
    if work is None:
        return 0
    visits = work.visits(flops=1.0, memory=math.inf)  # a second for each
    return round(sum(each.seconds for each in _in_mode(plan, work.calls, visits, Rates(1, 1, 1, 1), options)))


def _alive(work: Work | None, options: argparse.Namespace) -> int:
    return work.alive(options.activations) if work is not None else 0


def _offloaded(work: Work | None, options: argparse.Namespace) -> int:
    return work.offloaded if work is not None and options.activations == "offload" else 0


def _choices(found: Found, options: argparse.Namespace) -> list[tuple[int, int]]:
    count = max(len(found.layers), 1)
    ks = options.k or sorted({k for k in (1, 2, 4, 8, 16, 32, 64) if k < count} | {count})
    return [
        (k, k_prime) for k in ks for k_prime in (options.k_prime or (1, 2)) if k + k_prime <= max(count, 2) or options.k
    ]


def _gradients(plan: Plan) -> int:
    return sum(layer.gradient_bytes for layer in plan.trained)


def _checkpoint(module: Any) -> None:
    enable = getattr(module, _CHECKPOINTING, None)
    if enable is None:
        raise ValueError(f"{type(module).__name__} has no gradient_checkpointing_enable; leave out --checkpointing.")
    enable()


# ---------------------------------------------------------------------- what is printed


def table(answer: Answer, options: argparse.Namespace) -> str:
    """The answer, to be read."""
    best = answer.best
    shown = (best or answer.rows[0]).plan
    count = sum(p.numel() for p in answer.found.places)
    what = "prediction" if options.predict else "training, AdamW"
    lines = [
        f"{answer.subject.name}: {_human_count(count)} parameters, {options.precision}, {what}, {answer.subject.items}",
        shown.table(training=not options.predict, state=answer.ledger.state if answer.ledger else None),
        "",
        _activations(answer, options),
        _host(answer, options, count),
        f"assumed: {options.tflops:g} TFLOP/s, {options.device_bandwidth:g} GB/s on the device, {options.pcie:g} GB/s each way, "
        f"{options.dram:g} GB/s of host memory (--tflops --device-bandwidth --pcie --dram)",
        "",
        f"   k  k' {'weights+grads':>14} {'with the rest':>14} {_per(options):>9} {'waiting':>8}  binds",
    ]
    for row in answer.rows:
        weights = row.plan.peak_device_bytes if not options.predict else row.plan.slot_bytes + row.plan.resident_bytes
        rest = human_bytes(row.device_bytes) if answer.work is not None else "?"
        mark = " ◀" if row is best else "" if row.fits else "  does not fit"
        lines.append(
            f"{row.plan.k:>4} {row.plan.k_prime:>3} {human_bytes(weights):>14} {rest:>14} "
            f"{row.prediction.seconds:>9.3g} {_waiting(row):>8.0%}  {row.prediction.binds}{mark}"
        )
    lines += _waited(answer, best or answer.rows[0], options)
    if answer.work is not None and not options.predict:
        lines += ["", *_modes(answer.work), *(f"note: {each}" for each in _notes(answer, options))]
    return "\n".join([*lines, "", verdict(answer, options)])


def _waiting(row: Row) -> float:
    """The share of the time in which the device does not compute."""
    return max(0.0, 1 - row.prediction.busy["compute"] / row.prediction.seconds) if row.prediction.seconds else 0.0


def _waited(answer: Answer, row: Row, options: argparse.Namespace) -> list[str]:
    """What costs most time beside computing, which is what a batch would be faster by without it; and what helps."""
    free: dict[str, dict[str, float]] = {
        # In prediction nothing else passes over the host's memory.
        "fetches": {"upload": math.inf, **({"host_memory": math.inf} if options.predict else {})},
        "gradients to leave": {"download": math.inf},
        "updates": {"update": math.inf},
    }
    saved = {}
    for what, rates in free.items():
        ledger = None if what == "updates" else answer.ledger
        without = _predicted(row.plan, answer.work, answer.subject.uses, ledger, options, **rates)
        saved[what] = 1 - without.seconds / max(row.prediction.seconds, 1e-9)
    what = max(saved, key=saved.__getitem__)
    if saved[what] < _LITTLE:
        return []
    window = f"k = {row.plan.k}, k' = {row.plan.k_prime}"
    return [f"waiting, with {window}: {saved[what]:.0%} of the time for {what}; {remedy(what, row.plan)}."]


def _modes(work: Work) -> list[str]:
    """What each way to treat activations takes."""
    lines = [f"  {mode:<10} {human_bytes(work.saved(mode)):>10}" for mode in MODES]
    lines[MODES.index("offload")] += f", and {human_bytes(work.offloaded)} on the host"
    return ["activations=    saved for backward, at most", *lines]


def _notes(answer: Answer, options: argparse.Namespace) -> list[str]:
    """What no mode changes, where it is much."""
    work = answer.work
    if work is None or options.predict:
        return []
    ungrouped = [answer.found.ungrouped] if answer.found.ungrouped else []
    largest = work.largest_outside
    saved = max((call.saved for call in work.calls), default=0)
    if largest is None or (work.outside <= work.saved(options.activations) / 4 and largest.nbytes <= saved):
        return ungrouped
    return [
        *ungrouped,
        f"{human_bytes(work.outside)} are saved outside of all layers (largest: {largest}), whatever activations= says. "
        'If that is the loss, a chunked or fused one needs a fraction: see README, "Large vocabularies".',
    ]


def _human_count(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.2f} M" if count >= 1e4 else str(count)


def verdict(answer: Answer, options: argparse.Namespace) -> str:
    """Does it fit, and with which k?"""
    best = answer.best
    said = []
    if not answer.host_fits:
        said.append(
            f"It does not fit: {human_bytes(answer.host_bytes)} of host memory are needed, "
            f"{human_bytes(options.host_memory)} are there. {_lighter(options)}"
        )
    if not any(row.fits for row in answer.rows):
        least = min(row.device_bytes for row in answer.rows)
        rest = _alive(answer.work, options)
        others = (
            [] if options.predict or answer.work is None else [mode for mode in MODES if mode != options.activations]
        )
        fitting = [mode for mode in others if least - rest + answer.work.alive(mode) <= options.gpu_memory]  # type: ignore[union-attr]
        smaller = f"Use a smaller batch{_about(least, rest, options)}"
        smaller += f", or --activations {' or '.join(fitting)}" if fitting else ""
        helps = fitting or (rest > least / 2 and least - rest < options.gpu_memory)
        remedy = f"{smaller}." if helps else "Cut layers finer with --layers."
        said.append(
            f"It does not fit: the least is {human_bytes(least)} of device memory, of which {human_bytes(rest)} are "
            f"activations; {human_bytes(options.gpu_memory)} are there. {remedy}"
        )
    if best is None or said:
        return "\n".join(said)
    fits = "It fits" if options.gpu_memory is not None else "The fastest"
    if answer.work is None:
        fits = (
            "Weights and gradients fit, activations are unknown"
            if options.gpu_memory is not None
            else "Perhaps the fastest"
        )
    mode = "" if options.activations == "keep" else f', activations="{options.activations}"'
    choice = f"SuperpipelineStrategy(k={best.plan.k}, k_prime={best.plan.k_prime}{mode})"
    seconds = best.prediction.seconds
    if answer.prompt_seconds is None:
        return f"{fits}: {choice}, {seconds:.3g} s per batch."
    return (
        f"{fits}: {choice}, {answer.prompt_seconds:.3g} s for the prompts, then {seconds:.3g} s for each token of "
        f"{options.batch} sequence{'s' * (options.batch > 1)}: {options.batch / seconds:.3g} tokens/s."
    )


def _about(least: int, rest: int, options: argparse.Namespace) -> str:
    """What batch would fit: activations and caches grow with it, weights do not."""
    room = options.gpu_memory - (least - rest)
    count = int(options.batch * room / rest) if rest > 0 else 0
    return f" (about {count} would fit)" if 1 <= count < options.batch else ""


def _per(options: argparse.Namespace) -> str:
    return "s/batch" if options.generate is None else "s/token"


def _lighter(options: argparse.Namespace) -> str:
    if options.predict:
        return "Use a lower precision: --precision bf16-true."
    precision = "Use --precision bf16-true, or freeze" if options.precision != "bf16-true" else "Freeze"
    overlap = "" if options.overlap == "backward" else "; --overlap backward saves gradients"
    return f"{precision} layers, or train adapters{overlap}."


def _activations(answer: Answer, options: argparse.Namespace) -> str:
    if answer.work is None:
        return (
            f"activations unknown: no batch could be run without values ({answer.why_no_work}). Times are guessed from "
            f"parameter counts, as if each weight was used {answer.subject.uses} times in a forward"
        )
    flops = f"{_flops(answer, options) / 1e12:.3g} TFLOP per {'batch' if options.generate is None else 'token'}"
    return f"activations and intermediate results {human_bytes(_alive(answer.work, options))}, {flops}"


def _host(answer: Answer, options: argparse.Namespace, count: int) -> str:
    if answer.ledger is None:
        return f"host memory {human_bytes(answer.host_bytes)}"
    ledger = answer.ledger
    parts = f"weights {human_bytes(ledger.weights)}, gradients {human_bytes(ledger.gradients)}"
    if offloaded := _offloaded(answer.work, options):
        parts = f"activations {human_bytes(offloaded)}, {parts}"
    return (
        f"host memory {human_bytes(answer.host_bytes)}, {answer.host_bytes / max(count, 1):.3g} bytes per parameter: {parts}, "
        f"optimizer state {human_bytes(ledger.state or 0)}"
    )


def as_json(answer: Answer, options: argparse.Namespace) -> str:
    """The answer, to be read by programs; bytes and seconds."""
    best = answer.best
    return json.dumps(
        {
            "model": answer.subject.name,
            "precision": options.precision,
            "parameters": sum(p.numel() for p in answer.found.places),
            "tables": [{"name": each.name, "bytes": each.nbytes} for each in answer.rows[0].plan.tables],
            "layers": [{"name": name, "bytes": n} for name, n in ((x.name, x.nbytes) for x in answer.rows[0].plan.layers)],
            "activations": options.activations,
            "activation_bytes": _alive(answer.work, options) if answer.work else None,
            "saved_bytes": {mode: answer.work.saved(mode) for mode in MODES} if answer.work else None,
            "offloaded_bytes": answer.work.offloaded if answer.work else None,
            "flops": _flops(answer, options) if answer.work else None,
            "why_no_activations": answer.why_no_work or None,
            "batch": answer.subject.items,
            "training": not options.predict,
            "generated_tokens": options.generate,
            "prompt_seconds": answer.prompt_seconds,
            "host_bytes": answer.host_bytes,
            "host_fits": answer.host_fits,
            "notes": [*answer.rows[0].plan.notes, *_notes(answer, options)],
            "assumed": {
                "tflops": options.tflops, "device_gbps": options.device_bandwidth, "pcie_gbps": options.pcie,
                "dram_gbps": options.dram,
            },
            "windows": [
                {
                    "k": row.plan.k, "k_prime": row.plan.k_prime, "device_bytes": row.device_bytes, "fits": row.fits,
                    "seconds": row.prediction.seconds, "busy_seconds": row.prediction.busy, "binds": row.prediction.binds,
                }
                for row in answer.rows
            ],
            "best": None if best is None else {"k": best.plan.k, "k_prime": best.plan.k_prime},
            "verdict": verdict(answer, options),
        },
        indent=2,
    )  # fmt: skip


# ---------------------------------------------------------------------- the command line


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sp_lightning", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in LIGHTNING:
        commands.add_parser(
            name, help=f"Lightning's CLI with this strategy registered: {name} --config FILE", add_help=False
        )
    plan = commands.add_parser(
        "plan", help="does a model fit, with which k, and how fast? (exit status 1: it does not fit)"
    )
    plan.add_argument("model", help=WANTED)
    plan.add_argument("--predict", action="store_true", help="no training (which is with AdamW otherwise)")
    plan.add_argument(
        "--generate",
        type=_count,
        metavar="N",
        help="predict N tokens for each of --batch sequences (those times beams) after prompts of --tokens: times are of "
        "the last token, memory has the cache of keys and values",
    )
    plan.add_argument("--precision", choices=PRECISIONS, default="bf16-mixed", help="(%(default)s)")
    plan.add_argument("--batch", type=_count, default=1, help="sequences or images at once (%(default)s)")
    plan.add_argument("--tokens", type=_count, default=2048, help="per sequence (%(default)s)")
    plan.add_argument("--image", type=_count, help="pixels on each side (what the model is made for)")
    plan.add_argument("--input", type=_count, nargs="+", metavar="SIZE", help="shape of what a factory's module takes")
    plan.add_argument("--checkpointing", action="store_true", help="gradient checkpointing, of transformers' models")
    plan.add_argument("--activations", choices=MODES, default="keep", help="of all layers (%(default)s)")
    plan.add_argument(
        "--overlap", choices=("off", "forward", "backward"), default="forward", help="optimizer_overlap (%(default)s)"
    )
    plan.add_argument("--layers", nargs="+", help="as SuperpipelineStrategy(layers=…)")
    plan.add_argument("--resident", nargs="+", help="as SuperpipelineStrategy(resident=…)")
    plan.add_argument("--k", type=_count, nargs="+", help="(a range)")
    plan.add_argument("--k-prime", type=_count, nargs="+", help="(1 2)")
    plan.add_argument("--gpu-memory", type=_size, help="for example 24GiB (no limit)")
    plan.add_argument("--host-memory", type=_size, help="for example 512GiB (no limit)")
    plan.add_argument("--tflops", type=_rate, default=100, help="of the device, TFLOP/s (%(default)s)")
    plan.add_argument("--device-bandwidth", type=_rate, default=1000, help="of its memory, GB/s (%(default)s)")
    plan.add_argument("--pcie", type=_rate, default=25, help="between host and device, each way, GB/s (%(default)s)")
    plan.add_argument("--dram", type=_rate, default=60, help="of host memory, GB/s (%(default)s)")
    plan.add_argument("--json", action="store_true", help="for programs")
    plan.add_argument("--plot", type=Path, metavar="FILE.png", help="seconds against memory; needs matplotlib")
    return parser


def _size(text: str) -> int:
    try:
        return parse_bytes("it", text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in LIGHTNING:
        _lightning(arguments)
        return
    parser = _parser()
    options = parser.parse_args(arguments)
    options.predict = options.predict or options.generate is not None
    logging.getLogger("transformers").setLevel(logging.ERROR)
    logging.getLogger("torch._subclasses.fake_tensor").setLevel(logging.CRITICAL)  # sizes that are tried
    if options.plot is not None:
        require_matplotlib()
        options.plot.parent.mkdir(parents=True, exist_ok=True)
    try:
        found = answer(options)
    except (ValueError, ImportError) as error:
        parser.exit(2, f"python -m sp_lightning plan: {error}\n")
    print(as_json(found, options) if options.json else table(found, options), flush=True)
    if options.plot is not None:
        points = [Point(r.plan.k, r.plan.k_prime, r.device_bytes, r.prediction.seconds) for r in found.rows]
        draw_windows(points, options.gpu_memory, options.plot, f"{found.subject.name}, {options.precision}")
    if found.best is None:
        raise SystemExit(1)


def _lightning(arguments: list[str]) -> None:
    try:
        from lightning.pytorch.cli import LightningCLI

        LightningCLI(args=arguments) if arguments != sys.argv[1:] else LightningCLI()
    except ModuleNotFoundError as error:
        if "jsonargparse" not in str(error):
            raise
        raise SystemExit(f'{error} Install it: pip install "sp_lightning[cli]".') from error
    except ValueError as error:  # of jsonargparse: each type that was tried, and what was given, in full
        tried = str(error).partition("\nErrors:\n  - ")[2].partition("\nGiven value type:")[0].split("\n  - ")
        reasons = [each for each in tried if each and not each.startswith("Expected a ")]
        if not reasons:
            raise
        raise SystemExit(f"python -m sp_lightning {arguments[0]}: {' '.join(reasons)}") from error


if __name__ == "__main__":
    main()
