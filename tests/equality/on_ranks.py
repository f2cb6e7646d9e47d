"""Trains a case on several ranks, and compares what each of them sees with Lightning's ``ddp``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import cache
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.torch_compat.private import current_graph_task
from sp_lightning.experimental.ranks.rank_order import rank_order_hook
from tests.equality.cases import CASES
from tests.support.on_disk import without_room
from tests.support.ranks import Number, devices, in_ranks, total
from tests.support.runs import Outcome, assert_equal, fit, fused
from tests.support.simdevice import simulated
from tests.support.ways import scaled

REFUSED = {
    "parameter-hooks": "has a hook that runs after its gradient was accumulated",
    "sparse-embedding": "has sparse gradients",
    "rows/sparse": "has sparse gradients",
    "rows/sparse-and-dense": "has sparse gradients",
    "lbfgs": "calls its closure after it may have written weights",
    "rows/kept": "that process alone has the gradient",
}
NOT_DDP = {
    "llama-checkpoint-reentrant": "a parameter is ready twice",
    "checkpoint-calls-reentrant": "a parameter is ready twice",
    "checkpoint-whole": "a parameter is ready twice",
    "gan": "parameters without gradients in manual optimization",
    "rows/thawed": "parameters that were frozen when it was made are not summed",
    "quantised/int8": "tensor subclasses are not broadcast",
    "quantised/int4": "tensor subclasses are not broadcast",
    "quantised/int8-checkpoint": "tensor subclasses are not broadcast",
}
"""What DistributedDataParallel cannot train, with its reason. The reference averages gradients after backward."""

# Cases in which each rank writes values of its own into weights: ddp leaves them so, and here those of rank 0 count.
OF_EACH_RANK = {"captured-in-forward"}
TRAINED = [name for name in CASES if name not in {*REFUSED, *OF_EACH_RANK}]

Reference = Literal["ddp", "ddp in order", "ddp in one row", "averages"]


class EveryBatch(DDPStrategy):
    """``ddp`` that sums the gradients of every backward by themselves, and adds the sum to the former ones."""

    def __init__(self) -> None:
        super().__init__(find_unused_parameters=True, timeout=timedelta(seconds=60))

    def block_backward_sync(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    def setup(self, trainer: Any) -> None:
        super().setup(trainer)
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._apart

    def teardown(self) -> None:
        torch.autograd.backward = self._backward
        super().teardown()

    def _apart(self, *args: Any, **kwargs: Any) -> None:
        if current_graph_task() != -1:  # it is a reentrant checkpoint's
            self._backward(*args, **kwargs)
            return
        former = [(p, p.grad) for p in self.lightning_module.parameters() if p.grad is not None]  # type: ignore[union-attr]
        for parameter, _ in former:
            parameter.grad = None
        self._backward(*args, **kwargs)
        self._summed()
        with torch.no_grad():
            for parameter, gradient in former:
                parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)

    def _summed(self) -> None:
        """Called after a backward, whose gradients alone are in ``param.grad``."""


class InOrder(EveryBatch):
    """The same, which sums in the order of ranks, node by node. On the CPU Lightning installs no hook by itself."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = super()._setup_model(model)
        wrapped.register_comm_hook(self.num_processes, rank_order_hook)
        return wrapped


class InOneRow(EveryBatch):
    """The same, as if all ranks were on one node."""

    def _setup_model(self, model: Any) -> Any:
        wrapped = super()._setup_model(model)
        wrapped.register_comm_hook(None, rank_order_hook)
        return wrapped


class Averages(EveryBatch):
    """Averages ``param.grad`` after each backward, for modules that DistributedDataParallel cannot wrap."""

    def _setup_model(self, model: Any) -> Any:
        return model

    def _summed(self) -> None:
        for parameter in self.lightning_module.parameters():  # type: ignore[union-attr]
            there = torch.tensor(int(parameter.grad is not None))
            dist.all_reduce(there)
            if not there:
                continue
            mine = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            everybody = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
            dist.all_gather(everybody, mine.detach().contiguous() * (1 / dist.get_world_size()))
            size = self.num_processes
            nodes = [everybody[first : first + size] for first in range(0, len(everybody), size)]
            sums = [sum(node[1:], node[0]) for node in nodes]
            with torch.no_grad():
                parameter.grad = mine.detach()
                parameter.grad.copy_(sum(sums[1:], sums[0]))


def reference(name: str, ranks: Number) -> Reference:
    """What a case is compared with on so many ranks."""
    return "averages" if name in NOT_DDP else "ddp" if total(ranks) == 2 else "ddp in order"


ACCUMULATED = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}

