"""What is known of a run before its optimizers are there, and once its engine is gone; processes that others have started."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from lightning.fabric.plugins.environments import KubeflowEnvironment, SLURMEnvironment
from torch import nn

from sp_lightning import SuperpipelineStrategy
from tests.support.engine import engine_of
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Does
from tests.support.runs import fit, loader, superpipeline, trainer_for


def stack() -> Module:
    return Module(Stack())


def test_a_copy_answers_as_its_original_did() -> None:
    copied: list[Any] = []

    def copies(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            copied.extend([copy.deepcopy(trainer.strategy), trainer.strategy.stats()])

    strategy: Any = fit(
        stack, vectors(), superpipeline(k=1), callbacks=[Does(on_train_batch_end=copies)]
    ).trainer.strategy
    twin, noted = copied
    assert engine_of(twin) is None
    assert twin.stats() == noted
    assert twin.stats().fetched_layers < strategy.stats().fetched_layers
    assert (twin.plan, twin.activations) == (strategy.plan, strategy.activations)
    assert twin.fetches().keys() == strategy.fetches().keys()


def test_an_engine_that_cannot_be_built_anew_leaves_what_was_known() -> None:
    def ties(trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            module.net.blocks[0].inner.weight = nn.Parameter(module.net.blocks[1].inner.weight.data)

    strategy, module = SuperpipelineStrategy(k=1), stack()
    with pytest.raises(ValueError, match=r"blocks\.1\.inner\.weight' are two Parameter objects over the same memory"):
        trainer_for(strategy, callbacks=[Does(on_train_batch_end=ties)]).fit(module, loader(vectors()))
    assert engine_of(strategy) is None
    assert strategy.stats().fetched_layers > 0
    assert strategy.plan.k == 1
    assert all(type(p) is nn.Parameter and p.device.type == "cpu" for p in module.parameters())


def test_an_error_about_two_devices_says_what_is_on_the_host() -> None:
    """As for ``p * p.grad`` before backward. It named neither this package nor the remedy. Plain Lightning raises none."""

    def mixes(*_: Any) -> None:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
        )

    with pytest.raises(RuntimeError, match="found at least two devices") as caught:
        fit(stack, vectors(), SuperpipelineStrategy(k=1), callbacks=[Does(on_before_backward=mixes)])
    (note,) = caught.value.__notes__
    assert "param.grad.to(param.device)" in note


class Looks(Module):
    """Asks for the ledger while it makes its optimizer, in which it may fail."""

    fails = False

    def configure_optimizers(self) -> Any:
        strategy: Any = self.trainer.strategy
        with pytest.raises(RuntimeError, match=r"No ledger: only trainer\.fit"):
            _ = strategy.ledger
        if self.fails:
            raise KeyError("in configure_optimizers")
        return super().configure_optimizers()


def test_there_is_no_ledger_before_optimizers() -> None:
    strategy, again, module = SuperpipelineStrategy(k=1), SuperpipelineStrategy(k=1), Looks(Stack())
    module.fails = True
    with pytest.raises(KeyError, match="in configure_optimizers"):
        trainer_for(strategy).fit(module, loader(vectors()))
    with pytest.raises(RuntimeError, match=r"No ledger: only trainer\.fit"):
        _ = strategy.ledger
    trainer_for(again).fit(Looks(Stack()), loader(vectors()))
    assert again.ledger is not None
    assert again.ledger.state, "two tensors for each weight"


def test_one_device_in_each_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun has started two, and each would train by itself."""
    started = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0", "GROUP_RANK": "0"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"2 processes were started .* Pass Trainer\(devices=2\)"):
        fit(stack, vectors(2), SuperpipelineStrategy())
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert fit(stack, vectors(2), SuperpipelineStrategy()).losses


@pytest.mark.parametrize("environment", [SLURMEnvironment, KubeflowEnvironment])
def test_one_device_where_the_environment_cannot_tell_the_number_of_processes(
    environment: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain Lightning does not ask for SLURM_NTASKS or WORLD_SIZE on one device; a KeyError was all that users saw here."""
    for name in ("SLURM_NTASKS", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert fit(stack, vectors(2), SuperpipelineStrategy(), plugins=[environment()]).losses
