"""Detects writes of weights that torch's versions do not show, by comparing digests of values.

If a version shows a write, :class:`~sp_lightning.layers.parameter_group.ParameterGroup` detects the write. The classes of this
file compare

- views that outlive their step (:class:`ViewDigests`);
- views of memory that a weight has left (:class:`LeftMemory`).
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import DisableTorchFunctionSubclass, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.device.lease import Lease
from sp_lightning.layers.parameter_group import ParameterGroup
from sp_lightning.model.wrapped import parts

known_digests: Any = WeakIdKeyDictionary()
"""For weights whose values need not be read each time: a function that returns the digest of the weight."""


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype."""
    known = known_digests.get(tensor)
    return digest_of_values(tensor) if known is None else known(tensor)


def digest_of_values(tensor: Tensor) -> str:
    """Returns :func:`digest` without :data:`known_digests`. It reads the weight's memory once."""
    result = hashlib.sha256(usedforsecurity=False)
    with DisableTorchFunctionSubclass():  # within a step, a host parameter would return the device's values
        detached = tensor.detach()
    for _, plain in parts("", detached):
        memory = plain.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()


class ViewDigests:
    """Digests of a layer's weights on the device and on the host, from a moment when both were equal.

    On plain Lightning, a view and its weight are one memory. With slots they are two. A write to one of the two may change no
    version (``.data``), or run no code of torch (NumPy). So both are compared with their digests, and the written one is copied
    to the other. The caller has waited for all kernels and updates that write the two.

    Args:
        group: the parameters of the layer.
        values: the values on the device.
    """

    def __init__(self, group: ParameterGroup, values: Iterable[Tensor]) -> None:
        self._device = [digest(value) for value in values]
        self._host = [digest(host) for host in group.hosts]

    def written(self, group: ParameterGroup, values: Iterable[Tensor], *, refuse: bool = True) -> list[int]:
        """Returns the indices of the weights that were written on the device only.

        Raises:
            RuntimeError: ``refuse`` is set, and one of these weights was written on the host as well: one write would be lost.
        """
        device = [digest(value) for value in values]
        written = [index for index, (old, new) in enumerate(zip(self._device, device, strict=True)) if old != new]
        twice = [index for index in written if digest(group.hosts[index]) != self._host[index]]
        if twice and refuse:
            raise RuntimeError(
                f"Parameter {group.spans[twice[0]].name!r} was written twice: on the CPU, and through a view that was taken "
                "inside a step and kept (.data, .detach(), weight[0], numpy()). One of both writes would be lost. Take a new "
                "view from the module for each write: module.weight.data."
            )
        return [index for index in written if index not in twice]


@dataclass(eq=False)
class _Left:
    """Memory that weights have left.

    Attributes:
        lease, memory: the slot's lease and memory. Compute has ended all kernels that write the memory.
        values: by name, the weights' views of the memory.
        written: called with the name of the first weight that was written. It may raise an error.
        needed_by: a weak reference to an object that needs the values to stay the same while it lives.
        digests: the digests of the values.
    """

    lease: Lease
    memory: Tensor
    values: Mapping[str, Tensor]
    written: Callable[[str], None]
    needed_by: Callable[[], Any] = lambda: True

    def __post_init__(self) -> None:
        self.digests = {name: digest(value) for name, value in self.values.items()}


class LeftMemory:
    """Memory of slots that weights have left while user code views it, and so may still write it.

    Weights leave memory in two cases:

    - A weight got other memory (``param.data = other``), and a graph, or a forward that may run again, needs the old values. On
      plain Lightning, a graph that has saved a view of the weight has the new values after a later write to the old memory. With
      slots, the graph has a copy of the old values.
    - A layer has left its slot because one of its weights got other memory. A write to another weight of the layer through an old
      view of the slot would be lost.
    """

    def __init__(self) -> None:
        self.noted: list[_Left] = []

    def note(self, *left: Any) -> None:
        """Records values of weights in memory that the weights leave. The arguments are those of :class:`_Left`."""
        self.noted.append(_Left(*left))

    def compare(self, wait: Callable[[Tensor], None]) -> None:
        """Compares memory with the recorded values, and forgets memory that was written, or is not needed or viewed any more.

        Args:
            wait: waits for all kernels that write a slot's memory.
        """
        for left in list(self.noted):
            written = None
            if left.needed_by() is not None:
                wait(left.memory)
                written = next(
                    (name for name, value in left.values.items() if digest(value) != left.digests[name]), None
                )
            if written is not None or left.needed_by() is None or not left.lease.in_use:
                self.noted.remove(left)
            if written is not None:
                left.written(written)

    def forget_dropped(self) -> None:
        """Forgets memory that no tensor views any more, before the memory is overwritten."""
        self.noted = [left for left in self.noted if left.lease.in_use]
