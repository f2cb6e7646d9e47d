"""Checkpoint folders of torch.distributed.checkpoint (DCP), which all ranks write together.

A folder has DCP's files only: ``.metadata`` and ``*.distcp``. Its entries:

- each tensor, by its keys in the checkpoint: ``state_dict.net.0.weight``, ``optimizer_states.0.state.3.exp_avg``;
- ``sp_lightning``: the whole checkpoint. Each tensor that has its own entry is replaced by a tensor on the meta device, which
  has no values.

DCP alone would lose the types of keys, empty dictionaries and the ``_metadata`` of a state dictionary.

The folder has the content of rank 0's checkpoint. Other ranks pass those tensors to DCP that they have in common with rank 0, and
DCP divides the writing of these tensors among the ranks.
"""

from __future__ import annotations

import errno
import mmap
import os
import pickle
import re
import shutil
import sys
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, Metadata, SavePlan, save
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.storage import WriteResult

from sp_lightning.model.wrapped import parts, rebuild
from sp_lightning.torch_compat.private import FakeTensorMode, part_of_file
from sp_lightning.trainer.part_files import cause_of, not_written, read_whole, sync_folder

REST = "sp_lightning"
"""The entry for everything that is not a tensor entry."""
MAPPED = 2**16
"""Minimum bytes of a tensor that is mapped when it is read. Smaller tensors are copied to memory."""
THREADS = 4
"""The number of threads with which a rank writes. Each thread writes its own file."""

_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the slowest rank to write. Writing a terabyte often takes longer than torch's default of 30 minutes."""

Keys = tuple[Any, ...]


def _change_tensors(value: Any, change: Callable[[Keys, Tensor], Tensor], keys: Keys = ()) -> Any:
    """Returns a copy of nested dictionaries and lists in which ``change`` replaces each tensor.

    In a wrapped tensor (quantised weights), ``change`` replaces each of its plain tensors. Parameters, and tensors that require
    gradients, stay as they are.

    Args:
        value: the dictionaries and lists.
        change: called with the keys of a tensor and the tensor. Returns the new tensor.
        keys: the keys that lead from the whole checkpoint to ``value``.
    """
    if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not value.requires_grad:
        return rebuild(value, (change((*keys, *name.split(".")[1:]), part) for name, part in parts("", value)))
    if type(value) in (dict, OrderedDict):
        copy = type(value)((key, _change_tensors(each, change, (*keys, key))) for key, each in value.items())
        getattr(copy, "__dict__", {}).update(getattr(value, "__dict__", {}))  # a state dictionary's ``_metadata``
        return copy
    if type(value) is list:
        return [_change_tensors(each, change, (*keys, index)) for index, each in enumerate(value)]
    return value


def _name(keys: Keys) -> str:
    """Returns the name of an entry, as DCP makes it from the keys of nested dictionaries."""
    return ".".join(map(str, keys))


# ---------------------------------------------------------------------- writing


