"""Gradients that stay as they came until somebody asks for ``param.grad``: nobody sees a difference."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn

from sp_lightning.core.updates.background import BackgroundUpdates
from sp_lightning.core.weights.gradient_roles import NarrowGradient, stored
from sp_lightning.trainer import scaler
from tests.equality.rows import Tiers, program, tiers
from tests.support.models import Module, Stack, vectors
from tests.support.runs import Outcome

UNDER = "one pass under forward"
CLIPPED = f"{UNDER}, clipped by norm"
SCALED = f"{UNDER}, 16-mixed"
ONE = tiers(rest=[CLIPPED])
TWICE = tiers(rest=[CLIPPED, f"{SCALED}, clipped by norm"], long=[UNDER, f"{UNDER}, clipped by value", SCALED])
LATE = tiers(rest=[f"{CLIPPED}, simulated"], long=[f"{UNDER}, simulated", f"{UNDER}, clipped by value, simulated"])


def value(parameter: nn.Parameter) -> Tensor | None:
    return None if parameter.grad is None else parameter.grad.clone()


def kind(parameter: nn.Parameter) -> str:
    return type(stored(parameter)).__name__


class Looks(Module):
    """Looks at gradients in training_step, before they are set to None: no hook says that it will.

    Args:
        look: is given each of the optimizer's parameters, or of the step's.
        hosts: which of both.
        scale: where a scaler begins.
    """

    def __init__(self, look: Callable[[nn.Parameter], Any] = value, *, hosts: bool = True, scale: float = 0) -> None:
        super().__init__(Stack())
        self.look, self.hosts, self.scale = look, hosts, scale
        self.seen: list[Any] = []
        self.noted: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.note()
        return super().training_step(batch, batch_idx)

    def note(self) -> None:
        parameters = self.trainer.optimizers[0].param_groups[0]["params"] if self.hosts else self.parameters()
        (self.noted if self.look is kind else self.seen).append([self.look(each) for each in parameters])

    def configure_optimizers(self) -> Any:
        if self.scale:
            self.trainer.precision_plugin.scaler._init_scale = self.scale  # type: ignore[attr-defined]
            self.trainer.precision_plugin.scaler.set_backoff_factor(2.0**-14)  # type: ignore[attr-defined]
        return super().configure_optimizers()


def kept_all_the_same() -> Any:
    """With hooks that may see them, and where they are used twice, none is kept; here they are, as if no hook could be seen."""
    return mock.patch("sp_lightning.core.plan.update_policy.may_stay_narrow", return_value=True)


def narrow(name: str, variants: Tiers, make: Callable[[], Any], covers: str, **more: Any) -> None:
    program(f"narrow gradients: {name}", variants, covers=covers, **more)(make)


for hosts in (True, False):
    whose = "the optimizer's" if hosts else "the step's"
    narrow(f"{whose} in the next step", LATE, partial(Looks, hosts=hosts), "clipped, if the step clips")

# ---------------------------------------------------------------------- which of them stay so


def all_narrow(ours: Outcome) -> None:
    """None has come yet at first. After the run they are plain tensors, and nothing of them is left."""
    module: Any = ours.module
    none, *others = [each.count("NarrowGradient") for each in module.noted]
    assert none == 0
    assert others == [max(others)] * 5
    assert others[0] > 10
    assert {type(each) for each in module.parameters()} == {nn.Parameter}
    assert {kind(each) for each in module.parameters()} == {"Tensor"}
    assert "zero_grad" not in vars(ours.trainer.optimizers[0])
    assert not [each for each in gc.get_objects() if type(each) is NarrowGradient]


def none_narrow(ours: Outcome) -> None:
    assert {each for kinds in ours.module.noted for each in kinds} <= {"Tensor", "NoneType"}  # type: ignore[union-attr]


class LooksThen(Looks):
    def note(self) -> None:
        super().note()
        assert all(each.grad is None or each.grad.isfinite().all() for each in self.parameters())


class Sees(Looks):
    def on_train_batch_end(self, *_: Any) -> None: ...


class AtTheEnd(Looks):
    def on_train_end(self) -> None: ...


class Constructed(Looks):
    """An optimizer that was made fused divides by the scale itself."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), fused=True)


class OwnScaler(Looks):
    class Scaler(torch.amp.GradScaler): ...

    def configure_optimizers(self) -> Any:
        self.trainer.precision_plugin.scaler = self.Scaler("cpu", init_scale=2.0**8)  # type: ignore[attr-defined]
        return super().configure_optimizers()


def once_only(ours: Outcome) -> None:
    """They are widened as they come from then on: otherwise each would take memory twice."""
    counts = [each.count("NarrowGradient") for each in ours.module.noted]  # type: ignore[union-attr]
    assert [bool(each) for each in counts] == [False, True, False, False, False, False]


