"""Checkpoints that all ranks write together: a folder of torch.distributed.checkpoint, which splits the tensors between them.

Rank 0 decides what is in it. Other ranks write what is theirs as well as rank 0's: weights, which a node's ranks share, and on
the first rank of each node the optimizers' state. Beside torch's files there is an index, with everything that is no large
tensor, and with the place of those that are. It is read with ``weights_only=True``; the tensors are mapped, so that the ranks of
a node that resume share the memory in which they are read.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from io import RawIOBase
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.device.torch_private import FakeTensorMode
from sp_lightning.trainer.part_files import aside, beside, create_part, sync_folder

INDEX = "index.pt"
LEAST = 2**16
"""Bytes of tensors that torch.distributed.checkpoint writes. Smaller ones are in the index."""
THREADS = 4
"""Threads with which a rank writes, each to a file of its own."""

_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the slowest one to write. torch's half an hour is less than a terabyte takes on many systems."""

_Path = tuple[str | int, ...]
_MARK = "sp_lightning checkpoint"


class Stored(NamedTuple):
    """Where a tensor is in a folder.

    Attributes:
        paths: the keys that lead to it in the checkpoint; tied weights have several.
        file, offset, nbytes: the part of a file that ``torch.save`` has written for it.
    """

    paths: list[_Path]
    file: str
    offset: int
    nbytes: int


# ---------------------------------------------------------------------- what is written


def own_tensors(module: nn.Module, optimizers: Sequence[Any]) -> dict[_Path, Tensor]:
    """The weights and the optimizers' state of this process, by where a checkpoint has them."""
    weights = module.named_parameters(remove_duplicate=False)
    return {("state_dict", name): parameter for name, parameter in weights} | own_state(optimizers)


