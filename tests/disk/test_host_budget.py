"""``host_memory=`` limits what a run takes of the host's memory, with a disk and without one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import host_budget
from sp_lightning.capabilities.disk.host_budget import LimitedMemory
from sp_lightning.core.plan.units import parse_bytes
from sp_lightning.trainer import host_memory
from sp_lightning.trainer.host_memory import check_host
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, superpipeline

GIB = 2**30


def with_cap(cap: int | str, monkeypatch: pytest.MonkeyPatch, taken: int = GIB, free: int = 64 * GIB) -> None:
    """Trains a small model under a cap in a process that has taken so much of a machine with so much free memory."""
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: taken)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: free)
    fit(lambda: Module(Stack()), vectors(), superpipeline(host_memory=cap))


@pytest.mark.long("takes a second or more")
def test_host_memory_without_a_disk_is_a_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without disk= it was an error, so one could not test a smaller machine."""
    with pytest.raises(MemoryError) as caught:
        with_cap(GIB + 96 * 2**20, monkeypatch)
    message = str(caught.value)
    assert message.startswith('host_memory="1120MiB" is too little: 1.1 GiB are needed (1.0 GiB taken already, ')
    assert "for a layer's copy" in message
    assert "disk=" not in message, "the process leaves a disk too little for its buffers"
    assert 'Trainer(precision="bf16-true")' in message
    assert "plan --lora 16" in message
    enough = re.search(r'host_memory="(\d+MiB)" is enough', message)
    assert enough is not None
    with_cap(parse_bytes("host_memory", enough[1]), monkeypatch)


@pytest.mark.long("takes a second or more")
def test_the_disk_is_a_remedy_where_it_is_enough(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: GIB)
    wide = lambda: Module(nn.Sequential(*(nn.Linear(512, 512) for _ in range(24))))  # noqa: E731
    batches = [torch.randn(1, 512)]
    given = f"{GIB // 2**20 + 96 + 60}MiB"
    with pytest.raises(MemoryError, match="is too little") as caught:
        fit(wide, batches, SuperpipelineStrategy(host_memory=given))
    remedy = re.search(r"(SuperpipelineStrategy\(disk=.*?\))\.", str(caught.value))
    assert remedy is not None, str(caught.value)
    fit(wide, batches, eval(remedy[1].replace("/scratch", str(tmp_path))))


@pytest.mark.rest("takes tenths of a second")
def test_state_and_gradients_count_within_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        MemoryError, match=r"too little: .*taken already, .* for gradients, .* for the optimizer's state"
    ):
        with_cap(GIB + 96 * 2**20 + 9000, monkeypatch)


@pytest.mark.long("takes a second or more")
def test_a_share_of_the_free_memory_is_a_cap_too(monkeypatch: pytest.MonkeyPatch) -> None:
    with_cap("50%", monkeypatch, free=2**20)
    with pytest.raises(MemoryError, match=r"host_memory=\"50%\" of the free memory is too little: .* it leaves 500 B"):
        with_cap("50%", monkeypatch, free=1000)


@pytest.mark.rest("takes tenths of a second")
def test_a_cap_above_the_memory_of_the_machine_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(MemoryError, match=r"1000 B can be had \(the system's free memory"):
        with_cap(4 * GIB, monkeypatch, free=1000)


def test_activations_get_what_the_cap_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: GIB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 64 * GIB)
    budget = LimitedMemory(3 * GIB + 96 * 2**20)
    assert check_host({"gradients": GIB}, "Use less.", budget) == GIB * 7 // 8
    budget.count_others(lambda own, _: [own, GIB])
    assert check_host({"gradients": GIB}, "Use less.", budget) == 0


@pytest.mark.parametrize("disk", [False, True])
def test_plan_and_run_leave_the_same_beside_the_processes(disk: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: host_budget._LIBRARIES)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    for cap in (GIB, 64 * GIB):
        assert host_budget.room_for(cap, disk=disk) == cap - host_budget.kept_for_processes(cap, 1, disk=disk)
