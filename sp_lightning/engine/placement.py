"""Placement: makes the parts of the engine that differ with the place of the weights and with the number of devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sp_lightning.device.device import Device
from sp_lightning.device.host_memory import return_free_memory
from sp_lightning.device.layout import ALIGNMENT, PAGE, whole_pages
from sp_lightning.disk.away import note_on_disk
from sp_lightning.disk.mapped_file import MappedFile, page_out
from sp_lightning.disk.state_placement import OnDisk
from sp_lightning.disk.weights_in_files import FileBlock, FilePlace, WeightReader
from sp_lightning.engine.host_source import FileSource, HostSource
from sp_lightning.engine.step import Step
from sp_lightning.engine.turns import Turns
from sp_lightning.layers.gradient_sink import GradientSink
from sp_lightning.layers.gradients import Gradients
from sp_lightning.layers.layer import StreamedLayer
from sp_lightning.layers.uploads import Uploads
from sp_lightning.model.found import Layer
from sp_lightning.plan.plan import Plan, PlannedLayer
from sp_lightning.store.block import HostBlock
from sp_lightning.store.block_memory import Allocate, BlockMemory, Staging
from sp_lightning.updates.background import BackgroundUpdates


class Placement:
    """Makes the parts of the engine for weights in host memory, and for one device. Subclasses make others.

    Attributes:
        remark: what a user should know of it, as a sentence.
        bytes_in_files: of weights that are read in place.
        on_disk: what is trained, and on a disk.
        moved: bytes of that which were read and written so far.
        sliced: whether the devices of a node upload layers together.
    """

    remark = ""
    bytes_in_files = moved = 0
    on_disk = OnDisk()
    sliced = False

    def __init__(self, remark: str = "") -> None:
        self.remark = remark

    def leave(self) -> None:
        """Has weights leave memory that were absorbed and are on a disk."""

    def complete_pending(self) -> None:
        """Waits until nothing is being written.

        Raises:
            OSError: something could not be.
        """

    def allocate(self, device: Device, plan: Plan) -> Allocate:
        """Returns what allocates the host memory of the plan's layers, in their order."""
        return partial(BlockMemory, device)

    def blocks(self, device: Device, plan: Plan) -> tuple[Allocate, Callable[..., HostBlock]]:
        """Returns what allocates memory, and what makes blocks."""
        return self.allocate(device, plan), self.block

    def block(self, layer: Layer, planned: PlannedLayer, *args: Any, **options: Any) -> HostBlock:
        """Makes the block of a layer, as the class :class:`~sp_lightning.store.block.HostBlock` does."""
        return HostBlock(layer, planned, *args, **options)

    def uploads(self, device: Device, lock: threading.RLock, log: logging.Logger | None) -> Uploads:
        """Returns what copies layers to the device."""
        return Uploads(device)

    def gradients(
        self, device: Device, staging: Staging, layers: Sequence[StreamedLayer], in_flight: int
    ) -> GradientSink:
        """Returns the place that gradients go to."""
        return Gradients(device, staging, in_flight=in_flight)

    def updates(self, layers: Sequence[StreamedLayer], device: Device) -> BackgroundUpdates:
        """Returns what runs updates in the background."""
        return BackgroundUpdates(layers, device)

    @property
    def source(self) -> type[HostSource]:
        """The class of what brings layers' bytes."""
        return HostSource

    def turns(self, lock: threading.RLock, layers: Sequence[StreamedLayer], source: HostSource, step: Step) -> Turns:
        """Returns who may change the weights when. The other parts have been made already."""
        return Turns()


class FilePlacement(Placement):
    """The parts of one device where weights of some layers stay in the files that a user has them in.

    Args:
        places: where the weights of these layers are, by the layers' names; None for weights that come to memory.
        remark, nbytes: what a user should know of it, and the bytes of those weights.
    """

    def __init__(self, places: Mapping[str, Sequence[FilePlace | None]], remark: str, nbytes: int) -> None:
        self.places = places
        self.remark = remark
        self.bytes_in_files = nbytes
        self.reader = WeightReader()
        for place in {place.path: place for each in places.values() for place in each if place is not None}.values():
            self.reader.open(place)

    def block(
        self, layer: Layer, planned: PlannedLayer, *args: Any, fetched_seldom: bool = False, **options: Any
    ) -> HostBlock:
        if fetched_seldom or planned.name not in self.places:  # masters have the name of their layer
            return super().block(layer, planned, *args, fetched_seldom=fetched_seldom, **options)
        return FileBlock(layer, planned, *args, reader=self.reader, places=self.places[planned.name], **options)

    @property
    def source(self) -> type[HostSource]:
        return FileSource


class ScratchPlacement(Placement):
    """The parts of one device where trained weights of some layers, or gradients, are in scratch files.

    Args:
        inner: says where other weights are.
        folder: where the files are.
        on_disk: what is there.
        remark: what a user should know of it.

    Raises:
        OSError: no file can be created in the folder, or it has no room.
    """

    def __init__(self, inner: Placement, folder: Path, on_disk: OnDisk, remark: str) -> None:
        self._inner = inner
        self.file = MappedFile(folder)
        self._gradients = MappedFile(folder, "gradients")
        self.on_disk = on_disk
        self._chosen = set(map(id, on_disk.weights))
        self._with_gradients = {layer.name for layer in on_disk.gradients}
        if on_disk.gradients:
            self._gradients.reserve(sum(map(_room_for_gradients, on_disk.gradients)))
        self.remark = f"{inner.remark} {remark}".strip()
        self.bytes_in_files = inner.bytes_in_files

    @property
    def moved(self) -> int:  # type: ignore[override]
        return sum(file.read_bytes + file.written_bytes for file in (self.file, self._gradients))

    def leave(self) -> None:
        self.file.leave()

    def complete_pending(self) -> None:
        self.file.sync()

    def block(
        self, layer: Layer, planned: PlannedLayer, device: Device, staging: Staging, allocate: Allocate, **options: Any
    ) -> HostBlock:
        if planned.name in self._with_gradients:  # masters have the name of their layer
            staging = Staging(device, pin=False, on_disk=self._gradients.allocate)
            note_on_disk([parameter for _, parameter in layer.parameters])
        if id(planned) not in self._chosen:
            return self._inner.block(layer, planned, device, staging, allocate, **options)
        sources = [(parameter.data_ptr(), parameter.nbytes) for _, parameter in layer.parameters]
        block = HostBlock(layer, planned, device, staging, self.file.allocate, **options)
        note_on_disk(block.parameters)
        for source in sources:  # they may be a mapped file's, which stays mapped until all of it was absorbed
            page_out(*source)
        block.memory.use()  # those that were absorbed before it go
        return_free_memory()
        return block

    @property
    def source(self) -> type[HostSource]:
        return self._inner.source


def _room_for_gradients(layer: PlannedLayer) -> int:
    """Bytes of a file that a layer's gradients take at most, in its block and in its masters'."""
    return whole_pages(layer.gradient_bytes + ALIGNMENT * (len(layer.spans) + len(layer.casts))) + PAGE


ONE_DEVICE = Placement()
