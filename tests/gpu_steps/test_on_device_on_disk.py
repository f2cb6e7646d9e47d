"""Steps on the device with a disk: state goes from the disk to the device and back; results are those of plain Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Wait
from tests.support.models import vectors
from tests.support.on_device import Stepped, alternating
from tests.support.on_disk import FAULTS, assert_whole, away, break_calls, everything_below, on_disk, without_room
from tests.support.runs import Outcome, assert_same, fit, loader, trainer_for
from tests.support.simdevice import simulated
from tests.support.tiers import first

OVERLAPS = first(["off", "forward", "backward"], "forward", why="its other modes")
OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=1e-2),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "momentum": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9),
    "Muon": lambda ps: torch.optim.Muon([p for p in ps if p.ndim == 2], lr=1e-2),
    "NAdam": lambda ps: torch.optim.NAdam(ps, lr=1e-2),
}
VARIANTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "mixed": {"precision": "bf16-mixed"},
    "mixed, clipped, accumulated": {
        "precision": "bf16-mixed",
        "gradient_clip_val": 0.01,
        "accumulate_grad_batches": 2,
    },
}


def both(folder: Path, **options: Any) -> SuperpipelineStrategy:
    return on_disk(folder, optimizer_on="gpu", **options)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("device", [False, True], ids=["CPU", "device"])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("overlap", OVERLAPS)
def test_all_may_be_on_the_disk(
    overlap: str, variant: str, device: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything_below(monkeypatch, window=2)
    options = VARIANTS[variant]
    if overlap == "backward" and "gradient_clip_val" in options:
        pytest.skip("clipping needs all gradients at once, and is refused")

    def run(strategy: Any) -> Outcome:
        return fit(Stepped, vectors(), strategy, recorded="losses", **options)

    plain = run("auto")
    strategy = both(tmp_path, optimizer_overlap=overlap)
    if not device:
        assert_same(run(strategy), plain)
        return
    with simulated() as made:
        assert_same(run(strategy), plain)
    assert Wait.READ_AFTER_TAKE in made[0].waits, "before it goes to the disk"


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("name", first(OPTIMIZERS, "NAdam", why="state of the same kind"))
def test_state_is_on_the_disk_between_steps(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has left the device before it is moved into the file."""
    without_room(monkeypatch)
    found: list[int] = []

    class Looks(Stepped):
        def on_train_batch_end(self, *_: Any) -> None:
            found.append(away(self.trainer.optimizers[0]))

    with simulated():
        ours = fit(lambda: Looks(OPTIMIZERS[name]), vectors(), both(tmp_path), recorded="losses")
    assert min(found) > 0
    assert list(tmp_path.iterdir()) == []
    assert_same(ours, fit(lambda: Stepped(OPTIMIZERS[name]), vectors(), "auto", recorded="losses"))


@pytest.mark.long("takes a second or more")
def test_what_has_no_gradient_keeps_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)
    assert_same(fit(alternating, vectors(5), both(tmp_path)), fit(alternating, vectors(5)))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("fault", ["write error", "read error"])
def test_a_disk_that_fails_ends_the_step_with_one_error(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_room(monkeypatch)
    module, trainer = Stepped(), trainer_for(both(tmp_path, optimizer_overlap="forward"), max_epochs=2)
    with monkeypatch.context() as patch:
        break_calls(patch, fault, 12)
        with pytest.raises(OSError, match=f"Optimizer state on the disk {FAULTS[fault][2]}"):
            trainer.fit(module, loader(vectors()))
        with pytest.raises(RuntimeError, match="not those of any whole step"):
            trainer.save_checkpoint(tmp_path / "after.ckpt")
    assert_whole(module, tmp_path)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("second", first(["plain", "host", "device", "disk"], "host", "device", why="as with the disk"))
def test_checkpoints_are_plains(second: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)
    strategies: dict[str, Callable[[], Any]] = {
        "plain": lambda: "auto",
        "host": lambda: on_disk(tmp_path),
        "device": lambda: SuperpipelineStrategy(k=1, optimizer_on="gpu"),
        "disk": lambda: both(tmp_path),
    }
    path = tmp_path / "last.ckpt"
    fit(Stepped, vectors(), both(tmp_path), recorded="nothing").trainer.save_checkpoint(path)

    def go_on(strategy: Any) -> Outcome:
        return fit(Stepped, vectors(), strategy, recorded="losses", max_epochs=3, ckpt_path=path)

    assert_same(go_on(strategies[second]()), go_on("auto"))


class Outside(Stepped):
    """Its optimizer has a parameter that is not the module's."""

    def configure_optimizers(self) -> Any:
        self.other = [nn.Parameter(torch.ones(3))]
        return torch.optim.AdamW([*self.parameters(), *self.other], lr=1e-2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.other[0].sum()


@pytest.mark.rest("takes tenths of a second")
def test_a_refusal_names_all_that_is_to_be_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_room(monkeypatch)
    with pytest.raises(RuntimeError, match=r"not the module's.*leave disk= and optimizer_on out"):
        trainer_for(both(tmp_path)).fit(Outside(), loader(vectors()))
    trainer_for(SuperpipelineStrategy(k=1)).fit(Outside(), loader(vectors()))
