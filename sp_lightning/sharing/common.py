"""What trials have in common: one copy of it on the host, and a few of its layers on the device.

Each trial sees a block of weights through a view of its own, in which a page becomes its own when it is written: with what it
trains, with what differs from the others', and with whatever its user code writes. All other pages are everybody's. The system
says which ones they are, so that nothing has to be declared, and nothing can be forgotten.
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
from sp_lightning.layers.layer import PendingUpload, StreamedLayer
from sp_lightning.layers.uploads import Uploads
from sp_lightning.plan.plan import PlannedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import BlockMemory
from sp_lightning.torch_compat.modes import no_inference_mode

R = TypeVar("R")

ON_DEVICE = 2
"""Layers of what trials have in common that are on the device beside their windows, if their user does not say how many."""


class SharedLayer:
    """What trials have in common of a layer, on the host: its frozen weights, which come first. Once filled, nobody writes it.

    Args:
        device: page-locks it.
        nbytes: of the frozen weights.
        most: of all weights of a trial, at most. Pages that nobody writes take no memory.
        pin: whether it is page-locked.

    Attributes:
        nbytes: of its pages.
        bytes: the frozen weights, flat ``uint8``.
        pinned: whether they are page-locked.
        filled: whether the first trial has filled it.
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
        """Returns a view of the first so many bytes, in whole pages, in which a page becomes its own when it is written."""
        return self._map(whole_pages(nbytes), shared=False)

    def _map(self, nbytes: int, *, shared: bool) -> Tensor:
        # Unlike Python's, torch's map keeps no descriptor: the layer needs one, however many trials there are.
        file = f"/proc/self/fd/{self._file}"
        return _with_descriptor(torch.from_file, file, shared=shared, size=nbytes, dtype=torch.uint8)


def _with_descriptor(opens: Callable[..., R], *args: Any, **kwargs: Any) -> R:
    """Calls what opens a file. Where the process may have no more, an OSError says so."""
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
    """The memory of a block, as one trial sees it. Unlike that of ranks, no optimizer writes what all see.

    Args:
        device: allocates other memory, if user code asks for that.
        shared: whose pages all are that this trial does not write.
        nbytes: of the block.

    Attributes:
        shared: the same; None once the block has other memory.
        own_from: where the pages begin that are this trial's own in any case: that of the first byte behind the frozen weights.
    """

    def __init__(self, device: Device, shared: SharedLayer, nbytes: int) -> None:
        self._device, self._nbytes, self._pin = device, nbytes, False
        self.shared: SharedLayer | None = shared
        self.own_from = shared.bytes.nbytes // PAGE * PAGE
        self._view = shared.view(nbytes)
        self.common = self._view[: self._nbytes]
        self.pinned = shared.pinned  # nearly all comes from there

    def lock(self) -> None:
        """Page-locks trained weights and casts, once they have their values: copies from pageable memory block the host.

        Pages of frozen weights are not locked: that would make them the trial's own. Those of its own among them, which user
        code has written, are copied as they are.
        """
        self._pin = True
        if self.shared is not None and aligned(self.shared.bytes.nbytes) < self._nbytes:
            self._memory = PinnedMemory(self._device, memory=self._view[self.own_from :], pin=True)
            self.pinned = self.pinned and self._memory.pinned

    def anew(self) -> None:
        self.shared = None
        super().anew()

    def own(self, end: int) -> list[tuple[int, int]]:
        """Where this trial's own pages begin and end before ``end``, in order."""
        return [(begin, min(last, end)) for begin, last in written_pages(self._view[: whole_pages(end)])]


class TrialBlock(HostBlock):
    """A layer's weights of one trial. What all have in common is not written, and the trial's copy of it is freed.

    Args:
        shared: what all have in common of this layer.
        arguments, options: those of :class:`~sp_lightning.store.block.HostBlock`.

    Attributes:
        common_bytes: of weights that were the common ones at first.
        travels: whether it is fetched as a whole in each step.
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

    def _take(self, index: int, into: Tensor | None) -> None:
        shared, parameter, span = self.memory.shared, self.parameters[index], self.planned.spans[index]
        if shared is not None and span.offset + span.nbytes <= shared.bytes.nbytes:
            common = bytes_of(shared.bytes, span)
            with no_inference_mode(), torch.no_grad():
                value = torch.empty(common.nbytes, dtype=torch.uint8, device="cpu")
                view(value, self._alone[index]).copy_(parameter.data)
                if not shared.filled:
                    common.copy_(value)
                if torch.equal(value, common):
                    self.common_bytes += common.nbytes
                if torch.equal(value, self.present(index)):  # a page that is this trial's own may have another value
                    into = None
        super()._take(index, into)


@dataclass(eq=False)
class _OnDevice:
    """Device memory that has a common layer.

    Attributes:
        memory: of the size of the largest layer that was there when it was made.
        device: which copies to it.
        layer: the layer; None at first.
        filled: the event after which it is there.
        read: the events after which those trials are done that have copied it.
    """

    memory: Tensor
    device: Device
    layer: SharedLayer | None = None
    filled: Any = None
    read: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Waits until no copy reads or writes the memory any more."""
        for event in (self.filled, *self.read):
            self.device.synchronize(event, Wait.CLOSE_AFTER_FETCH)
        self.device.access(self.memory, Stream.COMPUTE, write=True)  # which may use it next


