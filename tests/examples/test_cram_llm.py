"""The recipe that has so many hours: its clock, its end in time, a resumed run, Pseudo-to-Real, bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from transformers import AutoModelForCausalLM

from examples.demos import cram_llm, hours
from examples.demos.hours import ends_of_parts, read_note
from examples.demos.language import causal_config, small_llama
from examples.demos.planned import ask_plan
from examples.demos.pseudo import delink, share_block
from examples.demos.text import read_text
from tests.support.ticks import Killed, Ticks
from tests.support.tiers import first

SMALL = ["--layers", "3", "--hidden", "32", "--length", "16", "--accelerator", "cpu"]
SECONDS = 120  # of the budget, by a clock that ticks when it is read
HOURS = str(SECONDS / 3600)
PLAN: dict[str, Any] = {
    "budget": {
        "hours": 0.04, "batch_size": 2, "accumulate_grad_batches": 2, "tokens": 16, "steps": 30, "seconds_per_step": 5.0,
        "total_tokens": 1920, "epochs": 0.1, "cost": None,
    },
    "strategy": {"k": 1, "k_prime": 1},
    "precision": "32-true",
}  # fmt: skip


PSEUDO = ("--pseudo", "0.4")


def recipe_in(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., cram_llm.Result]:
    """Runs the recipe by a clock of its own."""
    plan, text = folder / "plan.json", folder / "text.txt"
    plan.write_text(json.dumps(PLAN))
    text.write_text(read_text(None)[:20_000])

    def run(*more: str, ticks: Ticks | None = None, output: str = "run") -> cram_llm.Result:
        now = ticks or Ticks()
        now.tick_in(monkeypatch)
        arguments = ["--hours", HOURS, "--plan", str(plan), "--text", str(text), *SMALL]
        return cram_llm.main([*arguments, "--output", str(folder / output), *more])

    return run


@pytest.fixture
def cram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., cram_llm.Result]:
    return recipe_in(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> cram_llm.Result:
    """A run with ``--pseudo 0.4`` that nothing disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        return recipe_in(tmp_path_factory.mktemp("whole"), patch)(*PSEUDO, output="whole")


def checkpoint_of(result: cram_llm.Result) -> dict[str, Any]:
    return torch.load(result.checkpoint, weights_only=True)


# ---------------------------------------------------------------------- the clock decides


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("tick", first([0.5, 1.0], 1.0, why="twice the steps"))
def test_a_run_ends_in_its_time_annealed_at_any_speed(tick: float, cram: Callable[..., cram_llm.Result]) -> None:
    result = cram(ticks=Ticks(tick))
    step = 6 * tick
    assert 0.99 * SECONDS - 1.5 * step < result.seconds <= SECONDS
    assert len(result.validations) == hours.PARTS + 1
    assert result.tokens == len(result.losses) * 2 * 2 * 16
    saved = checkpoint_of(result)
    assert saved["global_step"] == len(result.losses)
    # The rate of the step that was not made any more; a straight line leads to 0 where training was to end.
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] < 2e-3 * 1.5 * step / (0.9 * SECONDS)
    assert (len(result.losses) > 20) == (tick == 0.5)
    AutoModelForCausalLM.from_pretrained(result.checkpoint.parents[1] / "model")


def test_parts_are_quarters_and_the_end_of_the_first_phase() -> None:
    assert [ends_of_parts(phase, 0.5) for phase in ("pseudo", "real")] == [[0.25, 0.5], [0.75, 1.0]]
    assert [ends_of_parts(phase, 0.3) for phase in ("pseudo", "real")] == [[0.25, 0.3], [0.5, 0.75, 1.0]]
    assert ends_of_parts("real", 0.0) == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.long("takes a second or more")
