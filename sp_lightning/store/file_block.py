"""A layer's weights in the file that a user has them in, until somebody but the device reads or writes them."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from sp_lightning.device.device import Device
from sp_lightning.device.layout import Elsewhere, Span, view
from sp_lightning.device.lease import lend
from sp_lightning.device.metadata import METADATA
from sp_lightning.device.modes import no_dispatch_modes, no_inference_mode
from sp_lightning.device.torch_private import copies_shallowly, tree_leaves
from sp_lightning.model.found import Layer
from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import Allocate, BlockMemory
from sp_lightning.store.gradient_memory import Staging
from sp_lightning.store.scratch import Transfer
from sp_lightning.store.weight_reader import FilePlace, WeightReader

_NOTHING = torch.empty(0, dtype=torch.uint8)


class FileBlock(HostBlock):
    """A block without memory: a fetch reads the file. Whoever else asks for a weight brings the block to memory, for good.

    Args:
        layer, planned, device, staging, allocate, pin, fetched_seldom: as for a :class:`~sp_lightning.store.block.HostBlock`.
        reader: reads files, which it has open.
        places: where each parameter is.

    Attributes:
        in_file: whether the weights are nowhere but in the file.
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
        places: Sequence[FilePlace],
        pin: bool,
        fetched_seldom: bool = False,
    ) -> None:
        self.places = places
        self.pin = pin
        self.in_file = True
        self._reader = reader
        self._lock = threading.Lock()
        super().__init__(layer, planned, device, staging, allocate, pin=pin, fetched_seldom=fetched_seldom)

    def _begin(self, allocate: Callable[[], BlockMemory]) -> None:
        self._allocate = allocate  # once somebody asks for a weight
        for parameter in self.parameters:
            if type(parameter) is InFile:  # it was left by an earlier run
                _make_ordinary(parameter)
        self.addresses = self._now()

    def leave(self) -> None:
        """Takes the parameters' memory, which is that of the mapped file. They are stand-ins from now on."""
        for index, parameter in enumerate(self.parameters):
            span = self.planned.spans[index]
            with no_inference_mode(), torch.DisableTorchFunctionSubclass():
                nothing = torch.nan if span.dtype.is_floating_point or span.dtype.is_complex else 0
                parameter.data = torch.full((), nothing, dtype=span.dtype).expand(span.shape)
            parameter.__class__ = InFile
            vars(parameter).update(_block=self, _index=index)
        self.addresses = self._now()

    def read(self, memory: Tensor) -> Transfer:
        """Begins to read all weights to memory of the block's size, each to its place."""
        targets = [memory[span.offset : span.offset + span.nbytes] for span in self.planned.spans]
        return self._reader.read(self.places, targets)

    def bring(self) -> None:
        """Brings the weights to memory, because somebody reads or writes them. From then on this is a block as others are.

        Raises:
            OSError: the file cannot be read, or was changed.
        """
        with self._lock, no_dispatch_modes(), no_inference_mode(), torch.no_grad():
            if not self.in_file:
                return
            memory = self._allocate()
            self.read(memory.fetched).wait()
            self.memory = memory
            for index, span in enumerate(self.planned.spans):
                target = view(lend(memory.seen[span.offset : span.offset + span.nbytes]), self._alone[index])
                self._lent[index] = StorageWeakRef(target.untyped_storage())
                parameter = self.parameters[index]
                with torch.DisableTorchFunctionSubclass():
                    parameter.data = target
                _make_ordinary(parameter)
            self.addresses = self._now()
            self.in_file = False

    # ------------------------------------------------------------------ as a block in memory

    @property
    def weights(self) -> Tensor:
        return _NOTHING if self.in_file else super().weights

    @property
    def pinned(self) -> bool:
        return self.in_file or super().pinned

    def copy_of(self, index: int) -> Tensor:
        self.bring()
        return super().copy_of(index)

    def write(self, index: int, value: Tensor) -> bool:
        self.bring()
        return super().write(index, value)

    def unpin(self) -> None:
        if not self.in_file:
            self.memory.unpin()
        self.gradients.unpin()


class InFile(Elsewhere, nn.Parameter):
    """A parameter whose values are in a file. Its ``data`` is one NaN, or one zero, seen in the parameter's shape."""

    _block: FileBlock
    _index: int

    @property
    def span(self) -> Span:  # type: ignore[override]
        """Where it lies in its layer's memory, if it is there; its shape, its strides, its dtype."""
        return self._block.planned.spans[self._index]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _UNCHANGED or (func is Tensor.to and _changes_nothing(args, kwargs)):
            with torch.DisableTorchFunctionSubclass():
                return args[0] if func in _ITSELF else func(*args, **kwargs)
        if func is Tensor.stride and len(args) == 1 and not kwargs:
            return args[0].span.stride
        if func is torch.empty_like and len(args) == 1:
            span = args[0].span
            like = torch.empty_strided(span.shape, span.stride, dtype=span.dtype, device="meta")
            return torch.empty_like(like, **{"device": "cpu", **kwargs})
        if func == Tensor.data.__set__ and args[0] is args[1]:  # type: ignore[attr-defined]
            return None
        for leaf in tree_leaves((args, kwargs)):
            if type(leaf) is InFile:
                leaf._block.bring()
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._block.bring()
        return copy.deepcopy(self, memo)  # its class is that of ordinary parameters again

    def __reduce_ex__(self, protocol: Any) -> Any:
        self._block.bring()
        return self.__reduce_ex__(protocol)


def _make_ordinary(parameter: Any) -> None:
    for name in ("_block", "_index"):
        del vars(parameter)[name]
    parameter.__class__ = nn.Parameter


def place_of(parameter: nn.Parameter) -> FilePlace | None:
    """Where a parameter is, if an earlier run has left it in its file."""
    return parameter._block.places[parameter._index] if type(parameter) is InFile else None


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
    *(getattr(Tensor, name) for name in ("requires_grad_", "cpu")),
    Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
    copies_shallowly,
}
"""What can be asked of a parameter that is in a file: its data answers it, too."""
