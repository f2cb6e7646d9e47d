"""Each rule of the contract (``sp_lightning/core/__init__.py``), broken once."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import torch

from tests.equality.rows import program, tiers
from tests.support.moments import At

MODIFIED = (
    "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation"
)
USUAL = tiers("users, k=1")


def rule(number: int, name: str, said: str, **moments: Any) -> None:
    """Registers a training that breaks a rule at moments of a batch, and the error."""
    program(
        f"contract: rule {number}, {name}", USUAL, refused={"users, k=1": said}, repairable=False,
        covers="code that breaks a rule of the contract gets an error",
    )(partial(At, **moments))  # fmt: skip


def keep(m: Any) -> None:
    m.kept.append(m.net[1].first.weight.data)


def write_kept(m: Any) -> None:
    m.kept[0].mul_(0.9)


def write(m: Any) -> None:
    with torch.no_grad():
        m.net[1].first.weight.mul_(0.9)


def in_a_thread(use: Any, m: Any) -> None:
    """Runs code in a thread of its own, and raises its error here."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            use(m)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    for error in errors:
        raise error


def exchange(m: Any) -> None:
    m.kept.append(m.net[1].first.weight.data)
    m.net[1].first.weight.data = m.kept[0] * 0.9


def reshape(m: Any) -> None:
    m.net[1].first.weight.data = torch.zeros(8, 16)


def write_both(m: Any) -> None:
    """On the device, and on the host, through memory from between two steps, which the first step does not have."""
    if not m.kept:
        return
    m.net[1].first.weight.data.mul_(0.9)
    m.kept[0].mul_(0.9)


rule(2, "memory is exchanged, and its old memory is held", r"RuntimeError: .*was given a tensor inside a step .*\.clone\(\)",
     start=exchange)  # fmt: skip
LATE = r"RuntimeError: .*was written through a view .*module\.weight\.data"
rule(3, "what was taken in a step is written after it", LATE, start=keep, on_train_batch_end=write_kept)
rule(3, "what was taken in the last step is written after it", LATE, start=keep, on_train_epoch_end=write_kept)
rule(4, "a weight is written before its backward", MODIFIED, after_forward=write)
rule(5, "a weight changes its shape in a step", r"RuntimeError: .*was given torch.float32 of shape \(8, 16\) inside a step",
     start=reshape)  # fmt: skip
rule(
    6, "memory from between two steps is written in a step", "RuntimeError: .*was written on the CPU .*and written .* on the GPU",
    on_train_batch_end=lambda m: m.kept.append(m.net[1].first.weight.detach()), start=write_both,
)  # fmt: skip
rule(7, "another thread writes a weight in a step", "RuntimeError: .*was to be written in another thread",
     start=partial(in_a_thread, write))  # fmt: skip
