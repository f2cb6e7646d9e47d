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
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from sp_lightning.__main__ import main
from sp_lightning.ranks import checkpoint_folder
from sp_lightning.ranks.checkpoint_folder import REST, read, write
from sp_lightning.trainer.checkpoint_io import AtomicCheckpointIO
from tests.support.folders import Net, Saves, together
from tests.support.models import CASES, Module, vectors
from tests.support.ranks import rank, start
from tests.support.runs import assert_equal, assert_same, fit, fused
from tests.support.tiers import first, some


@pytest.fixture(autouse=True)
def _small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_folder, "MAPPED", 1)


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


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_loads_the_weights_into_a_plain_module(tmp_path: Path) -> None:
    """Tied weights are loaded by both of their names."""
    case = CASES["gpt2-tied"]
    ours = fit(case.make, case.batches(), together(), recorded="nothing", callbacks=[Saves(str(tmp_path / "a"), at=0)])
    module = case.make()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    dcp.load({"state_dict": module.state_dict()}, checkpoint_id=tmp_path / "a")
    state = read(tmp_path / "a", True)["state_dict"]
    assert_equal(dict(module.state_dict()), dict(state), "state")
    assert len(state) > len(list(ours.module.parameters())), "tied weights have two names"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_converts_it_to_a_file(tmp_path: Path) -> None:
    fit(Net, vectors(), together(), recorded="nothing", callbacks=[Saves(str(tmp_path / "a"))])
    assert {each.suffix or each.name for each in (tmp_path / "a").iterdir()} == {".metadata", ".distcp"}
    dcp_to_torch_save(tmp_path / "a", tmp_path / "file")
    found, checkpoint = torch.load(tmp_path / "file", weights_only=True), read(tmp_path / "a", True)
    assert_equal(found["state_dict"], dict(checkpoint["state_dict"]), "state")
    assert_equal(
        found["optimizer_states"]["0"]["state"]["0"], checkpoint["optimizer_states"][0]["state"][0], "optimizer"
    )
    (rest,) = found[REST]
    assert rest["loops"] == checkpoint["loops"]
    assert all(each.is_meta for each in rest["state_dict"].values())


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
        "number": torch.tensor(3.0), "part": base[:, 1:], "turned": base.transpose(0, 2),
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
def test_a_quantised_tensor_of_torch(tmp_path: Path) -> None:
    quantised = torch.quantize_per_tensor(torch.arange(9.0), 0.5, 3, torch.quint8)
    write({"quantised": quantised}, tmp_path / "a", {})
    found = read(tmp_path / "a", True)["quantised"]
    assert torch.equal(found.int_repr(), quantised.int_repr())
    assert found.q_zero_point() == 3


def test_the_plain_tensors_of_a_wrapped_one_are_entries(tmp_path: Path) -> None:
    """Otherwise the quantised weights of a large model would be pickled in memory."""
    quantisation = pytest.importorskip("torchao.quantization")
    linear = nn.Linear(64, 64)
    quantisation.quantize_(linear, quantisation.Int8WeightOnlyConfig())
    write({"state_dict": linear.state_dict()}, tmp_path / "a", {})
    names = dcp.FileSystemReader(tmp_path / "a").read_metadata().state_dict_metadata
    assert {"state_dict.weight.qdata", "state_dict.weight.scale"} < names.keys()
    found = read(tmp_path / "a", True)["state_dict"]["weight"]
    assert type(found) is type(linear.weight)
    assert torch.equal(found.dequantize(), linear.weight.dequantize())


def test_what_dcp_alone_would_lose(tmp_path: Path) -> None:
    content = {"empty": {}, "list": [], "tuple": (1, torch.ones(2)), "numbers": {1: {"1": torch.ones(2)}, (2, 3): None}}
    content[REST] = {"a": torch.ones(2)}  # the entry for the rest has the same name
    write(content, tmp_path / "a", {})
    found = read(tmp_path / "a", True)
    assert_equal(found, content, "content")
    assert list(found["numbers"]) == [1, (2, 3)]


def test_names_that_read_alike_are_apart(tmp_path: Path) -> None:
    content = {"a.b": torch.ones(3), "a": {"b": torch.zeros(3), 0: torch.full((3,), 2.0), "0": torch.full((3,), 3.0)}}
    write(content, tmp_path / "a", {})
    assert_equal(read(tmp_path / "a", True), content, "content")


# ---------------------------------------------------------------------- a name that is taken


