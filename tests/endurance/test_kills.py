"""A training that is killed at random moments resumes from its last checkpoint and ends as if nothing had happened.

``python -m tests.endurance.test_kills`` kills fifty times and prints a row of ``examples/results/README.md``.
"""

from __future__ import annotations

import logging
import os
import random
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim import AdamW

from sp_lightning import SuperpipelineStrategy
from tests.support.models import Module, Stack
from tests.support.ranks import fresh_processes
from tests.support.repository import result_row
from tests.support.runs import assert_equal, loader, trainer_for
from tests.support.tiers import first

STEPS = 40
WAYS: dict[str, dict[str, Any]] = {
    "updates in the step": {"optimizer_overlap": "off"},
    "updates under forward": {"optimizer_overlap": "forward"},
    "updates under backward": {"optimizer_overlap": "backward"},
    "activations recomputed": {"activations": "recompute"},
    "activations offloaded": {"activations": "offload"},
}


class ByStep(Module):
    """Data and random numbers follow from the step alone, which is what a checkpoint knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.manual_seed(self.trainer.global_step)
        time.sleep(0.003)
        return self.loss(torch.randn(4, 16))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return AdamW(self.parameters(), lr=1e-2, fused=True)


def train(folder: Path, strategy: Any) -> None:
    """To the end, from the last checkpoint if there is one; leaves ``end.pt``."""
    pl.seed_everything(7, verbose=False)
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=1, every_n_train_steps=2, enable_version_counter=False)
    module = ByStep(Stack())
    trainer = trainer_for(
        strategy, max_steps=STEPS, max_epochs=-1, callbacks=[saver], enable_checkpointing=True, default_root_dir=folder
    )
    last = folder / "last.ckpt"
    trainer.fit(module, loader([torch.zeros(1)] * STEPS), ckpt_path=last if last.exists() else None)
    torch.save((dict(module.state_dict()), trainer.optimizers[0].state_dict()), folder / "end.pt")


def _child(folder: Path, options: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    train(folder, SuperpipelineStrategy(k=1, k_prime=1, **options))
    os._exit(0)


@dataclass
class Outcome:
    """How often a process was killed, how many trainings came to their end all the same, and from how many steps they resumed."""

    kills: int = 0
    ends: int = 0
    resumed: int = 0


def kill(times: int, folder: Path, options: dict[str, Any], reference: Any, chance: random.Random) -> Outcome:
    """Kill trainings at random moments, and let the last one end; each end is compared with the reference.

    Raises:
        AssertionError: one could not resume, or ended otherwise.
    """
    outcome = Outcome()
    while True:
        process = fresh_processes().Process(target=_child, args=(folder, options))
        outcome.resumed += (folder / "last.ckpt").exists()
        process.start()
        if outcome.kills < times:
            process.join(chance.uniform(0.05, 0.5))
        if outcome.kills < times and process.is_alive():
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
            outcome.kills += process.exitcode == -signal.SIGKILL
        else:
            process.join()
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode == 0, "a training could not be resumed"
            assert_equal(torch.load(folder / "end.pt"), reference, "the end")
            outcome.ends += 1
            shutil.rmtree(folder)
            folder.mkdir()
            if outcome.kills >= times:
                return outcome


def undisturbed(folder: Path) -> Any:
    folder.mkdir()
    train(folder, "auto")
    return torch.load(folder / "end.pt")


@pytest.mark.long("takes a second or more")
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize(
    "way",
    first(
        ["updates under forward", "updates under backward"],
        "updates under backward",
        why="killed while updates run under the other half of a step",
    ),
)
def test_a_training_that_is_killed_ends_as_if_nothing_had_happened(way: str, tmp_path: Path) -> None:
    folder = tmp_path / "killed"
    folder.mkdir()
    outcome = kill(3, folder, WAYS[way], undisturbed(tmp_path / "plain"), random.Random(1))
    assert outcome.kills == 3
    assert outcome.ends >= 1


@pytest.mark.hours("fifty kills")
def test_fifty_kills() -> None:
    logging.disable(logging.INFO)
    folder = Path(tempfile.mkdtemp())
    reference = undisturbed(folder / "plain")
    ways = []
    for number, (way, options) in enumerate(WAYS.items()):
        (folder / "killed").mkdir(exist_ok=True)
        outcome = kill(10, folder / "killed", options, reference, random.Random(number))
        ways.append(f"{way}: {outcome.kills} killed, {outcome.resumed} resumed, {outcome.ends} ended, equal")
        print(ways[-1], flush=True)
    shutil.rmtree(folder)
    print(result_row("Fifty kills", "; ".join(ways), "python -m tests.endurance.test_kills"))


if __name__ == "__main__":
    test_fifty_kills()
