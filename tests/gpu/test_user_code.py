"""User code beside the engine on a GPU: what a simulated device can show only in part, because its threads are Python's.

A weight that its own layer changes, readers in other threads, signals in backward, inference mode in a step, a forward that is
another one in backward. The reference is the same program on plain Lightning, or the same run without the disturbance.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning import SuperpipelineStrategy
from tests.support.gpu_reference import DEVICE
from tests.support.models import Module
from tests.support.readers import Watched
from tests.support.runs import Outcome, assert_equal, fit

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.usefixtures("deterministic"),
]
GPU: dict[str, Any] = {"accelerator": "gpu", "recorded": "nothing"}
BATCHES = [torch.linspace(-1, 1, 64).view(4, 16).roll(step, 1) for step in range(4)]


def ours(make: Any, **options: Any) -> Outcome:
    trainer = {name: options.pop(name) for name in ("precision", "callbacks") if name in options}
    return fit(make, BATCHES, SuperpipelineStrategy(k=1, k_prime=1, **options), **GPU, **trainer)


class Codebook(nn.Module):
    """Its own optimizer steps one of its weights inside its forward, which reads the weight again.

    The rate is a power of two, so that a product has the same bits whether it is fused with the sum, as on a GPU, or not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.code = nn.Parameter(torch.ones(16))
        self.own = torch.optim.SGD([self.code], lr=0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        (self.code * x.detach()).sum().backward()
        self.own.step()
        self.own.zero_grad()
        return torch.tanh(x) + self.code.detach()


class Books(Module):
    def __init__(self) -> None:
        super().__init__(nn.Sequential(*(Codebook() for _ in range(4))))
        self.seen: list[Tensor] = []

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        self.seen.append(loss.detach().cpu())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        names = [(name, p) for name, p in self.named_parameters() if "code" not in name]
        return torch.optim.SGD([p for _, p in names], lr=0.5)


@pytest.mark.parametrize("overlap", ["off", "auto"])
def test_a_weight_that_its_own_layer_steps(overlap: Any) -> None:
    plain: Any = fit(Books, BATCHES, "auto", **GPU).module
    module: Any = ours(Books, optimizer_overlap=overlap, keep_on_gpu=["**.code"]).module
    assert_equal(module.seen, plain.seen, "losses")


READS: dict[str, Any] = {
    "state_dict": lambda module: {name: value.detach().clone() for name, value in module.state_dict().items()},
    "norms": lambda module: [float(p.detach().norm()) for p in module.parameters()],
    "forward": lambda module: module.net(torch.ones(4, 16, device=module.device)).sum().item(),
}


def read_while_it_trains(what: str, overlap: Any) -> Outcome:
    """A run, while another thread reads its module all the time. The reader may get errors of its own."""
    made: list[Any] = []
    over = threading.Event()

    def make() -> Any:
        made.append(Watched())
        return made[0]

    def read() -> None:
        while not over.is_set():
            with contextlib.suppress(Exception), torch.no_grad():
                READS[what](made[0])
            time.sleep(0.001)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        return ours(make, optimizer_overlap=overlap)
    finally:
        over.set()
        reader.join()


@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
@pytest.mark.parametrize("what", READS)
def test_another_thread_reads_the_module(what: str, overlap: Any) -> None:
    undisturbed = ours(Watched, optimizer_overlap=overlap)
    for _ in range(10 if DEVICE.type == "cuda" else 1):
        assert_equal(read_while_it_trains(what, overlap).state, undisturbed.state, "state")


class Signalled(Watched):
    """Sends its process a signal while its backward runs."""

    number = signal.SIGUSR2

    def loss(self, batch: Tensor) -> Tensor:
        loss = super().loss(batch)
        if self.global_step == 1:
            loss.register_hook(lambda _: os.kill(os.getpid(), self.number))
        return loss


@pytest.mark.parametrize("overlap", ["off", "forward", "backward"])
def test_a_signals_handler_saves_a_checkpoint(overlap: Any, tmp_path: Path) -> None:
    undisturbed = ours(Watched, optimizer_overlap=overlap)
    made: list[Any] = []

    def save(*_: Any) -> None:
        made[0].trainer.save_checkpoint(tmp_path / "in a handler.ckpt")

    def make() -> Any:
        made.append(Signalled())
        return made[0]

    before = signal.signal(Signalled.number, save)
    try:
        outcome = ours(make, optimizer_overlap=overlap)
    finally:
        signal.signal(Signalled.number, before)
    assert (tmp_path / "in a handler.ckpt").exists()
    assert_equal(outcome.state, undisturbed.state, "state")


class Teacher(Watched):
    """Computes with its weights in inference mode, within its training step."""

    def loss(self, batch: Tensor) -> Tensor:
        with torch.inference_mode():
            self.net(batch).float().clone()
        return super().loss(batch)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("k", [1, 2, 99])
def test_inference_mode_in_a_step_while_layers_are_stepped_on_the_device(k: int, precision: Any) -> None:
    options: dict[str, Any] = {"optimizer_on": "gpu", "optimizer_overlap": "forward"}
    plain = fit(Teacher, BATCHES, "auto", precision=precision, **GPU)
    strategy = SuperpipelineStrategy(k=k, k_prime=1, **options)
    outcome = fit(Teacher, BATCHES, strategy, precision=precision, **GPU)
    assert_equal(outcome.state, {name: value.cpu() for name, value in plain.state.items()}, "state")


def test_a_forward_that_computes_the_same_values_in_backward_is_none() -> None:
    """Kernels that are not deterministic would show here, too."""
    kept, again = ours(Watched), ours(Watched, activations="recompute")
    assert_equal(again.state, kept.state, "state")
