"""Writes checkpoint files under another name, and renames them when they are complete. Reads files through a memory map.

Lightning's own ``TorchCheckpointIO`` writes a checkpoint to memory first, which is a second copy of the model and of the
optimizer state. It also reads a whole file to memory. If the model fills host memory, there is no room for either copy.
"""

from __future__ import annotations

import os
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Set
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.plugins import TorchCheckpointIO
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn

from sp_lightning import registry
from sp_lightning.core.model.wrapped import parts, rebuild
from sp_lightning.core.torch_compat.private import loads_in_its_own_way, tree_map_only
from sp_lightning.trainer.compat import base_of, is_a, trainer_of, wraps_another
from sp_lightning.trainer.part_files import cause_of, create_part, not_written, read_whole, sync_folder

BESIDE_AVERAGES = "current_model_state"
"""The key of a checkpoint under which Lightning's ``WeightAveraging`` keeps the model's own state."""
# The keys of state dictionaries, which may stay in the file: code that restores weights copies them. Values of other keys, for
# example optimizer state, are used as they were loaded, so they are copied to memory.
_STAY_IN_THE_FILE = frozenset({"state_dict", BESIDE_AVERAGES})


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes and reads the files of Lightning's ``TorchCheckpointIO`` without copies in host memory.

    It is the strategy's default. A checkpoint is written to a ``.part`` file, synced to the disk, and renamed. So a checkpoint is
    complete or absent, even if the process is killed. For files on other machines (URLs) this class calls Lightning's methods.

    Attributes:
        state_stays: True if loaded optimizer state stays in the file, as weights do. The code that restores the state then has to
            copy it.
    """

    state_stays = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any | None = None) -> None:
        """Writes a checkpoint.

        Args:
            checkpoint: the checkpoint.
            path: the name of the file, or its URL.
            storage_options: options for fsspec. With these, Lightning's class writes the file.

        Raises:
            OSError: the file could not be written. A previous file of this name is unchanged.
        """
        file = local_path(path)
        if file is None or storage_options is not None:
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
            return
        file.parent.mkdir(parents=True, exist_ok=True)
        handled = sys.exception()  # not None if the checkpoint is saved because of an error
        part: Path | None = None
        try:
            part, stream = create_part(file)
            with stream:
                write = registry.checkpoint_writer()
                write(checkpoint, stream)
                stream.flush()
                os.fsync(stream.fileno())
                if os.name != "posix":
                    stream.close()  # Windows renames no open file
                part.replace(file)
        except BaseException as error:
            if part is not None:
                part.unlink(missing_ok=True)
            explained = not_written(cause_of(error, handled), file)
            if explained is error:
                raise
            raise explained from (error if isinstance(explained, OSError) else None)
        sync_folder(file.parent)

    def load_checkpoint(self, path: Any, map_location: Any = "cpu", weights_only: bool | None = None) -> dict[str, Any]:
        """Reads a checkpoint. Its weights stay in the file until they are copied to their places.

        Args:
            path: the name of the file, or its URL.
            map_location: as in ``torch.load``.
            weights_only: None means True, also for URLs. False may run code that the file contains.

        Raises:
            FileNotFoundError: the file does not exist.
            pickle.UnpicklingError: the file has objects other than tensors and plain values.
            ValueError: the file ends too early, or is not a checkpoint, or is a folder.
        """
        file = local_path(path)
        if file is not None and file.is_dir():
            raise ValueError(
                f"{file} is a folder. Expected a checkpoint file. Convert a folder of torch.distributed.checkpoint by: "
                f"python -m torch.distributed.checkpoint.format_utils dcp_to_torch {file} {file}.file; a folder of Lightning's "
                f"sharded strategies by: python -m lightning.pytorch.utilities.consolidate_checkpoint {file}"
            )
        try:
            if file is None or not file.is_file():
                if file is None and weights_only is None:
                    weights_only = True  # Lightning's default for URLs is False
                return super().load_checkpoint(path, map_location, weights_only)
            mapped = zipfile.is_zipfile(file)
            if not mapped:
                _refuse_no_checkpoint(file)
            options = {"map_location": map_location, "weights_only": weights_only, "mmap": mapped}
            # torch.load opens the file twice to map it, so the file may be replaced in between.
            checkpoint = read_whole(file, lambda: torch.load(file, **options))
        except pickle.UnpicklingError as error:
            error.add_note(
                "Checkpoints are read with weights_only=True, because others can run code when they are read. If you trust "
                f"this one: trainer.fit(model, ckpt_path={str(path)!r}, weights_only=False)."
            )
            raise
        if mapped and isinstance(checkpoint, dict):
            stay = _STAY_IN_THE_FILE | {"optimizer_states"} if self.state_stays else _STAY_IN_THE_FILE
            for key, value in checkpoint.items():
                if key not in stay:
                    checkpoint[key] = tree_map_only(Tensor, _copy_to_memory, value)
        return checkpoint


def _copy_to_memory(value: Tensor) -> Tensor:
    """Copies a tensor out of the file, part by part: a wrapped tensor (torchao's 8-bit states) may not support ``clone``."""
    return rebuild(value, (part.clone() for _, part in parts("", value)))


def load(
    path: Any, io: Any, module: pl.LightningModule | None, weights_only: bool | None, *, state_stays: bool = False
) -> dict[str, Any]:
    """Returns a checkpoint for a trainer to restore.

    A weight stays in the file only if torch's own code will copy it to its parameter. Other weights are copied to memory, because
    user code may keep their tensors while another process writes or truncates the file. Also sets ``state_stays`` of an
    :class:`AtomicCheckpointIO`.

    Args:
        path: the name of the file, or its URL.
        io: the ``CheckpointIO`` that reads the checkpoint, or a wrapper around one.
        module: the module that will get the weights; None if it is not known.
        weights_only: see :meth:`AtomicCheckpointIO.load_checkpoint`.
        state_stays: True if the caller copies optimizer state out of the file, layer by layer.
    """
    base = io
    while wraps_another(base):
        base = base.checkpoint_io
    users_may_keep_it = module is None or _is_user_code_given_weights(module)
    if isinstance(base, AtomicCheckpointIO):
        base.state_stays = state_stays and not users_may_keep_it
    is_lightnings = getattr(base.load_checkpoint, "__func__", None) is base_of(base, TorchCheckpointIO).load_checkpoint
    # torch cannot load quantized weights with a callable map_location, which Lightning 2.6 passes by default.
    options = {"map_location": "cpu"} if is_lightnings else {}
    checkpoint: dict[str, Any] = io.load_checkpoint(path, weights_only=weights_only, **options)
    if isinstance(base, AtomicCheckpointIO):
        copied_by_torch: Set[str] = set()  # names of the weights that may stay in the file
        if module is not None and not users_may_keep_it:
            copied_by_torch = {name for name, _ in module.named_parameters(remove_duplicate=False)}
        for key in _STAY_IN_THE_FILE & checkpoint.keys():
            state = checkpoint[key]
            for name in state.keys() - copied_by_torch:
                state[name] = tree_map_only(Tensor, Tensor.clone, state[name])
    return checkpoint


def _is_user_code_given_weights(module: pl.LightningModule) -> bool:
    """Returns True if user code may get, and keep, the loaded tensors of weights. torch's own code only copies their values."""
    if type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    # For modules without parameters, this makes no difference: tensors that are not parameters are copied in any case.
    if any(loads_in_its_own_way(child) for child in module.modules() if any(True for _ in child.parameters())):
        return True
    trainer = trainer_of(module)
    callbacks = [] if trainer is None else trainer.callbacks
    owners = [(module, pl.LightningModule), *((callback, pl.Callback) for callback in callbacks)]
    return any(
        is_overridden("on_load_checkpoint", owner, parent=base_of(owner, kind))
        for owner, kind in owners
        if not is_a(owner, WeightAveraging)  # Lightning's on_load_checkpoint copies the values with load_state_dict
    )


def local_path(path: Any) -> Path | None:
    """Returns the path of a file on this machine; None for the URL of a file on another one."""
    system, name = url_to_fs(str(path))
    return Path(name) if isinstance(system, LocalFileSystem) else None


def _refuse_no_checkpoint(file: Path) -> None:
    """Checks a file that is not a zip file. Checkpoints are zip files since torch 1.6.

    Raises:
        ValueError: the file is not an older checkpoint of torch either.
    """
    with file.open("rb") as stream:
        begins = stream.read(16)
        size = file.stat().st_size
    if begins.startswith(b"PK\x03\x04"):
        raise ValueError(
            f"{file} ends too early ({size} bytes): the process that wrote it was stopped. Take an earlier one."
        )
    # Before torch 1.6, files were pickles or tar files, which torch still reads.
    if begins[:1] != b"\x80" and not tarfile.is_tarfile(file):
        content = f"its {size} bytes begin with {begins!r}" if begins else "it is empty"
        raise ValueError(
            f"{file} is not a checkpoint: {content}. Expected a file that ModelCheckpoint or trainer.save_checkpoint wrote."
        )
