"""What is measured of a machine before a run: the Python of a visit, and whether devices fetch layers faster together.

What the engine takes of the host for each visit of a layer is known from before, or measured (``plan --measure-host``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache, partial
from time import perf_counter, thread_time

import torch
from torch import Tensor, nn

from sp_lightning.device.device import Device, Stream, Wait
from sp_lightning.engine.streamer import Streamer
from sp_lightning.model.find import find_layers
from sp_lightning.observe.messages import say_once
from sp_lightning.plan.choices import Transfer
from sp_lightning.plan.plan import make_plan
from sp_lightning.ranks.ranks import Ranks

_LAYERS, _WIDTH, _FEW, _MANY, _ROUNDS = 12, 8, 1, 8, 30

HOST_SECONDS = {"training": (6e-5, 3.5e-5), "inference": (6e-5, 1.2e-5)}
"""What a visit takes of the host, and each weight in it, where the engine runs beside a device: seconds of Python. Measured on
the CPU with layers of 2 to 9 weights: tests/results/2026-11-22-host-time-cpu.md. Neither k nor k' changed them much there."""


@cache
def host_seconds(*, training: bool, measured: bool) -> tuple[float, float]:
    """Seconds of Python for each visit, and for each weight in it; those of this host, which is measured once, if asked for."""
    if measured:
        return measure_host_seconds(training=training)
    return HOST_SECONDS["training" if training else "inference"]


def measure_host_seconds(*, training: bool) -> tuple[float, float]:
    """Measures what a visit takes of the host, and each weight in it, as :class:`~sp_lightning.tuning.visits.Rates` has them.

    Layers of one tiny weight, and of eight, run with the engine and without it, by turns, on the CPU and in one thread. There
    neither computing nor copying takes long, so what the engine takes longer is Python's time.

    Args:
        training: whether each layer has a backward, too. A visit is then the mean of both.

    Returns:
        Seconds for each visit, and for each weight.
    """
    visits = _LAYERS * (2 if training else 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        few, many = (_beyond_plain(weights, training=training) / visits for weights in (_FEW, _MANY))
    finally:
        torch.set_num_threads(threads)
    weight = max(0.0, (many - few) / (_MANY - _FEW))
    return max(0.0, few - weight * _FEW), weight


def _beyond_plain(weights: int, *, training: bool) -> float:
    """Seconds that the engine adds to a step: the least of all rounds, because other programs can only make it slower."""
    plain, streamed = _stack(weights), _stack(weights)
    found = find_layers(streamed, layers=[str(layer) for layer in range(_LAYERS)])
    streamer = Streamer(streamed, found, make_plan(found, k=2, k_prime=1), Device(torch.device("cpu")), pin=False)
    x = torch.ones(1, _WIDTH)
    steps = [partial(_step, *each, training=training) for each in ((plain, x, None), (streamed, x, streamer))]
    try:
        seconds = [[_seconds(step) for step in steps] for _ in range(_ROUNDS)]
    finally:
        streamer.close()
    alone, both = (min(each) for each in zip(*seconds, strict=True))
    return both - alone


def _stack(weights: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(weights))) for _ in range(_LAYERS))
    )


def _step(stack: nn.Sequential, x: Tensor, streamer: Streamer | None, *, training: bool) -> None:
    with torch.inference_mode(not training):
        if streamer is None:
            loss = stack(x).sum()
        else:
            streamer.begin("train" if training else "predict", training=training, quiet=not training)
            with streamer.saving():
                loss = stack(x).sum()
                if training:
                    streamer.await_backward()
                    streamer.announce_backward(loss, quiet=True)
        if training:
            loss.backward()
            stack.zero_grad()
        elif streamer is not None:
            streamer.end()


def _seconds(step: Callable[[], None]) -> float:
    begun = thread_time()  # other programs that run meanwhile do not count
    step()
    return thread_time() - begun


# ---------------------------------------------------------------------- transfer="auto"

NBYTES = 1 << 26
"""As many bytes are copied as a layer of a large model has, within a factor of ten."""

_MUCH = 0.8
"""Slices have to take at most this share of the time: they make ranks wait for each other."""


def takes_slices(transfer: Transfer, device: Device, ranks: Ranks | None, log: logging.Logger, *, trains: bool) -> bool:
    """Whether the devices of a node upload layers together. Collective; all ranks have the same answer.

    With ``"auto"`` some memory is uploaded both ways, by all ranks at once, as in a run. Where the model computes on the host
    there is nothing to upload, and the answer is no. So it is in training, because gathers beside sums of gradients are what
    neither NCCL nor torch promises (see :mod:`~sp_lightning.layers.uploads`): a user asks for them by name.
    """
    if ranks is None or ranks.size == 1:
        if transfer == "sharded":
            say_once(
                log,
                'Superpipeline: transfer="sharded" changes nothing: no other device on this node could bring slices.',
            )
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
    """Returns the seconds that an upload of so many bytes takes, whole and sliced. Collective."""
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
            ranks.barrier(Wait.STEP_AFTER_ARRIVAL)
            begun = perf_counter()
            upload()
            device.synchronize(device.record(Stream.UPLOAD), Wait.CLOSE_AFTER_FETCH)
            taken.append(perf_counter() - begun)
        return min(taken)

    with torch.no_grad():
        measured = seconds(alone), seconds(together)
    device.unpin(source)
    return measured
