"""Checkpoint files: whole or not there, without a second copy in host memory, read with care."""

from __future__ import annotations

import errno
import io
import multiprocessing
import os
import pickle
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn

from sp_lightning.trainer import part_files
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from tests.support.models import Module, Stack, vectors
from tests.support.runs import assert_equal, assert_same, fit, loader, superpipeline, trainer_for

CONTENT = {"state_dict": {"weight": torch.arange(2**18, dtype=torch.float32)}, "note": "kept"}


def make() -> Module:
    return Module(Stack())


def each_step(folder: Path) -> dict[str, Any]:
    """Options of a trainer that writes ``last.ckpt`` after each step."""
    saver = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=1)
    return {"callbacks": [saver], "enable_checkpointing": True}


# ---------------------------------------------------------------------- whole or not there


def by_quota(folder: Path) -> Iterator[Callable[[int], Any]]:
    """No file may become larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda nbytes: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def by_disk(folder: Path) -> Iterator[Callable[[int], Any]]:
    """A small file system of its own is full."""
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "none", folder], capture_output=True).returncode:
        pytest.skip("only root can mount")
    yield lambda nbytes: (folder / "filler").write_bytes(b"x" * (shutil.disk_usage(folder).free - nbytes))
    subprocess.run(["umount", folder], check=True)


@pytest.fixture(params=[by_quota, by_disk])
def room(request: Any, tmp_path: Path) -> Iterator[Callable[[int], Any]]:
    """Call it with the bytes that still go into a file in ``tmp_path``."""
    yield from request.param(tmp_path)


def test_a_full_disk_leaves_the_previous_file(room: Any, tmp_path: Path) -> None:
    last = tmp_path / "last.ckpt"

    class FillsUp(Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                room(last.stat().st_size // 2)

    options = each_step(tmp_path)
    options["callbacks"].insert(0, FillsUp())
    with pytest.raises(OSError, match=r"could not be written: .*; the previous one of this name is as it was") as told:
        fit(make, vectors(5), superpipeline(), **options)
    assert told.value.errno in (errno.ENOSPC, errno.EFBIG)
    assert told.value.filename == str(last)
    assert {each.name for each in tmp_path.iterdir()} <= {"last.ckpt", "filler"}
    assert_equal(torch.load(last)["state_dict"], fit(make, vectors(2)).state, "the second step's file")


def test_the_first_file_of_a_name_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(*_: Any) -> Any:
        raise OSError(errno.ENOSPC, "No space left on device")

    content = {"state_dict": CONTENT["state_dict"], "raises": type("Raises", (), {"__reduce__": fails})()}
    with pytest.raises(OSError, match="could not be written: No space") as told:
        AtomicCheckpointIO().save_checkpoint(content, tmp_path / "new.ckpt")
    assert "previous" not in str(told.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, pickle.PicklingError])
def test_whatever_stops_the_writer_is_what_is_raised(error: type[BaseException], tmp_path: Path) -> None:
    """torch tells of a file with another length than it should have; a checkpoint may be taken while another error is handled."""
    io_, file = AtomicCheckpointIO(), tmp_path / "one.ckpt"
    io_.save_checkpoint(CONTENT, file)
    before = file.read_bytes()

    class Stream(io.FileIO):
        def write(self, data: Any) -> int:
            if len(data) > 2**16:
                raise error("while it is written")
            return super().write(data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "open", lambda path, mode="r": Stream(path, mode))
        try:
            raise OSError(errno.EIO, "something that is handled")
        except OSError:
            with pytest.raises(error, match="while it is written"):
                io_.save_checkpoint({**CONTENT, "note": "new"}, file)
    assert [each.name for each in tmp_path.iterdir()] == ["one.ckpt"]
    assert file.read_bytes() == before


def _dies_while_writing(file: Path) -> None:
    os.fsync = lambda descriptor: os._exit(9)  # type: ignore[assignment]
    AtomicCheckpointIO().save_checkpoint({**CONTENT, "note": "new"}, file)


def test_a_process_that_dies_while_it_writes_leaves_the_previous_file(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, file)
    process = multiprocessing.get_context("fork").Process(target=_dies_while_writing, args=(file,))
    process.start()
    process.join()
    assert process.exitcode == 9
    assert len(list(tmp_path.glob(".*.part"))) == 1
    assert AtomicCheckpointIO().load_checkpoint(file)["note"] == "kept"
    AtomicCheckpointIO().save_checkpoint({**CONTENT, "note": "new"}, file)
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]
    assert AtomicCheckpointIO().load_checkpoint(file)["note"] == "new"


def test_a_file_that_is_mapped_may_be_exchanged(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, file)
    mapped = AtomicCheckpointIO().load_checkpoint(file)["state_dict"]["weight"]
    AtomicCheckpointIO().save_checkpoint({"state_dict": {"weight": torch.zeros(2**18)}}, file)
    assert torch.equal(mapped, CONTENT["state_dict"]["weight"])  # type: ignore[index]


class Keeps(Callback):
    """Gets a tensor of its own from a checkpoint."""

    kept = torch.ones(2**16)

    def state_dict(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"]


class Own(nn.Linear):
    """Keeps a weight that it is given."""

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        self.kept = state[f"{prefix}weight"]
        super()._load_from_state_dict(state, prefix, *args)


class Keeping(nn.Module):
    """Has something beside weights in the state, and keeps what it is given."""

    kept = torch.ones(2**16)

    def get_extra_state(self) -> Any:
        return {"kept": self.kept}

    def set_extra_state(self, state: Any) -> None:
        self.kept = state["kept"]


class With(Module):
    """Holds a layer more, and may remember all that it was given."""

    def __init__(self, kind: Any, remembers: bool) -> None:
        super().__init__(Stack())
        self.own, self.remembers = kind(), remembers
        self.register_buffer("seen", torch.ones(2**16))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.remembers:
            self.remembered = checkpoint["state_dict"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["written in place", "cut off"])
@pytest.mark.parametrize(
    ("kind", "remembers"),
    [(nn.Identity, False), (nn.Identity, True), (Keeping, False), (partial(Own, 256, 256), False)],
)
def test_what_is_restored_does_not_stay_in_the_file(kind: Any, remembers: bool, how: str, tmp_path: Path) -> None:
    """Others may write into a file in place; a run that came from it must not notice."""
    file, trains = tmp_path / "one.ckpt", lambda: With(kind, remembers)

    class Changes(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            maps = Path("/proc/self/maps")
            assert remembers or not maps.exists() or str(file) not in maps.read_text()
            if how == "cut off" and not remembers:
                os.truncate(file, 0)
                return
            with file.open("r+b") as stream:  # the same inode
                stream.write(b"\xff" * file.stat().st_size)

    first = fit(trains, vectors(2), superpipeline(), callbacks=[Keeps()])
    first.trainer.save_checkpoint(file)
    copied = Path(shutil.copy(file, tmp_path / "copy"))
    plain = fit(trains, vectors(3), callbacks=[Keeps()], max_epochs=2, ckpt_path=copied)
    callbacks = [Keeps(), Changes()]
    ours = fit(trains, vectors(3), superpipeline(), callbacks=callbacks, max_epochs=2, ckpt_path=file)
    assert_same(ours, plain)
    assert callbacks[0].kept.eq(1).all()
    assert_equal(getattr(ours.module.own, "kept", 0), getattr(plain.module.own, "kept", 0), "kept")
    if remembers:
        assert_equal(ours.module.remembered, first.state, "what the module remembers")


def _saves_often(file: Path, number: int) -> None:
    for _ in range(20):
        AtomicCheckpointIO().save_checkpoint({"numbers": torch.full((10_000 * (number + 1),), number)}, file)


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_two_writers_of_one_file_leave_one_of_theirs(tmp_path: Path) -> None:
    file = tmp_path / "last.ckpt"
    _saves_often(file, 0)
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_saves_often, args=(file, number)) for number in (1, 2)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        found = AtomicCheckpointIO().load_checkpoint(file)["numbers"]
        assert len(found) == 10_000 * (int(found[0]) + 1)
        assert found.eq(found[0]).all()
    assert [each.exitcode for each in writers] == [0, 0]
    assert [each.name for each in tmp_path.iterdir()] == ["last.ckpt"]


def test_the_callers_plugins_are_kept() -> None:
    mine = TorchCheckpointIO()
    assert superpipeline(checkpoint_io=mine).checkpoint_io is mine
    assert type(superpipeline().checkpoint_io) is AtomicCheckpointIO
    for inner, expected in ((None, AtomicCheckpointIO), (mine, TorchCheckpointIO)):
        wrapped: Any = superpipeline(checkpoint_io=AsyncCheckpointIO(inner)).checkpoint_io
        assert type(wrapped.checkpoint_io) is expected


def test_plugins_that_know_no_map_location(tmp_path: Path) -> None:
    class Own(TorchCheckpointIO):
        def load_checkpoint(self, path: Any, weights_only: bool | None = None) -> dict[str, Any]:
            return torch.load(path, weights_only=weights_only)

    fit(make, vectors(1)).trainer.save_checkpoint(tmp_path / "one.ckpt")
    resumed = fit(make, vectors(1), superpipeline(checkpoint_io=Own()), max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    assert resumed.trainer.current_epoch == 2


def test_a_strategy_that_is_connected_by_hand_saves_and_loads(tmp_path: Path) -> None:
    """Its module has no trainer, and no callbacks that could keep what is loaded."""
    trainer, module, strategy, other = trainer_for(superpipeline()), make(), superpipeline(), make()
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "new.ckpt")
    strategy.connect(other)
    strategy.load_model_state_dict(strategy.load_checkpoint(tmp_path / "new.ckpt"))
    assert_equal(dict(other.state_dict()), dict(module.state_dict()), "state")


@pytest.mark.rest("takes tenths of a second")
def test_files_elsewhere_go_lightnings_way(monkeypatch: Any, tmp_path: Path) -> None:
    path = "memory://checkpoints/one.ckpt"
    AtomicCheckpointIO().save_checkpoint(CONTENT, path)
    assert_equal(AtomicCheckpointIO().load_checkpoint(path), CONTENT, "content")
    asked: dict[str, Any] = {}
    there = SimpleNamespace(exists=lambda _: True)
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io.get_filesystem", lambda _: there)
    monkeypatch.setattr("lightning.fabric.plugins.io.torch_io.pl_load", lambda _, **options: asked.update(options))
    AtomicCheckpointIO().load_checkpoint("https://example.com/one.ckpt")
    assert asked["weights_only"] is True
    with pytest.raises(TypeError, match="storage_options"):
        AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "one.ckpt", storage_options={"a": 1})


# ---------------------------------------------------------------------- read with care


class Harmful:
    def __reduce__(self) -> Any:
        return exec, ("raise SystemError('code of a checkpoint was run')",)


def test_a_file_that_holds_code_is_refused_and_says_how_to_trust_it(tmp_path: Path) -> None:
    file = tmp_path / "harmful.ckpt"
    torch.save({"state_dict": {}, "harmful": Harmful()}, file)
    with pytest.raises(pickle.UnpicklingError) as told:
        fit(make, vectors(), superpipeline(), ckpt_path=file)
    assert "weights_only=False" in told.value.__notes__[0]
    with pytest.raises(SystemError, match="code of a checkpoint was run"):
        trainer_for(superpipeline()).fit(make(), loader(vectors()), ckpt_path=file, weights_only=False)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "file is not a checkpoint: it is empty\\. Expected a file that"),
        (b"epoch,loss\n0,1.5\n1,1.2\n", re.escape(r"its 23 bytes begin with b'epoch,loss\n0,1.5'")),
        (b"\x08\x00\x00\x00\x00\x00\x00\x00{}", "its 10 bytes begin with .*"),
        ("cut off", r"file ends too early \(\d+ bytes\)"),
        ("a folder", r"file is a folder\. Expected a checkpoint file\. .* dcp_to_torch .*file\.file"),
    ],
)
@pytest.mark.parametrize("weights_only", [None, False])
def test_a_file_of_another_kind_is_told_as_such(
    content: Any, said: str, weights_only: bool | None, tmp_path: Path
) -> None:
    """torch tells of ``KeyError: 101``, the first letter of a text, and of ``EOFError``."""
    file = tmp_path / "file"
    if content == "a folder":
        dcp.save({"state_dict": make().state_dict()}, checkpoint_id=file, no_dist=True)
    elif content == "cut off":
        torch.save(CONTENT, file)
        content = file.read_bytes()[:-1000]
    if isinstance(content, bytes):
        file.write_bytes(content)
    with pytest.raises(ValueError, match=said):
        trainer_for(superpipeline()).fit(make(), loader(vectors()), ckpt_path=file, weights_only=weights_only)


def test_files_of_old_versions_of_torch(tmp_path: Path) -> None:
    torch.save(CONTENT, tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    assert_equal(AtomicCheckpointIO().load_checkpoint(tmp_path / "old.ckpt"), CONTENT, "content")


# ---------------------------------------------------------------------- host memory

LIMITED = """
import resource, sys, threading, time
import torch
import lightning.pytorch as pl
from torch import nn
from torch.utils.data import DataLoader
from sp_lightning import SuperpipelineStrategy
from sp_lightning.trainer import checkpoint_io

