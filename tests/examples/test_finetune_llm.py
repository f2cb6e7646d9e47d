"""The recipe that users copy: bitwise as plain Lightning, resumed runs, adapters, labels, packed rows, errors in the input."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import finetune_llm
from tests.support.tiers import first

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 2048, "hidden_size": 32,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "Hello?"},
    {"role": "assistant", "content": "Hi."},
    {"role": "user", "content": "And now?"},
    {"role": "assistant", "content": "Bye."},
]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """Trained on a part of the default data."""
    rows = list(itertools.islice(finetune_llm.python_functions(), 100))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune_llm, "python_functions", lambda: rows)
        return finetune_llm.small_tokenizer()


@pytest.fixture
def folder(tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with ``config.json``, and rows of all kinds in ``rows.jsonl``."""
    monkeypatch.setattr(finetune_llm, "small_tokenizer", lambda: tokenizer)
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    rows: list[dict[str, Any]] = [
        {"messages": CHAT},
        {"prompt": "2 + 2 =", "completion": " 4"},
        {"text": "A text. " * 8},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in rows * 12))
    return tmp_path


def run(folder: Path, output: str, *more: str) -> Path:
    """Trains in float32 on the CPU, and returns the output folder."""
    if "--model" not in more:
        more = ("--model", str(folder / "config.json"), *more)
    size = ["--length", "16", "--batch-size", "2", "--accumulate-grad-batches", "2", "--lr", "1e-2"]
    run_on = ["--precision", "32-true", "--accelerator", "cpu"]
    arguments = ["--data", str(folder / "rows.jsonl"), *size, *run_on, "--output", str(folder / output), *more]
    finetune_llm.main(arguments)
    return folder / output


def weights(folder: Path) -> dict[str, Tensor]:
    return dict(AutoModelForCausalLM.from_pretrained(folder / "model").state_dict())


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


# ---------------------------------------------------------------------- runs


