"""Mapped tensors in other code: forked processes get an error, and checkpoints read one tensor at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import IO, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.capabilities.disk.mapped_file import is_on_disk, page_out, populate
from sp_lightning.core.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.core.torch_compat.modes import no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import save_by_way_of, take_for_parameter, tree_leaves

# ---------------------------------------------------------------------- checkpoints


def save(content: Any, stream: IO[bytes]) -> None:
    """Writes a checkpoint as ``torch.save`` does, with the pages of one mapped tensor in memory at a time.

    Raises:
        OSError: the disk failed.
    """
    leaves = [leaf for leaf in tree_leaves(content) if type(leaf) is Tensor and leaf.layout is torch.strided]
    if not any(map(is_on_disk, leaves)):
        torch.save(content, stream)
        return
    written: Any = None

    def value(storage: Any) -> Any:
        """Returns the storage that is written next. Evicts the mapped one that was written before."""
        nonlocal written
        if written is not None:
            page_out(written.data_ptr(), written.nbytes())
        written = storage if storage is not None and is_on_disk(storage) else None
        if written is not None and (number := populate(written.data_ptr(), written.nbytes())):
            raise OSError(
                number, f"Data on the disk could not be read: {os.strerror(number)}. No checkpoint was written"
            )
        return storage

    try:
        save_by_way_of(value, content, stream)
    finally:
        value(None)


def leave_files(optimizer: Any) -> None:
    """Copies an optimizer's state to memory. It may be mapped from a checkpoint, which another program may truncate."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        for leaf in tree_leaves(dict(state_of(optimizer))):
            if type(leaf) is Tensor and not is_on_disk(leaf):
                leaf.data = leaf.data.clone()


# ---------------------------------------------------------------------- forked processes have no mapped scratch files

_noted: Any = WeakIdKeyDictionary()
"""For each tensor that may be mapped from a scratch file, or whose gradient may be: what it is, for the error."""

_tensor_grad: Any = Tensor.grad


class OnDiskTensor(Tensor):
    """A mapped tensor in a forked process, where its memory does not exist. Code that reads or writes it raises an error.

    Attributes:
        what: what the tensor is, for the error: ``"weight"``, for example.
    """

    what: str

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNCHANGED_BY_UPDATES:  # metadata
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        what = next((leaf.what for leaf in tree_leaves((args, kwargs)) if type(leaf) is OnDiskTensor), "tensor")
        raise RuntimeError(
            f"This {what} is on a disk, in a file of the training process. A forked process cannot read it (a DataLoader's "
            "worker, for example). Copy it before the fork: tensor.clone()."
        )


def note_on_disk(tensors: Iterable[Tensor], what: str = "weight") -> None:
    """Records tensors that are mapped from a scratch file, or whose gradients are, for the errors of forked processes."""
    for tensor in tensors:
        _noted[tensor] = what


def _after_fork() -> None:
    """Makes operations on mapped tensors raise an error in a forked process, which lacks their mappings."""
    for noted, what in list(_noted.items()):
        with torch.DisableTorchFunctionSubclass():
            gradient = _tensor_grad.__get__(noted)
        for each, tensor in (("gradient", gradient), (what, noted)):
            if tensor is not None and is_on_disk(tensor):
                tensor.__class__ = OnDiskTensor
                tensor.what = each
                if each == "weight":
                    take_for_parameter(noted)  # the class is not nn.Parameter any more


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
