"""Placements of one device: weights that stay in the user's files, and trained weights and gradients in scratch files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sp_lightning.capabilities.disk.away import note_on_disk
from sp_lightning.capabilities.disk.file_source import FileSource
from sp_lightning.capabilities.disk.mapped_file import MappedFile, page_out
from sp_lightning.capabilities.disk.state_placement import OnDisk
from sp_lightning.capabilities.disk.weights_in_files import FileBlock, FilePlace, WeightReader
from sp_lightning.core.device.device import Device
from sp_lightning.core.device.host_memory import return_free_memory
from sp_lightning.core.device.layout import ALIGNMENT, PAGE, whole_pages
from sp_lightning.core.engine.host_source import HostSource
from sp_lightning.core.engine.placement import Placement
from sp_lightning.core.model.found import Layer
from sp_lightning.core.plan.ledger import Ledger
from sp_lightning.core.plan.plan import PlannedLayer
from sp_lightning.core.store.block import HostBlock
from sp_lightning.core.store.block_memory import Allocate, Staging


class FilePlacement(Placement):
    """Weights of some layers stay in the user's files.

    Args:
        places: for each layer with weights in files, by name: the place of each weight; None for a weight in memory.
        remark: a sentence for the user.
        nbytes: the bytes of weights in files.
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
        # Masters are never in files, although `places` may have their name: it is the name of their layer.
        if fetched_seldom or planned.name not in self.places:
            return super().block(layer, planned, *args, fetched_seldom=fetched_seldom, **options)
        return FileBlock(layer, planned, *args, reader=self.reader, places=self.places[planned.name], **options)

    @property
    def source(self) -> type[HostSource]:
        return FileSource

    def count(self, ledger: Ledger) -> Ledger:
        return replace(ledger, weights=ledger.weights - self.bytes_in_files)


class ScratchPlacement(Placement):
    """Trained weights or gradients of some layers are in scratch files.

    Args:
        inner: the placement of all other weights.
        folder: the folder of the scratch files.
        on_disk: the weights and gradients in scratch files.
        remark: a sentence for the user.

    Raises:
        OSError: no file can be created in the folder, or the disk has no room.
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
        self.pages, self.pages_gradients = True, bool(on_disk.gradients)

    @property
    def moved(self) -> int:
        """The bytes of weights and gradients that were read and written so far."""
        return sum(file.read_bytes + file.written_bytes for file in (self.file, self._gradients))

    def leave(self) -> None:
        self.file.leave()

    def complete_pending(self) -> None:
        for file in (self.file, self._gradients):
            file.sync()

    def block(
        self, layer: Layer, planned: PlannedLayer, device: Device, staging: Staging, allocate: Allocate, **options: Any
    ) -> HostBlock:
        if planned.name in self._with_gradients:  # also for masters, which have the name of their layer
            staging = Staging(device, pin=False, allocate=self._gradients.allocate)
            note_on_disk(parameter for _, parameter in layer.parameters)
        if id(planned) not in self._chosen:
            return self._inner.block(layer, planned, device, staging, allocate, **options)
        sources = [(parameter.data_ptr(), parameter.nbytes) for _, parameter in layer.parameters]
        block = HostBlock(layer, planned, device, staging, self.file.allocate, **options)
        note_on_disk(block.parameters)
        # The sources may be mapped from a file, which stays mapped until all its weights are absorbed. So they are evicted.
        for source in sources:
            page_out(*source)
        block.memory.use()  # evicts the least recently absorbed block
        return_free_memory()
        return block

    @property
    def source(self) -> type[HostSource]:
        return self._inner.source

    def count(self, ledger: Ledger) -> Ledger:
        weights, gradients = self.on_disk.weight_bytes, self.on_disk.gradient_bytes
        ledger = self._inner.count(ledger)
        return replace(
            ledger,
            weights=ledger.weights - weights,
            # The ledger has fewer gradients if the mode of updates, which was chosen after this placement, frees them early.
            gradients=max(0, ledger.gradients - gradients),
            weights_on_disk=weights,
            gradients_on_disk=gradients,
        )


def on_disk(placement: Placement) -> OnDisk:
    """Returns which trained weights and gradients of a run are in scratch files."""
    return placement.on_disk if isinstance(placement, ScratchPlacement) else OnDisk()


def _room_for_gradients(layer: PlannedLayer) -> int:
    """Returns the most bytes that the gradients of a layer and its masters take in a file, with padding."""
    return whole_pages(layer.gradient_bytes + ALIGNMENT * (len(layer.spans) + len(layer.casts))) + PAGE
