"""Host memory that can be had: the machine's, and what control groups leave of it; refused before any work."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path
from unittest import mock

import pytest

from sp_lightning.core.device.host_memory import free_garbage
from sp_lightning.trainer import host_memory
from sp_lightning.trainer.host_memory import available_bytes, check_host, resident_bytes
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit, superpipeline

GIB = 2**30


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal: 99 kB\nMemAvailable: 16777216 kB\nSwapFree: 4194304 kB\n")
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


V2 = {"sys/fs/cgroup/a/b/memory.max": "max", "sys/fs/cgroup/a/b/memory.current": "1"}


@pytest.mark.parametrize(
    ("groups", "files", "gib"),
    [
        ("", {}, 20),
        ("0::/a/b", V2, 20),
        ("0::/a/b", {**V2, "sys/fs/cgroup/a/memory.max": str(8 * GIB), "sys/fs/cgroup/a/memory.current": str(3 * GIB)}, 5),
        (
            "0::/a/b",
            {
                "sys/fs/cgroup/a/b/memory.max": str(8 * GIB), "sys/fs/cgroup/a/b/memory.current": str(6 * GIB),
                "sys/fs/cgroup/a/b/memory.stat": f"anon 7\ninactive_file {GIB}\n",
            },
            3,
        ),
        ("0::/elsewhere", {"sys/fs/cgroup/memory.max": str(2 * GIB), "sys/fs/cgroup/memory.current": "0"}, 2),
        (
            "7:cpu:/x\n4:memory:/x",
            {
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(7 * GIB),
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(6 * GIB),
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2**63 - 4096),
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "0",
            },
            1,
        ),
        ("0::/a", {"sys/fs/cgroup/a/memory.max": str(GIB), "sys/fs/cgroup/a/memory.current": str(2 * GIB)}, 0),
        (
            "4:memory,cpu:/x\nnonsense\n",
            {
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": str(7 * GIB),
                "sys/fs/cgroup/memory/x/memory.usage_in_bytes": str(6 * GIB),
                "sys/fs/cgroup/memory/x/memory.stat": f"inactive_file {GIB}\ntotal_inactive_file {2 * GIB}\nodd\n",
            },
            3,
        ),
    ],
    ids=["no group", "no limit", "of the group above", "cache", "in a container", "v1", "over the limit", "oddities"],
)  # fmt: skip
def test_what_can_be_had(groups: str, files: dict[str, str], gib: int, tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, groups, files)) == gib * GIB


def test_where_the_system_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 99 kB\n")
    assert available_bytes(tmp_path) is None


@pytest.mark.parametrize(("free", "spare"), [(1000, 700), (200, 0), (None, None)])
def test_an_eighth_of_what_is_not_needed_is_left_to_others(free: int | None, spare: int | None) -> None:
    with mock.patch("sp_lightning.trainer.host_memory.available_bytes", return_value=free):
        assert check_host({"gradients": 150, "the optimizer's state": 50}, "Use less.") == spare


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("free", "message"),
    [
        (1000, r"more of CPU memory are needed \(.* for a layer's copy\), and 1000 B can be had"),
        (
            9000,
            r"more of CPU memory are needed \(.* for gradients, .* for the optimizer's state\), and 8\.8 KiB can be had",
        ),
    ],
)
def test_a_run_that_would_be_killed_is_refused_before_it_begins(free: int, message: str) -> None:
    module = Module(Stack())
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with (
        mock.patch("sp_lightning.trainer.host_memory.available_bytes", return_value=free),
        pytest.raises(MemoryError, match=message + r".*Use less: Trainer\(precision=\"bf16-true\"\)"),
    ):
        fit(lambda: module, vectors(), superpipeline())
    assert all(value.equal(before[name]) for name, value in module.state_dict().items()), "nothing is lost"


@pytest.mark.long("a process that imports torch")
def test_a_real_control_group_is_heeded() -> None:
    """A process of its own in a group of 1 GiB, where the system lets us make one."""
    group = Path(f"/sys/fs/cgroup/memory/superpipeline-{os.getpid()}")
    code = "from sp_lightning.trainer.host_memory import available_bytes; print(available_bytes())"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(f"{2**30}")
    except OSError:
        pytest.skip("no control group of memory (version 1) can be made here")
    try:
        join = f"echo $$ > {group}/cgroup.procs && exec {sys.executable} -c '{code}'"
        root = str(Path(__file__).parents[2])
        ran = subprocess.run(["sh", "-c", join], capture_output=True, text=True, check=True, cwd=root)
    finally:
        group.rmdir()
    assert 2**28 < int(ran.stdout) < 2**30 - 2**26, "what the process has taken does not count"


MAPPINGS = """\
55d0-55d1 r--p 00000000 08:01 77 /lib/libtorch_cpu.so.2
Rss: 300 kB
Shared_Clean: 0 kB
Private_Clean: 300 kB
7f00-7f10 rw-p 00000000 00:00 0
Rss: 400 kB
Private_Clean: 0 kB
Private_Dirty: 400 kB
7f20-7f40 rw-p 00000000 08:01 99 /runs/last one.ckpt
Rss: 250 kB
Shared_Clean: 50 kB
Private_Clean: 100 kB
Private_Dirty: 100 kB
Anonymous: 50 kB
VmFlags: rd wr
7f40-7f48 rw-s 00000000 08:01 98 /scratch/#98 (deleted)
Rss: 90 kB
Shared_Clean: 0 kB
Private_Clean: 40 kB
Private_Dirty: 50 kB
Anonymous: 0 kB
7f50-7f60 rw-p 00000000 00:00 0 [heap]
Rss: 50 kB
Private_Clean: 20 kB
"""


@pytest.mark.rest("takes tenths of a second")
def test_pages_of_data_that_only_a_file_has_are_not_taken(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/status").write_text("Name: python\nVmRSS:\t1000 kB\n")
    assert resident_bytes(tmp_path) == 1000 * 1024
    (tmp_path / "proc/self/smaps").write_text(MAPPINGS)
    assert resident_bytes(tmp_path) == (1000 - 200 - 40) * 1024
    assert 2**24 < resident_bytes() < 2**40


class Over:
    """A run that is over, which nothing but a cycle of references holds, as a Trainer and its loops are."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.rest("takes tenths of a second")
