"""Text that is generated in ``predict_step`` is bitwise plain Lightning's, and each token finds its layers fetched."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor

from tests.support.models import CASES, Transformer, llama, t5, tokens
from tests.support.poison import poisoned
from tests.support.runs import assert_equal, loader, superpipeline, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 5},
    "beams": {"num_beams": 3},
    "beam-sampling": {"num_beams": 2, "do_sample": True},
    "several": {"num_beams": 2, "num_return_sequences": 2},
    "static-cache": {"cache_implementation": "static"},
    "offloaded-cache": {"cache_implementation": "offloaded"},
    "no-cache": {"use_cache": False},
}


class Writer(Transformer):
    """Prompts in, texts out."""

    ways: dict[str, Any]

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        prompt = batch["input_ids"]
        return self.net.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=6, min_new_tokens=6, pad_token_id=0, **self.ways
        )  # fmt: skip


def write(strategy: Any, make: Any = llama, *, ways: dict[str, Any], batches: int = 3, **options: Any) -> Any:
    pl.seed_everything(3, verbose=False)
    module = Writer(make().net)
    module.ways = ways
    return trainer_for(strategy, **options).predict(module, loader(tokens(batches)))


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="the same in one precision"))
@pytest.mark.parametrize("way", WAYS)
def test_text_is_the_same(way: str, precision: Any) -> None:
    options = {"precision": precision, "ways": WAYS[way]}
    with poisoned():
        ours = write(superpipeline(k=1), **options)
    assert_equal(ours, write("auto", **options), way)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("make", [lambda: CASES["gpt2-tied"].make(), t5, lambda: llama(vocab_size=500)])
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_other_models(make: Any, way: str) -> None:
    """Tied heads, an encoder that runs once, a table of which each token needs one row."""
    ours = write(superpipeline(k=2), make, ways=WAYS[way])
    assert_equal(ours, write("auto", make, ways=WAYS[way]), way)


@pytest.mark.long("takes a second or more")
def test_on_a_device_of_its_own() -> None:
    with simulated():
        ours = write(superpipeline(k=2), ways=WAYS["beams"])
    assert_equal(ours, write("auto", ways=WAYS["beams"]), "beams")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("way", ["greedy", "beams"])
def test_each_token_finds_its_layers_fetched(way: str) -> None:
    """In the first batch, too, whose length nobody knows: at most the very first layer is waited for."""
    strategy = superpipeline(k=2)
    write(strategy, ways=WAYS[way], batches=1)
    stats = strategy.stats()
    assert stats.fetched_layers > 3 * len(strategy.plan.layers)
    assert stats.demand_fetches <= 1


@pytest.mark.rest("takes tenths of a second")
def test_what_fits_stays_from_token_to_token() -> None:
    strategy = superpipeline(k=5, k_prime=1)
    write(strategy, ways=WAYS["greedy"], batches=2)
    assert strategy.stats().fetched_layers <= len(strategy.plan.layers) + 1
