"""Tensors whose values are on a disk. Computing with one reads it; in a forked process, which cannot read it, that raises."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.device.layout import Span
from sp_lightning.disk.mapped_file import is_on_disk, page_out
from sp_lightning.store.absent_tensor import AbsentTensor
from sp_lightning.torch_compat.metadata import UNCHANGED_BY_UPDATES
from sp_lightning.torch_compat.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.torch_compat.patched import state_of
from sp_lightning.torch_compat.private import save_by_way_of, take_for_parameter, tree_leaves


class OnDiskTensor(AbsentTensor):
    """A tensor whose values are on a disk. Its ``data`` is one NaN, or one zero, expanded to the shape of the tensor.

    Attributes:
        owner: the :class:`~sp_lightning.disk.state_on_disk.StateOnDisk` that reads it.
        stored: the owner's record of it.
        span: its place in the stored bytes, with its shape and its strides.
        process: the process that can read it.
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
            return args[0]
        if func in UNCHANGED_BY_UPDATES:  # metadata, which the data has, too
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
        # The pickle names a storage of the right size that is neither read nor written, so that it takes no memory.
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
"""``storages``: while a thread writes a file, the storages in its pickle that represent tensors on a disk, by ``id``."""


def send_away(tensor: Tensor, owner: Any, span: Span, stored: Any = None) -> None:
    """Makes a tensor an :class:`OnDiskTensor` and frees its memory. The caller has its values, and ``owner`` can read them."""
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
    for name in ("owner", "stored", "span", "process"):  # last, because another thread may use the tensor meanwhile
        del vars(tensor)[name]


def load(tensors: Sequence[OnDiskTensor], beside: Collection[Any] = ()) -> None:
    """Reads tensors for user code. They are ordinary tensors then.

    Args:
        tensors: the tensors to read.
        beside: other arguments of the same call, which must not be evicted meanwhile.

    Raises:
        RuntimeError: this is a forked process (a ``DataLoader`` worker, for example), which has no threads that read files.
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
    """Does what ``torch.save`` does. Tensors that are on a disk pass through memory one after the other, and stay on the disk."""
    leaves = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    mapped = any(type(leaf) is Tensor and leaf.layout is torch.strided and is_on_disk(leaf) for leaf in leaves)
    if not mapped and not any(type(leaf) is OnDiskTensor for leaf in leaves):
        torch.save(content, stream)
        return
    written: Any = None

    def value(data: Any) -> Any:
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
    """Copies an optimizer's state out of the checkpoint that it is mapped from: another program may truncate that file."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        for leaf in tree_leaves(dict(state_of(optimizer))):
            if type(leaf) is Tensor:
                leaf.data = leaf.data.clone()


def can_go_away(tensor: Any, least: int) -> bool:
    """Returns True if a tensor may go to the disk: it is plain and dense, has ``least`` bytes or more, and shares no memory."""
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
"""For parameters that are on a disk, or have their gradients there: the process that has the file."""

_tensor_grad: Any = Tensor.grad


def note_on_disk(parameters: Sequence[nn.Parameter]) -> None:
    """Notes parameters that are mapped from a scratch file, or whose gradients are. A forked process lacks the mapping."""
    for parameter in parameters:
        _noted[parameter] = os.getpid()


def _after_fork() -> None:
    for parameter, process in list(_noted.items()):
        with torch.DisableTorchFunctionSubclass():
            gradient = _tensor_grad.__get__(parameter)
        for what, tensor in (("gradient", gradient), ("weight", parameter)):
            if tensor is not None and is_on_disk(tensor):
                tensor.__class__ = OnDiskTensor
                vars(tensor).update(process=process, what=what)
                if what == "weight":
                    take_for_parameter(parameter)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
