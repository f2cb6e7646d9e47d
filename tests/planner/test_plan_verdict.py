"""The first lines of ``plan``: it fits without us, it fits with us, it does not and what would."""

from __future__ import annotations

import json
import logging
import re
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
import transformers
from torch import Tensor

from sp_lightning.__main__ import main
from sp_lightning.core.plan.units import in_gib
from tests.support.answers import plan
from tests.support.models import Module, Stack
from tests.support.tiers import first

SHAPES = Path(__file__).parents[2] / "examples" / "shapes"
LLAMA = str(SHAPES / "llama-3-8b.json")
BILLIONS = "models of billions of parameters"


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """The answer in words; the exit status has to be the one that is given."""
    ended: Any = 0
    try:
        main(["plan", *arguments])
    except SystemExit as stop:
        ended = stop.code
    assert ended == status
    return capsys.readouterr().out


def small_llama(folder: Path, **more: Any) -> str:
    """A language model with large activations and a large head for its size."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=2000, architectures=["LlamaForCausalLM"], **{**sizes, **more})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    return str(folder / "config.json")


# ---------------------------------------------------------------------- it fits


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("model", "batch"),
    first(
        [("resnet18", 2), (str(SHAPES / "vit-giant.json"), 4)],
        if_=lambda each: each[0] == "resnet18",
        second=(),
        why=BILLIONS,
    ),
)
def test_a_model_that_fits_is_left_to_plain_lightning(
    model: str, batch: int, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [model, "--batch-size", str(batch), "--k", "1", "--k-prime", "1"]
    found = plan(capsys, *asked, "--gpu-memory", "40GiB")
    needed = found["plain_bytes"]
    assert needed > found["activation_bytes"] + found["parameters"] * 16, "weights, gradients, two moments"
    verdict = f"You don't need sp_lightning: plain Lightning fits ({in_gib(needed)} of 40.0 GiB) and is faster."
    assert said(capsys, *asked, "--gpu-memory", "40GiB").startswith(f"{verdict}\nWith this strategy: Super")
    assert said(capsys, *asked, "--gpu-memory", f"{needed}B").startswith("You don't need sp_lightning: ")
    less = found["checkpointed_bytes"]
    again = f"Plain Lightning fits if each layer runs in torch.utils.checkpoint ({in_gib(less)} of "
    assert less < needed
    assert said(capsys, *asked, "--gpu-memory", f"{needed - 1}B").startswith(again)
    assert said(capsys, *asked, "--gpu-memory", f"{less - 1}B").startswith("It fits: Super")
    without_limit = said(capsys, *asked)
    assert without_limit.startswith("The fastest: Super")
    assert f" Plain Lightning needs {in_gib(needed)} of GPU memory.\n" in without_limit
    # Plain Lightning has nothing in the host's memory.
    nothing = said(capsys, *asked, "--gpu-memory", "40GiB", "--host-memory", "1KiB")
    assert nothing.startswith(f"{verdict}\nWith this strategy it does not fit: ")


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize("real", first([False, True], False, second=(), why=BILLIONS))
def test_a_model_that_fits_with_us_has_call_speed_and_wait_in_the_first_line(
    real: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [small_llama(tmp_path), "--tokens", "64", "--gpu-memory", "14MiB"]
    asked = [LLAMA, "--tokens", "6144", "--gradient-checkpointing", "--gpu-memory", "22GiB"] if real else small
    found = plan(capsys, *asked)
    (best,) = [each for each in found["windows"] if {name: each[name] for name in found["best"]} == found["best"]]
    lines = said(capsys, *asked).splitlines()
    line = re.fullmatch(
        r"It fits: SuperpipelineStrategy\(k=(\d+), k_prime=(\d+)\).*, (\S+) s per batch, (\S+) tokens/s; "
        r"the GPU waits (\d+)% of the time( \((\d+% for [A-Za-z ]+(, )?)+\))?\.",
        lines[0],
    )
    assert line is not None, lines[0]
    assert (int(line[1]), int(line[2])) == (best["k"], best["k_prime"])
    assert float(line[3]) == pytest.approx(best["seconds"], rel=0.01)
    assert float(line[4]) == pytest.approx(int(asked[2]) / best["seconds"], rel=0.01)
    assert float(line[5]) / 100 == pytest.approx(1 - best["busy_seconds"]["compute"] / best["seconds"], abs=0.01)
    assert sum(map(int, re.findall(r"(\d+)% for ", lines[0]))) == int(line[5]), "the parts add up to the whole"
    assert lines[1] == ""
    assert 4 <= len(lines) - 2 <= 10, "reasons"
    assert any(re.match(r"device memory .*; plain Lightning needs ", each) for each in lines)
    assert not any(word in "\n".join(lines) for word in ("binds", "weights+grads", "slots"))


@pytest.mark.long("takes a second or more")
def test_speed_is_of_all_devices_and_of_what_the_model_takes(capsys: pytest.CaptureFixture[str]) -> None:
    for options, count, what in (
        (["resnet18", "--batch-size", "3", "--devices", "2"], 6, "images"),
        (["tests.support.models:Stack", "--input", "4", "16"], 4, "samples"),
    ):
        asked = [*options, "--k", "1", "--k-prime", "1"]
        (window,) = plan(capsys, *asked)["windows"]
        (number,) = re.findall(rf", ([\d.]+) {what}/s; ", said(capsys, *asked))
        assert float(number) == pytest.approx(count / window["seconds"], rel=0.01)


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("model", "options", "limit"),
    first(
        [
            ("small", ["--tokens", "1024"], "58MiB"),
            ("llama-3.2-3b.json", ["--tokens", "4096"], "24GiB"),
            ("llama-3-8b.json", ["--tokens", "4096", "--lora", "16"], "22GiB"),
        ],
        if_=lambda each: each[0] == "small",
        second=(),
        why=BILLIONS,
    ),
)
def test_activations_that_do_not_all_fit_are_chosen_by_default(
    model: str, options: list[str], limit: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first answer for a card of 24 GiB was that these models do not fit."""
    asked = [small_llama(tmp_path) if model == "small" else str(SHAPES / model), *options, "--gpu-memory", limit]
    assert said(capsys, *asked, "--activations", "keep", "--k", "1", "--k-prime", "1", status=1).startswith(
        "It does not"
    )
    lines = said(capsys, *asked).splitlines()
    assert re.match(rf'It fits: .*activations="auto", gpu_memory="{limit}"\)', lines[0])
    assert re.fullmatch(r"Not all activations fit: keep \d+ \(.*\); offload \d+ \(.*\)\.", lines[1])


