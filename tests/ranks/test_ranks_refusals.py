"""What several devices cannot do, and what differs between them, is refused by name, on all of them and before work begins."""

from __future__ import annotations

import errno
import mmap
import os
import re
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from sp_lightning import SuperpipelineStrategy
from sp_lightning.experimental.ranks import ranks
from sp_lightning.experimental.ranks.agreement import refuse_restart_with_old_store
from tests.support.models import Module, Stack, vectors
from tests.support.nets import Wrapper
from tests.support.ranks import RanksFailed, free_port, in_ranks, rank, start
from tests.support.runs import fit, loader, trainer_for
from tests.support.tiers import first, some


class Net(Module):
    def __init__(self) -> None:
        super().__init__(Stack())


def train(strategy: dict[str, Any]) -> None:
    fit(Net, vectors(2), SuperpipelineStrategy(**strategy), devices=2)


@pytest.mark.long("starts two ranks")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer_on": "gpu"}, 'optimizer_on="gpu" steps layers of one device'),
        ({"gpu_layers": 2}, "gpu_layers=2 keeps layers on one device"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RanksFailed, match=message) as caught:
        in_ranks(2, train, options)
    assert all(error is not None and message in error for error in caught.value.errors)


class StepsInBackward(Net):
    """Another optimizer steps when gradients arrive at an earlier block."""

    def __init__(self) -> None:
        super().__init__()
        late = torch.optim.SGD(self.net.blocks[3].parameters(), lr=0.1)
        self.net.blocks[1].register_full_backward_pre_hook(lambda *_: late.step())


def train_with_a_step_in_backward() -> None:
    fit(StepsInBackward, vectors(2), SuperpipelineStrategy(), devices=2)


@pytest.mark.long("starts two ranks")
def test_a_step_in_a_hook_of_backward() -> None:
    """The gradients are not summed then: without the error, the step would do nothing."""
    with pytest.raises(RanksFailed, match=r"Do it after backward\(\)") as caught:
        in_ranks(2, train_with_a_step_in_backward)
    assert all(error is not None for error in caught.value.errors)


