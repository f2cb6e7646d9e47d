"""Stand-ins for tensors of an optimizer's state that are on a disk. Computing with one brings it."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Collection, Sequence
from typing import IO, Any, Protocol

import torch
from torch import Tensor, nn

from sp_lightning.device.layout import UNCHANGED_BY_UPDATES, Span
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.patched import state_of
from sp_lightning.device.torch_private import save_by_way_of, tree_leaves
from sp_lightning.store.mapped_file import is_on_disk, let_go


class Home(Protocol):
    """Brings tensors that are away. A call's tensors that have one home come together, and none goes before the call."""

    def bring_for_user(self, tensors: Sequence[Away], beside: Collection[Any]) -> None:
        """Gives tensors memory with their values, unless they have been given it. They are ordinary tensors then.

        Args:
            tensors: those that a user's code looks at.
            beside: what is looked at in the same call. None of it may leave memory meanwhile.
        """

    def give(self, tensor: Away) -> None:
        """Gives a tensor memory of its own, for good. No update of it is under way, and none is waited for."""

    def read(self, tensor: Away) -> Tensor:
        """Returns a tensor's bytes, flat ``uint8``, in memory that the next call may use again. The tensor stays away."""


class Away(Tensor):
    """A tensor whose values are on a disk. Its ``data`` is one NaN, or one zero, seen in the tensor's shape.

    Attributes:
        home: brings it.
        stored: what the home knows it by.
        span: where its bytes are in what is stored, with its shape and its strides.
        process: the one that can bring it.
    """

    home: Home
    stored: Any
    span: Span
    process: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in UNCHANGED_BY_UPDATES:  # the stand-in's data has it, too
            with torch.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        leaves = tree_leaves((args, kwargs))
        away = [leaf for leaf in leaves if type(leaf) is Away]
        if away:
            bring(away, leaves)
        return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        bring([self])
        return copy.deepcopy(self, memo)  # its class is that of ordinary tensors again

    def __reduce_ex__(self, protocol: Any) -> Any:
        if _writing.storages is None:
            bring([self])
            return self.__reduce_ex__(protocol)
        # The pickle names a storage of the right size that nobody touches, so that it takes no memory.
        storage = torch.UntypedStorage(self.span.nbytes)
        _writing.storages[id(storage)] = storage, self
        shell = torch.empty(0, dtype=self.span.dtype).set_(storage, 0, self.span.shape, self.span.stride)
        return shell.__reduce_ex__(protocol)


class _Writing(threading.local):
    """While this thread writes a file, the storages in its pickle that stand for tensors that are away, by their ``id``."""

    storages: dict[int, tuple[Any, Away]] | None = None


_writing = _Writing()


def send_away(tensor: Tensor, home: Home, span: Span, stored: Any = None) -> None:
    """Takes a tensor's memory from it. The caller has its values, and sees to it that ``home`` can bring them."""
    nothing = torch.nan if span.dtype.is_floating_point or span.dtype.is_complex else 0
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = torch.full((), nothing, dtype=span.dtype, device="cpu").expand(span.shape)
    tensor.__class__ = Away
    vars(tensor).update(home=home, stored=stored, span=span, process=os.getpid())


def return_to(tensor: Away, memory: Tensor) -> None:
    """Makes a tensor that was away an ordinary one, with this memory."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        tensor.data = memory
    tensor.__class__ = Tensor  # type: ignore[assignment]
    for name in ("home", "stored", "span", "process"):  # last, because another thread may look at it meanwhile
        del vars(tensor)[name]


def refuse_fork(process: int) -> None:
    """Refuses a read in another process than the one that reads files: its threads are not in a forked one.

    Raises:
        RuntimeError: this is a forked process.
    """
    if process != os.getpid():
        raise RuntimeError(
            "This tensor is on a disk, in a file of the process that trains. A forked process cannot read it: read it "
            "before the fork (tensor.clone())."
        )


def bring(tensors: Sequence[Away], beside: Collection[Any] = ()) -> None:
    """Brings tensors that are away.

    Args:
        tensors: those that are looked at.
        beside: what is looked at in the same call.

    Raises:
        RuntimeError: this is a forked process, a worker of a ``DataLoader``, say.
        OSError: the disk failed.
    """
    homes: dict[Home, list[Away]] = {}
    for tensor in tensors:
        found = vars(tensor)
        refuse_fork(found.get("process", os.getpid()))
        if (home := found.get("home")) is not None:  # otherwise another thread has brought it just now
            homes.setdefault(home, []).append(tensor)
    for home, its in homes.items():
        home.bring_for_user(its, beside)


def give(tensors: Sequence[Away]) -> None:
    """Gives tensors memory of their own, for good: what has them now is not what they were sent away by."""
    with no_dispatch_modes(), torch.no_grad():
        for tensor in tensors:
            tensor.home.give(tensor)


def save(content: Any, stream: IO[bytes]) -> None:
    """As ``torch.save``, but tensors that are on a disk pass through memory one after the other, and stay there."""
    leaves = [leaf for leaf in tree_leaves(content) if isinstance(leaf, Tensor)]
    mapped = any(type(leaf) is Tensor and leaf.layout is torch.strided and is_on_disk(leaf) for leaf in leaves)
    if not mapped and not any(type(leaf) is Away for leaf in leaves):
        torch.save(content, stream)
        return
    written: Any = None

    def value(data: Any) -> Any:
        nonlocal written
        if written is not None:
            let_go(written.data_ptr(), written.nbytes())
        written = data if data is not None and is_on_disk(data) else None
        if id(data) not in storages:
            return data
        _, tensor = storages[id(data)]
        return tensor.home.read(tensor).untyped_storage()

    storages: dict[int, tuple[Any, Away]] = {}
    _writing.storages = storages
    try:
        save_by_way_of(value, content, stream)
    finally:
        _writing.storages = None
        value(None)


def leave_files(optimizer: Any) -> None:
    """Copies state to memory that is in a checkpoint's file still, which somebody may cut off, and that nothing sends away."""
    with torch.DisableTorchFunctionSubclass(), no_inference_mode():
        for leaf in tree_leaves(dict(state_of(optimizer))):
            if type(leaf) is Tensor:
                leaf.data = leaf.data.clone()


def memory_for(span: Span) -> Tensor:
    """Returns new memory for a tensor, with its strides."""
    with no_inference_mode():
        return torch.empty_strided(span.shape, span.stride, dtype=span.dtype, device="cpu")


def can_go_away(tensor: Any, least: int) -> bool:
    """Whether a tensor may be sent away: a plain one, dense, of at least so many bytes, with a memory that is all its own."""
    if type(tensor) not in (Tensor, Away) or tensor.layout is not torch.strided or tensor.device.type != "cpu":
        return False
    if type(tensor) is Away:
        return True
    if isinstance(tensor, nn.Parameter) or tensor.requires_grad or tensor.nbytes < least:
        return False
    storage = tensor.untyped_storage()
    dense = torch.empty_like(tensor, device="meta").stride() == tensor.stride()
    return dense and storage.nbytes() == tensor.nbytes and not tensor.storage_offset()
