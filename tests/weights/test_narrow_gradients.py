"""Gradients that stay as they came, by themselves. ``tests/equality/programs/narrow.py`` has them in training."""

from __future__ import annotations

import copy
import pickle
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from sp_lightning.core.weights.gradient_roles import (
    NarrowGradient,
    Norms,
    change,
    drop,
    keep_narrow,
    stored,
    unwidened,
    widen,
)

looks: list[int] = []
WIDE = torch.arange(12, dtype=torch.float32).view(3, 4)


class Mine(nn.Parameter):
    """A class of a user's."""


def with_narrow(kind: type[nn.Parameter] = nn.Parameter) -> Any:
    looks.clear()
    parameter = kind(torch.ones(3, 4))
    keep_narrow(parameter, WIDE.bfloat16(), looked_at=lambda: looks.append(1))
    return parameter


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_it_stays_as_it_came_whatever_is_done_with_the_parameter(kind: type[nn.Parameter]) -> None:
    parameter = with_narrow(kind)
    assert isinstance(parameter, kind)
    assert type(parameter).__name__ == kind.__name__
    assert torch.equal(parameter.detach() + parameter.data, torch.full((3, 4), 2.0))
    assert parameter.requires_grad
    assert {parameter: 1}[parameter] == 1
    assert type(parameter * 1) is Tensor
    assert type(type(parameter)(torch.zeros(2))) is kind
    assert type(pickle.loads(pickle.dumps(parameter))) is nn.Parameter
    copied = copy.deepcopy(parameter)
    assert type(copied) is kind
    assert copied.grad is None, "as torch copies parameters"
    assert not looks
    found = stored(parameter)
    assert isinstance(found, NarrowGradient)
    assert unwidened(found).dtype is torch.bfloat16
    assert (found.dtype, found.shape, found.layout) == (torch.float32, parameter.shape, torch.strided)
    assert torch.empty_like(found).dtype is torch.float32


@pytest.mark.parametrize("kind", [nn.Parameter, Mine])
def test_who_asks_for_it_gets_a_plain_tensor(kind: type[nn.Parameter]) -> None:
    """Readers that do not ask for a tensor's class would read whatever stood in its memory."""
    parameter = with_narrow(kind)
    found = parameter.grad
    assert type(found) is Tensor
    assert found.data_ptr() == parameter.grad.data_ptr(), "the same memory each time"
    assert torch.equal(found, WIDE)
    assert found.stride() == WIDE.stride()
    assert looks == [1], "once"
    assert type(parameter) is kind
    widen(parameter)
    parameter.sum().backward()
    assert torch.equal(found, WIDE + 1), "autograd adds to it without asking Python"


def test_a_mode_of_the_user_sees_nothing_of_it() -> None:
    seen: list[Any] = []

    class Sees(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    parameter = with_narrow()
    with Sees():
        found = parameter.grad
    assert torch.equal(found, WIDE)
    assert seen in ([], [Tensor.grad.__get__])  # type: ignore[attr-defined]


def test_it_can_be_replaced_and_removed() -> None:
    for remove in (lambda p: setattr(p, "grad", None), lambda p: delattr(p, "grad"), drop):
        parameter = with_narrow(Mine)
        remove(parameter)
        assert parameter.grad is None
        assert type(parameter) is Mine
    parameter = with_narrow()
    parameter.grad = other = torch.ones(3, 4)
    drop(parameter)
    assert parameter.grad is other, "only a narrow gradient is dropped"
    assert not looks


def test_its_changes_are_made_in_order_when_it_is_widened() -> None:
    parameter = with_narrow()
    assert change(parameter, lambda gradient: gradient.add_(1))
    assert change(parameter, lambda gradient: gradient.mul_(0.5))
    norm = Norms().of(stored(parameter))  # type: ignore[arg-type]
    assert not looks
    assert torch.equal(norm, torch.linalg.vector_norm((WIDE + 1) * 0.5))
    assert not change(parameter, lambda gradient: gradient.mul_(0.5)), "those of several steps do not pile up"
    assert torch.equal(parameter.grad, (WIDE + 1) * 0.5)
    assert not change(parameter, lambda gradient: gradient.mul_(0.1)), "whoever asks has to change this one himself"
    assert torch.equal(parameter.grad, (WIDE + 1) * 0.5)
    assert looks == [1]
    assert not change(nn.Parameter(torch.ones(1)), lambda gradient: gradient.mul_(0.5)), "it has none"


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float16])
def test_the_norm_has_the_bits_of_the_widened_one(came: torch.dtype) -> None:
    norms = Norms()
    for dtype in (torch.float64, torch.float32, torch.float64):
        for shape in ((7,), (300, 401), (4097,), (64, 32, 3, 3), (16, 3, 3, 8), ()):
            value = torch.randn(shape).to(came)
            if value.ndim == 4:
                value = value.to(memory_format=torch.channels_last)
            wide = value.to(dtype)
            parameter = nn.Parameter(torch.zeros_like(value, dtype=dtype))
            keep_narrow(parameter, value, looked_at=lambda: None)
            for _ in range(2):
                assert torch.equal(norms.of(stored(parameter)), torch.linalg.vector_norm(wide))  # type: ignore[arg-type]
                assert torch.equal(norms.of(wide), torch.linalg.vector_norm(wide))
                change(parameter, lambda gradient: gradient.mul_(1 / 3))
                wide.mul_(1 / 3)
        buffer = norms._wide.data_ptr()
        norms.of(stored(parameter))  # type: ignore[arg-type]
        assert norms._wide.data_ptr() == buffer, "the buffer is kept for the next gradient"


def test_two_threads_compute_norms_in_one_buffer() -> None:
    """Backward's thread and the background do, if some gradients are on a disk. The second waits for the first."""
    norms, first, second = Norms(), *(nn.Parameter(torch.ones(64)) for _ in range(2))
    for parameter, value in ((first, 1.0), (second, 2.0)):
        keep_narrow(parameter, torch.full((64,), value, dtype=torch.bfloat16), looked_at=lambda: None)
    found: list[Tensor] = []
    other = threading.Thread(target=lambda: found.append(norms.of(stored(second))))  # type: ignore[arg-type]

    def begin_other(_: Tensor) -> None:
        other.start()
        other.join(0.2)  # without the wait, it writes the buffer in this time

    change(first, begin_other)
    assert norms.of(stored(first)) == 8  # type: ignore[arg-type]
    other.join()
    assert found == [16]
