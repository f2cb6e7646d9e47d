"""An optimizer's state on the host, where the device steps: what of it passes through the device, in memory of its own."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sp_lightning.device.device import Device
from sp_lightning.device.host_memory import PinnedMemory
from sp_lightning.device.layout import lay_out, total_bytes, view
from sp_lightning.device.lease import lend
from sp_lightning.device.torch_private import tree_leaves


class HostState:
    """A layer's state on the host, which comes and leaves as one.

    Args:
        device: allocates the memory.
        like: tensors of the same shapes, dtypes and strides.
        pin: whether it is page-locked.

    Attributes:
        spans: where each tensor lies.
        tensors: what the user finds in the optimizer's ``state``, each a view with a storage of its own.
    """

    def __init__(self, device: Device, like: Sequence[Tensor], *, pin: bool) -> None:
        self.spans = lay_out(("", each) for each in like)
        self._memory = PinnedMemory(device, total_bytes(self.spans), pin=pin)
        self.bytes = self._memory.bytes[: total_bytes(self.spans)]
        self.tensors = [view(lend(self.bytes[s.offset :][: s.nbytes]), replace(s, offset=0)) for s in self.spans]

    def is_like(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors have the same shapes, dtypes and strides."""
        return len(tensors) == len(self.spans) and all(
            (each.shape, each.dtype, each.stride()) == (span.shape, span.dtype, span.stride)
            for each, span in zip(tensors, self.spans, strict=True)
        )

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether these tensors are the ones that are here, in their order and in this memory."""
        begin = self.bytes.data_ptr()
        return len(tensors) == len(self.tensors) and all(
            each is own and each.data_ptr() == begin + span.offset and each.shape == span.shape
            for each, own, span in zip(tensors, self.tensors, self.spans, strict=True)
        )


def of_device(groups: Iterable[dict[str, Any]], state: dict[Any, Any], known: Collection[int]) -> Iterator[Tensor]:
    """The tensors of the state of parameters that are on the device on plain Lightning.

    These are the ``known`` ones, by ``id``, which a step has made there; and of a state that was loaded what torch's
    ``load_state_dict`` puts there: all but counters of steps, unless a kernel of the device reads those.
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
    """Gives these parameters constants that others do not share: state that was loaded has one tensor for all layers."""
    own = dict[Tensor, Tensor]()
    for entry in [dict.get(state, p, {}) for group in groups for p in group["params"]]:
        for name in constants & entry.keys():
            entry[name] = own.setdefault(entry[name], entry[name].clone())