LAYERS, WIDTH = 12, 2048  # 16 MiB each
folder, how = sys.argv[1:]

def status(key):
    return int(open("/proc/self/status").read().split(key + ":")[1].split()[0]) * 1024

class Model(pl.LightningModule):
    def configure_model(self):
        if hasattr(self, "net"):
            return
        if how == "from_pretrained":
            from transformers import AutoModel
            self.net = AutoModel.from_pretrained(folder + "/pretrained")
            return
        with torch.device("meta" if "meta" in how else "cpu"):
            self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        if how == "safetensors":
            from safetensors.torch import load_model
            load_model(self.net, folder + "/model.safetensors")
        if how == "mapped":
            self.net.load_state_dict(torch.load(folder + "/model.pt", mmap=True), assign=True)

    def validation_step(self, batch, batch_idx):
        output = self.net(torch.arange(8)[None]).last_hidden_state if how == "from_pretrained" else self.net(batch)
        print("output", output.double().abs().sum().item())

data = DataLoader(torch.ones(1, WIDTH), batch_size=1)
if how == "from_pretrained":
    import transformers.models.gpt2
if "safetensors" in how:
    import safetensors.torch
torch.ones(64, 64) @ torch.ones(64, 64)
torch.save({"warm": torch.ones(4)}, folder + "/warm.pt")
before, mapped, layer = status("RssAnon"), status("VmSize"), WIDTH * WIDTH * 4
model = LAYERS * layer
peak, over = 0, False