class SharedLayers:
    """The layers that trials have in common: all of them on the host, and those that came last on the device.

    Args:
        layers: how many are on the device at once.

    Attributes:
        fetched_bytes: bytes that were copied to the device for all trials together.
    """

    def __init__(self, layers: int) -> None:
        self._layers = layers
        self._host: dict[Hashable, SharedLayer] = {}  # by their places in the modules
        self._device: list[_OnDevice] = []  # the one that came first is first
        self.fetched_bytes = 0

    def layer(self, planned: PlannedLayer, frozen: int, device: Device, *, pin: bool) -> SharedLayer:
        """Returns the layer at a place, whose first so many weights are frozen. The first trial that has one there fills it."""
        spans = planned.spans[:frozen]
        place, nbytes = (planned.name, spans), max(span.offset + span.nbytes for span in spans)
        found = self._host.get(place)
        if found is None or found.nbytes < planned.nbytes:
            found = self._host[place] = SharedLayer(device, nbytes, 2 * planned.nbytes, pin=pin)
        return found

    def there(self, layer: Hashable) -> bool:
        """Whether a layer is on the device, or on its way."""
        return any(each.layer is layer for each in self._device)

    def bring(self, layer: SharedLayer, device: Device) -> _OnDevice:
        """Returns device memory that has a layer, or will have it after :attr:`_OnDevice.filled`."""
        for each in self._device:
            if each.layer is layer:
                return each
        there = self._device.pop(0) if len(self._device) == self._layers else None
        if there is not None and there.memory.nbytes < layer.bytes.nbytes:  # a trial has come since with larger layers
            there.close()
            there = None
        if there is None:
            there = _OnDevice(device.upload_target(max(each.bytes.nbytes for each in self._host.values())), device)
        # If a trial has failed, no event in ``read`` may follow its upload: then only ``filled`` says when that is done.
        for event in (there.filled, *there.read):
            device.wait(Stream.UPLOAD, event, Wait.BRING_AFTER_SHARE)
        device.copy([there.memory[: layer.bytes.nbytes]], [layer.bytes], Stream.UPLOAD)
        there.layer, there.filled, there.read = layer, device.record(Stream.UPLOAD), []
        self.fetched_bytes += layer.bytes.nbytes
        self._device.append(there)
        return there

    def free(self) -> None:
        """Frees the device's memory: no trial is under way."""
        while self._device:
            self._device.pop().close()


class SharedUploads(Uploads):
    """Fills a trial's slots with what all have in common, once that is on the device, and with what is the trial's own.

    Args:
        device: copies.
        common: what all have in common.
        pass_on: is told of the layer that is needed, before it comes.
        alone: says whether no other trial is under way, so that nobody else needs what comes.
    """

    def __init__(
        self, device: Device, common: SharedLayers, pass_on: Callable[[Hashable], None], alone: Callable[[], bool]
    ) -> None:
        super().__init__(device)
        self._common = common
        self._pass_on = pass_on
        self._alone = alone
        self._unused = set[StreamedLayer]()  # that were fetched
        self._passed = False  # whether others have had their turns since compute came to one of those

    def send(
        self, layer: StreamedLayer, target: Tensor, source: Tensor, landed: Callable[[], None]
    ) -> PendingUpload | None:
        memory: Any = layer.block.memory
        shared = memory.shared if isinstance(memory, TrialMemory) else None
        self._pass_on(shared)
        self._passed = True
        self._unused.add(layer)
        if shared is None:
            return super().send(layer, target, source, landed)
        end = shared.bytes.nbytes
        own = memory.own(end)
        edges = [0, *(edge for run in own for edge in run), end]
        common = [slice(*run) for run in zip(edges[::2], edges[1::2], strict=True) if run[0] < run[1]]
        # No copy is from memory that is page-locked and other memory together, which CUDA refuses.
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
        return None

    def go_on(self, using: StreamedLayer | None = None) -> None:
        # Where nothing is left to fetch, at the end of a forward, the kernels of one trial would wait for layers that come,
        # and those of all others behind them: the device has one stream for kernels.
        if using in self._unused:
            self._unused.remove(using)
            if not self._passed:
                self._pass_on(None)
            self._passed = False
