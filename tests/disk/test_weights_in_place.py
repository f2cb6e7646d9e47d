"""Weights that are read in place from the user's files while a model predicts: results are plain Lightning's."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import save_file
from torch import nn

from sp_lightning import SuperpipelineStrategy
from sp_lightning.capabilities.disk import host_budget
from sp_lightning.capabilities.disk import tier as disk_tier
from sp_lightning.capabilities.disk.file_source import FileSource
from sp_lightning.capabilities.disk.state_placement import choose_in_files
from sp_lightning.capabilities.disk.weights_in_files import FileBlock, FilePlace, WeightReader, identity_of, place_of
from sp_lightning.core.model.digests import digest
from sp_lightning.trainer import host_memory
from tests.support.models import Module, Stack, llama, vectors
from tests.support.on_disk import in_file, in_memory, stay
from tests.support.runs import assert_equal, fit, loader, trainer_for
from tests.support.tiers import first


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    stay(monkeypatch)


def made(make: Callable[[], pl.LightningModule] = lambda: Module(Stack())) -> pl.LightningModule:
    pl.seed_everything(3, verbose=False)
    return make().eval()


def without_values(make: Callable[[], pl.LightningModule] = lambda: Module(Stack())) -> pl.LightningModule:
    with torch.device("meta"):
        return make().eval()


def written(module: pl.LightningModule, folder: Path, kind: str) -> Path:
    """Files of a module's weights."""
    state = {name: value.contiguous() for name, value in module.state_dict().items()}
    if kind == "checkpoint":
        torch.save({"state_dict": state}, folder / "model.ckpt")
        return folder / "model.ckpt"
    if kind == "one file":
        save_file(state, folder / "model.safetensors")
        return folder / "model.safetensors"
    names = sorted(state)
    parts = {f"part-{i}.safetensors": names[i::2] for i in range(2)}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, folder / file)
    index = {"weight_map": {name: file for file, own in parts.items() for name in own}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def in_place(file: Path, folder: Path, **options: Any) -> SuperpipelineStrategy:
    return SuperpipelineStrategy(**{"k": 1, "disk": folder, "load_weights_from": file, **options})


def predict(module: pl.LightningModule, strategy: Any = "auto", **options: Any) -> Any:
    return trainer_for(strategy, **options).predict(module, loader(vectors()))


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("kind", first(["one file", "several files", "checkpoint"], "several files", why="other files"))
@pytest.mark.parametrize(
    "options",
    first(
        [{}, {"k": 2, "k_prime": 2}, {"k": 1, "k_prime": 5}], {}, {"k": 1, "k_prime": 5}, why="a window between them"
    ),
    ids=str,
)
def test_predictions_are_plain_lightning_s(kind: str, options: Any, tmp_path: Path) -> None:
    file, scratch = written(made(), tmp_path, kind), tmp_path / "scratch"
    scratch.mkdir()
    strategy = in_place(file, scratch, **options)
    module = without_values()
    assert_equal(predict(module, strategy), predict(made()), "predictions")
    assert list(scratch.iterdir()) == []
    assert_equal(dict(module.state_dict()), dict(made().state_dict()), "state")
    assert in_memory(module) == []


@pytest.mark.rest("takes tenths of a second")
def test_offsets_in_a_file_are_aligned_to_nothing(tmp_path: Path) -> None:
    """Kernels compute other last bits on other alignments, so weights are copied to where they would be otherwise."""
    file = written(made(), tmp_path, "one file")
    module = without_values()
    predict(module, in_place(file, tmp_path))
    offsets = [place.offset % 64 for p in module.parameters() if (place := place_of(p)) is not None]
    assert any(offsets)


@pytest.mark.rest("takes tenths of a second")
def test_layers_that_fit_are_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "choose_in_files", lambda sizes, *_: list(sizes)[::2])
    strategy = in_place(written(made(), tmp_path, "one file"), tmp_path)
    module = without_values()
    assert_equal(predict(module, strategy), predict(made()), "predictions")
    assert {in_file(p) for p in module.parameters()} == {True, False}