# ---------------------------------------------------------------------- it does not


@pytest.mark.long("several plans of a model")
def test_what_does_not_fit_says_how_much_is_enough(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = [small_llama(tmp_path), "--tokens", "128", "--batch-size", "4"]
    line = said(capsys, *asked, "--gpu-memory", "4MiB", status=1).splitlines()[0]
    (needed,) = re.findall(r"^It does not fit: at least (\S+) MiB of GPU memory needed, ", line)
    assert said(capsys, *asked, "--gpu-memory", f"{float(needed) - 0.1}MiB", status=1).startswith("It does not fit: ")
    assert said(capsys, *asked, "--gpu-memory", f"{float(needed) + 0.1}MiB").startswith("It fits: ")

    line = said(capsys, *asked, "--host-memory", "965MiB", status=1).splitlines()[0]
    (enough,) = re.findall(r"^It does not fit: .* of host memory needed .*\. --host-memory (\S+)GiB is enough\.$", line)
    less = f"{float(enough) - 0.002}GiB"
    assert said(capsys, *asked, "--host-memory", less, status=1).startswith("It does not fit: ")
    assert said(capsys, *asked, "--host-memory", f"{enough}GiB").startswith("The fastest: ")


@pytest.mark.long(BILLIONS)
def test_a_large_model_that_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, LLAMA, "--gpu-memory", "24GiB", "--host-memory", "64GiB", status=1)
    first_line = text.splitlines()[0]
    assert " of host memory needed (without the process and libraries), 63.1 GiB available, " in first_line
    assert not re.search(r"\d (MiB|KiB|GB(?!/s))\b", text), "one unit"


