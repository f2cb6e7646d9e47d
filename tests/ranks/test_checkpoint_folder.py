"""Checkpoints that all ranks write together: their values are those of a plain file, and a fault leaves the previous ones."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
import sys
import threading
from pathlib import Path
from time import monotonic
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint import FileSystemWriter

from sp_lightning.__main__ import main
from sp_lightning.ranks import checkpoint_folder
from sp_lightning.ranks.checkpoint_folder import write
from sp_lightning.ranks.folder_reader import INDEX, read
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from sp_lightning.trainer.part_files import aside, beside, create_part
from tests.support.folders import Net, Saves, together
from tests.support.models import CASES, Module, vectors
from tests.support.ranks import rank, start
from tests.support.runs import assert_equal, assert_same, fit, fused
from tests.support.tiers import first, some


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "LEAST", 1)


# ---------------------------------------------------------------------- one process


MODELS = ["gpt2-tied", "lora-checkpoint", "llama-dropout", "resnet50", "conditional", "frozen"]


@pytest.mark.parametrize("name", first(MODELS, "gpt2-tied", second=MODELS[1:2], why="other models"))
def test_a_folder_has_what_a_file_has(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    options: Any = {"recorded": "losses"}
    fit(case.make, case.batches(), together(), callbacks=[Saves(str(tmp_path / "a"), at=0)], **options)
    plain = fit(case.make, case.batches(), callbacks=[Saves(str(tmp_path / "b"), at=0)], **options)
    ours, theirs = read(tmp_path / "a", True), torch.load(tmp_path / "b", weights_only=True)
    assert list(ours["state_dict"]) == list(theirs["state_dict"])
    assert ours["state_dict"]._metadata == theirs["state_dict"]._metadata
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "loops"):
        assert_equal(ours[key], theirs[key], key)
    resumed = fit(case.make, case.batches(), together(), max_epochs=2, ckpt_path=tmp_path / "a", **options)
    assert_same(resumed, fit(case.make, case.batches(), max_epochs=2, ckpt_path=tmp_path / "b", **options))
    assert plain.losses


def test_torch_reads_it_and_tied_weights_are_there_once(tmp_path: Path) -> None:
    case = CASES["gpt2-tied"]
    ours = fit(case.make, case.batches(), together(), recorded="nothing", callbacks=[Saves(str(tmp_path / "a"), at=0)])
    written = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    names = [name for name in written if name.startswith("state_dict.")]
    assert len(names) == len(list(ours.module.parameters())) < len(ours.module.state_dict())
    found = {name: torch.zeros(written[name].size, dtype=written[name].properties.dtype) for name in names}  # type: ignore[union-attr]
    with pytest.warns(match="intent is to load in a single process"):
        dcp.load(found, checkpoint_id=tmp_path / "a", no_dist=True)
    state = read(tmp_path / "a", True)["state_dict"]
    assert_equal({f"state_dict.{name}": state[name] for name in state if f"state_dict.{name}" in names}, found, "state")


def test_tensors_are_mapped_and_stay_mapped_where_they_are_copied(tmp_path: Path) -> None:
    from sp_lightning.disk.weights_in_files import Mappings

    fit(Net, vectors(), together(), recorded="nothing", callbacks=[Saves(str(tmp_path / "a"))])
    found = AtomicCheckpointIO().load_checkpoint(tmp_path / "a", weights_only=True)
    places = [Mappings().place(tensor) for tensor in found["state_dict"].values() if tensor.nbytes > 4096]
    assert all(place is not None and Path(place.path).parent == tmp_path / "a" for place in places)
    for tensor in found["state_dict"].values():
        tensor.zero_()
    again = AtomicCheckpointIO().load_checkpoint(tmp_path / "a", weights_only=True)
    assert any(each.any() for each in again["state_dict"].values()), "what is written stays in memory"
    for state in found["optimizer_states"][0]["state"].values():
        assert all(Mappings().place(each) is None for each in state.values())


def test_a_module_without_values_takes_them_from_a_folder(tmp_path: Path) -> None:
    class Wide(Module):
        def __init__(self) -> None:
            super().__init__(nn.Sequential(*[nn.Linear(70, 70) for _ in range(4)]))

    def meta() -> Module:
        with torch.device("meta"):
            return Wide()

    batches = list(torch.randn(4, 2, 70, generator=torch.Generator().manual_seed(3)))
    fit(Wide, batches, together(), recorded="nothing", callbacks=[Saves(str(tmp_path / "a"), at=3)])
    options: Any = {"recorded": "losses", "max_epochs": 2}
    ours, plain = fit(meta, batches, together(), ckpt_path=tmp_path / "a", **options), fit(Wide, batches, **options)
    assert_equal(ours.losses, plain.losses[len(batches) :], "losses")
    assert_equal(ours.state, plain.state, "state")
    assert_equal(ours.optimizers, plain.optimizers, "optimizers")


def test_model_checkpoint_keeps_as_many_as_it_is_told_and_finds_the_last(tmp_path: Path) -> None:
    def run(make: Any, folder: Path) -> Any:
        options: Any = {"recorded": "losses", "enable_checkpointing": True}
        saves = ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=1, save_last=True)
        fit(Net, vectors(), make(), callbacks=[saves], **options)
        assert sorted(os.listdir(folder)) == [f"epoch=0-step={len(vectors())}.ckpt", "last.ckpt"]
        return fit(Net, vectors(), make(), callbacks=[saves], ckpt_path="last", max_epochs=2, **options)  # type: ignore[arg-type]

    assert_same(run(together, tmp_path / "ours"), run(lambda: "auto", tmp_path / "plain"))


def test_what_a_hook_puts_into_the_checkpoint_counts(tmp_path: Path) -> None:
    class Halves(Net):
        def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
            checkpoint["state_dict"] = {name: value.half() for name, value in checkpoint["state_dict"].items()}
            checkpoint["mine"] = {"list": [torch.arange(30.0), (torch.ones(2), "text")], 3: torch.eye(4)}

    ours = fit(Halves, vectors(), together(), recorded="nothing")
    ours.trainer.save_checkpoint(tmp_path / "a")
    found = read(tmp_path / "a", True)
    assert_equal(found["state_dict"], {name: value.half() for name, value in ours.state.items()}, "halves")
    assert_equal(found["mine"], {"list": [torch.arange(30.0), (torch.ones(2), "text")], 3: torch.eye(4)}, "mine")


DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.uint16,
]  # fmt: skip


def test_tensors_of_all_kinds(tmp_path: Path) -> None:
    base = torch.arange(24.0).view(2, 3, 4)
    channels_last = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    square = torch.randn(4, 4)
    tensors = {
        **{str(dtype): torch.ones(7).to(dtype) for dtype in DTYPES},
        "number": torch.tensor(3.0), "nothing": torch.zeros(0, 4), "part": base[:, 1:], "turned": base.transpose(0, 2),
        "every other": base[:, :, ::2], "expanded": torch.ones(1).expand(5), "channels last": channels_last,
        "conjugate": torch.view_as_complex(torch.randn(3, 2)).conj(), "sparse": torch.eye(3).to_sparse(),
        "square": square, "square, turned": square.t(), "row, expanded": square[2].expand(4, 4),
        "leaf": torch.ones(3, requires_grad=True),
    }  # fmt: skip
    write(tensors, tmp_path / "a", {})
    torch.save(tensors, tmp_path / "b")
    ours, plain = read(tmp_path / "a", False), torch.load(tmp_path / "b", weights_only=False)
    for name, tensor in plain.items():
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].layout == tensor.layout, name
        assert repr(ours[name]) == repr(tensor), name
    assert ours["channels last"].stride() == channels_last.stride()
    assert_equal([ours[str(dtype)].float() for dtype in DTYPES if not dtype.is_complex], [torch.ones(7)] * 9, "ones")


def test_one_memory_with_two_dtypes_is_written_twice(tmp_path: Path) -> None:
    """``torch.save`` refuses it."""
    numbers = torch.randn(5)
    content = {"numbers": numbers, "bits": numbers.view(torch.int32)}
    write(content, tmp_path / "a", {})
    assert_equal(read(tmp_path / "a", True), content, "content")


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor, .* are deprecated", "ignore:TypedStorage is deprecated")
def test_numbers_that_torch_maps_to_no_tensor_are_in_the_index(tmp_path: Path) -> None:
    """A quantised tensor of torch's own, and plain bits."""
    quantised = torch.quantize_per_tensor(torch.arange(9.0), 0.5, 3, torch.quint8)
    bits = torch.arange(9, dtype=torch.uint8)
    write({"quantised": quantised, "bits": bits.view(torch.bits8)}, tmp_path / "a", {})
    found = read(tmp_path / "a", True)
    assert torch.equal(found["quantised"].int_repr(), quantised.int_repr())
    assert found["quantised"].q_zero_point() == 3
    assert torch.equal(found["bits"].view(torch.uint8), bits)


