"""Memory that is mapped from a scratch file: its addresses, its descriptors, its place in the file."""

from __future__ import annotations

import ctypes
import errno
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sp_lightning.capabilities.disk import mapped_file
from sp_lightning.capabilities.disk.mapped_file import MappedFile, is_on_disk

SIZE = 2**16


def size_of(file: MappedFile) -> int:
    return os.fstat(file._file.descriptor).st_size


@pytest.mark.rest("takes tenths of a second")
def test_addresses_are_known_as_long_as_somebody_has_them(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    memories = [file.allocate(SIZE, False) for _ in range(3)]
    view = memories[1].common[SIZE // 2 :]
    assert all(is_on_disk(memory.common) and is_on_disk(memory.common[-1:]) for memory in memories)
    assert not is_on_disk(torch.zeros(SIZE))
    address = view.data_ptr()
    del memories[1]
    gc.collect()
    assert is_on_disk(view)
    del view
    gc.collect()

    class There:
        def data_ptr(self) -> int:
            return address

    assert not is_on_disk(There())
    assert all(is_on_disk(memory.common) for memory in memories)


def test_a_place_in_the_file_is_used_again_once_nobody_has_it(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    memory = file.allocate(SIZE, False)
    memory.common.fill_(7)
    for value in range(20):
        before = memory.common
        memory.reallocate()
        assert before.unique().tolist() == [7 if value == 0 else value - 1], "who holds it keeps the values"
        memory.common.fill_(value)
    del before
    assert size_of(file) <= 2 * SIZE


def test_memory_that_the_system_does_not_map_leaves_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = MappedFile(tmp_path)

    def fails(*_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return 2**64 - 1  # MAP_FAILED

    with monkeypatch.context() as patched:
        patched.setattr(mapped_file.libc, "mmap", fails)
        for _ in range(3):
            with pytest.raises(
                OSError, match=r"64.0 KiB of a scratch file could not be mapped \(Cannot allocate memory\)"
            ):
                file.allocate(SIZE, False)
    file.allocate(SIZE, False).common.fill_(1)
    assert size_of(file) == SIZE


def test_a_block_is_read_ahead_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux reads at most the device's read_ahead_kb for each call. With one call, nearly nothing of a large layer was read."""
    memory = MappedFile(tmp_path).allocate(5 * SIZE + 1, False)
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(mapped_file, "advise", lambda address, nbytes, _: asked.append((address, nbytes)))
    memory.read_ahead()
    assert [address - memory.common.data_ptr() for address, _ in asked] == [0, 2 * SIZE, 4 * SIZE]
    assert max(nbytes for _, nbytes in asked) <= 128 * 1024
    assert sum(nbytes for _, nbytes in asked) == 5 * SIZE + 4096


def test_memory_of_another_size_has_a_place_of_its_own(tmp_path: Path) -> None:
    file = MappedFile(tmp_path)
    file.allocate(SIZE, False)
    gc.collect()
    kept = file.allocate(2 * SIZE, False)
    kept.common.fill_(3)
    again = file.allocate(SIZE, False)
    again.common.fill_(5)
    assert kept.common.unique().tolist() == [3]
    assert size_of(file) == 3 * SIZE


def test_one_descriptor_is_enough(tmp_path: Path) -> None:
    """Other descriptors of the process are not counted: a thread, or the garbage collector, may close one meanwhile."""

    def descriptors() -> int:
        count = 0
        for name in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # of the listing itself, for example
                count += os.readlink(f"/proc/self/fd/{name}").startswith(f"{tmp_path}/")
        return count

    file = MappedFile(tmp_path)
    before = descriptors()
    memories = [file.allocate(SIZE, False) for _ in range(50)]
    assert descriptors() == before == 1
    assert len(memories) == 50


@pytest.fixture
def often() -> Iterator[None]:
    """Threads take turns every 10 µs instead of 5 ms."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def test_garbage_may_be_unmapped_while_its_address_is_looked_for(tmp_path: Path) -> None:
    """It was collected while a list of pairs was made: "dictionary changed size during iteration"."""
    file = MappedFile(tmp_path)
    kept, before = [file.allocate(4096, False) for _ in range(600)], gc.get_threshold()
    try:
        for number in range(300):
            cycle: list[Any] = [file.allocate(4096, False)]
            cycle.append(cycle)
            del cycle
            gc.set_threshold(50 + number % 50)
            assert is_on_disk(kept[0].common)
    finally:
        gc.set_threshold(*before)


@pytest.mark.rest("takes tenths of a second")
def test_threads_may_ask_while_others_map(tmp_path: Path, often: None) -> None:
    file, stop, errors = MappedFile(tmp_path), threading.Event(), list[Exception]()
    kept = file.allocate(SIZE, False)

    def ask() -> None:
        try:
            while not stop.is_set():
                assert is_on_disk(kept.common)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    held = []
    for number in range(600):
        held.append(file.allocate(4096, False))
        if number % 3 == 0:
            held.pop(0)
    stop.set()
    for thread in threads:
        thread.join()
    assert errors == []


@pytest.mark.long("a process that imports torch")
def test_tensors_may_be_read_until_the_interpreter_ends(tmp_path: Path) -> None:
    script = f"""
import atexit
from pathlib import Path
from sp_lightning.capabilities.disk.mapped_file import MappedFile
memory = MappedFile(Path({str(tmp_path)!r})).allocate(2**16, False)
memory.common.fill_(3)
kept = memory.common
del memory
import weakref
atexit.register(lambda: print(int(kept.sum())))
class Late:
    def __del__(self):
        print(int(self.kept.sum()))
late = Late()
late.kept = kept
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(3 * 2**16)] * 2
