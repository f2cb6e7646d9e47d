"""How the processes of several nodes are started, as users start them. Each call of a launcher here stands for a node."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from tests.support.ranks import LAUNCHERS, free_port
from tests.support.tiers import some

ROOT = Path(__file__).parents[2]
NODES = 2

SCRIPT = """
import os
import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
import sp_lightning

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))

    def training_step(self, batch, index):
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)

pl.seed_everything(1, verbose=False)
trainer = pl.Trainer(
    strategy="superpipeline", accelerator="cpu", devices={devices}, num_nodes={nodes}, max_epochs=1, logger=False,
    callbacks=[ModelCheckpoint("saved", save_last=True, every_n_epochs=1)], enable_progress_bar=False,
)
data = TensorDataset(torch.randn(32, 16, generator=torch.Generator().manual_seed(0)))
trainer.fit(Net(), DataLoader(data, batch_size=4))
where = trainer.strategy.node_rank, trainer.local_rank
print(f"rank {{trainer.global_rank}} of {{trainer.world_size}} is {{where}} at step {{trainer.global_step}}")
"""

Node = tuple[Sequence[str], dict[str, str]]
"""A command, and what is in the environment."""


def run(folder: Path, commands: Sequence[Node], devices: int) -> list[str]:
    """Runs a command on each node. Returns what each has printed, and its exit status in a line at the end."""
    (folder / "script.py").write_text(SCRIPT.format(devices=devices, nodes=NODES))
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHERS}
    started = [
        subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder,
            env={**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        )
        for command, environment in commands
    ]  # fmt: skip
    try:
        return [f"{each.communicate(timeout=200)[0]}\nexit {each.returncode}" for each in started]
    finally:
        for each in started:
            each.kill()


def by_lightning(devices: int) -> list[Node]:
    """The script is started on each node; Lightning starts it again for each further device."""
    meets = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [(["script.py"], {**meets, "NODE_RANK": str(node)}) for node in range(NODES)]


def by_torchrun(devices: int) -> list[Node]:
    """torchrun is started on each node."""
    where = ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    size = ["--nnodes", str(NODES), "--nproc-per-node", str(devices)]
    command = ["-m", "torch.distributed.run", *size, *where, "--node-rank"]
    return [([*command, str(node), "script.py"], {}) for node in range(NODES)]


def by_slurm(devices: int, places: Sequence[tuple[int, int]] | None = None) -> list[Node]:
    """srun starts every process, each with variables that say where it is."""
    common = {
        "SLURM_NTASKS": str(NODES * devices), "SLURM_NTASKS_PER_NODE": str(devices), "SLURM_NNODES": str(NODES),
        "SLURM_JOB_NAME": "test", "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": str(free_port()),
    }  # fmt: skip
    places = places or [(node, local) for node in range(NODES) for local in range(devices)]
    return [
        (["script.py"], {**common, "SLURM_PROCID": f"{rank}", "SLURM_NODEID": f"{node}", "SLURM_LOCALID": f"{local}"})
        for rank, (node, local) in enumerate(places)
    ]


WAYS: dict[str, Callable[[int], list[Node]]] = {each.__name__: each for each in (by_lightning, by_torchrun, by_slurm)}
WHY = "processes that import torch; the equality of nodes is tested without a launcher"


@pytest.mark.long("processes that import torch; test_ranks_launch has one node")
@pytest.mark.parametrize("devices", some([2, 1], 2, why=WHY))
@pytest.mark.parametrize("way", some(WAYS, "by_lightning", why=WHY))
def test_nodes_are_started(way: str, devices: int, tmp_path: Path) -> None:
    """Every process knows its place; one of them speaks and writes the file."""
    printed = run(tmp_path, WAYS[way](devices), devices)
    assert all(each.endswith("exit 0") for each in printed), "\n".join(printed)
    world, together = NODES * devices, "".join(printed)
    found = re.findall(r"rank (\d) of (\d) is \((\d), (\d)\) at step (\d)", together)
    expected = [(rank, world, rank // devices, rank % devices, 8 // world) for rank in range(world)]
    assert sorted(found) == [tuple(map(str, each)) for each in expected]
    assert together.count("Superpipeline: 4 layers") == 1
    file = torch.load(tmp_path / "saved" / "last.ckpt", weights_only=True)
    assert len(file["optimizer_states"][0]["state"]) == 8


@pytest.mark.long(WHY)
def test_processes_that_are_not_numbered_node_by_node_are_refused(tmp_path: Path) -> None:
    """As srun numbers them with ``--distribution=cyclic``."""
    printed = run(tmp_path, by_slurm(2, [(0, 0), (1, 0), (0, 1), (1, 1)]), 2)
    for each in printed:
        assert "rank 1 is number 0 on node 1" in each, each
        assert "--distribution=block" in each
        assert each.endswith("exit 1")
