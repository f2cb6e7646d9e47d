"""Gradients that stay as they came: nobody who looks at ``param.grad`` sees a difference, and nobody pays who does not."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn

from sp_lightning.weights.narrow_gradient import NarrowGradient, Norms, as_it_came, clip_when_widened, narrow, widen
from tests.support.mixed import MIXED
from tests.support.models import Module, Stack, vectors
from tests.support.overlapping import overlapping
from tests.support.runs import assert_equal, assert_same, fit, fused
from tests.support.simdevice import simulated

looks: list[int] = []


def gradient() -> Tensor:
    looks.clear()
    came = torch.arange(12, dtype=torch.bfloat16).view(3, 4)
    return narrow(came, torch.float32, looked_at=lambda: looks.append(1))


WIDE = torch.arange(12, dtype=torch.float32).view(3, 4)


def test_what_needs_no_values_leaves_it_as_it_came() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = gradient()
    found = parameter.grad
    assert found is not None
    assert (found.dtype, found.shape, found.layout, found.device) == (
        torch.float32, parameter.shape, torch.strided, parameter.device
    )  # fmt: skip
    assert (found.is_sparse, found.requires_grad, found._version) == (False, False, 0)
    assert (found.numel(), found.ndim, len(found), found.nbytes) == (12, 2, 3, 48)
    assert torch.empty_like(found).dtype is torch.float32
    assert not looks
    assert type(found) is NarrowGradient
    assert as_it_came(found).dtype is torch.bfloat16


def saved(value: Tensor) -> Any:
    torch.save(value, file := io.BytesIO())
    file.seek(0)
    return torch.load(file)


READERS: dict[str, Callable[[Tensor], Any]] = {
    "arithmetic": lambda g: g * 1,
    "a list of tensors": lambda g: torch._foreach_add([g], 0)[0],
    "detach": lambda g: g.detach(),
    "data": lambda g: g.data,
    "clone": lambda g: g.clone(),
    "view": lambda g: g.view(4, 3).view(3, 4),
    "index": lambda g: torch.stack([g[0], g[1], g[2]]),
    "iterate": lambda g: torch.stack(list(g)),
    "numpy": lambda g: torch.from_numpy(g.numpy()),
    "dlpack": lambda g: torch.from_dlpack(g),
    "tolist": lambda g: torch.tensor(g.tolist()),
    "deepcopy": copy.deepcopy,
    "pickle": lambda g: pickle.loads(pickle.dumps(g)),
    "save": saved,
    "as_subclass": lambda g: g.as_subclass(Tensor),
    "to": lambda g: g.to(torch.float64).to(torch.float32),
    "storage": lambda g: torch.tensor(g.untyped_storage().tolist(), dtype=torch.uint8).view(torch.float32).view(3, 4),
    "written in place": lambda g: g.add_(1).sub_(1),
    "out": lambda g: torch.add(WIDE, 0, out=g),
    "repr": lambda g: torch.tensor(eval(repr(g).removeprefix("tensor"))),
}


@pytest.mark.parametrize("name", READERS)
def test_who_reads_it_finds_it_widened(name: str) -> None:
    parameter = nn.Parameter(torch.zeros(3, 4))
    parameter.grad = found = gradient()
    assert torch.equal(READERS[name](found), WIDE)
    assert looks == [1], "once"
    assert type(parameter.grad) is Tensor
    assert parameter.grad is found, "the same object, as in plain Lightning"
    assert torch.equal(parameter.grad, WIDE)
    assert found.stride() == WIDE.stride()


def test_code_in_c_does_not_take_it_for_values() -> None:
    """Autograd adds to ``param.grad`` without asking Python."""
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.grad = gradient()
    with pytest.raises(RuntimeError, match="single memory location"):
        parameter.sum().backward()
    widen(parameter.grad)
    parameter.sum().backward()
    assert torch.equal(parameter.grad, WIDE + 1)


def test_it_is_clipped_once_it_is_read_and_a_second_time_only_if_it_is_used_twice() -> None:
    found = gradient()
    clip_when_widened(found, lambda g: g.mul_(0.5))
    assert not looks
    clip_when_widened(found, lambda g: g.mul_(0.1))  # a second step, whose update clips the tensor that this makes
    assert looks == [1]
    assert torch.equal(found, WIDE * 0.5)
    clip_when_widened(None, lambda g: g.mul_(0.1))


@pytest.mark.parametrize("came", [torch.bfloat16, torch.float16])
def test_the_norm_has_the_bits_of_the_widened_one(came: torch.dtype) -> None:
    norms = Norms()
    for shape in ((7,), (300, 401), (4097,), (64, 32, 3, 3), (16, 3, 3, 8), ()):
        value = torch.randn(shape).to(came)
        if value.ndim == 4:
            value = value.to(memory_format=torch.channels_last)
        found = narrow(value, torch.float32, looked_at=lambda: looks.append(1))
        looks.clear()
        assert torch.equal(norms.of(found), torch.linalg.vector_norm(value.float()))
        assert not looks
        assert torch.equal(norms.of(value.float()), torch.linalg.vector_norm(value.float()))


# ---------------------------------------------------------------------- in training


class Looks(Module):
    """A module that looks at its gradients after each step, where no hook of Lightning's says that somebody will."""

    def __init__(self, look: Callable[[nn.Parameter], Any], *, zero: bool = True) -> None:
        super().__init__(Stack())
        self.look = look
        self.zero = zero
        self.found: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.found.append([self.look(parameter) for parameter in self.parameters()])

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.zero:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