def write(checkpoint: Mapping[str, Any], folder: Path, shared: Mapping[str, Tensor], *, alone: bool = False) -> None:
    """Writes a checkpoint folder, or replaces it. Collective, except with ``alone``.

    The files are written to a hidden folder beside ``folder``. When all files are complete, the hidden folder is renamed.

    Args:
        checkpoint: the checkpoint. Rank 0's is written.
        folder: the path of the folder, on a file system that all ranks see.
        shared: the tensors that this rank may have in common with rank 0, by the names of their entries.
        alone: True if only this rank writes, which is rank 0.

    Raises:
        OSError: a rank could not write, or the folder exists and has files that are not DCP's. A former checkpoint of this name
            is unchanged.
    """
    with _group(alone) as group:
        first = group is None or dist.get_rank() == 0
        entries, tensors = _entries(checkpoint) if first else ({}, {})
        # A hook may have replaced tensors in rank 0's checkpoint. Other ranks do not have these, so only rank 0 writes them.
        common = [name for name, each in shared.items() if name in tensors and _memory(each) == _memory(tensors[name])]
        agreed: list[Any] = [folder.with_name(f".{folder.name}.{uuid4().hex}.part"), common]
        if group is not None:
            dist.broadcast_object_list(agreed, 0, group=group)
        part, common = agreed
        if not first:
            entries = {name: shared[name].detach() for name in common if name in shared}
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "torch.distributed is disabled")  # a single process saves
                warnings.filterwarnings("ignore", "TypedStorage is deprecated")  # torch 2.10's own use
                save(entries, storage_writer=_Writer(part, folder), process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, (cause, _) = next(iter(error.failures.items()))
            raise not_written(cause, folder, f"rank {rank}: ") from error
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _entries(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Returns the entries of a folder, which DCP flattens, and the tensors among them by name."""
    # The optimizers' state comes first, because often only rank 0 has it. DCP goes through the tensors in this order, and assigns
    # a tensor that several ranks have to the rank that has the fewest bytes to write so far.
    nested: dict[Any, Any] = {"optimizer_states": {}}
    tensors: dict[str, Tensor] = {}

    def take(keys: Keys, tensor: Tensor) -> Tensor:
        name = _name(keys)
        if name in tensors or keys[0] == REST or not _is_plain(tensor):
            # Written with its values in the entry REST. A name may be in use: keys 0 and "0" give the same one.
            return tensor
        tensors[name] = tensor
        above = nested
        for key in keys[:-1]:
            above = above.setdefault(key, {})
        above[keys[-1]] = tensor
        return tensor.to("meta")

    rest = _change_tensors(dict(checkpoint), take)
    return {**nested, REST: (rest,)}, tensors  # a tuple, because DCP would flatten a dictionary


def _is_plain(tensor: Tensor) -> bool:
    """Returns True if DCP's format keeps a tensor without loss, and :func:`read` can map it. Such a tensor gets its own entry."""
    on_cpu = type(tensor) is Tensor and tensor.layout is torch.strided and tensor.device.type == "cpu"
    return on_cpu and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Files(FileSystem):
    """DCP's file system. It records the errors of all writing threads, because DCP checks only those of the first thread."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        handled = sys.exception()  # a checkpoint may be saved because of an error
        try:
            with super().create_stream(path, mode) as stream:
                yield stream
        except BaseException as error:
            self.errors.append(cause_of(error, handled))
            raise


class _Writer(FileSystemWriter):
    """DCP's writer. It raises the errors of all its threads, and renames the folder when all ranks have written.

    Args:
        part: the hidden folder to which all ranks write.
        folder: the path of the complete folder.
    """

    def __init__(self, part: Path, folder: Path) -> None:
        super().__init__(part, thread_count=THREADS)
        self.fs = self._files = _Files()
        self._part = part
        self._folder = folder

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on rank 0 before any rank writes. Removes hidden folders of killed writers.

        Raises:
            OSError: the folder has files that are not DCP's.
        """
        _refuse_other_files(self._folder)
        for left in _hidden(self._folder, "part"):
            if left != self._part:
                shutil.rmtree(left, ignore_errors=True)
        return super().prepare_global_plan(plans)

    def write_data(self, *arguments: Any, **options: Any) -> Any:
        try:
            return super().write_data(*arguments, **options)
        finally:
            if self._files.errors:
                raise self._files.errors[0]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Runs on rank 0 when all ranks have written. Writes the metadata, renames the folder, and removes its predecessor.

        Raises:
            FileNotFoundError: rank 0 does not see the files of another rank.
        """
        for rank, written in enumerate(results):
            names = {each.storage_data.relative_path for each in written}
            if not all((self._part / name).is_file() for name in names):
                raise FileNotFoundError(
                    errno.ENOENT,
                    f"files of rank {rank} are not in the folder. All ranks write into it, so it has to be on a file system of "
                    "all nodes, under one name",
                )
        super().finish(metadata, results)
        sync_folder(self._part)
        if os.path.lexists(self._folder):
            self._folder.rename(self._part.with_suffix(".old"))
        self._part.rename(self._folder)
        sync_folder(self._folder.parent)
        for left in _hidden(self._folder, "old"):
            if left.is_dir() and not left.is_symlink():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink()


def _hidden(folder: Path, suffix: str) -> list[Path]:
    """Returns the hidden folders beside ``folder`` that its writers use, or that killed writers have left.

    Args:
        folder: the path of a checkpoint folder.
        suffix: "part" for incomplete folders, "old" for predecessors of the checkpoint.
    """
    pattern = re.compile(rf"\.{re.escape(folder.name)}\.[0-9a-f]{{32}}\.{suffix}")
    return [each for each in folder.parent.iterdir() if pattern.fullmatch(each.name)]


def _refuse_other_files(folder: Path) -> None:
    """Raises an OSError if a folder has files that are not DCP's, because they would be deleted with the folder."""
    if folder.is_symlink() or not folder.is_dir():
        return
    others = sorted(each.name for each in folder.iterdir() if each.name != ".metadata" and each.suffix != ".distcp")
    if others:
        why = f"It is a folder with other files ({others[0]!r}), which the checkpoint would replace. Name a file in it"
        raise OSError(errno.EISDIR, why, str(folder))


@contextmanager
def _group(alone: bool) -> Iterator[Any]:
    """A context with a new process group of all ranks; None if only this process writes.

    The group is a separate one, because other threads may be in collectives of the other groups.
    """
    if alone or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


# ---------------------------------------------------------------------- reading


def read(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    """Returns the checkpoint in a folder. Its large tensors are mapped copy-on-write: their pages are read when they are used.

    Ranks of a node that read the same folder share the memory of these tensors.

    Args:
        folder: the path of the folder.
        weights_only: as in ``torch.load``, for the entry ``sp_lightning``. DCP's ``.metadata`` is a plain pickle in any case.

    Raises:
        pickle.UnpicklingError: the checkpoint has other objects than tensors and plain values.
        ValueError: a file is missing, damaged, or ends too early; or another program or version has written the folder.
    """
    return read_whole(folder, lambda: _read(folder, weights_only))


def _read(folder: Path, weights_only: bool | None) -> dict[str, Any]:
    places: dict[str, Any] = {}
    if any(folder.glob("*.distcp")):  # otherwise DCP has not written the folder, which is the error below
        _check_size(folder / ".metadata", 1)
        try:
            metadata = FileSystemReader(folder).read_metadata()
        except Exception as error:
            raise _damaged(folder / ".metadata") from error
        places = {index.fqn: place for index, place in metadata.storage_data.items()}
    if REST not in places:
        raise ValueError(
            f"{folder} was not written by this version of SuperpipelineStrategy(save_distributed_checkpoint=True). A folder of "
            "one of Lightning's sharded strategies is converted to a file by: "
            f"python -m lightning.pytorch.utilities.consolidate_checkpoint {folder}"
        )
    without_values = FakeTensorMode()
    maps: dict[Path, mmap.mmap] = {}

    def load(name: str, weights_only: bool | None = True) -> Any:
        place = places[name]
        file = folder / place.relative_path
        _check_size(file, place.offset + place.length)
        with file.open("rb") as stream:
            saved = part_of_file(stream, place.offset, place.length)
            try:
                if name == REST or place.length < MAPPED:
                    return torch.load(saved, map_location="cpu", weights_only=weights_only)
                with without_values:
                    fake = torch.load(saved, weights_only=True)
            except pickle.UnpicklingError:  # weights_only=True has found other objects: the file is not damaged
                raise
            except Exception as error:
                raise _damaged(file) from error
            if file not in maps:
                maps[file] = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        return _mapped(maps[file], fake, place.offset)

    def fill(keys: Keys, tensor: Tensor) -> Tensor:
        return load(_name(keys)) if tensor.is_meta and _name(keys) in places else tensor

    (rest,) = load(REST, weights_only)
    checkpoint: dict[str, Any] = _change_tensors(rest, fill)
    return checkpoint


def _mapped(mapped: mmap.mmap, fake: Tensor, offset: int) -> Tensor:
    """Returns a tensor in a mapped file.

    Args:
        mapped: the mapped file. ``torch.save`` has written the tensor to it.
        fake: the tensor without values.
        offset: the offset of the tensor's entry in the file, in bytes.
    """
    storage: Any = fake.untyped_storage()
    begin = offset + storage._checkpoint_offset  # torch documents it, although the name is private
    # DCP writes only the tensor's own elements of a storage, so `numel` is the number of elements in the file. The size of the
    # fake storage is not used, because torch 2.10 computes it wrong (a multiple).
    flat = torch.frombuffer(mapped, dtype=fake.dtype, count=fake.numel(), offset=begin)
    return flat.as_strided(tuple(fake.shape), fake.stride(), fake.storage_offset())


def _check_size(file: Path, nbytes: int) -> None:
    """Raises a ValueError if a file is missing, or has fewer than ``nbytes`` bytes."""
    size = file.stat().st_size if file.is_file() else -1
    if size < nbytes:
        why = (
            f"has a file {file.name!r} that ends too early ({size} bytes)"
            if size >= 0
            else f"lacks its file {file.name!r}"
        )
        raise ValueError(f"{file.parent} {why}: the checkpoint is incomplete. Use an earlier one.")


def _damaged(file: Path) -> ValueError:
    return ValueError(f"{file} is damaged. Use an earlier checkpoint.")
