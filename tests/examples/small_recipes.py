"""The recipes for training at a small size: data of each, and a run of seconds."""

from __future__ import annotations

import itertools
import json
import wave
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, WhisperForConditionalGeneration

from examples import finetune_diffusion, finetune_llm, finetune_moe, finetune_speech, finetune_vision, finetune_vlm

common = finetune_llm.common
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
QWEN: dict[str, Any] = {
    **LLAMA, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 32,
    "num_key_value_heads": 2, "head_dim": 16, "num_experts": 8, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **LLAMA, "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_key_value_heads": 2, "num_local_experts": 4,
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]
ROWS: list[dict[str, Any]] = [
    {"messages": CHAT}, {"prompt": "2 + 2 =", "completion": " 4"}, {"text": "A text. " * 8}
]  # fmt: skip
COLOURS = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
WIDTHS = [64, 64, 64, 64, 64, 96, 96, 96]


@dataclass(frozen=True)
class Small:
    """A recipe, its LightningModule, its arguments (paths are relative to the data), and the class that loads what it saves."""

    recipe: ModuleType
    module: type[Any]
    arguments: tuple[str, ...]
    loads: Any = None
    trains: str = "--steps 4 --batch-size 2 --accumulate-grad-batches 2 --validate-every 2 --lr 1e-2"


SMALL = {
    "llm": Small(
        finetune_llm, finetune_llm.FineTune, ("--model", "llama.json", "--data", "rows.jsonl", "--length", "16"),
        AutoModelForCausalLM,
    ),
    "moe": Small(
        finetune_moe, finetune_moe.FineTune, ("--model", "qwen.json", "--data", "rows.jsonl", "--length", "16"),
        AutoModelForCausalLM,
    ),
    "vlm": Small(finetune_vlm, finetune_vlm.FineTune, ("--data", "photos/rows.jsonl"), AutoModelForImageTextToText),
    "speech": Small(finetune_speech, finetune_speech.FineTune, ("--data", "sound/rows.jsonl"), WhisperForConditionalGeneration),
    "vision": Small(
        finetune_vision, finetune_vision.Classifier, ("--data", "classes"),
        trains="--epochs 2 --batch-size 4 --accumulate-grad-batches 2 --lr 1e-3",
    ),
    "diffusion": Small(
        finetune_diffusion, finetune_diffusion.Finetune, ("--model", "flux", "--data", "photos", "--resolution", "32"),
        trains="--steps 4 --batch-size 2 --validate-every 2 --lr 1e-2",
    ),
}  # fmt: skip


def run(name: str, output: str, *more: str) -> Any:
    """Trains in float32 on the CPU, four steps with a validation after every two. Returns the module with its trainer."""
    small = SMALL[name]
    run_on = ["--precision", "32-true", "--accelerator", "cpu", "--output", output]
    return small.recipe.main([*small.arguments, *small.trains.split(), *run_on, *more])


def assert_same(one: Any, other: Any) -> None:
    """The same trained weights, and the same losses."""
    weights = [{name: p.detach() for name, p in each.named_parameters() if p.requires_grad} for each in (one, other)]
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    assert one.trainer.callback_metrics == other.trainer.callback_metrics


def steps_in(printed: str) -> list[str]:
    """The lines of losses, without the times."""
    return [
        line.split("  ")[0] + " ".join(line.split("  ")[1:3])
        for line in printed.splitlines()
        if line.startswith("step ")
    ]


def write_wave(file: Path, samples: Any, *, rate: int = 16_000, channels: int = 1, width: int = 2) -> None:
    with wave.open(str(file), "wb") as sound:
        sound.setnchannels(channels)
        sound.setsampwidth(width)
        sound.setframerate(rate)
        sound.writeframes(np.asarray(samples, dtype="<i2").tobytes())


def write_rows(file: Path, rows: Any) -> None:
    file.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))


def write_images(folder: Path, count: int, colours: dict[str, tuple[int, int, int]] = COLOURS) -> Path:
    """A folder of images for each colour."""
    for name, colour in colours.items():
        (folder / name).mkdir(parents=True)
        for number in range(count):
            shade: Any = tuple(value * (20 + number) // 40 for value in colour)
            Image.new("RGB", (40, 30 + number), shade).save(folder / name / f"{number}.png")
    return folder


def small_tokenizer() -> Any:
    """Trained on a part of the default data."""
    rows = list(itertools.islice(common.python_functions(), 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "python_functions", lambda: rows)
        return common.small_tokenizer()


def write_all(folder: Path) -> None:
    """The data of all recipes, and a tiny Flux whose VAE is not trained."""
    for name, config in (("llama", LLAMA), ("qwen", QWEN), ("mixtral", MIXTRAL)):
        (folder / f"{name}.json").write_text(json.dumps(config))
    write_rows(folder / "rows.jsonl", ROWS * 12)
    (folder / "photos").mkdir()
    questions = []
    for number, width in enumerate(WIDTHS):
        Image.new("RGB", (width, 64), (20 * number, 0, 0)).save(folder / "photos" / f"{number}.png")
        (folder / "photos" / f"{number}.txt").write_text(f"red number {number}")
        question, answer = ("question", "answer") if number % 2 else ("prompt", "completion")
        questions.append({"image": f"{number}.png", question: "What is this?", answer: "wall " * (1 + number % 3)})
    write_rows(folder / "photos" / "rows.jsonl", questions)
    (folder / "sound").mkdir()
    for number in range(12):
        write_wave(folder / "sound" / f"{number}.wav", 20_000 * np.sin(np.arange(16_000) * (0.1 + 0.02 * number)))
    texts = ["one " * (1 + number % 3) + str(number) for number in range(12)]
    write_rows(folder / "sound" / "rows.jsonl", [{"audio": f"{n}.wav", "text": text} for n, text in enumerate(texts)])
    write_images(folder / "classes", 6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(common, "VAE_STEPS", 0)
        common.small_flux(folder / "flux", common.read_pairs(folder / "photos"), seed=0)


def aligned(load: Any) -> Any:
    """Weights that safetensors maps from a file may begin at any multiple of 8 bytes, and MKL's products of one row with a
    float32 matrix round by that. A copy begins where torch's allocator, the strategy and GPUs let tensors begin.
    """

    def loaded(options: Any) -> Any:
        transformer = load(options)
        for parameter in transformer.parameters():
            parameter.data = parameter.data.clone()
        return transformer

    return loaded


def make_small(patch: pytest.MonkeyPatch, tokenizer: Any) -> None:
    """Few tokens and sample steps."""
    patch.setattr(common, "small_tokenizer", lambda: tokenizer)
    patch.setattr(finetune_vlm, "NEW_TOKENS", 4)
    patch.setattr(finetune_diffusion, "SAMPLE_STEPS", 2)
    patch.setattr(finetune_diffusion, "load_transformer", aligned(finetune_diffusion.load_transformer))
