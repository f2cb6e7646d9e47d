"""torch's optimizers run fused: bitwise what ``fused=True`` gives, and the user's own value in all that is saved."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.updates import fused
from sp_lightning.core.updates.fused import has_fused_step, runs_fused
from tests.support.runs import Outcome, as_on_a_gpu, assert_same, fit
from tests.support.tiers import first

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
Make = Callable[[Any], Any]
LOSES_UPDATES = fused.loses_updates(
    torch.optim.SGD([torch.zeros(64).bfloat16()]), {"params": [torch.zeros(64).bfloat16()]}
)
OPTIMIZERS: dict[str, Make] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
    "groups": lambda p: torch.optim.AdamW(
        [{"params": list(p)[:3], "lr": 1e-3}, {"params": list(p)[3:], "fused": False}], lr=1e-2
    ),
}


def constructed(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


class Net(pl.LightningModule):
    def __init__(self, make: Make) -> None:
        super().__init__()
        self.make = make
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.net.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def fit_fused(make: Callable[[], Any], batches: Any = BATCHES, **options: Any) -> Outcome:
    """A run as on a GPU, where optimizers run fused that leave it open, at once in their steps."""
    with as_on_a_gpu():
        return fit(make, batches, SuperpipelineStrategy(k=1, optimizer_overlap="off"), **options)


def in_groups(make: Make) -> Make:
    """As a user would have it on plain Lightning and clip all the same: fused in the groups that leave it open."""

    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer = make(parameters)
        for group in optimizer.param_groups:
            group["fused"] = True if group["fused"] is None else group["fused"]
        return optimizer

    return made


def open_again(outcome: Outcome) -> Outcome:
    for optimizer in outcome.optimizers:
        for group in optimizer["param_groups"]:
            group["fused"] = None if group["fused"] is True else group["fused"]
    return outcome


@pytest.mark.parametrize(
    "precision",
    first(
        ["32-true", "bf16-mixed", "bf16-true"],
        "bf16-mixed",
        second=["bf16-true"],
        why="the same steps with other dtypes",
    ),
)
@pytest.mark.parametrize(
    "clip", [{}, {"gradient_clip_val": 0.05}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}]
)
@pytest.mark.parametrize("accumulate", first([1, 2], 1, why="the same with accumulated gradients"))
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_is_bitwise_what_fused_gives(name: str, accumulate: int, clip: dict[str, Any], precision: str) -> None:
    options: dict[str, Any] = {"precision": precision, "accumulate_grad_batches": accumulate, "max_epochs": 2, **clip}
    as_ours = (
        OPTIMIZERS[name] if (name, precision) == ("SGD", "bf16-true") and LOSES_UPDATES else in_groups(OPTIMIZERS[name])
    )
    plain = fit(lambda: Net(as_ours), BATCHES, **options)
    ours = fit_fused(lambda: Net(OPTIMIZERS[name]), **options)
    assert_same(ours, open_again(plain))


def skips_vectors(weights: list[Tensor], *arguments: Any, **options: Any) -> None:
    """torch's fused SGD for weights of 16 bits, in 2.11 (pytorch#191763)."""


@pytest.mark.parametrize("overlap", ["off", "forward"])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_fused_step_that_loses_updates_is_not_used(
    momentum: float, overlap: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    """Weights of 16 bits are trained as without ``fused``; those of 32 bits run fused."""

    def make() -> pl.LightningModule:
        return Net(lambda p: torch.optim.SGD(p, lr=0.1, momentum=momentum))

    monkeypatch.setattr(torch, "_fused_sgd_", skips_vectors)
    request.addfinalizer(fused._sgd_updates.cache_clear)
    fused._sgd_updates.cache_clear()
    if overlap == "forward":
        strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
        with pytest.raises(
            ValueError, match=r"SGD does not run fused \(torch .* would leave its 16-bit weights as they are\)"
        ):
            fit(make, BATCHES, strategy, precision="bf16-true")
        return
    assert_same(fit_fused(make, precision="bf16-true"), fit(make, BATCHES, precision="bf16-true"))
    assert not fused.loses_updates(torch.optim.SGD(nn.Linear(8, 8).parameters()), {"params": [torch.zeros(3)]})


@pytest.mark.rest("takes tenths of a second")
def test_what_is_saved_is_the_users_and_resumes_in_mid_epoch(tmp_path: Path) -> None:
    def run(make: Make, plain: bool, resume: Path | None = None) -> Outcome:
        saver = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=2, save_top_k=-1)
        return (fit if plain else fit_fused)(
            lambda: Net(make), BATCHES[:1] * 4, ckpt_path=resume, callbacks=[saver], enable_checkpointing=True
        )

    path = tmp_path / "step=2.ckpt"
    default = OPTIMIZERS["AdamW"]
    for make, plain, saved in ((default, False, None), (constructed, True, True)):
        whole = run(make, plain)
        groups = torch.load(path, weights_only=True)["optimizer_states"][0]["param_groups"]
        assert [group["fused"] for group in groups] == [saved]
        assert_same(run(make, False, path), replace(whole, losses=whole.losses[2:], gradients=whole.gradients[2:]))
        path.unlink()
    # A file of ours is an ordinary one: plain Lightning goes on as the user's optimizer does there.
    run(default, False)
    assert run(default, True, path).trainer.global_step == 4


