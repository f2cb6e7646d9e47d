"""What cannot be read of checkpoints that all ranks have written is named, and nothing else is read in its place."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from sp_lightning.__main__ import main
from sp_lightning.ranks import checkpoint_folder, folder_reader
from sp_lightning.ranks.checkpoint_folder import write
from sp_lightning.ranks.folder_reader import INDEX, read
from sp_lightning.torch_compat import private as torch_private
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "LEAST", 1)


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    write({"a": torch.zeros(900)}, tmp_path / "a", {})
    file = next(each for each in (tmp_path / "a").iterdir() if each.suffix == ".distcp" and each.stat().st_size)
    os.truncate(file, 200)
    with pytest.raises(ValueError, match=rf"has a file '{file.name}' that ends too early \(200 bytes\)"):
        read(tmp_path / "a", True)
    file.unlink()
    with pytest.raises(ValueError, match=f"lacks its file '{file.name}'"):
        read(tmp_path / "a", True)


def test_a_part_of_a_file_is_read_as_a_file(tmp_path: Path) -> None:
    values = torch.arange(1000)
    with (tmp_path / "parts").open("w+b") as stream:
        stream.write(b"before")
        torch.save(values, stream)
        nbytes = stream.tell() - 6
        stream.write(b"behind")
        assert torch.equal(torch.load(torch_private.part_of_file(stream, 6, nbytes), weights_only=True), values)


def test_places_that_torch_notes_in_a_copy_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.10 and 2.11 leave them out of the metadata that a save returns, so that no folder could be written there."""
    finish = FileSystemWriter.finish
    monkeypatch.setattr(FileSystemWriter, "finish", lambda self, metadata, *rest: finish(self, copy(metadata), *rest))
    write({"a": torch.arange(900)}, tmp_path / "a", {})
    assert torch.equal(read(tmp_path / "a", True)["a"], torch.arange(900))


def test_parts_of_another_checkpoint_are_not_read(tmp_path: Path) -> None:
    """A copy over an older one was interrupted: its parts are there, and the index is the old one; or the index alone."""
    for number, name in enumerate("ab"):
        write({"a": torch.full((900,), float(number))}, tmp_path / name, {})
    for each in (tmp_path / "b").glob("*.distcp"):
        shutil.copy(each, tmp_path / "a")
    assert torch.equal(read(tmp_path / "a", True)["a"], torch.zeros(900))
    shutil.copy(tmp_path / "a" / INDEX, tmp_path / "b" / INDEX)
    with pytest.raises(ValueError, match=r"lacks its file '.*'\: the checkpoint is incomplete"):
        read(tmp_path / "b", True)


def test_a_reader_finds_one_checkpoint_or_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes the name after the index was read, and before the tensors are."""
    write({"a": torch.zeros(900), "number": 0}, tmp_path / "a", {})
    load = folder_reader._load_index

    def late(file: Path, weights_only: bool | None) -> Any:
        index = load(file, weights_only)
        if index["rest"]["number"] < 3:
            number = index["rest"]["number"] + 1
            write({"a": torch.full((900,), float(number)), "number": number}, tmp_path / "a", {})
        return index

    monkeypatch.setattr(folder_reader, "_load_index", late)
    found = read(tmp_path / "a", True)
    assert found["number"] == 3
    assert torch.equal(found["a"], torch.full((900,), 3.0))


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: bytes(content[: len(content) // 2]),
    "zeros at the end": lambda content: bytes(content[:-100]) + bytes(100),
    "zeros at the begin": lambda content: bytes(100) + bytes(content[100:]),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_index_is_named(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write({"a": torch.zeros(900), "text": "some " * 100}, tmp_path / "a", {})
    file = tmp_path / "a" / INDEX
    file.write_bytes(DAMAGES[damage](bytearray(file.read_bytes())))
    with pytest.raises(ValueError, match=r"index\.pt is damaged.*Take an earlier checkpoint"):
        read(tmp_path / "a", True)
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "a"), str(tmp_path / "b")])
    assert "index.pt is damaged" in capsys.readouterr().err


def test_a_damaged_part_is_named(tmp_path: Path) -> None:
    write({"a": torch.zeros(900)}, tmp_path / "a", {})
    file = next(each for each in (tmp_path / "a").iterdir() if each.suffix == ".distcp" and each.stat().st_size)
    file.write_bytes(bytes(100) + file.read_bytes()[100:])
    with pytest.raises(ValueError, match=f"{file.name} is damaged"):
        read(tmp_path / "a", True)


def test_an_index_of_another_version(tmp_path: Path) -> None:
    torch.save({"sp_lightning checkpoint": 2}, tmp_path / INDEX)
    with pytest.raises(ValueError, match="not an index of a checkpoint that this version reads"):
        read(tmp_path, True)


def test_code_is_not_run(tmp_path: Path) -> None:
    write({"a": Path("code")}, tmp_path / "a", {})
    with pytest.raises(Exception, match="Checkpoints are read with weights_only=True") as refused:
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a", weights_only=True)
    assert "weights_only=False" in "".join(refused.value.__notes__)
