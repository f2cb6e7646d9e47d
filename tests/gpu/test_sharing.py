"""Trials that share a base on a GPU are what they are alone, to the bit, and fetch the base once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.sharing.common import TrialBlock
from tests.support.engine import engine_of
from tests.support.runs import Outcome, assert_equal, fit
from tests.support.trials import RATES, Learner, batches, shared

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]


class Drawn(Learner):
    """Draws random numbers on the device, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * (1 + torch.rand((), device=batch.device))


@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}, {"optimizer_on": "gpu"}], ids=str)
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_trials_are_what_they_are_alone(precision: Any, options: dict[str, Any], overlap: Any) -> None:
    def run(rate: float) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap, **options)
        return fit(
            lambda: Drawn(rate), batches(rate), strategy, recorded="losses", accelerator="gpu", precision=precision
        )

    alone = [run(rate) for rate in RATES]
    base = shared(max_trials=len(RATES))
    for ours, its in zip(base.map(run, RATES), alone, strict=True):
        for what in ("losses", "state", "optimizers", "rng"):
            assert_equal(getattr(ours, what), getattr(its, what), what)
    if precision == "32-true":
        frozen = sum(p.nbytes for p in Learner(RATES[0]).parameters() if not p.requires_grad)
        assert base.fetched_bytes < 2.5 * 4 * 2 * frozen  # four batches, forward and backward


def test_all_that_a_trial_uploads_is_page_locked() -> None:
    locked, common = list[bool](), list[bool]()

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            locked.extend(p.is_pinned() for p in pl_module.parameters() if p.requires_grad)
            blocks = [layer.block for layer in engine_of(trainer.strategy).layers]
            common.extend(block.base.is_pinned() for block in blocks if isinstance(block, TrialBlock))

    def run(rate: float) -> None:
        fit(lambda: Learner(rate), batches(rate), SuperpipelineStrategy(k=1), recorded="nothing", accelerator="gpu",
            callbacks=[Looks()])  # fmt: skip

    shared(max_trials=2).map(run, RATES[:2])
    assert locked
    assert common
    assert all(locked + common)


def test_a_trial_without_a_budget_gets_its_share() -> None:
    budgets = list[Any]()

    def run(rate: float) -> None:
        strategy = SuperpipelineStrategy()
        fit(lambda: Learner(rate), batches(rate), strategy, recorded="losses", accelerator="gpu")
        budgets.append(strategy.plan)

    shared().map(run, RATES[:3])
    assert len(budgets) == 3
    with pytest.raises(ValueError, match="it is not known how many there will be"):
        shared().wrap(run)(RATES[0])
