"""Measurements that replace assumptions of ``plan``: the rates of a machine, and the report of a run."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from sp_lightning.device.accelerator import device_for, device_found
from sp_lightning.observe.reached import machine_of, today
from sp_lightning.planner.answer import answer
from sp_lightning.planner.arguments import MODES, OVERLAPS, PLACES, PRECISIONS, Question, number_of
from sp_lightning.planner.estimate import estimate_model
from sp_lightning.planner.model_source import takes_latents
from sp_lightning.planner.rates import DTYPES, OF_DEVICE, measure_rates

_BYTES = ("device_bandwidth", "pcie", "host_bandwidth", "disk")
# The measurements that become options. ``disk`` does not, because this option would also put data on a disk.
_OPTIONS = ("tflops", "host_tflops", "device_bandwidth", "pcie", "host_bandwidth")


def run_rates(given: Namespace) -> str:
    """Measures this machine. Returns the contents of a file for ``plan --rates``, as JSON.

    Args:
        given: the arguments of the command ``rates``.

    Raises:
        ValueError, OSError: the accelerator or the folder does not exist, or the folder is not writable.
    """
    accelerator = device_found()
    if given.accelerator not in (None, "cpu", accelerator.type):
        raise ValueError(
            f"--accelerator {given.accelerator}: torch finds {accelerator.type}. Leave it out, or use cpu."
        )
    if given.disk is not None and not given.disk.is_dir():
        raise ValueError(
            f"--disk {given.disk}: not a folder. Expected a folder on the drive to measure: --disk /scratch"
        )
    device = device_for(torch.device("cpu") if given.accelerator == "cpu" else accelerator)
    # If torch finds no accelerator, the device of the plan is unknown. With --accelerator cpu, the CPU is this device.
    unknown = device.computes_on_host and given.accelerator is None
    found = measure_rates(None if unknown else device, given.seconds, given.disk)
    measured = {name: _in_words(name, value) for name, value in found.items()}
    return json.dumps(
        {
            "kind": "rates", "date": today(), "machine": machine_of(device),
            "measured": measured, "assumed": [name for name in OF_DEVICE if name not in measured],
        },
        indent=1,
    )  # fmt: skip


def _in_words(name: str, value: Any) -> Any:
    """Returns a measured value, rounded; a rate in bytes/s as text in the format of ``plan``'s options."""
    if isinstance(value, dict) and name != "python":
        return {key: float(f"{each:.4g}") for key, each in value.items()}
    if name in _BYTES:
        return f"{value / 1e9:.4g}GB/s"
    return float(f"{value:.4g}") if isinstance(value, float) else value


def with_rates(questions: Sequence[Question]) -> Sequence[Question]:
    """Returns the questions with the rates of the ``--rates`` file. Rates on the command line take precedence.

    Raises:
        ValueError, OSError: the file cannot be read, or is not an output of ``rates``.
    """
    file = questions[0].rates
    if file is None:
        return questions
    with _file_of("rates", file) as found:
        measured = found["measured"]
        here = machine_of(device_for(torch.device("cpu")))
        notes = []
        if found["machine"]["processor"] != here["processor"] or found["machine"]["cores"] != here["cores"]:
            notes.append(f"{file} is of another machine, {_named(found['machine'])}; this one has {_named(here)}.")
        return [_with_rates(question, measured, notes) for question in questions]


def _with_rates(question: Question, measured: dict[str, Any], notes: Sequence[str]) -> Question:
    values = {name: measured[name] for name in _OPTIONS if name in measured and name not in question.given}
    tflops = {str(DTYPES[key]).removeprefix("torch."): float(each) for key, each in values.get("tflops", {}).items()}
    visit, weight = map(float, measured["python"]["inference" if question.predict else "training"])
    seen = replace(
        question.measured,
        names=frozenset(values),
        tflops=tflops,
        python=None if question.measure_host else (visit, weight),
        synchronous=bool(measured["synchronous"]),
        drive=float(number_of("disk", measured["disk"])) if "disk" in measured else question.measured.drive,
        notes=(*question.measured.notes, *notes),
    )
    numbers = {name: number_of(name, str(value)) for name, value in values.items() if name != "tflops"}
    return question.but(**numbers, measured=seen)


def _named(machine: dict[str, Any]) -> str:
    accelerator = f"{machine['accelerator']}, " if machine["accelerator"] else ""
    return f"{accelerator}{machine['processor']}, {machine['cores']} cores"


