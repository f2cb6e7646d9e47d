"""A layer of which some weights are in the files that a user has them in, until somebody but the device reads or writes them."""

from __future__ import annotations

import copy
import os
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device.device import Device
from sp_lightning.device.layout import Elsewhere, Span, addresses, bytes_of, view
from sp_lightning.device.lease import lend
from sp_lightning.device.metadata import METADATA
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import copies_shallowly, tree_leaves
from sp_lightning.model.found import Layer
from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.away import Away, refuse_fork, return_to, send_away
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import Allocate, SparseMemory
from sp_lightning.store.direct_file import Transfer, aligned_memory
from sp_lightning.store.gradient_memory import Staging
from sp_lightning.store.weights_in_files import FilePlace, WeightReader


class FileBlock(HostBlock):
    """A block with memory for some weights and for casts. A fetch reads the others from files, and copies these.

    Whoever else asks for a weight that is in a file brings it to memory, for good.

    Args:
        layer, planned, device, staging, allocate, pin: as for a :class:`~sp_lightning.store.block.HostBlock`.
        reader: reads files, which it has open.
        places: where each parameter is; None for those that come to memory.

    Attributes:
        in_file: indices of the parameters that are nowhere but in a file.
        pin: whether memory that fetches read is page-locked.
    """

    def __init__(
        self,
        layer: Layer,
        planned: PlannedLayer,
        device: Device,
        staging: Staging,
        allocate: Allocate,
        *,
        reader: WeightReader,
        places: Sequence[FilePlace | None],
        pin: bool,
    ) -> None:
        self.places = places
        self.in_file = {index for index, place in enumerate(places) if place is not None}
        self.homes = {index: InTheFile(self, index) for index in self.in_file}
        self.pin = pin
        self._reader = reader
        self._lock = threading.Lock()
        self._process = os.getpid()
        for index in self.in_file:
            if type(parameter := layer.parameters[index][1]) is InFile:  # it was left by an earlier run
                _make_ordinary(parameter)
        super().__init__(layer, planned, device, staging, lambda nbytes, _: SparseMemory(nbytes), pin=pin)

    def _take(self, index: int, into: Tensor | None) -> None:
        if index not in self.in_file:
            super()._take(index, into)

    def leave(self) -> None:
        """Takes their memory from the parameters that are in files: that of the mapped file. They are stand-ins from now on."""
        for index in self.in_file:
            parameter, span = self.parameters[index], self.planned.spans[index]
            with no_inference_mode(), torch.DisableTorchFunctionSubclass():
                nothing = torch.nan if span.dtype.is_floating_point or span.dtype.is_complex else 0
                parameter.data = torch.full((), nothing, dtype=span.dtype).expand(span.shape)
            parameter.__class__ = InFile
            vars(parameter).update(_home=self.homes[index])
        self.addresses = addresses(self.parameters)

    def read(self, memory: Tensor) -> Transfer:
        """Begins to read what is in files to memory of the block's size, each weight to its place."""
        indices = sorted(self.in_file)
        targets = [bytes_of(memory, self.planned.spans[index]) for index in indices]
        return self._reader.read([place for i in indices if (place := self.places[i]) is not None], targets)

    def complete(self, memory: Tensor) -> None:
        """Copies what is in the block's own memory to such memory, which has been read to."""
        for index, span in enumerate((*self.planned.spans, *self.planned.casts)):
            if index not in self.in_file:
                bytes_of(memory, span).copy_(bytes_of(self.weights, span))

    def contents(self, index: int) -> Tensor:
        """Returns the bytes of a weight that is in a file, flat ``uint8``, in memory of its own.

        Raises:
            OSError: the file cannot be read, or was changed.
            RuntimeError: this is a forked process.
        """
        refuse_fork(self._process)
        place, nbytes = self.places[index], self.planned.spans[index].nbytes
        assert place is not None
        with no_dispatch_modes(), no_inference_mode():
            memory = aligned_memory(nbytes)[:nbytes]
            self._reader.read([place], [memory]).wait()
        return memory

    def bring(self, index: int) -> None:
        """Brings a weight to memory, because somebody reads or writes it. From then on it is as in other blocks.

        Raises:
            OSError: the file cannot be read, or was changed.
            RuntimeError: this is a forked process.
        """
        refuse_fork(self._process)  # before the lock, which a thread of the other process may have had
        with self._lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            if index not in self.in_file:
                return
            place, span, parameter = self.places[index], self.planned.spans[index], self.parameters[index]
            assert place is not None
            memory = bytes_of(self.memory.seen, span)
            self._reader.read([place], [memory]).wait()
            target = view(lend(memory), self._alone[index])
            self._lent[index] = StorageWeakRef(target.untyped_storage())
            with torch.DisableTorchFunctionSubclass():
                parameter.data = target
            _make_ordinary(parameter)
            for alias in self.homes[index].aliases:
                return_to(alias, target)
            [self.addresses[index]] = addresses([parameter])
            self.in_file.discard(index)

    # ------------------------------------------------------------------ as a block in memory

    def copy_of(self, index: int) -> Tensor:
        self.bring(index)
        return super().copy_of(index)

    def write(self, index: int, value: Tensor) -> bool:
        span = self.planned.spans[index]
        if index in self.in_file and (value.shape, value.dtype) == (span.shape, span.dtype):
            with no_inference_mode(), torch.no_grad():
                present = self.contents(index)
                written = torch.empty_like(present)
                view(written, self._alone[index]).copy_(value)
            if torch.equal(written, present):
                return False
        self.bring(index)
        return super().write(index, value)