def watch():
    global peak
    while not over:
        peak = max(peak, status("RssAnon"))
        time.sleep(0.001)

watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
file = {"save": 0, "safetensors": 2 * model}.get(how, model)  # is mapped; by safetensors twice
allowed = mapped + 2**26 + model + 4 * layer + file
if "meta" not in how:  # their file is mapped beside the new store
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
weights = folder + "/model.safetensors" if how == "meta safetensors" else None
runner = pl.Trainer(
    strategy=SuperpipelineStrategy(k=1, k_prime=1, load_weights_from=weights), accelerator="cpu", logger=False,
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False, default_root_dir=folder,
)
runner.validate(Model(), data, ckpt_path=folder + "/model.ckpt" if "checkpoint" in how else None, verbose=False)
if how == "save":
    runner.save_checkpoint(folder + "/saved.ckpt")
over = True
watcher.join()
print("layers", (peak - before - model) / layer)
"""


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Path:
    """One model, as its files: of torch, of Lightning, of safetensors, of transformers."""
    from safetensors.torch import save_model
    from transformers import AutoModel, GPT2Config

    folder = tmp_path_factory.mktemp("models")
    net = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(12)))
    torch.save(net.state_dict(), folder / "model.pt")
    save_model(net, str(folder / "model.safetensors"))
    state = {f"net.{name}": value for name, value in net.state_dict().items()}
    torch.save({"state_dict": state, "pytorch-lightning_version": pl.__version__}, folder / "model.ckpt")
    config = GPT2Config(n_embd=592, n_layer=12, vocab_size=50, n_head=8, n_positions=32, bos_token_id=1, eos_token_id=1)
    AutoModel.from_config(config).save_pretrained(folder / "pretrained")
    return folder


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads the memory of a process from /proc")
@pytest.mark.parametrize(
    "how", ["checkpoint", "safetensors", "mapped", "from_pretrained", "save", "meta safetensors", "meta checkpoint"]
)
@pytest.mark.long("processes that import torch and fill memory")
def test_the_model_is_there_once(how: str, models: Path) -> None:
    """While it is loaded, set up, run and saved, in a process that may have it, its file mapped, four layers and little more.

    On this host the two slots are host memory, too.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "100000"}
    command = [sys.executable, "-W", "ignore", "-c", LIMITED, str(models), how]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    said = dict(line.split() for line in ran.stdout.splitlines())
    more = (
        2 if how == "from_pretrained" or "meta" in how else 0.5
    )  # transformers imports much; a few layers while files are read
    assert float(said["layers"]) <= 2 + 1 + more
    assert float(said["output"]) > 0


