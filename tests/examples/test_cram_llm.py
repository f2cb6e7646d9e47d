"""The recipe that has so many hours: its clock, its end in time, a resumed run, Pseudo-to-Real, bad input."""

from __future__ import annotations

import itertools
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

from examples import budget, cram_llm
from examples.budget import Clock, UntilTime, triangle
from examples.language import small_llama
from examples.planned import ask_plan
from examples.pseudo import delink, share_block
from examples.text import read_text
from tests.support.tiers import first

SMALL = ["--layers", "3", "--hidden", "32", "--length", "16", "--accelerator", "cpu"]
SECONDS = 120  # of the budget, by a clock that ticks when it is read
HOURS = str(SECONDS / 3600)
PLAN = {
    "budget": {
        "hours": 0.04, "batch": 2, "accumulate": 2, "tokens": 16, "steps": 30, "seconds_per_step": 5.0,
        "total_tokens": 1920, "epochs": 0.1, "cost": None,
    },
    "strategy": {"k": 1, "k_prime": 1},
    "precision": "32-true",
}  # fmt: skip


class Killed(Exception):
    pass


class Ticks:
    """A clock that goes on by so much whenever it is read, and fails at a time."""

    def __init__(self, tick: float = 0.5, until: float = 1e9) -> None:
        self.tick, self.until, self.time = tick, until, 1000.0

    def __call__(self) -> float:
        self.time += self.tick
        if self.time > 1000 + self.until:
            raise Killed
        return self.time


@pytest.fixture
def cram(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., cram_llm.Result]:
    """Runs the recipe by a clock of its own."""
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "text.txt").write_text(read_text(None)[:20_000])

    def run(*more: str, ticks: Ticks | None = None, output: str = "run") -> cram_llm.Result:
        monkeypatch.setattr(budget, "now", ticks or Ticks())
        arguments = [
            "--hours",
            HOURS,
            "--plan",
            str(tmp_path / "plan.json"),
            "--text",
            str(tmp_path / "text.txt"),
            *SMALL,
        ]
        return cram_llm.main([*arguments, "--output", str(tmp_path / output), *more])

    return run


def checkpoint_of(result: cram_llm.Result) -> dict[str, Any]:
    return torch.load(result.checkpoint, weights_only=True)


# ---------------------------------------------------------------------- the clock decides


@pytest.mark.parametrize("tick", [0.5, 1.0])
def test_a_run_ends_in_its_time_annealed_at_any_speed(tick: float, cram: Callable[..., cram_llm.Result]) -> None:
    result = cram(ticks=Ticks(tick))
    step = 6 * tick
    assert 0.99 * SECONDS - 1.5 * step < result.seconds <= SECONDS
    assert len(result.validations) == budget.PARTS + 1
    assert result.tokens == len(result.losses) * 2 * 2 * 16
    saved = checkpoint_of(result)
    assert saved["global_step"] == len(result.losses)
    # The rate of the step that was not made any more; a straight line leads to 0 where training was to end.
    assert saved["optimizer_states"][0]["param_groups"][0]["lr"] < 2e-3 * 1.5 * step / (0.9 * SECONDS)
    assert (len(result.losses) > 20) == (tick == 0.5)
    AutoModelForCausalLM.from_pretrained(result.checkpoint.parents[1] / "model")


def test_the_learning_rate_follows_time_and_not_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(tick=0.0)
    monkeypatch.setattr(budget, "now", ticks)
    clock = Clock()
    clock.allot(100 / (1 - budget.AFTER))
    clock.ready, clock.closing = 10.0, 10.0
    module = cram_llm.Crammed(nn.Linear(1, 1), SimpleNamespace(lr=0.5, warmup=0.25), clock)  # type: ignore[arg-type]
    made = module.configure_optimizers()
    optimizer, scheduler = made["optimizer"], made["lr_scheduler"]["scheduler"]
    rates = {}
    for seconds in (10, 20, 20, 30, 60, 90, 99):
        ticks.time = 1000.0 + seconds
        optimizer.step()
        scheduler.step()
        rates[seconds] = optimizer.param_groups[0]["lr"]
    assert rates == pytest.approx({10: 0.0, 20: 0.25, 30: 0.5, 60: 0.25, 90: 0.0, 99: 0.0})
    assert made["lr_scheduler"]["interval"] == "step"
    assert [triangle(share, 0.5) for share in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 0.0]