@pytest.mark.long("several plans of a model")
def test_what_fits_with_checkpoints_alone_does_not_fit_as_it_was_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first line said that it fits, and the exit status that it does not."""
    asked = [small_llama(tmp_path), "--tokens", "512", "--k", "1", "--k-prime", "1"]
    found = plan(capsys, *asked)
    limits = ["--gpu-memory", f"{found['plain_bytes'] - 1}B", "--host-memory", "0.5GiB"]
    text = said(capsys, *asked, *limits, status=1)
    assert text.startswith("It does not fit: ")
    again = "\nPlain Lightning fits if each layer runs in torch.utils.checkpoint ("
    assert f"{again}{in_gib(found['checkpointed_bytes'])} of " in text
    assert said(capsys, *asked, *limits, "--gradient-checkpointing").startswith("You don't need sp_lightning: ")


@pytest.mark.long("takes a second or more")
def test_the_wait_says_what_bounds_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Host memory or PCIe: a user had to know which of the two updates and fetches depend on."""
    asked = [small_llama(tmp_path), "--tokens", "64", "--k", "1", "--k-prime", "1"]
    assert re.search(r"[( ]\d\d% for optimizer steps in host memory", said(capsys, *asked, "--host-bandwidth", "0.1"))
    assert re.search(r"[( ]\d\d% for uploads over PCIe", said(capsys, *asked, "--pcie", "0.1"))


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


def test_exit_statuses_are_documented(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "plan MODEL [options]" in text
    assert re.search(r"exit status: 0 if it fits.*; 1 if it does not, .*; 2 if ", text)


# ---------------------------------------------------------------------- adapters, the hub's cache, and what libraries say


@pytest.mark.long("takes a second or more")
def test_a_name_of_the_hub_is_read_from_the_cache(
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
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("0123abcd")
    file = small_llama(cached / "snapshots" / "0123abcd")
    found, same = plan(capsys, *asked), plan(capsys, file, *asked[1:])
    assert {**found, "model": ""} == {**same, "model": ""}


class Noisy(Module):
    """Its library warns in every way, as torch and torchao do while they are imported and run without values."""

    def __init__(self) -> None:
        super().__init__(Stack())
        self.example_input_array = torch.zeros(4, 16)

    def forward(self, x: Tensor) -> Tensor:
        warnings.warn("This is deprecated.", stacklevel=1)
        logging.getLogger("torch.utils._pytree").warning("This will be an error.")
        logging.getLogger("torch._subclasses.fake_tensor").error("This failed.")
        return self.net(x)  # type: ignore[no-any-return]


@pytest.fixture
def _logged() -> Iterator[None]:
    before = logging.root.manager.disable
    yield
    assert logging.root.manager.disable == before, "only while plan works"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.usefixtures("_logged")
def test_warnings_of_libraries_are_not_shown(
    caplog: pytest.LogCaptureFixture, recwarn: pytest.WarningsRecorder, capfd: pytest.CaptureFixture[str]
) -> None:
    main(["plan", "tests.planner.test_plan_verdict:Noisy", "--k", "1"])
    assert not caplog.records
    assert not recwarn.list
    assert capfd.readouterr().err == ""


def test_removed_options_name_another_way(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        main(["plan", "resnet18", "--loss-tokens", "32"])
    assert error.value.code == 2
    assert "--loss-tokens was removed: plan a module" in capsys.readouterr().err
