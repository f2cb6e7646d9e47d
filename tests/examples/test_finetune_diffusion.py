"""The recipe for diffusion models: bitwise as plain Lightning, resumed, its LoRA loaded again, and wrong input."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import FluxPipeline, FluxTransformer2DModel
from PIL import Image

from examples import finetune_diffusion as recipe
from tests.support.tiers import first

WIDTHS = [64, 64, 64, 64, 64, 96, 96, 96]

pytestmark = [
    # torch's own remark about nn.RMSNorm under autocast, which leaves its weight in float32.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A tiny model whose VAE is not trained, and images of two sizes."""
    folder = tmp_path_factory.mktemp("given")
    data = folder / "data"
    data.mkdir()
    for number, width in enumerate(WIDTHS):
        Image.new("RGB", (width, 64), (20 * number, 0, 0)).save(data / f"{number}.png")
        (data / f"{number}.txt").write_text(f"red number {number}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "VAE_STEPS", 0)
        model = recipe.make_tiny_model(folder / "tiny", recipe.read_pairs(data), seed=0)
    return ["--model", str(model), "--data", str(data), "--resolution", "32", "--batch-size", "2", "--lr", "1e-2"]


@pytest.fixture(autouse=True)
def few_sample_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "SAMPLE_STEPS", 2)


@pytest.fixture(autouse=True)
def aligned_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that safetensors maps from a file may begin at any multiple of 8 bytes, and MKL's products of one row with a
    float32 matrix round by that. A copy begins where torch's allocator, the strategy and GPUs let tensors begin.
    """
    load = recipe.load_transformer

    def loaded(options: Any) -> Any:
        transformer = load(options)
        for parameter in transformer.parameters():
            parameter.data = parameter.data.clone()
        return transformer

    monkeypatch.setattr(recipe, "load_transformer", loaded)


def trained(module: recipe.Finetune) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in module.transformer.named_parameters() if p.requires_grad}


def assert_same(one: recipe.Finetune, other: recipe.Finetune) -> None:
    torch.testing.assert_close(trained(one), trained(other), rtol=0, atol=0)
    assert one.trainer.callback_metrics["val_loss"] == other.trainer.callback_metrics["val_loss"]


@pytest.mark.parametrize(
    "more",
    first(
        [
            ["--gradient-checkpointing"],
            ["--full"],
            ["--ema", "0.5"],
            ["--quantize-8bit", "--precision", "bf16-true"],
            ["--precision", "32-true"],
        ],
        ["--gradient-checkpointing"],
        why="the recipe's other options",
    ),
    ids=" ".join,
)
def test_weights_are_those_of_plain_lightning(more: list[str], given: list[str], tmp_path: Path) -> None:
    def run(strategy: str) -> recipe.Finetune:
        options = [
            "--steps",
            "2",
            "--validate-every",
            "1",
            "--strategy",
            strategy,
            "--output",
            str(tmp_path / strategy),
        ]
        return recipe.main([*given, *more, *options])

    ours, plain = run("superpipeline"), run("auto")
    assert_same(ours, plain)
    assert ours.trainer.strategy.stats().fetched_layers
    samples = [tmp_path / strategy / "sample-000002.png" for strategy in ("superpipeline", "auto")]
    assert samples[0].read_bytes() == samples[1].read_bytes()


def test_the_base_has_8_bits(given: list[str]) -> None:
    options = recipe.make_parser().parse_args([*given, "--quantize-8bit", "--lora", "4"])
    kinds = {name: type(each) for name, each in recipe.load_transformer(options).named_parameters()}
    quantised = {name for name, kind in kinds.items() if kind is not torch.nn.Parameter}
    assert quantised == {name for name in kinds if name.endswith("base_layer.weight")} != set()


@pytest.fixture(scope="module")
def whole(given: list[str], tmp_path_factory: pytest.TempPathFactory) -> recipe.Finetune:
    """Four steps of a LoRA, with its ``output`` beside it."""
    output = tmp_path_factory.mktemp("whole")
    module: Any = recipe.main([*given, "--steps", "4", "--validate-every", "2", "--output", str(output)])
    module.output = output
    return module


def test_the_lora_can_be_loaded_into_the_pipeline(given: list[str], whole: Any) -> None:
    pipe = FluxPipeline.from_pretrained(given[1], dtype=torch.bfloat16)
    pipe.load_lora_weights(whole.output)
    loaded = {
        name.replace("default_0", "default"): p for name, p in pipe.transformer.named_parameters() if "lora_" in name
    }
    assert set(loaded) == set(trained(whole))
    for name, parameter in trained(whole).items():
        torch.testing.assert_close(loaded[name].float(), parameter, rtol=1e-2, atol=1e-6)  # loaded in 16 bits
    assert any(parameter.any() for name, parameter in loaded.items() if "lora_B" in name)


@pytest.mark.parametrize("more", first([[], ["--ema", "0.5"]], [], why="averages beside the weights"), ids=str)
def test_an_interrupted_run_resumes(
    more: list[str], given: list[str], whole: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of a run, after an error in its third step, is that of a whole run."""
    options = [*given, *more, "--steps", "4", "--validate-every", "2"]
    if more:
        whole = recipe.main([*options, "--output", str(tmp_path / "whole")])
    step = recipe.Finetune.training_step

    def interrupted(self: recipe.Finetune, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.global_step == 2:
            raise RuntimeError("interrupted")
        return step(self, batch, batch_idx)

    options += ["--output", str(tmp_path / "run")]
    with monkeypatch.context() as patch:
        patch.setattr(recipe.Finetune, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="interrupted"):
            recipe.main(options)
    saved = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert more or all("lora_" in name for name in saved["state_dict"])
    resumed = recipe.main([*options, "--resume"])
    assert resumed.trainer.global_step == 4
    assert_same(resumed, whole)
    assert len([*(tmp_path / "run" / "cache").iterdir()]) == len(WIDTHS)


def test_a_run_that_has_ended_is_continued_with_more_steps(
    given: list[str], whole: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*given, "--validate-every", "2", "--output", str(tmp_path)]
    recipe.main([*options, "--steps", "2"])
    assert_same(recipe.main([*options, "--steps", "4", "--resume"]), whole)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    torch.save({**saved, "state_dict": {"net.weight": torch.ones(2)}}, tmp_path / "last.ckpt")
    with pytest.raises(SystemExit):
        recipe.main([*options, "--steps", "6", "--resume"])
    assert "is a checkpoint of another model or of a run with other options" in capsys.readouterr().err


@pytest.mark.rest("a second run of the same recipe")
def test_a_whole_model_is_saved_as_diffusers_does(given: list[str], tmp_path: Path) -> None:
    module = recipe.main([*given, "--full", "--steps", "1", "--output", str(tmp_path)])
    saved = FluxTransformer2DModel.from_pretrained(tmp_path, subfolder="transformer").state_dict()
    torch.testing.assert_close(saved, dict(module.transformer.state_dict()), rtol=0, atol=0)


@pytest.mark.long("a training until it has learned")
def test_the_loss_falls_on_drawn_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "VAE_STEPS", 20)
    module = recipe.main(["--steps", "60", "--output", str(tmp_path)])
    progress: Any = next(each for each in module.trainer.callbacks if isinstance(each, recipe.Progress))
    assert sum(progress.losses[-10:]) < sum(progress.losses[:10]) / 1.5


