"""Weights that trials have in common: one copy on the host, and a few layers on the device.

Each trial sees a block of weights through a private view, in which a page is copied when it is written: by training, by weights
that differ from those of other trials, or by user code. All other pages are shared. The system reports which pages were written,
so users declare nothing.
"""

from __future__ import annotations

import errno
import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.device.host_memory import PinnedMemory
from sp_lightning.device.layout import PAGE, aligned, bytes_of, view, whole_pages
from sp_lightning.device.pages import create, written_pages
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.layers.uploads import Uploads
from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import BlockMemory
from sp_lightning.torch_compat.modes import no_inference_mode

R = TypeVar("R")

ON_DEVICE = 2
"""Common layers on the device beside the trials' windows, by default."""


class SharedLayer:
    """The frozen weights of a layer that trials have in common, on the host. They are written once.

    Args:
        device: page-locks the memory.
        nbytes: bytes of the frozen weights, which lie first.
        most: most bytes of all weights of a trial. Pages that are never written take no memory.
        pin: whether to page-lock the memory.

    Attributes:
        nbytes: bytes of the pages.
        bytes: the frozen weights, flat ``uint8``.
        pinned: whether they are page-locked.
        filled: whether the first trial has written them.
    """

    def __init__(self, device: Device, nbytes: int, most: int, *, pin: bool) -> None:
        self.nbytes = whole_pages(most)
        self._file = _with_descriptor(create, self.nbytes, "superpipeline-base")
        weakref.finalize(self, os.close, self._file)
        memory = self._map(self.nbytes, shared=True)
        self._locked = PinnedMemory(device, memory=memory[: whole_pages(nbytes)], pin=pin)
        self.bytes = memory[:nbytes]
        self.pinned = self._locked.pinned
        self.filled = False

    def view(self, nbytes: int) -> Tensor:
        """Returns a private view of the first ``nbytes``, in whole pages. A page of it is copied when it is written."""
        return self._map(whole_pages(nbytes), shared=False)

    def _map(self, nbytes: int, *, shared: bool) -> Tensor:
        # torch's map keeps no descriptor, unlike Python's: the layer needs one, for any number of trials.
        file = f"/proc/self/fd/{self._file}"
        return _with_descriptor(torch.from_file, file, shared=shared, size=nbytes, dtype=torch.uint8)