def test_a_part_ends_before_the_step_that_would_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = Ticks(tick=0.0)
    monkeypatch.setattr(budget, "now", ticks)
    clock = Clock()
    clock.allot(100 / (1 - budget.AFTER))
    batches = UntilTime(torch.arange(6)[:, None], clock, [0.5, 1.0], batch=2, accumulate=2, seed=0)
    next(iter(batches))  # Lightning makes an iterator, fetches a batch and drops both
    parts = []
    for _ in range(2):
        rows = []
        for batch in batches:
            rows.append(batch.flatten().tolist())
            ticks.time += 4
        parts.append(rows)
        ticks.time += 10
    # A step takes 8 s: six end by 50 s, and by 58 s would end seven. What ends a part took 10 s, so 90 are left in all.
    assert [len(rows) for rows in parts] == [12, 6]
    assert clock.closing == 10
    assert [sorted(itertools.chain(*parts[0][at : at + 3])) for at in (0, 3, 6)] == [[*range(6)]] * 3
    assert parts[0][:3] != parts[0][3:6]
    again = UntilTime(batches.rows, clock, [0.5, 1.0], batch=2, accumulate=2, seed=0, part=2, number=3)
    assert list(again) == []
    assert [again._rows_of(number).flatten().tolist() for number in range(12)] == parts[0]


# ---------------------------------------------------------------------- plain Lightning, and a run that was killed