@pytest.mark.rest("takes tenths of a second")
def test_one_layer_in_files_is_read_again_as_soon_as_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the rest of the batch; otherwise the read would begin when the layer is nearly due."""
    monkeypatch.setattr(disk_tier, "choose_in_files", lambda sizes, *_, **__: list(sizes)[1:2])
    stage, read, inside, reads = FileSource.stage, FileBlock.read, [False], list[bool]()

    def staged(self: FileSource, layer: Any) -> Any:
        inside[0] = True
        try:
            return stage(self, layer)
        finally:
            inside[0] = False

    def noted(self: FileBlock, memory: Any) -> Any:
        reads.append(inside[0])
        return read(self, memory)

    monkeypatch.setattr(FileSource, "stage", staged)
    monkeypatch.setattr(FileBlock, "read", noted)
    assert_equal(
        predict(without_values(), in_place(written(made(), tmp_path, "one file"), tmp_path)),
        predict(made()),
        "predictions",
    )
    assert len(reads) > 3
    assert all(reads[3:])  # once its order is known


@pytest.mark.rest("takes tenths of a second")
def test_a_prediction_whose_weights_are_in_memory_says_that_none_can_stay_in_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It went on without a word, with several times the memory that host_memory says."""
    monkeypatch.setattr(disk_tier, "room_for", lambda *_: -(2**20))
    strategy = SuperpipelineStrategy(k=1, disk=".", host_memory="300MiB")
    assert_equal(predict(made(), strategy), predict(made()), "predictions")
    (remark,) = strategy.remarks()
    assert "takes 1.0 MiB more than host_memory leaves it, and no weights can be read in place" in remark


@pytest.mark.parametrize(("limit", "left"), [(8 * 2**30, 2**29), (2**30, 96 * 2**20)])
def test_a_share_of_host_memory_is_left_to_the_process(limit: int, left: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "resident_bytes", lambda: 2**28)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: None)
    assert host_budget.room_for(limit) == limit - left - 2**28


@pytest.mark.rest("takes tenths of a second")
def test_as_few_layers_stay_in_files_as_there_is_room_for_the_others() -> None:
    choose = partial(choose_in_files, {"a": 100, "b": 300, "c": 200, "d": 100}, 50)
    assert choose(750, staging=150) == []
    assert choose(749, staging=150) == ["c"]
    assert choose(549, staging=150) == ["b", "d"]
    assert choose(200, staging=150) == ["a", "b", "c", "d"]
    with pytest.raises(MemoryError, match=r"CPU memory is 10 B too small .* in flight \(200 B\): free 17MiB\."):
        choose(190, staging=150)
    with pytest.raises(MemoryError, match=r'in flight \(200 B\): host_memory="24MiB" is enough\.'):
        choose(190, staging=150, given=7 * 2**20)


@pytest.mark.rest("takes tenths of a second")
def test_nothing_is_in_place_where_all_of_it_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_tier, "choose_in_files", choose_in_files)
    module = without_values()
    predict(module, in_place(written(made(), tmp_path, "one file"), tmp_path))
    assert {in_file(p) for p in module.parameters()} == {False}


@pytest.mark.rest("takes tenths of a second")
def test_a_second_run_reads_in_place_again(tmp_path: Path) -> None:
    strategy = in_place(written(made(), tmp_path, "one file"), tmp_path)
    module, trainer = without_values(), trainer_for(strategy)
    for _ in range(2):
        assert_equal(trainer.predict(module, loader(vectors())), predict(made()), "predictions")
    assert in_memory(module) == []


@pytest.mark.rest("takes tenths of a second")
def test_half_precision(tmp_path: Path) -> None:
    file = written(made().bfloat16(), tmp_path, "one file")

    def make() -> pl.LightningModule:
        return Module(Stack()).bfloat16()

    module = without_values(make)
    ours = predict(module, in_place(file, tmp_path), precision="bf16-true")
    assert_equal(ours, predict(made().bfloat16(), precision="bf16-true"), "predictions")
    assert in_memory(module) == []


@pytest.mark.rest("takes tenths of a second")
def test_validation_and_tests(tmp_path: Path) -> None:
    file = written(made(), tmp_path, "one file")
    for phase in ("validate", "test"):
        module = without_values()
        ours, plain = (
            getattr(trainer_for(strategy), phase)(each, loader(vectors()), verbose=False)
            for each, strategy in ((module, in_place(file, tmp_path)), (made(), "auto"))
        )
        assert ours == plain
        assert in_memory(module) == []


