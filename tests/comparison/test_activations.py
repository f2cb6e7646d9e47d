"""Activations on a CPU are counted as a GPU would hold them: each storage once, from its save until its release, no weights."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.core.device.stats import Stats
from sp_lightning.tools.comparison.activations import CountingStrategy, HeldActivations
from tests.support.models import Module
from tests.support.runs import loader, superpipeline, trainer_for
from tests.support.simdevice import SimDevice, simulated

ROWS, NARROW, WIDE, BLOCKS = 4, 16, 32, 4
FLOAT = 4  # bytes
INPUT, HIDDEN = ROWS * NARROW * FLOAT, ROWS * WIDE * FLOAT


def block() -> nn.Module:
    """Autograd saves the input and the output of ReLU, which is the input of the second product, too."""
    return nn.Sequential(nn.Linear(NARROW, WIDE), nn.ReLU(), nn.Linear(WIDE, NARROW))


def blocks() -> nn.Module:
    return nn.Sequential(*(block() for _ in range(BLOCKS)))


def batches(count: int = 2) -> list[Tensor]:
    return [torch.randn(ROWS, NARROW) for _ in range(count)]


def counted(net: nn.Module) -> HeldActivations:
    held = HeldActivations()
    held.begin((*net.parameters(), *net.buffers()))
    return held


class Blocks(Module):
    """``in_forward``: the peak of activations when backward begins. ``retains``: True to retain the graph."""

    in_forward = 0

    def __init__(self, *, retains: bool = False) -> None:
        super().__init__(blocks())
        self.retains = retains

    def on_before_backward(self, loss: Tensor) -> None:
        self.in_forward = self.trainer.strategy.held.peak

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward(retain_graph=self.retains)


def peak_of(module: Blocks | None = None, batch_count: int = 1, **options: Any) -> int:
    strategy = CountingStrategy(k=1, k_prime=1, **options)
    trainer_for(strategy).fit(module or Blocks(), loader(batches(batch_count)))
    return strategy.held.peak


def stats_of() -> Stats:
    strategy = superpipeline(k=1, k_prime=1)
    trainer_for(strategy).fit(Module(blocks()), loader(batches(1)))
    return strategy.stats()


def test_two_products_and_a_relu_hold_two_tensors() -> None:
    net, (x, other) = block(), batches()
    held = counted(net)
    with held.hooks():
        loss = net(x).sum()
        assert held.nbytes == INPUT + HIDDEN
        loss.backward()
        assert held.nbytes == 0, "backward has freed them"
        kept = [net(each).sum() for each in (x, other)]
        assert held.nbytes == 2 * (INPUT + HIDDEN)
        del kept
    gc.collect()
    assert (held.nbytes, held.peak) == (0, 2 * (INPUT + HIDDEN))


def test_views_share_their_storage_and_a_buffer_is_a_weight() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(NARROW))
            self.register_buffer("scale", torch.ones(NARROW))

        def forward(self, x: Tensor) -> Tensor:
            return x[:1] * (self.weight * self.scale) + (x[1:2] * self.weight.view(1, -1))

    net, (x, _) = Scaled(), batches()
    held = counted(net)
    with held.hooks():
        output = net(x)
        assert held.nbytes == INPUT  # the whole storage of x
    assert output.requires_grad


KEPT = BLOCKS * (INPUT + HIDDEN) + INPUT  # the loss squares the output


def test_the_strategy_counts_the_same() -> None:
    assert peak_of() == KEPT


def test_each_engine_of_a_run_counts() -> None:
    """A parameter is exchanged before the second batch, which is larger and for which another engine is made."""

    class Exchanges(Blocks):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.larger = batch_idx == 1
            if self.larger:
                self.net[0][0].weight = nn.Parameter(self.net[0][0].weight.detach().clone())

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.loss(batch.repeat(2, 1) if self.larger else batch)

    assert peak_of(Exchanges(), 2) == 2 * KEPT


def test_a_run_on_a_cpu_has_all_parts_but_activations_after_a_batch() -> None:
    stats, layer = stats_of(), block()
    assert (stats.peak_activation_bytes, stats.peak_allocated_bytes) == (0, 0)  # no allocator counts
    assert stats.peak_weight_bytes >= 2 * sum(each.nbytes for each in layer.parameters())  # k + k' slots
    assert stats.peak_gradient_bytes > 0
    assert stats.peak_optimizer_bytes == 0  # optimizers step on the CPU
    parts = stats.peak_weight_bytes, stats.peak_gradient_bytes, stats.peak_optimizer_bytes
    assert sum(parts) == stats.peak_device_bytes


@pytest.mark.parametrize("retains", [False, True])
def test_recomputed_activations_are_the_inputs_and_those_of_one_block(retains: bool) -> None:
    """A graph that is retained also keeps the output, and nothing that was computed again."""
    assert peak_of(Blocks(retains=retains), activations="recompute") == (BLOCKS + retains) * INPUT + HIDDEN


def test_offloaded_activations_count_while_they_are_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """In forward those of a block are copied while the next one runs; in backward those of two blocks are uploaded."""
    monkeypatch.setattr("sp_lightning.capabilities.activations.offload.WORTH_MOVING", 0)
    monkeypatch.setattr("sp_lightning.capabilities.activations.calls.EXEMPT", 0)
    module = Blocks()
    assert peak_of(module, activations="offload") == module.in_forward == 2 * (INPUT + HIDDEN)


def test_on_an_accelerator_activations_are_the_rest_of_allocated_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimDevice, "most_bytes", lambda self: 2**20)
    with simulated():
        stats = stats_of()
    assert stats.peak_activation_bytes + stats.peak_device_bytes == stats.peak_allocated_bytes == 2**20
    assert all(value >= 0 for value in vars(stats).values() if not isinstance(value, dict))
