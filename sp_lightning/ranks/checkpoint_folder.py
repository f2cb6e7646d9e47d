"""Checkpoints that all ranks write together: a folder of torch.distributed.checkpoint, which splits the tensors between them.

Rank 0 decides what is in it. Other ranks write what they have exactly as rank 0 has it: weights, which a node's ranks share but
for what one of them has written since the last update, and on the first rank of each node the optimizers' state. Beside torch's
files there is an index, with everything that is no large tensor, and with the place of those that are
(:mod:`~sp_lightning.ranks.folder_reader` reads it).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from itertools import chain, count
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sp_lightning.device.pages import was_written
from sp_lightning.ranks.folder_reader import INDEX, MARK, Keys, StoredTensor, is_folder
from sp_lightning.trainer.part_files import aside, beside, cause_of, create_part, not_written, sync_folder

LEAST = 2**16
"""Bytes of tensors that torch.distributed.checkpoint writes. Smaller ones are in the index."""
THREADS = 4
"""Threads with which a rank writes, each to a file of its own."""

_WHOLE = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip

_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the slowest one to write. torch's half an hour is less than a terabyte takes on many systems."""


def common_tensors(module: nn.Module, optimizers: Sequence[Any]) -> dict[Keys, Tensor]:
    """What several processes have alike, by where a checkpoint has it.

    It is the optimizers' state of this process, and the weights but for those that it has written since the last update:
    they are its own until the next.
    """
    weights = module.named_parameters(remove_duplicate=False)
    found: dict[Keys, Tensor] = {("state_dict", name): each for name, each in weights if not was_written(each)}
    return found | own_state(optimizers)