def test_what_only_cycles_hold_is_freed_before_memory_is_measured() -> None:
    run = Over()
    there = weakref.ref(run)
    del run
    free_garbage()
    assert there() is None


@pytest.mark.long("takes a second or more")
def test_a_run_that_is_over_does_not_have_the_next_one_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Over()
    there = weakref.ref(run)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: GIB if there() is not None else 2 * GIB)
    del run
    check_host({"for weights": 2 * GIB}, "Use less.")
    with pytest.raises(MemoryError, match=r"3\.0 GiB more .* and 2\.0 GiB can be had"):
        check_host({"for weights": 3 * GIB}, "Use less.")


@pytest.mark.long("processes that train twice")
def test_two_runs_of_one_process_have_the_memory_of_one(tmp_path: Path) -> None:
    """The first one's model is garbage when the second one begins, and may not count as the process's."""
    script = (
        "import torch, sys\n"
        "from sp_lightning import SuperpipelineStrategy\n"
        "from sp_lightning.trainer.host_memory import resident_bytes\n"
        "from tests.support.models import Module\n"
        "from tests.support.runs import loader, trainer_for\n"
        "def run(memory):\n"
        "    module = Module(torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(24))))\n"
        "    strategy = SuperpipelineStrategy(disk=sys.argv[1], host_memory=memory, optimizer_overlap='off')\n"
        "    trainer_for(strategy).fit(module, loader([torch.ones(1, 1024)] * 2))\n"
        "run(limit := resident_bytes() + 520 * 2**20)\n"
        "run(limit)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-1500:]
