"""The recipe for vision-language models: labels, frozen parts, images of several sizes, wrong input."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from tokenizers import ByteLevelBPETokenizer, Tokenizer
from transformers import (
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from examples import finetune_vlm
from tests.examples.small_recipes import assert_same, common, run, write_rows


@pytest.mark.long("the first tier trains every weight")
def test_a_frozen_vision_tower_stays_as_it_is(folder: Path) -> None:
    before = dict(run("vlm", "base", "--steps", "1").model.state_dict())
    arguments = ["--model", "base/model", "--freeze-vision"]
    ours = run("vlm", "ours", *arguments)
    assert_same(ours, run("vlm", "plain", *arguments, "--strategy", "auto"))
    changed = [name for name, value in ours.model.state_dict().items() if not torch.equal(value, before[name])]
    assert any("language_model" in name for name in changed)
    assert not any("vision_tower" in name for name in changed)


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


@pytest.mark.long("the first tier has LLaVA")
def test_images_of_several_sizes_are_trained(folder: Path) -> None:
    arguments = ["--model", str(qwen(folder / "qwen")), "--steps", "3"]
    assert_same(run("vlm", "ours", *arguments), run("vlm", "plain", *arguments, "--strategy", "auto"))


def test_a_model_without_a_vision_tower_is_named(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match="--freeze-vision: Linear has no module whose name ends in vision_tower"):
        finetune_vlm.choose_weights(torch.nn.Linear(1, 1), finetune_vlm.parse(["--freeze-vision"]))

    config, processor = common.small_llava()
    config.text_config.save_pretrained("text")
    processor.tokenizer.save_pretrained("text")
    with pytest.raises(SystemExit):
        run("vlm", "run", "--model", "text")
    assert "Expected a processor of images with a chat template" in capsys.readouterr().err


def test_only_the_answer_counts() -> None:
    """Answers of several lengths; the rest of a row is the image, the question and padding."""
    _, processor = common.small_llava()
    image = Image.new("RGB", (8, 8))
    rows = [{"image": image, "question": "What is this?", "answer": answer} for answer in ("six", "a flower in six")]
    encode = finetune_vlm.Encoder(processor)
    batch = encode(rows)
    end, labels = processor.tokenizer.eos_token, batch["labels"]
    counted = [row[row != common.IGNORED].tolist() for row in labels]
    assert processor.tokenizer.batch_decode(counted) == [f"six{end}", f"a flower in six{end}"]
    assert torch.equal(labels[labels != -100], batch["input_ids"][labels != -100])
    texts = processor.tokenizer.batch_decode(
        [row[mask.bool()] for row, mask in zip(*map(batch.get, ("input_ids", "attention_mask")), strict=True)]
    )
    assert [text.replace("<image>", "") for text in texts] == [f"What is this?\n{row['answer']}{end}" for row in rows]
    questions = encode.questions(rows)["input_ids"]
    assert torch.equal(questions, batch["input_ids"][:, : questions.shape[1]])


@pytest.mark.rest("takes tenths of a second")
def test_the_default_data_have_both_questions() -> None:
    rows = common.digits_and_photographs()
    assert len(rows) == 1997
    assert {row["question"] for row in rows} == {"Which digit is this?", "What is this?"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"image": "0.png", "text": "a wall"}, "line 1: found the columns image, text; expected texts"),
        ({"image": "no.png", "question": "?", "answer": "!"}, "line 1: [Errno 2] No such file or directory: 'no.png'"),
        ('{"image": ', "line 1: not JSON"),
    ],
)
def test_wrong_rows_are_refused(row: Any, said: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_rows(folder / "wrong.jsonl", [row])
    with pytest.raises(SystemExit):
        run("vlm", "run", "--data", "wrong.jsonl")
    assert said in capsys.readouterr().err
