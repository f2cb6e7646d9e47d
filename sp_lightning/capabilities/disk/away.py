"""Tensors whose values are on a disk. An operation on one loads its values; in a forked process the operation raises an error."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.capabilities.disk.mapped_file import is_on_disk, page_out
from sp_lightning.core.device.layout import Span
from sp_lightning.core.store.absent_tensor import AbsentTensor
from sp_lightning.core.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.core.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.core.torch_compat.patched import state_of
from sp_lightning.core.torch_compat.private import save_by_way_of, take_for_parameter, tree_leaves


class OnDiskTensor(AbsentTensor):
    """A tensor whose values are on a disk. Its ``data`` is one NaN, or one zero, expanded to the shape of the tensor.

    In a forked process the class marks weights and gradients, too. These have only ``process`` and ``what`` (``"weight"`` or
    ``"gradient"``, for the error).

    Attributes:
        owner: the :class:`~sp_lightning.capabilities.disk.state_on_disk.StateOnDisk` that reads the tensor.
        stored: the owner's record of the layer's state to which the tensor belongs.
        span: the tensor's place in the bytes of ``stored``, with its shape and its strides.
        process: the id of the process that can read the tensor.
    """

    owner: Any
    stored: Any
    span: Span
    process: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and _moves_to_host(func, args):  # Lightning calls this for all state at the end of a run
            return args[0]  # without a read from the disk
        if func in UNCHANGED_BY_UPDATES:  # metadata: the expanded `data` has the same
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        away = [leaf for leaf in leaves if type(leaf) is OnDiskTensor]
        if away:
            load(away, leaves)
        return func(*args, **(kwargs or {}))

    def load(self) -> None:
        with no_dispatch_modes(), torch.no_grad():
            self.owner.give(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        load([self])
        return copy.deepcopy(self, memo)  # it is an ordinary tensor now

    def __reduce_ex__(self, protocol: Any) -> Any:
        storages = getattr(_writing, "storages", None)
        if storages is None:
            load([self])
            return self.__reduce_ex__(protocol)
        # `save` is writing a file. The pickle refers to a storage of the right size. Nothing touches its memory, so that it takes
        # no pages. `save` writes the values from the disk in its place.
        storage = torch.UntypedStorage(self.span.nbytes)
        storages[id(storage)] = storage, self
        shell = torch.empty(0, dtype=self.span.dtype).set_(storage, 0, self.span.shape, self.span.stride)
        return shell.__reduce_ex__(protocol)


def _moves_to_host(func: Callable[..., Any], args: Sequence[Any]) -> bool:
    """Returns True for ``tensor.cpu()`` and ``tensor.to("cpu")``, which return a CPU tensor unchanged."""
    if func is Tensor.to and len(args) == 2 and isinstance(args[1], str | torch.device):
        return torch.device(args[1]).type == "cpu"
    return func is Tensor.cpu and len(args) == 1


_writing = threading.local()
"""``storages``: while :func:`save` writes a file in this thread, the storages in the pickle that stand for tensors on a disk, by
``id``."""


def send_away(tensor: Tensor, owner: Any, span: Span, stored: Any = None) -> None:
    """Makes a tensor an :class:`OnDiskTensor`, which drops its memory.

    Args:
        tensor: the tensor. The caller has stored its values.
        owner: the object that can read the values.
        span: the tensor's place in the bytes of ``stored``.
        stored: the owner's record of the values.
    """
    nothing = torch.nan if span.dtype.is_floating_point or span.dtype.is_complex else 0
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = torch.full((), nothing, dtype=span.dtype, device="cpu").expand(span.shape)
    tensor.__class__ = OnDiskTensor
    vars(tensor).update(owner=owner, stored=stored, span=span, process=os.getpid())


def return_to(tensor: OnDiskTensor, memory: Tensor) -> None:
    """Makes an :class:`OnDiskTensor` an ordinary tensor with this memory."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = memory
    tensor.__class__ = Tensor  # type: ignore[assignment]
    # Last, because another thread may be in `load` with this tensor.
    for name in ("owner", "stored", "span", "process"):
        del vars(tensor)[name]