def own_state(optimizers: Sequence[Any]) -> dict[Keys, Tensor]:
    """The optimizers' state of this process, by where a checkpoint has it."""
    found: dict[Keys, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            path = ("optimizer_states", number, "state", index)
            found.update(((*path, name), value) for name, value in state.items() if type(value) is Tensor)
    return found


def _take_out(value: Any, taken: dict[Keys, Tensor], path: Keys = ()) -> Any:
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
    # Tensors of other dtypes are in the index.
    numbers = tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype in _WHOLE
    return plain and numbers and tensor.nbytes >= LEAST and not tensor.is_conj() and not tensor.is_neg()


def _memory(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


class _Content:
    """What rank 0 writes.

    Attributes:
        rest: the checkpoint without its large tensors.
        tensors: these, by their names in the folder.
        paths: where each is in the checkpoint.
        common: by the names of those that other ranks have, too, how they find them.
    """

    def __init__(self, checkpoint: Mapping[str, Any], shared: Mapping[Keys, Tensor]) -> None:
        taken: dict[Keys, Tensor] = {}
        self.rest = _take_out(dict(checkpoint), taken)
        self.tensors: dict[str, Tensor] = {}
        self.paths: dict[str, list[Keys]] = {}
        self.common: dict[str, Keys] = {}
        names: dict[tuple[Any, ...], str] = {}
        # What rank 0 alone has comes first, because torch gives each of the others to who has least to write so far.
        for path in sorted(taken, key=lambda path: path[0] != "optimizer_states"):
            tensor = taken[path]
            name = names.get(_memory(tensor)) or self._new_name(path)
            names[_memory(tensor)] = name
            self.tensors[name] = tensor
            self.paths.setdefault(name, []).append(path)
            if path in shared and _memory(shared[path]) == _memory(tensor):  # a hook may have put something else there
                self.common.setdefault(name, path)

    def _new_name(self, path: Keys) -> str:
        """A path with dots; with a number if another path reads like it."""
        name = ".".join(map(str, path))
        names = chain([name], (f"{name}#{number}" for number in count(1)))
        return next(name for name in names if name not in self.tensors)


# ---------------------------------------------------------------------- writing


def write(checkpoint: Mapping[str, Any], folder: Path, shared: Mapping[Keys, Tensor], *, alone: bool = False) -> None:
    """Writes a folder, or replaces it. Collective, but for who writes alone.

    It is there as a whole or not at all: it is written beside its place, and exchanged with what is there.

    Args:
        checkpoint: rank 0's is written.
        folder: its name, on a file system that all ranks see.
        shared: this rank's tensors that rank 0's checkpoint has, too (:func:`common_tensors`), if this rank may write for
            rank 0; else nothing.
        alone: this rank is rank 0, and writes all.

    Raises:
        OSError: some rank could not write, or there is a folder of this name with other files; what had this name is as it was.
    """
    # Who writes no folder need not import this.
    from torch.distributed.checkpoint import save
    from torch.distributed.checkpoint.api import CheckpointException

    from sp_lightning.ranks.folder_writer import Writer

    with _group(alone) as group, ExitStack() as stack:

        def begin() -> tuple[_Content, tuple[Path, dict[str, Keys]]]:
            content = _Content(checkpoint, shared)
            _refuse_others(folder)
            folder.parent.mkdir(parents=True, exist_ok=True)
            part, stream = create_part(folder)
            stack.enter_context(stream)  # it is locked until it is closed
            stack.callback(_remove, part)
            stack.callback(_remove, beside(part))
            beside(part).mkdir()
            return content, (beside(part), content.common)

        content, (place, common) = _on_first(group, folder, begin)
        _all_see(group, place, folder)
        others = {name: shared[path].detach() for name, path in common.items() if path in shared}
        writer = Writer(place, uuid4().hex, THREADS)
        try:
            with warnings.catch_warnings():  # it says that it saves in a single process
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                tensors = others if content is None else content.tensors
                save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, cause = next(iter(error.failures.items()))
            raise not_written(cause[0], folder, f"rank {rank}: ") from error
        _on_first(group, folder, lambda: _finish(content, writer.stored, place, folder))


def _finish(content: _Content, stored: Mapping[str, Any], place: Path, folder: Path) -> None:
    lost = sorted(content.paths.keys() - stored.keys())
    if lost:  # torch waits for its threads, and does not ask how they have ended
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        why = "threads of torch.distributed.checkpoint have failed, as they say above, and have not written"
        raise OSError(errno.EIO, f"{why} {lost[0]!r}{more}")
    tensors: list[StoredTensor] = [
        (paths, stored[name].relative_path, stored[name].offset, stored[name].length)
        for name, paths in content.paths.items()
    ]
    with (place / INDEX).open("xb") as stream:
        try:
            torch.save({MARK: 1, "tensors": tensors, "rest": content.rest}, stream)
        except RuntimeError as error:
            raise cause_of(error) from None
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(place)
    _exchange(place, folder)
    sync_folder(folder.parent)


def _refuse_others(folder: Path) -> None:
    """Refuses to replace a folder that is no checkpoint, or has other files in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir())
    if is_folder(folder):
        names = [name for name in names if name not in (INDEX, ".metadata") and not name.endswith(".distcp")]
    if names:
        why = f"It is a folder with other files ({names[0]!r}), which the checkpoint would replace. Name a file in it"
        raise OSError(errno.EISDIR, why, str(folder))


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
def _group(alone: bool) -> Iterator[Any]:
    """A group of all ranks, of its own: other threads may be in the midst of other collectives. None for one process."""
    if alone or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _on_first(group: Any, folder: Path, work: Callable[[], tuple[Any, Any] | None]) -> tuple[Any, Any]:
    """Has rank 0 work.

    Returns:
        The first part of what the work returns, on rank 0, else None; and on all ranks the second part.

    Raises:
        BaseException: the work's error, on rank 0.
        OSError, RuntimeError: the same on the others.
    """
    result: Any = None
    found: list[Any] = [None, None]
    error: BaseException | None = None
    if group is None or dist.get_rank() == 0:
        try:
            result, found[0] = work() or (None, None)
        except BaseException as mine:
            error = mine
            found[1] = RuntimeError(f"The checkpoint could not be written: rank 0: {type(mine).__name__}: {mine}")
            if isinstance(mine, OSError):
                found[1] = error = not_written(mine, folder)
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
