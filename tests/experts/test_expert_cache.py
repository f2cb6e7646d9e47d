"""Device memory that keeps stacked experts which were used."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from sp_lightning.capabilities.experts.expert_cache import ExpertCache
from sp_lightning.core.device.device import Device
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.core.plan.window import Window
from tests.support import stacked
from tests.support.engine import Slots
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for
from tests.support.simdevice import poison, simulated
from tests.support.stacked import EXPERTS, Routers
from tests.support.tiers import first
from tests.support.wait_scenarios import left_out_with_a_cache


class Generates(stacked.Transformer):
    """Generates some tokens for each batch."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.generate(batch["input_ids"], max_new_tokens=6, do_sample=False, use_cache=True)


@contextmanager
def poisoned_slots() -> Iterator[None]:
    """A slot is NaN before another layer comes into it; what is in the cache stays."""
    fetch = Slots.fetch

    def poisoned(self: Slots, transfer: Any) -> None:
        for layer, slot, _ in transfer:
            if slot.layer is not layer:
                poison(slot.memory)
        fetch(self, transfer)

    with mock.patch.object(Slots, "fetch", poisoned):
        yield


def generated(strategy: Any, name: str = "qwen3") -> Any:
    torch.manual_seed(5)
    module = Generates(stacked.transformer(name).net)
    return trainer_for(strategy).predict(module, loader(stacked.tokens(6)))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", ["qwen3", pytest.param("gpt-oss", marks=pytest.mark.rest("another layout"))])
def test_the_budget_is_filled_with_experts_and_fewer_come(name: str) -> None:
    plain = generated("auto", name)
    found = find_layers(Generates(stacked.transformer(name).net))
    least = make_plan(found, k=1, k_prime=1)
    fetched, hits = [], []
    for share in (0.0, 0.5, 1.0):
        budget = least.peak_device_bytes + int(share * least.stack_bytes)
        strategy = superpipeline(k=1, k_prime=1, gpu_memory=budget)
        with poisoned_slots():
            assert_equal(generated(strategy, name), plain, "tokens")
        stats = strategy.stats()
        fetched.append(stats.expert_bytes)
        hits.append(stats.expert_hits / (stats.expert_hits + stats.expert_misses))
        assert strategy.plan.cache_bytes == pytest.approx(share * least.stack_bytes, abs=4096)
        assert stats.peak_device_bytes <= strategy.plan.peak_device_bytes <= budget
        assert "experts kept" in str(strategy.plan) or not share
    assert fetched[0] > fetched[1] > fetched[2]
    assert hits[0] < hits[1] < hits[2]


@pytest.mark.long("takes a second or more")
def test_a_larger_window_holds_other_layers_and_not_experts() -> None:
    plain, fetched, plans = generated("auto"), [], []
    for k in (1, 3):
        strategy = superpipeline(k=k, k_prime=1)
        with poisoned_slots():
            assert_equal(generated(strategy), plain, "tokens")
        stats = strategy.stats()
        fetched.append(stats.fetched_bytes - stats.expert_bytes)
        plans.append(strategy.plan)
    slots = [plan.rings[layer.ring].slots for plan in plans for layer in plan.layers if layer.rows]
    assert max(slots) == 2
    assert fetched[1] < fetched[0]


