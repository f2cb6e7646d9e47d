"""What README and the guides show is run: Python code, commands, configs; and what they link to is there."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch.utils.data import DataLoader

from sp_lightning.__main__ import main
from tests.support import stacked
from tests.support.models import llama, tokens
from tests.support.repository import ROOT, blocks
from tests.support.runs import loader

PAGES = [ROOT / "README.md", *sorted((ROOT / "examples").glob("[dg]*/*.md"))]
LINKED = [*PAGES, *(ROOT / name for name in ("CHANGELOG.md", "CONTRIBUTING.md")),
          *sorted((ROOT / "examples").glob("[br]*/**/*.md")), *sorted((ROOT / "tests").glob("*.md"))]  # fmt: skip
"""All pages of the repository."""
ELLIPSIS = "…"
LINK = re.compile(r"\]\((?!https?://)([^)]+)\)")

pytestmark = [
    # torch's own remark about nn.RMSNorm under autocast, which leaves its weight in float32.
    pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight:UserWarning"),
    pytest.mark.filterwarnings("ignore:Precision bf16-mixed is not supported by the model summary:UserWarning"),
    # torch.distributed.checkpoint.load in a single process.
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning"),
]


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def having(language: str) -> list[Any]:
    return [pytest.param(page, id=named(page)) for page in PAGES if blocks(page, language)]


SEVERAL = ROOT / "examples" / "guide" / "several_devices.md"


def test_a_linter_leaves_the_imports_of_the_guides_as_they_are(tmp_path: Path) -> None:
    """``ruff --fix`` deleted ``import sp_lightning``, and then the strategy's name was invalid."""
    for page in PAGES[1:]:
        (tmp_path / f"{page.stem}.py").write_text("\n".join(blocks(page, "python")))
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F401", str(tmp_path)]
    run = subprocess.run(ruff, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout


@pytest.mark.long("processes that import torch; test_ranks_launch has a script")
def test_python_code_of_several_devices_runs(tmp_path: Path) -> None:
    """As a script, because Lightning starts it again for each further device."""
    given = """
from tests.support.models import llama, tokens
from tests.support.runs import loader
model = llama()
model.train_dataloader = lambda: loader(tokens(2))
"""
    ends = """
print(f"rank {trainer.global_rank} has made {trainer.global_step} of {reference.global_step} steps")
"""
    (tmp_path / "script.py").write_text("\n".join([given, *blocks(SEVERAL, "python"), ends]))
    run = subprocess.run(
        [sys.executable, "script.py"], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=300,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f"rank {rank} has made 1 of 1 steps" in run.stdout


@pytest.mark.rest("trainings of several seconds")
@pytest.mark.parametrize("page", [page for page in having("python") if page.values[0] != SEVERAL])
def test_python_code_runs(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """All blocks of a page in one namespace, which has the reader's ``model``: a small Llama with its data.

    If the page has the log line that shows that it works, the log has it. If it loads gpt-oss, there is a small one.
    """

    def train_dataloader() -> DataLoader[Any]:
        return loader(tokens(2))

    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, logger="lightning.pytorch.superpipeline")
    if "gpt-oss-20b" in "".join(blocks(page, "python")):
        gpt_oss = stacked.dense()
        gpt_oss.config.save_pretrained(stacked.write_files(tmp_path / "gpt-oss-20b", stacked.files_of(gpt_oss)))
    namespace: dict[str, Any] = {"model": llama()}
    namespace["model"].train_dataloader = train_dataloader
    for block in blocks(page, "python"):
        exec(compile(block, named(page), "exec"), namespace)
    trained = "trainer.fit" in page.read_text()
    assert not trained or namespace["trainer"].global_step > 0
    if "## How to see that it works" in page.read_text():
        (shown,) = blocks(page, "text")
        line = ".+".join(map(re.escape, shown.strip().split(ELLIPSIS)))
        assert any(re.fullmatch(line, logged) for logged in caplog.messages), caplog.messages


def commands() -> list[Any]:
    """The commands of the package with what they print; a command's block ends with the next command."""
    found = []
    for page in PAGES:
        for block in blocks(page, "console"):
            for shown in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
                command, *output = shown.strip().splitlines()
                marks = pytest.mark.long("models of billions of parameters, built anew for each command")
                found.append(pytest.param(command, output, id=f"{named(page)}: {command[:60]}", marks=marks))
    return found


@pytest.mark.rest(
    "each runs a model of billions of parameters without values; tests/planner has small ones in the first tier"
)
@pytest.mark.parametrize(("command", "output"), commands())
def test_commands_print_what_is_shown(
    command: str, output: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    program, *arguments = shlex.split(command)
    assert program == "superpipeline"
    main(arguments)
    printed = capsys.readouterr().out.splitlines()
    patterns = [".*".join(map(re.escape, line.split(ELLIPSIS))) for line in output]
    assert [each for each in patterns if not any(re.fullmatch(each, line) for line in printed)] == []


@pytest.mark.long("a process of its own; test_options has one")
@pytest.mark.parametrize("page", having("yaml"))
def test_configs_train(page: Path, tmp_path: Path) -> None:
    """With a model and data of the CLI's own kind beside them."""
    for number, block in enumerate(blocks(page, "yaml")):
        shown = yaml.safe_load(block)
        folder = tmp_path / str(number)  # the command line leaves its config there
        quiet = {
            "default_root_dir": str(folder),
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "max_steps": 1,
        }
        config = tmp_path / "config.yaml"
        config.write_text(yaml.safe_dump({**shown, "trainer": {**shown["trainer"], **quiet}}))
        demos = "lightning.pytorch.demos.boring_classes"
        data = ["--model", f"{demos}.BoringModel", "--data", f"{demos}.BoringDataModule"]
        arguments = ["fit", "--config", str(config), *data]
        run = subprocess.run(
            [sys.executable, "-m", "sp_lightning", *arguments], capture_output=True, text=True, check=False
        )
        assert run.returncode == 0, run.stderr


def test_the_notebook_is_valid_and_its_code_compiles() -> None:
    notebook = json.loads((ROOT / "examples" / "first_check.ipynb").read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert "has not been opened yet" in "".join(cells[0]["source"])
    for cell in cells:
        if cell["cell_type"] == "code":
            compile("".join(cell["source"]), cell["id"], "exec")
            assert (cell["outputs"], cell["execution_count"]) == ([], None)


def test_the_two_commands_of_readme_are_one_line_each() -> None:
    """Scripts and people copy them; each makes its environment and activates it."""
    install, tests = [line for block in blocks(ROOT / "README.md", "bash") for line in block.splitlines()]
    for command in (install, tests):
        assert command.startswith("python3 -m venv .venv && . .venv/bin/activate && pip install -q -e ")
    assert install.endswith(" && python examples/finetune_llm.py")
    assert tests.endswith(" && python -m pytest")


@pytest.mark.parametrize("page", LINKED, ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if anchor:
            heads = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, link


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_recipes_that_are_named_have_the_options_that_are_shown(page: Path) -> None:
    for script, options in re.findall(r"`python (examples/[\w/]+\.py)([^`]*)`", page.read_text()):
        source = "".join((ROOT / file).read_text() for file in (script, "examples/common.py"))
        for option in re.findall(r"--[\w-]+", options):
            assert f'"{option}"' in source, f"{script} {option}"
