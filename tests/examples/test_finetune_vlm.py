"""The recipe for vision-language models: bitwise as plain Lightning, resumed runs, labels, frozen parts, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from examples import finetune_vlm
from tests.support.tiers import first

COLOURS = ("red", "green", "blue", "yellow", "dark orange")


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finetune_vlm, "NEW_TOKENS", 4)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images of several sizes, and rows of them in ``rows.jsonl``, with both pairs of names."""
    rows = []
    for number, colour in enumerate(COLOURS * 5):
        Image.new("RGB", (40 + number, 30), colour.replace(" ", "")).save(tmp_path / f"{number}.png")
        question, answer = ("question", "answer") if number % 2 else ("prompt", "completion")
        rows.append({"image": f"{number}.png", question: "What is this?", answer: f"a {colour} wall"})
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    return tmp_path


def run(folder: Path, output: str, *more: str) -> Path:
    """Trains in float32 on the CPU, and returns the output folder."""
    size = ["--batch-size", "2", "--accumulate-grad-batches", "2", "--every", "2", "--lr", "1e-2"]
    run_on = ["--precision", "32-true", "--accelerator", "cpu"]
    arguments = ["--data", str(folder / "rows.jsonl"), *size, *run_on, "--output", str(folder / output), *more]
    finetune_vlm.main(arguments)
    return folder / output


def weights(output: Path) -> dict[str, Tensor]:
    """Those of the last checkpoint."""
    return torch.load(output / "last.ckpt", weights_only=True)["state_dict"]


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def said(capsys: pytest.CaptureFixture[str]) -> list[str]:
    return [line for line in capsys.readouterr().out.splitlines() if line.startswith(("step ", "Held out: "))]


@pytest.mark.parametrize(
    "more",
    first(
        [[], ["--no-gradient-checkpointing"], ["--precision", "bf16-mixed"], ["--precision", "bf16-true"]],
        [],
        why="the first tier has one precision",
    ),
    ids=" ".join,
)
def test_weights_and_answers_are_those_of_plain_lightning(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(folder, "ours", "--steps", "3", *more)
    lines = said(capsys)
    plain = run(folder, "plain", "--steps", "3", "--strategy", "auto", *more)
    assert [line.split()[1] for line in lines if line.startswith("step")] == ["0/3", "2/3", "3/3"]
    assert sum("Generated: " in line for line in lines) == 2  # all that are held out
    assert lines == said(capsys)
    assert_same(weights(ours), weights(plain))
    saved = dict(AutoModelForImageTextToText.from_pretrained(ours / "model").state_dict())
    trained = {name.removeprefix("model."): value for name, value in weights(ours).items()}
    assert_same(saved, trained)


@pytest.mark.rest("the recipe for language models resumes in the first tier")
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(folder, "whole", "--steps", "6")
    step = finetune_vlm.FineTune.training_step

    def stops(self: finetune_vlm.FineTune, *batch: Any) -> Tensor:
        if self.global_step == 5:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_vlm.FineTune, "training_step", stops)
        with pytest.raises(RuntimeError, match="the power fails"):
            run(folder, "part", "--steps", "6")
    last = folder / "part" / "last.ckpt"
    assert torch.load(last, weights_only=True)["global_step"] == 4
    assert_same(weights(run(folder, "part", "--steps", "6", "--resume", str(last))), weights(whole))


@pytest.mark.rest("the first tier trains every weight")
@pytest.mark.parametrize("more", [["--lora", "4"], ["--freeze-vision"]], ids=" ".join)
def test_parts_are_trained_from_a_folder(more: list[str], folder: Path) -> None:
    """Adapters are outside of the vision tower, and a frozen tower stays as it is."""
    base = run(folder, "base", "--steps", "1")
    arguments = ["--model", str(base / "model"), "--steps", "3", *more]
    ours, plain = run(folder, "ours", *arguments), run(folder, "plain", *arguments, "--strategy", "auto")
    trained = weights(ours)
    if more == ["--freeze-vision"]:
        assert_same(trained, weights(plain))
        changed = [name for name, value in weights(base).items() if not torch.equal(value, trained[name])]
        assert any("language_model" in name for name in changed)
        assert not any("vision_tower" in name for name in changed)
    else:  # plain Lightning's checkpoint has the frozen weights, too
        assert_same(trained, {name: value for name, value in weights(plain).items() if "lora_" in name})
        assert all("lora_" in name and "vision_tower" not in name for name in trained)
        assert any(bool(value.any()) for name, value in trained.items() if "lora_B" in name)
        assert (ours / "adapter" / "adapter_config.json").is_file()


