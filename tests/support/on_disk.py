"""Runs whose optimizers have their state on a disk, although host memory has room for it."""

from __future__ import annotations

import ctypes
import errno
import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import BaseFinetuning
from torch import nn

from sp_lightning import SuperpipelineStrategy


def without_room(monkeypatch: pytest.MonkeyPatch, more: int = 0) -> None:
    """Leaves host memory for state on its way alone, and for so many bytes more."""
    from sp_lightning.capabilities.disk import state_on_disk
    from sp_lightning.capabilities.disk import tier as disk_tier
    from sp_lightning.capabilities.disk.state_placement import least_room, place_state, staging_bytes

    def place(sizes: Any, *_: Any) -> Any:
        staging = staging_bytes(sizes)
        if staging >= sum(sizes.values()):  # one layer has most of the state, and stays in memory
            staging = least_room(sizes)
        return place_state(sizes, staging + more)

    monkeypatch.setattr(disk_tier, "place_state", place)
    monkeypatch.setattr(state_on_disk, "LEAST", 64)


def state_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """All optimizer state stays in memory."""
    from sp_lightning.capabilities.disk import tier as disk_tier
    from sp_lightning.capabilities.disk.state_placement import StatePlacement

    monkeypatch.setattr(disk_tier, "place_state", lambda sizes, *_: StatePlacement(sizes, {}, 0, None))


def everything_below(monkeypatch: pytest.MonkeyPatch, *, window: int) -> None:
    """Nothing that may be on the disk is in memory: state, trained weights, gradients; a few layers' at a time."""
    from sp_lightning.capabilities.disk import mapped_file, state_placement
    from sp_lightning.capabilities.disk import tier as disk_tier

    without_room(monkeypatch)
    monkeypatch.setattr(disk_tier, "missing_bytes", lambda *_: 2**60)
    monkeypatch.setattr(mapped_file, "WINDOW", window)
    monkeypatch.setattr(state_placement, "WINDOW", 0)  # it would say that few layers' gradients are not worth it


def put_below(monkeypatch: pytest.MonkeyPatch, what: str, *, window: int = 2) -> None:
    """Puts optimizer state on the disk, and trained weights, gradients, or everything; a few layers' are in memory at a time.

    With "frozen", weights stay in the user's files.
    """
    from sp_lightning.capabilities.disk import tier as disk_tier
    from sp_lightning.capabilities.disk.state_placement import OnDisk, choose_on_disk

    if what == "frozen":
        stay(monkeypatch)
        return
    if what == "state":
        without_room(monkeypatch)
        return
    everything_below(monkeypatch, window=window)

    def choose(*args: Any, **options: Any) -> OnDisk:
        return OnDisk(**{what: getattr(choose_on_disk(*args, **options), what)})

    if what != "everything":
        monkeypatch.setattr(disk_tier, "choose_on_disk", choose)


def on_disk(folder: Path, **options: Any) -> SuperpipelineStrategy:
    """A strategy with a disk."""
    return SuperpipelineStrategy(**{"k": 1, "disk": folder, "optimizer_overlap": "off", **options})


MODELS = [
    "llama-dropout",
    "gpt2-tied",
    "reused",
    "conditional",
    "resnet50",
    "lora-checkpoint",
    "frozen",
    "parameter-hooks",
]
"""Names in ``tests.support.models.CASES``: models that are trained with weights or gradients on the disk."""


class NoBatch(Callback):
    """No batch begins."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise AssertionError("a batch begins")


class Unfreezes(BaseFinetuning):
    """Two blocks, in the second epoch."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net.blocks[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net.blocks[:2], optimizer)


def away(optimizer: Any) -> int:
    """How many tensors of an optimizer's state are on the disk."""
    from sp_lightning.capabilities.disk.mapped_file import is_on_disk

    return sum(map(is_on_disk, (value for state in optimizer.state.values() for value in state.values())))


def mapped_bytes(folder: Path) -> int:
    """Bytes of scratch files in a folder that are in this process's memory."""
    text = Path("/proc/self/smaps").read_text()
    found = re.findall(r"^\S+ \S+ \S+ \S+ [1-9]\d* +(.*)\n(?:.*\n)*?Rss: +(\d+) kB", text, re.MULTILINE)
    return sum(int(kib) * 1024 for path, kib in found if path.startswith(str(folder)))


FAULTS = {
    "write error": ("sync_file_range", errno.EIO, "could not be written: Input/output error"),
    "full": ("sync_file_range", errno.ENOSPC, "could not be written: No space left on device"),
    "read error": ("madvise", errno.EFAULT, "could not be read: Input/output error"),
}
"""For each fault of mapped pages the call of the system that fails, its error, and what is said."""


def break_calls(monkeypatch: pytest.MonkeyPatch, fault: str, at: int) -> None:
    """From the ``at``-th time on, the call of a fault fails."""
    from sp_lightning.capabilities.disk import mapped_file

    name, number, _ = FAULTS[fault]
    call, count = getattr(mapped_file.libc, name), iter(range(10**9))

    def called(*arguments: Any) -> int:
        asked = name != "madvise" or arguments[-1] == mapped_file._POPULATE_READ
        if not asked or next(count) < at:
            return int(call(*arguments))
        ctypes.set_errno(number)
        return -1

    monkeypatch.setattr(mapped_file.libc, name, called)


@contextmanager
def counted_writes() -> Iterator[list[None]]:
    """Yields a list that gets an entry for each write of mapped pages."""
    from sp_lightning.capabilities.disk import mapped_file

    call, writes = mapped_file.libc.sync_file_range, list[None]()

    def counted(*arguments: Any) -> int:
        writes.append(None)
        return int(call(*arguments))

    with mock.patch.object(mapped_file.libc, "sync_file_range", counted):
        yield writes


def assert_whole(module: nn.Module, folder: Path) -> None:
    """After an error the module has ordinary parameters with values, and nothing is left on the disk."""
    assert {type(parameter) for parameter in module.parameters()} == {nn.Parameter}
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert list(folder.iterdir()) == []


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file becomes longer."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)


def refusal_in_fork(read: Callable[[], Any]) -> str:
    """What a forked process is told that reads."""

    def child(queue: Any) -> None:
        try:
            read()
        except RuntimeError as error:
            queue.put(str(error))

    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    process.join()
    assert process.exitcode == 0
    return str(queue.get())


# ---------------------------------------------------------------------- weights that stay in their files


def stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can stay in its file does."""
    from sp_lightning.capabilities.disk import tier as disk_tier

    monkeypatch.setattr(disk_tier, "choose_in_files", lambda sizes, *_: list(sizes))


def in_file(parameter: nn.Parameter) -> bool:
    """Whether a parameter has no values but those of its file."""
    from sp_lightning.capabilities.disk.weights_in_files import place_of

    return place_of(parameter) is not None


def in_memory(module: nn.Module) -> list[str]:
    """The names of the parameters that have values of their own."""
    return [name for name, parameter in module.named_parameters() if not in_file(parameter)]