def _with_descriptor(opens: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls a function that opens a file. Raises an OSError with a remedy if the process may open no more."""
    try:
        return opens(*args, **kwargs)
    except (OSError, RuntimeError) as error:
        if os.strerror(errno.EMFILE) not in str(error):
            raise
        raise OSError(
            errno.EMFILE, "A SharedBase needs an open file for each layer, and this process may have no more. Raise its limit: "
            "`ulimit -n 65536` in the shell that starts it",
        ) from error  # fmt: skip


class TrialMemory(BlockMemory):
    """The memory of a block, as one trial sees it. No trial writes the shared pages.

    Args:
        device: allocates other memory, if user code asks for it.
        shared: has the pages that this trial does not write.
        nbytes: bytes of the block.

    Attributes:
        shared: as the argument; None once the block has other memory.
        own_from: offset of the first page that always belongs to this trial: it has the first byte behind the frozen weights.
    """

    def __init__(self, device: Device, shared: SharedLayer, nbytes: int) -> None:
        self._device, self._nbytes, self._pin = device, nbytes, False
        self.shared: SharedLayer | None = shared
        self.own_from = shared.bytes.nbytes // PAGE * PAGE
        self._view = shared.view(nbytes)
        self.common = self._view[: self._nbytes]
        self.pinned = shared.pinned  # nearly all bytes are uploaded from there

    def lock(self) -> None:
        """Page-locks trained weights and casts, once they have their values: copies from pageable memory block the host.

        Pages of frozen weights are not locked: that would copy them. Those that user code has written are uploaded pageable.
        """
        self._pin = True
        if self.shared is not None and aligned(self.shared.bytes.nbytes) < self._nbytes:
            self._memory = PinnedMemory(self._device, memory=self._view[self.own_from :], pin=True)
            self.pinned = self.pinned and self._memory.pinned

    def reallocate(self) -> None:
        self.shared = None
        super().reallocate()

    def own(self, end: int) -> list[tuple[int, int]]:
        """Returns where this trial's own pages begin and end before ``end``, in order."""
        return [(begin, min(last, end)) for begin, last in written_pages(self._view[: whole_pages(end)])]


class TrialBlock(HostBlock):
    """A layer's weights of one trial. Common weights are not written, and the trial's copy of them is freed.

    Args:
        shared: the common weights of this layer.
        arguments, options: those of :class:`~sp_lightning.store.block.HostBlock`.

    Attributes:
        common_bytes: bytes of weights that equalled the common ones at first.
        travels: whether the layer is uploaded as a whole in each step.
    """

    memory: TrialMemory

    def __init__(self, shared: SharedLayer, *arguments: Any, **options: Any) -> None:
        self.common_bytes, self.travels = 0, not options.get("fetched_seldom")
        layer, planned, device, staging, _ = arguments
        memory = TrialMemory(device, shared, planned.nbytes)
        super().__init__(layer, planned, device, staging, lambda *_: memory, **options)
        shared.filled = True
        if options["pin"]:
            memory.lock()

    def _absorb(self, index: int, into: Tensor | None) -> None:
        shared, parameter, span = self.memory.shared, self.parameters[index], self.planned.spans[index]
        if shared is not None and span.offset + span.nbytes <= shared.bytes.nbytes:
            common = bytes_of(shared.bytes, span)
            with no_inference_mode(), torch.no_grad():
                value = torch.empty(common.nbytes, dtype=torch.uint8, device="cpu")
                view(value, self._own_spans[index]).copy_(parameter.data)
                if not shared.filled:
                    common.copy_(value)
                if torch.equal(value, common):
                    self.common_bytes += common.nbytes
                if torch.equal(value, self.weight_bytes(index)):  # a page of this trial may have another value
                    into = None
        super()._absorb(index, into)


@dataclass(eq=False)
class _OnDevice:
    """Device memory with a common layer.

    Attributes:
        memory: as large as the largest common layer when it was allocated.
        device: copies to it.
        layer: the layer; None at first.
        filled: the event after its upload.
        read: the events after trials have copied it.
    """

    memory: Tensor
    device: Device
    layer: SharedLayer | None = None
    filled: Any = None
    read: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Waits for all copies from and to the memory."""
        for event in (self.filled, *self.read):
            self.device.synchronize(event, Wait.CLOSE_AFTER_FETCH)
        self.device.access(self.memory, Stream.COMPUTE, write=True)  # compute may use the memory next


class SharedLayers:
    """The layers that trials have in common: all of them on the host, and those that were uploaded last on the device.

    Args:
        layers: how many are on the device at once.

    Attributes:
        fetched_bytes: bytes that were copied to the device for all trials together.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._host: dict[Hashable, SharedLayer] = {}  # by name and spans in the modules
        self._device: list[_OnDevice] = []  # in the order of their uploads
        self.fetched_bytes = 0

    def layer(self, planned: PlannedLayer, frozen: int, device: Device, *, pin: bool) -> SharedLayer:
        """Returns the common layer for a planned one, whose first ``frozen`` weights are frozen. The first trial fills it."""
        spans = planned.spans[:frozen]
        place, nbytes = (planned.name, spans), max(span.offset + span.nbytes for span in spans)
        found = self._host.get(place)
        if found is None or found.nbytes < planned.nbytes:
            found = self._host[place] = SharedLayer(device, nbytes, 2 * planned.nbytes, pin=pin)
        return found

    def there(self, layer: Hashable) -> bool:
        """Returns True if a layer is on the device, or its upload is in flight."""
        return any(each.layer is layer for each in self._device)

    def bring(self, layer: SharedLayer, device: Device) -> _OnDevice:
        """Returns device memory that has a layer after :attr:`_OnDevice.filled`. Uploads it if it is not on the device."""
        for each in self._device:
            if each.layer is layer:
                return each
        there = self._device.pop(0) if len(self._device) == self._layers else None
        if there is not None and there.memory.nbytes < layer.bytes.nbytes:  # a later trial has larger layers
            there.close()
            there = None
        if there is None:
            there = _OnDevice(device.upload_target(max(each.bytes.nbytes for each in self._host.values())), device)
        # If a trial has failed, no event in ``read`` may follow the upload: only ``filled`` marks its end.
        for event in (there.filled, *there.read):
            device.wait(Stream.UPLOAD, event, Wait.BRING_AFTER_SHARE)
        device.copy([there.memory[: layer.bytes.nbytes]], [layer.bytes], Stream.UPLOAD)
        there.layer, there.filled, there.read = layer, device.record(Stream.UPLOAD), []
        self.fetched_bytes += layer.bytes.nbytes
        self._device.append(there)
        return there

    def free(self) -> None:
        """Frees the device's memory, when no trial is under way."""
        while self._device:
            self._device.pop().close()


class SharedUploads(Uploads):
    """Fills a trial's slots with common weights from the device, and with the trial's own weights from the host.

    Args:
        device: copies.
        common: the common layers.
        pass_on: called with a layer before it is uploaded. Other trials may have their turns in the call.
        alone: returns True if no other trial is under way. Common weights are then uploaded into the slot directly.
    """

    def __init__(
        self, device: Device, common: SharedLayers, pass_on: Callable[[Hashable], None], alone: Callable[[], bool]
    ) -> None:
        super().__init__(device)
        self._common = common
        self._pass_on = pass_on
        self._alone = alone
        self._unused = set[StreamedLayer]()  # layers that were fetched
        self._passed = False  # other trials may have had turns since compute used one of them

    def send(self, layer: StreamedLayer, target: Tensor, source: Tensor) -> None:
        memory: Any = layer.block.memory
        shared = memory.shared if isinstance(memory, TrialMemory) else None
        self._pass_on(shared)
        self._passed = True
        self._unused.add(layer)
        if shared is None:
            super().send(layer, target, source)
            return
        end = shared.bytes.nbytes
        own = memory.own(end)
        edges = [0, *(edge for run in own for edge in run), end]
        common = [slice(*run) for run in zip(edges[::2], edges[1::2], strict=True) if run[0] < run[1]]
        # CUDA refuses a copy from memory that is page-locked in part.
        edge = memory.own_from
        before = [(begin, min(last, edge)) for begin, last in own]
        behind = [(max(begin, edge), last) for begin, last in (*own, (end, source.nbytes))]
        its_own = [slice(*run) for run in (*before, *behind) if run[0] < run[1]]
        origin, on_device = shared.bytes, None
        if common and not self._alone():
            on_device = self._common.bring(shared, self.device)
            origin = on_device.memory
            self.device.wait(Stream.UPLOAD, on_device.filled, Wait.SHARE_AFTER_BRING)
        sources = [*(origin[run] for run in common), *(source[run] for run in its_own)]
        self.device.copy([target[run] for run in (*common, *its_own)], sources, Stream.UPLOAD)
        if on_device is not None:
            on_device.read.append(self.device.record(Stream.UPLOAD))

    def before_use(self, layer: StreamedLayer) -> None:
        # If nothing is left to fetch at the end of a forward, the kernels of this trial would wait for uploads, and those of all
        # other trials behind them: the device has one stream for kernels.
        if layer in self._unused:
            self._unused.remove(layer)
            if not self._passed:
                self._pass_on(None)
            self._passed = False
