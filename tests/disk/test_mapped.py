"""Weights whose memory is a mapping of a file that nobody has written are known, with their places."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sp_lightning.capabilities.disk.weights_in_files import Mappings

SIZE = 3 * 4096
"""Numbers in each of the tensors: twelve pages."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    save_file({name: torch.randn(SIZE) for name in "abc"}, tmp_path / "weights.safetensors")
    return tmp_path / "weights.safetensors"


def bytes_at(place: object, nbytes: int) -> Tensor:
    with open(place.path, "rb") as stream:  # type: ignore[attr-defined]
        stream.seek(place.offset)  # type: ignore[attr-defined]
        return torch.frombuffer(bytearray(stream.read(nbytes)), dtype=torch.float32)


def test_the_place_of_a_mapped_weight(file: Path) -> None:
    for tensor in load_file(file).values():
        place = Mappings().place(tensor)
        assert place is not None
        assert place.path == str(file)
        assert torch.equal(bytes_at(place, tensor.nbytes), tensor)


def test_a_checkpoint_that_is_mapped(tmp_path: Path) -> None:
    torch.save({"a": torch.randn(SIZE)}, tmp_path / "a.ckpt")
    tensor = torch.load(tmp_path / "a.ckpt", mmap=True)["a"]
    place = Mappings().place(tensor)
    assert place is not None
    assert torch.equal(bytes_at(place, tensor.nbytes), tensor)


def test_what_was_written_is_in_no_file(file: Path) -> None:
    """The neighbour on the same page is not known any more, either; those on other pages are."""
    tensors = load_file(file)
    tensors["b"][SIZE // 2] = 1.0
    places = {name: Mappings().place(tensor) for name, tensor in tensors.items()}
    assert places["b"] is None
    assert places["a"] is not None
    assert places["c"] is not None
    tensors["c"][0] = float(tensors["c"][0])  # the same value, but a page of its own
    assert Mappings().place(tensors["c"]) is None


def test_what_is_no_private_mapping(file: Path, tmp_path: Path) -> None:
    assert Mappings().place(torch.randn(SIZE)) is None
    assert Mappings().place(torch.randn(0)) is None
    (tmp_path / "raw").write_bytes(bytes(4 * SIZE))
    common = torch.from_file(str(tmp_path / "raw"), shared=True, size=SIZE)  # what is written there goes to the file
    assert Mappings().place(common) is None


@pytest.mark.parametrize(
    ("entry", "is_known"), [(0, True), (1 << 61, True), (1 << 63 | 1 << 61, True), (1 << 62, False), (1 << 63, False)]
)
def test_what_linux_says_of_a_page(file: Path, monkeypatch: pytest.MonkeyPatch, entry: int, is_known: bool) -> None:
    """A page that was written may be swapped out, or be in memory; entries as Linux's ``pagemap`` documents them."""
    tensor = load_file(file)["b"]
    pread = os.pread

    def with_entry(descriptor: int, nbytes: int, offset: int) -> bytes:
        return pread(descriptor, nbytes, offset)[:-8] + entry.to_bytes(8, "little")

    monkeypatch.setattr(os, "pread", with_entry)
    assert (Mappings().place(tensor) is not None) == is_known
    monkeypatch.setattr(os, "pread", lambda *args: pread(*args)[:-8])  # of the last page nothing is known
    assert Mappings().place(tensor) is None


def test_a_file_that_was_replaced(file: Path) -> None:
    tensor = load_file(file)["a"]
    save_file({"a": torch.zeros(SIZE)}, file.with_name("other"))
    os.replace(file.with_name("other"), file)
    assert Mappings().place(tensor) is None


def test_bytes_of_files_in_memory(file: Path) -> None:
    tensor = load_file(file)["b"]
    assert tensor.sum() != 0
    mappings = Mappings()
    assert mappings.place(tensor) is not None
    assert tensor.nbytes <= mappings.resident_bytes <= tensor.nbytes + 2 * 4096
