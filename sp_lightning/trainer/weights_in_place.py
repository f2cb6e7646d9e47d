"""Which layers' weights stay in the files that a user has them in, while a model predicts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from sp_lightning.device.host_allocator import return_large_blocks
from sp_lightning.device.layout import whole_pages
from sp_lightning.engine.file_source import WINDOW
from sp_lightning.engine.placement import ONE_DEVICE, OnFiles, Placement
from sp_lightning.model.found import Found, Layer
from sp_lightning.plan.host_memory import room_for
from sp_lightning.plan.plan import Plan
from sp_lightning.plan.units import human_bytes
from sp_lightning.store.file_block import place_of
from sp_lightning.store.weight_reader import BOUNCE, FilePlace, Mappings


def place_weights(
    found: Found,
    plan: Plan,
    is_from_file: Callable[[nn.Parameter], bool],
    host_memory: int | float | None,
    device: torch.device,
) -> tuple[Placement, str]:
    """Decides it. Weights stay where they are as far as host memory has no room for them.

    Args:
        found: the layers.
        plan: their sizes.
        is_from_file: whether a parameter has the memory of its file, and nobody has written it.
        host_memory: the user's option.
        device: where layers compute.

    Returns:
        The engine's parts for it, and one sentence on what is where.
    """
    room = _room(host_memory, plan, device)
    places = _in_files(found, plan, is_from_file)
    sizes = {layer.name: whole_pages(layer.nbytes) for layer in (*plan.moving, plan.residents)}
    total = sum(sizes.values())
    if room is None or total <= room or not places:
        return ONE_DEVICE, ""
    staging = WINDOW * max(sizes[name] for name in places) + BOUNCE
    kept, stay = total - sum(sizes[name] for name in places) + staging, dict(places)
    for name in places:
        if kept + sizes[name] <= room:
            kept += sizes[name]
            del stay[name]
    if kept > room:
        raise MemoryError(
            f"{human_bytes(kept)} of host memory are needed for what is not read in place and for layers on their way, and "
            f"{human_bytes(max(room, 0))} are left. Give more by host_memory=, or name smaller layers by layers=."
        )
    return_large_blocks()
    read = human_bytes(sum(sizes[name] for name in stay))
    files = sorted({place.path for each in stay.values() for place in each})
    return OnFiles(stay), (
        f"The weights of {len(stay)} layers ({read}) are read in place from {files[0]}"
        + (f" and {len(files) - 1} other files" if len(files) > 1 else "")
        + f", because {human_bytes(max(room, 0))} of host memory are left for weights."
    )


def _room(host_memory: int | float | None, plan: Plan, device: torch.device) -> int | None:
    """Bytes of host memory for weights; None for no limit."""
    room = room_for(host_memory)
    if room is not None and device.type == "cpu":  # the slots are host memory, too
        room -= plan.slot_bytes + plan.resident_bytes
    return room


def _in_files(
    found: Found, plan: Plan, is_from_file: Callable[[nn.Parameter], bool]
) -> Mapping[str, Sequence[FilePlace]]:
    """The layers whose weights are in files as they travel, with the place of each weight."""
    mappings, places = Mappings(), dict[str, Sequence[FilePlace]]()
    for layer, planned in zip(found.layers, plan.layers, strict=True):
        if not planned.casts and planned.masters is None:
            of_layer = _of_layer(layer, mappings, is_from_file)
            if all(place is not None for place in of_layer):
                places[planned.name] = [place for place in of_layer if place is not None]
    return places


def _of_layer(layer: Layer, mappings: Mappings, is_from_file: Callable[[nn.Parameter], bool]) -> list[FilePlace | None]:
    def place(parameter: nn.Parameter) -> FilePlace | None:
        if type(parameter) is not nn.Parameter:
            return place_of(parameter)
        return mappings.place(parameter) if is_from_file(parameter) and parameter.is_contiguous() else None

    return [place(parameter) for _, parameter in layer.parameters]
