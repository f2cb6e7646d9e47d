"""The recipe that trains for a given time: its learning rate, its end in time, a resumed run, Pseudo-to-Real, bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from transformers import AutoModelForCausalLM

from examples.demos import cram_llm
from examples.demos.cram_llm import delink, share_block
from tests.examples.small_recipes import LLAMA
from tests.support.models import llama
from tests.support.ticks import Killed, Ticks

SMALL = ["--length", "16", "--batch-size", "2", "--accelerator", "cpu", "--precision", "32-true"]
CONFIG = {**LLAMA, "num_hidden_layers": 3}
SECONDS = 120  # of the budget, by a clock that goes on by so much in each batch
TICK = 3.0
STEPS = int(SECONDS / TICK)
PSEUDO = ("--pseudo", "0.4")


@pytest.fixture
def cram(tmp_path: Path) -> Callable[..., cram_llm.Result]:
    """Runs the recipe."""
    files = write_files(tmp_path)

    def run(*more: str, output: str = "run") -> cram_llm.Result:
        arguments = ["--hours", str(SECONDS / 3600), *files, *SMALL]
        return cram_llm.main([*arguments, "--output", str(tmp_path / output), *more])

    return run


def write_files(folder: Path) -> list[str]:
    """Arguments for a small model and a text, which are written."""
    (folder / "llama.json").write_text(json.dumps(CONFIG))
    (folder / "text.txt").write_text("\n\n".join(topics.values())[:20_000])
    return ["--model", str(folder / "llama.json"), "--data", str(folder / "text.txt")]


def checkpoint_of(folder: Path) -> dict[str, Any]:
    return torch.load(folder / "last.ckpt", weights_only=True)


# ---------------------------------------------------------------------- the time decides


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("tick", [0.5, 1.0])
def test_the_learning_rate_follows_the_time_and_ends_near_zero(
    tick: float, cram: Callable[..., cram_llm.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At any speed. It ends within 1 % of the highest rate, and of the time."""
    clock = Ticks(monkeypatch, tick)
    result = cram()
    steps = SECONDS / tick
    assert len(result.losses) == len(clock.rates) == steps
    assert clock.rates[0] == 0
    assert max(clock.rates) == pytest.approx(2e-3, rel=0.01)
    assert clock.rates.index(max(clock.rates)) == pytest.approx(0.1 * steps, abs=1)
    assert 0 < clock.rates[-1] < 0.01 * 2e-3
    assert result.validations[1] < result.validations[0]
    assert checkpoint_of(tmp_path / "run")["global_step"] == steps
    AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", [[], [*PSEUDO]], ids=["", "pseudo"])