def qwen(folder: Path) -> Path:
    """A folder with a small Qwen2-VL: its images have several sizes, and its processor makes more inputs than LLaVA's."""
    special = ["<|end|>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"]
    bpe = ByteLevelBPETokenizer()
    bpe.train_from_iterator(["What is this?"], vocab_size=300, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(bpe.to_str()), eos_token="<|end|>", pad_token="<|end|>",
        additional_special_tokens=special[1:],
    )  # fmt: skip
    template = (
        "{% for part in messages[0]['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
        "{% else %}{{ part['text'] }}{% endif %}{% endfor %}"
    )
    images = Qwen2VLImageProcessor(min_pixels=28 * 28, max_pixels=56 * 56)
    processor = Qwen2VLProcessor(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=template)
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    text = {
        "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "eos_token_id": 0, "pad_token_id": 0,
    }  # fmt: skip
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2}
    ids = dict(zip(names, tokenizer.convert_tokens_to_ids(special[1:]), strict=True))
    torch.manual_seed(0)
    Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **ids)).save_pretrained(
        folder
    )
    processor.save_pretrained(folder)
    return folder


@pytest.mark.rest("the first tier has LLaVA")
def test_images_of_several_sizes_are_trained(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(qwen(folder / "qwen")), "--steps", "3"]
    ours = run(folder, "ours", *arguments)
    lines = said(capsys)
    assert_same(weights(ours), weights(run(folder, "plain", *arguments, "--strategy", "auto")))
    assert lines == said(capsys)


def test_a_model_without_a_vision_tower_is_named(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = finetune_vlm.make_parser().parse_args(["--freeze-vision"])
    with pytest.raises(ValueError, match="--freeze-vision: Linear has no module whose name ends in vision_tower"):
        finetune_vlm.choose_weights(torch.nn.Linear(1, 1), options)

    config, processor = finetune_vlm.small_model()
    config.text_config.save_pretrained(tmp_path / "text")
    processor.tokenizer.save_pretrained(tmp_path / "text")
    with pytest.raises(SystemExit):
        run(folder, "run", "--model", str(tmp_path / "text"))
    assert "Expected a processor of images with a chat template" in capsys.readouterr().err


def test_only_the_answer_counts() -> None:
    """Answers of several lengths; the rest of a row is the image, the question and padding."""
    _, processor = finetune_vlm.small_model()
    image = Image.new("RGB", (8, 8))
    rows = [{"image": image, "question": "What is this?", "answer": answer} for answer in ("six", "a flower in six")]
    encode = finetune_vlm.Encoder(processor)
    batch = encode(rows)
    end, labels = processor.tokenizer.eos_token, batch["labels"]
    counted = [row[row != finetune_vlm.IGNORED].tolist() for row in labels]
    assert processor.tokenizer.batch_decode(counted) == [f"six{end}", f"a flower in six{end}"]
    assert torch.equal(labels[labels != -100], batch["input_ids"][labels != -100])
    texts = processor.tokenizer.batch_decode(
        [row[mask.bool()] for row, mask in zip(*map(batch.get, ("input_ids", "attention_mask")), strict=True)]
    )
    assert [text.replace("<image>", "") for text in texts] == [f"What is this?\n{row['answer']}{end}" for row in rows]
    questions = encode.questions(rows)["input_ids"]
    assert torch.equal(questions, batch["input_ids"][:, : questions.shape[1]])


def test_the_default_data_have_both_questions() -> None:
    rows = finetune_vlm.read_rows(None)
    assert len(rows) == 1997
    assert {row["question"] for row in rows} == {"Which digit is this?", "What is this?"}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--data", "no.jsonl"], "--data no.jsonl: not found"),
        (["--data", "."], "found a folder. Expected a .jsonl file"),
        (["--data", "0.png"], "found .png. Expected a .jsonl file"),
        (["--data", "columns.jsonl"], "line 1: found the columns image, text; expected texts"),
        (["--data", "missing.jsonl"], "line 1: [Errno 2] No such file or directory: 'no.png'"),
        (["--data", "broken.jsonl"], "broken.jsonl, line 1: "),
        (["--batch-size", "30"], "has 23 training rows. Expected at least 30"),
        (["--model", "/no/such/model"], "--model /no/such/model: not found"),
        (["--steps", "0"], "--steps 0: expected a number above 0"),
        (["--lora", "-1"], "--lora -1: expected a number above 0"),
        (["--resume", "no.ckpt"], "--resume no.ckpt: not found"),
        (
            ["--resume", "other.ckpt"],
            "--resume other.ckpt: a checkpoint of another model or of a run with other options",
        ),
        (["--gpu-memory", "16"], "gpu_memory takes a number with a unit"),
        (["--strategy", "ddp_cpu"], "invalid choice: 'ddp_cpu'"),
        (["--output", "rows.jsonl"], "--output rows.jsonl: expected a folder, got a file"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_errors_in_the_input_are_reported_before_any_work(
    arguments: list[str],
    expected: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(folder)
    Path("columns.jsonl").write_text('{"image": "0.png", "text": "a wall"}\n')
    Path("missing.jsonl").write_text('{"image": "no.png", "question": "What?", "answer": "Nothing."}\n')
    Path("broken.jsonl").write_text('{"image": \n')
    state = {"state_dict": {"net.weight": torch.ones(2)}, "optimizer_states": [{"param_groups": [{"params": [0]}]}]}
    torch.save({"epoch": 0, "global_step": 1, **state}, "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        finetune_vlm.main(["--data", "rows.jsonl", "--batch-size", "2", "--output", "run", *arguments])
    assert stop.value.code == 2
    assert expected in capsys.readouterr().err
    assert not Path("run").exists()