def test_a_batch_has_images_of_one_size() -> None:
    sizes = [(32, 32), (40, 28), (32, 32), (40, 28), (32, 32), (28, 40), (32, 32)]
    module = SimpleNamespace(global_step=0, seed=0)
    buckets = recipe.Buckets(sizes, batch_size=2, steps=4, module=module)
    assert len(buckets) == 4
    one_round = [*buckets]
    assert sorted(index for batch in one_round for index in batch) == [*range(len(sizes))]
    assert all(len({sizes[index] for index in batch}) == 1 and len(batch) <= 2 for batch in one_round)
    module.global_step = 4
    assert [*buckets] == [*islice(buckets.endless(), 4, 8)] != one_round


def test_images_have_their_own_aspect_ratio(given: list[str], tmp_path: Path) -> None:
    options = recipe.make_parser().parse_args([*given, "--output", str(tmp_path)])
    items = recipe.encode(options, recipe.read_pairs(options.data)[4:6])
    assert [size for _, size in items] == [(32, 32), (40, 28)]
    one = torch.load(items[1][0], weights_only=True)
    assert one["latents"].shape == (10 * 7, 16)
    assert one["ids"][-1].tolist() == [0, 6, 9]


def test_captions_of_metadata(tmp_path: Path) -> None:
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(tmp_path / f"{name}.png")
    lines = [{"file_name": "a.png", "text": "black"}, {"file_name": "b.png", "text": "darker"}]
    (tmp_path / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert recipe.read_pairs(tmp_path) == [(tmp_path / "a.png", "black"), (tmp_path / "b.png", "darker")]


def bad_data(folder: Path, kind: str) -> Path:
    folder.mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (8, 8)).save(folder / f"{name}.png")
        (folder / f"{name}.txt").write_text("black")
    if kind == "no caption":
        (folder / "b.txt").unlink()
    elif kind == "no image":
        (folder / "b.png").write_text("no image")
    elif kind == "one image":
        (folder / "b.png").unlink()
    elif kind == "no text":
        (folder / "metadata.jsonl").write_text('{"file_name": "a.png"}\n')
    elif kind == "no file":
        (folder / "metadata.jsonl").write_text('{"file_name": "c.png", "text": "black"}\n')
    return folder


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("no caption", "b.txt"),
        ("no image", "b.png"),
        ("one image", "found 1 images"),
        ("no text", '"text"'),
        ("no file", "c.png"),
    ],
)
def test_wrong_data_is_refused(kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bad_data(tmp_path / "data", kind)
    with pytest.raises(SystemExit):
        recipe.main(["--data", str(data), "--output", str(tmp_path / "run")])
    assert said in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.png": b"no picture", "a.txt": b"a"}, "a.png is not a readable image"),
        ({"a.png": b""}, "a.png has no caption. Expected a.txt"),
    ],
)
def test_images_that_cannot_be_used_are_named(files: dict[str, bytes], said: str, tmp_path: Path) -> None:
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=said):
        recipe.read_pairs(tmp_path)


def test_a_resumed_run_keeps_what_it_trains_and_when_it_validates(tmp_path: Path) -> None:
    (tmp_path / "last.ckpt").touch()
    (tmp_path / "options.json").write_text('{"full": false, "lora": 4, "validate_every": 2}')

    def read(*given: str) -> Any:
        options = recipe.make_parser().parse_args([*given, "--output", str(tmp_path), "--resume"])
        recipe.check(options)
        return options

    assert (read("--steps", "6").lora, read("--steps", "6").validate_every) == (4, 2)
    for other in (["--full"], ["--lora", "8"]):
        with pytest.raises(ValueError, match="had --lora 4"):
            read("--steps", "6", *other)
