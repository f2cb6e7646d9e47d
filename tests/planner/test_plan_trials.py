"""``plan --trials``: what trainings that share a frozen base take."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.__main__ import main
from tests.support.answers import plan

SHAPE = "examples/shapes/llama-3-8b.json"
HOW = ("--precision", "bf16-true", "--lora", "16", "--gradient-checkpointing", "--tokens", "512")
LORA = (SHAPE, *HOW)


@pytest.fixture
def short(tmp_path: Path) -> str:
    """The same with 8 of its 32 layers, which is planned in a quarter of the time."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(Path(SHAPE).read_text()), "num_hidden_layers": 8}))
    return str(file)


def test_each_trial_brings_its_share(short: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = plan(capsys, short, *HOW, "--k", "1", "--k-prime", "1")
    assert alone["trials"] is None
    frozen = 2 * (alone["parameters"] - alone["trained_parameters"])
    before = alone["windows"][0]["seconds"]
    for count in (2, 4, 8):
        found = plan(capsys, short, *HOW, "--k", "1", "--k-prime", "1", "--trials", str(count))["trials"]
        assert found["alone"] == before
        assert found["alone_bytes"] / found["nbytes"] == pytest.approx(count, rel=0.05)  # adapters are each trial's own
        assert found["device_bytes"] == (1 + count) * alone["windows"][0]["device_bytes"]  # what a run gives each
        assert found["seconds"] <= before
    busy = alone["windows"][0]["busy_seconds"]
    assert found["seconds"] == busy["compute"]
    assert found["most"] == pytest.approx(busy["fetch"] / busy["compute"], abs=1)
    assert found["alone_bytes"] < 2.1 * frozen


@pytest.mark.rest("several plans")
def test_it_says_how_many_fit_and_what_binds(short: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *LORA, "--gpu-memory", "12GiB", "--trials", "8"])
    assert ended.value.code == 1
    line, _, alone = capsys.readouterr().out.splitlines()[:3]
    assert alone == "One alone:"
    assert line.startswith(
        "trials lack device memory: 8 at once over one SharedBase, with k = 1 and k' = 1: a step of all takes at"
    )
    assert "compute binds, and more than " in line
    assert " needed, 12.0 GiB available (enough for 3 trials), in 9 equal shares" in line
    main(["plan", short, *HOW, "--gpu-memory", "12GiB", "--trials", "2"])
    assert capsys.readouterr().out.startswith("trials fit: 2 at once over one SharedBase")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--precision", "bf16-true"), "freeze the base (--lora, or a factory)"),
        (
            ("--lora", "16"),
            "frozen float32 weights are uploaded as casts; load the base in bfloat16 (in a factory)",
        ),
    ],
)
def test_what_has_nothing_in_common_is_said(
    options: tuple[str, ...], why: str, short: str, capsys: pytest.CaptureFixture[str]
) -> None:
    in_float32 = {name: value for name, value in json.loads(Path(short).read_text()).items() if name != "torch_dtype"}
    Path(short).with_name("float32.json").write_text(json.dumps(in_float32))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(Path(short).with_name("float32.json")), *options, "--tokens", "128", "--trials", "2"])
    assert ended.value.code == 1, "they do not run as they were asked for"
    assert why in capsys.readouterr().out


def test_what_does_not_travel_is_not_shared(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *LORA, "--trials", "2", "--k", "33", "--predict"])
    assert "trials: they share too few of the bytes that are copied" in capsys.readouterr().out


@pytest.mark.parametrize("other", [("--devices", "2"), ("--nodes", "2"), ("--disk", "7GB/s")])
def test_several_devices_share_nothing(other: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *LORA, "--trials", "2", *other])
    assert ended.value.code == 2
    assert "--trials share the uploads of one device from host memory" in capsys.readouterr().err


@pytest.mark.rest("plans 8 billion parameters four times; what fits the device is in the first tier")
def test_the_base_is_in_host_memory_once(capsys: pytest.CaptureFixture[str]) -> None:
    alone = plan(capsys, *LORA, "--k", "1", "--k-prime", "1")
    frozen = 2 * (alone["parameters"] - alone["trained_parameters"])
    found = plan(capsys, *LORA, "--k", "1", "--k-prime", "1", "--trials", "3")["trials"]
    assert found["host_bytes"] == frozen + 3 * (alone["host_bytes"] - frozen)
    main(["plan", *LORA, "--gpu-memory", "12GiB", "--trials", "2"])
    assert capsys.readouterr().out.startswith("trials fit: 2 at once over one SharedBase")
    with pytest.raises(SystemExit) as ended:
        main(["plan", *LORA, "--trials", "40", "--host-memory", "16.5GiB"])
    assert ended.value.code == 1
    assert capsys.readouterr().out.startswith("trials lack host memory: 40 at once")


def test_trials_are_asked_of_one_model(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *LORA, "--batch-size", "1", "2", "--trials", "2"])
    assert ended.value.code == 2
    assert "--trials is for one answer, and these are 2 questions." in capsys.readouterr().err


class HalfBase(nn.Module):
    """A base in bfloat16 with a trained head, which is mixed with autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(4))
        self.blocks.to(torch.bfloat16).requires_grad_(False)
        self.head = nn.Linear(64, 4)
        self.example_input_array = torch.zeros(2, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def test_a_base_that_is_loaded_in_bfloat16_stays_so_beside_autocast(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(
        capsys, "tests.planner.test_plan_trials:HalfBase", "--precision", "bf16-mixed", "--k", "1", "--trials", "2"
    )
    assert found["trials"] is not None
    assert found["layers"][0]["bytes"] < 3 * 64 * 65, "not float32"
