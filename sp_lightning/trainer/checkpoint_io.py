"""Checkpoint files: written aside and exchanged whole, read through a map of the file.

Lightning's own way writes the checkpoint to memory first, a second copy of model and optimizer state, and reads all of a
file to memory. A model that fills the host leaves room for neither.
"""

from __future__ import annotations

import os
import pickle
import sys
import tarfile
import zipfile
from contextlib import suppress
from hashlib import blake2s
from pathlib import Path
from typing import IO, Any, BinaryIO
from uuid import uuid4

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from sp_lightning.device.torch_private import loads_in_its_own_way, tree_map_only
from sp_lightning.trainer.compat import base_of, is_a, trainer_of, wraps_another

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

BESIDE_AVERAGES = "current_model_state"
"""Where Lightning's ``WeightAveraging`` keeps the model's own state."""
# The weights are copied out of the file by whoever restores them; everything else, optimizer state too, is kept as it is.
_STAY_IN_THE_FILE = frozenset({"state_dict", BESIDE_AVERAGES})


class AtomicCheckpointIO(TorchCheckpointIO):
    """Lightning's ``TorchCheckpointIO``, its files and errors, without copies in host memory. The strategy's default.

    A file is there as a whole or not at all, whatever happens while it is written: it is written to a
    ``.part`` beside it, brought to the disk, and renamed. Files that are not on this machine go Lightning's way.
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Write a file.

        Raises:
            OSError: it could not be written; a previous file of this name is as it was.
        """
        file = _local(path)
        if file is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        handled = sys.exception()  # a checkpoint may be taken because of an error
        part: Path | None = None
        try:
            part, stream = _create_part(file)
            with stream:
                torch.save(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
                if fcntl is None:
                    stream.close()  # Windows renames no open file
                part.replace(file)
        except BaseException as error:
            if part is not None:
                part.unlink(missing_ok=True)
            cause = _cause(error, handled)
            if not isinstance(cause, OSError):
                if cause is error:
                    raise
                raise cause from None
            kept = "; the previous file of this name is as it was" if file.exists() else ""
            said = f"The checkpoint could not be written: {cause.strerror}{kept}"
            raise OSError(cause.errno, said, str(file)) from error
        _sync_folder(file.parent)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Read a file; weights stay in it until they are copied to where they belong.

        Args:
            path: of the file.
            map_location: as in ``torch.load``.
            weights_only: None is True, for files of other machines, too; False runs whatever code the file holds.

        Raises:
            FileNotFoundError: there is none.
            pickle.UnpicklingError: it holds other objects than tensors and plain values.
            ValueError: it ends too early, or is no checkpoint.
        """
        file = _local(path)
        try:
            if file is None or not file.is_file():
                weights_only = True if file is None and weights_only is None else weights_only
                return super().load_checkpoint(path, map_location, weights_only)
            mapped = zipfile.is_zipfile(file)
            if not mapped:
                _refuse_no_checkpoint(file)
            found = _load(file, map_location=map_location, weights_only=weights_only, mmap=mapped)
        except pickle.UnpicklingError as error:
            error.add_note(
                "Checkpoints are read with weights_only=True, because others can run code when they are read. If you trust "
                f"this one: trainer.fit(model, ckpt_path={str(path)!r}, weights_only=False)."
            )
            raise
        if mapped and isinstance(found, dict):
            found.update(
                (key, tree_map_only(Tensor, Tensor.clone, value))
                for key, value in found.items()
                if key not in _STAY_IN_THE_FILE
            )
        return found


def load(path: Any, io: Any, module: pl.LightningModule | None, weights_only: bool | None) -> dict[str, Any]:
    """What a trainer loads for a module.

    Only weights that torch's own code copies to their place stay in the file: others may write it, or cut it off.

    Args:
        path: of the file.
        io: whoever reads it, a ``CheckpointIO`` or a wrapper around one.
        module: whose weights are in the file.
        weights_only: as in :meth:`AtomicCheckpointIO.load_checkpoint`.
    """
    base = io
    while wraps_another(base):
        base = base.checkpoint_io
    theirs = getattr(base.load_checkpoint, "__func__", None) is base_of(base, TorchCheckpointIO).load_checkpoint
    # Quantised weights cannot be loaded with a callable map_location, which is Lightning's default.
    options = {"map_location": "cpu"} if theirs else {}
    found: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only, **options)
    if isinstance(base, AtomicCheckpointIO):
        weights = dict[str, Any]()
        if module is not None and not _somebody_keeps_what_is_loaded(module):
            weights.update(module.named_parameters(remove_duplicate=False))
        for state in (found[key] for key in _STAY_IN_THE_FILE & found.keys()):
            for name in state.keys() - weights.keys():
                state[name] = tree_map_only(Tensor, Tensor.clone, state[name])
    return found


def _somebody_keeps_what_is_loaded(module: pl.LightningModule) -> bool:
    """Whether user code sees the weights that are loaded, instead of torch's code, which copies them."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    if any(loads_in_its_own_way(child) for child in module.modules() if any(True for _ in child.parameters())):
        return True
    trainer = trainer_of(module)
    callbacks = [] if trainer is None else trainer.callbacks
    owners = [(module, pl.LightningModule), *((each, pl.Callback) for each in callbacks)]
    return any(
        is_overridden("on_load_checkpoint", owner, parent=base_of(owner, kind))
        for owner, kind in owners
        if not is_a(owner, WeightAveraging)
    )


def _local(path: Any) -> Path | None:
    """The path on this machine, if it is one."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


def _create_part(file: Path) -> tuple[Path, BinaryIO]:
    """A file beside it that nobody else writes. What writers left who were killed goes: their locks went with them."""
    name = blake2s(os.fsencode(file.name), digest_size=8).hexdigest()  # names have their limit
    for left in file.parent.iterdir():  # glob keeps every pattern it has seen
        if not (left.name.startswith(f".{name}.") and left.suffix == ".part"):
            continue
        with suppress(FileNotFoundError), left.open("rb") as old:
            if _locked(old):
                left.unlink()
    while True:
        part = file.with_name(f".{name}.{uuid4().hex}.part")
        stream = part.open("xb")
        _locked(stream)
        if part.exists():  # else somebody took it for one that was left
            return part, stream
        stream.close()


def _locked(stream: IO[bytes]) -> bool:
    """Whether the file is locked now until it is closed; False where files cannot be locked."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _load(file: Path, **options: Any) -> Any:
    """torch opens a file twice to map it: if another took its name in between, once more."""
    while True:
        before = _identity(file)
        try:
            found = torch.load(file, **options)
        except Exception:
            if before == _identity(file):
                raise
        else:
            if before == _identity(file):
                return found


def _identity(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


def _refuse_no_checkpoint(file: Path) -> None:
    """Of a file that is no zip: torch's unpickler would tell of whatever byte it cannot read."""
    with file.open("rb") as stream:
        begins, size = stream.read(16), file.stat().st_size
    if begins.startswith(b"PK\x03\x04"):
        raise ValueError(f"{file} ends too early ({size} bytes): whoever wrote it was stopped. Take an earlier one.")
    if begins[:1] != b"\x80" and not tarfile.is_tarfile(file):  # torch's files before 1.6, which it still reads
        found = f"its {size} bytes begin with {begins!r}" if begins else "it is empty"
        raise ValueError(
            f"{file} is no checkpoint: {found}. ckpt_path= takes a file that ModelCheckpoint or trainer.save_checkpoint wrote."
        )


def _cause(error: BaseException, handled: BaseException | None) -> BaseException:
    """What stopped torch, which tells of a file with another length than it should have."""
    while isinstance(error, RuntimeError) and error.__context__ not in (None, handled):
        error = error.__context__
    return error


def _sync_folder(folder: Path) -> None:
    """The new name, too, survives a loss of power."""
    if os.name != "posix":
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