def test_a_step_that_takes_all_that_is_left_is_not_finished(
    cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its two batches takes so long. The steps before could not tell, and Lightning's Timer ends the run."""
    ticks, calls, step = Ticks(tick=0.0), 0, cram_llm.Crammed.training_step

    def slow(module: cram_llm.Crammed, *batch: Any) -> Any:
        nonlocal calls
        calls += 1
        ticks.time += SECONDS if calls == 7 else 1
        return step(module, *batch)

    monkeypatch.setattr(cram_llm.Crammed, "training_step", slow)
    note = read_note(cram(ticks=ticks).checkpoint)
    assert calls == 7
    assert (note["part"], note["is_over"]) == (0, True)


# ---------------------------------------------------------------------- plain Lightning, and a run that was killed


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", first([[], [*PSEUDO]], [*PSEUDO], why="the same without its first phase"))
def test_a_run_is_bitwise_that_of_plain_lightning(
    more: list[str],
    cram: Callable[..., cram_llm.Result],
    whole: cram_llm.Result,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours = whole if more else cram()
    monkeypatch.setattr(cram_llm, "SuperpipelineStrategy", lambda **_: SingleDeviceStrategy("cpu"))
    plain = cram(*more, output="plain")
    assert len(ours.losses) > 20
    assert (ours.losses, ours.validations, ours.delinked) == (plain.losses, plain.validations, plain.delinked)
    of_ours, of_plain = checkpoint_of(ours), checkpoint_of(plain)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(of_ours[part], of_plain[part], rtol=0, atol=0)
    assert (ours.delinked is None) == (not more)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("share", "phase", "part"),
    [
        pytest.param(0.38, "pseudo", 1, marks=pytest.mark.rest("the first tier has the end of the run")),
        pytest.param(0.46, "pseudo", 2, marks=pytest.mark.rest("the first tier has the end of the run")),
        (0.84, "real", 2),
    ],
)
def test_a_killed_run_goes_on_in_what_is_left_of_its_time(
    share: float,
    phase: str,
    part: int,
    cram: Callable[..., cram_llm.Result],
    whole: cram_llm.Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(Killed):
        cram(*PSEUDO, ticks=Ticks(until=share * SECONDS))
    file = tmp_path / "run" / "checkpoint" / "last.ckpt"
    note = read_note(file)
    assert note["identity"]["model"]["transformers_version"] is None, "another one may go on"
    done = sum(map(len, note["curve"]["parts"]))
    assert (note["phase"], note["part"], note["is_over"]) == (phase, part, False)
    assert 0 < done < len(whole.losses)

    again = cram(*PSEUDO, "--resume", str(file))
    # the next one is of the same weights and the same batch
    assert again.losses[: done + 1] == whole.losses[: done + 1]
    validated = len(note["curve"]["validations"])
    assert again.validations[:validated] == whole.validations[:validated]
    assert len(again.validations) == len(whole.validations)
    assert done < len(again.losses) <= len(whole.losses)  # set-up has taken time again
    assert 0.97 * SECONDS < again.seconds <= SECONDS
    saved = checkpoint_of(again)
    assert saved["cram"]["is_over"]
    assert all(int(state["step"]) == len(again.losses) for state in saved["optimizer_states"][0]["state"].values())
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cram(*PSEUDO, "--resume", str(file))
    assert "all of its time is used up" in capsys.readouterr().err


# ---------------------------------------------------------------------- Pseudo-to-Real


def test_blocks_of_their_own_begin_with_the_shared_weights_and_moments() -> None:
    torch.manual_seed(0)
    shared, real = share_block(small_llama(3, 32)), small_llama(3, 32)
    assert len({id(block) for block in shared.model.layers}) == 1
    optimizer = torch.optim.AdamW(shared.parameters())
    tokens = torch.randint(1024, (2, 8))
    for _ in range(2):
        shared(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
    moments = delink(shared, real, optimizer)
    names = [name for name, _ in real.named_parameters()]
    assert list(moments) == names
    assert len(names) > len(list(shared.parameters()))
    places = dict(shared.named_parameters(remove_duplicate=False))
    for name, parameter in real.named_parameters():
        assert torch.equal(parameter, places[name])
        for key, value in optimizer.state[places[name]].items():
            assert torch.equal(moments[name][key], value)
            assert moments[name][key].data_ptr() != value.data_ptr()
    assert len({parameter.data_ptr() for parameter in real.parameters()}) == len(names)

    def loss_of(model: Any) -> float:
        return float(model.eval()(input_ids=tokens, labels=tokens, use_cache=False).loss)

    with torch.no_grad():
        assert loss_of(shared) == loss_of(real)


@pytest.mark.long("takes a second or more")
def test_the_loss_is_the_same_before_and_after_and_training_goes_on(whole: cram_llm.Result) -> None:
    assert whole.delinked is not None
    assert whole.delinked[0].hex() == whole.delinked[1].hex()
    saved = checkpoint_of(whole)
    blocks = [saved["state_dict"][f"model.model.layers.{n}.mlp.up_proj.weight"] for n in range(3)]
    assert not torch.equal(blocks[0], blocks[1])
    assert all(int(state["step"]) == len(whole.losses) for state in saved["optimizer_states"][0]["state"].values())


@pytest.mark.long("takes a second or more")
def test_one_block_alone_stays_on_the_device(
    cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def strategy(**options: Any) -> SingleDeviceStrategy:
        asked.append(options)
        return SingleDeviceStrategy("cpu")

    monkeypatch.setattr(cram_llm, "SuperpipelineStrategy", strategy)
    with pytest.raises(Killed):
        cram(*PSEUDO, ticks=Ticks(until=0.8 * SECONDS))
    alone, planned = {"keep_on_gpu": ["**"]}, PLAN["strategy"]
    # a look at the options; validation, training; validation before and after; training
    assert asked == [planned, alone, alone, alone, planned, planned]


@pytest.mark.long("takes a second or more")
def test_a_loss_that_changed_is_a_defect(cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cram_llm, "delink", lambda *_: {})
    with pytest.raises(RuntimeError, match=r"This is a defect"):
        cram(*PSEUDO)


# ---------------------------------------------------------------------- the picture


# ---------------------------------------------------------------------- the plan


@pytest.mark.long("takes a second or more")
def test_the_plan_is_asked_for_with_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(PLAN), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(hours, "now", Ticks())
    (tmp_path / "rates.json").write_text("{}")
    (tmp_path / "text.txt").write_text(read_text(None)[:60_000])
    arguments = ["--hours", HOURS, "--rates", str(tmp_path / "rates.json"), "--accumulate-grad-batches", "2", *SMALL]
    arguments += ["--text", str(tmp_path / "text.txt")]
    result = cram_llm.main([*arguments, "--output", str(tmp_path / "run")])
    assert result.tokens % (2 * 2 * 16) == 0
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "sp_lightning", "plan"]
    assert json.loads(Path(command[4], "config.json").read_text())["num_hidden_layers"] == 3
    options = dict(zip(command[5:-1:2], command[6:-1:2], strict=True))
    assert 0.8 * SECONDS < 3600 * float(options.pop("--hours")) < SECONDS
    assert int(options.pop("--dataset-tokens")) > 10_000
    assert options == {
        "--tokens": "16", "--gradient-clip": "norm", "--accumulate-grad-batches": "2", "--rates": str(tmp_path / "rates.json"),
    }  # fmt: skip
    assert command[-1] == "--json"


def test_set_up_may_not_take_all_of_the_time(
    cram: Callable[..., cram_llm.Result], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cram(ticks=Ticks(tick=SECONDS))
    assert f"of {SECONDS}.0 s. Give more --hours, or a --plan" in capsys.readouterr().err


@pytest.mark.long("a subprocess that imports torch and looks for the fastest way")
def test_the_plan_of_this_package_is_understood(tmp_path: Path) -> None:
    small_llama(3, 32).config.save_pretrained(tmp_path)
    most: dict[str, Any] = {"hours": 0.1, "tokens": 16, "batch_size": 2, "precision": "bf16-true"}
    planned = ask_plan(tmp_path, **most, accumulate_grad_batches=4, gradient_clip="norm")
    assert (planned.batch, planned.accumulate, planned.precision, planned.seconds) == (2, 4, "bf16-true", 360)
    assert planned.steps * planned.seconds_per_step == pytest.approx(360, rel=0.01)
    cram_llm.SuperpipelineStrategy(**planned.strategy)
    failed = r"--precision bf16-true --gpu-memory 1kB .* ended with status 1: It does not fit"
    with pytest.raises(ValueError, match=failed):
        ask_plan(tmp_path, **most, gpu_memory="1kB", accumulate_grad_batches=1)


def test_a_planned_step_has_to_be_in_the_text(
    cram: Callable[..., cram_llm.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN | {"budget": {**PLAN["budget"], "batch_size": 5000}}))
    with pytest.raises(SystemExit):
        cram()
    assert "too short for one step" in capsys.readouterr().err


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hours", "0"], "--hours 0.0: must be above 0"),
        (["--hours", "inf"], "--hours inf: must be"),
        (["--pseudo", "1"], "--pseudo 1.0: must be"),
        (["--lr", "0"], "--lr 0.0: must be above 0"),
        (["--warmup", "1"], "--warmup 1.0: must be"),
        (["--length", "1"], "--length 1: must be at least 2"),
        (["--length", "100000"], "too short for one step: it has 0 training windows"),
        (["--batch-size", "0"], "--batch-size 0: must be at least 1"),
        (["--batch-size", "5000", "--accumulate-grad-batches", "9"], "too short for one step"),
        (["--plan", __file__], "is no answer of `python -m sp_lightning plan"),
        (["--plan", __file__, "--batch-size", "2"], "says all that --batch-size is for"),
        (["--text", "/no/such/file"], "--text /no/such/file: there is no such file"),
        (["--resume", __file__], "is no checkpoint of this recipe"),
        (["--beside", __file__], "is no checkpoint of this recipe"),
        (["--plot", "curves.docx"], "--plot curves.docx: must end in one of "),
        (["--config", "/no/such/folder/x"], "/no/such/folder/x"),
        (["--config", "/no/such/folder/x", "--layers", "2"], "or leave --config out"),
        (["--batch-size", "1", "--accumulate-grad-batches", "1", "--accelerator", "abacus"], "abacus"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_bad_input_is_refused_before_any_work(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--length", "16"] if "--config" in arguments else SMALL
    text = tmp_path / "text.txt"
    text.write_text(read_text(None)[:20_000])
    with pytest.raises(SystemExit) as stop:
        cram_llm.main([*more, "--text", str(text), *arguments, "--output", str(tmp_path / "run")])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert said in last


def test_a_config_has_to_read_the_text(tmp_path: Path) -> None:
    small_llama(1, 32, longest=256).config.save_pretrained(tmp_path)
    for vocabulary, length, said in (
        (8, 257, "max_position_embeddings is 256, and at least 257"),
        (1025, 16, "vocab_size is 1024, and at least 1025"),
    ):
        with pytest.raises(ValueError, match=said):
            causal_config(str(tmp_path), range(vocabulary), 6, 128, length)
    assert causal_config(str(tmp_path), range(1024), 6, 128, 256).num_hidden_layers == 1


@pytest.mark.long("takes a second or more")
def test_a_checkpoint_of_another_run_is_not_resumed(
    cram: Callable[..., cram_llm.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        cram(ticks=Ticks(until=0.5 * SECONDS))
    text, other = tmp_path / "text.txt", tmp_path / "other.txt"
    other.write_text(text.read_text()[:-1] + "X")  # as many tokens
    checkpoint = tmp_path / "run" / "checkpoint" / "last.ckpt"
    for more, said in (
        (["--hours", "0.05"], f"hours was {HOURS} and is 0.05"),
        (["--hidden", "64"], "model was another one"),
        (["--pseudo", "0.3"], "pseudo was 0.0 and is 0.3"),
        (["--text", str(other)], "text was another one"),
    ):
        with pytest.raises(SystemExit):
            cram("--resume", str(checkpoint), *more)
        last = capsys.readouterr().err.splitlines()[-1]
        assert said in last
        assert "Resume with the options that the run began with." in last
    with pytest.raises(SystemExit):  # --plan says it all, and is left out
        cram_llm.main([
            "--hours", HOURS, "--text", str(text), *SMALL, "--resume", str(checkpoint), "--precision", "bf16-true",
        ])  # fmt: skip
    assert "precision was another one" in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_blocks_of_several_kinds_are_not_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = small_llama(3, 32), small_llama(3, 32)
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    other.model.layers[1].mlp.act_fn = nn.Identity()
    for each in (model, other):
        with pytest.raises(ValueError, match="blocks are of several kinds"):
            share_block(each)
    model.config.save_pretrained(tmp_path)
    with pytest.raises(SystemExit):
        cram_llm.main(
            ["--config", str(tmp_path), "--pseudo", "0.3", "--batch-size", "1", "--output", str(tmp_path / "run")]
        )
    assert "blocks are of several kinds" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
