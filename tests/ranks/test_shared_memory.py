"""Memory that all processes of a node have, and the views in which each one's writes stay its own."""

from __future__ import annotations

import gc
import os
import re
from pathlib import Path

import pytest
import torch

from sp_lightning.core.device import pages as device_pages
from sp_lightning.core.device.layout import PAGE
from sp_lightning.core.device.pages import create
from sp_lightning.experimental.ranks import shared_memory
from sp_lightning.experimental.ranks.shared_memory import SharedMemory, commit_or_drop

PAGES = 16


@pytest.fixture(params=["scan", "read"])
def memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SharedMemory:
    """Full of sevens. Linux has two ways to find written pages; before 6.7 it had one."""
    if request.param == "read":
        monkeypatch.setattr(device_pages, "_SCAN", 0)
    descriptor = create(PAGES * PAGE, "test")
    made = SharedMemory(descriptor, PAGES * PAGE)
    os.close(descriptor)
    made.common.fill_(7)
    return made


def other(memory: SharedMemory) -> torch.Tensor:
    """The view of another process."""
    return memory.view_anew(0, memory.nbytes).bytes


def test_what_is_written_stays_its_own(memory: SharedMemory) -> None:
    memory.own.bytes[5] = 1
    assert memory.common[5] == 7
    assert other(memory)[5] == 7
    assert memory.own.written() == [(0, PAGE)]


def test_pages_that_were_only_read_were_not_written(memory: SharedMemory) -> None:
    assert memory.own.bytes.sum() == 7 * PAGES * PAGE
    assert memory.own.written() == []


def test_written_pages_are_found_in_runs(memory: SharedMemory) -> None:
    for page in (2, 3, 4, 9, PAGES - 1):
        memory.own.bytes[page * PAGE] = 1
    runs = [(2 * PAGE, 5 * PAGE), (9 * PAGE, 10 * PAGE), ((PAGES - 1) * PAGE, PAGES * PAGE)]
    assert memory.own.written() == runs
    assert memory.own.written(3 * PAGE, 9 * PAGE) == [(3 * PAGE, 5 * PAGE)]


def test_committed_writes_are_everybodys(memory: SharedMemory) -> None:
    memory.own.bytes[PAGE : 2 * PAGE] = 1
    view = other(memory)
    assert memory.own.drop(commit=True) == PAGE
    assert view[PAGE] == 1
    assert memory.own.written() == []
    memory.common[PAGE] = 2
    assert memory.own.bytes[PAGE] == 2, "a committed page follows the others again"


def test_dropped_writes_are_gone(memory: SharedMemory) -> None:
    memory.own.bytes[0] = 1
    memory.own.bytes[PAGE] = 1
    assert memory.own.drop((PAGE, memory.nbytes)) == PAGE
    assert memory.own.bytes[PAGE] == 7
    assert memory.own.bytes[0] == 1
    assert memory.own.written() == [(0, PAGE)]


def test_parts_are_cut_out_of_runs(memory: SharedMemory) -> None:
    """Also where a run reaches beyond a part, ends in it, or lies between two."""
    for page in (1, 2, 3, 5, 6, 8, 10, 11):
        memory.own.bytes[page * PAGE] = 1
    parts = [(10 * PAGE, 11 * PAGE), (2 * PAGE, 4 * PAGE), (4 * PAGE, 6 * PAGE), (9 * PAGE, 10 * PAGE)]
    assert memory.own.drop(*parts, commit=True) == 4 * PAGE
    assert [page for page in range(PAGES) if memory.common[page * PAGE] == 1] == [2, 3, 5, 10]
    assert memory.own.written() == [
        (PAGE, 2 * PAGE),
        (6 * PAGE, 7 * PAGE),
        (8 * PAGE, 9 * PAGE),
        (11 * PAGE, 12 * PAGE),
    ]


@pytest.mark.parametrize("commit", [True, False])
def test_views_are_settled_with_one_look_each(
    memory: SharedMemory, commit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    views = [memory.own, memory.view_anew(8 * PAGE, 16 * PAGE)]
    looks, written = list[shared_memory.OwnView](), shared_memory.OwnView.written

    def noted(self: shared_memory.OwnView, *part: int) -> list[tuple[int, int]]:
        looks.append(self)
        return written(self, *part)

    monkeypatch.setattr(shared_memory.OwnView, "written", noted)
    for view in views:
        view.bytes[:: 2 * PAGE] = 1
    parts = [(view, (page * PAGE, (page + 1) * PAGE)) for page in range(4) for view in views]
    assert commit_or_drop(parts, commit=commit) == 4 * PAGE
    assert looks == views
    assert [page for page in range(PAGES) if memory.common[page * PAGE] == 1] == ([0, 2, 8, 10] if commit else [])


def test_what_is_kept_does_not_follow(memory: SharedMemory) -> None:
    memory.own.keep(0, PAGE)
    memory.common.fill_(3)
    assert memory.own.bytes[0] == 7
    assert memory.own.bytes[PAGE] == 3
    assert memory.view_anew(0, PAGE).bytes[0] == 3


def test_more_runs_than_the_kernel_returns_at_once() -> None:
    pages = 4 * device_pages._REGIONS
    descriptor = create(pages * PAGE, "test")
    memory = SharedMemory(descriptor, pages * PAGE)
    os.close(descriptor)
    memory.own.bytes[:: 2 * PAGE] = 1
    assert memory.own.written() == [(at, at + PAGE) for at in range(0, pages * PAGE, 2 * PAGE)]


@pytest.mark.long("processes that are started for it")
def test_nothing_is_left(memory: SharedMemory) -> None:
    def mapped() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:test")

    gc.collect()  # of what earlier tests have left
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    descriptor = create(PAGE, "test")
    made = SharedMemory(descriptor, PAGE)
    os.close(descriptor)
    view = made.own.bytes[:10]
    assert mapped() == before + 2
    del made
    gc.collect()
    assert mapped() >= before + 1, "a tensor holds its mapping"
    del view
    gc.collect()
    assert mapped() == before
    assert len(os.listdir("/proc/self/fd")) == files


def test_processes_that_are_forked_have_no_common_memory(memory: SharedMemory) -> None:
    """Workers of a DataLoader could write the weights of all ranks. What they inherit is the view of their own."""
    assert "dc" in flags(memory.common)  # "do not copy on fork", of Documentation/filesystems/proc.rst
    assert "dc" not in flags(memory.own.bytes)


def flags(tensor: torch.Tensor) -> list[str]:
    """What the system says of the mapping that a tensor is in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        found = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if found:
            inside = int(found[1], 16) <= tensor.data_ptr() < int(found[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError("there is no such mapping")
