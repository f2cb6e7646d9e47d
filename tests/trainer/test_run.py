"""What is known of a run once its engine is gone."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from torch import nn

from sp_lightning import SuperpipelineStrategy
from tests.support.engine import streamer_of
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, loader, superpipeline, trainer_for


class Copies(Module):
    """Copies its trainer after the second batch."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 1:
            type(self).copied = copy.deepcopy(self.trainer.strategy)
            type(self).noted = self.trainer.strategy.stats()

    copied: Any = None
    noted: Any = None


def test_a_copy_answers_as_its_original_did() -> None:
    ours = fit(lambda: Copies(Stack()), vectors(), superpipeline(k=1))
    strategy: Any = ours.trainer.strategy
    assert streamer_of(Copies.copied) is None
    assert Copies.copied.stats() == Copies.noted
    assert Copies.copied.stats().fetched_layers < strategy.stats().fetched_layers
    assert Copies.copied.plan == strategy.plan
    assert Copies.copied.activations == strategy.activations
    assert Copies.copied.fetches().keys() == strategy.fetches().keys()


class Ties(Module):
    """After its second batch two of its parameters share memory, which cannot be streamed."""

    def on_train_batch_end(self, *args: Any) -> None:
        if args[-1] == 1:
            blocks: Any = self.net.blocks
            blocks[0].inner.weight = nn.Parameter(blocks[1].inner.weight.data)


def test_an_engine_that_cannot_be_built_anew_leaves_what_was_known() -> None:
    strategy, module = SuperpipelineStrategy(k=1), Ties(Stack())
    with pytest.raises(ValueError, match="two Parameter objects over the same memory"):
        trainer_for(strategy).fit(module, loader(vectors()))
    assert streamer_of(strategy) is None
    assert strategy.stats().fetched_layers > 0
    assert strategy.plan.k == 1
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


class MixesDevices(Module):
    """Gets torch's error of an accelerator, where its gradients are on the host: ``p * p.grad`` before backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )


def test_an_error_about_two_devices_says_what_is_on_the_host() -> None:
    """It named neither this package nor the remedy, and plain Lightning raises no such error."""
    with pytest.raises(RuntimeError, match="found at least two devices") as caught:
        trainer_for(SuperpipelineStrategy(k=1)).fit(MixesDevices(Stack()), loader(vectors()))
    (note,) = caught.value.__notes__
    assert "param.grad.to(param.device)" in note
