"""``torch.nn.utils.prune`` on a device of its own: masks are the device's within a step, and the host's after it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.model.find import find_layers
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_same, fit
from tests.support.simdevice import simulated


class Pruned(Module):
    """Prunes before training, writes a mask in place, prunes once more, makes one pruning permanent."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.linear = [each for each in self.net.modules() if isinstance(each, torch.nn.Linear)]
        for each in self.linear:
            prune.l1_unstructured(each, "weight", 0.3)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            with torch.no_grad():
                self.linear[1].weight_mask[0] = 0
        if batch_idx == 1:
            prune.l1_unstructured(self.linear[0], "weight", 0.3)
        if batch_idx == 2:
            prune.remove(self.linear[2], "weight")


@pytest.mark.long("takes a second or more")
def test_masks_are_those_of_plain_lightning() -> None:
    plain = fit(Pruned, vectors(5))
    with simulated():
        ours = fit(Pruned, vectors(5), SuperpipelineStrategy(k=1))
    assert_same(ours, plain)
    assert (ours.trainer.lightning_module.linear[0].weight_mask == 0).float().mean() > 0.4


@pytest.mark.long("takes a second or more")
def test_a_mask_that_a_step_writes_in_place() -> None:
    """It was lost at the end of the step."""

    class Writes(Pruned):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if batch_idx in (1, 2):
                with torch.no_grad():
                    self.linear[1].weight_mask[batch_idx] = 0
            return super().training_step(batch, batch_idx)

    plain = fit(Writes, vectors(5))
    with simulated():
        ours = fit(Writes, vectors(5), SuperpipelineStrategy(k=1))
    assert_same(ours, plain)
    assert not ours.trainer.lightning_module.linear[1].weight_mask[:3].any()


@pytest.mark.rest("takes tenths of a second")
def test_masks_are_sent_once() -> None:
    """Nobody has written them: the second batch finds them on the device."""

    class Twice(Pruned):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            self.addresses = [*getattr(self, "addresses", []), [each.weight_mask.data_ptr() for each in self.linear]]
            return super().training_step(batch, batch_idx)

    with simulated():
        trained: Any = fit(Twice, vectors(3), SuperpipelineStrategy(k=1)).trainer.lightning_module
    assert trained.addresses[0] == trained.addresses[1] == trained.addresses[2]


def test_the_plan_names_the_bytes_of_masks_and_the_remedy() -> None:
    module = Stack(4)
    assert not find_layers(module).notes
    for child in module.modules():
        if isinstance(child, nn.Linear):
            prune.l1_unstructured(child, "weight", 0.5)
    (note,) = find_layers(module).notes
    assert re.search(r"buffers of .* stay on the GPU.*prune\.remove\(module, name\)", note)