def test_names_that_read_alike_are_apart(tmp_path: Path) -> None:
    content = {"a.b": torch.ones(3), "a": {"b": torch.zeros(3), 0: torch.full((3,), 2.0), "0": torch.full((3,), 3.0)}}
    write(content, tmp_path / "a", {})
    assert_equal(read(tmp_path / "a", True), content, "content")
    numbered = {f"a.b#{number}": torch.full((3,), float(number)) for number in range(5)} | content
    write(numbered, tmp_path / "b", {})
    assert_equal(read(tmp_path / "b", True), numbered, "numbered")


def test_it_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    write({"a": torch.ones(2)}, tmp_path / "a", {})
    assert [str(each.message) for each in recwarn] == []


# ---------------------------------------------------------------------- a name that is taken


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("before", ["folder", "file", "link", "nothing"])
def test_a_name_is_given_to_the_new_one(
    before: str, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, elsewhere = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    write({"a": torch.zeros(9)}, elsewhere, {})
    if before == "folder":
        write({"a": torch.zeros(9)}, target, {})
    elif before == "file":
        torch.save({}, target)
    elif before == "link":
        target.symlink_to(elsewhere)
    if not can_exchange:
        monkeypatch.setattr(checkpoint_folder, "_libc", lambda: None)
    elif before != "nothing":  # at no moment has nothing the name
        rename = Path.rename
        monkeypatch.setattr(Path, "rename", lambda path, to: None if path == target else rename(path, to))
    write({"a": torch.ones(9)}, target, {})
    assert torch.equal(read(target, True)["a"], torch.ones(9))
    assert torch.equal(read(elsewhere, True)["a"], torch.zeros(9))
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "other.ckpt"]


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    """Whoever forgets the file's name keeps what is in the folder."""
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "thesis.tex").write_text("all of it")
    with pytest.raises(IsADirectoryError, match=r"It is a folder with other files \('thesis.tex'\)"):
        write({"a": torch.ones(9)}, tmp_path / "logs", {})
    write({"a": torch.ones(9)}, tmp_path / "mine", {})
    (tmp_path / "mine" / "notes.txt").write_text("kept")
    with pytest.raises(IsADirectoryError, match=r"other files \('notes.txt'\)"):
        write({"a": torch.zeros(9)}, tmp_path / "mine", {})
    assert (tmp_path / "logs" / "thesis.tex").read_text() == "all of it"
    assert torch.equal(read(tmp_path / "mine", True)["a"], torch.ones(9))
    assert sorted(os.listdir(tmp_path)) == ["logs", "mine"]


