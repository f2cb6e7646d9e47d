"""The data of the recipes for language models: which tokens count, how rows are packed, which files are read."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from examples import finetune_llm
from tests.examples.small_recipes import CHAT, LLAMA, common, run, write_rows


def counted(row: dict[str, Any], tokenizer: Any) -> tuple[str, str]:
    """The text of a row, and the part of it that counts in the loss."""
    tokens, labels = common.encode(row, tokenizer)
    assert all(label in (token, common.IGNORED) for token, label in zip(tokens, labels, strict=True))
    return tokenizer.decode(tokens), tokenizer.decode([label for label in labels if label != common.IGNORED])


@pytest.mark.long("takes a second or more")
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
    monkeypatch.setattr(tokenizer, "chat_template", "{{ messages | length }}" + tokenizer.chat_template)
    with pytest.raises(ValueError, match="changes earlier messages"):
        common.encode({"messages": CHAT}, tokenizer)


def test_packed_rows_do_not_see_each_other(tokenizer: Any) -> None:
    """The logits of a row are the same, whatever is in the window before it. What fills the last window does not count."""
    rows = [
        {"text": "held out"},
        {"text": "one two three"},
        {"text": "four five six seven eight nine ten"},
        {"text": "end"},
    ]
    (held_out,), (window, last) = common.pack(rows, tokenizer, 16)
    assert tokenizer.decode(held_out["input_ids"]).startswith("held out<|end|>")
    begin = int((window["position_ids"] == 0).nonzero()[1])
    assert window["labels"][begin] == common.IGNORED
    assert window["position_ids"][begin:].tolist() == list(range(16 - begin))
    config = {name: value for name, value in LLAMA.items() if name not in ("architectures", "model_type")}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**config)).eval()
    ids, positions = window["input_ids"][None], window["position_ids"][None]
    packed = model(input_ids=ids, position_ids=positions, use_cache=False).logits[:, begin:]
    torch.testing.assert_close(packed, model(input_ids=ids[:, begin:], use_cache=False).logits, atol=1e-5, rtol=1e-5)

    filled = int((last["position_ids"] == 0).nonzero()[-1])
    assert tokenizer.decode(last["input_ids"][:filled]).endswith("end<|end|>")
    assert (last["labels"][filled:] == common.IGNORED).all()


def test_a_window_without_labels_is_left_out(tokenizer: Any) -> None:
    """Validation takes no window that has only the prompt of a row."""
    rows = [{"prompt": "word " * 40, "completion": "yes " * 10}] * 2
    held_out, training = common.pack(rows, tokenizer, 8)
    assert len(held_out) == 1
    assert 0 < len(training) < 8
    assert all((window["labels"][1:] != common.IGNORED).any() for window in (*held_out, *training))


def test_a_row_that_is_cut_begins_anew_in_each_window_and_after_what_is_held_out(tokenizer: Any) -> None:
    """One row is enough if it has more tokens than a window."""
    (_,), training = common.pack([{"text": "word " * 40}], tokenizer, 8)
    assert len(training) > 2
    assert all(window["position_ids"].tolist() == list(range(8)) for window in training[:-1])

    long = {"text": " ".join(map(str, range(200)))}
    rows = [{"text": "one"}, {"text": "two three"}, long]
    held_out, training = common.pack(rows, tokenizer, 8)
    assert len(held_out) > 1  # the long row has more than 20 parts
    inside = [window for window in training if (window["position_ids"][1:] == 0).any()]
    assert len(inside) >= len(held_out)
    assert all(window["labels"][1:][window["position_ids"][1:] == 0].eq(common.IGNORED).all() for window in inside)


@pytest.mark.parametrize("rows", [[], [{"text": "short"}], [{"prompt": "a", "completion": " b"}]])
def test_rows_that_cannot_be_packed_are_refused(rows: Any, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"rows whose tokens count in the loss\. Expected at least 2 rows"):
        common.pack(rows, tokenizer, 8)


def test_the_default_data_are_conversations() -> None:
    row = next(common.python_functions())
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]


def test_a_folder_of_texts_and_rows_is_read(tmp_path: Path) -> None:
    (tmp_path / "more").mkdir()
    (tmp_path / "more" / "b.txt").write_text("a book")
    (tmp_path / "a.jsonl").write_text('{"text": "1"}\n{"text": "\u2028"}\n')
    (tmp_path / "LICENSE").write_text("not read")
    rows = [{"text": "1"}, {"text": "\u2028"}, {"text": "a book"}]
    assert list(common.read_rows(str(tmp_path))) == rows


@pytest.mark.skipif(importlib.util.find_spec("datasets") is None, reason="needs the package datasets")
@pytest.mark.rest("needs the package datasets")
@pytest.mark.filterwarnings("ignore")  # of the package's own
def test_parquet_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets, arrow, parquet = map(importlib.import_module, ("datasets", "pyarrow", "pyarrow.parquet"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    parquet.write_table(arrow.Table.from_pylist([{"messages": CHAT}]), tmp_path / "a.parquet")
    (row,) = common.read_rows(str(tmp_path / "a.parquet"))
    assert row == {"messages": CHAT}


@pytest.mark.long("eight runs beside the first")
def test_the_first_command_trains_in_one_thread_and_ends_with_its_dial(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(2)
    size = ["--data", "rows.jsonl", "--length", "16", "--batch-size", "2", "--steps", "4", "--validate-every", "2"]
    finetune_llm.main([*size, "--accelerator", "cpu", "--output", "run"])
    assert torch.get_num_threads() == 1
    trained, _, measured = capsys.readouterr().out.partition("Next, memory and time")
    assert re.search(r"step 2/4  loss [\d.]+  val_loss [\d.]+  \d+ s left\n", trained)
    rows = [line.split("|") for line in measured.splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + 1 + 6  # the head, plain Lightning, and the windows
    assert all(row[-2].strip() for row in rows[-7:])  # each has a time


@pytest.mark.parametrize(
    ("more", "precision"),
    [([], "32-true"), (["--model", "."], "bf16-mixed"), (["--precision", "bf16-true"], "bf16-true")],
)
def test_the_precision_of_the_default_model_on_a_cpu(more: list[str], precision: str) -> None:
    options = finetune_llm.parse(["--accelerator", "cpu", *more])
    common.prepare(options)
    assert options.precision == precision


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--data owner/name", "Run: pip install datasets"),
        ("--data empty", "--data empty: found no .jsonl"),
        ("--data columns.jsonl", 'row 2: found the columns instruction, output. Expected "messages"'),
        ("--data broken.jsonl", "line 2: not JSON"),
        ("--data nothing.jsonl", "the file is empty"),
        ("--data silent.jsonl", "row 1: found no message of the role assistant"),
        ("--data short.txt", "Expected at least 2 rows, or one of more than --length 16 tokens"),
        ("--length 65", "reads at most 64 tokens. For example: --length 64"),
    ],
)
def test_errors_in_the_data_are_reported_before_any_work(
    arguments: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    Path("empty").mkdir()
    write_rows(Path("columns.jsonl"), [{"text": "fine"}, {"instruction": "Add.", "output": "4"}])
    write_rows(Path("broken.jsonl"), [{"text": "fine"}, '{"text": '])
    write_rows(Path("silent.jsonl"), [{"messages": CHAT[:2]}])
    Path("nothing.jsonl").write_text("\n")
    Path("short.txt").write_text("too short")
    with pytest.raises(SystemExit) as stop:
        run("llm", "run", *arguments.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not Path("run").exists()
