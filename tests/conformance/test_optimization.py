"""Clipping, schedulers, manual optimization, several optimizers and closures."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.conformance.features import feature
from tests.support.models import Gan, Lbfgs, Stack, vectors
from tests.support.nets import Does, Net, Scheduled
from tests.support.runs import assert_equal, loader
from tests.support.tiers import first
from tests.support.ways import LATE, RunVariant, Seen, compare, left


@pytest.mark.rest("takes tenths of a second")
@feature("Optimization", "`gradient_clip_val`, both algorithms")
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping(algorithm: str, tmp_path: Path) -> None:
    limit = {"norm": 0.01, "value": 1e-4}[algorithm]

    def run(way: RunVariant) -> Seen:
        return way.fit(gradient_clip_val=limit, gradient_clip_algorithm=algorithm)

    clipped = compare(run, tmp_path, LATE)
    with pytest.raises(AssertionError, match="differ"):
        assert_equal(clipped["state"], RunVariant(tmp_path / "unclipped", None).fit()["state"], "state")


class Clips(Net):
    """Clips in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if self.trainer.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.02, gradient_clip_algorithm="norm")
        else:
            self.norms.append(nn.utils.clip_grad_norm_(self.net.blocks.parameters(), 0.01))
            nn.utils.clip_grad_value_(self.net.head.parameters(), 1e-4)


@pytest.mark.rest("takes tenths of a second")
@feature("Optimization", "`configure_gradient_clipping` override")
def test_clipping_of_ones_own(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer()
        module = Clips()
        trainer.fit(module, loader(vectors(6)))
        return {**left(trainer), "norms": module.norms}

    norms = compare(run, tmp_path, LATE)["norms"]
    assert len(norms) == 3
    assert all(norm > 0.01 for norm in norms)


KINDS = ("epoch", "step", "plateau", "plateau, step", "one cycle", "sequential")


@pytest.mark.long("takes a second or more")
@feature("Optimization", *(f"learning-rate schedulers: {kind}" for kind in KINDS))
@pytest.mark.parametrize("kind", first(KINDS, "step", "plateau", why="other schedulers of torch"))
def test_schedulers(kind: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        rates: list[float] = []
        watch = Does(on_train_batch_end=lambda trainer, *_: rates.append(trainer.optimizers[0].param_groups[0]["lr"]))
        seen = way.fit(partial(Scheduled, kind), callbacks=[watch], max_epochs=3)
        return {**seen, "rates": rates}

    assert len(set(compare(run, tmp_path)["rates"])) > 1


class StepsItself(Net):
    """Manual optimization: accumulation, clipping and schedulers by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedulers = self.optimizers(), self.lr_schedulers()
        every_step, plateau = schedulers  # type: ignore[misc]
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss / 2)
        if batch_idx % 2:
            self.clip_gradients(optimizer, 0.02, "norm")
            optimizer.step()
            optimizer.zero_grad()
            every_step.step()
        if self.trainer.is_last_batch:
            plateau.step(loss.detach())

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedulers = torch.optim.lr_scheduler
        return [optimizer], [
            schedulers.ExponentialLR(optimizer, 0.9),
            schedulers.ReduceLROnPlateau(optimizer, patience=0, threshold=0.9),
        ]


@pytest.mark.long("takes a second or more")
@feature("Optimization", "manual optimization, schedulers stepped by hand")
def test_manual_optimization(tmp_path: Path) -> None:
    seen = compare(lambda way: way.fit(StepsItself, max_epochs=3), tmp_path, LATE)
    assert seen["optimizers"][0]["param_groups"][0]["lr"] < 1e-2
    assert seen["progress"][0] == 9


class Frequencies(Gan):
    """The critic learns in each batch, the generator in every third, in both of the ways that there are to toggle."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        seen = self.__dict__.setdefault("toggled", [])
        with second.toggle_model(sync_grad=True):
            seen.append([p.requires_grad for p in self.parameters()])
            loss = self.discriminator(batch).mean() - self.discriminator(self.generator(batch).detach()).mean()
            self.log("critic", loss)
            second.zero_grad()
            self.manual_backward(loss)
            second.step()
        if batch_idx % 3 == 0:
            self.toggle_optimizer(first)
            seen.append([p.requires_grad for p in self.parameters()])
            loss = -self.discriminator(self.generator(batch)).mean()
            self.log("generator", loss)
            first.zero_grad()
            self.manual_backward(loss)
            first.step()
            self.untoggle_optimizer(first)
        seen.append([p.requires_grad for p in self.parameters()])

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-3, fused=True),
            torch.optim.SGD(self.discriminator.parameters(), lr=1e-2, momentum=0.9, fused=True),
        ]


