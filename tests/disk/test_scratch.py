"""Scratch files: bytes come back as they were, on any file system, and nothing is left."""

from __future__ import annotations

import errno
import fcntl
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sp_lightning.capabilities.disk import direct_file
from sp_lightning.capabilities.disk.direct_file import ScratchFile, aligned_memory, file_system

PAGES = 3 * 4096


def numbers(nbytes: int) -> torch.Tensor:
    memory = aligned_memory(nbytes)
    return memory.copy_(torch.randint(0, 256, (memory.nbytes,), dtype=torch.uint8))


def comes_back(file: ScratchFile) -> bool:
    """Whether what is written is read."""
    extent, value = file.allocate(PAGES), numbers(PAGES)
    file.begin_write(extent.offset, value).wait()
    file.begin_read(extent.offset, into := aligned_memory(PAGES)).wait()
    return torch.equal(into, value)


def refused(monkeypatch: pytest.MonkeyPatch, flag: int, code: int) -> None:
    """Files cannot be opened with a flag."""
    theirs = os.open

    def opens(path: Any, flags: int, *more: Any) -> int:
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return theirs(path, flags, *more)

    monkeypatch.setattr(os, "open", opens)


def no_direct_io(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system refuses it."""

    def refuses(descriptor: int, command: int, flags: int = 0) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return 0

    monkeypatch.setattr(fcntl, "fcntl", refuses)


@pytest.fixture(params=["as it is", "no direct I/O", "no files without names", "direct I/O in name only"])
def file(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[ScratchFile]:
    if request.param == "no direct I/O":
        no_direct_io(monkeypatch)
    elif request.param == "no files without names":
        refused(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    elif request.param == "direct I/O in name only":
        monkeypatch.setattr(ScratchFile, "_works", lambda _: False)
    made = ScratchFile(tmp_path)
    assert list(tmp_path.iterdir()) == []
    if request.param.endswith(("I/O", "only")):
        assert not made.direct
        assert not fcntl.fcntl(made.descriptor, fcntl.F_GETFL) & os.O_DIRECT
    yield made
    assert list(tmp_path.iterdir()) == []


def test_bytes_come_back(file: ScratchFile) -> None:
    extents = [file.allocate(PAGES), file.allocate(direct_file.PIECE + 4096)]
    values = [numbers(extent.nbytes) for extent in extents]
    for extent, value in zip(extents, values, strict=True):
        file.begin_write(extent.offset, value).wait()
    for extent, value in zip(extents, values, strict=True):
        file.begin_read(extent.offset, into := aligned_memory(extent.nbytes)).wait()
        assert torch.equal(into, value)
    assert file.read_bytes == file.written_bytes == sum(extent.nbytes for extent in extents)


def test_extents_that_nobody_has_are_used_again(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    first, second = file.allocate(PAGES), file.allocate(PAGES)
    assert second.offset == first.offset + PAGES
    offset = first.offset
    del first
    gc.collect()
    assert file.allocate(PAGES - 1).offset == offset


def test_room_is_taken_at_once(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    file.reserve(2**20)
    assert os.fstat(file.descriptor).st_blocks * 512 >= 2**20


def test_short_reads_and_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, pwritev = os.preadv, os.pwritev
    monkeypatch.setattr(os, "preadv", lambda d, b, at: preadv(d, [b[0][:4096]], at))
    monkeypatch.setattr(os, "pwritev", lambda d, b, at: pwritev(d, [b[0][:4096]], at))
    assert comes_back(ScratchFile(tmp_path))


def test_a_file_that_ends_too_early(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path)
    with pytest.raises(OSError, match="ends 4096 bytes too early"):
        file.begin_read(2**30, aligned_memory(4096)).wait()


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ScratchFile(tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    needed = r"1\.0 GiB of scratch space are needed for optimizer state, and the disk has .* for it"
    with pytest.raises(OSError, match=needed) as caught:
        file.reserve(2**30)
    assert caught.value.errno == errno.ENOSPC


def test_what_a_full_disk_has_given_is_given_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise it would not count as free, and other programs would lack it."""

    def gives_half(descriptor: int, offset: int, nbytes: int) -> None:
        os.ftruncate(descriptor, offset + nbytes // 2)
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ScratchFile(tmp_path)
    file.allocate(2**20)
    monkeypatch.setattr(os, "posix_fallocate", gives_half)
    with pytest.raises(OSError, match=r"1\.0 GiB of scratch space are needed"):
        file.reserve(2**30 - 2**20)
    assert os.fstat(file.descriptor).st_size == 2**20


def test_a_file_system_that_cannot_promise_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    assert comes_back(ScratchFile(tmp_path))


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder that disk= names .* Create it \(mkdir -p\), or name another"):
        ScratchFile(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"folder that disk= names \(Not a directory\)\. Name another folder"):
        ScratchFile(tmp_path / "file")


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, os.O_RDWR, errno.EACCES)
    with pytest.raises(
        PermissionError, match=r"folder that disk= names .* See that you may write there, or name another"
    ):
        ScratchFile(tmp_path)


def test_the_kind_of_a_file_system() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("needs a tmpfs")
    assert file_system(shared) == "tmpfs"
    assert file_system(Path("/proc")) == "proc"
    assert file_system(Path("/not there")) == ""