class Generates(Module):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.net.generate(batch["input_ids"][:, :4], max_new_tokens=6, do_sample=False)  # type: ignore[operator]


@pytest.mark.long("takes a second or more")
def test_generation(tmp_path: Path) -> None:
    def make() -> pl.LightningModule:
        return Generates(llama(dropout=0.0, tie_word_embeddings=False).net)

    batches = [{"input_ids": torch.randint(0, 64, (2, 8))} for _ in range(2)]
    reference = made(make)
    file = written(reference, tmp_path, "one file")
    plain = trainer_for("auto").predict(reference, loader(batches))
    module = made(make)  # its rotary embedding has buffers that no file has
    for name, parameter in list(module.named_parameters()):
        owner, _, own = name.rpartition(".")
        module.get_submodule(owner).register_parameter(own, nn.Parameter(parameter.detach().to("meta")))
    strategy = in_place(file, tmp_path, layers=["net.model.layers.*"])
    ours = trainer_for(strategy).predict(module, loader(batches))
    assert_equal(ours, plain, "tokens")
    assert any(in_file(p) for p in module.parameters())


class Touches(Callback):
    """Reads or writes a weight between two batches."""

    def __init__(self, touch: Callable[[nn.Parameter], Any]) -> None:
        self.touch = touch
        self.found: list[Any] = []

    def on_predict_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 1:
            self.found.append(self.touch(pl_module.net.blocks[2].inner.weight))


