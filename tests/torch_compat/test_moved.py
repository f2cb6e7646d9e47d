"""Moves of modules without some of their parameters. "meta" stands for a GPU."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.torch_compat.moved import move_module
from tests.equality.programs.placed import Distance, Follows, HidingModule, Scaled
from tests.support.models import Module, Stack

META = torch.device("meta")


def others(module: Any) -> dict[str, Tensor]:
    return {name: each for name, each in vars(module).items() if isinstance(each, Tensor)}


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], dict[str, Tensor]]]] = {
    "a metric": (Distance, others),
    "an overridden _apply": (Scaled, lambda m: {**others(m), "data": m.data[0]}),
    "what follows a weight": (Follows, others),
    "an overridden to": (HidingModule, lambda m: {"hidden": m.net.hidden[0].weight, "scale": m.net.blocks[0].scale}),
    "buffers": (lambda: nn.Sequential(nn.BatchNorm1d(3)), lambda m: dict(m.named_buffers())),
}


@pytest.mark.parametrize("name", MODULES)
def test_all_but_parameters_is_moved(name: str) -> None:
    """As ``module.to`` moves it; parameters and their gradients are the same objects with the same memory."""
    make, others_of = MODULES[name]
    module = make()
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {each: (each.data_ptr(), each.grad) for each in module.parameters()}
    move_module(module, META, module.parameters(), ())
    moved = others_of(module)
    assert moved
    assert all(each.is_meta for each in moved.values())
    assert {each: (each.data_ptr(), each.grad) for each in module.parameters()} == before
    assert all(not gradient.is_meta for _, gradient in before.values() if gradient is not None)


def test_a_weight_answers_for_the_device_from_when_it_would_be_moved() -> None:
    module, weight = Follows(), list[Any]()

    class Looks(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            weight.append(module.inner.weight.device.type)
            return super()._apply(fn, recurse)

    move_module(nn.Sequential(Looks(), module, Looks()), META, module.parameters(), ())
    assert weight == ["cpu", "meta"]
    assert module.captured[0] is module.inner.weight
    assert module.inner.weight.device.type == "cpu"


def test_parameters_that_do_not_stay_are_moved() -> None:
    module = Module(Stack())
    module.net.head.weight.grad = torch.ones(16, 16)
    move_module(module, META, module.net.blocks.parameters(), ())
    assert module.net.head.weight.is_meta
    assert module.net.head.weight.grad.is_meta
    assert module.device == META
    assert {each.device.type for each in module.net.blocks.parameters()} == {"cpu"}


def test_torchs_method_is_its_own_again_after_an_error() -> None:
    """And another thread, which moves other modules meanwhile, moves all of them."""
    own, other = nn.Module._apply, nn.Linear(1, 1)

    class Fails(nn.Module):
        def _apply(self, fn: Any, recurse: bool = True) -> Any:
            thread = Thread(target=other.to, args=[META])
            thread.start()
            thread.join()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        move_module(nn.Sequential(nn.Linear(1, 1), Fails()), META, other.parameters(), ())
    assert nn.Module._apply is own
    assert other.weight.is_meta