def test_what_the_user_decided_is_left_alone() -> None:
    class Own(torch.optim.AdamW):
        """Somebody's subclass may step in its own way."""

    parameters = [nn.Parameter(torch.randn(3))]
    for optimizer in (
        torch.optim.AdamW(parameters, fused=False),
        torch.optim.AdamW(parameters, foreach=True),
        torch.optim.Adam(parameters, differentiable=True),
        torch.optim.Adam([nn.Parameter(torch.randn(3, device="meta"))]),
    ):
        assert not any(runs_fused(optimizer, group, fuse=True) for group in optimizer.param_groups)
    assert not has_fused_step(torch.optim.RMSprop(parameters))
    assert not has_fused_step(Own(parameters))
    two = torch.optim.SGD([{"params": parameters}, {"params": [nn.Parameter(torch.randn(3))]}], lr=0.1)
    two.param_groups[1]["fused"] = False
    assert [runs_fused(two, group, fuse=True) for group in two.param_groups] == [True, False]
    assert [runs_fused(two, group, fuse=False) for group in two.param_groups] == [False, False]
    two.param_groups[1]["fused"] = True
    assert runs_fused(two, two.param_groups[1], fuse=False)


class Manual(Net):
    """A group is added in mid-fit, without Lightning's closure."""

    def __init__(self) -> None:
        super().__init__(lambda p: torch.optim.SGD(list(p)[:2], lr=1e-2))
        self.automatic_optimization = False
        self.seen: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        if batch_idx == 0:
            optimizer.optimizer.register_step_pre_hook(self.look)
            optimizer.optimizer.register_step_post_hook(self.look)
        if batch_idx == 1:
            optimizer.add_param_group({"params": self.net[3].parameters()})
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()

    def look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self.seen.append([group["fused"] for group in optimizer.param_groups])


def test_groups_that_are_added_are_fused_and_all_are_the_users_at_all_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the code of torch's step: hooks of users before it find their own value, and those after it."""
    module, ran = importlib.import_module("torch.optim.sgd"), list[int]()

    def counted(weights: Any, *args: Any, then: Any = module._fused_sgd, **kwargs: Any) -> None:
        ran.append(len(weights))
        then(weights, *args, **kwargs)

    monkeypatch.setattr(module, "_fused_sgd", counted)
    done = fit_fused(Manual)
    assert ran == [2] + 3 * [2, 4]
    assert done.module.seen == 2 * [[None]] + 6 * [[None, None]]
    assert [group["fused"] for group in done.trainer.optimizers[0].param_groups] == [None, None]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("options", "runs_fused"),
    [
        ({}, False),
        ({"optimizer_overlap": "off"}, False),
        ({"optimizer_overlap": "forward"}, True),
        ({"optimizer_overlap": "backward"}, True),
    ],
)
@pytest.mark.parametrize("accelerated", [False, True])
def test_fused_is_for_accelerators_and_for_who_asks(
    accelerated: bool, options: dict[str, Any], runs_fused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The log says so in one sentence, and what it is to be compared with."""
    caplog.set_level("INFO", "lightning.pytorch")
    with as_on_a_gpu() if accelerated else nullcontext(), mock.patch("sp_lightning.core.messages._SAID", set()):
        ours = fit(lambda: Net(OPTIMIZERS["AdamW"]), BATCHES, SuperpipelineStrategy(k=1, **options), recorded="losses")
    runs_fused = runs_fused or accelerated
    make = in_groups(OPTIMIZERS["AdamW"]) if runs_fused else OPTIMIZERS["AdamW"]
    assert_same(ours, open_again(fit(lambda: Net(make), BATCHES, recorded="losses")))
    warned = not accelerated and options.get("optimizer_overlap") in ("forward", "backward")
    level = (
        logging.WARNING if warned else logging.INFO
    )  # on a CPU the user has not asked for other results than plain's
    (line,) = (each.getMessage() for each in caplog.records if each.levelno == level and "Superpipeline: " in each.msg)
    assert ("AdamW runs fused on the CPU" in line) is runs_fused
    assert ("results are bitwise those of plain Lightning whose optimizer has fused=True" in line) is runs_fused
    named = options.get("optimizer_overlap", "off")
    assert (f'which optimizer_overlap="{named}" needs' in line) is (named != "off")


AROUND = [f"on_{each}" for each in (
    "fit_start", "train_start", "train_epoch_start", "train_batch_start", "train_batch_end", "train_epoch_end", "train_end",
    "fit_end", "exception",
)]  # fmt: skip


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_outside_of_a_step_the_groups_are_the_users(overlap: Any, fails: bool) -> None:
    """``BaseFinetuning`` keeps copies of them, which its checkpoints hold."""

    class Fails(Net):
        def on_before_zero_grad(self, optimizer: Any) -> None:
            if fails and self.trainer.global_step == 2:
                raise ArithmeticError

    def look(trainer: Any, *_: Any) -> None:
        seen.update(group["fused"] for optimizer in trainer.optimizers for group in optimizer.param_groups)

    seen: set[Any] = set()
    hooks: dict[str, Any] = dict.fromkeys(AROUND, look)
    strategy = SuperpipelineStrategy(k=1, optimizer_overlap=overlap)
    with as_on_a_gpu(), pytest.raises(ArithmeticError) if fails else nullcontext():
        make = lambda: Fails(OPTIMIZERS["AdamW"])  # noqa: E731
        fit(make, BATCHES, strategy, recorded="losses", callbacks=[LambdaCallback(**hooks)])
    assert seen == {None}
