"""Weights that trials have in common: one copy on the host, and a few layers on the device.

Each trial sees a block of weights through a private view. In this view a page is copied when it is first written: by training, by
user code, or at set-up by weights that differ from those of other trials. All other pages are shared. The system reports which
pages were written, so users need not declare which weights are common.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sp_lightning.core.device.device import Device, Stream, Wait
from sp_lightning.core.device.host_memory import PinnedMemory
from sp_lightning.core.device.layout import PAGE, aligned, bytes_of, view, whole_pages
from sp_lightning.core.device.pages import create, written_pages
from sp_lightning.core.layers.layer import StreamedLayer
from sp_lightning.core.layers.ring import Uploads
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import BlockMemory
from sp_lightning.core.torch_compat.modes import no_inference_mode

ON_DEVICE = 2
"""The default number of common layers on the device, in addition to the trials' windows."""


class SharedLayer:
    """Host memory with the frozen weights of a layer that trials have in common. The first trial writes the weights.

    Args:
        device: page-locks the memory.
        nbytes: the bytes of the frozen weights, which are at the start of the memory.
        most: the most bytes of all weights of this layer in a trial. Pages that are never written take no memory.
        pin: True to page-lock the frozen weights.

    Attributes:
        nbytes: the size of the memory in bytes, in whole pages.
        bytes: the frozen weights, flat ``uint8``.
        pinned: True if the frozen weights are page-locked.
        filled: True after the first trial has written the frozen weights.
    """

    def __init__(self, device: Device, nbytes: int, most: int, *, pin: bool) -> None:
        self.nbytes = whole_pages(most)
        self._file = create(self.nbytes, "superpipeline-base")
        weakref.finalize(self, os.close, self._file)
        memory = self._map(self.nbytes, shared=True)
        self._locked = PinnedMemory(device, memory=memory[: whole_pages(nbytes)], pin=pin)
        self.bytes = memory[:nbytes]
        self.pinned = self._locked.pinned
        self.filled = False

    def view(self, nbytes: int) -> Tensor:
        """Returns a private view of the first ``nbytes`` bytes, in whole pages. Its pages are copied when they are written."""
        return self._map(whole_pages(nbytes), shared=False)

    def _map(self, nbytes: int, *, shared: bool) -> Tensor:
        # Python's mmap would keep a descriptor for each mapping. torch's keeps none: one descriptor per layer serves all trials.
        file = f"/proc/self/fd/{self._file}"
        return torch.from_file(file, shared=shared, size=nbytes, dtype=torch.uint8)


class TrialMemory(BlockMemory):
    """The memory of a block, as one trial sees it: a private view, so the trial's writes do not change the shared pages.

    Args:
        device: allocates other memory after user code has given weights other memory (:meth:`reallocate`).
        shared: the shared memory. Pages that this trial does not write are read from it.
        nbytes: the size of the block in bytes.

    Attributes:
        shared: the argument; None after :meth:`reallocate`.
        own_from: the offset of the page with the first byte behind the frozen weights. From there on pages belong to this trial.
    """

    def __init__(self, device: Device, shared: SharedLayer, nbytes: int) -> None:
        self._device, self._nbytes, self._pin = device, nbytes, False
        self.shared: SharedLayer | None = shared
        self.own_from = shared.bytes.nbytes // PAGE * PAGE
        self._view = shared.view(nbytes)
        self.common = self._view[: self._nbytes]
        self.pinned = shared.pinned  # nearly all bytes are uploaded from the shared memory

    def lock(self) -> None:
        """Page-locks trained weights and casts, because copies from pageable memory block the host.

        Called when they have their values. Pages of frozen weights are not locked, because locking would copy them. So pages of
        frozen weights that user code has written are uploaded from pageable memory.
        """
        self._pin = True
        if self.shared is not None and aligned(self.shared.bytes.nbytes) < self._nbytes:
            self._memory = PinnedMemory(self._device, memory=self._view[self.own_from :], pin=True)
            self.pinned = self.pinned and self._memory.pinned

    def reallocate(self) -> None:
        self.shared = None
        super().reallocate()

    def own(self, end: int) -> list[tuple[int, int]]:
        """Returns the offsets between which pages belong to this trial, because it has written them, in order.

        Args:
            end: the offset at which the search ends. The last pages are cut there.
        """
        return [(begin, min(last, end)) for begin, last in written_pages(self._view[: whole_pages(end)])]


class TrialBlock(HostBlock):
    """A layer's weights of one trial. Weights that equal the common ones become views of shared pages. Their originals are freed.

    Args:
        shared: the common weights of this layer.
        arguments, options: the arguments of :class:`~sp_lightning.core.store.block.HostBlock`.

    Attributes:
        common_bytes: the bytes of weights that were equal to the common weights at set-up.
    """

    memory: TrialMemory

    def __init__(self, shared: SharedLayer, *arguments: Any, **options: Any) -> None:
        self.common_bytes = 0
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
                # Compared with the trial's view and not with `common`: the trial may have written the page before, for example if
                # user code puts a weight back. If the view shows the value already, nothing is written.
                if torch.equal(value, self.weight_bytes(index)):
                    into = None
        super()._absorb(index, into)


