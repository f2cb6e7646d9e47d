"""Nodes over a network of their own: each is a network namespace of Linux, with an address that the other one reaches by a cable.

It needs the rights of root, so it is skipped where they are missing.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import pytest
import torch

from sp_lightning.ranks.agreement import VARIABLE, choose_interface, interface_to
from tests.support.ranks import LAUNCHERS, free_port

ROOT = Path(__file__).parents[2]
NAMES = [f"sp{os.getpid()}n{node}" for node in range(2)]
ADDRESS = "10.77.0.1"

SCRIPT = """
import sys, time
from datetime import timedelta
from pathlib import Path
import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import sp_lightning
from sp_lightning.ranks import collectives

collectives.TIMEOUT = timedelta(seconds=8)

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))

    def training_step(self, batch, index):
        if index == 2:
            Path(f"begun{self.global_rank}").touch()
            time.sleep(float(sys.argv[1]))
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

if __name__ == "__main__":
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(
        strategy="superpipeline", accelerator="cpu", devices=2, num_nodes=2, max_epochs=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    data = TensorDataset(torch.randn(64, 64, generator=torch.Generator().manual_seed(0)))
    module = Net()
    trainer.fit(module, DataLoader(data, batch_size=4, shuffle=False))
    torch.save(module.state_dict(), f"weights{trainer.global_rank}")
"""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def network() -> Iterator[None]:
    """Two namespaces, and a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces need ip and root")
    cables = [f"{name}v"[-15:] for name in NAMES]
    try:
        try:
            for name in NAMES:
                ip("netns", "add", name)
            ip("link", "add", cables[0], "type", "veth", "peer", "name", cables[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"no network namespaces here: {error.stderr!r}")
        for node, (name, cable) in enumerate(zip(NAMES, cables, strict=True)):
            ip("link", "set", cable, "netns", name)
            ip("-n", name, "addr", "add", f"10.77.0.{node + 1}/24", "dev", cable)
            for device in ("lo", cable):
                ip("-n", name, "link", "set", device, "up")
        yield
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def started(folder: Path, pause: float = 0.0, **environment: str) -> list[subprocess.Popen[str]]:
    (folder / "script.py").write_text(SCRIPT)
    inherited = {name: value for name, value in os.environ.items() if name not in (*LAUNCHERS, VARIABLE)}
    common = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MASTER_ADDR": ADDRESS, "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-W", "ignore", "script.py", str(pause)], text=True, cwd=folder,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            env={**inherited, **common, "NODE_RANK": str(node), **environment},
        )
        for node, name in enumerate(NAMES)
    ]  # fmt: skip


def ended(processes: list[subprocess.Popen[str]]) -> list[str]:
    """What each node has printed, and its exit status in a line at the end."""
    try:
        return [f"{each.communicate(timeout=150)[0]}\nexit {each.returncode}" for each in processes]
    finally:
        end(processes)


def end(processes: list[subprocess.Popen[str]]) -> None:
    """With the processes that Lightning has started for further devices."""
    for each in processes:
        with suppress(ProcessLookupError):
            os.killpg(each.pid, signal.SIGKILL)


@pytest.mark.long("it needs root, and imports torch four times")
def test_nodes_meet_by_their_addresses_and_train_to_the_same_weights(network: None, tmp_path: Path) -> None:
    """The machine's own name stands for 127.0.0.1 or the like in both of them."""
    printed = ended(started(tmp_path))
    assert all(each.endswith("exit 0") for each in printed), "\n".join(printed)
    weights = [torch.load(tmp_path / f"weights{rank}") for rank in range(4)]
    for name, value in weights[0].items():
        assert all(torch.equal(value, other[name]) for other in weights)


@pytest.mark.long("it needs root, and imports torch four times")
def test_an_interface_that_the_others_do_not_reach_ends_the_run(network: None, tmp_path: Path) -> None:
    """Whoever connects first says so. torch's process group waits for half an hour on the others, which are ended here."""
    processes = started(tmp_path, **{VARIABLE: "lo"})
    deadline = monotonic() + 100
    while all(each.poll() is None for each in processes) and monotonic() < deadline:
        sleep(0.1)
    end(processes)
    printed = ended(processes)
    assert any("Gloo connectFullMesh failed" in each for each in printed), "\n".join(printed)


@pytest.mark.long("it needs root, and imports torch four times")
def test_a_cable_that_is_pulled_ends_both_nodes(network: None, tmp_path: Path) -> None:
    """Nothing breaks by it: no packet comes, and none says so."""
    processes = started(tmp_path, pause=3.0)
    deadline = monotonic() + 100
    while len(list(tmp_path.glob("begun*"))) < 4:
        assert monotonic() < deadline
        assert all(each.poll() is None for each in processes), ended(processes)
        sleep(0.05)
    ip("-n", NAMES[1], "link", "set", f"{NAMES[1]}v"[-15:], "down")
    began = monotonic()
    printed = ended(processes)
    assert monotonic() - began < 60
    assert not list(tmp_path.glob("weights*"))
    for each in printed:
        assert "RankError" in each, each
        assert not each.endswith("exit 0")


# ---------------------------------------------------------------------- the interface


def test_an_interface_is_found_by_its_address() -> None:
    assert interface_to("127.0.0.1") is None, "no other node is there"
    assert interface_to("no.such.name.invalid") is None
    addresses = subprocess.run(["ip", "-4", "-o", "addr"], capture_output=True, text=True, check=False).stdout
    for name, address in re.findall(r"^\d+: (\S+)\s+inet ([\d.]+)/", addresses, re.MULTILINE):
        assert interface_to(address) == (None if address.startswith("127.") else name)


def test_the_users_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sp_lightning.ranks.agreement.interface_to", lambda address: f"to-{address}")
    monkeypatch.setenv(VARIABLE, "mine")
    choose_interface("10.0.0.1")
    assert os.environ[VARIABLE] == "mine"
    monkeypatch.delenv(VARIABLE)
    choose_interface("10.0.0.1")
    assert os.environ[VARIABLE] == "to-10.0.0.1"
