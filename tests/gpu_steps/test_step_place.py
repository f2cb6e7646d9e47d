"""``optimizer_on="auto"``: it takes the faster place by what is measured of the machine, and says which."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from sp_lightning import SuperpipelineStrategy, registry
from sp_lightning.capabilities.gpu_steps import step_place
from sp_lightning.capabilities.gpu_steps.times import Machine, measure
from sp_lightning.core.device.device import Wait
from tests.support.models import vectors
from tests.support.on_device import Stepped
from tests.support.runs import assert_same, fit
from tests.support.simdevice import SimDevice, simulated

SLOW_MEMORY = Machine(upload=1e12, download=1e12, host_memory=1e9, flops=1e12)
SLOW_LINKS = Machine(upload=1e9, download=1e9, host_memory=1e12, flops=1e12)
SLOW_PROCESSOR = Machine(upload=1e9, download=1e9, host_memory=1e12, flops=1e6)


@contextmanager
def on(machine: Machine) -> Iterator[None]:
    """A simulated device in a machine that is so fast."""
    with pytest.MonkeyPatch.context() as patch, simulated():
        patch.setattr(step_place, "measure", lambda device: machine)
        yield


def auto(**options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "optimizer_on": "auto", **options})


def place_of(strategy: SuperpipelineStrategy) -> str:
    """Where a run's optimizers have stepped."""
    return "gpu" if strategy.stats().step_upload_bytes else "cpu"


def adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def muon(parameters: Any) -> Optimizer:
    return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=1e-2)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("machine", "make", "overlap", "place"),
    [
        (SLOW_MEMORY, adamw, "backward", "gpu"),  # where gradients never reach the host
        (SLOW_LINKS, adamw, "backward", "cpu"),
        (SLOW_LINKS, muon, "auto", "cpu"),
        (SLOW_PROCESSOR, muon, "auto", "gpu"),
    ],
    ids=["slow memory", "slow links", "Muon", "Muon, slow processor"],
)
def test_the_faster_place_is_taken_and_said(machine: Machine, make: Any, overlap: str, place: str) -> None:
    strategy = auto(optimizer_overlap=overlap)
    with on(machine):
        ours = fit(lambda: Stepped(make), vectors(), strategy, recorded="losses")
    assert place_of(strategy) == place
    assert (
        f'Optimizers step on the {place.upper()} (optimizer_on="auto": estimated time of an update: '
        in strategy.remarks()[-1]
    )
    assert strategy.plan.steps_on_device is (place == "gpu")
    named = SuperpipelineStrategy(k=1, optimizer_on=place, optimizer_overlap=overlap)
    with simulated():
        assert_same(ours, fit(lambda: Stepped(make), vectors(), named, recorded="losses"))
    assert strategy.stats().peak_device_bytes == named.stats().peak_device_bytes


class Unknown(torch.optim.SGD):
    pass


class Whole(torch.optim.SGD):
    steps_each_parameter_alone = True


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("make", "options", "why"),
    [
        (lambda ps: Unknown(ps, lr=0.1), {}, "Unknown is not known to step each parameter by itself"),
        (lambda ps: Whole(ps, lr=0.1), {}, "what the state of Whole will be is not known"),
        (adamw, {"fused_optimizer": True}, "fused_optimizer=True is about steps there"),
        (adamw, {"gpu_memory": "40KiB"}, "the device has no room for two layers' state"),
    ],
    ids=["unknown", "of unknown state", "fused", "no room"],
)
def test_the_host_steps_where_the_device_cannot(make: Any, options: dict[str, Any], why: str) -> None:
    strategy = auto(**options)
    with on(SLOW_PROCESSOR):
        fit(lambda: Stepped(make), vectors(), strategy, recorded="losses")
    assert place_of(strategy) == "cpu"
    assert f'Optimizers step on the CPU (optimizer_on="auto": {why}' in strategy.remarks()[-1]


def of_eight_bits(parameters: Any) -> Optimizer:
    optim: Any = pytest.importorskip("bitsandbytes.optim")
    return optim.AdamW8bit(parameters, lr=1e-2)  # type: ignore[no-any-return]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("make", "overlap", "why"),
    [
        (muon, "backward", 'the CPU cannot update Muon with optimizer_overlap="backward"'),
        (of_eight_bits, "auto", "bitsandbytes' kernels are for devices"),
    ],
    ids=["in backward", "bitsandbytes"],
)
def test_the_device_steps_where_the_host_cannot(make: Any, overlap: str, why: str) -> None:
    strategy = auto(optimizer_overlap=overlap)
    with on(SLOW_LINKS):
        fit(lambda: Stepped(make), vectors(), strategy, recorded="losses")
    assert place_of(strategy) == "gpu"
    assert f'Optimizers step on the GPU (optimizer_on="auto": {why})' in strategy.remarks()[-1]


def test_what_no_place_can_do_is_refused() -> None:
    with (
        pytest.raises(ValueError, match=r"gradient_clip_val=1.0 needs all gradients before the first update"),
        on(SLOW_LINKS),
    ):
        fit(Stepped, vectors(), auto(optimizer_overlap="backward"), gradient_clip_val=1.0)


