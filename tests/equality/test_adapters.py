"""Adapters on a frozen base: trained, merged, switched and added as on plain Lightning; the base only travels one way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import peft
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from tests.support.models import Transformer, llama, tokens
from tests.support.runs import assert_equal, assert_same, fit, fused, loader, superpipeline, trainer_for
from tests.support.tiers import first

TARGETS = ["q_proj", "v_proj", "down_proj"]


def adapted(config: peft.PeftConfig | None = None, *more: str) -> Callable[[], Transformer]:
    """A Llama with adapters, and further ones of these names."""

    def make() -> Transformer:
        module = llama()
        module.net = peft.get_peft_model(module.net, config or peft.LoraConfig(r=4, target_modules=TARGETS))
        for name in more:
            module.net.add_adapter(name, peft.LoraConfig(r=2, target_modules=TARGETS))
        return module

    return make


@pytest.mark.rest("takes tenths of a second")
def test_the_frozen_base_travels_one_way() -> None:
    strategy, batches = superpipeline(k=1), tokens()
    outcome = fit(adapted(), batches, strategy)
    trained = [p for p in outcome.module.parameters() if p.requires_grad]
    frozen = [p for p in outcome.module.parameters() if not p.requires_grad]
    assert strategy.stats().offloaded_gradient_bytes == len(batches) * sum(p.nbytes for p in trained)
    assert strategy.ledger.gradients < 4 * sum(p.nbytes for p in trained) < sum(p.nbytes for p in frozen)
    assert strategy.ledger.state == 2 * sum(p.nbytes for p in trained)
    assert all(p.grad is None for p in frozen)


class Merges(Callback):
    """Validates with the adapters in the weights they belong to."""

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.merge_adapter()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net.unmerge_adapter()


class Switches(Callback):
    """Trains another adapter from the second batch on."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        pl_module.net.set_adapter("other")


class Adds(Callback):
    """One more adapter in the middle of training, which nobody trains yet."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            pl_module.net.add_adapter("late", peft.LoraConfig(r=2, target_modules=TARGETS))


class MergesForGood(Callback):
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net = pl_module.net.merge_and_unload()


class AllParameters(Transformer):
    """Its optimizer knows the frozen ones and all adapters, too."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


CASES: dict[str, tuple[Callable[[], Transformer], type[Callback] | None]] = {
    "lora": (adapted(), None),
    "dora": (adapted(peft.LoraConfig(r=4, target_modules=TARGETS, use_dora=True)), None),
    "saved-modules": (adapted(peft.LoraConfig(r=4, target_modules=TARGETS, modules_to_save=["lm_head"])), None),
    "embedding": (adapted(peft.LoraConfig(r=4, target_modules=["embed_tokens", "q_proj"])), None),
    "merged-in-validation": (adapted(), Merges),
    "switched": (lambda: AllParameters(adapted(None, "other")().net), Switches),
    "added-later": (lambda: AllParameters(adapted()().net), Adds),
    "merged-for-good": (lambda: AllParameters(adapted()().net), MergesForGood),
}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.*Adapter .* was active which is now deleted")
@pytest.mark.parametrize("precision", first(["32-true", "bf16-mixed"], "bf16-mixed", why="casts come on top"))
@pytest.mark.parametrize("name", CASES)
def test_training_is_bitwise_equal(name: str, precision: Any) -> None:
    make, callback = CASES[name]

    def run(strategy: Any) -> Any:
        callbacks = [callback()] if callback else []
        return fit(make, tokens(), strategy, val=tokens(1), callbacks=callbacks, precision=precision, recorded="losses")

    assert_same(run(superpipeline(k=1)), run("auto"))


@pytest.mark.rest("takes tenths of a second")
def test_merged_and_unmerged_between_two_runs() -> None:
    def results(strategy: Any) -> Any:
        pl.seed_everything(3, verbose=False)
        module, trainer = adapted()(), trainer_for(strategy)
        trainer.fit(module, loader(tokens()))
        module.net.merge_adapter()
        merged = trainer.predict(module, loader(tokens(1)))
        module.net.unmerge_adapter()
        return merged, trainer.predict(module, loader(tokens(1))), dict(module.state_dict())

    assert_equal(results(superpipeline(k=1)), results("auto"), "merged")


class TwoInOneStep(AllParameters):
    """A forward with each adapter, then one backward. When it begins, the first adapter is frozen."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        losses = []
        for name in ("default", "other"):
            self.net.set_adapter(name)
            losses.append(self.loss(batch))
        return sum(losses)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize("activations", first(["keep", "recompute"], "keep", why="an error as with torch's checkpoint"))
def test_two_adapters_in_one_step(activations: Any, overlap: Any) -> None:
    """With "backward" layers were updated after the second forward's part of backward, and then refused to the first one's."""
    make = fused(lambda: TwoInOneStep(adapted(None, "other")().net))
    strategy = superpipeline(k=1, activations=activations, optimizer_overlap=overlap)
    if activations == "recompute":  # the second run has the other adapter, as with torch's checkpoint
        with pytest.raises(RuntimeError, match=r"The forward of 'net\.\S+' saved other tensors when it ran again"):
            fit(make, tokens(), strategy, recorded="losses")
        return
    ours = fit(make, tokens(), strategy, recorded="losses")
    assert_same(ours, fit(make, tokens(), recorded="losses"))
