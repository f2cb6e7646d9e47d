"""The recipes run end to end at a small size, refuse bad input before any work, and run from Lightning's CLI."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from examples import (
    finetune_diffusion,
    finetune_llm,
    finetune_moe,
    finetune_speech,
    finetune_vision,
    finetune_vlm,
    generate_llm,
)
from examples.demos import bridge_vlm, cram_llm, lockstep_lora, many_models, train_sparse
from sp_lightning.__main__ import main

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "examples" / "configs"
TEXT = ["--length", "16", "--batch-size", "2"]
RECIPES = [
    bridge_vlm,
    cram_llm,
    finetune_diffusion,
    finetune_llm,
    finetune_moe,
    finetune_speech,
    finetune_vision,
    finetune_vlm,
    generate_llm,
    lockstep_lora,
    many_models,
    train_sparse,
]


# ---------------------------------------------------------------------- bad input


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("recipe", "arguments"),
    [
        (bridge_vlm, ["--data", "/no/such/file"]),
        (bridge_vlm, ["--data", str(CONFIGS)]),
        (bridge_vlm, ["--batch-size", "0"]),
        (bridge_vlm, ["--model", "/no/such/folder"]),
        (lockstep_lora, ["--rates", "1e-3", "0"]),
        (lockstep_lora, ["--lora", "0"]),
        (lockstep_lora, ["--model", "/no/such/folder"]),
        (many_models, ["--host-memory", "1GiB,2GiB"]),
        (train_sparse, ["--steps", "0"]),
        (train_sparse, ["--data", "/no/such/folder"]),
    ],
    ids=lambda part: part.__name__.split(".")[-1] if isinstance(part, ModuleType) else " ".join(part).replace("/", ""),
)
def test_bad_input_is_refused_before_any_work(
    recipe: ModuleType, arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        recipe.main([*arguments, "--output", str(tmp_path / "run")])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "error:" in error
    assert arguments[0] in error
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "recipe",
    [finetune_diffusion, finetune_llm, finetune_moe, finetune_speech, finetune_vision, finetune_vlm, generate_llm],
    ids=lambda recipe: recipe.__name__.split(".")[-1],
)
def test_a_wrong_option_is_reported_before_slow_imports(recipe: ModuleType, tmp_path: Path) -> None:
    """In a folder that has only the recipe and what is copied with it."""
    for file in (Path(str(recipe.__file__)), ROOT / "examples" / "common.py"):
        (tmp_path / file.name).write_text(file.read_text())
    command = [sys.executable, "-X", "importtime", Path(str(recipe.__file__)).name, "--batch-size", "0"]
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ran.returncode == 2
    assert "--batch-size 0: expected a number above 0" in ran.stderr.split("error: ")[1]
    imported = re.findall(r"\| +(\w+)$", ran.stderr, re.MULTILINE)  # indented by depth
    assert {"argparse", "common"} <= {*imported}
    assert not {"torch", "lightning", "transformers"} & {*imported}
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- estimates in their headers

PLANNED = re.compile(r"^    superpipeline plan (?P<arguments>(?:.*\\\n)*.*)\n(?P<said>(?: +# .*\n)+)", re.MULTILINE)
HEADERS = [
    pytest.param(found["arguments"], found["said"], id=f"{recipe.__name__.split('.')[-1]}-{number}")
    for recipe in RECIPES
    for number, found in enumerate(PLANNED.finditer(recipe.__doc__ or ""))
]


def test_all_recipes_with_an_estimate_are_found() -> None:
    assert len(HEADERS) == sum((recipe.__doc__ or "").count("\n    superpipeline plan ") for recipe in RECIPES)


@pytest.mark.long("each plans a model of real size, for seconds")
@pytest.mark.parametrize(("arguments", "said"), HEADERS)
def test_an_estimate_in_a_header_is_what_plan_answers(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    main(["plan", *shlex.split(arguments.replace("\\\n", " "))])
    answer = capsys.readouterr().out
    parts = [part for line in said.splitlines() for part in re.split(r"[,;] ", line.strip(" #"))]
    assert len(parts) >= 4
    assert [part for part in parts if part not in answer] == []


# ---------------------------------------------------------------------- ways to start them


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__.split(".")[-1])
def test_a_recipe_can_be_started_as_a_file(recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``python examples/finetune_llm.py`` has examples/ on its path, and not the folder that examples/ is in."""
    assert recipe.__file__ is not None
    monkeypatch.chdir(tmp_path)
    others = [p for p in sys.path if p and Path(p).resolve() not in (ROOT, ROOT / "examples")]
    monkeypatch.setattr(sys, "path", [str(Path(recipe.__file__).parent), *others])
    for name in [name for name in sys.modules if name.split(".")[0] in ("examples", "common")]:
        monkeypatch.delitem(sys.modules, name)
    assert callable(runpy.run_path(recipe.__file__)["main"])


SMALL = ["--model.model.layers", "2", "--model.model.hidden", "32"]
QUIET = ["--trainer.accelerator", "cpu", "--trainer.enable_progress_bar", "false"]


@pytest.mark.long("test_command_line has the CLI")
def test_configs_train_and_predict_on_the_command_line(tmp_path: Path) -> None:
    def run(command: str, *more: str) -> str:
        config = str(CONFIGS / f"{command}_llm.yaml")
        ran = subprocess.run(
            [sys.executable, "-m", "sp_lightning", command, "--config", config, *SMALL, *QUIET, *more],
            capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert ran.returncode == 0, ran.stderr[-2000:]
        return ran.stdout + ran.stderr

    assert "k = 2, k' = 1" in run("fit", "--trainer.max_steps", "3")
    assert "k = 2, k' = 1" in run(
        "predict", "--ckpt_path", "runs/fit_llm/last.ckpt", "--model.generation.max_new_tokens", "3"
    )
    answers = (tmp_path / "runs" / "predict_llm" / "answers.jsonl").read_text().splitlines()
    assert len(answers) == len(generate_llm.PROMPTS)
    assert all(json.loads(answer)["tokens"] <= 3 for answer in answers)


@pytest.mark.long("two processes that import torch; test_ranks_launch has torchrun in the second tier")
def test_a_config_of_two_devices_trains(tmp_path: Path) -> None:
    ten = ["--trainer.max_steps", "10", "--trainer.val_check_interval", "10"]
    configs = [word for name in ("fit_llm", "two_devices") for word in ("--config", str(CONFIGS / f"{name}.yaml"))]
    ran = subprocess.run(
        [sys.executable, "-m", "sp_lightning", "fit", *configs, *SMALL, *QUIET, *ten],
        capture_output=True, text=True, cwd=tmp_path, timeout=300, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stderr.count("k = 2, k' = 1") == 1
    assert sorted(path.name for path in (tmp_path / "runs" / "fit_llm").iterdir()) == ["last.ckpt", "version_0"]
    rows = (tmp_path / "runs" / "fit_llm" / "version_0" / "metrics.csv").read_text().splitlines()
    assert len(rows) == 3  # a head, ten steps and their validation
    assert torch.load(tmp_path / "runs" / "fit_llm" / "last.ckpt", weights_only=True)["global_step"] == 10