@pytest.mark.rest("takes tenths of a second")
def test_a_device_that_is_too_full_to_be_measured_does_not_step() -> None:
    def full(device: Any) -> Machine:
        raise torch.OutOfMemoryError

    found: list[str] = []

    class Asks(Stepped):
        def on_train_end(self) -> None:
            found.append(self.trainer.strategy._step_advice())

    strategy = auto()
    with pytest.MonkeyPatch.context() as patch, simulated():
        patch.setattr(step_place, "measure", full)
        fit(Asks, vectors(), strategy, recorded="losses")
    assert place_of(strategy) == "cpu"
    assert "or the device could not be measured" in strategy.remarks()[-1]
    assert found == [""]


def test_on_a_cpu_there_is_one_place() -> None:
    strategy = auto()
    fit(Stepped, vectors(), strategy, recorded="losses")
    assert place_of(strategy) == "cpu"
    assert strategy.remarks() == ['Optimizers step on the CPU (optimizer_on="auto": the model computes there, too).']


@pytest.mark.long("takes a second or more")
def test_the_place_of_a_run_does_not_change_when_its_model_does() -> None:
    """The bits differ; a second layout is stepped where the first one was."""

    class Exchanges(Stepped):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                machines.append(SLOW_LINKS)
                self.net.head = nn.Sequential(self.net.head)

    machines, asked = [SLOW_MEMORY], []

    def measured(device: Any) -> Machine:
        asked.append(machines[-1])
        return machines[-1]

    strategy = auto(optimizer_overlap="backward")
    with pytest.MonkeyPatch.context() as patch, simulated():
        patch.setattr(step_place, "measure", measured)
        fit(Exchanges, vectors(), strategy, recorded="nothing")
    assert asked == [SLOW_MEMORY]
    assert strategy.plan.steps_on_device


@pytest.mark.long("takes a second or more")
def test_a_run_says_that_the_other_place_is_faster() -> None:
    found: list[str] = []

    class Asks(Stepped):
        def on_train_end(self) -> None:
            found.append(self.trainer.strategy._step_advice())

    for where in ("cpu", "gpu"):
        for machine in (SLOW_MEMORY, SLOW_LINKS):
            with on(machine):
                strategy = SuperpipelineStrategy(k=1, optimizer_on=where, optimizer_overlap="backward")
                fit(Asks, vectors(), strategy, recorded="nothing")
    assert [re.findall(r'with (optimizer_on="\w+")', said) for said in found] == [
        ['optimizer_on="gpu"'],
        [],
        [],
        ['optimizer_on="cpu"'],
    ]


@pytest.mark.long("takes a second or more")
def test_a_machine_is_measured() -> None:
    machine = measure(SimDevice(torch.device("cpu")))
    assert 1e7 < machine.upload < 1e13
    assert 1e7 < machine.download < 1e13
    assert 1e7 < machine.host_memory < 1e13
    assert 1e6 < machine.flops < 1e16


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("options", "waited", "said"), [({}, 1.0, True), ({}, 0.1, False), ({"gradient_clip_val": 1.0}, 1.0, False)]
)
def test_a_run_that_waits_for_updates_is_told_of_backward_where_that_is_possible(
    options: dict[str, Any], waited: float, said: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On an H100 a step took 0.71 s in place of 0.89."""
    found: list[str] = []

    class Asks(Stepped):
        def on_train_end(self) -> None:
            found.append(self.trainer.strategy._step_advice())

    def stalled(device: Any, *why: Wait) -> float:
        return waited if Wait.FETCH_AFTER_UPDATE in why else 0.5 if Wait.USE_AFTER_FETCH in why else 0.0

    monkeypatch.setattr(SimDevice, "stall_seconds", stalled)
    with on(SLOW_LINKS):
        fit(Asks, vectors(), SuperpipelineStrategy(k=1, optimizer_overlap="forward"), recorded="nothing", **options)
        fit(Asks, vectors(), SuperpipelineStrategy(k=1, optimizer_overlap="backward"), recorded="nothing")
    sentence = 'Try optimizer_overlap="backward": updates then overlap with the backward pass, too (p.grad is None after a step).'
    assert found == [sentence if said else "", ""]


@pytest.mark.long("takes a second or more")
def test_without_the_folder_auto_means_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = registry.is_installed
    monkeypatch.setattr(
        registry, "is_installed", lambda folder: folder != "capabilities.gpu_steps" and installed(folder)
    )
    strategy = auto(gpu_layers="auto")
    with on(SLOW_PROCESSOR):
        ours = fit(Stepped, vectors(), strategy, recorded="losses")
        assert_same(ours, fit(Stepped, vectors(), SuperpipelineStrategy(k=1), recorded="losses"))
    missing = "sp_lightning/capabilities/gpu_steps is not installed"
    assert f'Optimizers step on the CPU (optimizer_on="auto": {missing}).' in strategy.remarks()
    assert f'No layer stays on the GPU (gpu_layers="auto"): {missing}.' in strategy.remarks()
    assert not strategy.plan.steps_on_device
