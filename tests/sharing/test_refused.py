"""What trials may not have in common, and what else of a trial is refused by name."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.utils.data import DataLoader

from sp_lightning import SharedBase, SuperpipelineStrategy
from sp_lightning.sharing.shared_base import current
from tests.support.runs import fit, loader, trainer_for
from tests.support.trials import RATES, WIDTH, Learner, batches, learn


def test_what_cannot_share_is_told_before_work() -> None:
    def nothing_frozen() -> None:
        learn(1e-3, make=lambda rate: Learner(rate).requires_grad_(True))  # type: ignore[return-value]

    outside = trainer_for("superpipeline")

    def trainer_of_before() -> None:
        outside.fit(Learner(1e-3), loader(batches(1e-3)))

    def strategy_of_before() -> None:
        trainer_for(of_before).fit(Learner(1e-3), loader(batches(1e-3)))

    of_before = SuperpipelineStrategy()

    def another_base() -> None:
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
        (nothing_frozen, "in common with others: it has none"),
        (another_base, "others than those of the trial before"),
        (on_disk, "disk= keeps weights where"),
        (two_devices, "this trainer has several"),
    ):
        base = SharedBase()
        base.map(learn, [1e-3])
        with pytest.raises(ValueError, match=message):
            base.wrap(bad)()

    def on_another_device() -> None:
        trial = current()
        assert trial is not None
        trial.begin(None, None, torch.device("meta"), on_disk=False)

    base = SharedBase()
    base.map(learn, [1e-3])
    with pytest.raises(ValueError, match="this trial computes on meta, one before it on cpu"):
        base.wrap(on_another_device)()
    for before in (trainer_of_before, strategy_of_before):
        with pytest.raises(RuntimeError, match="was made outside of it"):
            base.wrap(before)()
    with pytest.raises(RuntimeError, match="cannot begin inside of another"):
        base.wrap(inside)()
    for wrong in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="has to be a number of at least 1"):
            SharedBase(max_trials=wrong)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="has to be a number of at least 1"):
            base.map(learn, RATES, max_trials=wrong)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*:pytest.PytestUnraisableExceptionWarning", "ignore:coroutine")
def test_a_trial_returns_what_it_has_computed() -> None:
    """The code of a generator or a coroutine would run outside of its turn."""

    def generator(rate: float) -> Iterator[float]:
        yield rate

    async def coroutine(rate: float) -> None: ...

    async def both(rate: float) -> AsyncIterator[float]:
        yield rate

    base = SharedBase()
    functions: list[Any] = [generator, both, coroutine, partial(generator), lambda rate: generator(rate)]
    for later in functions:
        with pytest.raises(TypeError, match=r"returns a (generator|async_generator|coroutine)\. A trial returns"):
            base.wrap(later)(1e-3)


class Odd(Exception):
    def __len__(self) -> int:
        return 0

    def __repr__(self) -> str:
        raise ValueError("it has no name")


def test_errors_are_told_whatever_they_and_the_arguments_are() -> None:
    def fails(argument: Any) -> None:
        raise argument

    (found,) = SharedBase().map(fails, [Odd()], return_exceptions=True)
    assert isinstance(found, Odd)
    assert found.__notes__ == ["A trial of a SharedBase has raised this, with a Odd."]


class Data(pl.LightningDataModule):
    def train_dataloader(self) -> Any:
        return loader(batches(1e-3))


THINGS: dict[str, Callable[[], Any]] = {
    "Learner": lambda: Learner(1e-3),
    "Linear": lambda: nn.Linear(WIDTH, WIDTH).requires_grad_(False),  # a copy was forgotten
    "Data": Data,
    "EarlyStopping": lambda: EarlyStopping("loss"),
    "DataLoader": lambda: DataLoader(batches(1e-3), batch_size=None, generator=torch.Generator()),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("kind", THINGS)
def test_what_has_a_state_is_in_one_trial(kind: str) -> None:
    thing = THINGS[kind]()

    def run(_: int) -> None:
        callbacks = [thing] if kind == "EarlyStopping" else []
        trainer = trainer_for(SuperpipelineStrategy(k=1), callbacks=callbacks, max_epochs=2)
        module = thing if kind == "Learner" else Learner(1e-3)
        if kind == "Linear":
            module.net[1].base = thing
        data = thing if kind in ("Data", "DataLoader") else loader(batches(1e-3))
        trainer.fit(module, data)

    base = SharedBase()
    found = base.map(run, range(2), return_exceptions=True)
    assert sum(isinstance(each, RuntimeError) and f"A {kind} is in two trials" in str(each) for each in found) == 1
    assert base.map(run, range(2), max_trials=1) == [None, None]