def test_what_was_set_aside_comes_back_before_the_next_one(tmp_path: Path) -> None:
    """A process has died in the moment in which no folder had the name, on a file system that cannot exchange two."""
    target = tmp_path / "last.ckpt"
    write({"a": torch.zeros(9)}, target, {})
    part, stream = create_part(target)
    stream.close()
    target.rename(aside(part))
    beside(part).mkdir()
    part, stream = create_part(target)
    stream.close()
    assert torch.equal(read(target, True)["a"], torch.zeros(9))
    assert sorted(os.listdir(tmp_path)) == sorted([part.name, "last.ckpt"])


def test_a_folder_that_is_mapped_may_be_exchanged(tmp_path: Path) -> None:
    write({"a": torch.zeros(9)}, tmp_path / "a", {})
    found = read(tmp_path / "a", True)
    write({"a": torch.ones(9)}, tmp_path / "a", {})
    assert torch.equal(found["a"], torch.zeros(9))


KILLED = """
import os, sys, torch, torch.distributed.checkpoint
from sp_lightning.ranks import checkpoint_folder
checkpoint_folder.LEAST = 1
def dies(*_, **__): os._exit(7)
setattr({where}, {what!r}, dies)
checkpoint_folder.write({{"a": torch.ones(9)}}, checkpoint_folder.Path(sys.argv[1]), {{}})
"""


