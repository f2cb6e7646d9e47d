"""When norms of gradients are computed for clipping, and of gradients that a disk keeps."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.engine.owners import Owners
from sp_lightning.core.updates.clipping import Clipping
from sp_lightning.core.updates.layer_stepper import LayerStepper
from sp_lightning.core.weights.gradient_roles import Norms


class Engine:
    """The parts of the engine that clipping uses.

    Attributes:
        later: the work that was given to the background thread, which does not run.
        measured: the gradients whose norms were asked for.
    """

    def __init__(self, layers: dict[int, Any]) -> None:
        self.later: list[Callable[[], None]] = []
        self.measured: list[Tensor] = []
        self.stepper = LayerStepper()
        self.device = SimpleNamespace(access=lambda *_, **__: None, later=self.later.append)
        self.owners = Owners()
        norms = Norms()
        self.found = SimpleNamespace(on_gpu=frozenset[nn.Parameter]())
        measures = SimpleNamespace(of=lambda gradient: (self.measured.append(gradient), norms.of(gradient))[1])  # type: ignore[func-returns-value]
        self.updating = SimpleNamespace(layer_of=lambda parameter: layers.get(id(parameter)), norms=measures)


def layer(parameters: list[nn.Parameter], use_gradients: Callable[[], bool]) -> Any:
    made = SimpleNamespace(block=SimpleNamespace(parameters=parameters), use_gradients=use_gradients)
    made.with_masters = [made]
    return made


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def factor(engine: Engine, parameters: list[nn.Parameter], measured: Any = None) -> float:
    """Returns the factor with which gradients are clipped to a norm of 1."""
    given: Any = engine
    clipping = Clipping(optimizer := torch.optim.SGD(parameters, lr=0.1), given)
    if measured is not None:
        clipping.measure(measured)
    clipping.by_norm(optimizer, 1.0)
    result = torch.ones(1)
    if clipping.pending is not None:
        clipping.pending(result)
    return float(result)


def test_gradients_that_take_each_others_memory_are_measured_one_after_the_other() -> None:
    """As those of layers on a disk, of which few are in memory."""
    memory = torch.zeros(4)
    parameters = [with_gradient(memory), with_gradient(memory)]
    values = [torch.full((4,), 2.0), torch.full((4,), 0.5)]

    def loads(at: int) -> Callable[[], bool]:
        return lambda: memory.copy_(values[at]) is memory

    layers = {id(each): layer([each], loads(at)) for at, each in enumerate(parameters)}
    assert factor(Engine(layers), parameters) == pytest.approx(1 / 17**0.5)


@pytest.mark.parametrize("on_disk", [False, True])
def test_norms_are_computed_in_the_background_if_gradients_cannot_leave_memory_meanwhile(on_disk: bool) -> None:
    parameters = [with_gradient(torch.full((4,), 2.0))]
    engine = Engine({})
    assert factor(engine, parameters, layer(parameters, lambda: on_disk)) == pytest.approx(1 / 4)
    assert (len(engine.measured), len(engine.later)) == ((1, 0) if on_disk else (0, 1))


@pytest.mark.parametrize(
    ("gradient", "in_backward"),
    [
        (torch.ones(4), True),
        (torch.ones(4, dtype=torch.bfloat16), True),
        (torch.ones(4, dtype=torch.float16), False),
        (torch.ones(2, 2).to_sparse(), False),
    ],
    ids=["float32", "bfloat16", "float16", "sparse"],
)
def test_only_norms_that_any_number_of_threads_computes_alike_are_computed_in_backward(
    gradient: Tensor, in_backward: bool
) -> None:
    parameters = [with_gradient(gradient)]
    engine = Engine({})
    assert factor(engine, parameters, layer(parameters, lambda: True)) == pytest.approx(1 / 2, rel=1e-2)
    assert len(engine.measured) == in_backward


def test_without_gradients_nothing_is_clipped() -> None:
    assert factor(Engine({}), [nn.Parameter(torch.ones(3))]) == 1.0
