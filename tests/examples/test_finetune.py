"""All recipes for training: bitwise as plain Lightning, resumed runs, adapters, and errors in the input before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel

from tests.examples.small_recipes import SMALL, assert_same, common, run, steps_in
from tests.support.tiers import first

pytestmark = [
    # torch's own remark about nn.RMSNorm under autocast, which leaves its weight in float32.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
]
RECIPES = list(SMALL)
PRECISIONS = ["", "--no-gradient-checkpointing", "--precision bf16-mixed", "--precision bf16-true"]
OPTIONS = {
    "llm": PRECISIONS,
    "moe": [*PRECISIONS[:3], "--aux 0", "--model mixtral.json"],
    "vlm": PRECISIONS,
    "speech": PRECISIONS,
    "vision": [
        "--augment strong --mixup 0.2", "--augment off --no-gradient-checkpointing", "--ema 0.5", *PRECISIONS[2:]
    ],
    "diffusion": [
        "--precision bf16-mixed", "", "--full", "--ema 0.5", "--quantize-8bit --precision bf16-true --no-gradient-checkpointing"
    ],
}  # fmt: skip
RUNS = [(name, more) for name, options in OPTIONS.items() for more in options]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("name", "more"),
    first(RUNS, if_=lambda each: each[1] == OPTIONS[each[0]][0], why="the recipe's other options"),
)
def test_results_are_those_of_plain_lightning(
    name: str, more: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = run(name, "ours", *more.split())
    printed = capsys.readouterr().out
    plain = run(name, "plain", *more.split(), "--strategy", "auto")
    again = capsys.readouterr().out
    assert_same(ours, plain)
    assert ours.trainer.strategy.stats().fetched_layers
    assert steps_in(printed) == steps_in(again)
    steps = [line.split("/")[0] for line in steps_in(printed)]
    assert [step.split()[1] for step in steps] == ["0", "2", "4"][name == "diffusion" :]
    metrics = [Path(output, "logs", "version_0", "metrics.csv").read_text() for output in ("ours", "plain")]
    assert metrics[0] == metrics[1]
    for line in (line for line in printed.splitlines() if line.startswith("Held out: ")):
        assert line in again
    for sample in Path("ours").glob("sample-*.png"):
        assert sample.read_bytes() == Path("plain", sample.name).read_bytes()
    if SMALL[name].loads and not more:
        loaded = SMALL[name].loads.from_pretrained("ours/model").state_dict()
        torch.testing.assert_close(dict(loaded), dict(ours.model.state_dict()), rtol=0, atol=0)


RESUMED = [
    *((name, "") for name in RECIPES),
    ("vision", "--augment strong --mixup 0.2 --ema 0.5"),
    ("diffusion", "--ema 0.5"),
]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("name", "more"),
    first(RESUMED, ("llm", ""), ("vision", RESUMED[-2][1]), ("diffusion", ""), why="other recipes resume in the first tier"),
)  # fmt: skip
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    name: str, more: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = SMALL[name].module
    whole, step = run(name, "whole", *more.split()), module.training_step

    def interrupted(self: Any, *batch: Any) -> Any:
        if self.global_step == 3:
            raise RuntimeError("the power fails")
        return step(self, *batch)

    with monkeypatch.context() as patch:
        patch.setattr(module, "training_step", interrupted)
        with pytest.raises(RuntimeError, match="the power fails"):
            run(name, "part", *more.split())
    assert torch.load("part/last.ckpt", weights_only=True)["global_step"] == 2
    assert_same(run(name, "part", *more.split(), "--resume"), whole)


@pytest.mark.long("the first tier resumes an interrupted run")
@pytest.mark.parametrize("name", ["llm", "vision"])
def test_a_finished_run_continues(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    much, more = ("--epochs", "3") if name == "vision" else ("--steps", "7")
    run(name, "run")
    with pytest.raises(SystemExit):
        run(name, "run", "--resume", "run/last.ckpt")
    assert f"has {2 if name == 'vision' else 4} of" in capsys.readouterr().err
    run(name, "run", much, more, "--resume", "run")
    assert torch.load("run/last.ckpt", weights_only=True)["global_step"] == 6 + (name == "llm")


@pytest.mark.long("the first tier trains every weight")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize("name", ["llm", "moe", "vlm", "speech"])
def test_lora_saves_adapters_only(name: str, precision: str, folder: Path) -> None:
    run(name, "base", "--steps", "1")
    arguments = ["--model", "base/model", "--lora", "4", "--precision", precision]
    ours, plain = run(name, "ours", *arguments), run(name, "plain", *arguments, "--strategy", "auto")
    assert_same(ours, plain)
    saved = torch.load("ours/last.ckpt", weights_only=True)["state_dict"]
    assert saved
    assert all("lora_" in each and ("self_attn" in each or name != "moe") for each in saved)
    assert not any("vision_tower" in each for each in saved)
    assert not Path("ours/model").exists()
    base = SMALL[name].loads.from_pretrained("base/model")
    adapters = PeftModel.from_pretrained(base, "ours/adapter").state_dict()
    trained = {each: p for each, p in ours.model.state_dict().items() if "lora_" in each}
    assert any(bool(trained[each].any()) for each in trained if "lora_B" in each)
    torch.testing.assert_close({each: adapters[each] for each in trained}, trained, rtol=0, atol=0)
    assert run(name, "ours", *arguments, "--resume", "--steps", "5").trainer.global_step == 5


# ---------------------------------------------------------------------- data


@pytest.mark.rest("takes tenths of a second")
def test_four_short_rows_train(folder: Path) -> None:
    """Rows are fewer than a window, and windows fewer than a batch."""
    Path("four.jsonl").write_text("\n".join(['{"prompt": "2 + 2 =", "completion": " 4"}'] * 4))
    module = run("llm", "run", "--data", "four.jsonl", "--length", "64", "--steps", "2")
    assert module.trainer.global_step == 2


def test_a_step_may_use_more_rows_than_there_are() -> None:
    parser = common.training_options(None, "any", model="", data="", lr="")
    order = common.Run(parser.parse_args(["--batch-size", "4", "--steps", "2"]), 3).sampler()
    assert [sorted(order[at : at + 3]) for at in (0, 3)] == [[0, 1, 2]] * 2
    assert len(order) == 8


def test_a_batch_has_rows_of_one_size() -> None:
    sizes = [(32, 32), (40, 28), (32, 32), (40, 28), (32, 32), (28, 40), (32, 32)]
    batches = common.batches_of_one_size(sizes, 2, 8, seed=0)
    assert sorted(row for batch in batches[:4] for row in batch) == [*range(len(sizes))]
    assert all(len({sizes[row] for row in batch}) == 1 and len(batch) <= 2 for batch in batches)
    assert batches[:4] != batches[4:]
    assert common.batches_of_one_size(sizes, 2, 3, seed=0) == batches[:3]


# ---------------------------------------------------------------------- errors

WRONG = [
    ("--steps 0", "--steps 0: expected a number above 0"),
    ("--lora -1", "--lora -1: expected a number above 0"),
    ("--model /no/such/model", "--model /no/such/model: not found"),
    ("--optimizer-overlap backward", "Add --gradient-clip 0"),
    ("--strategy ddp_cpu", "invalid choice: 'ddp_cpu'"),
    ("--output llama.json", "--output llama.json: expected a folder, got a file"),
    ("--resume no.ckpt", "--resume no.ckpt: not found"),
]
WRONG_IN_EACH = [
    ("--data no.jsonl", "no.jsonl: "),
    ("--gpu-memory much", "gpu_memory"),
    ("--resume other.ckpt", "--resume other.ckpt: a checkpoint of another model or of a run with other options"),
]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [*(("llm", *each) for each in WRONG), *((name, *each) for name in RECIPES for each in WRONG_IN_EACH)],
)
def test_errors_in_the_input_are_reported_before_any_work(
    name: str, arguments: str, said: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"state_dict": {"net.weight": torch.ones(2)}, "optimizer_states": [{"param_groups": [{"params": [0]}]}]}
    torch.save({"epoch": 0, "global_step": 1, **state}, "other.ckpt")
    with pytest.raises(SystemExit) as stop:
        run(name, "run", *arguments.split())
    assert stop.value.code == 2
    assert said in capsys.readouterr().err
    assert not list(Path().glob("run/*.ckpt"))
