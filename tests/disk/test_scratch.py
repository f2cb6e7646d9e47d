"""Scratch files: their parts, their room on the disk, and what is refused; nothing is left."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from typing import Any

import pytest

from sp_lightning.capabilities.disk.scratch_file import ScratchFile, file_system

PAGES = 3 * 4096


def refused(monkeypatch: pytest.MonkeyPatch, flag: int, code: int) -> None:
    """Files cannot be opened with a flag."""
    theirs = os.open

    def opens(path: Any, flags: int, *more: Any) -> int:
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return theirs(path, flags, *more)

    monkeypatch.setattr(os, "open", opens)


def test_a_file_system_without_files_without_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    file = ScratchFile(tmp_path, "state")
    assert list(tmp_path.iterdir()) == []
    assert os.pwrite(file.descriptor, b"bytes", file.allocate(PAGES).offset) == 5


def test_extents_that_nobody_has_are_used_again(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, "optimizer state")
    first, second = file.allocate(PAGES), file.allocate(PAGES)
    assert second.offset == first.offset + PAGES
    offset = first.offset
    del first
    gc.collect()
    assert file.allocate(PAGES - 1).offset == offset


def test_room_is_taken_at_once(tmp_path: Path) -> None:
    file = ScratchFile(tmp_path, "optimizer state")
    file.reserve(2**20)
    assert os.fstat(file.descriptor).st_blocks * 512 >= 2**20


def test_a_disk_without_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    file = ScratchFile(tmp_path, "optimizer state")
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

    file = ScratchFile(tmp_path, "optimizer state")
    file.allocate(2**20)
    monkeypatch.setattr(os, "posix_fallocate", gives_half)
    with pytest.raises(OSError, match=r"1\.0 GiB of scratch space are needed"):
        file.reserve(2**30 - 2**20)
    assert os.fstat(file.descriptor).st_size == 2**20


def test_a_file_system_that_cannot_reserve_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: Any) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuses)
    with pytest.raises(OSError, match=r"the file system cannot reserve space \(Operation not supported\)"):
        ScratchFile(tmp_path, "state").reserve(2**20)


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"folder that disk= names .* Create it \(mkdir -p\), or name another"):
        ScratchFile(tmp_path / "none", "state")
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"folder that disk= names \(Not a directory\)\. Name another folder"):
        ScratchFile(tmp_path / "file", "state")


def test_a_folder_that_may_not_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused(monkeypatch, os.O_RDWR, errno.EACCES)
    with pytest.raises(
        PermissionError, match=r"folder that disk= names .* See that you may write there, or name another"
    ):
        ScratchFile(tmp_path, "optimizer state")


def test_the_kind_of_a_file_system() -> None:
    shared = Path("/dev/shm")
    if not shared.is_dir():
        pytest.skip("needs a tmpfs")
    assert file_system(shared) == "tmpfs"
    assert file_system(Path("/proc")) == "proc"
    assert file_system(Path("/not there")) == ""