@dataclass(eq=False)
class _OnDevice:
    """Device memory with a copy of a common layer.

    Attributes:
        memory: the memory. It has the size of the largest common layer at the time of its allocation.
        device: copies to and from the memory.
        layer: the layer in the memory; None before the first upload.
    """

    memory: Tensor
    device: Device
    layer: SharedLayer | None = None

    def close(self) -> None:
        """Waits for all copies from and to the memory."""
        self.device.synchronize(self.device.record(Stream.UPLOAD), Wait.CLOSE_AFTER_FETCH)
        self.device.access(self.memory, Stream.COMPUTE, write=True)  # compute may use the memory next


class SharedLayers:
    """The layers that trials have in common: all of them on the host, and the most recently uploaded ones on the device.

    Args:
        layers: the number of layers on the device at once.

    Attributes:
        fetched_bytes: the bytes that were uploaded to the device for all trials together.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._host: dict[Hashable, SharedLayer] = {}  # by the layer's name and the spans of its frozen weights
        self._device: list[_OnDevice] = []  # in the order of their uploads
        self.fetched_bytes = 0

    def layer(self, planned: PlannedLayer, frozen: int, device: Device, *, pin: bool) -> SharedLayer:
        """Returns the common layer for a planned layer. Makes a new one if there is none, or if it is too small.

        Args:
            planned: the layer of a trial.
            frozen: the number of frozen weights, which are the first ones.
            device: page-locks the memory.
            pin: True to page-lock the memory.
        """
        spans = planned.spans[:frozen]
        place, nbytes = (planned.name, spans), max(span.offset + span.nbytes for span in spans)
        found = self._host.get(place)
        if found is None or found.nbytes < planned.nbytes:
            # Twice the size, because later trials may have larger adapters. Pages that are not written take no memory.
            found = self._host[place] = SharedLayer(device, nbytes, 2 * planned.nbytes, pin=pin)
        return found

    def there(self, layer: Hashable) -> bool:
        """Returns True if a layer is on the device, or its upload is in flight."""
        return any(each.layer is layer for each in self._device)

    def bring(self, layer: SharedLayer, device: Device) -> _OnDevice:
        """Returns device memory with a layer, which later operations of the upload stream may read.

        If the layer is not on the device, issues its upload, which replaces the layer that was uploaded first. All trials on a
        device have the same upload stream, so their copies need no waits among each other.
        """
        for each in self._device:
            if each.layer is layer:
                return each
        there = self._device.pop(0) if len(self._device) == self._layers else None
        if there is not None and there.memory.nbytes < layer.bytes.nbytes:  # a later trial has larger layers
            there.close()
            there = None
        if there is None:
            there = _OnDevice(device.upload_target(max(each.bytes.nbytes for each in self._host.values())), device)
        device.copy([there.memory[: layer.bytes.nbytes]], [layer.bytes], Stream.UPLOAD)
        there.layer = layer
        self.fetched_bytes += layer.bytes.nbytes
        self._device.append(there)
        return there

    def free(self) -> None:
        """Frees the device memory. Called when no trial is under way. Waits for copies from and to the memory."""
        while self._device:
            self._device.pop().close()


class SharedUploads(Uploads):
    """Fills a trial's slots with common weights from the device, and with the trial's own weights from the host.

    Args:
        device: copies the weights.
        common: the common layers.
        pass_on: called before a layer is uploaded, with the :class:`SharedLayer` that the trial needs, or None. Other trials may
            have their turns during the call.
        alone: returns True if no other trial is under way. In this case common weights are uploaded directly into the slot.
    """

    def __init__(
        self, device: Device, common: SharedLayers, pass_on: Callable[[Hashable], None], alone: Callable[[], bool]
    ) -> None:
        super().__init__(device)
        self._common = common
        self._pass_on = pass_on
        self._alone = alone
        self._unused = set[StreamedLayer]()  # layers that were uploaded and not used since then
        self._passed = False  # True after `send`, until an uploaded layer is used for the first time

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
        # Copies are cut at `own_from`: in the trial's view only the pages behind it are page-locked, and CUDA refuses a copy from
        # memory of which only a part is page-locked.
        edge = memory.own_from
        before = [(begin, min(last, edge)) for begin, last in own]
        behind = [(max(begin, edge), last) for begin, last in (*own, (end, source.nbytes))]
        its_own = [slice(*run) for run in (*before, *behind) if run[0] < run[1]]
        origin = shared.bytes
        if common and not self._alone():
            origin = self._common.bring(shared, self.device).memory
        sources = [*(origin[run] for run in common), *(source[run] for run in its_own)]
        self.device.copy([target[run] for run in (*common, *its_own)], sources, Stream.UPLOAD)

    def before_use(self, layer: StreamedLayer) -> None:
        # At the end of a forward no further upload may follow, so `send` lets no other trial have a turn. The kernels of this
        # trial wait for its last uploads. Without a change of turns, kernels of other trials would wait behind them, because the
        # device has one stream for kernels.
        if layer in self._unused:
            self._unused.remove(layer)
            if not self._passed:
                self._pass_on(None)
            self._passed = False
