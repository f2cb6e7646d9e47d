"""Host memory for optimizer state that is uploaded for each step on the GPU and downloaded after it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import lay_out, part, total_bytes, view
from sp_lightning.core.device.lease import lend
from sp_lightning.core.torch_compat.private import tree_leaves


class SeparateState:
    """A layer's state, with separate memory for each tensor. A state store with the state elsewhere (``elsewhere``) needs this.

    Args:
        tensors: the tensors in the optimizer's ``state``.

    Attributes:
        tensors: as given.
        spans: the place of each tensor in GPU memory.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.spans = lay_out(("", each) for each in tensors)
        self.tensors = list(tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of GPU memory that the state takes."""
        return total_bytes(self.spans)

    def for_upload(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        """Returns the targets of uploads, in GPU memory of :attr:`nbytes` bytes, and their sources on the host."""
        return [part(memory, span) for span in self.spans], self.for_download()

    def for_download(self) -> list[Tensor]:
        """Returns the targets of downloads, one for each tensor."""
        return [each.data for each in self.tensors]

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if these tensors have the same shapes, dtypes and strides."""
        return len(tensors) == len(self.spans) and all(
            (each.shape, each.dtype, each.stride()) == (span.shape, span.dtype, span.stride)
            for each, span in zip(tensors, self.spans, strict=True)
        )

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Returns True if these are the same tensors, in the same order, in memory of this object. This class has no memory."""
        return False


class HostState(SeparateState):
    """A layer's state in one piece of memory, which is uploaded in one copy.

    Args:
        device: allocates the memory.
        like: tensors with the shapes, dtypes and strides of the state.
        pin: True to page-lock the memory.

    Attributes:
        tensors: the tensors in the optimizer's ``state``, each a view with a storage of its own.
    """

    def __init__(self, device: Device, like: Sequence[Tensor], *, pin: bool) -> None:
        super().__init__(like)
        self._memory = PinnedMemory(device, self.nbytes, pin=pin)
        self._bytes = self._memory.bytes[: self.nbytes]
        self.tensors = [view(lend(self._bytes[s.offset :][: s.nbytes]), replace(s, offset=0)) for s in self.spans]

    def for_upload(self, memory: Tensor) -> tuple[list[Tensor], list[Tensor]]:
        return [memory], [self._bytes]

    def for_download(self) -> list[Tensor]:
        return [part(self._bytes, span) for span in self.spans]

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        begin = self._bytes.data_ptr()
        return len(tensors) == len(self.tensors) and all(
            each is own and each.data_ptr() == begin + span.offset and each.shape == span.shape
            for each, own, span in zip(tensors, self.tensors, self.spans, strict=True)
        )


def of_device(groups: Iterable[dict[str, Any]], state: dict[Any, Any], known: Collection[int]) -> Iterator[Tensor]:
    """Yields the tensors of optimizer state that plain Lightning has on the GPU, each once.

    - The tensors that a step on the GPU has made.
    - Tensors of a loaded state that ``load_state_dict`` copies to the GPU. If no kernel reads step counters (groups that are
      neither ``capturable`` nor ``fused``), it copies all tensors except these counters.

    Args:
        groups, state: an optimizer's groups with the parameters of a layer, and its state.
        known: the ``id`` of each tensor that a step on the GPU has made.
    """
    seen = set[int]()
    for group in groups:
        counts_there = bool(group.get("capturable") or group.get("fused"))
        for p in group["params"]:
            for name, value in dict.get(state, p, {}).items():
                for leaf in tree_leaves(value):
                    counts = name == "step" and not counts_there and id(leaf) not in known
                    if type(leaf) is Tensor and leaf.layout is torch.strided and id(leaf) not in seen and not counts:
                        seen.add(id(leaf))
                        yield leaf


def unshare(groups: Iterable[dict[str, Any]], state: dict[Any, Any], constants: Set[str]) -> None:
    """Gives the parameters of a layer their own copies of constants: a loaded state has one tensor for all layers.

    Args:
        groups, state: an optimizer's groups with the parameters of the layer, and its state. The state is changed in place.
        constants: the names of constants; see :func:`~sp_lightning.core.updates.fused.constants_of`.
    """
    own = dict[Tensor, Tensor]()
    for entry in [dict.get(state, p, {}) for group in groups for p in group["params"]]:
        for name in constants & entry.keys():
            entry[name] = own.setdefault(entry[name], entry[name].clone())


def ids_of_constants(state: dict[Any, Any], constants: Set[str]) -> set[int]:
    """Returns the ``id`` of each constant in a state. A constant is a tensor that steps read and never write.

    Args:
        state: an optimizer's state.
        constants: the names of constants; see :func:`~sp_lightning.core.updates.fused.constants_of`.
    """
    return {id(values[name]) for values in state.values() for name in constants & values.keys()}