@pytest.mark.parametrize("before", ["folder", "file", "link", "nothing"])
def test_a_name_is_given_to_the_new_one(before: str, tmp_path: Path) -> None:
    target, elsewhere = tmp_path / "last.ckpt", tmp_path / "other.ckpt"
    write({"a": torch.zeros(9)}, elsewhere, {})
    if before == "folder":
        write({"a": torch.zeros(9)}, target, {})
    elif before == "file":
        torch.save({}, target)
    elif before == "link":
        target.symlink_to(elsewhere)
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


def test_a_folder_that_is_mapped_may_be_replaced(tmp_path: Path) -> None:
    write({"a": torch.zeros(9)}, tmp_path / "a", {})
    found = read(tmp_path / "a", True)
    write({"a": torch.ones(9)}, tmp_path / "a", {})
    assert torch.equal(found["a"], torch.zeros(9))


KILLED = """
import os, sys, torch
from pathlib import Path
from torch.distributed.checkpoint import filesystem
from sp_lightning.ranks import checkpoint_folder
real, left = {where}.{what}, {after}
def dies(*arguments, **options):
    global left
    left -= 1
    if left < 0:
        os._exit(7)
    return real(*arguments, **options)
{where}.{what} = dies
checkpoint_folder.write({{"a": torch.ones(9)}}, Path(sys.argv[1]), {{}})
"""
MOMENTS = {
    "before the tensors": ("filesystem.FileSystemWriter", "write_data", 0, "old"),
    "before .metadata": ("filesystem.FileSystemWriter", "finish", 0, "old"),
    "before the folders are renamed": ("checkpoint_folder", "sync_folder", 0, "old"),
    "before the former folder is removed": ("checkpoint_folder", "sync_folder", 1, "new"),
    "between the two names": ("Path", "rename", 2, "neither"),  # the first time, DCP renames .metadata
}


@pytest.mark.rest("processes that import torch")
@pytest.mark.parametrize("moment", some(list(MOMENTS), "between the two names", why="other moments"))
def test_a_process_that_dies_leaves_the_previous_one_or_the_new_one(moment: str, tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    write({"a": torch.zeros(9)}, target, {})
    where, what, after, remains = MOMENTS[moment]
    program = KILLED.format(where=where, what=what, after=after)
    died = subprocess.run([sys.executable, "-c", program, str(target)], timeout=100, check=False)
    assert died.returncode == 7
    if remains == "neither":  # both are complete, under hidden names
        assert not target.exists()
        hidden = sorted(tmp_path.iterdir())
        assert [each.suffix for each in hidden] == [".old", ".part"]
        assert [float(read(each, True)["a"][0]) for each in hidden] == [0, 1]
    else:
        assert torch.equal(read(target, True)["a"], torch.full((9,), float(remains == "new")))
        assert len(os.listdir(tmp_path)) == 2
    write({"a": torch.full((9,), 2.0)}, target, {})
    assert torch.equal(read(target, True)["a"], torch.full((9,), 2.0))
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
        patched.setattr(FileSystemWriter, "finish", full)
        with pytest.raises(OSError, match=said):
            write({"a": torch.ones(9)}, target, {})
    assert torch.equal(read(target, True)["a"], torch.zeros(9))
    assert os.listdir(tmp_path) == ["last.ckpt"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_cannot_write_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.distributed.checkpoint checks the errors of the first thread only."""
    save, first_thread = torch.save, threading.current_thread()

    def fails(*args: Any, **options: Any) -> None:
        if threading.current_thread() is not first_thread:
            raise OSError(errno.EIO, "Input/output error")
        save(*args, **options)

    monkeypatch.setattr(torch, "save", fails)
    with pytest.raises(OSError, match="could not be written: rank 0: Input/output error"):
        write({f"x{i}": torch.ones(90) for i in range(40)}, tmp_path / "a", {})
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
                write({"a": torch.ones(900), "text": "x" * 9000}, tmp_path / "a", {})
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert torch.equal(read(tmp_path / "a", True)["a"], torch.zeros(9))
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    """Also the folder of an earlier version, with another entry beside the tensors."""
    with pytest.raises(ValueError, match="A folder of one of Lightning's sharded strategies is converted to a file by"):
        fit(Net, vectors(), together(), ckpt_path=tmp_path)
    dcp.save({"state_dict": Net().state_dict()}, checkpoint_id=tmp_path / "a", no_dist=True)
    with pytest.raises(ValueError, match=r"not written by this version of SuperpipelineStrategy"):
        fit(Net, vectors(), together(), ckpt_path=tmp_path / "a")


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
    assert (tmp_path / "b" / ".metadata").is_file()


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