class InParts(Module):
    """A hook of backward runs another backward. Its gradient is of a block whose gradients are summed over the ranks already."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.net.blocks[0].register_full_backward_hook(self.penalize)

    @torch.enable_grad()
    def penalize(self, *_: Any) -> None:
        self.net.blocks[2].inner.weight.square().sum().backward()


def train_in_parts() -> None:
    fit(InParts, vectors(8), SuperpipelineStrategy(k=1), devices=2)


@pytest.mark.long("starts two ranks")
def test_a_gradient_in_two_parts() -> None:
    """The sum would lack the second part."""
    with pytest.raises(RanksFailed, match=r"has two parts.*use_reentrant=False") as caught:
        in_ranks(2, train_in_parts)
    assert all(error is not None for error in caught.value.errors)


class Wrapped(Net):
    def configure_optimizers(self) -> Any:
        return Wrapper(super().configure_optimizers())


def train_wrapped() -> None:
    fit(Wrapped, vectors(2), SuperpipelineStrategy(), devices=2)


@pytest.mark.long("takes a second or more")
def test_an_optimizer_that_wraps_another_is_refused() -> None:
    """Its state cannot be another one on the ranks that have none: ``AttributeError: property 'state' has no setter``."""
    with pytest.raises(RanksFailed, match="Return the wrapped optimizer from configure_optimizers") as caught:
        in_ranks(2, train_wrapped)
    assert all(error is not None and "Wrapper gives the state" in error for error in caught.value.errors)


class Foreign(Net):
    """Its optimizer steps a parameter that the module does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.others = [nn.Parameter(torch.ones(16))]

    def loss(self, batch: Any) -> Any:
        return super().loss(batch * self.others[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([*self.parameters(), *self.others], fused=True)


def train_by_layers() -> None:
    fit(Foreign, vectors(8), SuperpipelineStrategy(optimizer_overlap="forward"), devices=2, recorded="losses")


@pytest.mark.long("takes a second or more")
def test_a_step_that_must_run_as_a_whole_is_refused() -> None:
    with pytest.raises(RanksFailed, match=r"one by one, but the optimizer has a parameter of shape \(16,\)"):
        in_ranks(2, train_by_layers)


# ---------------------------------------------------------------------- ranks differ


class Differs(pl.LightningModule):
    """Is another module on rank 1, in one way."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how if rank() else ""
        width = 24 if self.how == "a shape" else 16
        names = ["first", "second", "third"]
        if self.how == "the order":
            names.reverse()
        self.layers = nn.Sequential()
        for name in names:
            self.layers.add_module(name, nn.Sequential(nn.Linear(16, width), nn.Linear(width, 16)))
        if self.how == "a parameter is missing":
            self.layers.second[0].bias = None
        if self.how == "a parameter more":
            self.more = nn.Parameter(torch.ones(3))
        if self.how == "a dtype":
            self.layers.third[1].double()
        if self.how == "a buffer":
            self.register_buffer("counted", torch.ones(2))
        self.layers.first.requires_grad_(self.how != "frozen")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        if self.how == "another optimizer":
            return torch.optim.Adam(self.parameters(), lr=0.1)
        return torch.optim.SGD(self.parameters(), lr=0.2 if self.how == "another learning rate" else 0.1)


STRATEGY: dict[str, dict[str, Any]] = {
    "k": {"k": 2},
    "activations": {"activations": "recompute"},
    "overlap": {"optimizer_overlap": "forward"},
}
TRAINER: dict[str, dict[str, Any]] = {
    "precision": {"precision": "bf16-mixed"},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.5},
    "steps": {"max_steps": 1},
}
DIFFERENT = {
    "a shape": r"parameters of rank 1 .*: layers\.first\.0\.weight is float32 of shape \(24, 16\) on rank 1 and .* \(16, 16\)",
    "the order": r"parameters of rank 1 .*: layers\.first\.0\.weight is after 'layers\.third\.0\.weight' on rank 1",
    "a parameter is missing": r"parameters of rank 1 .*: layers\.second\.0\.bias is not there on rank 1",
    "a parameter more": r"parameters of rank 1 .*: more is float32 of shape \(3,\) on rank 1 and not there on rank 0",
    "a dtype": r"parameters of rank 1 .*: layers\.third\.1\.weight is float64 of shape",
    "frozen": r"parameters of rank 1 .*: layers\.first\.0\.weight is .*, frozen on rank 1",
    "a buffer": r"buffers of rank 1 .*: counted is float32 of shape \(2,\) on rank 1",
    "k": r"options of rank 1 .*: k is 2 on rank 1 and 1 on rank 0",
    "activations": r"options of rank 1 .*: activations is 'recompute' on rank 1",
    "overlap": r"options of rank 1 .*: optimizer_overlap is 'forward' on rank 1",
    "precision": r"trainer's settings of rank 1 .*: precision is 'bf16-mixed' on rank 1",
    "accumulation": r"trainer's settings of rank 1 .*: accumulate_grad_batches is 2 on rank 1 and 1 on rank 0",
    "clipping": r"trainer's settings of rank 1 .*: gradient_clip_val is 0\.5 on rank 1 and None on rank 0",
    "steps": r"trainer's settings of rank 1 .*: max_steps is 1 on rank 1",
    "another optimizer": r"optimizers of rank 1 .*: SGD 0, group 0 is not there on rank 1",
    "another learning rate": r"optimizers of rank 1 .*: SGD 0, group 0 is lr 0\.2",
}
QUICK = ("a shape",)


def train_differently(how: str) -> None:
    strategy = {"k": 1, **(STRATEGY.get(how, {}) if rank() else {})}
    options = TRAINER.get(how, {}) if rank() else {}
    data = TensorDataset(torch.ones(2, 16))
    trainer = trainer_for(SuperpipelineStrategy(**strategy), devices=2, use_distributed_sampler=False, **options)
    trainer.fit(Differs(how), DataLoader(data))
    raise AssertionError("it was not refused")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "how", first(list(DIFFERENT), *QUICK, second=list(DIFFERENT)[::3], why="one stands for all that is compared")
)
def test_ranks_that_differ(how: str) -> None:
    """Every rank says so, before the first batch."""
    with pytest.raises(RanksFailed) as caught:
        in_ranks(2, train_differently, how)
    for error in caught.value.errors:
        assert re.search(DIFFERENT[how], str(error)), error
        assert "ValueError" in str(error)


# ---------------------------------------------------------------------- the system


def train_without(what: str, folder: str) -> None:
    """Rank 1 cannot map memory for weights, or the system gives nobody any, or none can be shared on it."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    def map_in_part(descriptor: int, nbytes: int, *args: Any, **kwargs: Any) -> Any:
        weights = descriptor >= 0 and "superpipeline weights" in os.readlink(f"/proc/self/fd/{descriptor}")
        return refuse() if rank() and weights else mapped(descriptor, nbytes, *args, **kwargs)

    mapped = mmap.mmap
    patches = {
        "support": mock.patch.object(ranks, "supported", return_value="the system is no Linux"),
        "memory": mock.patch("os.ftruncate", refuse),
        "a map": mock.patch("mmap.mmap", map_in_part),
    }
    with patches[what]:
        fit(Net, vectors(2), SuperpipelineStrategy(k=1), devices=2)


WITHOUT = {
    "support": ("cannot do so here: the system is no Linux", "Pass Trainer(devices=1)"),
    "memory": ("does not give rank 0 0.00 GiB of CPU memory for weights", "Cannot allocate memory"),
    "a map": ("does not give rank 1 0.00 GiB of CPU memory for weights", "Cannot allocate memory"),
}


@pytest.mark.long("waits until processes have ended; the first tier has what ranks compare")
@pytest.mark.parametrize("what", some(WITHOUT, "support", "a map", why="rank 0 makes the memory"))
def test_memory_that_cannot_be_shared(what: str, tmp_path: Any) -> None:
    """No rank waits for half an hour: ``outcomes`` would raise an error before."""
    errors = [error for error, _ in start(2, train_without, what, str(tmp_path)).outcomes()]
    assert all(errors), errors
    assert any(all(each in str(error) for each in WITHOUT[what]) for error in errors), errors


@pytest.mark.long("waits for a process in vain")
def test_a_process_that_never_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "LOCAL_RANK": "0", "NODE_RANK": "0"}
    for name, value in where.items():
        monkeypatch.setenv(name, value)
    trainer = trainer_for(SuperpipelineStrategy(k=1), devices=2)
    trainer.strategy._timeout = timedelta(seconds=1)  # type: ignore[attr-defined]  # half an hour
    with pytest.raises(RuntimeError, match="1/2 clients joined"):
        trainer.fit(Net(), loader(vectors(2)))


@pytest.mark.parametrize(
    ("count", "shared", "refused"), [("0", "True", False), ("1", "False", False), ("1", "True", True)]
)
def test_a_restart_needs_a_new_store(count: str, shared: str, refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """gloo read the addresses of processes that had ended, and waited for half an hour."""
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", count)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    with pytest.raises(RuntimeError, match="Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") if refused else nullcontext():
        refuse_restart_with_old_store()
