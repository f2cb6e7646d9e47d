"""Norms with a GPU's bits: which gradients have them, when they are taken, and gradients that a disk keeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.capabilities.kernels import gpu_norms
from sp_lightning.core.engine.clipping import Clipping
from sp_lightning.core.updates.layer_stepper import LayerStepper
from tests.support.emulated_gpu import forget, gpu_device

pytest.importorskip("llvmlite")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True, scope="module")
def _emulated() -> Iterator[None]:
    with gpu_device():
        yield
    forget()


@pytest.fixture(autouse=True)
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many norms each call was asked for that has the GPU's bits."""
    counts: list[int] = []
    norms_like = gpu_norms.norms_like

    def counted(device: torch.device, gradients: list[Tensor]) -> list[Tensor]:
        if gradients:
            counts.append(len(gradients))
        return norms_like(device, gradients)

    monkeypatch.setattr(gpu_norms, "norms_like", counted)
    return counts


def layer(parameters: list[nn.Parameter], use_gradients: Callable[[], bool] = lambda: True) -> Any:
    """A layer whose gradients are measured at once, as those on a disk are."""
    block = SimpleNamespace(parameters=parameters)
    made = SimpleNamespace(block=block, use_gradients=use_gradients, own_slot=None)
    made.with_masters = [made]
    return made


def clipping(parameters: list[nn.Parameter], layers: dict[int, Any] | None = None) -> Clipping:
    device = SimpleNamespace(access=lambda *_, **__: None)
    engine: Any = SimpleNamespace(
        stepper=LayerStepper(), device=device, layer_of=lambda parameter: (layers or {}).get(id(parameter))
    )
    return Clipping(torch.optim.SGD(parameters, lr=0.1), engine, partial(gpu_norms.GpuNorms, CPU))


def with_gradient(gradient: Tensor) -> nn.Parameter:
    parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
    parameter.grad = gradient
    return parameter


def clip(by: Clipping, parameters: list[nn.Parameter]) -> float:
    """The factor with which gradients are clipped to a norm of 1."""
    by.by_norm(torch.optim.SGD(parameters, lr=0.1), 1.0)
    change: Any = by.pending
    return 1.0 if change is None else float(change.number)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_norms_of_all_dtypes_are_taken_before_they_are_needed(dtype: torch.dtype, taken: list[int]) -> None:
    """They do not depend on the number of threads, as torch's norms of float16 gradients do."""
    parameters = [with_gradient(torch.ones(4, dtype=dtype)), with_gradient(torch.ones(5, dtype=dtype))]
    by = clipping(parameters)
    by.measure(layer(parameters))
    assert taken == [2]
    assert clip(by, parameters) == pytest.approx(1 / 3, rel=1e-2)
    assert taken == [2]


def test_gradients_that_take_each_others_memory_are_measured_one_after_the_other() -> None:
    memory = torch.zeros(4)
    parameters = [with_gradient(memory), with_gradient(memory)]
    values = [torch.full((4,), 2.0), torch.full((4,), 0.5)]

    def loads(at: int) -> Callable[[], bool]:
        return lambda: memory.copy_(values[at]) is memory

    layers = {id(each): layer([each], loads(at)) for at, each in enumerate(parameters)}
    assert clip(clipping(parameters, layers), parameters) == pytest.approx(1 / 17**0.5)


@pytest.mark.parametrize(
    "other",
    [torch.ones(4, dtype=torch.float64), torch.ones(2, 2).to_sparse(), torch.ones(8)[::2]],
    ids=["float64", "sparse", "gaps"],
)
def test_gradients_of_which_the_gpus_bits_are_not_known_have_torchs_norms(other: Tensor, taken: list[int]) -> None:
    parameters = [with_gradient(torch.ones(5)), with_gradient(other)]
    assert clip(clipping(parameters), parameters) == pytest.approx(1 / 3)
    assert taken == []


def test_without_gradients_nothing_is_clipped() -> None:
    parameters = [nn.Parameter(torch.ones(3))]
    assert clip(clipping(parameters), parameters) == 1.0
