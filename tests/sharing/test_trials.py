"""Each trial of a shared base is bitwise the run that it would have been alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.sharing.common import TrialMemory
from tests.support.models import Module
from tests.support.runs import Outcome, assert_same, fit, loader, trainer_for
from tests.support.tiers import first

RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
WIDTH = 64  # some pages for each weight


class Adapted(nn.Module):
    """A frozen linear layer with a trained adapter, and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 2, bias=False)
        self.up = nn.Linear(2, WIDTH, bias=False)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(self.drop(x)))) + x


class Learner(Module):
    """A frozen base of some layers, the same in all trials, with adapters of one's own."""

    def __init__(self, rate: float, depth: int = 4) -> None:
        torch.manual_seed(1)
        super().__init__(nn.Sequential(*(Adapted() for _ in range(depth))))
        torch.manual_seed(int(1e5 * rate))
        for block in self.net:  # type: ignore[union-attr]
            nn.init.normal_(block.up.weight, std=0.1)
        self.rate = rate

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=self.rate)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def batches(rate: float, count: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(int(1e6 * rate))
    return [torch.randn(4, WIDTH, generator=generator) for _ in range(count)]


def learn(
    rate: float, *, make: Callable[[float], pl.LightningModule] = Learner, plain: bool = False, **options: Any
) -> Outcome:
    """A trial."""
    ours = {
        name: options.pop(name) for name in ("k", "activations", "optimizer_overlap", "optimizer_on") if name in options
    }
    strategy: Any = "auto" if plain else SuperpipelineStrategy(fused_optimizer=False, **{"k": 1, **ours})
    return fit(lambda: make(rate), batches(rate), strategy, **options)


def assert_each_is_itself(count: int, run: Callable[[float], Outcome] = learn) -> SharedBase:
    rates = RATES[:count]
    alone = [run(rate) for rate in rates]
    base = SharedBase()
    for ours, its in zip(base.map(run, rates), alone, strict=True):
        assert_same(ours, its)
    return base


@pytest.mark.parametrize("count", [2, 3, 5])
def test_trials_are_what_they_are_alone(count: int) -> None:
    base = assert_each_is_itself(count)
    assert_same(learn(RATES[0]), learn(RATES[0], plain=True))
    net = Learner(RATES[0])
    frozen = sum(p.nbytes for p in net.parameters() if not p.requires_grad)
    batch = 2 * base.fetched_bytes / (2 * 4 * frozen)  # in a batch each layer comes for forward and for backward
    assert 0.7 < batch < 2, "the base has come about once for all trials"


OPTIONS: dict[str, dict[str, Any]] = {
    "recompute": {"activations": "recompute"},
    "offload": {"activations": "offload"},
    "k2": {"k": 2},
    "device": {"optimizer_on": "device"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 0.01},
}


@pytest.mark.parametrize(
    "name", first(list(OPTIONS), "recompute", "bf16-true", "bf16-mixed", why="other paths of the same")
)
def test_options(name: str) -> None:
    assert_each_is_itself(3, lambda rate: learn(rate, **OPTIONS[name]))


def test_updates_in_the_background() -> None:
    def run(rate: float) -> Outcome:
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap="forward")
        return fit(lambda: Learner(rate), batches(rate), strategy, recorded="losses")

    assert_each_is_itself(3, run)


def test_trials_of_different_lengths_depths_and_validations(tmp_path: Path) -> None:
    """One validates, one saves checkpoints, one is deeper, one ends early, one resumes."""
    learn(RATES[4], max_epochs=1).trainer.save_checkpoint(tmp_path / "resume.ckpt")

    def run(rate: float) -> Outcome:
        at = RATES.index(rate)
        options: list[dict[str, Any]] = [
            {"val": batches(rate, 2), "max_epochs": 2},
            {"enable_checkpointing": True, "default_root_dir": tmp_path / f"{rate}", "max_epochs": 2},
            {"make": lambda rate: Learner(rate, depth=6)},
            {"max_steps": 2},
            {"ckpt_path": tmp_path / "resume.ckpt", "max_epochs": 2},
        ]
        return learn(rate, **options[at])

    assert_each_is_itself(5, run)


