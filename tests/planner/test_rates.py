"""``rates`` measures a machine, and ``plan --rates`` reads the file."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sp_lightning.__main__ import main
from sp_lightning.core.device.device import Device
from sp_lightning.tools.planner import measured
from sp_lightning.tools.planner import rates as measuring
from tests.support.planner import plan, question

SIZES = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 256, "hidden_size": 64,
    "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(SIZES))
    return str(file)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *arguments])
    assert ended.value.code == 2
    return capsys.readouterr().err


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.example_input_array = torch.zeros(2, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x).relu()
        return x


SMALL = "tests.planner.test_rates:Small"


# ---------------------------------------------------------------------- measured and used


@pytest.fixture
def rates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(
        measuring, "measure_host_seconds", lambda *, training: (1e-5, 2e-6) if training else (2e-5, 1e-6)
    )

    def measure(*options: str) -> dict[str, Any]:
        main(["rates", "--seconds", "0.1", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        (tmp_path / "rates.json").write_text(json.dumps(found))
        return found

    return measure


@pytest.mark.long("seconds of measuring")
def test_rates_are_measured_and_used(
    rates: Callable[..., dict[str, Any]], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = rates("--accelerator", "cpu", "--disk", str(tmp_path))
    assert found["assumed"] == []
    measured, file = found["measured"], str(tmp_path / "rates.json")
    for precision, key in (("bf16-mixed", "bf16"), ("32-true", "fp32"), ("16-true", "fp16")):
        used = plan(capsys, config, "--rates", file, "--precision", precision)["assumed"]
        assert used["tflops"] == measured["tflops"][key] > 0
    for name in ("pcie", "host_bandwidth", "device_bandwidth"):
        assert used[f"{name.partition('_')[0]}_gbps"] == pytest.approx(float(measured[name].removesuffix("GB/s")))
    given = plan(capsys, config, "--rates", file, "--pcie", "7GB/s", "--precision", "32-true")["assumed"]
    assert given == {**used, "pcie_gbps": 7, "tflops": measured["tflops"]["fp32"]}, "what is given comes first"
    main(["plan", config, "--rates", file])
    said = capsys.readouterr().out
    assert f"({file}); assumed: AdamW (--optimizer)" in said
    assert "is of another machine" not in said


@pytest.mark.long("takes a second or more")
def test_without_an_accelerator_its_rates_stay_assumed(
    rates: Callable[..., dict[str, Any]], config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is one")
    found = rates()
    assert found["assumed"] == ["tflops", "device_bandwidth", "pcie"]
    assert not set(found["assumed"]) & set(found["measured"])
    used = plan(capsys, config, "--rates", str(tmp_path / "rates.json"))["assumed"]
    assert (used["tflops"], used["pcie_gbps"]) == (100, 25)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kind": "report"}', '{"kind": "rates", "measured": {}}'])
def test_another_file_is_refused(text: str, config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "other.json"
    file.write_text(text)
    said = refused(capsys, config, "--rates", str(file))
    assert f"{file} is not a file of rates" in said
    assert "Make one: " in said
    assert "No such file" in refused(capsys, config, "--rates", str(tmp_path / "none.json"))


def test_a_disk_is_measured_by_whole_pages(tmp_path: Path) -> None:
    assert measuring.disk_bytes(tmp_path, 2**20) > 1e6
    assert list(tmp_path.iterdir()) == []


def test_what_is_measured_counts_what_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "median_seconds", lambda call, seconds, device: 0.5)
    device = Device(torch.device("cpu"))
    assert measuring.copied_bytes(device, 2**20, 1) == 2 * 2**20 / 0.5
    assert measuring.link_bytes(device, 2**20, 1) == 2 * 2**20 / 0.5, (
        "one after the other, where copies are synchronous"
    )
    assert measuring.matrix_flops(torch.float32, device, 0.1) == 2 * 512**3 / 0.5


# ---------------------------------------------------------------------- the file and the measurements by themselves

RATES: dict[str, Any] = {
    "kind": "rates",
    "machine": {"accelerator": "Loom", "processor": "Abacus", "cores": 8},
    "measured": {
        "tflops": {"fp32": 1, "bf16": 2, "fp16": 3}, "pcie": "5GB/s", "disk": "3GB/s", "synchronous": False,
        "python": {"training": [3e-5, 2e-6], "inference": [1e-5, 1e-6]},
    },
}  # fmt: skip


def with_rates(folder: Path, *options: str) -> Any:
    file = folder / "rates.json"
    file.write_text(json.dumps(RATES))
    return measured.with_rates(question(SMALL, "--rates", str(file), *options))


def test_what_is_given_comes_before_what_was_measured(tmp_path: Path) -> None:
    found = with_rates(tmp_path, "--host-bandwidth", "9GB/s")
    assert (found.pcie, found.host_bandwidth, found.tflops) == (5e9, 9e9, 2)


def test_a_drive_that_was_measured_is_no_drive_that_was_asked_for(tmp_path: Path) -> None:
    found = with_rates(tmp_path, "--host-memory", "1KiB")
    assert found.disk is None
    assert with_rates(tmp_path, "--disk", "7GB/s").disk == 7e9


def test_an_accelerator_that_is_not_here_is_refused() -> None:
    with pytest.raises(ValueError, match="--accelerator loom: torch finds "):
        measured.run_rates(Namespace(accelerator="loom", seconds=0.1, disk=None))


class Link(Device):
    """Copies beside each other, and counts what it page-locks."""

    synchronous = False

    def __init__(self, room: int) -> None:
        super().__init__(torch.device("cpu"))
        self.room, self.locked = room, list[int]()

    def pin(self, memory: Tensor) -> bool:
        if len(self.locked) == self.room:
            return False
        self.locked.append(memory.data_ptr())
        return True

    def unpin(self, memory: Tensor) -> None:
        self.locked.remove(memory.data_ptr())


def test_a_link_is_measured_both_ways_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    device, locked = Link(room=2), list[int]()

    def half_a_second(call: Any, seconds: float, device: Any) -> float:
        call()
        locked.extend(device.locked)
        return 0.5

    monkeypatch.setattr(measuring, "median_seconds", half_a_second)
    assert measuring.link_bytes(device, 2**16, 1) == 2**16 / 0.5
    assert len(set(locked)) == 2
    assert not device.locked, "it is given back"


def test_memory_that_is_not_locked_is_no_measure_of_a_link() -> None:
    device = Link(room=1)
    with pytest.raises(OSError, match="cannot page-lock 1 MiB of host memory: raise `ulimit -l`"):
        measuring.link_bytes(device, 2**20, 1)
    assert not device.locked