class InTheFile:
    """The :class:`~sp_lightning.store.away.Home` of what was detached from one weight that is in a file.

    Attributes:
        block, index: whose weight it is.
    """

    def __init__(self, block: FileBlock, index: int) -> None:
        self.block = block
        self.index = index
        self._aliases: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    @property
    def span(self) -> Span:
        """Where the weight lies in its layer's memory, if it is there; its shape, its strides, its dtype."""
        return self.block.planned.spans[self.index]

    @property
    def place(self) -> FilePlace:
        """Where it is."""
        place = self.block.places[self.index]
        assert place is not None
        return place

    def alias(self) -> Tensor:
        """What ``parameter.detach()`` returns: it counts writes with the parameter, and is in the file, too."""
        parameter = self.block.parameters[self.index]
        with torch.DisableTorchFunctionSubclass():
            alias = parameter.detach()
        send_away(alias, self, self.span)
        self._aliases[id(alias)] = alias
        return alias

    @property
    def aliases(self) -> list[Away]:
        """What was detached, is still there, and has no memory yet."""
        return [each for each in self._aliases.values() if type(each) is Away]

    def bring_for_user(self, tensors: Sequence[Away] = (), beside: Collection[Any] = ()) -> None:
        self.block.bring(self.index)

    def give(self, tensor: Away) -> None:
        self.block.bring(self.index)

    def read(self, tensor: Away) -> Tensor:
        return self.block.contents(self.index)


class InFile(Elsewhere, nn.Parameter):
    """A parameter whose values are in a file. Its ``data`` is one NaN, or one zero, seen in the parameter's shape."""

    _home: InTheFile

    @property
    def span(self) -> Span:  # type: ignore[override]
        """Where it lies in its layer's memory, if it is there; its shape, its strides, its dtype."""
        return self._home.span

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNCHANGED or _leaves_it(func, args, kwargs):
            with torch.DisableTorchFunctionSubclass():
                return args[0] if func in _ITSELF else func(*args, **kwargs)
        if func is Tensor.stride and len(args) == 1 and not kwargs:
            return args[0].span.stride
        if func in (Tensor.detach, torch.detach) and len(args) == 1:
            return args[0]._home.alias()
        if func is torch.empty_like and len(args) == 1:
            span = args[0].span
            like = torch.empty_strided(span.shape, span.stride, dtype=span.dtype, device="meta")
            return torch.empty_like(like, **{"device": "cpu", **kwargs})
        if func == Tensor.data.__set__ and args[0] is args[1]:  # type: ignore[attr-defined]
            return None
        if func is Tensor.copy_ and type(args[0]) is InFile and home_of(args[1]) is args[0]._home:
            increment_version(args[0])
            return args[0]
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is InFile:
                leaf._home.bring_for_user()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._home.bring_for_user()
        return copy.deepcopy(self, memo)  # its class is that of ordinary parameters again

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._home.bring_for_user()
        return self.__reduce_ex__(protocol)


def _make_ordinary(parameter: Any) -> None:
    parameter.__class__ = nn.Parameter
    del vars(parameter)["_home"]


def home_of(tensor: Any) -> InTheFile | None:
    """The place of a weight, or of what was detached from one, that is nowhere but in a file; None if it is in memory."""
    if type(tensor) not in (InFile, Away):
        return None
    home = vars(tensor).get("_home") or vars(tensor).get("home")
    return home if isinstance(home, InTheFile) else None


def _leaves_it(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call leaves a parameter in its file as it is: an optimizer steps it only if it is trained, or has a gradient."""
    if func is Tensor.requires_grad_:
        wanted = (*args[1:], *kwargs.values(), True)[0]
        return not wanted or args[0].requires_grad
    if func == Tensor.requires_grad.__set__:  # type: ignore[attr-defined]
        return not args[1] or args[0].requires_grad
    if func == Tensor.grad.__set__:  # type: ignore[union-attr]
        return args[1] is None
    return func is Tensor.to and _changes_nothing(args, kwargs)


def _changes_nothing(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether ``tensor.to(…)`` is the tensor itself."""
    if any(isinstance(each, Tensor) for each in (*args[1:], *kwargs.values())):
        return False
    with torch.DisableTorchFunctionSubclass():
        probe = torch.empty(0, dtype=args[0].dtype)
        return probe.to(*args[1:], **kwargs) is probe


_ITSELF = frozenset([Tensor.to, Tensor.cpu])
_UNCHANGED = METADATA | {
    *(getattr(Tensor, name).__get__ for name in ("requires_grad", "grad")),
    Tensor.cpu,
    copies_shallowly,
}
"""What can be asked of a parameter that is in a file: its data answers it, too."""