def test_a_run_is_bitwise_that_of_plain_lightning(
    more: list[str], cram: Callable[..., cram_llm.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Ticks(monkeypatch, TICK)
    ours = cram(*more)
    monkeypatch.setattr(cram_llm, "SuperpipelineStrategy", lambda **_: SingleDeviceStrategy("cpu"))
    plain = cram(*more, output="plain")
    assert len(ours.losses) == STEPS
    assert (ours.losses, ours.validations, ours.delinked) == (plain.losses, plain.validations, plain.delinked)
    of_ours, of_plain = checkpoint_of(tmp_path / "run"), checkpoint_of(tmp_path / "plain")
    for part in ("state_dict", "optimizer_states", "lr_schedulers"):
        torch.testing.assert_close(of_ours[part], of_plain[part], rtol=0, atol=0)
    assert (ours.delinked is None) == (not more)
    if ours.delinked is not None:
        assert ours.delinked[0].hex() == ours.delinked[1].hex()
        blocks = [of_ours["state_dict"][f"model.model.layers.{n}.mlp.up_proj.weight"] for n in range(2)]
        assert not torch.equal(*blocks), "each goes on from there"
        states = of_ours["optimizer_states"][0]["state"].values()
        assert {int(state["step"]) for state in states} == {STEPS}, "with the moments of the shared block"


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("more", [[], [*PSEUDO]], ids=["", "pseudo"])
def test_a_killed_run_goes_on_in_what_is_left_of_its_time(
    more: list[str], cram: Callable[..., cram_llm.Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        clock = Ticks(patch, TICK, batches=STEPS - 8)
        with pytest.raises(Killed):
            cram(*more)
    file = tmp_path / "run" / "last.ckpt"
    saved = torch.load(file, weights_only=True)
    done = saved["global_step"] + (round(0.4 * STEPS) if more else 0)
    assert STEPS // 2 < done < STEPS - 8
    with monkeypatch.context() as patch:
        again = Ticks(patch, TICK)
        result = cram(*more, "--resume", str(file))
    assert len(result.losses) == STEPS - done
    assert again.rates[0] == clock.rates[done]
    assert again.rates[-1] < 0.05 * 2e-3
    steps = {int(state["step"]) for state in checkpoint_of(tmp_path / "run")["optimizer_states"][0]["state"].values()}
    assert steps == {STEPS}


# ---------------------------------------------------------------------- Pseudo-to-Real


def test_blocks_of_their_own_begin_with_the_shared_weights_and_moments() -> None:
    torch.manual_seed(0)
    shared, real = share_block(llama(layers=3).net), llama(layers=3).net
    assert len({id(block) for block in shared.model.layers}) == 1
    optimizer = torch.optim.AdamW(shared.parameters())
    tokens = torch.randint(64, (2, 8))
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
def test_one_block_alone_stays_on_the_device(
    cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def strategy(**options: Any) -> SingleDeviceStrategy:
        asked.append(options)
        return SingleDeviceStrategy("cpu")

    monkeypatch.setattr(cram_llm, "SuperpipelineStrategy", strategy)
    Ticks(monkeypatch, SECONDS / 4)
    cram(*PSEUDO, "--gpu-memory", "1GiB")
    alone, given = {"keep_on_gpu": ["**"]}, {"gpu_memory": "1GiB", "optimizer_overlap": "auto"}
    # a look at the options; validation, training; validation before and after; training; validation
    assert asked == [given, alone, alone, alone, given, given, given]


@pytest.mark.long("takes a second or more")
def test_a_loss_that_changed_is_a_defect(cram: Callable[..., cram_llm.Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cram_llm, "delink", lambda *_: {})
    Ticks(monkeypatch, SECONDS / 4)
    with pytest.raises(RuntimeError, match="please report it"):
        cram(*PSEUDO)


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--hours", "0"], "--hours 0.0: expected a number above 0"),
        (["--hours", "inf"], "--hours inf: expected a number below inf"),
        (["--pseudo", "1"], "--pseudo 1.0: expected a number below 1"),
        (["--warmup", "1"], "--warmup 1.0: expected a number below 1"),
        (["--length", "100"], "reads at most 64 tokens"),
        (["--batch-size", "500", "--accumulate-grad-batches", "9"], "a step takes 4500 windows"),
        (["--data", "/no/such/file"], "--data /no/such/file: not found"),
        (["--model", "SMALL"], "vocab_size is 64; expected at least 1"),
    ],
    ids=lambda part: " ".join(part).replace("/", "") if isinstance(part, list) else "",
)
def test_bad_input_is_refused_before_any_work(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "SMALL").mkdir()
    (tmp_path / "SMALL" / "config.json").write_text(json.dumps({**CONFIG, "vocab_size": 64}))
    more = [each.replace("SMALL", str(tmp_path / "SMALL")) for each in arguments]
    with pytest.raises(SystemExit) as stop:
        cram_llm.main([*SMALL, *write_files(tmp_path), *more, "--output", str(tmp_path / "run")])
    assert stop.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "error: " in last
    assert said in last
    assert not (tmp_path / "run").exists()


@pytest.mark.rest("takes tenths of a second")
def test_blocks_of_several_kinds_are_not_shared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, other = llama(layers=3).net, llama(layers=3).net
    model.config.layer_types = ["full_attention", "sliding_attention", "full_attention"]
    other.model.layers[1].mlp.act_fn = nn.Identity()
    for each in (model, other):
        with pytest.raises(ValueError, match="blocks are of several kinds"):
            share_block(each)
    files = write_files(tmp_path)
    kinds = {"model_type": "qwen3", "layer_types": model.config.layer_types}
    (tmp_path / "llama.json").write_text(json.dumps({**CONFIG, **kinds}))
    with pytest.raises(SystemExit):
        cram_llm.main([*files, *SMALL, "--pseudo", "0.3", "--output", str(tmp_path / "run")])
    assert "blocks are of several kinds" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
