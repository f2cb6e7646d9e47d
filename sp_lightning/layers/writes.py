"""Which weights were written: digests by which equal values are known, and the classes that compare them.

Where a version shows a write, :class:`~sp_lightning.layers.parameter_group.ParameterGroup` counts it. Here is what no version
shows: views that outlive their step (:class:`ViewDigests`), their layer's use of the memory (:class:`StaleViews`) or their
weight's (:class:`ExchangedMemory`), and the host's weights within a step (:class:`WeightWatch`).
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
"""For weights whose values need not be read each time: a function that returns the digest of such a weight."""


def digest(tensor: Tensor) -> str:
    """Returns a hexadecimal SHA-256 of a weight's values, shape and dtype."""
    known = known_digests.get(tensor)
    return digest_of_values(tensor) if known is None else known(tensor)


def digest_of_values(tensor: Tensor) -> str:
    """Returns the same. It reads the weight's memory once."""
    result = hashlib.sha256(usedforsecurity=False)
    with DisableTorchFunctionSubclass():  # within a step a host parameter would give the device's values
        detached = tensor.detach()
    for _, plain in parts("", detached):
        memory = plain.cpu().resolve_conj().resolve_neg().contiguous()
        result.update(repr((plain.dtype, tuple(plain.shape))).encode())
        if memory.nbytes:
            result.update((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
    return result.hexdigest()


class ViewDigests:
    """The values that a layer's weights had in such memory and on the host, at a moment when both were alike.

    On plain Lightning a view and its weight are one memory. Here they are two, and nothing tells of a write to either:
    not a version (``.data``), nor a call (numpy). So both are compared with what they were, and the one that was written
    is copied to the other one. The caller has waited for everything that writes them.

    Args:
        group: the layer's device parameters, and the host's.
        values: the present values on the device.
    """

    def __init__(self, group: ParameterGroup, values: Iterable[Tensor]) -> None:
        self._device = [digest(value) for value in values]
        self._host = [digest(host) for host in group.hosts]

    def written(self, group: ParameterGroup, values: Iterable[Tensor], *, refuse: bool = True) -> list[int]:
        """The indices of the weights that were written on the device since, and not on the host.

        Raises:
            RuntimeError: a weight was written on the host as well, so that one of the two writes would be lost, and
                ``refuse`` is set.
        """
        device = [digest(value) for value in values]
        written = [index for index, (old, new) in enumerate(zip(self._device, device, strict=True)) if old != new]
        twice = [index for index in written if digest(group.hosts[index]) != self._host[index]]
        if twice and refuse:
            raise RuntimeError(
                f"Parameter {group.spans[twice[0]].name!r} was written twice: on the host, and through a view that was taken "
                "inside a step and kept (.data, .detach(), weight[0], numpy()). One of both writes would be lost. Take a new "
                "view from the module for each write: module.weight.data."
            )
        return [index for index in written if index not in twice]


class StaleViews:
    """Views of memory that its layer has left because one of its weights was given other memory; the others went on elsewhere.

    What is written through such a view is lost, so it is refused.
    """

    def __init__(self) -> None:
        self._left: list[tuple[Lease, Tensor, list[tuple[str, Tensor, str]]]] = []

    def note(self, lease: Lease, memory: Tensor, others: Iterable[tuple[str, Tensor]]) -> None:
        """Takes what memory shows of the weights that went on elsewhere, by their names, for right until nobody has its lease."""
        self._left.append((lease, memory, [(name, value, digest(value)) for name, value in others]))

    def compare(self, settle: Callable[[Tensor], None], *, refuse: bool) -> None:
        """Compares what the memories show with what was noted. Those that nobody can see any more are forgotten.

        Args:
            settle: waits until everything is done that writes a memory.
            refuse: whether such a write is an error.

        Raises:
            RuntimeError: a weight was written through such a view.
        """
        if not self._left:  # nearly always; it is asked several times for each layer
            return
        before, self._left = self._left, [left for left in self._left if left[0].in_use]
        for _, memory, others in before if refuse else ():
            settle(memory)
            for name, value, before_it in others:
                if digest(value) != before_it:
                    self._left.clear()
                    raise RuntimeError(
                        f"Parameter {name!r} was written through an old view of it (.data, .detach(), weight[0]): another weight "
                        "of its layer was given other memory since (param.data = other). The write would be lost. Take a new "
                        "view from the module, or write the other weight in place: param.data.copy_(other)."
                    )


class ExchangedMemory:
    """Slots' memory that weights had before they were given other memory (``param.data = other``), while user code views it.

    With plain autograd, a graph that has saved a view of a weight sees what is written to that memory afterwards. Here the
    graph has a copy, or the forward runs again. So whoever needs the old values is told of such a write.
    """

    def __init__(self) -> None:
        self._noted: list[tuple[Lease, Tensor, Tensor, str, weakref.ref[Any], Callable[[], None]]] = []

    def note(self, lease: Lease, memory: Tensor, value: Tensor, needed_by: Any, written: Callable[[], None]) -> None:
        """Notes the present value of a weight, which is about to be given other memory.

        Args:
            lease, memory: the slot's. The caller has waited for everything that writes the memory.
            value: the view of it that the weight is.
            needed_by: what needs the value to stay as it is, as long as this object lives.
            written: called if it does not.
        """
        self._noted.append((lease, memory, value, digest(value), weakref.ref(needed_by), written))

    def compare(self, settle: Callable[[Tensor], None]) -> None:
        """Compares what is there with what was noted. ``settle`` waits until everything is done that writes a memory."""
        before, self._noted = self._noted, []  # nearly always empty
        for noted in before:
            lease, memory, value, before_it, needed_by, written = noted
            if needed_by() is None:
                continue
            settle(memory)
            if digest(value) != before_it:
                written()
            elif lease.in_use:
                self._noted.append(noted)

    def forget_dropped(self) -> None:
        """Forgets memory that nobody views any more, before it is used for other values."""
        if self._noted:
            self._noted = [noted for noted in self._noted if noted[0].in_use]


_Look = tuple[int, int, str]
"""Version, address and digest of a parameter."""


class WeightWatch:
    """Compares the digests of the host's weights with those of the last look, by a pass over all weights.

    Args:
        blocks: the host store. What is written on the device is not compared here.
    """

    def __init__(self, blocks: Sequence[HostBlock]) -> None:
        self._places = [(block, index) for block in blocks for index in range(len(block.parameters))]
        self._looks: dict[tuple[HostBlock, int], _Look] = {}

    def look(self) -> None:
        """Takes the present values of all weights for right."""
        self._looks = self._look_at_all()

    def _look_at_all(self) -> dict[tuple[HostBlock, int], _Look]:
        with ThreadPoolExecutor(torch.get_num_threads()) as threads:
            return dict(zip(self._places, threads.map(_look, self._places), strict=True))

    def forget(self) -> None:
        """Forgets the last look, because what comes next may write the host's weights."""
        self._looks = {}

    def look_at(self, block: HostBlock, index: int) -> None:
        """Takes the present value of one weight for right, because the engine has written it."""
        self._looks[block, index] = _look((block, index))

    def compare(self) -> None:
        """Compares all weights with the last look, if there was one.

        Raises:
            RuntimeError: a weight has other values although its version and its address are the same.
        """
        for place, now in self._look_at_all().items() if self._looks else ():
            self._compare(place, now)

    def compare_one(self, block: HostBlock, index: int) -> None:
        """Does what :meth:`compare` does for one weight, before the engine overwrites it with what is on the device."""
        if (block, index) in self._looks:
            self._compare((block, index), _look((block, index)))

    def _compare(self, place: tuple[HostBlock, int], now: _Look) -> None:
        before = self._looks.get(place, now)
        if now[:2] == before[:2] and now != before:  # other versions and addresses are noticed elsewhere
            self._looks = {}  # the error is raised only once
            raise RuntimeError(
                f"Parameter {place[0].planned.spans[place[1]].name!r} was written within a step in a way that torch does not "
                "record: the .data of a reference from before the step, numpy(), DLPack, or its storage. Its copy on the device "
                "is out of date. Write it through its module (module.weight.data), or between two steps."
            )


def _look(place: tuple[HostBlock, int]) -> _Look:
    parameter = place[0].parameters[place[1]]
    return parameter._version, parameter.data_ptr(), digest(parameter)
