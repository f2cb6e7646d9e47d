"""Trains a case on several ranks, and compares what each of them sees with Lightning's ``ddp``."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from sp_lightning import SuperpipelineStrategy, rank_order_hook
from sp_lightning.device.torch_private import current_graph_task
from tests.equality.cases import CASES
from tests.support.mixed import scaled
from tests.support.ranks import in_ranks
from tests.support.runs import Outcome, assert_equal, fit, fused
from tests.support.simdevice import simulated

Reference = Literal["ddp", "ddp in order", "averages"]


class EveryBatch(DDPStrategy):
    """``ddp`` that sums in every batch of an accumulation."""

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True, timeout=timedelta(seconds=60))

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()


class InOrder(EveryBatch):
    """The same, which sums in the order of ranks. On the CPU Lightning installs no hook by itself."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = super()._setup_model(model)
        wrapped.register_comm_hook(None, rank_order_hook)
        return wrapped


class Averages(EveryBatch):
    """Averages ``param.grad`` after each backward, for modules that DistributedDataParallel cannot wrap."""

    def _setup_model(self, model: Any) -> Any:
        return model

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._backward = torch.autograd.backward

        def backward(*args: Any, **kwargs: Any) -> None:
            self._backward(*args, **kwargs)
            if current_graph_task() == -1:  # it is no reentrant checkpoint's
                self._average()

        torch.autograd.backward = backward

    def teardown(self) -> None:
        torch.autograd.backward = self._backward
        super().teardown()

    def _average(self) -> None:
        for parameter in self.lightning_module.parameters():  # type: ignore[union-attr]
            there = torch.tensor(int(parameter.grad is not None))
            dist.all_reduce(there)
            if not there:
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, mine.detach().contiguous() * (1 / dist.get_world_size()))
            with torch.no_grad():
                parameter.grad = mine.detach()
                parameter.grad.copy_(sum(everybody[1:], everybody[0]))


STRATEGIES = {"ddp": EveryBatch, "ddp in order": InOrder, "averages": Averages}


def seen(outcome: Outcome) -> dict[str, Any]:
    """What can leave the process."""
    return {
        "losses": outcome.losses,
        "gradients": outcome.gradients,
        "state": outcome.state,
        "optimizers": outcome.optimizers,
        "rng": outcome.rng,
    }


def train_plain(name: str, ranks: int, reference: Reference, options: dict[str, Any], fuse: bool) -> dict[str, Any]:
    return _train(name, ranks, STRATEGIES[reference](), options, fuse)


def train_ours(
    name: str,
    ranks: int,
    strategy: dict[str, Any],
    options: dict[str, Any],
    fuse: bool = False,
    on_devices: bool = False,
) -> dict[str, Any]:
    left = {} if fuse else {"fused_optimizer": False}
    with simulated() if on_devices else nullcontext():
        return _train(name, ranks, SuperpipelineStrategy(**{**left, **strategy}), options, fuse)


def _train(name: str, ranks: int, strategy: Any, options: dict[str, Any], fuse: bool) -> dict[str, Any]:
    case = CASES[name]
    make = fused(case.make) if fuse else case.make
    batches = list(case.batches()) * ranks  # each rank takes every so many
    seen_by: Any = (
        "losses" if fuse else "gradients"
    )  # a hook that looks at gradients keeps updates out of the background
    options = {"recorded": seen_by, **case.options(options)}
    if options.get("precision") == "16-mixed":
        options = {**{key: value for key, value in options.items() if key != "precision"}, **scaled()}
    return seen(fit(make, batches, strategy, val=case.validation(), devices=ranks, **options))


@cache
def _plain(
    name: str, ranks: int, reference: Reference, options: tuple[tuple[str, Any], ...], fuse: bool
) -> list[dict[str, Any]]:
    return in_ranks(ranks, train_plain, name, ranks, reference, dict(options), fuse)


def compare(
    name: str,
    ranks: int = 2,
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    reference: Reference = "ddp",
    on_devices: bool = False,
) -> None:
    """Compares every rank with the same rank of the reference. Optimizers have state on rank 0 alone.

    Args:
        name: of the case.
        ranks: how many.
        strategy, options: of the strategy and of the trainer.
        reference: what it is compared with.
        on_devices: whether each rank has a simulated device. Then optimizers run fused, if nothing says otherwise.
    """
    options = options or {}
    strategy = strategy or {"k": 1}
    fuse = strategy.get("optimizer_overlap", "off") != "off" or (on_devices and "fused_optimizer" not in strategy)
    plain = _plain(name, ranks, reference, tuple(options.items()), fuse)
    ours = in_ranks(ranks, train_ours, name, ranks, strategy, options, fuse, on_devices)
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert theirs["losses"] or theirs["optimizers"], "the reference run did nothing"
        optimizers = [{**each, "state": {}} for each in theirs["optimizers"]] if rank else theirs["optimizers"]
        assert_equal(mine, {**theirs, "optimizers": optimizers}, f"rank {rank}")
