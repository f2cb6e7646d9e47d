"""How the processes of several devices are started, as users start them: each test starts a process of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep
from typing import Any

import pytest
import torch

from tests.support.ranks import LAUNCHERS
from tests.support.tiers import some

ROOT = Path(__file__).parents[2]

SCRIPT = """
import os, sys
import {package} as pl
import torch
from {package}.callbacks import ModelCheckpoint, TQDMProgressBar
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import {ours}

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch, index):
        once = os.environ.get("FAILS_ONCE") == str(self.global_rank) and self.global_step == 4
        if str(self.global_rank) == os.environ.get("FAILS") or once and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            raise ValueError("what the user's code says")
        if self.global_step == 1:
            open(f"step{{os.getpid()}}", "w").close()
        loss = self.layers(batch[0]).square().mean()
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

print(f"process {{os.getpid()}} has begun")
pl.seed_everything(1, verbose=False)
epochs, file = int(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None
trainer = pl.Trainer(
    strategy="superpipeline", accelerator="cpu", devices=2, max_epochs=epochs, logger=False,
    callbacks=[ModelCheckpoint("saved", save_last=True, every_n_epochs=1), TQDMProgressBar()],
)
data = TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
trainer.fit(Net(), DataLoader(data, batch_size=4), ckpt_path=file)
print(f"rank {{trainer.global_rank}} of {{trainer.world_size}} is process {{os.getpid()}} at step {{trainer.global_step}}")
"""
"""Each rank has four steps in an epoch."""


def write_script(folder: Path, package: str = "lightning.pytorch") -> None:
    ours = "sp_lightning" if package == "lightning.pytorch" else "sp_lightning.pytorch_lightning"
    (folder / "script.py").write_text(SCRIPT.format(package=package, ours=ours))


def run(folder: Path, *command: str, **environment: str) -> tuple[int, str]:
    """Returns the exit status and everything that was printed."""
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    ran = subprocess.run(
        [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
        timeout=300, check=False, env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    return ran.returncode, ran.stdout


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


def ended(printed: str) -> dict[int, int]:
    """The processes that have come to the script's end, by rank."""
    found = re.findall(r"rank (\d) of 2 is process (\d+) at step", printed)
    return {int(rank): int(process) for rank, process in found}


def assert_said_once(printed: str) -> None:
    """Rank 0 alone speaks: one line of the log, one bar, one end."""
    assert printed.count("Superpipeline: 4 layers") == 1
    assert printed.count("`Trainer.fit` stopped") == 1
    assert len(re.findall(r"\| 0/\? \[00:00", printed)) in (1, 2)  # tqdm shows a bar when it is made and when it begins
    assert "[rank: 1]" not in printed


def assert_gone(processes: Iterable[int]) -> None:
    """Within the seconds that the others may take to end."""
    processes, deadline = set(processes), monotonic() + 10
    assert len(processes) == 2
    while left := {each for each in processes if Path(f"/proc/{each}").exists()}:
        assert monotonic() < deadline, left
        sleep(0.1)


def assert_files_are_one_runs(folder: Path, steps: int) -> dict[str, Any]:
    """One rank has written, and nothing is half written."""
    names = sorted(path.name for path in (folder / "saved").iterdir())
    assert names == [f"epoch={steps // 4 - 1}-step={steps}.ckpt", "last.ckpt"]
    file: dict[str, Any] = torch.load(folder / "saved" / "last.ckpt", weights_only=True)
    assert file["global_step"] == steps
    assert len(file["optimizer_states"][0]["state"]) == 8  # rank 0 has the state of all parameters
    return file


@pytest.mark.long("processes that import torch, twice; the next test starts a script in the second tier")
@pytest.mark.parametrize("package", ["lightning.pytorch", "pytorch_lightning"])
def test_a_script_starts_its_own_processes(package: str, tmp_path: Path) -> None:
    """As Lightning does it: the script runs again for each further device. A file of two ranks resumes on two."""
    write_script(tmp_path, package)
    status, printed = run(tmp_path, "script.py", "1")
    assert status == 0, printed
    processes = ended(printed)
    assert sorted(processes) == [0, 1]
    assert processes[0] != processes[1]
    assert_gone(processes.values())
    assert_said_once(printed)
    first = assert_files_are_one_runs(tmp_path, 4)

    status, printed = run(tmp_path, "script.py", "2", "saved/last.ckpt")
    assert status == 0, printed
    assert printed.count("Restored all states") == 1
    assert printed.count("at step 8") == 2
    second = assert_files_are_one_runs(tmp_path, 8)
    assert any(not torch.equal(value, second["state_dict"][name]) for name, value in first["state_dict"].items())


@pytest.mark.long("processes that import torch, twice; the second tier has those that Lightning starts")
def test_torchrun_starts_the_processes(tmp_path: Path) -> None:
    """With the bits of the script that starts them itself."""
    write_script(tmp_path)
    states = []
    for command in ((), TORCHRUN):
        status, printed = run(tmp_path, *command, "script.py", "1")
        assert status == 0, printed
        assert sorted(ended(printed)) == [0, 1]
        assert_said_once(printed)
        states.append(assert_files_are_one_runs(tmp_path, 4)["state_dict"])
        shutil.rmtree(tmp_path / "saved")
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.long("processes that import torch; test_ranks_faults has errors")
@pytest.mark.parametrize(
    "command",
    [
        pytest.param((), id="script"),
        pytest.param(TORCHRUN, id="torchrun", marks=pytest.mark.long("torchrun ends its processes by itself")),
    ],
)
@pytest.mark.parametrize("who", some([0, 1], 1, why="test_ranks_faults has both"))
def test_an_error_ends_all_processes(who: int, command: tuple[str, ...], tmp_path: Path) -> None:
    """The exit status says so, and the log has the error of the rank that it happened on. In the first batch a
    rank waits for the others to share memory for gradients; its backward, which fails, once raised another error in passing.
    """
    write_script(tmp_path)
    status, printed = run(tmp_path, *command, "script.py", "1", FAILS=str(who))
    assert status == 1
    assert f"[rank{who}]: ValueError: what the user's code says" in printed
    if not command:  # torchrun may end the other process before it has said why it stops
        assert f"rank {who} has failed while rank {1 - who} waited" in printed
    assert "Exception ignored" not in printed
    assert not ended(printed)
    assert_gone(map(int, re.findall(r"process (\d+) has begun", printed)))


@pytest.mark.long("processes that import torch, three times")
def test_torchrun_starts_anew_from_the_last_checkpoint(tmp_path: Path) -> None:
    """``--max-restarts``: after an error of one rank, new processes resume, with the weights of a run without the error."""
    states = []
    for name, command, environment in (
        ("plain", (), {}),
        ("again", (*TORCHRUN, "--max-restarts", "1"), {"FAILS_ONCE": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
    ):
        (tmp_path / name).mkdir()
        write_script(tmp_path / name)
        status, printed = run(tmp_path / name, *command, "script.py", "2", "last", **environment)
        assert status == 0, printed
        assert printed.count("at step 8") == 2
        assert printed.count("Restored all states") == bool(environment)
        assert ("ValueError: what the user's code says" in printed) == bool(environment)
        states.append(assert_files_are_one_runs(tmp_path / name, 8)["state_dict"])
    assert all(torch.equal(value, states[1][name]) for name, value in states[0].items())


@pytest.mark.long("processes that import torch")
def test_a_restart_with_the_old_store_is_refused(tmp_path: Path) -> None:
    """gloo read the addresses of processes that had ended, and waited for half an hour."""
    write_script(tmp_path)
    status, printed = run(tmp_path, *TORCHRUN, "--max-restarts", "1", "script.py", "2", "last", FAILS_ONCE="1")
    assert status == 1
    assert "Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun" in printed


@pytest.mark.long("processes that import torch")
def test_torchrun_ends_by_sigterm(tmp_path: Path) -> None:
    """As a cluster ends a job."""
    write_script(tmp_path)
    command = [sys.executable, *TORCHRUN, "script.py", "100000"]
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    with (tmp_path / "printed").open("w") as printed:
        agent = subprocess.Popen(
            command, stdout=printed, stderr=subprocess.STDOUT, cwd=tmp_path,
            env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        deadline = monotonic() + 200
        while len(list(tmp_path.glob("step*"))) < 2:
            assert monotonic() < deadline
            assert agent.poll() is None, (tmp_path / "printed").read_text()
            sleep(0.1)
        began = monotonic()
        agent.terminate()
        assert agent.wait(60) != 0
    assert monotonic() - began < 25, "torchrun kills processes that have not ended after 30 seconds"
    assert_gone(int(each.name.removeprefix("step")) for each in tmp_path.glob("step*"))
