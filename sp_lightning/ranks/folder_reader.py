"""Reads checkpoints that all ranks have written together: an index, and the tensors in files of torch.distributed.checkpoint.

The index is read with ``weights_only=True``; the tensors are mapped, so that the ranks of a node that resume share the memory in
which they are read. The names of the files have a number of their checkpoint's own in them, so that no index is ever read with
the tensors of another one.
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
"""Where a tensor is in a folder: the keys that lead to it in the checkpoint, several for tied weights; and which part of a file
``torch.save`` has written for it: the file, the offset, and the bytes."""

# ---------------------------------------------------------------------- what is written


def is_folder(path: Path) -> bool:
    """Whether this module has written a folder."""
    return (path / INDEX).is_file()


def read(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in a folder. Its large tensors are mapped: nothing is read, and what is written stays in memory.

    Args:
        folder: its name.
        weights_only: as in ``torch.load``, for what is no large tensor.

    Raises:
        pickle.UnpicklingError: it has other objects than tensors and plain values.
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
    """Whether a file that ``torch.save`` has written has the checksums that it had."""
    try:
        with zipfile.ZipFile(stream) as archive:
            return archive.testzip() is None
    except (zipfile.BadZipFile, OSError, EOFError):
        return False


def _damaged(file: Path) -> ValueError:
    return ValueError(f"{file} is damaged: it has not the bytes that were written. Take an earlier checkpoint.")


def _mapped(mapped: mmap.mmap, shape: Tensor, offset: int) -> Tensor:
    """A tensor over what ``torch.save`` has written at an offset. ``shape`` is as it was read, without values."""
    storage: Any = shape.untyped_storage()
    begin = storage._checkpoint_offset  # which torch documents, in spite of its name
    count = storage.nbytes() // shape.element_size()
    flat = torch.frombuffer(mapped, dtype=shape.dtype, count=count, offset=offset + begin)
    return flat.as_strided(tuple(shape.shape), shape.stride(), shape.storage_offset())
