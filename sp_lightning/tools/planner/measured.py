"""The command ``rates``, and ``plan --rates``: measurements of a machine that replace assumptions."""

from __future__ import annotations

import json
from argparse import ArgumentTypeError, Namespace
from dataclasses import replace
from typing import Any

import torch

from sp_lightning.core.device.accelerator import device_for, present_device
from sp_lightning.tools.machine import machine_of, today
from sp_lightning.tools.planner.arguments import Question, number_of
from sp_lightning.tools.planner.rates import DTYPES, OF_DEVICE, measure_rates

_BYTES = ("device_bandwidth", "pcie", "host_bandwidth", "disk")
# The measurements that become options. ``disk`` does not, because this option would also put data on a disk.
_OPTIONS = ("tflops", "device_bandwidth", "pcie", "host_bandwidth")


def run_rates(given: Namespace) -> str:
    """Measures this machine. Returns the contents of a file for ``plan --rates``, as JSON.

    Args:
        given: the arguments of the command ``rates``.

    Raises:
        ValueError, OSError: the accelerator or the folder does not exist, or the folder is not writable.
    """
    accelerator = present_device()
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


def with_rates(question: Question) -> Question:
    """Returns the question with the rates of the ``--rates`` file. Rates on the command line take precedence.

    Raises:
        ValueError, OSError: the file cannot be read, or is not an output of ``rates``.
    """
    file = question.rates
    if file is None:
        return question
    text = file.read_text(encoding="utf-8")
    try:
        found = json.loads(text)
        if found["kind"] != "rates":
            raise ValueError(f"its kind is {found['kind']!r}")
        return _with_rates(question, found["measured"])
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, ArgumentTypeError) as error:
        raise ValueError(
            f"{file} is not a file of rates ({type(error).__name__}: {error}). Make one: "
            "superpipeline rates > rates.json"
        ) from error


def _with_rates(question: Question, measured: dict[str, Any]) -> Question:
    values = {name: measured[name] for name in _OPTIONS if name in measured and name not in question.given}
    tflops = {str(DTYPES[key]).removeprefix("torch."): float(each) for key, each in values.get("tflops", {}).items()}
    visit, weight = map(float, measured["python"]["inference" if question.predict else "training"])
    seen = replace(
        question.measured,
        names=frozenset(values),
        tflops=tflops,
        python=(visit, weight),
        synchronous=bool(measured["synchronous"]),
    )
    numbers = {name: number_of(name, str(value)) for name, value in values.items() if name != "tflops"}
    return question.but(**numbers, measured=seen)
