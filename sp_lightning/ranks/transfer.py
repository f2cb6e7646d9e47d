"""``transfer=``: whether each device uploads whole layers, or a part of each layer that it then shares with the others."""

from __future__ import annotations

import logging
from collections.abc import Callable
from time import perf_counter

import torch

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.plan.choices import Transfer
from sp_lightning.ranks.ranks import Ranks
from sp_lightning.trainer.group import warn_of_one_device

NBYTES = 1 << 26
"""Bytes that the measurement copies: a layer of a large model has as many, within a factor of ten."""

_MUCH = 0.8
"""Sharded uploads are chosen if they take at most this share of the time, because ranks wait for each other in them."""


def takes_slices(transfer: Transfer, device: Device, ranks: Ranks, log: logging.Logger, *, trains: bool) -> bool:
    """Returns True if the devices of a node upload layers together. Collective; all ranks return the same.

    ``"auto"`` measures both kinds of upload, on all ranks at the same time, as in a run. It returns False on the CPU, and in
    training: NCCL does not promise that gathers run beside sums of gradients (see :mod:`~sp_lightning.ranks.sliced_uploads`), so
    a user has to ask for them by name.
    """
    if ranks.size == 1:
        warn_of_one_device(transfer, log)
        return False
    if transfer != "auto":
        return transfer == "sharded"
    if device.computes_on_host or trains:
        why = "the model computes on the host" if device.computes_on_host else "the run trains"
        log.debug('Superpipeline: transfer="auto": layers are uploaded whole, because %s.', why)
        return False
    whole, sliced = measure_uploads(device, ranks)
    taken = bool(ranks.all_have(int(sliced < _MUCH * whole), "how layers are uploaded"))
    log.debug(
        'Superpipeline: transfer="auto": layers are uploaded %s; %d MiB took %.3g ms whole and %.3g ms sliced on this rank.',
        "in slices" if taken else "whole", NBYTES >> 20, whole * 1e3, sliced * 1e3,
    )  # fmt: skip
    return taken


def measure_uploads(device: Device, ranks: Ranks, nbytes: int = NBYTES) -> tuple[float, float]:
    """Returns the seconds of an upload of ``nbytes`` bytes, full and sharded. Collective."""
    source = device.host_empty(nbytes, pin=True)[:nbytes]
    source.fill_(1)
    device.pin(source)
    target = device.upload_target(nbytes)
    part = nbytes // ranks.size
    own = slice(ranks.rank * part, (ranks.rank + 1) * part)

    def alone() -> None:
        device.copy([target], [source], Stream.UPLOAD)

    def together() -> None:
        device.copy([target[own]], [source[own]], Stream.UPLOAD)
        with device.on(Stream.UPLOAD):
            ranks.gather(target[: ranks.size * part], ranks.uploads, "a measurement")

    def seconds(upload: Callable[[], None]) -> float:
        upload()
        taken = []
        for _ in range(3):
            device.synchronize(device.record(Stream.UPLOAD), Wait.CLOSE_AFTER_FETCH)
            ranks.barrier_for(Wait.STEP_AFTER_ARRIVAL)
            begun = perf_counter()
            upload()
            device.synchronize(device.record(Stream.UPLOAD), Wait.CLOSE_AFTER_FETCH)
            taken.append(perf_counter() - begun)
        return min(taken)

    with torch.no_grad():
        measured = seconds(alone), seconds(together)
    device.unpin(source)
    return measured