narrow("all of them", ONE, partial(Looks, kind), "whoever does not ask pays for no others", also=all_narrow)
for scale in (2.0**8, 2.0**40):
    narrow(f"all of them at a scale of {scale:.0e}", tiers(rest=[SCALED], long=[f"{SCALED}, clipped by norm"]),
           partial(Looks, kind, scale=scale), "in skipped steps, too", also=all_narrow)  # fmt: skip
narrow("none after a look", ONE, partial(LooksThen, kind), "somebody has looked at one", also=once_only)
for name, variant, make in (
    ("a hook", UNDER, Sees), ("a hook at the end", UNDER, AtTheEnd), ("unscaled by the optimizer", SCALED, Constructed),
    ("a scaler of the user's", SCALED, OwnScaler), ("no overlap", "users, k=1, bf16-mixed", Looks),
):  # fmt: skip
    narrow(
        f"none with {name}", tiers(rest=[variant]), partial(make, kind), "where that saves nothing", also=none_narrow
    )
narrow("none accumulated", tiers(rest=[UNDER]), partial(Looks, kind), "where they are added up", also=none_narrow,
       accumulate_grad_batches=2, batches=partial(vectors, 4))  # fmt: skip

# ---------------------------------------------------------------------- whoever sees them in spite of that


class Watches(Looks):
    """Looks at gradients in one hook between backward and the next step as well."""

    place = ""

    def on_after_backward(self) -> None:
        self.note_at("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note_at("on_before_optimizer_step")

    def on_train_batch_end(self, *_: Any) -> None:
        self.note_at("on_train_batch_end")

    def note_at(self, place: str) -> None:
        if place == self.place:
            self.note()


def finite(ours: Outcome) -> None:
    """With the larger scale gradients are infinite at first, so that steps are skipped."""
    module: Any = ours.module
    found = [each for noted in module.seen for each in noted if each is not None]
    assert len(module.seen) == 12
    assert all(each.isfinite().all() for each in found) == (module.scale < 2**30)


for place in ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"):
    for scale in (2.0**8, 2.0**40):
        first = place == "on_before_optimizer_step"
        watches: Any = type("Watches", (Watches,), {"place": place})
        narrow(
            f"seen in {place} at a scale of {scale:.0e}",
            {f"{SCALED}, clipped by norm, simulated": 2 if first else 3,
             **tiers(long=[f"{SCALED}, simulated", f"{SCALED}, clipped by value, simulated"])},
            partial(watches, scale=scale), "scaled, unscaled and clipped when plain's are", inside=kept_all_the_same, also=finite,
        )  # fmt: skip


class SkipsZero(Looks):
    """Gradients are set to None in every second batch alone."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()


class StepsTwice(Looks):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        optimizer.step()


class SkipsLayers(SkipsZero):
    """Some layers get no gradient in every second batch, and keep those of the batch before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx % 2 == 0:
            return super().training_step(batch, batch_idx)
        return self.net.head(self.net.stem(batch)).square().mean()

    def zero_grad(self, *_: Any) -> None: ...


class ClipsSometimes(SkipsLayers):
    """Gradients that an earlier step has clipped are used by a step that does not clip."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.trainer.gradient_clip_val = 1e-3 if batch_idx % 2 == 0 else None
        return super().training_step(batch, batch_idx)


for make in (SkipsZero, StepsTwice, SkipsLayers, ClipsSometimes):
    variants = {
        SkipsZero: TWICE,
        SkipsLayers: TWICE,
        ClipsSometimes: ONE,
        StepsTwice: tiers(rest=[CLIPPED], long=[UNDER]),
    }
    narrow(f"used twice, {make.__name__}", variants[make], partial(make, kind), "each change of a gradient is made once",
           inside=kept_all_the_same)  # fmt: skip


READ: list[nn.Parameter] = []


class IsRead(Module):
    """Somebody else has its parameters."""

    def __init__(self) -> None:
        super().__init__(Stack())

    def on_fit_start(self) -> None:
        READ[:] = self.parameters()


@contextmanager
def read_by_another_thread(moment: str) -> Iterator[None]:
    """As a logger of the user's may, at any moment: what it has widened is unscaled and clipped once."""
    are_finite, submit = scaler._are_finite, BackgroundUpdates.submit
    read: list[str] = []

    def look(now: str) -> None:
        if now == moment:
            read.extend(kind(each) for each in READ)
            assert all(each.grad is not None for each in READ)

    def looked_through(gradients: list[Tensor]) -> bool:
        look("looked through")
        return are_finite(gradients)

    def submitted(self: BackgroundUpdates, *args: Any) -> None:
        look("submitted")
        submit(self, *args)

    with (
        mock.patch.object(scaler, "_are_finite", looked_through),
        mock.patch.object(BackgroundUpdates, "submit", submitted),
    ):
        yield
    assert "NarrowGradient" in read


for moment in ("looked through", "submitted"):
    narrow(
        f"read by another thread when they are {moment}", tiers(rest=[f"{SCALED}, clipped by norm"]),
        IsRead, "nothing is changed by a look", inside=partial(read_by_another_thread, moment),
    )  # fmt: skip
