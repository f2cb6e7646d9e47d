"""The recipe for image classifiers: models of two libraries, the head alone, augmented images, wrong input."""

from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification, ViTImageProcessor

from examples import finetune_vision as recipe
from tests.examples.small_recipes import COLOURS, assert_same, common, run, write_images

DATA = Path("classes")


@pytest.mark.long("takes a second or more")
def test_the_saved_model_loads_into_timm_and_continues(folder: Path) -> None:
    trained = run("vision", "run", "--epochs", "1", "--seed", "3")
    assert trained.trainer.datamodule.seed == trained.seed == 3
    model = timm.create_model("local-dir:run/model", pretrained=True)
    torch.testing.assert_close(dict(model.state_dict()), dict(trained.model.state_dict()), rtol=0, atol=0)
    assert model.pretrained_cfg["label_names"] == [*COLOURS]
    again, size, *_ = recipe.load_model("run/model", 2)
    assert (again.num_classes, size) == (2, 32)
    assert torch.equal(again.blocks[0].attn.qkv.weight, model.blocks[0].attn.qkv.weight)


@pytest.mark.long("a second library")
@pytest.mark.parametrize("more", [[], ["--head-only"]], ids=" ".join)
def test_a_model_of_transformers_trains(more: list[str], folder: Path) -> None:
    config = ViTConfig(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, image_size=32)
    ViTForImageClassification(config).save_pretrained("vit")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained("vit")
    ours = run("vision", "ours", "--model", "vit", *more)
    assert_same(ours, run("vision", "plain", "--model", "vit", *more, "--strategy", "auto"))
    saved = AutoModelForImageClassification.from_pretrained("ours/model")
    assert saved.config.id2label == dict(enumerate(COLOURS))
    torch.testing.assert_close(dict(saved.state_dict()), dict(ours.model.state_dict()), rtol=0, atol=0)
    assert recipe.load_model("ours/model", 2)[1:] == (32, (0.5,) * 3, (0.5,) * 3)
    before = ViTForImageClassification.from_pretrained("vit").base_model.state_dict()
    frozen = all(torch.equal(before[name], value) for name, value in ours.model.base_model.state_dict().items())
    assert frozen == bool(more)


def test_one_image_in_ten_is_for_validation_and_never_augmented(folder: Path) -> None:
    images = recipe.Images(DATA, batch_size=2, augment="strong")
    training, validation = images.train_dataloader(), images.val_dataloader()
    files = [{file for file, _ in each.samples} for each in (images.training, images.validation)]
    assert [len(each) for each in files] == [16, 2]
    assert not files[0] & files[1]
    assert all(map(torch.equal, next(iter(validation)), next(iter(validation))))
    first_epoch = [*training]
    assert sum(len(batch) for batch, _ in first_epoch) == 16
    training.sampler.set_epoch(1)
    assert not torch.equal(next(iter(training))[0], first_epoch[0][0])
    training.sampler.set_epoch(0)
    assert torch.equal(next(iter(training))[0], first_epoch[0][0])


@pytest.mark.rest("processes that import torch")
def test_workers_do_not_change_the_images(folder: Path) -> None:
    batches = [[*recipe.Images(DATA, batch_size=8, workers=workers).train_dataloader()] for workers in (0, 2)]
    torch.testing.assert_close(*batches, rtol=0, atol=0)


def test_a_folder_may_have_its_own_validation(tmp_path: Path) -> None:
    write_images(tmp_path / "train", 2)
    write_images(tmp_path / "val", 1)
    images = recipe.Images(tmp_path, batch_size=2)
    assert (images.classes, len(images.training), len(images.validation)) == ([*COLOURS], 6, 3)


def test_digits_are_not_mirrored_by_default(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "write_digits", lambda folder: DATA)
    assert not recipe.Images(batch_size=2).flip
    assert recipe.Images(DATA, batch_size=2).flip
    assert not recipe.Images(DATA, batch_size=2, flip=False).flip


@pytest.mark.long("takes a second or more")
def test_the_default_data_are_digits(tmp_path: Path) -> None:
    folder = common.write_digits(tmp_path)
    assert [each.name for each in sorted(folder.iterdir())] == [str(digit) for digit in range(10)]
    assert len([*folder.glob("*/*.png")]) == 1797
    assert Image.open(folder / "0" / "0000.png").getextrema() == (0, 238)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "empty"], "--data empty: Couldn't find any class folder"),
        (["--data", "one"], "--data one: found one class, red"),
        (["--data", "broken"], "red/9.png is not a readable image"),
        (["--data", "hollow"], "Found no valid file for the classes grey"),
        (["--data", "split"], "train and val have different classes: blue"),
        (["--batch-size", "17"], "found 16 images for training. Expected at least --batch-size 17"),
        (["--model", "vit_bas_patch16_224"], "timm: Unknown model (vit_bas_patch16_224). For example: vit_base_patch"),
        (["--model", "zzz"], "For example: vit_base_patch16_224.augreg_in21k"),
        (["--model", "classes"], "--model classes: expected a folder with config.json"),
        (["--model", "test_vit.no_such_tag"], "--model test_vit.no_such_tag: timm: Invalid pretrained tag"),
        (["--head-only"], "--head-only: needs --model"),
        (["--ema", "1"], "--ema 1.0: expected a decay between 0 and 1"),
        (["--mixup", "0"], "--mixup 0.0: expected a number above 0"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_wrong_input_is_reported_before_any_work(
    arguments: list[str], said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("empty").mkdir()
    write_images(Path("one"), 2, {"red": COLOURS["red"]})
    write_images(Path("broken"), 2)
    Path("broken/red/9.png").write_text("no image")
    write_images(Path("hollow"), 2)
    Path("hollow/grey").mkdir()
    write_images(Path("split/train"), 2)
    write_images(Path("split/val"), 2, {name: COLOURS[name] for name in ("green", "red")})
    with pytest.raises(SystemExit) as stop:
        run("vision", "run", *arguments)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
