"""Trains a case on several ranks, and compares what each of them sees with Lightning's ``ddp``."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from sp_lightning import SuperpipelineStrategy, rank_order_hook
from tests.equality.cases import CASES
from tests.support.ranks import in_ranks
from tests.support.runs import Outcome, assert_equal, fit


class EveryBatch(DDPStrategy):
    """Sums over ranks in every batch and in the order of ranks, also on the CPU, where Lightning installs no hook."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = super()._setup_model(model)
        if self.in_order:
            wrapped.register_comm_hook(None, rank_order_hook)
        return wrapped

    in_order = True

    def block_backward_sync(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def seen(outcome: Outcome) -> dict[str, Any]:
    """What can leave the process."""
    return {
        "losses": outcome.losses,
        "gradients": outcome.gradients,
        "state": outcome.state,
        "optimizers": outcome.optimizers,
        "rng": outcome.rng,
    }


def train_ddp(name: str, ranks: int, in_order: bool, options: dict[str, Any]) -> dict[str, Any]:
    strategy = EveryBatch(find_unused_parameters=True, timeout=timedelta(seconds=60))
    strategy.in_order = in_order
    return _train(name, ranks, strategy, options)


def train_ours(name: str, ranks: int, strategy: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return _train(name, ranks, SuperpipelineStrategy(**{"fused_optimizer": False, **strategy}), options)


def _train(name: str, ranks: int, strategy: Any, options: dict[str, Any]) -> dict[str, Any]:
    case = CASES[name]
    batches = list(case.batches()) * ranks
    return seen(fit(case.make, batches, strategy, val=case.validation(), devices=ranks, **case.options(options)))


def compare(name: str, ranks: int, strategy: dict[str, Any], options: dict[str, Any], *, in_order: bool) -> None:
    """Compares every rank with the same rank of ``ddp``. Optimizers have state on rank 0 alone."""
    plain = in_ranks(ranks, train_ddp, name, ranks, in_order, options)
    ours = in_ranks(ranks, train_ours, name, ranks, strategy, options)
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        if rank:
            for optimizer in theirs["optimizers"]:
                optimizer["state"] = {}
        assert theirs["losses"] or theirs["optimizers"], "the reference run did nothing"
        assert_equal(mine, theirs, f"rank {rank}")
