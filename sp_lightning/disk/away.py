"""Stand-ins for tensors that are on a disk. Computing with one reads it; in a forked process, which cannot, it raises."""

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
    """A tensor whose values are on a disk. Its ``data`` is one NaN, or one zero, seen in the tensor's shape.

    Attributes:
        owner: reads it: a :class:`~sp_lightning.disk.state_on_disk.StateOnDisk`.
        stored: what the owner knows it by.
        span: where its bytes are in what is stored, with its shape and its strides.
        process: the one that can read it.
    """

    owner: Any
    stored: Any
    span: Span
    process: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not kwargs and _moves_to_host(func, args):  # Lightning moves all state there at the end of a run
            return args[0]
        if func in UNCHANGED_BY_UPDATES:  # the stand-in's data has it, too
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        away = [leaf for leaf in leaves if type(leaf) is OnDiskTensor]
        if away:
            load(away, leaves)
        return func(*args, **(kwargs or {}))

    def bring(self) -> None:
        with no_dispatch_modes(), torch.no_grad():
            self.owner.give(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        load([self])
        return copy.deepcopy(self, memo)  # its class is that of ordinary tensors again

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
"""``storages``: while a thread writes a file, the storages in its pickle that stand for tensors on a disk, by their ``id``."""


def send_away(tensor: Tensor, owner: Any, span: Span, stored: Any = None) -> None:
    """Takes a tensor's memory from it. The caller has its values, and sees to it that ``owner`` can read them."""
    nothing = torch.nan if span.dtype.is_floating_point or span.dtype.is_complex else 0
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = torch.full((), nothing, dtype=span.dtype, device="cpu").expand(span.shape)
    tensor.__class__ = OnDiskTensor
    vars(tensor).update(owner=owner, stored=stored, span=span, process=os.getpid())


def return_to(tensor: OnDiskTensor, memory: Tensor) -> None:
    """Makes a tensor that was away an ordinary one, with this memory."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = memory
    tensor.__class__ = Tensor  # type: ignore[assignment]
    for name in ("owner", "stored", "span", "process"):  # last, because another thread may look at it meanwhile
        del vars(tensor)[name]


def load(tensors: Sequence[OnDiskTensor], beside: Collection[Any] = ()) -> None:
    """Reads tensors that are away, which are ordinary ones then. Those of one owner come together, and none goes before the call.

    Args:
        tensors: those that are looked at.
        beside: what is looked at in the same call. None of it may leave memory meanwhile.

    Raises:
        RuntimeError: this is a forked process, a worker of a ``DataLoader``, say: it has none of the threads that read files.
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
        if (owner := found.get("owner")) is not None:  # otherwise another thread has read it just now
            owners.setdefault(owner, []).append(tensor)
    for owner, its in owners.items():
        owner.bring_for_user(its, beside)


def save(content: Any, stream: IO[bytes]) -> None:
    """As ``torch.save``, but tensors that are on a disk pass through memory one after the other, and stay there."""
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
    """Copies state whose memory is still a checkpoint's file, which another program may cut off, and that nothing sends away."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        for leaf in tree_leaves(dict(state_of(optimizer))):
            if type(leaf) is Tensor:
                leaf.data = leaf.data.clone()


def can_go_away(tensor: Any, least: int) -> bool:
    """Whether a tensor may be sent away: a plain one, dense, of at least so many bytes, with a memory that is all its own."""
    if type(tensor) not in (Tensor, OnDiskTensor) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if type(tensor) is OnDiskTensor:
        return True
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.nbytes < least:
        return False
    storage = tensor.untyped_storage()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and storage.nbytes() == tensor.nbytes and not tensor.storage_offset()


# ---------------------------------------------------------------------- forked processes, which have no mapped scratch files


_noted: Any = WeakIdKeyDictionary()
"""By parameter that was noted to be on a disk, or to have its gradient there: the process that has the file."""

_tensor_grad: Any = Tensor.grad


def note_on_disk(parameters: Sequence[nn.Parameter]) -> None:
    """Notes parameters whose memory, or whose gradients', is mapped from a scratch file. A forked process does not have it."""
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