@pytest.mark.long("takes a second or more")
def test_copies_within_a_device_of_its_own_wait_for_transfers() -> None:
    plan = make_plan(find_layers(Generates(stacked.transformer("qwen3").net)), k=1, k_prime=1)
    strategy = superpipeline(k=1, k_prime=1, gpu_memory=plan.peak_device_bytes + plan.stack_bytes // 2)
    with simulated():
        ours = generated(strategy)
    assert_equal(ours, generated("auto"), "tokens")
    assert strategy.plan.cache_bytes
    assert strategy.stats().expert_hits


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("kept", first((1, 2, 3, 6, 12), 1, why="other experts are kept"))
@pytest.mark.parametrize("trains", [False, True])
def test_what_comes_into_a_slot_waits_for_experts_that_were_copied_there(kept: int, trains: bool) -> None:
    """No test had a cache of some experts and blocks that batches leave out, so two orders were never looked at.

    Experts go from the cache to their layer's slot in the order of compute when the layer is fetched, and not when it is
    used. If a block is left out then, another layer is fetched over it: the upload waited for the slot's last use, which
    was before that copy, and wrote the slot while the copy was pending. The results were those of the wrong experts.
    """
    strategy, run = superpipeline(), fit if trains else None
    with simulated():
        ours = left_out_with_a_cache(strategy, kept=kept, run=run)
    assert strategy.plan.cache_bytes
    assert strategy.stats().expert_hits
    assert_same(ours, left_out_with_a_cache("auto", run=run))


@pytest.mark.rest("takes tenths of a second")
def test_experts_that_were_updated_are_not_taken_from_the_cache() -> None:
    make, batches = stacked.CASES["few"]
    budget = make_plan(find_layers(make()), k=1, k_prime=1).peak_device_bytes + 60_000
    strategy = superpipeline(k=1, k_prime=1, gpu_memory=budget)
    many = [*batches(), *batches(), *batches()]
    with poisoned_slots():
        ours = fit(make, many, strategy)
    assert strategy.plan.cache_bytes
    assert_same(ours, fit(make, many))


def test_experts_written_in_a_forward_are_not_taken_from_the_cache() -> None:
    make, batches = stacked.CASES["written"]

    def results(strategy: Any) -> Any:
        torch.manual_seed(5)
        return trainer_for(strategy).predict(make(), loader([*batches(), *batches()]))

    budget = make_plan(find_layers(make()), k=1, k_prime=1).peak_device_bytes + 60_000
    with poisoned_slots():
        ours = results(superpipeline(k=1, k_prime=1, gpu_memory=budget))
    assert_equal(ours, results("auto"), "predictions")


class _Layer:
    """What the cache knows of a layer."""

    def __init__(self, index: int) -> None:
        found = find_layers(Routers())
        self.planned = next(layer for layer in make_plan(found, k=1, k_prime=1).layers if layer.rows)
        self.index = index


def test_the_expert_goes_whose_uses_count_least() -> None:
    layer: Any = _Layer(0)
    cache = ExpertCache(Device(torch.device("cpu")), [layer])
    cache.allocate(3 * layer.planned.row_bytes)
    slot = torch.zeros(layer.planned.nbytes, dtype=torch.uint8)
    for rows in ((0, 1), (0, 2), (0, 1), (3,)):
        cache.use(layer, rows)
        cache.keep(layer, rows, slot)
    assert cache.rows(layer) == {0, 1, 3}, "2 was used once, and before 3"
    for _ in range(40):
        cache.use(layer, (4, 5))
        cache.keep(layer, (4, 5), slot)
    assert cache.rows(layer) >= {4, 5}, "what was used long ago counts little"
    cache.drop(layer)
    assert not cache.rows(layer)


def test_what_is_brought_is_what_was_kept() -> None:
    layer: Any = _Layer(0)
    cache = ExpertCache(Device(torch.device("cpu")), [layer])
    cache.allocate(EXPERTS * layer.planned.row_bytes)
    slot = torch.randint(0, 255, (layer.planned.nbytes,), dtype=torch.uint8)
    cache.keep(layer, range(EXPERTS), slot)
    other = torch.zeros_like(slot)
    cache.bring(layer, [1, 6], other)
    for index in layer.planned.stacks:
        span = layer.planned.spans[index]
        before, after = (each[span.offset : span.offset + span.nbytes].view(EXPERTS, -1) for each in (slot, other))
        assert torch.equal(after[[1, 6]], before[[1, 6]])
        assert not after[[0, 2, 3, 4, 5, 7]].any()


def test_a_window_leaves_the_rest_to_experts_and_no_more_than_there_are() -> None:
    found = find_layers(Routers())
    plan = make_plan(found, k=1, k_prime=1)
    for more, kept in ((0, 0), (1000, 1000), (10**9, plan.stack_bytes)):
        window = Window(1, 1, plan.peak_device_bytes + more)
        assert window.with_experts(window.begin(found, Device(torch.device("cpu")))).cache_bytes == kept