@pytest.mark.rest("eight runs beside the first")
def test_the_first_command_trains_in_one_thread_and_ends_with_its_dial(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(2)
    size = ["--data", str(folder / "rows.jsonl"), "--length", "16", "--batch-size", "2", "--steps", "4"]
    finetune_llm.main([*size, "--accelerator", "cpu", "--output", str(folder / "run")])
    assert torch.get_num_threads() == 1
    run, _, measured = capsys.readouterr().out.partition("Next, k and k'")
    assert re.search(r"step 2/4  loss [\d.]+  val_loss [\d.]+  \d+ s left\n", run)
    rows = [line.split("|") for line in measured.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 2 + 6  # the head, plain Lightning, and the windows
    assert [row[-2].strip() for row in rows[-6:]] == ["yes"] * 6


@pytest.mark.parametrize(
    ("more", "precision"),
    [([], "32-true"), (["--model", "."], "bf16-mixed"), (["--precision", "bf16-true"], "bf16-true")],
)
def test_the_precision_of_the_default_model_on_a_cpu(more: list[str], precision: str) -> None:
    options = finetune_llm.parse(["--accelerator", "cpu", *more])
    finetune_llm.adapt_to_cpu(options)
    assert options.precision == precision


@pytest.mark.parametrize(
    "more",
    first(
        [[], ["--no-gradient-checkpointing"], ["--precision", "bf16-mixed"], ["--precision", "bf16-true"]],
        [],
        why="the first tier has one precision",
    ),
    ids=" ".join,
)
def test_weights_are_bitwise_those_of_plain_lightning(
    more: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(folder, "ours", "--steps", "5", "--every", "2", *more)
    said = capsys.readouterr().out
    plain = run(folder, "plain", "--steps", "5", "--every", "2", "--strategy", "auto", *more)
    assert_same(weights(ours), weights(plain))
    steps = [line for line in said.splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == ["0/5", "2/5", "4/5", "5/5"]
    assert steps == [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert "Epoch" not in said
    assert f"Saved: {ours / 'model'}." in said
    assert AutoTokenizer.from_pretrained(ours / "model").chat_template


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(folder, "whole", "--steps", "6", "--every", "2")
    step = finetune_llm.FineTune.training_step

    def stops(self: finetune_llm.FineTune, *batch: Any) -> Tensor:
        if self.global_step == 5:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(finetune_llm.FineTune, "training_step", stops)
        with pytest.raises(RuntimeError, match="the power fails"):
            run(folder, "part", "--steps", "6", "--every", "2")
    assert torch.load(folder / "part" / "last.ckpt", weights_only=True)["global_step"] == 4
    resumed = run(folder, "part", "--steps", "6", "--every", "2", "--resume", str(folder / "part" / "last.ckpt"))
    assert_same(weights(resumed), weights(whole))


@pytest.mark.rest("the first tier resumes an interrupted run")
def test_a_finished_run_continues(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    last = run(folder, "run", "--steps", "3", "--every", "2") / "last.ckpt"
    with pytest.raises(SystemExit):
        run(folder, "run", "--steps", "3", "--resume", str(last))
    assert "has 3 of 3 steps. For example: --steps 6" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        run(folder, "run", "--steps", "7", "--resume", str(last), "--lora", "4")
    assert f"--resume {last}: a checkpoint of another model" in capsys.readouterr().err
    run(folder, "run", "--steps", "7", "--resume", str(last))
    assert torch.load(last, weights_only=True)["global_step"] == 7


@pytest.mark.rest("the first tier trains every weight")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_lora_saves_adapters_only(folder: Path, precision: str) -> None:
    base = run(folder, "base", "--steps", "2") / "model"
    arguments = ["--model", str(base), "--lora", "4", "--every", "2", "--precision", precision, "--steps", "3"]
    ours = run(folder, "ours", *arguments)  # its last step has no validation
    saved = torch.load(ours / "last.ckpt", weights_only=True)["state_dict"]
    assert saved
    assert all("lora_" in name for name in saved)
    assert not (ours / "model").exists()
    resumed = run(folder, "ours", *arguments[:-1], "4", "--resume", str(ours / "last.ckpt"))
    assert torch.load(resumed / "last.ckpt", weights_only=True)["global_step"] == 4

    plain = run(folder, "plain", *arguments[:-1], "4", "--strategy", "auto")
    ours = run(folder, "again", *arguments[:-1], "4")
    adapters = [
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), each / "adapter").state_dict()
        for each in (ours, plain)
    ]
    assert_same(*adapters)
    assert any(bool(adapters[0][name].any()) for name in adapters[0] if "lora_B" in name)

    ids = torch.arange(10)[None]
    logits = AutoModelForCausalLM.from_pretrained(base)(ids).logits
    adapted = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), ours / "adapter")
    with_adapters = adapted(ids).logits
    torch.testing.assert_close(adapted.merge_and_unload()(ids).logits, with_adapters, atol=1e-4, rtol=0)
    assert (with_adapters - logits).abs().max() > 1e-3


# ---------------------------------------------------------------------- data


def counted(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """The text of a row, and the part of it that counts in the loss."""
    tokens, labels = finetune_llm.encode(row, tokenizer)
    assert all(label in (token, finetune_llm.IGNORED) for token, label in zip(tokens, labels, strict=True))
    return tokenizer.decode(tokens), tokenizer.decode([label for label in labels if label != finetune_llm.IGNORED])


def test_only_what_the_assistant_says_counts(tokenizer: Any) -> None:
    text, said = counted({"messages": [*CHAT, {"role": "user", "content": "unanswered"}]}, tokenizer)
    assert text == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert said == "Hi.<|end|>Bye.<|end|>"


def test_only_the_completion_counts(tokenizer: Any) -> None:
    row = {"prompt": "2 + 2 =", "completion": " 4"}
    assert counted(row, tokenizer) == ("2 + 2 = 4<|end|>", " 4<|end|>")


def test_all_of_a_text_counts_but_for_its_first_token(tokenizer: Any) -> None:
    text, said = counted({"text": "xyzzy"}, tokenizer)
    assert text == "xyzzy<|end|>"
    assert text.endswith(said)


def test_a_template_that_changes_earlier_messages_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{{ messages | length }}" + tokenizer.chat_template
    monkeypatch.setattr(tokenizer, "chat_template", template)
    with pytest.raises(ValueError, match="changes earlier messages"):
        finetune_llm.encode({"messages": CHAT}, tokenizer)


def test_packed_rows_do_not_see_each_other(tokenizer: Any) -> None:
    """The logits of a row are the same, whatever is in the window before it."""
    rows = [{"text": "one two three"}, {"text": "four five six seven eight nine ten"}]
    windows = finetune_llm.pack(rows, tokenizer, 16)
    window = windows[0]
    begin = int((window["position_ids"] == 0).nonzero()[1])
    assert window["labels"][begin] == finetune_llm.IGNORED
    assert window["position_ids"][begin:].tolist() == list(range(16 - begin))
    config = {name: value for name, value in TINY.items() if name not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(finetune_llm.LlamaConfig(**config)).eval()
    ids, positions = window["input_ids"][None], window["position_ids"][None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, begin:]
    torch.testing.assert_close(packed, model(input_ids=ids[:, begin:], use_cache=False).logits, atol=1e-5, rtol=1e-5)


def test_a_window_without_labels_is_left_out(tokenizer: Any) -> None:
    rows = [{"prompt": "word " * 40, "completion": "yes " * 10}]
    windows = finetune_llm.pack(rows, tokenizer, 8)
    assert 0 < len(windows) < 4
    assert all((window["labels"][1:] != finetune_llm.IGNORED).any() for window in windows)


def test_a_row_that_is_cut_begins_anew(tokenizer: Any) -> None:
    windows = finetune_llm.pack([{"text": "word " * 40}], tokenizer, 8)
    assert len(windows) > 2
    assert all(window["position_ids"].tolist() == list(range(8)) for window in windows)


def test_the_default_data_are_conversations() -> None:
    row = next(finetune_llm.python_functions())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_a_folder_of_texts_and_rows_is_read(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.txt").write_text("a book")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "\u2028"}\n')
    (tmp_path / "LICENSE").write_text("not read")
    rows = [{"text": "1"}, {"text": "\u2028"}, {"text": "a book"}]
    assert list(finetune_llm.read_rows(str(tmp_path))) == rows


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the package datasets")
@pytest.mark.rest("needs the package datasets")
@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_parquet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, arrow, parquet = map(importlib.import_module, ("datasets", "pyarrow", "pyarrow.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet.write_table(arrow.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    (row,) = finetune_llm.read_rows(str(tmp_path / "a.parquet"))
    assert row == {"messages": CHAT}


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "no.jsonl"], "--data no.jsonl: does not exist"),
        (["--data", "owner/name"], "Run: pip install datasets"),
        (["--data", "empty"], "--data empty: the folder has no"),
        (["--data", "columns.jsonl"], 'row 2: found the columns instruction, output. Expected "messages"'),
        (["--data", "broken.jsonl"], "line 2: not JSON"),
        (["--data", "silent.jsonl"], "row 1: found no message of the role assistant"),
        (["--data", "short.txt"], "has 0 training windows. Expected at least 8"),
        (["--model", "/no/such/model"], "--model /no/such/model: not found"),
        (["--length", "65"], "reads at most 64 tokens. For example: --length 64"),
        (["--steps", "0"], "--steps 0: expected a number above 0"),
        (["--lora", "-1"], "--lora -1: expected a number above 0"),
        (["--resume", "no.ckpt"], "--resume no.ckpt: not found"),
        (
            ["--resume", "other.ckpt"],
            "--resume other.ckpt: a checkpoint of another model or of a run with other options",
        ),
        (["--gpu-memory", "16"], "gpu_memory takes a number with a unit"),
        (["--strategy", "ddp_cpu"], "invalid choice: 'ddp_cpu'"),
        (["--output", "short.txt"], "--output short.txt: expected a folder, got a file"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_errors_in_the_input_are_reported_before_any_work(
    arguments: list[str],
    said: str,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(folder)
    Path("empty").mkdir()
    Path("columns.jsonl").write_text('{"text": "fine"}\n{"instruction": "Add.", "output": "4"}\n')
    Path("broken.jsonl").write_text('{"text": "fine"}\n{"text": \n')
    Path("silent.jsonl").write_text(json.dumps({"messages": CHAT[:2]}))
    Path("short.txt").write_text("too short")
    state = {"state_dict": {"net.weight": torch.ones(2)}, "optimizer_states": [{"param_groups": [{"params": [0]}]}]}
    torch.save({"epoch": 0, "global_step": 1, **state}, "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        finetune_llm.main(
            ["--model", "config.json", "--data", "rows.jsonl", "--length", "16", "--output", "run", *arguments]
        )
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
