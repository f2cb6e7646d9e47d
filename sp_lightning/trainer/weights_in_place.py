"""Which layers' weights stay in the files that a user has them in: in training the frozen ones, otherwise any."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import nn

from sp_lightning.device.host_allocator import return_large_blocks
from sp_lightning.device.layout import whole_pages
from sp_lightning.engine.file_source import WINDOW
from sp_lightning.engine.placement import ONE_DEVICE, OnFiles, Placement
from sp_lightning.model.found import Found, Layer
from sp_lightning.plan.host_memory import remedy_for, room_for
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.file_block import home_of
from sp_lightning.store.weights_in_files import BOUNCE, FilePlace, Mappings

Places = Sequence[FilePlace | None]


@dataclass
class InFiles:
    """What of a model is in files.

    Attributes:
        places: the layers that can leave weights there, with the place of each weight.
        sizes: bytes of those weights, by the layer.
        others: bytes that come to memory whatever stays: weights that have to, and casts.
        resident: bytes of the files that the process has mapped to its memory, which it will not have any more.
    """

    places: dict[str, Places] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    others: int = 0
    resident: int = 0


def place_weights(
    found: Found, plan: Plan, host_memory: int | float | None, device: torch.device, *, training: bool
) -> Placement:
    """Decides it. Weights stay where they are as far as host memory has no room for them.

    Args:
        found: the layers.
        plan: their sizes.
        host_memory: the user's option.
        device: where layers compute.
        training: whether weights are trained.

    Returns:
        The engine's parts for it.

    Raises:
        MemoryError: there is not even room for what does not stay.
    """
    files = InFiles()
    with suppress(FileNotFoundError, PermissionError):  # not every system says what is mapped
        files = in_files(found, plan, training=training)
    room = _room(host_memory, plan, device, training * 3 * _trained(found) - files.resident)
    if room is None:
        return ONE_DEVICE
    if not files.places:
        exceeded = room < 0 and not training and isinstance(host_memory, int)
        return Placement(_nothing_in_place(-room)) if exceeded else ONE_DEVICE
    largest = max(layer.nbytes for layer in plan.layers if layer.name in files.places)
    stay = choose(files, room, WINDOW * whole_pages(largest) + BOUNCE, host_memory)
    if not stay:
        return ONE_DEVICE
    return_large_blocks()
    nbytes = sum(files.sizes[name] for name in stay)
    return OnFiles(stay, _told(stay, nbytes, room), nbytes)


def _nothing_in_place(exceeded: int) -> str:
    return (
        f"The process takes {human_bytes(exceeded)} more than host_memory leaves it, and no weights can be read in place, "
        "because none are in memory that is mapped from a file. Build the module on the meta device, and give its weights with "
        "ckpt_path= or SuperpipelineStrategy(weights=FILE)."
    )


def choose(files: InFiles, room: int, staging: int, given: int | float | None = None) -> dict[str, Places]:
    """Returns which layers leave weights in files: as few as there is room for the others.

    Args:
        files: what there is.
        room: bytes of host memory.
        staging: bytes of it for layers on their way, if there are any.
        given: ``host_memory``, for the error.

    Raises:
        MemoryError: there is not even room for what does not stay.
    """
    if files.others + sum(files.sizes.values()) <= room:
        return {}
    kept, stay = files.others + staging, dict(files.places)
    for name in files.places:
        if kept + files.sizes[name] <= room:
            kept += files.sizes[name]
            del stay[name]
    if kept > room:
        raise MemoryError(
            f"Host memory is {human_bytes(kept - room)} too small for the process, for what is not read in place, and for layers "
            f"on their way ({human_bytes(kept)}): {remedy_for(kept - room, given)}. Less is needed where layers= names smaller "
            "layers."
        )
    return stay


def _told(stay: Mapping[str, Places], nbytes: int, room: int) -> str:
    paths = sorted({place.path for each in stay.values() for place in each if place is not None})
    return (
        f"The weights of {len(stay)} layers ({human_bytes(nbytes)}) are read in place from {paths[0]}"
        + (f" and {len(paths) - 1} other files" if len(paths) > 1 else "")
        + f", because {human_bytes(max(room, 0))} of host memory are left for weights."
    )


def _room(host_memory: int | float | None, plan: Plan, device: torch.device, others: int) -> int | None:
    """Bytes of host memory for weights, beside so many for others; None for no limit."""
    room = room_for(host_memory)
    if room is not None and device.type == "cpu":  # the slots are host memory, too
        room -= plan.slot_bytes + plan.residents.nbytes
    return None if room is None else room - others


def _trained(found: Found) -> int:
    """Bytes of the weights that are trained. Their gradients, and two tensors of Adam's state, take as much each."""
    layers = (*found.layers, *found.masters, *found.tables, found.residents)
    return sum(p.nbytes for layer in layers for _, p in layer.parameters if p.requires_grad)


def in_files(found: Found, plan: Plan, *, training: bool) -> InFiles:
    mappings, files = Mappings(), InFiles()

    def place(parameter: nn.Parameter) -> FilePlace | None:
        if (home := home_of(parameter)) is not None:  # an earlier run has left it there
            return home.place
        ordinary = type(parameter) is nn.Parameter and parameter.is_contiguous()
        return mappings.place(parameter) if ordinary else None

    for layer, planned in zip(found.layers, plan.layers, strict=True):
        places = [place(parameter) for _, parameter in layer.parameters]
        files.others += sum(cast.nbytes for cast in planned.casts) + _nbytes(layer, places)
        if training:
            places = [
                None if p.requires_grad or p.grad is not None else each
                for each, (_, p) in zip(places, layer.parameters, strict=True)
            ]
        if stays := _nbytes(layer, places):
            files.others -= stays
            files.places[planned.name], files.sizes[planned.name] = places, stays
    for layer in (*found.masters, *found.tables, found.residents):
        files.others += _nbytes(layer, [place(parameter) for _, parameter in layer.parameters])
    files.resident = mappings.resident_bytes
    return files


def _nbytes(layer: Layer, places: Places) -> int:
    pairs = zip(layer.parameters, places, strict=True)
    return sum(parameter.nbytes for (_, parameter), place in pairs if place is not None)
