"""The Python time of a layer call, for predictions before a run: a known value, or measured (the command ``rates``)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import thread_time

import torch
from torch import Tensor, nn

from sp_lightning.core.device.device import Device
from sp_lightning.core.engine.engine import Engine
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan

_LAYERS, _WIDTH, _FEW, _MANY, _ROUNDS = 12, 8, 1, 8, 30

HOST_SECONDS = {"training": (6e-5, 3.5e-5), "inference": (6e-5, 1.2e-5)}
"""Seconds of Python for each layer call, and for each weight of the layer, if the model computes on a GPU. Measured on the CPU
with layers of 2 to 9 weights (``examples/results/README.md``, Host time and structure). k and k' changed them little."""


def measure_host_seconds(*, training: bool) -> tuple[float, float]:
    """Measures the seconds of Python for each layer call and weight, as in
    :class:`~sp_lightning.tools.planner.prediction.visits.Rates`.

    Layers of one tiny weight, and of eight, run with and without the engine, in turn, on the CPU and in one thread. Computing
    and copying take little time, so the difference is the time of the engine's Python code.

    Args:
        training: True if each layer also has a backward. The result is the mean of forward and backward.

    Returns:
        Seconds for each layer call, and for each weight.
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
    """Returns the seconds that the engine adds to a step: the least of all rounds, because other programs only add time."""
    plain, streamed = _stack(weights), _stack(weights)
    found = find_layers(streamed, layers=[str(layer) for layer in range(_LAYERS)])
    engine = Engine(streamed, found, make_plan(found, k=2, k_prime=1), Device(torch.device("cpu")), pin=False)
    x = torch.ones(1, _WIDTH, device="cpu")
    steps = [partial(_step, *each, training=training) for each in ((plain, x, None), (streamed, x, engine))]
    try:
        seconds = [[_seconds(step) for step in steps] for _ in range(_ROUNDS)]
    finally:
        engine.close()
    alone, both = (min(each) for each in zip(*seconds, strict=True))
    return both - alone


def _stack(weights: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH, bias=False) for _ in range(weights))) for _ in range(_LAYERS))
    )


def _step(stack: nn.Sequential, x: Tensor, engine: Engine | None, *, training: bool) -> None:
    with torch.inference_mode(not training):
        if engine is None:
            loss = stack(x).sum()
        else:
            engine.begin("train" if training else "predict", training=training, quiet=not training)
            with engine.saving():
                loss = stack(x).sum()
                if training:
                    engine.await_backward()
                    engine.announce_backward(loss, quiet=True)
        if training:
            loss.backward()
            stack.zero_grad()
        elif engine is not None:
            engine.end()


def _seconds(step: Callable[[], None]) -> float:
    begun = thread_time()  # does not count the time of other programs
    step()
    return thread_time() - begun
