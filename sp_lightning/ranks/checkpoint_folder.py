"""Checkpoints that all ranks write together, as a folder. torch.distributed.checkpoint splits the tensors between them.

Rank 0 decides the content. Other ranks write tensors that they have in common with rank 0: weights, except for what a rank has
written privately since the last update, and on the first rank of each node the optimizers' state. An index beside torch's files
has everything that is not a large tensor, and the places of the large tensors (:mod:`~sp_lightning.ranks.folder_reader`).
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
"""Minimum bytes of a tensor that torch.distributed.checkpoint writes. Smaller ones are in the index."""
THREADS = 4
"""Threads with which a rank writes, each to its own file."""

_WHOLE = {
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.int8, torch.int16, torch.int32, torch.int64
}  # fmt: skip

_TIMEOUT = timedelta(hours=6)
"""How long ranks wait for the slowest one to write. Writing a terabyte often takes longer than torch's half an hour."""


def common_tensors(module: nn.Module, optimizers: Sequence[Any]) -> dict[Keys, Tensor]:
    """Returns the tensors that are equal on several processes, by their keys in a checkpoint.

    These are the optimizers' state of this process, and the weights that it has not written privately since the last update.
    """
    weights = module.named_parameters(remove_duplicate=False)
    found: dict[Keys, Tensor] = {("state_dict", name): each for name, each in weights if not was_written(each)}
    return found | own_state(optimizers)


def own_state(optimizers: Sequence[Any]) -> dict[Keys, Tensor]:
    """Returns the optimizers' state of this process, by its keys in a checkpoint."""
    found: dict[Keys, Tensor] = {}
    for number, optimizer in enumerate(optimizers):
        for index, state in optimizer.state_dict()["state"].items():
            path = ("optimizer_states", number, "state", index)
            found.update(((*path, name), value) for name, value in state.items() if type(value) is Tensor)
    return found


def _take_out(value: Any, taken: dict[Keys, Tensor], path: Keys = ()) -> Any:
    """Returns a checkpoint without its large tensors, which are added to ``taken``."""
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
    """The content of a folder, on rank 0.

    Attributes:
        rest: the checkpoint without its large tensors.
        tensors: the large tensors, by their names in the folder.
        paths: the keys of each large tensor in the checkpoint.
        common: for each tensor that other ranks have as well, the keys by which they find it.
    """

    def __init__(self, checkpoint: Mapping[str, Any], shared: Mapping[Keys, Tensor]) -> None:
        taken: dict[Keys, Tensor] = {}
        self.rest = _take_out(dict(checkpoint), taken)
        self.tensors: dict[str, Tensor] = {}
        self.paths: dict[str, list[Keys]] = {}
        self.common: dict[str, Keys] = {}
        names: dict[tuple[Any, ...], str] = {}
        # Tensors that only rank 0 has come first: torch assigns each further tensor to the rank with the least to write.
        for path in sorted(taken, key=lambda path: path[0] != "optimizer_states"):
            tensor = taken[path]
            name = names.get(_memory(tensor)) or self._new_name(path)
            names[_memory(tensor)] = name
            self.tensors[name] = tensor
            self.paths.setdefault(name, []).append(path)
            if path in shared and _memory(shared[path]) == _memory(tensor):  # a hook may have replaced the tensor
                self.common.setdefault(name, path)

    def _new_name(self, path: Keys) -> str:
        """Returns the keys joined by dots, with a number if that name is taken."""
        name = ".".join(map(str, path))
        names = chain([name], (f"{name}#{number}" for number in count(1)))
        return next(name for name in names if name not in self.tensors)


# ---------------------------------------------------------------------- writing


def write(checkpoint: Mapping[str, Any], folder: Path, shared: Mapping[Keys, Tensor], *, alone: bool = False) -> None:
    """Writes a folder, or replaces it. Collective, unless ``alone``.

    The folder is complete or does not exist: it is written under another name, and then exchanged.

    Args:
        checkpoint: the checkpoint. Rank 0's is written.
        folder: its path, on a file system that all ranks see.
        shared: this rank's :func:`common_tensors`, which it may write for rank 0; empty if it may write none.
        alone: only this rank writes, which is rank 0.

    Raises:
        OSError: a rank could not write, or the folder exists with other files. A former checkpoint of this name is unchanged.
    """
    # Imported here, because most runs write no folder.
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
            with warnings.catch_warnings():  # torch warns that a single process saves
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                tensors = others if content is None else content.tensors
                save(tensors, storage_writer=writer, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            rank, cause = next(iter(error.failures.items()))
            raise not_written(cause[0], folder, f"rank {rank}: ") from error
        _on_first(group, folder, lambda: _finish(content, writer.stored, place, folder))


def _finish(content: _Content, stored: Mapping[str, Any], place: Path, folder: Path) -> None:
    lost = sorted(content.paths.keys() - stored.keys())
    if lost:  # torch waits for its threads, but does not check their errors
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
    """Raises an error for a folder that is not a checkpoint, or has other files in it."""
    if folder.is_symlink() or not folder.is_dir():
        return
    names = sorted(each.name for each in folder.iterdir())
    if is_folder(folder):
        names = [name for name in names if name not in (INDEX, ".metadata") and not name.endswith(".distcp")]
    if names:
        why = f"It is a folder with other files ({names[0]!r}), which the checkpoint would replace. Name a file in it"
        raise OSError(errno.EISDIR, why, str(folder))


def _exchange(new: Path, name: Path) -> None:
    """Exchanges a new folder with the one of this name, so that a checkpoint of this name exists at any time."""
    if not os.path.lexists(name):
        new.rename(name)
        return
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE of Linux 3.15
    rename = getattr(_libc(), "renameat2", None)
    if rename is None or rename(here, os.fsencode(new), here, os.fsencode(name), exchange):
        # If the file system has no exchange, no checkpoint of this name exists for a moment.
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
    """A context with a separate group of all ranks, because other threads may be in collectives. None for one process."""
    if alone or not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        yield None
        return
    group = dist.new_group(backend="gloo", timeout=_TIMEOUT)
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def _on_first(group: Any, folder: Path, work: Callable[[], tuple[Any, Any] | None]) -> tuple[Any, Any]:
    """Runs ``work`` on rank 0.

    Returns:
        The first result of ``work``, None on other ranks; and the second result, on all ranks.

    Raises:
        BaseException: the error of ``work``, on rank 0.
        OSError, RuntimeError: the same error on other ranks.
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
    """Raises an error if some ranks do not see the folder."""
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
