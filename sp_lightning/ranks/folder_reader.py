"""Reads checkpoint folders that all ranks have written: an index, and tensors in files of torch.distributed.checkpoint.

The index is read with ``weights_only=True``. The tensors are mapped, so ranks of a node share their memory. Names of files have a
number that is unique to the checkpoint, so an index is never read with the tensors of another checkpoint.
"""

from __future__ import annotations

import mmap
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from sp_lightning.torch_compat.private import FakeTensorMode, part_of_file
from sp_lightning.trainer.part_files import read_whole

INDEX = "index.pt"
MARK = "sp_lightning checkpoint"

Keys = tuple[str | int, ...]


StoredTensor = tuple[list[Keys], str, int, int]
"""The place of a tensor in a folder: its keys in the checkpoint (several for tied weights), the file, and the offset and bytes of
what ``torch.save`` has written to it."""


def is_folder(path: Path) -> bool:
    """Returns True if a folder is a checkpoint of this format."""
    return (path / INDEX).is_file()


def read(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in a folder. Its large tensors are mapped copy-on-write: they are read when they are used.

    Args:
        folder: its path.
        weights_only: as in ``torch.load``, for the index.

    Raises:
        pickle.UnpicklingError: the index has other objects than tensors and plain values.
        ValueError: a file is missing, damaged, or ends too early, or another program or version has written the folder.
    """
    if not is_folder(folder):
        raise ValueError(
            f"{folder} is a folder that SuperpipelineStrategy(save_distributed_checkpoint=True) has not written. One of "
            "Lightning's sharded strategies becomes a file by: "
            f"python -m lightning.pytorch.utilities.consolidate_checkpoint {folder}"
        )
    return read_whole(folder, lambda: _read(folder, weights_only))


def _read(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    index = _load_index(folder / INDEX, weights_only)
    if not isinstance(index, dict) or index.get(MARK) != 1:
        raise ValueError(f"{folder / INDEX} is not an index of a checkpoint that this version reads.")
    checkpoint: dict[str, Any] = index["rest"]
    without_values = FakeTensorMode()
    files: dict[str, mmap.mmap] = {}
    for paths, name, offset, nbytes in index["tensors"]:
        size = (folder / name).stat().st_size if (folder / name).is_file() else -1
        if offset + nbytes > size:
            why = f"has a file {name!r} that ends too early ({size} bytes)" if size >= 0 else f"lacks its file {name!r}"
            raise ValueError(f"{folder} {why}: the checkpoint is incomplete. Use an earlier one.")
        with (folder / name).open("rb") as stream:
            if name not in files:
                files[name] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            try:
                with without_values:
                    shape = torch.load(part_of_file(stream, offset, nbytes), weights_only=True)
            except Exception as error:
                raise _damaged(folder / name) from error
        tensor = _mapped(files[name], shape, offset)
        for *above, last in paths:
            where: Any = checkpoint
            for key in above:
                where = where[key]
            where[last] = tensor
    return checkpoint


def _load_index(file: Path, weights_only: bool | None) -> Any:
    with file.open("rb") as stream:
        try:
            return torch.load(stream, map_location="cpu", weights_only=weights_only)
        except Exception as error:
            if _is_whole(stream):
                raise
            raise _damaged(file) from error


def _is_whole(stream: BinaryIO) -> bool:
    """Returns True if the checksums of a file of ``torch.save`` are right."""
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _damaged(file: Path) -> ValueError:
    return ValueError(f"{file} is damaged: it has not the bytes that were written. Take an earlier checkpoint.")


def _mapped(mapped: mmap.mmap, shape: Tensor, offset: int) -> Tensor:
    """Returns a tensor over mapped memory that ``torch.save`` has written. ``shape`` is the tensor without values."""
    storage: Any = shape.untyped_storage()
    begin = storage._checkpoint_offset  # torch documents it, although the name is private
    count = storage.nbytes() // shape.element_size()
    flat = torch.frombuffer(mapped, dtype=shape.dtype, count=count, offset=offset + begin)
    return flat.as_strided(tuple(shape.shape), shape.stride(), shape.storage_offset())