def _writes(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.mul_(2)


def _writes_data(weight: nn.Parameter) -> None:
    weight.data[0] = 1.0


def _replaces_data(weight: nn.Parameter) -> None:
    weight.data = torch.ones_like(weight)


TOUCHES = {
    "reads": lambda weight: weight.detach().clone(),
    "looks at it": lambda weight: (weight.shape, weight.dtype, weight.stride(), weight.requires_grad, weight.numel()),
    "writes": _writes,
    "writes its data": _writes_data,
    "replaces its data": _replaces_data,
    "numpy": lambda weight: weight.detach().numpy().tolist(),
}


READS = ("reads", "looks at it", "numpy")


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("touch", first(TOUCHES, "writes", "numpy", why="other ways to a weight"))
def test_user_code_finds_the_weights(touch: str, tmp_path: Path) -> None:
    file = written(made(), tmp_path, "one file")
    mine, theirs, module = Touches(TOUCHES[touch]), Touches(TOUCHES[touch]), without_values()
    ours = predict(module, in_place(file, tmp_path), callbacks=[mine])
    assert_equal(ours, predict(made(), callbacks=[theirs]), "predictions")
    assert_equal(mine.found, theirs.found, "found")
    assert ("net.blocks.2.inner.weight" in in_memory(module)) == (touch not in READS)


@pytest.mark.rest("takes tenths of a second")
def test_training_has_weights_in_memory(tmp_path: Path) -> None:
    file = written(made(), tmp_path, "one file")

    def from_file() -> pl.LightningModule:
        module = made()
        module.load_state_dict(made().state_dict())
        return module

    strategy = in_place(file, tmp_path)
    ours = fit(without_values, vectors(), strategy, recorded="losses")
    plain = fit(from_file, vectors(), recorded="losses")
    assert_equal(ours.state, plain.state, "state")


# ---------------------------------------------------------------------- faults


class Meanwhile(Callback):
    """Something happens to the file between two batches."""

    def __init__(self, happens: Callable[[], Any]) -> None:
        self.happens = happens

    def on_predict_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
        if batch_idx == 1:
            self.happens()


@pytest.mark.rest("takes tenths of a second")
def test_a_forked_process_reads_them(tmp_path: Path) -> None:
    module, ended = without_values(), list[int]()

    def forks() -> None:
        if not (child := os.fork()):
            signal.alarm(20)
            os._exit(7 if torch.equal(next(module.parameters()), next(made().parameters())) else 1)
        ended.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    predict(module, in_place(written(made(), tmp_path, "one file"), tmp_path), callbacks=[Meanwhile(forks)])
    assert ended == [7]


@pytest.mark.rest("takes tenths of a second")
def test_a_file_that_is_replaced_changes_nothing(tmp_path: Path) -> None:
    file = written(made(), tmp_path, "one file")

    def replaced() -> None:
        (tmp_path / "other").write_bytes(b"another model")
        (tmp_path / "other").replace(file)

    ours = predict(without_values(), in_place(file, tmp_path), callbacks=[Meanwhile(replaced)])
    assert_equal(ours, predict(made()), "predictions")


@pytest.mark.rest("takes tenths of a second")
def test_a_file_that_is_replaced_between_two_runs_changes_nothing(tmp_path: Path) -> None:
    """The module has the file of before mapped, as it has without this strategy."""
    file = written(made(), tmp_path, "one file")
    module, trainer = without_values(), trainer_for(in_place(file, tmp_path))
    trainer.predict(module, loader(vectors()))
    (tmp_path / "other").write_bytes(b"another model")
    (tmp_path / "other").replace(file)
    assert_equal(trainer.predict(module, loader(vectors())), predict(made()), "predictions")


@pytest.mark.rest("takes tenths of a second")
def test_a_weight_whose_file_is_written_after_a_run_has_another_digest(tmp_path: Path) -> None:
    """The digest was that of the first look, though the weight shows what the file has now."""
    file = written(made(), tmp_path, "one file")
    module = without_values()
    predict(module, in_place(file, tmp_path))
    weights = [weight for weight in module.parameters() if place_of(weight) is not None]
    before = [digest(weight) for weight in weights]
    assert before == [digest(weight) for weight in weights]
    content = bytearray(file.read_bytes())
    at = int.from_bytes(content[:8], "little") + 8  # behind the header
    with open(file, "r+b") as stream:
        stream.seek(at)
        stream.write(bytes(len(content) - at))
    assert not any(weight.any() for weight in weights)
    assert not set(before) & {digest(weight) for weight in weights}


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("how", ["cut off", "written"])
def test_a_file_that_is_changed_ends_in_an_error(how: str, tmp_path: Path) -> None:
    file = written(made(), tmp_path, "one file")
    length = file.stat().st_size

    def changed() -> None:
        if how == "cut off":
            os.truncate(file, length // 2)
        else:
            os.utime(file, (1, 1))

    with pytest.raises(OSError, match="was changed while a run reads it") as caught:
        predict(without_values(), in_place(file, tmp_path), callbacks=[Meanwhile(changed)])
    assert caught.value.filename == str(file)


def test_a_file_that_is_written_while_it_is_read_ends_in_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not at the next read, which may never come."""
    file = written(made(), tmp_path, "one file")
    preadv = os.preadv

    def and_written(*args: Any) -> int:
        count = preadv(*args)
        os.utime(file, (1, 1))
        return count

    place, reader = FilePlace(str(file), 0, identity_of(file.stat())), WeightReader()
    reader.open(place)
    monkeypatch.setattr(os, "preadv", and_written)
    read = reader.read([place], [torch.empty(64, dtype=torch.uint8)])
    with pytest.raises(OSError, match="was changed while a run reads it"):
        read.result()


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("fault", ["read error", "too short"])
def test_a_read_that_fails_ends_in_an_error(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(made(), tmp_path, "one file")

    def fails(*_: Any) -> int:
        if fault == "too short":
            return 0
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    module = without_values()
    happens = Meanwhile(lambda: monkeypatch.setattr(os, "preadv", fails))
    with pytest.raises(OSError, match=r"Weights could not be read: Input|ends .* bytes too early"):
        predict(module, in_place(file, tmp_path), callbacks=[happens])
    monkeypatch.undo()
    assert_equal(dict(module.state_dict()), dict(made().state_dict()), "state")  # the next read may succeed


@pytest.mark.rest("takes tenths of a second")
def test_short_reads_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(made(), tmp_path, "one file")
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda d, b, at: preadv(d, [b[0][:300]], at))
    assert_equal(predict(without_values(), in_place(file, tmp_path)), predict(made()), "predictions")
