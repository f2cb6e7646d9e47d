"""LoRA trials in lock step: plain Lightning's results to the bit, each trial as if alone, and adapters that PEFT loads."""

from __future__ import annotations

import copy
import csv
import json
import math
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from examples.demos import lockstep_lora
from examples.demos.lockstep_lora import StackedLoRA, Trial, Trials, add_adapters, best, difference, save_adapter
from sp_lightning import SuperpipelineStrategy
from tests.support.models import llama
from tests.support.runs import Outcome, assert_same, fit, fused

TRIALS = [Trial(1e-2, 4, 0), Trial(3e-3, 2, 0), Trial(1e-2, 4, 1)]
TOKENS = torch.arange(4 * 3 * 2 * 16).mul(37).remainder(61).view(4, 3, 2, 16)
"""(steps, trials, rows, length)"""


def batches(which: Sequence[int]) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": each[[*which]], "labels": each[[*which]]} for each in TOKENS]


def small(which: Sequence[int] = range(3)) -> Trials:
    return Trials(llama(layers=2, dropout=0.0).net, [TRIALS[each] for each in which], steps=len(TOKENS))


def trained(which: Sequence[int], strategy: Any = "auto") -> Outcome:
    return fit(fused(partial(small, which)), batches(which), strategy)


@pytest.mark.rest("trainings of a second")
def test_trials_in_lock_step_are_those_of_plain_lightning() -> None:
    assert_same(trained(range(3), SuperpipelineStrategy(k=1)), trained(range(3)))


@pytest.mark.rest("trainings of a second")
def test_a_trial_has_about_the_losses_of_its_run_alone() -> None:
    """About, because a library may round products of more rows differently. Smaller ranks are filled up with zeros."""
    together = trained(range(3)).module
    losses = torch.stack(together.losses)
    assert len({*losses[-1].tolist()}) == 3
    for number in range(3):
        alone = trained([number]).module
        torch.testing.assert_close(losses[:, number], torch.stack(alone.losses)[:, 0], rtol=1e-4, atol=1e-5)


@pytest.mark.rest("a training")
@pytest.mark.parametrize("number", [0, 1])
def test_peft_loads_the_adapter_of_a_trial(number: int, tmp_path: Path) -> None:
    module = trained(range(3)).module
    base = copy.deepcopy(llama(layers=2, dropout=0.0).net)
    for name, each in module.model.named_modules():  # the frozen weights of the module that was trained
        if isinstance(each, StackedLoRA):
            base.get_submodule(name).load_state_dict(each.linear.state_dict())
    rest = {name: value for name, value in module.model.state_dict().items() if name in base.state_dict()}
    base.load_state_dict(rest, strict=False)
    save_adapter(module, number, tmp_path, "base")
    loaded = PeftModel.from_pretrained(base, str(tmp_path)).eval()
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["r"]) == ("base", TRIALS[number].rank)
    batch = batches(range(3))[0]
    with torch.no_grad():
        module.eval()
        expected = module(batch)[number]
        found = loaded(input_ids=batch["input_ids"][number], labels=batch["labels"][number]).loss
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with loaded.disable_adapter(), torch.no_grad():
        assert (
            abs(float(loaded(input_ids=batch["input_ids"][number], labels=batch["labels"][number]).loss - found)) > 1e-3
        )


def test_rows_without_their_trial_are_refused() -> None:
    """An expert's linear layer gets some tokens of all trials, without a dimension of rows."""
    stacked = StackedLoRA(nn.Linear(4, 4), TRIALS[:1], [torch.Generator()])
    with pytest.raises(ValueError, match=r"got an input of shape \(6, 4\)\. Expected \(rows, length, features\)"):
        stacked(torch.ones(6, 4))


def test_a_model_without_linear_layers_is_refused() -> None:
    class Net(nn.Module):
        def get_output_embeddings(self) -> None:
            return None

    with pytest.raises(ValueError, match=r"Net has no torch\.nn\.Linear"):
        add_adapters(Net(), TRIALS)


def test_a_loss_that_is_no_number_is_not_the_best() -> None:
    assert best([math.nan, 2.0, 3.0]) == 1


@pytest.mark.long("several trainings")
def test_the_demonstration_compares_with_runs_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep_lora, "BASE_STEPS", 2)
    size = ["--steps", "4", "--length", "16", "--batch-size", "2", "--output", str(tmp_path), "--accelerator", "cpu"]
    together, alone = lockstep_lora.main(["--rates", "1e-3", "1e-2", "--lora", "2", "4", *size])
    assert [(trial.rate, trial.rank) for trial in together.module.trials] == [
        (1e-3, 2),
        (1e-3, 4),
        (1e-2, 2),
        (1e-2, 4),
    ]
    assert len(alone) == 4
    assert max(difference(together, number, each) for number, each in enumerate(alone)) < 1e-3
    assert together.uploaded < sum(each.uploaded for each in alone) / 2
    said = capsys.readouterr().out
    assert re.search(r"In lock step: [\d.]+ of the time, 0\.\d+ of the uploads\.", said)
    (metrics,) = (tmp_path / "logs").rglob("metrics.csv")
    columns = next(csv.reader(metrics.read_text().splitlines()))
    assert {f"val_loss/{name}" for name in together.module.names} <= {*columns}

    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    loaded = PeftModel.from_pretrained(base, str(tmp_path / "adapter"))
    chosen = best(together.module.val_losses)
    up = together.module.model.get_submodule("model.layers.0.mlp.up_proj").up[chosen]
    name = "base_model.model.model.layers.0.mlp.up_proj.lora_B.default.weight"
    assert torch.equal(dict(loaded.named_parameters())[name], up)