def load(tensors: Sequence[OnDiskTensor], beside: Collection[Any] = ()) -> None:
    """Reads tensors for user code. Afterwards they are ordinary tensors.

    Args:
        tensors: the tensors to read.
        beside: all arguments of user code's call. Reading must not evict any of these tensors.

    Raises:
        RuntimeError: this is a forked process (a ``DataLoader`` worker, for example). It has neither the threads that read state
            nor the mappings of weights and gradients.
        OSError: the disk failed.
    """
    owners: dict[Any, list[OnDiskTensor]] = {}
    for tensor in tensors:
        found = vars(tensor)
        if found.get("process", os.getpid()) != os.getpid():
            raise RuntimeError(
                f"This {found.get('what', 'tensor')} is on a disk, in a file of the training process. A forked process cannot "
                "read it (a DataLoader's worker, for example). Copy it before the fork: tensor.clone()."
            )
        if (owner := found.get("owner")) is not None:  # else another thread has just read it
            owners.setdefault(owner, []).append(tensor)
    for owner, its in owners.items():
        owner.bring_for_user(its, beside)


def save(content: Any, stream: IO[bytes]) -> None:
    """Writes a checkpoint as ``torch.save`` does. Tensors on a disk are read into memory one at a time, and stay on the disk."""
    leaves = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    mapped = any(type(leaf) is Tensor and leaf.layout is torch.strided and is_on_disk(leaf) for leaf in leaves)
    if not mapped and not any(type(leaf) is OnDiskTensor for leaf in leaves):
        torch.save(content, stream)
        return
    written: Any = None

    def value(data: Any) -> Any:
        """Returns the storage to write in place of ``data``. Evicts the mapped weight that was written before."""
        nonlocal written
        if written is not None:
            page_out(written.data_ptr(), written.nbytes())
        written = data if data is not None and is_on_disk(data) else None
        if id(data) not in storages:
            return data
        _, tensor = storages[id(data)]
        return tensor.owner.read(tensor).untyped_storage()

    storages: dict[int, tuple[Any, OnDiskTensor]] = {}
    _writing.storages = storages
    try:
        save_by_way_of(value, content, stream)
    finally:
        del _writing.storages
        value(None)


def leave_files(optimizer: Any) -> None:
    """Copies an optimizer's state to memory. It may be mapped from a checkpoint, which another program may truncate."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        for leaf in tree_leaves(dict(state_of(optimizer))):
            if type(leaf) is Tensor:
                leaf.data = leaf.data.clone()


def can_go_away(tensor: Any, least: int) -> bool:
    """Returns True if a tensor of optimizer state may be stored on the disk, or is there already.

    A tensor in memory must be plain and dense, be on the CPU, require no gradient, fill its storage, and have ``least`` bytes or
    more.
    """
    if type(tensor) not in (Tensor, OnDiskTensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if type(tensor) is OnDiskTensor:
        return True
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.nbytes < least:
        return False
    storage = tensor.untyped_storage()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and storage.nbytes() == tensor.nbytes and not tensor.storage_offset()


# ---------------------------------------------------------------------- forked processes have no mapped scratch files

_noted: Any = WeakIdKeyDictionary()
"""For parameters whose weights or gradients are mapped from a scratch file: the id of the process that has the mapping."""

_tensor_grad: Any = Tensor.grad


def note_on_disk(parameters: Sequence[nn.Parameter]) -> None:
    """Records parameters whose weights or gradients are mapped from a scratch file, for the errors of forked processes."""
    for parameter in parameters:
        _noted[parameter] = os.getpid()


def _after_fork() -> None:
    """Makes operations on weights and gradients on a disk raise an error in a forked process, which lacks their mappings."""
    for parameter, process in list(_noted.items()):
        with torch.DisableTorchFunctionSubclass():
            gradient = _tensor_grad.__get__(parameter)
        for what, tensor in (("gradient", gradient), ("weight", parameter)):
            if tensor is not None and is_on_disk(tensor):
                tensor.__class__ = OnDiskTensor
                vars(tensor).update(process=process, what=what)
                if what == "weight":
                    take_for_parameter(parameter)  # the class is not nn.Parameter any more


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