MODES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "mixed": ({"k": 1, "k_prime": 2}, {"precision": "bf16-mixed"}),
    "half": ({"k": 2}, {"precision": "bf16-true"}),
    "offload": ({"k": 1, "activations": "offload"}, {}),
    "recompute": ({"k": 1, "activations": "recompute"}, {"precision": "bf16-mixed"}),
    "residents": ({"k": 1, "keep_on_gpu": ["**"]}, {}),
    "scaled": ({"k": 1}, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "under forward": ({"k": 1, "optimizer_overlap": "forward"}, {}),
    "all under forward": (
        {"k": 1, "optimizer_overlap": "forward"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.3, "accumulate_grad_batches": 2},
    ),
    "scaled under forward": (
        {"k": 1, "optimizer_overlap": "forward"},
        {"precision": "16-mixed", "gradient_clip_val": 0.1},
    ),
    "in backward": ({"k": 1, "optimizer_overlap": "backward"}, {}),
    "mixed in backward": ({"k": 2, "k_prime": 2, "optimizer_overlap": "backward"}, {"precision": "bf16-mixed"}),
    "added up in backward": ({"k": 1, "optimizer_overlap": "backward"}, {"accumulate_grad_batches": 2}),
    "on a disk": ({"k": 1, "disk": True}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}),
    "scaled, on a disk": ({"k": 1, "disk": True}, {"precision": "16-mixed", "gradient_clip_val": 0.1}),
    "mixed, on a disk, under forward": (
        {"k": 1, "disk": True, "optimizer_overlap": "forward"},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.1},
    ),
    "on a disk, in backward": ({"k": 1, "disk": True, "optimizer_overlap": "backward"}, {}),
    "clipped by value, in backward": (
        {"k": 1, "optimizer_overlap": "backward"},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ),
    "clipped by value": ({"k": 1}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
}
"""Options of the strategy (``disk``: whether all state that may be is on one) and of the trainer."""

STRATEGIES = {"ddp": EveryBatch, "ddp in order": InOrder, "ddp in one row": InOneRow, "averages": Averages}


def seen(outcome: Outcome) -> dict[str, Any]:
    """What can leave the process."""
    return {
        "losses": outcome.losses,
        "gradients": outcome.gradients,
        "state": outcome.state,
        "optimizers": outcome.optimizers,
        "rng": outcome.rng,
    }


def train_plain(name: str, ranks: Number, reference: Reference, options: dict[str, Any], fuse: bool) -> dict[str, Any]:
    return _train(name, ranks, STRATEGIES[reference](), options, fuse)


def train_ours(
    name: str,
    ranks: Number,
    strategy: dict[str, Any],
    options: dict[str, Any],
    fuse: bool = False,
    on_devices: bool = False,
) -> dict[str, Any]:
    with simulated() if on_devices else nullcontext(), _disk(strategy) as disk:
        ours = SuperpipelineStrategy(**{**strategy, **disk})
        outcome = _train(name, ranks, ours, options, fuse)
    if disk:
        assert ours.ledger is not None
        # The rank that owns a table owns little else, and one layer's state stays in memory.
        assert ours.ledger.on_disk or name.startswith("rows/"), "no state was on the disk"
    return outcome


@contextmanager
def _disk(strategy: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The option ``disk`` of a strategy, and no room for what may be there. Shared memory stands for it, which is faster."""
    if not strategy.get("disk"):
        yield {}
        return
    with pytest.MonkeyPatch.context() as patch:
        without_room(patch)
        yield {"disk": "/dev/shm"}


def _train(name: str, ranks: Number, strategy: Any, options: dict[str, Any], fuse: bool) -> dict[str, Any]:
    case = CASES[name]
    make = fused(case.make) if fuse else case.make
    batches = list(case.batches()) * total(ranks)  # each rank takes every so many
    seen_by: Any = (
        "losses" if fuse else "gradients"
    )  # a hook that looks at gradients keeps updates out of the background
    options = {"recorded": seen_by, **case.options(options)}
    if options.get("precision") == "16-mixed":
        options = {**{key: value for key, value in options.items() if key != "precision"}, **scaled()}
    return seen(fit(make, batches, strategy, val=case.validation(), **devices(ranks), **options))


@cache
def _plain(
    name: str, ranks: Number, reference: Reference, options: tuple[tuple[str, Any], ...], fuse: bool
) -> list[dict[str, Any]]:
    return in_ranks(ranks, train_plain, name, ranks, reference, dict(options), fuse)


def compare(
    name: str,
    ranks: Number = 2,
    strategy: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    reference: Reference = "ddp",
    on_devices: bool = False,
) -> None:
    """Compares every rank with the same rank of the reference. Optimizers have state on the first rank of each node alone.

    Args:
        name: of the case.
        ranks: how many, on how many nodes.
        strategy, options: of the strategy and of the trainer.
        reference: what it is compared with.
        on_devices: whether each rank has a simulated device.
    """
    options = options or {}
    strategy = strategy or {"k": 1}
    fuse = strategy.get("optimizer_overlap", "off") != "off"
    plain = _plain(name, ranks, reference, tuple(options.items()), fuse)
    ours = in_ranks(ranks, train_ours, name, ranks, strategy, options, fuse, on_devices)
    for rank, (mine, theirs) in enumerate(zip(ours, plain, strict=True)):
        assert theirs["losses"] or theirs["optimizers"], "the reference run did nothing"
        assert_equal(mine, divided(theirs, rank), f"rank {rank}")


def divided(theirs: dict[str, Any], rank: int) -> dict[str, Any]:
    """Returns what a rank of ``ddp`` has seen, as a rank sees it. Rank 0 alone has the gathered state of optimizers."""
    return {**theirs, "optimizers": [{**each, "state": {}} for each in theirs["optimizers"]]} if rank else theirs