def own_state(optimizers: Sequence[Any]) -> dict[_Path, Tensor]:
    """The optimizers' state of this process, by where a checkpoint has it."""
    found: dict[_Path, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            path = ("optimizer_states", number, "state", index)
            found.update(((*path, name), value) for name, value in state.items() if type(value) is Tensor)
    return found


def _take_out(value: Any, taken: dict[_Path, Tensor], path: _Path = ()) -> Any:
    """Returns a checkpoint without its large tensors, which it puts into ``taken``."""
    if type(value) is Tensor:
        if not _is_large(value):
            return value
        taken[path] = value
        return None
    if type(value) in (dict, OrderedDict) and all(type(key) in (str, int) for key in value):
        rest = type(value)((key, _take_out(each, taken, (*path, key))) for key, each in value.items())
        getattr(rest, "__dict__", {}).update(getattr(value, "__dict__", {}))  # a state dictionary's ``_metadata``
        return rest
    if type(value) is list:
        return [_take_out(each, taken, (*path, index)) for index, each in enumerate(value)]
    return value


def _is_large(tensor: Tensor) -> bool:
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.requires_grad
    return plain and tensor.nbytes >= LEAST and not tensor.is_conj() and not tensor.is_neg()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


class _Content:
    """What rank 0 writes.

    Attributes:
        rest: the checkpoint without its large tensors.
        tensors: these, by their names in the folder.
        paths: where each is in the checkpoint.
        common: by the names of those that other ranks have, too, how they find them.
    """

    def __init__(self, checkpoint: Mapping[str, Any], own: Mapping[_Path, Tensor]) -> None:
        taken: dict[_Path, Tensor] = {}
        self.rest = _take_out(dict(checkpoint), taken)
        self.tensors: dict[str, Tensor] = {}
        self.paths: dict[str, list[_Path]] = {}
        self.common: dict[str, _Path] = {}
        names: dict[tuple[Any, ...], str] = {}
        # What rank 0 alone has comes first, because torch gives each of the others to who has least to write so far.
        for path in sorted(taken, key=lambda path: path[0] != "optimizer_states"):
            tensor = taken[path]
            name = names.get(_memory(tensor)) or self._new_name(path)
            names[_memory(tensor)] = name
            self.tensors[name] = tensor
            self.paths.setdefault(name, []).append(path)
            if path in own and _memory(own[path]) == _memory(tensor):  # a hook may have put something else there
                self.common.setdefault(name, path)

    def _new_name(self, path: _Path) -> str:
        """A path with dots; with a number if another path reads like it."""
        name = _name(path)
        return name if name not in self.tensors else f"{name}#{len(self.tensors)}"


# ---------------------------------------------------------------------- writing


def write(checkpoint: Mapping[str, Any], folder: Path, own: Mapping[_Path, Tensor]) -> None:
    """Writes a folder, or replaces it. Collective.

    It is there as a whole or not at all: it is written beside its place, and exchanged with what is there.

    Args:
        checkpoint: rank 0's is written.
        folder: its name, on a file system that all ranks see.
        own: as :func:`own_tensors` returns it, if this rank may write for rank 0; else nothing.

    Raises:
        OSError: some rank could not write; what had this name is as it was.
    """
    # Who writes no folder need not import this.
    from torch.distributed.checkpoint import FileSystemWriter, save
    from torch.distributed.checkpoint.api import CheckpointException

    with _group() as group, ExitStack() as stack:

        def begin() -> tuple[_Content, Path]:
            content = _Content(checkpoint, own)
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, stream = create_part(folder)
            stack.enter_context(stream)  # it is locked until it is closed
            stack.callback(_remove, part)
            stack.callback(_remove, beside(part))
            beside(part).mkdir()
            return content, beside(part)

        content, (place, common) = _on_first(group, folder, begin, lambda begun: (begun[1], begun[0].common))
        _all_see(group, place, folder)
        others = {name: own[path].detach() for name, path in common.items() if path in own}
        writer = FileSystemWriter(place, thread_count=THREADS)
        try:
            with warnings.catch_warnings():  # it says that it saves in a single process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                tensors = others if content is None else content[0].tensors
                metadata = save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, cause = next(iter(error.failures.items()))
            raise _not_written(cause[0], folder, f"rank {rank}: ") from error
        _on_first(group, folder, lambda: _finish(content[0], metadata, place, folder), lambda _: None)


def _finish(content: _Content, metadata: Any, place: Path, folder: Path) -> None:
    stored = {index.fqn: each for index, each in metadata.storage_data.items()}
    lost = sorted(content.paths.keys() - stored.keys())
    if lost:  # torch waits for its threads, and does not ask how they have ended
        what = (
            f"threads of torch.distributed.checkpoint have failed, as they say above, and have not written {lost[0]!r}"
        )
        raise OSError(errno.EIO, f"{what}{f' and {len(lost) - 1} more' if len(lost) > 1 else ''}")
    tensors = [
        tuple(Stored(paths, stored[name].relative_path, stored[name].offset, stored[name].length))
        for name, paths in content.paths.items()
    ]
    with (place / INDEX).open("xb") as stream:
        torch.save({_MARK: 1, "tensors": tensors, "rest": content.rest}, stream)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(place)
    _exchange(place, folder)
    sync_folder(folder.parent)


def _exchange(new: Path, name: Path) -> None:
    """Gives a name to a folder. What had the name is where the folder was, so that a file of this name is there at any time."""
    if not os.path.lexists(name):
        new.rename(name)
        return
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux 3.15
    rename = getattr(_libc(), "renameat2", None)
    if rename is None or rename(here, os.fsencode(new), here, os.fsencode(name), exchange):
        # Where the file system cannot do that, for a moment there is nothing of this name.
        old = aside(new)
        name.rename(old)
        new.rename(name)
        old.rename(new)


def _libc() -> Any:
    return ctypes.CDLL(None) if os.name == "posix" else None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


# ---------------------------------------------------------------------- together


@contextmanager
def _group() -> Iterator[Any]:
    """A group of all ranks, of its own: other threads may be in the midst of other collectives. None for one process."""
    if not _several():
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _first() -> bool:
    return not _several() or dist.get_rank() == 0


def _on_first(group: Any, folder: Path, work: Callable[[], Any], told: Callable[[Any], Any]) -> tuple[Any, Any]:
    """Has rank 0 work.

    Returns:
        What the work returns, on rank 0, else None; and on all ranks what is told of it.

    Raises:
        BaseException: the work's error, on rank 0.
        OSError, RuntimeError: the same on the others.
    """
    result: Any = None
    found: list[Any] = [None, None]
    error: BaseException | None = None
    if _first():
        try:
            result = work()
            found = [told(result), None]
        except BaseException as mine:
            error = mine
            found[1] = RuntimeError(f"The checkpoint could not be written: rank 0: {type(mine).__name__}: {mine}")
            if isinstance(mine, OSError):
                found[1] = error = _not_written(mine, folder)
    if group is not None:
        dist.broadcast_object_list(found, 0, group=group)
    if error is not None or found[1] is not None:
        raise error or found[1]
    return result, found[0]


def _all_see(group: Any, place: Path, folder: Path) -> None:
    """Refuses a folder that some ranks do not see."""
    if group is None:
        return
    seen: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(seen, place.is_dir(), group=group)
    blind = [f"rank {rank}" for rank, each in enumerate(seen) if not each]
    if blind:
        raise FileNotFoundError(
            errno.ENOENT,
            f"{', '.join(blind)} {'does' if len(blind) == 1 else 'do'} not see the folder that rank 0 has made. All ranks write "
            "into it, so it has to be on a file system of all nodes, under one name",
            str(folder),
        )


def _not_written(error: BaseException, folder: Path, who: str = "") -> BaseException:
    if not isinstance(error, OSError):
        return error
    kept = "; the previous one of this name is as it was" if folder.exists() else ""
    return OSError(
        error.errno, f"The checkpoint could not be written: {who}{error.strerror or error}{kept}", str(folder)
    )


# ---------------------------------------------------------------------- reading


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
        ValueError: a file is missing, or ends too early, or another version has written the folder.
    """
    index = torch.load(folder / INDEX, map_location="cpu", weights_only=weights_only)
    if not isinstance(index, dict) or index.get(_MARK) != 1:
        raise ValueError(f"{folder / INDEX} is no index of a checkpoint that this version reads.")
    checkpoint: dict[str, Any] = index["rest"]
    without_values = FakeTensorMode()
    files: dict[str, tuple[BinaryIO, mmap.mmap]] = {}
    with ExitStack() as stack:
        for paths, name, offset, nbytes in (Stored(*each) for each in index["tensors"]):
            size = (folder / name).stat().st_size if (folder / name).is_file() else -1
            if offset + nbytes > size:
                why = (
                    f"lacks its file {name!r}"
                    if size < 0
                    else f"has a file {name!r} that ends too early ({size} bytes)"
                )
                raise ValueError(f"{folder} {why}: it is no whole checkpoint. Take an earlier one.")
            if name not in files:
                opened = stack.enter_context((folder / name).open("rb"))
                files[name] = opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
            with without_values:
                part: Any = _Part(files[name][0], offset, nbytes)
                shape = torch.load(part, weights_only=True)
            tensor = _mapped(files[name][1], shape, offset)
            for *above, last in paths:
                where: Any = checkpoint
                for key in above:
                    where = where[key]
                where[last] = tensor
    return checkpoint


def _mapped(mapped: mmap.mmap, shape: Tensor, offset: int) -> Tensor:
    """A tensor over what ``torch.save`` has written at an offset. ``shape`` is as it was read, without values."""
    begin: Any = shape.untyped_storage()._checkpoint_offset  # which torch documents, in spite of its name
    flat = torch.frombuffer(mapped, dtype=shape.dtype, count=shape.numel(), offset=offset + begin)
    return flat.as_strided(tuple(shape.shape), shape.stride())


class _Part(RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, stream: BinaryIO, offset: int, nbytes: int) -> None:
        self._stream = stream
        self._offset = offset
        self._nbytes = nbytes
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, position: int, whence: int = os.SEEK_SET) -> int:
        self._at = position + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._nbytes}[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._stream.seek(self._offset + self._at)
        found = self._stream.read(min(len(buffer), max(0, self._nbytes - self._at)))
        buffer[: len(found)] = found
        self._at += len(found)
        return len(found)
