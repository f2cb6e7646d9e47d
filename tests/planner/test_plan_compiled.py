"""``plan --compile-blocks``: elementwise operations of compiled blocks are assumed to take less time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from sp_lightning.__main__ import main
from sp_lightning.model.found import Found, Layer
from sp_lightning.planner.dry_run import FUSED, Cost, Work
from sp_lightning.planner.estimate import _layers_of

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
}


def ask(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["plan", *arguments, "--tokens", "64", "--k", "1", "--k-prime", "1", "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_batch_takes_less_time_and_the_answer_says_how(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    slow = ("--device-bandwidth", "0.001GB/s")  # elementwise operations take nearly all of the time
    eager, compiled = (ask(capsys, str(tmp_path), *slow, *options) for options in ((), ("--compile-blocks",)))
    seconds = compiled["windows"][0]["seconds"] / eager["windows"][0]["seconds"]
    assert FUSED < seconds < 0.9, "the loss is not in a block"
    assert compiled["plain_bytes"] == eager["plain_bytes"]
    assert "and sp_lightning.compile_blocks(model)" in compiled["verdict"]
    assert "compile_blocks" not in eager["verdict"]
    assert (eager["compile_blocks"], compiled["compile_blocks"]) == (False, True)
    main(["plan", str(tmp_path), "--tokens", "64", "--compile-blocks"])
    assert (
        "elementwise operations of compiled blocks take a third of the time (--compile-blocks)"
        in capsys.readouterr().out
    )


def test_the_answer_proposes_compiled_blocks_where_they_help(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = transformers.LlamaConfig(architectures=["LlamaForCausalLM"], **SIZES)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    computing = (
        "plan",
        str(tmp_path),
        "--tokens",
        "64",
        "--k",
        "1",
        "--k-prime",
        "1",
        "--device-bandwidth",
        "0.001GB/s",
    )
    main([*computing])
    assert (proposed := re.search(r"with compiled blocks about (\S+) s \(--compile-blocks\)", capsys.readouterr().out))
    main([*computing, "--compile-blocks", "--json"])
    assert float(proposed[1]) == pytest.approx(json.loads(capsys.readouterr().out)["windows"][0]["seconds"], rel=0.01)
    main([*computing, "--compile-blocks"])
    assert "only fewer operations or a faster GPU help" in capsys.readouterr().out


def test_layers_are_blocks_or_parts_of_blocks_or_hold_parts_of_blocks() -> None:
    names = ["embed", "blocks.0", "blocks.1.inner", "blocks.1.experts", "blocks.10", "head"]
    found = Found(tuple(Layer(name, ()) for name in names), Layer("residents", ()), {}, {}, ())
    assert _layers_of(["blocks.0.attention", "blocks.1"], found) == {1, 2, 3}


def test_only_layers_that_are_compiled_are_faster() -> None:
    costs = tuple(Cost(layers, backward=False, moved=300) for layers in ((0,), (1, 2), ()))
    work = Work(costs, 0, (), (), 0, None)
    assert [visit.seconds for visit in work.visits(flops=1.0, memory=100.0, compiled={2})] == [3.0, 3.0 * FUSED, 3.0]


def test_a_model_without_blocks(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "tests.planner.test_plan_measured:Small", "--compile-blocks"])
    assert "No repeated blocks found in Small" in capsys.readouterr().err