DIES = [("torch.distributed.checkpoint", "save"), ("checkpoint_folder", "_finish"), ("checkpoint_folder", "_exchange"),
        ("checkpoint_folder", "_remove")]  # fmt: skip


@pytest.mark.rest("processes that import torch")
@pytest.mark.parametrize(("where", "what"), some(DIES, DIES[2], why="other moments"))
def test_a_process_that_dies_leaves_the_previous_one_or_the_new_one(where: str, what: str, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    write({"a": torch.zeros(9)}, target, {})
    program = KILLED.format(where=where, what=what)
    died = subprocess.run([sys.executable, "-c", program, str(target)], timeout=100, check=False)
    assert died.returncode == 7
    assert torch.equal(read(target, True)["a"], torch.full((9,), float(what == "_remove")))
    assert len(os.listdir(tmp_path)) > 1
    write({"a": torch.full((9,), 2.0)}, target, {})
    assert os.listdir(tmp_path) == ["last.ckpt"], "the next one removes what was left"


def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "last.ckpt"
    write({"a": torch.zeros(9)}, target, {})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    said = r"could not be written: rank 0: No space left on device; the previous one of this name is as it was"
    with monkeypatch.context() as patched:
        patched.setattr(FileSystemWriter, "write_data", full)
        with pytest.raises(OSError, match=said):
            write({"a": torch.ones(9)}, target, {})
    with monkeypatch.context() as patched:
        patched.setattr(torch, "save", full)  # of the index
        patched.setattr(checkpoint_folder, "LEAST", 2**20)
        with pytest.raises(
            OSError, match="written: No space left on device; the previous one of this name is as it was"
        ):
            write({"a": torch.ones(9)}, target, {})
    assert torch.equal(read(target, True)["a"], torch.zeros(9))
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch forgets the errors of its threads but for the first one's."""
    save, first_thread = torch.save, threading.current_thread()

    def fails(*args: Any, **options: Any) -> None:
        if threading.current_thread() is not first_thread:
            raise OSError(errno.EIO, "Input/output error")
        save(*args, **options)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(
        OSError, match=r"could not be written: threads of torch.distributed.checkpoint have failed, .* 'x\d+'"
    ):
        write({f"x{i}": torch.ones(90) for i in range(40)}, tmp_path / "a", {})
    assert os.listdir(tmp_path) == []


def test_an_error_that_is_no_disk_s_stays_itself(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="local object"):
        write({"a": torch.ones(9), "b": lambda: None}, tmp_path / "a", {})
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------------- what ends badly


class Ends(Callback):
    """Rank 1 ends in the third batch, in one way."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.how == "saves alone" and trainer.is_global_zero:
            trainer.save_checkpoint(Path(trainer.default_root_dir) / "alone")
        if batch_idx == 2 and rank() == 1:
            if self.how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.how == "hook":
                raise ValueError("no more")


def end(folder: str, how: str) -> None:
    saves = OnExceptionCheckpoint(folder)
    options: Any = {
        "devices": 2,
        "callbacks": [saves, Ends(how)],
        "recorded": "losses",
        "default_root_dir": folder,
        "enable_checkpointing": True,
    }
    fit(Net, vectors(8), together(), **options)


@pytest.mark.rest("processes that end by signals")
@pytest.mark.parametrize("how", some(["kill", "hook", "saves alone"], "kill", why="other ends"))
def test_rank_0_saves_alone_where_others_may_never_come(how: str, tmp_path: Path) -> None:
    """It waited for six hours for a rank that was killed."""
    begun = monotonic()
    (first, _), (second, _) = start(2, end, str(tmp_path), how).outcomes()
    assert "RankError" in str(first)
    assert second is not None
    assert monotonic() - begun < 60
    found = AtomicCheckpointIO().load_checkpoint(tmp_path / "on_exception.ckpt", weights_only=True)
    assert found["global_step"] == 2
    fit(Net, vectors(), together(), ckpt_path=tmp_path / "on_exception.ckpt", recorded="losses")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_file_that_may_not_grow_is_an_error_of_the_system(tmp_path: Path) -> None:
    """At whatever byte it happens. torch raises an error about positions in a file, which says nothing to a user."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    write({"a": torch.zeros(9)}, tmp_path / "a", {})
    for most in range(0, 9000, 450):
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            with pytest.raises(OSError, match=r"could not be written: .*; the previous one of this name is as it was"):
                write({"a": torch.ones(900), "in the index": "x" * 9000}, tmp_path / "a", {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(read(tmp_path / "a", True)["a"], torch.zeros(9))
    assert os.listdir(tmp_path) == ["a"]


def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has not written\. One of Lightning's sharded strategies becomes a file by"):
        fit(Net, vectors(), together(), ckpt_path=tmp_path)


def test_options_that_exclude_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"disk= does not work with .*Leave save_distributed_checkpoint out"):
        together(disk=tmp_path)
    with pytest.raises(ValueError, match=r"and not by a AsyncCheckpointIO. Leave one of them out"):
        fit(Net, vectors(), together(), plugins=[AsyncCheckpointIO()])


def test_places_that_are_no_folder_of_all_nodes(tmp_path: Path) -> None:
    trainer = fit(Net, vectors(), together(), recorded="nothing").trainer
    with pytest.raises(ValueError, match=r"'memory://a' is elsewhere\. Name a folder"):
        trainer.save_checkpoint("memory://a")
    with pytest.raises(TypeError, match="storage_options= is not supported"):
        trainer.save_checkpoint(tmp_path / "a", storage_options={"a": 1})
    trainer.save_checkpoint(f"file://{tmp_path}/b")
    assert (tmp_path / "b" / INDEX).is_file()


# ---------------------------------------------------------------------- converted


def test_it_is_converted_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = fit(fused(Net), vectors(), recorded="nothing", callbacks=[Saves(str(tmp_path / "plain"))])
    main(["convert", str(tmp_path / "plain"), str(tmp_path / "folder")])
    main(["convert", str(tmp_path / "folder"), str(tmp_path / "file")])
    files = [torch.load(tmp_path / name, weights_only=True) for name in ("plain", "file")]
    assert_equal(files[1], files[0], "checkpoint")
    assert (tmp_path / "file").stat().st_size < 1.1 * (tmp_path / "plain").stat().st_size
    assert plain.trainer.global_step
    options: Any = {"max_epochs": 2, "recorded": "losses"}
    resumed = [fit(fused(Net), vectors(), ckpt_path=tmp_path / name, **options) for name in ("plain", "file")]
    assert_same(*resumed)
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "plain"), str(tmp_path / "file")])
    assert "exists already" in capsys.readouterr().err
    torch.save({"a": Path("code")}, tmp_path / "code")
    with pytest.raises(SystemExit):
        main(["convert", str(tmp_path / "code"), str(tmp_path / "safe")])
    assert "If you trust it, add --trust" in capsys.readouterr().err
    main(["convert", "--trust", str(tmp_path / "code"), str(tmp_path / "safe")])
    assert read(tmp_path / "safe", False)["a"] == Path("code")