def trained(strategy: Any, look: Callable[[nn.Parameter], Any], *, zero: bool = True, **options: Any) -> Any:
    return fit(fused(lambda: Looks(look, zero=zero)), vectors(4), strategy, recorded="losses", **MIXED, **options)


def value(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 1e-3}, {"gradient_clip_val": 1e-4, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("zero", [True, False])
def test_gradients_after_a_step_are_plains(zero: bool, clip: dict[str, Any]) -> None:
    """Clipped, if the step clips; and added to the next ones if nobody sets them to None."""
    plain = trained("auto", value, zero=zero, **clip)
    with simulated():
        ours = trained(overlapping("forward"), value, zero=zero, **clip)
    assert_equal(ours.module.found, plain.module.found, "gradients")
    assert_same(ours, plain)


def kind(parameter: nn.Parameter) -> str:
    return type(parameter.grad).__name__


def test_they_stay_as_they_came_until_somebody_has_looked() -> None:
    """From then on they are widened as they come: otherwise each would take memory twice."""
    found = trained(overlapping("forward"), kind).module.found
    narrow_ones = [each.count("NarrowGradient") for each in found]
    assert narrow_ones[0] > 10
    assert narrow_ones == [narrow_ones[0]] * 4, "the type is no value"

    def looks_once(parameter: nn.Parameter) -> str:
        before = kind(parameter)
        assert parameter.grad is not None
        assert parameter.grad.isfinite().all()
        return before

    found = trained(overlapping("forward"), looks_once).module.found
    assert [each.count("NarrowGradient") for each in found] == [narrow_ones[0], 0, 0, 0]


def test_a_gradient_that_somebody_keeps_has_its_values_later() -> None:
    kept: list[Tensor] = []

    def keep(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        kept.append(parameter.grad)

    trained(overlapping("forward"), keep)
    ours = [each.clone() for each in kept]
    kept.clear()
    trained("auto", keep)
    assert_equal(ours, kept, "kept gradients")


@pytest.mark.parametrize("option", ["hook", "accumulated", "16-mixed", "off"])
def test_they_are_widened_as_they_come_where_that_saves_nothing(option: str) -> None:
    """Where user code sees them before the step, where they are added up, and where a scaler divides them."""
    options: dict[str, Any] = {} if option == "16-mixed" else MIXED
    if option == "16-mixed":
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        options = {"plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}
    if option == "accumulated":
        options = {**MIXED, "accumulate_grad_batches": 2}

    class Sees(Looks):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.found.append([kind(parameter) for parameter in self.parameters()])

    strategy = overlapping("off" if option == "off" else "forward")
    found = fit(
        fused(lambda: (Sees if option == "hook" else Looks)(kind)), vectors(4), strategy, recorded="losses", **options
    ).module.found
    assert {each for kinds in found for each in kinds} == {"Tensor"}
