"""Detects writes of weights that torch's versions do not show, by comparing digests of values.

If a version shows a write, :class:`~sp_lightning.layers.parameter_group.ParameterGroup` detects the write. The classes of this
file compare

- views that outlive their step (:class:`ViewDigests`);
- views of memory that a layer (:class:`StaleViews`) or a weight (:class:`ExchangedMemory`) has left;
- weights on the host within a step (:class:`WeightWatch`).
"""

from __future__ import annotations

import ctypes
import hashlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import DisableTorchFunctionSubclass, Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sp_lightning.device.lease import Lease
from sp_lightning.layers.parameter_group import ParameterGroup
from sp_lightning.model.wrapped import parts
from sp_lightning.store.block import HostBlock

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


class StaleViews:
    """Views of slots that a layer has left because one of its weights got other memory. The layer's other weights left as well.

    A write to one of these other weights through such a view would be lost, so it is an error.

    Attributes:
        noted: for each such slot its lease, its memory, and the name, the value and the digest of each of the other weights.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[Lease, Tensor, list[tuple[str, Tensor, str]]]] = []

    def note(self, lease: Lease, memory: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
        """Records values of weights, by name. They must not change while tensors view the slot (``lease.in_use``)."""
        self.noted.append((lease, memory, [(name, value, digest(value)) for name, value in others]))

    def compare(self, wait: Callable[[Tensor], None], *, refuse: bool) -> None:
        """Compares the memory with the recorded values, and forgets memory that no tensor views any more.

        Args:
            wait: waits for all kernels that write a slot's memory.
            refuse: True if a write is an error.

        Raises:
            RuntimeError: a weight was written through an old view.
        """
        before, self.noted = self.noted, [left for left in self.noted if left[0].in_use]
        for _, memory, others in before if refuse else ():
            wait(memory)
            for name, value, before_it in others:
                if digest(value) != before_it:
                    self.noted.clear()  # the error is raised only once
                    raise RuntimeError(
                        f"Parameter {name!r} was written through an old view of it (.data, .detach(), weight[0]): another weight "
                        "of its layer was given other memory since (param.data = other). The write would be lost. Take a new "
                        "view from the module, or write the other weight in place: param.data.copy_(other)."
                    )


class ExchangedMemory:
    """Memory of slots that weights had before they got other memory (``param.data = other``), while user code views it.

    On plain Lightning, a graph that has saved a view of a weight has the new values after a later write to that memory. With
    slots, the graph has a copy of the old values, or the forward runs again. So a write is reported to the object that needs the
    old values.

    Attributes:
        noted: the arguments of :meth:`note`, and the digest of the value.
    """

    def __init__(self) -> None:
        self.noted: list[tuple[Lease, Tensor, Tensor, str, weakref.ref[Any], Callable[[], None]]] = []

    def note(self, lease: Lease, memory: Tensor, value: Tensor, needed_by: Any, written: Callable[[], None]) -> None:
        """Records the value of a weight that is about to get other memory.

        Args:
            lease, memory: the slot's lease and memory. The caller has waited for all kernels that write the memory.
            value: the weight's view of the memory.
            needed_by: an object that needs the value to stay the same while it lives.
            written: called if the value was written.
        """
        self.noted.append((lease, memory, value, digest(value), weakref.ref(needed_by), written))

    def compare(self, wait: Callable[[Tensor], None]) -> None:
        """Compares the memory with the recorded values. Calls ``written`` for each value that has changed.

        Forgets these values, values that are not needed any more, and memory that no tensor views.

        Args:
            wait: waits for all kernels that write a slot's memory.
        """
        before, self.noted = self.noted, []
        for noted in before:
            lease, memory, value, before_it, needed_by, written = noted
            if needed_by() is None:
                continue
            wait(memory)
            if digest(value) != before_it:
                written()
            elif lease.in_use:
                self.noted.append(noted)

    def forget_dropped(self) -> None:
        """Forgets memory that no tensor views any more, before the memory is overwritten."""
        self.noted = [noted for noted in self.noted if noted[0].in_use]


_Look = tuple[int, int, str]
"""Version, address and digest of a parameter."""


class WeightWatch:
    """Compares the weights in the host store with digests that were recorded before (``debug_writes=True``).

    Args:
        blocks: the host store.
    """

    def __init__(self, blocks: Sequence[HostBlock]) -> None:
        self._places = [(block, index) for block in blocks for index in range(len(block.parameters))]
        self._looks: dict[tuple[HostBlock, int], _Look] = {}

    def look(self) -> None:
        """Records the values of all weights."""
        self._looks = self._look_at_all()

    def _look_at_all(self) -> dict[tuple[HostBlock, int], _Look]:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return dict(zip(self._places, threads.map(_look, self._places), strict=True))

    def forget(self) -> None:
        """Forgets all values, because the next code may write the host's weights."""
        self._looks = {}

    def look_at(self, block: HostBlock, index: int) -> None:
        """Records the value of one weight, which the engine has written."""
        self._looks[block, index] = _look((block, index))

    def compare(self) -> None:
        """Compares all weights with their recorded values.

        Raises:
            RuntimeError: a weight has another value although its version and its address are the same.
        """
        for place, now in self._look_at_all().items() if self._looks else ():
            self._compare(place, now)

    def compare_one(self, block: HostBlock, index: int) -> None:
        """Compares one weight before the engine overwrites it with the device's value."""
        if (block, index) in self._looks:
            self._compare((block, index), _look((block, index)))

    def _compare(self, place: tuple[HostBlock, int], now: _Look) -> None:
        """Raises a RuntimeError if a weight has another value than recorded, and neither its version nor its address shows it."""
        before = self._looks.get(place, now)
        if now[:2] == before[:2] and now != before:  # writes that change a version or an address are noticed elsewhere
            self._looks = {}  # the error is raised only once
            raise RuntimeError(
                f"Parameter {place[0].planned.spans[place[1]].name!r} was written within a step in a way that torch does not "
                "record: the .data of a reference from before the step, numpy(), DLPack, or its storage. Its copy on the GPU "
                "is out of date. Write it through its module (module.weight.data), or between two steps."
            )


def _look(place: tuple[HostBlock, int]) -> _Look:
    parameter = place[0].parameters[place[1]]
    return parameter._version, parameter.data_ptr(), digest(parameter)
