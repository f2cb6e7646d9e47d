"""A forward that cannot be run twice is refused by name, and what fails in between leaves nothing half there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.capabilities.activations.offload import Offload
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit, superpipeline

pytestmark = pytest.mark.usefixtures("everything_is_worth_moving")

# ---------------------------------------------------------------------- faults


class Retries(Module):
    """Catches an error in backward, and goes backward again."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__(net)
        self.automatic_optimization = False
        self.retried = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        optimizer: Any = self.optimizers()
        loss = self.loss(batch)
        try:
            self.manual_backward(loss, retain_graph=True)
        except torch.OutOfMemoryError:
            self.retried += 1
            optimizer.zero_grad()
            self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss


@pytest.mark.rest("takes tenths of a second")
def test_an_error_while_activations_come_back_leaves_none_half_there(monkeypatch: pytest.MonkeyPatch) -> None:
    bring = Offload._begin_return
    failed: list[bool] = []

    def fails_once(self: Offload, storages: Any) -> None:
        device = self._device
        if len(storages) > 1 and not failed and all(each.source is None and each.returned is None for each in storages):
            failed.append(True)
            given = iter([device.empty])

            def empty(nbytes: int) -> Tensor:
                make = next(given, None)
                if make is None:
                    raise torch.OutOfMemoryError("no room")
                return make(nbytes)

            with monkeypatch.context() as context:
                context.setattr(device, "empty", empty)
                bring(self, storages)
        bring(self, storages)

    reference = fit(lambda: Retries(Stack()), vectors())
    monkeypatch.setattr(Offload, "_begin_return", fails_once)
    ours = fit(lambda: Retries(Stack()), vectors(), superpipeline(activations="offload"))
    assert_same(ours, reference)
    assert failed
    assert ours.module.retried == 0, "what failed was one unit ahead, and came on demand"


def test_patterns_with_another_name_or_without_effect() -> None:
    stack = Stack()
    stack.alias = stack.blocks[1]
    strategy = superpipeline(activations={"net.alias": "offload"})
    fit(lambda: Module(stack), vectors(1), strategy)
    assert [name for name, mode in strategy.activations.items() if mode == "offload"] == ["net.blocks.1"]
    shadowed: Any = {"net.blocks": "offload", "net.blocks.1": "keep"}
    with pytest.raises(ValueError, match=r"'net.blocks.1': 'keep'\} decides nothing: .* Put 'net.blocks.1' before"):
        fit(lambda: Module(Stack()), vectors(1), superpipeline(activations=shadowed))
