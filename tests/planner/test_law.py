"""The law of the window: a batch takes as long as its computation or its uploads, and more layers on the device never slow it."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise
from unittest import mock

import lightning.pytorch as pl
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from sp_lightning import SuperpipelineStrategy
from sp_lightning.core.device.device import Stream
from sp_lightning.core.model.find import find_layers
from sp_lightning.core.plan.plan import make_plan
from sp_lightning.tools.planner.prediction.simulator import Walk
from sp_lightning.tools.planner.prediction.visits import Rates
from sp_lightning.trainer.metrics import remedy
from tests.support.clocked import LAYERS, WIDTH, Clocked
from tests.support.planner import schedule_visits

COUNT = 24
WINDOWS = [(k, k_prime) for k_prime in (1, 2, 4) for k in (1, 2, 4, 8, 16)]
FOUND = find_layers(nn.Sequential(*(nn.Linear(8, 8) for _ in range(COUNT))))


RATIOS = [0.5, 1.0, 1.5, 2.0, 3.0, 6.0, 24.0]


@cache
def batch(k: int, k_prime: int, ratio: float, *, training: bool, download: float = math.inf) -> tuple[float, float]:
    """The seconds and the uploads of a batch, if a layer's forward takes a second and its upload ``ratio`` seconds.

    If the uploaded layers change from batch to batch, the mean of as many batches as it takes until they are the same again.
    """
    plan = make_plan(FOUND, k=k, k_prime=k_prime)
    nbytes = plan.layers[0].nbytes
    rates = Rates(
        nbytes / ratio, nbytes / download if download < math.inf else math.inf, math.inf, math.inf, visit_seconds=0.0
    )
    walk = Walk(plan, schedule_visits(plan, [1.0] * COUNT, training=training), rates)
    for _ in range(3):
        walk.batch()
    begun, uploads, batches = walk.ended, 0, COUNT - 1 if _moves(k + k_prime) and not training else 1
    for _ in range(batches):
        walk.batch()
        uploads += sum(each.kind == "fetch" and each.nbytes == nbytes for each in walk.device.intervals)
    return (walk.ended - begun) / batches, uploads / batches


def _moves(slots: int) -> bool:
    """Returns True if at most half of the layers are uploaded for each batch of inference. Then the next batch uploads others."""
    return 2 * (COUNT - slots + 1) < COUNT


def fewest_uploads(slots: int, *, training: bool) -> float:
    """The uploads of a batch with optimal replacement, if a layer is uploaded when it is used and not before."""
    if training:  # forward and backward, after which all weights change: the layers at the turn are still on the device
        return 2 * COUNT - slots
    return (COUNT - slots) * COUNT / (COUNT - 1)  # round and round; each miss evicts the layer that was used last


@pytest.mark.parametrize("ratio", RATIOS)
@pytest.mark.parametrize(("k", "k_prime"), WINDOWS)
def test_inference_computes_or_uploads(k: int, k_prime: int, ratio: float) -> None:
    seconds, uploads = batch(k, k_prime, ratio, training=False)
    assert seconds <= 1.001 * max(COUNT, uploads * ratio)
    # Optimal replacement in all slots but one, which is being filled while another layer computes.
    slots = k + k_prime
    assert uploads <= fewest_uploads(slots - 1, training=False) + (0.05 if _moves(slots) else 1)


def test_compute_waits_a_little_where_gaps_are_uneven() -> None:
    """With 16 slots, two or three layers compute between two uploads, which take as long as two and a half."""
    assert COUNT < batch(12, 4, 2.5, training=False)[0] < 1.1 * COUNT


def test_no_other_window_helps_where_downloads_bind() -> None:
    """The advice on waits for gradients was a larger k', which makes a step longer: its first transfer has more layers."""
    seconds = [batch(8, k_prime, 1.0, training=True, download=8.0)[0] for k_prime in (1, 2, 4)]
    assert seconds == sorted(seconds)
    for k_prime in (1, 2, 4):
        assert "k_prime" not in remedy("gradient offloading", make_plan(FOUND, k=8, k_prime=k_prime))


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize(("k", "k_prime"), [each for each in WINDOWS if each[0] >= each[1]])
def test_training_computes_or_uploads(k: int, k_prime: int, ratio: float) -> None:
    """The law does not hold across the turn: the forward needs all uploads, the backward few, and computes twice as long."""
    seconds, uploads = batch(k, k_prime, ratio, training=True)
    ends = (
        k_prime * ratio + 2.0
    )  # nothing computes during the first transfer, and the last backward has no upload beside it
    assert uploads == fewest_uploads(k + k_prime, training=True)
    assert seconds <= 1.001 * (ends + max(3 * COUNT, uploads * ratio, COUNT * ratio + 2 * COUNT + 1))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 3.0])
@pytest.mark.parametrize("k_prime", [1, 2, 4])
def test_more_layers_are_never_slower(k_prime: int, ratio: float, training: bool) -> None:
    """Training has 3 % to spare: with k ≥ k', transfers have k' layers, and then nothing computes during a larger first one."""
    seconds = [batch(k, each, ratio, training=training)[0] for k, each in WINDOWS if each == k_prime]
    spare = 1.03 if training else 1.0001
    assert all(more <= spare * less for less, more in pairwise(seconds))


class Clockwatcher(pl.LightningModule):
    """A stack of equal layers that notes when each batch begins, on a clock device."""

    def __init__(self, device: Clocked) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        self.clocks, self.at = device, list[float]()

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.at.append(max(self.clocks.now[Stream.COMPUTE], self.clocks.host))
        return self.net(batch)  # type: ignore[no-any-return]

    validation_step = predict_step


@pytest.mark.rest("the simulation above runs the same schedule")
@pytest.mark.parametrize("loop", ["predict", "validate"])
@pytest.mark.parametrize(("k", "k_prime", "ratio"), [(1, 2, 1.0), (4, 2, 0.5), (8, 2, 3.0), (16, 1, 2.0)])
def test_the_engine_keeps_the_law(k: int, k_prime: int, ratio: float, loop: str) -> None:
    rate = 4 * WIDTH * WIDTH / ratio
    device = Clocked(Rates(rate, rate, math.inf, math.inf, visit_seconds=0.0), 1.0, 0.05)
    module = Clockwatcher(device)
    trainer = pl.Trainer(
        strategy=SuperpipelineStrategy(k=k, k_prime=k_prime), accelerator="cpu", logger=False, barebones=True
    )
    with mock.patch("sp_lightning.trainer.run.device_for", return_value=device):
        getattr(trainer, loop)(module, DataLoader(torch.ones(8, 2, WIDTH), batch_size=None))  # type: ignore[arg-type]
    planned = batch(k, k_prime, ratio, training=False)[0]
    assert module.at[-1] - module.at[3] == pytest.approx(planned * (len(module.at) - 4), rel=0.05)
