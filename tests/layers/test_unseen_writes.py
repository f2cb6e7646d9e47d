"""Writes of which torch shows no sign, which ``debug_writes=True`` looks for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.data_writes import WritesUnseen
from tests.support.models import EitherOptimization, Module, Stack, vectors
from tests.support.runs import assert_same, fit, fused, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")


@pytest.mark.parametrize("resident", [[], ["net.1"]])
@pytest.mark.parametrize("how", ["numpy", "dlpack"])
def test_unseen_writes_on_the_device_are_looked_for(how: str, resident: list[str]) -> None:
    def make() -> Module:
        return WritesUnseen(how)

    strategy = superpipeline(k=1, k_prime=1, keep_on_gpu=resident, debug_writes=True)
    assert_same(fit(make, vectors(), strategy), fit(make, vectors()))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_unseen_writes_on_the_host_are_refused(activations: Any) -> None:
    strategy = superpipeline(k=1, k_prime=1, activations=activations, debug_writes=True)
    with pytest.raises(RuntimeError, match=r"'net\.1\.second\.weight' was written within a step in a way.*its module"):
        fit(lambda: WritesUnseen("reference"), vectors(), strategy)


class WritesOldMemory(EitherOptimization):
    """Inside of its layer's call a weight is written through what was taken of it before the step, ``how``."""

    def __init__(self, how: str, manual: bool) -> None:
        super().__init__(Stack(3), manual=manual)
        self.how = how
        self.old: Any = None
        self.net.blocks[1].inner.register_forward_hook(self.write)  # type: ignore[union-attr, index, operator]

    def on_train_start(self) -> None:
        weight: Any = self.net.blocks[1].outer.weight  # type: ignore[union-attr, index]
        self.old = {"detach": weight.detach, "data": lambda: weight.data, "numpy": weight.detach().numpy}[self.how]()

    def write(self, *_: Any) -> None:
        with torch.no_grad():
            self.old *= 0.9


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize("how", ["detach", "data", "numpy"])
def test_unseen_writes_inside_of_the_layers_call_are_refused(how: str, manual: bool) -> None:
    """In manual optimization nobody compared before the modules had the host's weights again."""
    with pytest.raises(RuntimeError, match=r"'net\.blocks\.1\.outer\.weight' was written (on the CPU|within a step)"):
        fit(lambda: WritesOldMemory(how, manual), vectors(), superpipeline(k=1, debug_writes=True))


class Alternates(Module):
    """Manual optimization: two steps in each batch, one of them fused, which bumps no version."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizers: Any = self.optimizers()
        for optimizer in optimizers:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.parameters(), fused=fused) for fused in (False, True)]


@pytest.mark.parametrize(
    "options", [{}, {"activations": "recompute"}, {"optimizer_overlap": "forward", "fused_optimizer": True}]
)
def test_looking_finds_nothing_where_nothing_is(options: dict[str, Any]) -> None:
    strategy = superpipeline(k=2, k_prime=1, debug_writes=True, **options)
    make = fused(lambda: Module(Stack())) if "fused_optimizer" in options else lambda: Module(Stack())
    assert_same(
        fit(make, vectors(), strategy, val=vectors(), accumulate_grad_batches=2),
        fit(make, vectors(), val=vectors(), accumulate_grad_batches=2),
    )
    if "optimizer_overlap" not in options:
        strategy = superpipeline(k=2, k_prime=1, debug_writes=True, **options)
        assert_same(fit(lambda: Alternates(Stack()), vectors(), strategy), fit(lambda: Alternates(Stack()), vectors()))


def test_looking_goes_with_no_update_inside_backward() -> None:
    with pytest.raises(ValueError, match=r'debug_writes=True.*optimizer_overlap="off"'):
        superpipeline(debug_writes=True, optimizer_overlap="backward")
