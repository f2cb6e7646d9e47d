"""What cannot be read of checkpoints that all ranks have written is named, and nothing else is read in its place."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from sp_lightning.__main__ import main
from sp_lightning.ranks import checkpoint_folder
from sp_lightning.ranks.checkpoint_folder import REST, read, write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "MAPPED", 1)


def test_files_that_are_not_whole(tmp_path: Path) -> None:
    write({"a": torch.zeros(900)}, tmp_path / "a", {})
    file = file_of(tmp_path / "a", "a")
    os.truncate(file, 200)
    with pytest.raises(ValueError, match=rf"has a file '{file.name}' that ends too early \(200 bytes\)"):
        read(tmp_path / "a", True)
    file.unlink()
    with pytest.raises(ValueError, match=f"lacks its file '{file.name}'"):
        read(tmp_path / "a", True)


def test_a_reader_finds_one_checkpoint_or_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one takes the name after ``.metadata`` was read, and before the tensors are."""
    write({"a": torch.zeros(900), "number": 0}, tmp_path / "a", {})
    read_metadata = FileSystemReader.read_metadata
    numbers = iter(range(1, 4))

    def late(self: FileSystemReader) -> Any:
        found = read_metadata(self)
        if (number := next(numbers, None)) is not None:
            write({"a": torch.full((900,), float(number)), "number": number}, tmp_path / "a", {})
        return found

    monkeypatch.setattr(FileSystemReader, "read_metadata", late)
    found = read(tmp_path / "a", True)
    assert found["number"] == 3
    assert torch.equal(found["a"], torch.full((900,), 3.0))


DAMAGES: dict[str, Callable[[bytearray], bytes]] = {
    "empty": lambda content: b"",
    "cut": lambda content: bytes(content[: len(content) // 2]),
    "zeros at the end": lambda content: bytes(content[:-100]) + bytes(100),
}


def file_of(folder: Path, name: str) -> Path:
    """The file that has an entry."""
    places = FileSystemReader(folder).read_metadata().storage_data
    return folder / next(place.relative_path for index, place in places.items() if index.fqn == name)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", [".metadata", REST])
def test_a_damaged_file_is_named(name: str, damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write({"a": torch.zeros(900), "text": "some " * 100}, tmp_path / "a", {})
    file = tmp_path / "a" / name if name == ".metadata" else file_of(tmp_path / "a", name)
    file.write_bytes(DAMAGES[damage](bytearray(file.read_bytes())))
    with pytest.raises(ValueError, match=rf"{file.name}'? (is damaged|that ends too early).*Use an earlier"):
        read(tmp_path / "a", True)
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "a"), str(tmp_path / "b")])
    assert file.name in capsys.readouterr().err


def test_a_folder_without_metadata_is_incomplete(tmp_path: Path) -> None:
    write({"a": torch.zeros(900)}, tmp_path / "a", {})
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(
        ValueError, match=r"lacks its file '\.metadata': the checkpoint is incomplete\. Use an earlier one"
    ):
        read(tmp_path / "a", True)


def test_code_is_not_run(tmp_path: Path) -> None:
    write({"a": Path("code")}, tmp_path / "a", {})
    with pytest.raises(Exception, match="Checkpoints are read with weights_only=True") as refused:
        AtomicCheckpointIO().load_checkpoint(tmp_path / "a", weights_only=True)
    assert "weights_only=False" in "".join(refused.value.__notes__)