_HOW = {
    "rates": "python -m sp_lightning rates > rates.json",
    "report": "Trainer(callbacks=[SuperpipelineCallback(report='report.json')])",
}


@contextmanager
def _file_of(kind: str, file: Path) -> Iterator[dict[str, Any]]:
    """Yields the contents of a file.

    Missing and invalid values raise a ValueError with the command that makes such a file, also in the body of the ``with``.

    Args:
        kind: the kind of the file, a key of ``_HOW``.
        file: the file, in JSON.
    """
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        if found["kind"] != kind:
            raise ValueError(f"its kind is {found['kind']!r}")
        yield found
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ArgumentTypeError) as error:
        raise ValueError(
            f"{file} is not a file of {kind} ({type(error).__name__}: {error}). Make one: {_HOW[kind]}"
        ) from error


def corrected(question: Question, notify: Callable[[str], None]) -> Question:
    """Returns the question with its times corrected by the ``--from`` report of a run; without ``--from``, the same question.

    All times are multiplied by the quotient of the reported time of a batch and the predicted time of the same batch.

    Args:
        question: the question.
        notify: is called with a message before the slow step.

    Raises:
        ValueError, OSError: the file is not a report, or is the report of another model or of another number of devices.
    """
    file = question.from_
    if file is None:
        return question
    with _file_of("report", file) as found:
        reached, batches, model, devices = found["seconds"], found["batches"], found["model"], found["devices"]
        counts = {name: found[name] for name in ("parameters", "trained")}
        # The division raises an error, which becomes one about the file, if the time is 0 or not a number.
        as_reached, _ = _as_reached(question, found), 1 / reached
    if devices != (here := question.devices * question.nodes):
        raise ValueError(
            f"{file} is of {devices} devices, and this plan of {here}. Plan {devices}, or leave --from out."
        )
    notify(f"runs a batch of {question.model} as {file} had it")
    asked = question.but(**as_reached)
    estimate = estimate_model(asked)
    for name, count in counts.items():
        if (planned := getattr(estimate, name)) != count:
            raise ValueError(
                f"{file} is of {model}, with {count:,} {name}, and this plan has {planned:,}. Give the report of "
                "this model, or the options that it was trained with (--lora, --layers, …)."
            )
    predicted = answer(estimate).shown.prediction.seconds
    slower = reached / predicted
    if slower >= 2:
        off = f"{slower:.3g} times as long as predicted"
    else:
        off = f"{abs(slower - 1):.0%} {'more' if slower >= 1 else 'less'} than predicted"
    note = (
        f"{file}: a batch in {asked.precision} took {reached:.3g} s (average of {batches} batches): {off} "
        f"({predicted:.3g} s). All times are corrected by this."
    )
    return question.but(measured=replace(question.measured, slower=slower, notes=(*question.measured.notes, note)))


def _as_reached(question: Question, found: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of the reported run: its window, its options and, if their shape is known, its batches."""
    asked: dict[str, Any] = {
        "k": [found["k"]],
        "k_prime": [found["k_prime"]],
        "accumulate_grad_batches": found["accumulate_grad_batches"],
        "gpu_layers": found.get("gpu_layers", 0),
    }
    if found["precision"] in PRECISIONS:
        asked["precision"] = found["precision"]
    known = {"activations": MODES, "optimizer_overlap": OVERLAPS, "optimizer_on": PLACES}
    asked |= {name: found[name] for name, choices in known.items() if found[name] in choices}
    if question.gradient_clip == "norm" and asked.get("optimizer_overlap") == "backward":
        asked["gradient_clip"] = None  # the reported run did not clip by norm, which excludes updates in backward
    # The report has the overlap that the run resolved. The run is assumed to have used the default if this gives the same.
    if asked.get("optimizer_overlap") == question.but(**asked | {"optimizer_overlap": "auto"}).mode:
        asked["optimizer_overlap"] = "auto"
    shape = found["shape"]
    if ":" not in question.model and shape:
        asked["batch_size"] = shape[0]
        if takes_latents(question.model):  # the shape of latents does not determine the pixels
            return asked
        if len(shape) == 2:
            asked["tokens"] = shape[1]
        elif len(shape) == 4:
            asked["image"] = shape[-1]
    elif question.input and shape:
        asked["input"] = shape
    return asked