# ---------------------------------------------------------------------- another process meanwhile


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="a folder in which nobody can write, root neither")
def test_a_folder_that_takes_no_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"The checkpoint could not be written: .*one\.ckpt"):
        AtomicCheckpointIO().save_checkpoint(CONTENT, "/proc/one.ckpt")


@pytest.mark.parametrize("removed", ["it has removed it", "it is about to"])
def test_a_part_that_another_takes_for_one_that_was_left_is_made_anew(
    removed: str, tmp_path: Path, monkeypatch: Any
) -> None:
    locked, made, other = part_files._locked, list[Path](), list[Any]()

    def another_was_faster(stream: Any) -> bool | None:
        made.append(Path(stream.name))
        if len(made) == 1:
            other.append(made[0].open("rb"))
            assert locked(other[0])
        if removed == "it has removed it" or len(made) == 2:
            made[0].unlink(missing_ok=True)
            other[0].close()
        return locked(stream)

    monkeypatch.setattr(part_files, "_locked", another_was_faster)
    AtomicCheckpointIO().save_checkpoint(CONTENT, tmp_path / "one.ckpt")
    assert len(made) == 2
    assert AtomicCheckpointIO().load_checkpoint(tmp_path / "one.ckpt")["note"] == "kept"


@pytest.mark.parametrize("fails", [False, True])
def test_a_file_that_is_exchanged_while_it_is_read_is_read_again(fails: bool, tmp_path: Path, monkeypatch: Any) -> None:
    file, load, read = tmp_path / "one.ckpt", torch.load, list[Any]()
    AtomicCheckpointIO().save_checkpoint(CONTENT, file)

    def exchanged(*args: Any, **options: Any) -> Any:
        found = load(*args, **options)
        if not read:
            AtomicCheckpointIO().save_checkpoint({**CONTENT, "note": "new"}, file)
        read.append(found)
        if fails and len(read) == 1:
            raise RuntimeError("half of each")
        return found

    monkeypatch.setattr(torch, "load", exchanged)
    assert AtomicCheckpointIO().load_checkpoint(file)["note"] == "new"
    assert len(read) == 2
