"""The recipe that generates: the tokens of plain Lightning, padding, resumed runs, adapters, chats, wrong input."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from examples import generate_llm
from tests.support.tiers import first

PROMPTS = ["The value of the expression is", "In", "See also the section of", "Changed", "A generator"]
CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model whose tokens differ by prompt."""
    folder = tmp_path_factory.mktemp("model")
    _, tokenizer = generate_llm.read_config(None)
    tokenizer.chat_template = CHAT
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        max_position_embeddings=64, initializer_range=0.3, bos_token_id=None, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(PROMPTS))
    return file


def run(model: Path, prompts: Path, name: str, *more: str) -> list[dict[str, Any]]:
    """Generates in float32 on the CPU, and returns the rows of the output."""
    output = prompts.parent / f"{name}.jsonl"
    run_on = ["--precision", "32-true", "--accelerator", "cpu", "--batch-size", "2", "--new-tokens", "6"]
    generate_llm.main(["--model", str(model), "--prompts", str(prompts), *run_on, "--output", str(output), *more])
    return [json.loads(line) for line in output.read_text().rstrip("\n").split("\n")]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    "more",
    first(
        [[], ["--temperature", "1", "--top-p", "0.9"], ["--precision", "bf16-true"], ["--chat"]],
        [],
        why="the recipe's other options",
    ),
    ids=" ".join,
)
def test_tokens_are_those_of_plain_lightning(more: list[str], model: Path, prompts: Path) -> None:
    rows = run(model, prompts, "ours", *more)
    assert rows == run(model, prompts, "plain", "--strategy", "auto", *more)
    asked = [row["messages"][0]["content"] if "--chat" in more else row["prompt"] for row in rows]
    assert asked == PROMPTS
    assert len({row["completion"] for row in rows}) == len(rows)
    assert all(0 < row["tokens"] <= 6 for row in rows)


@pytest.mark.long("takes a second or more")
def test_a_completion_is_the_same_alone_and_in_a_batch(model: Path, prompts: Path) -> None:
    """The shorter prompts of a batch are padded: on the right, or visible, padding would change their completions."""
    assert run(model, prompts, "one", "--batch-size", "1") == run(model, prompts, "five", "--batch-size", "5")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "more", first([[], ["--temperature", "1"]], ["--temperature", "1"], why="nothing is drawn"), ids=" ".join
)
def test_an_interrupted_run_resumes(
    more: list[str], model: Path, prompts: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(model, prompts, "whole", *more)
    step = generate_llm.Generate.predict_step

    def stops(self: generate_llm.Generate, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 2:
            raise RuntimeError("the power fails")
        return step(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(generate_llm.Generate, "predict_step", stops)
        with pytest.raises(RuntimeError, match="the power fails"):
            run(model, prompts, "part", *more)
    output = prompts.parent / "part.jsonl"
    text = output.read_text()
    assert text.count("\n") == 4
    output.write_text(text[: len(text) - 10])  # the last line was cut off: its batch is generated again
    assert run(model, prompts, "part", "--resume", *more) == whole

    with pytest.raises(SystemExit):
        run(model, prompts, "part", "--resume", *more)
    assert "has all 5 prompts" in capsys.readouterr().err
    output.write_text(json.dumps({**whole[0], "prompt": "another"}) + "\n")
    with pytest.raises(SystemExit):
        run(model, prompts, "part", "--resume", *more)
    assert "line 1, is of another prompt" in capsys.readouterr().err


def test_a_completion_ends_at_the_end_token(model: Path, tmp_path: Path) -> None:
    """While other rows of the batch continue, generate adds padding."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = tokenizer.eos_token_id
    module = generate_llm.Generate(AutoModelForCausalLM.from_pretrained(model), tokenizer, tmp_path / "out.jsonl", {})
    word = tokenizer("of")["input_ids"]

    def generate(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        return torch.cat([input_ids, torch.tensor([[*word, end, *word, *word[1:]], [*word, *word, *word]])], 1)

    module.model.generate = generate
    module.predict_step([{"prompt": "The"}, {"prompt": "The value"}], 0)
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(row["completion"], row["tokens"]) for row in rows] == [("of", len(word) + 1), ("ofofof", 3 * len(word))]


@pytest.mark.long("takes a second or more")
def test_adapters_are_used(model: Path, prompts: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear", init_lora_weights=False)
    get_peft_model(base, lora).save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.save_pretrained(tmp_path / "adapter")
    rows = run(tmp_path / "adapter", prompts, "ours")
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "adapter")
    inputs = tokenizer(rows[1]["prompt"], return_tensors="pt", return_token_type_ids=False)
    tokens = adapted.generate(**inputs, max_new_tokens=6, do_sample=False, pad_token_id=0)[
        0, len(inputs["input_ids"][0]) :
    ]
    assert rows[1]["completion"] == tokenizer.decode(tokens, skip_special_tokens=True)
    assert rows != run(model, prompts, "base")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--prompts", "no.txt"], "--prompts no.txt: not found"),
        (["--prompts", "empty.txt"], "the file is empty"),
        (["--prompts", "broken.jsonl"], "line 2: not JSON"),
        (["--prompts", "columns.jsonl"], 'prompt 1: found the columns text. Expected "prompt" or "messages"'),
        (["--prompt", ""], "prompt 1: the prompt is empty"),
        (["--chat"], "prompt 1: messages need a tokenizer with a chat template"),
        (["--model", "/no/such/model"], "--model /no/such/model: not found"),
        (["--model", "adapter"], "these adapters do not name their base model"),
        (["--new-tokens", "2048"], "expected at most 2048, as the model reads"),
        (["--new-tokens", "0"], "--new-tokens 0: expected a number above 0"),
        (["--top-p", "2"], "--top-p 1 or less"),
        (["--resume"], "--resume: out.jsonl not found"),
        (["--output", "."], "expected a file, got a folder"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_errors_in_the_input_are_reported_before_any_work(
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty.txt").write_text("\n")
    Path("broken.jsonl").write_text('{"prompt": "fine"}\n{"prompt":\n')
    Path("columns.jsonl").write_text('{"text": "not a prompt"}\n')
    Path("adapter").mkdir()
    Path("adapter/adapter_config.json").write_text('{"base_model_name_or_path": null}')
    with pytest.raises(SystemExit) as stop:
        generate_llm.main(["--output", "out.jsonl", *arguments])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("out.jsonl").exists()
