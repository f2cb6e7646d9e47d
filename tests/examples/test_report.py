"""The benchmarks' report: its numbers follow from the rows, here made-up ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.benchmarks import (
    report,
    rows,
)
from tests.examples.made_up_rows import cells, made_up

GIB = 2**30


@pytest.mark.long("takes a second or more")
def test_the_reports_numbers_follow_from_the_rows(tmp_path: Path) -> None:
    found = [
        made_up("plain", 1.0, 80),
        made_up("superpipeline-2:1", 2.0, 16, registered_bytes=3 * GIB, counted_peak_bytes=1.5 * GIB),
        made_up("superpipeline-4:2", 1.6, 20, losses=[11.0]),
        made_up("fsdp2", 4.0, 18),
        made_up("deepspeed"),
        made_up("plain", device_gib=16),
        made_up("superpipeline-2:1", 3.0, 9, device_gib=16),
    ]
    path = report.write(found, tmp_path)
    text = path.read_text()
    # step, quartiles, tokens/s, ÷ plain, our best ÷ it, what is on the device, device, device ÷ plain,
    # reserved, host, pinned, loss
    numbers = "4 | 3.8 to 4.4 | 2,048 | 0.25 | 2.50 | – | 18.00 | 0.23 | 18.00 | 2.00 | 1.00 | 11.00000 |"
    assert f"| FSDP2 CPUOffloadPolicy | {numbers}" in text
    ours = cells(text, "superpipeline 2:1")
    assert ours[1:7] == ["2", "1.9 to 2.2", "4,096", "0.50", "–", "1.5 GiB"]
    assert ours[8] == "0.20"
    assert ours[11] == "3.00"
    assert "| gradient stall, s |" in text
    split = text[text.index("gradient stall") :]
    assert cells(split, "superpipeline 2:1")[1:] == ["1.67", "0.05", "0.01", "0.03", "0.04", "0.2"]
    assert cells(split, "FSDP2 CPUOffloadPolicy")[1:] == ["3.8", "–", "–", "–", "–", "0.2"]
    assert cells(text, "plain Lightning")[4:6] == ["1.00", "0.62"]
    assert "OutOfMemoryError: no \\| room" in text
    assert (
        "Llama-shaped language model, 3.21 B parameters, sequences of 4096 tokens, bf16-mixed, "
        "activations kept (no checkpointing) unless a contestant says otherwise."
    ) in text
    larger = text[text.index("## Larger than the card") : text.index("## Train")]
    assert (
        "| 16 | train llm 3B, bf16-mixed, 8192 tokens | superpipeline 2:1 | 3 s per step, loss 10.5000 | 9.00 |"
        in larger
    )
    assert "| plain Lightning | failed | – | failed: OutOfMemoryError" in larger
    (drawn,) = tmp_path.glob("*.png")
    assert drawn.stat().st_size > 10_000
    shown = text[: text.index("## Larger")]
    assert f"({drawn.name})" in shown
    assert "train llm 3B, bf16-mixed, 8192 tokens" in shown


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(("change", "message"), [({"commit": "other"}, "2 commits"), ({"machine": {}}, "2 machines")])
def test_rows_of_several_origins_are_refused(change: rows.Row, message: str, tmp_path: Path) -> None:
    one = made_up("plain", 1.0, 80)
    other = {**made_up("fsdp2", 2.0, 80), **change}
    other["machine"] = {**one["machine"], "processor": "another"} if "machine" in change else one["machine"]
    with pytest.raises(ValueError, match=message):
        report.write([one, other], tmp_path)
    assert report.write([one, other], tmp_path, mixed=True).is_file()
    with pytest.raises(ValueError, match="no rows"):
        report.write([], tmp_path)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"b"', "line 3: is no JSON"),
        ('{"kind": "train"}', "line 3: is no row, which has status, machine"),
        ("[1]", "line 3: is no row"),
    ],
)
def test_a_broken_line_is_named(line: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    row = made_up("plain", 1.0)
    file.write_text(f"{json.dumps(row)}\n \n")
    assert rows.read(file) == [row]
    file.write_text(file.read_text() + line)
    with pytest.raises(ValueError, match=message):
        rows.read(file)