@pytest.mark.rest("takes tenths of a second")
@feature("Optimization", "several optimizers: `toggle_optimizer`, `toggle_model`, frequencies by hand")
@pytest.mark.parametrize("make", [Gan, Frequencies])
def test_several_optimizers(make: Any, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer(max_epochs=2)
        module = make()
        trainer.fit(module, loader(vectors(6)), loader(vectors(1)))
        return {**left(trainer), "toggled": vars(module).get("toggled", [])}

    seen = compare(run, tmp_path, ["off"] if make is Gan else LATE)
    assert len(seen["optimizers"]) == 2
    if make is Frequencies:
        assert len({tuple(each) for each in seen["toggled"]}) == 3


@pytest.mark.rest("takes tenths of a second")
@feature("Optimization", "closures that are called many times (LBFGS)")
def test_lbfgs(tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        calls: list[int] = []

        class Counted(Lbfgs):
            def training_step(self, batch: Any, batch_idx: int) -> Tensor:
                calls.append(batch_idx)
                return super().training_step(batch, batch_idx)

        return {**way.fit(lambda: Counted(Stack(3)), batches=3), "calls": calls}

    assert len(compare(run, tmp_path, ["off"])["calls"]) > 6


class StepsInItsOwnWay(Net):
    """Overrides whatever is around a step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.losses: list[Any] = []

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if self.how == "backward":
            (loss * 2).backward(retain_graph=True)
            loss.backward()
        else:
            super().backward(loss, *args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self.how == "warm-up":
            for group in optimizer.param_groups:
                group["lr"] = 1e-3 * (1 + self.trainer.global_step)
        if self.how == "skipped" and batch_idx % 2:
            self.losses.append(optimizer_closure())
        elif self.how == "closure first":
            loss = optimizer_closure()
            self.losses.append(loss.detach().clone())
            optimizer.step()
        else:
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if self.how == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif self.how != "kept" or batch_idx % 2 == 0:
            super().optimizer_zero_grad(epoch, batch_idx, optimizer)


OVERRIDES = {
    "backward": "`backward` override",
    "warm-up": "`optimizer_step` override",
    "skipped": "`optimizer_step` that skips steps",
    "closure first": "`optimizer_step` that calls the closure itself",
    "zeros": "`optimizer_zero_grad(set_to_none=False)`",
    "kept": "`optimizer_zero_grad` that keeps gradients",
}


@pytest.mark.rest("takes tenths of a second")
@feature("Optimization", *OVERRIDES.values())
@pytest.mark.parametrize("how", OVERRIDES)
def test_overrides(how: str, tmp_path: Path) -> None:
    def run(way: RunVariant) -> Seen:
        trainer = way.trainer()
        module = StepsInItsOwnWay(how)
        trainer.fit(module, loader(vectors(6)))
        gradients = {name: p.grad for name, p in module.named_parameters()}
        return {**left(trainer), "losses": module.losses, "gradients": gradients}

    seen = compare(run, tmp_path, LATE)
    assert all(gradient is not None for gradient in seen["gradients"].values())
    if how not in ("closure first", "zeros"):  # other ways to the same end
        with pytest.raises(AssertionError):
            assert_equal(seen["state"], RunVariant(tmp_path / "without", None).fit(val=1)["state"], "state")