class Fails(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            raise ZeroDivisionError("in the middle")
        return super().training_step(batch, batch_idx)


class FailsInBackward(Learner):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            self.net[1].up.weight.register_hook(lambda _: 1 / 0)  # type: ignore[index, union-attr]
        return loss


@pytest.mark.parametrize("kind", [Fails, FailsInBackward])
def test_one_that_fails_leaves_the_others_alone(kind: type[Learner]) -> None:
    def run(rate: float) -> Outcome:
        return learn(rate, make=kind if rate == RATES[1] else Learner)

    alone = [learn(rate) for rate in RATES[:3]]
    first, failed, third = SharedBase().map(run, RATES[:3], return_exceptions=True)
    assert isinstance(failed, ZeroDivisionError)
    assert_same(first, alone[0])
    assert_same(third, alone[2])
    with pytest.raises(ZeroDivisionError):
        SharedBase().map(run, RATES[:3])


class Writes(Learner):
    """One trial writes a frozen weight, one unfreezes a layer."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        base = self.net[2].base  # type: ignore[index, union-attr]
        if batch_idx == 1 and self.rate == RATES[0]:
            with torch.no_grad():
                base.weight.mul_(1.5)
        if batch_idx == 1 and self.rate == RATES[1]:
            base.bias.data = torch.ones(WIDTH)

    def configure_optimizers(self) -> Any:
        if self.rate == RATES[2]:
            self.net[1].base.requires_grad_(True)  # type: ignore[index, union-attr]
        return super().configure_optimizers()


def test_a_frozen_weight_that_one_trial_writes_is_its_own() -> None:
    assert_each_is_itself(4, lambda rate: learn(rate, make=Writes))


class Other(Learner):
    """Of one trial a layer of the base has other values."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate)
        if rate == RATES[1]:
            nn.init.constant_(self.net[3].base.weight, 0.01)  # type: ignore[index, union-attr]


def test_a_layer_that_differs_is_its_own() -> None:
    assert_each_is_itself(3, lambda rate: learn(rate, make=Other))


def test_prediction() -> None:
    def run(rate: float) -> Any:
        torch.manual_seed(int(1e5 * rate))
        return trainer_for(SuperpipelineStrategy(k=1)).predict(Learner(rate), loader(batches(rate)))

    alone = [run(rate) for rate in RATES]
    base = SharedBase()
    for ours, its in zip(base.map(run, RATES), alone, strict=True):
        assert all(map(torch.equal, ours, its))
    assert base.fetched_bytes > 0


def test_a_trial_begins_with_the_random_state_of_before() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    base = SharedBase()
    torch.manual_seed(4)
    after = torch.get_rng_state()
    for drawn in base.map(lambda _: torch.rand(4), range(3)):
        assert torch.equal(drawn, expected)
    assert torch.equal(torch.get_rng_state(), after)


def test_the_base_is_once_in_memory() -> None:
    """Pages of frozen weights are nobody's own."""
    own = list[int]()

    class Looks(Learner):
        def on_train_end(self) -> None:
            engine = self.trainer.strategy._run.engine  # type: ignore[attr-defined]
            memories = [layer.block.memory for layer in engine._layers]
            own.append(sum(end - begin for m in memories if isinstance(m, TrialMemory) for begin, end in m.own()))

    assert_each_is_itself(2, lambda rate: learn(rate, make=Looks))
    net = Learner(RATES[0])
    frozen = sum(p.nbytes for p in net.parameters() if not p.requires_grad)
    assert own[:2] == [0, 0]  # alone there is none
    assert all(0 < each < frozen / 1.5 for each in own[2:])


def test_no_more_than_max_trials_run_at_once() -> None:
    under_way = list[int]()
    base = SharedBase(max_trials=2)

    def run(rate: float) -> Outcome:
        outcome = learn(rate)
        under_way.append(base._turns.count)
        return outcome

    base.map(run, RATES)
    assert max(under_way) <= 2
    assert base._turns.most == 2


# ---------------------------------------------------------------------- bad input


def test_what_cannot_share_is_told_before_work() -> None:
    def nothing_frozen() -> None:
        learn(1e-3, make=lambda rate: Learner(rate).requires_grad_(True))  # type: ignore[return-value]

    def another_base() -> None:
        learn(1e-3)

        def made(rate: float) -> Learner:
            module = Learner(rate)
            for p in module.parameters():
                torch.nn.init.uniform_(p)
            return module

        learn(1e-3, make=made)

    def on_disk() -> None:
        fit(lambda: Learner(1e-3), batches(1e-3), SuperpipelineStrategy(disk="/tmp"))

    def two_devices() -> None:
        trainer_for("superpipeline", devices=2)

    def inside() -> None:
        base.map(lambda _: None, [1])

    for bad, message in (
        (nothing_frozen, "it has no frozen weights"),
        (another_base, "others than those of the trial before"),
        (on_disk, "disk= keeps weights where"),
        (two_devices, "this trainer has several"),
    ):
        with pytest.raises(ValueError, match=message):
            SharedBase().wrap(bad)()
    base = SharedBase()
    with pytest.raises(RuntimeError, match="cannot begin inside of another"):
        base.wrap(inside)()
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="has to be a number of at least 1"):
            SharedBase(max_trials=wrong)  # type: ignore[arg-type]


def test_a_module_is_in_one_trial() -> None:
    module = Learner(1e-3)
    strategies = [SuperpipelineStrategy(k=1) for _ in range(2)]
    found = SharedBase().map(
        lambda strategy: fit(lambda: module, batches(1e-3), strategy), strategies, return_exceptions=True
    )
    assert [isinstance(each, RuntimeError) and "is in another trial" in str(each) for each in found].count(True) == 1