@pytest.mark.parametrize(
    "more", first([[], ["--pseudo", "0.4"]], ["--pseudo", "0.4"], why="the same without its first phase")
)
def test_a_run_is_bitwise_that_of_plain_lightning(
    more: list[str], cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = cram(*more)
    monkeypatch.setattr(cram_llm, "SuperpipelineStrategy", lambda **_: SingleDeviceStrategy("cpu"))
    plain = cram(*more, output="plain")
    assert len(ours.losses) > 20
    assert (ours.losses, ours.validations, ours.delinked) == (plain.losses, plain.validations, plain.delinked)
    of_ours, of_plain = checkpoint_of(ours), checkpoint_of(plain)
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(of_ours[part], of_plain[part], rtol=0, atol=0)
    assert (ours.delinked is None) == (not more)


@pytest.mark.parametrize(
    ("share", "phase", "part"),
    [
        pytest.param(0.38, "pseudo", 1, marks=pytest.mark.rest("the first tier has the end of this phase")),
        (0.46, "pseudo", 2),
        (0.84, "real", 2),
    ],
)
def test_a_killed_run_goes_on_in_what_is_left_of_its_time(
    share: float, phase: str, part: int, cram: Callable[..., cram_llm.Result], capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--pseudo", "0.4")
    whole = cram(*more, output="whole")
    with pytest.raises(Killed):
        cram(*more, ticks=Ticks(until=share * SECONDS))
    file = whole.checkpoint.parents[2] / "run" / "checkpoint" / "last.ckpt"
    note = budget.read_note(file)
    done = sum(map(len, note["curve"]["parts"]))
    assert (note["phase"], note["part"], note["is_over"]) == (phase, part, False)
    assert 0 < done < len(whole.losses)

    again = cram(*more, "--resume", str(file))
    assert (
        again.losses[: done + 1] == whole.losses[: done + 1]
    )  # the next one is of the same weights and the same batch
    assert (
        again.validations[: len(note["curve"]["validations"])] == whole.validations[: len(note["curve"]["validations"])]
    )
    assert len(again.validations) == len(whole.validations)
    assert done < len(again.losses) <= len(whole.losses)  # set-up has taken time again
    assert 0.97 * SECONDS < again.seconds <= SECONDS
    saved = checkpoint_of(again)
    assert saved["cram"]["is_over"]
    assert all(int(state["step"]) == len(again.losses) for state in saved["optimizer_states"][0]["state"].values())
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cram(*more, "--resume", str(file))
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


def test_the_loss_is_the_same_before_and_after_and_training_goes_on(
    cram: Callable[..., cram_llm.Result], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "curves.png"
    result = cram("--pseudo", "0.4", "--plot", str(picture))
    assert result.delinked is not None
    assert result.delinked[0].hex() == result.delinked[1].hex()
    saved = checkpoint_of(result)
    blocks = [saved["state_dict"][f"model.model.layers.{n}.mlp.up_proj.weight"] for n in range(3)]
    assert not torch.equal(blocks[0], blocks[1])
    assert all(int(state["step"]) == len(result.losses) for state in saved["optimizer_states"][0]["state"].values())
    assert 5_000 < picture.stat().st_size < 100_000


def test_a_loss_that_changed_is_a_defect(cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cram_llm, "delink", lambda *_: {})
    with pytest.raises(RuntimeError, match=r"This is a defect"):
        cram("--pseudo", "0.4")


# ---------------------------------------------------------------------- the plan


def test_the_plan_is_asked_for_with_what_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def run(command: list[str], **_: Any) -> SimpleNamespace:
        asked.append(command)
        return SimpleNamespace(returncode=0, stdout=json.dumps(PLAN), stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(budget, "now", Ticks())
    (tmp_path / "rates.json").write_text("{}")
    arguments = ["--hours", HOURS, "--rates", str(tmp_path / "rates.json"), "--accumulate", "2", *SMALL]
    result = cram_llm.main([*arguments, "--output", str(tmp_path / "run")])
    assert result.tokens % (2 * 2 * 16) == 0
    (command,) = asked
    assert command[:4] == [sys.executable, "-m", "sp_lightning", "plan"]
    assert json.loads(Path(command[4], "config.json").read_text())["num_hidden_layers"] == 3
    options = dict(zip(command[5:-1:2], command[6:-1:2], strict=True))
    assert 0.8 * SECONDS < 3600 * float(options.pop("--hours")) < SECONDS
    assert int(options.pop("--dataset-tokens")) > 10_000
    assert options == {
        "--tokens": "16", "--clip": "norm", "--accumulate": "2", "--rates": str(tmp_path / "rates.json"),
    }  # fmt: skip
    assert command[-1] == "--json"


def test_set_up_may_not_take_all_of_the_time(
    cram: Callable[..., cram_llm.Result], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cram(ticks=Ticks(tick=SECONDS))
    assert f"of {SECONDS}.0 s. Give more --hours, or a --plan" in capsys.readouterr().err


@pytest.mark.rest("a subprocess that imports torch and looks for the fastest way")
def test_the_plan_of_this_package_is_understood(tmp_path: Path) -> None:
    small_llama(3, 32).config.save_pretrained(tmp_path)
    planned = ask_plan(tmp_path, hours=0.1, tokens=16, batch=2, accumulate=4, precision="bf16-true", clip="norm")
    assert (planned.batch, planned.accumulate, planned.precision, planned.seconds) == (2, 4, "bf16-true", 360)
    assert planned.steps * planned.seconds_per_step == pytest.approx(360, rel=0.01)
    cram_llm.SuperpipelineStrategy(**planned.strategy)


def test_a_plan_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = SimpleNamespace(returncode=1, stdout="It does not fit.", stderr="")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(
        ValueError, match=r"plan \S+ --hours 0.5 --batch 3 --json` ended with status 1: It does not fit"
    ):
        ask_plan(tmp_path, hours=0.5, batch=3, rates=None)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hours", "0"], "--hours 0.0: must be above 0"),
        (["--hours", "-1"], "--hours -1.0: must be above 0"),
        (["--hours", "nan"], "--hours nan: must be above 0"),
        (["--hours", "inf"], "--hours inf: must be"),
        (["--pseudo", "1"], "--pseudo 1.0: must be"),
        (["--batch", "0"], "--batch 0: must be at least 1"),
        (["--batch", "5000", "--accumulate", "9"], "too short for one step"),
        (["--plan", __file__], "is no answer of `python -m sp_lightning plan"),
        (["--plan", __file__, "--batch", "2"], "says all that --batch is for"),
        (["--rates", "/no/such/file"], "--rates /no/such/file: there is no such file"),
        (["--resume", "/no/such/file"], "--resume /no/such/file: there is no such file"),
        (["--resume", __file__], "is no checkpoint of this recipe"),
        (["--config", "/no/such/folder/x"], "/no/such/folder/x"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_bad_input_is_refused_before_any_work(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--length", "16"] if "--config" in arguments else SMALL
    with pytest.raises(SystemExit) as stop:
        cram_llm.main([*more, *arguments, "--output", str(tmp_path / "run")])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert said in last


def test_a_checkpoint_of_another_run_is_not_resumed(
    cram: Callable[..., cram_llm.Result], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Killed):
        cram(ticks=Ticks(until=0.5 * SECONDS))
    for more, said in (
        (["--hours", "0.05"], f"hours was {HOURS} and is 0.05"),
        (["--hidden", "64"], "model was another one"),
        (["--pseudo", "0.3"], "pseudo was 0.0 and is 0.3"),
    ):
        with pytest.raises(SystemExit):
            cram("--resume", str(tmp_path / "run" / "checkpoint" / "last.ckpt"), *more)
        last = capsys.readouterr().err.splitlines()[-1]
        assert said in last
        assert "Resume with the options that the run began with." in last


def test_blocks_of_several_kinds_are_not_shared() -> None:
    model = small_llama(3, 32)
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    with pytest.raises(ValueError, match="blocks are of several kinds"):
        share_block(model)
