"""The command line around ``plan``: what it needs, what it hides, and what programs read."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import huggingface_hub
import pytest
import transformers

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.arguments import REMOVED, make_parser
from sp_lightning.tools.planner.estimate import SAME
from tests.planner.models import SHAPES, write_configs
from tests.support.planner import plan, question


@pytest.mark.long("a model of many billions of parameters")
def test_equal_blocks_of_seventy_billion_parameters_run_once(capsys: pytest.CaptureFixture[str]) -> None:
    """So it takes seconds."""
    # Not of the block itself: transformers checkpoints inside the block's forward, and not in another one put in its place.
    part: Any = transformers.models.llama.modeling_llama.LlamaMLP
    with mock.patch.object(part, "forward", autospec=True, side_effect=part.forward) as forward:
        found = plan(
            capsys, str(SHAPES / "llama-3-70b.json"), "--precision", "bf16-true", "--gpu-memory", "24GiB",
            "--host-memory", "560GiB", "--gradient-checkpointing", "--k", "1", "2",
        )  # fmt: skip
    assert forward.call_count == 2 * 3, "of 80 blocks the first two and the last one, each once again in backward"
    assert found["parameters"] == 70_553_706_496
    assert len(found["layers"]) == 81
    assert found["tables"] == [{"name": "model.embed_tokens", "bytes": 128256 * 8192 * 2}]
    # Eight bytes for each: weight, gradient and two moments in bfloat16.
    assert found["host_bytes"] == pytest.approx(8 * 70.55e9, rel=0.02)
    # 6 N T, and 2 N T for the recompute of the blocks; attention comes on top, embeddings need none.
    assert 0.9 < found["flops"] / (8 * 70.55e9 * 2048) < 1.1
    enough = SAME * min(window["seconds"] for window in found["windows"])
    fast = [window for window in found["windows"] if window["seconds"] <= enough]
    smallest = min(fast, key=lambda window: window["device_bytes"])
    assert all(window["fits"] for window in found["windows"])
    assert found["best"] == {key: smallest[key] for key in ("k", "k_prime", "gpu_layers")}
    assert found["verdict"].startswith(f"It fits: SuperpipelineStrategy(k={smallest['k']}")


def test_help_needs_neither_torch_nor_lightning() -> None:
    code = "import runpy, sys; sys.argv = ['superpipeline', 'plan', '--help']; import sp_lightning.__main__ as it\n"
    code += "try: it.main()\nexcept SystemExit: print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_of_plan(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "plan MODEL [options]" in text
    assert re.search(r"exit status: 0 if it fits.*; 1 if it does not, .*; 2 if ", text)
    assert not [option for option in REMOVED if option in text]


@pytest.mark.long("a subprocess that imports torch")
def test_modules_in_the_current_folder(tmp_path: Path) -> None:
    """The console script does not have it on its path."""
    (tmp_path / "mine.py").write_text(
        "from torch import nn\ndef make(): return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))\n"
    )
    code = "import sys; sys.path.pop(0); sys.argv = ['superpipeline', 'plan', 'mine:make', '--input', '2', '8', '--k', '1']\n"
    code += "import sp_lightning.__main__ as it; it.main()"
    environment = {**os.environ, "PYTHONPATH": str(SHAPES.parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "SuperpipelineStrategy(" in done.stdout


@pytest.mark.long("a subprocess that imports torch")
def test_a_reader_that_has_seen_enough() -> None:
    command = f"{sys.executable} -m sp_lightning plan resnet18 --k 1 | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"
    assert "BrokenPipe" not in done.stderr


def test_the_keys_of_an_answer_are_frozen(capsys: pytest.CaptureFixture[str]) -> None:
    """Programs read them. The CHANGELOG says what changes."""
    assert set(plan(capsys, "tests.planner.models:Known", "--k", "1")) == {
        "activation_bytes", "activations", "assumed", "batch", "best", "checkpointed_bytes", "devices", "disk",
        "flops", "generated_tokens", "gpu_layers", "host_bytes",
        "host_fits", "host_parts", "layers", "measured", "model", "notes",
        "offloaded_bytes", "optimizer_on", "pack_experts", "parameters", "plain_bytes", "precision", "prompt_seconds",
        "saved_bytes", "tables", "trained_parameters", "training", "verdict", "windows",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing.json", "'missing.json' does not exist"),
        ("nobody/nothing", "'nobody/nothing': not a folder, and its"),
    ],
)
def test_a_wrong_name_is_refused_before_libraries_are_imported(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for library in ("transformers", "torchvision"):
        monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(SystemExit) as ended:
        main(["plan", name])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_names_of_the_hub_in_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    asked = ["someone/their-model", "--tokens", "64", "--k", "1"]
    with pytest.raises(SystemExit) as ended:
        main(["plan", *asked])
    assert ended.value.code == 2
    message = capsys.readouterr().err
    assert "'someone/their-model': not a folder, and its config.json is not in the cache" in message
    assert "hf download someone/their-model config.json" in message
    cached = tmp_path / "models--someone--their-model"
    (snapshot := cached / "snapshots" / "0123abcd").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0123abcd")
    file = write_configs(snapshot) / "llama.json"
    file.rename(snapshot / "config.json")
    found, same = plan(capsys, *asked), plan(capsys, str(snapshot), *asked[1:])
    assert {**found, "model": ""} == {**same, "model": ""}


@pytest.fixture
def _logged() -> Iterator[None]:
    before = logging.root.manager.disable
    yield
    assert logging.root.manager.disable == before, "only while plan works"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("_logged")
def test_warnings_of_libraries_are_hidden(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "tests.planner.models:Noisy", "--k", "1"])
    assert not caplog.records
    assert not recwarn.list
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25", 25e9), ("25GB/s", 25e9), ("200Gb/s", 25e9), ("200 Gbit/s", 25e9), ("100Gbps", 12.5e9), ("800Mb/s", 0.1e9)],
)
def test_rates_in_bytes_and_in_bits_as_networks_are_sold(text: str, rate: float) -> None:
    assert make_parser().parse_args(["plan", "vit_b_16", "--links", text]).links == rate


def test_a_share_of_layers_as_it_was_given() -> None:
    """1.0 is all layers, and 1 is one."""
    for given, expected in (("1.0", 1.0), ("1", 1), ("0.25", 0.25), ("auto", "auto")):
        asked = question("resnet18", "--gpu-layers", given, "--gpu-memory", "1GiB").gpu_layers
        assert (asked, type(asked)) == (expected, type(expected))
