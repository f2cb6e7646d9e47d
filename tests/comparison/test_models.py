"""``superpipeline check`` on models of several kinds, from the command line and from a config; its exit statuses."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import sp_lightning
from sp_lightning.__main__ import main
from sp_lightning.core.device.device import Wait
from tests.support import planted
from tests.support.models import CASES, Stack
from tests.support.runs import loader
from tests.support.simdevice import SimDevice, simulated
from tests.support.tiers import some

CONFIG = """
trainer:
  accelerator: cpu
  max_epochs: 7
  gradient_clip_val: 0.1
  callbacks:
    - class_path: lightning.pytorch.callbacks.LearningRateMonitor
    - class_path: sp_lightning.SuperpipelineCallback
    - class_path: lightning.pytorch.callbacks.ModelCheckpoint
    - class_path: lightning.pytorch.callbacks.EarlyStopping
      init_args: {monitor: nothing, strict: false}
  logger:
    class_path: lightning.pytorch.loggers.CSVLogger
    init_args: {save_dir: logs}
  strategy:
    class_path: sp_lightning.SuperpipelineStrategy
    init_args: {k: 2, k_prime: 1, activations: recompute}
model:
  class_path: tests.support.planted.Configured
  init_args: {depth: 3}
data:
  class_path: tests.support.planted.Data
ckpt_path: last.ckpt
"""


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """The exit status of ``check``, and what it has printed."""
    status: Any = 0
    try:
        main(["check", *arguments, "--steps", "2", "--json"])
    except SystemExit as ended:
        status = ended.code
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert printed["status"] == status
    return status, printed


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize(
    ("arguments", "status", "verdict"),
    [
        (["tests.support.planted:Configured", "--data", "tests.support.planted:Data", "--k", "1"], 0, "equal"),
        pytest.param(
            ["tests.support.planted:OtherBuffer", "--data", "tests.support.planted:batches"],
            1,
            "different",
            marks=pytest.mark.rest("the Python side has it in the first tier"),
        ),
        (["tests.support.planted:OtherBuffer"], 2, "not run"),
    ],
)
def test_exit_statuses(arguments: list[str], status: int, verdict: str, capsys: pytest.CaptureFixture[str]) -> None:
    found, printed = run(capsys, *arguments, "--accelerator", "cpu")
    assert (found, printed["verdict"]) == (status, verdict)


def test_a_module_that_ends_the_process_is_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    """Lightning makes an exit of Ctrl-C (status 1) and of SIGTERM (status 0), which said "different" and "equal"."""
    with pytest.raises(SystemExit) as ended:
        main(["check", f"{__name__}:ends", "--data", "tests.support.models:vectors", "--accelerator", "cpu"])
    assert ended.value.code == 2
    assert "Nothing was compared." in capsys.readouterr().err


def ends() -> Any:
    return planted.Ends(Stack())


def test_a_name_that_leads_nowhere_ends_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "nowhere:Model"])
    assert stop.value.code == 2
    assert (
        "check: 'nowhere:Model': No module named 'nowhere'. Expected package.module:Factory" in capsys.readouterr().err
    )


@pytest.mark.long("the first tier has the Python side")
def test_a_config_of_lightning_s_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "fit.yaml"
    config.write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    made: list[dict[str, Any]] = []
    strategy = sp_lightning.SuperpipelineStrategy

    def make(**given: Any) -> sp_lightning.SuperpipelineStrategy:
        made.append(given)
        return strategy(**given)

    with mock.patch("sp_lightning.tools.comparison.runs.SuperpipelineStrategy", make):
        status, printed = run(capsys, "--config", str(config), "--k-prime", "2")
    assert status == 0, printed
    assert printed["layers"] == 5
    unused = "logger, max_epochs, ckpt_path, SuperpipelineCallback, ModelCheckpoint."
    assert printed["notes"][0].endswith(f"files and devices: {unused}")
    assert {(each["k"], each["k_prime"], each["activations"]) for each in made} == {(2, 2, "recompute")}
    assert list(tmp_path.iterdir()) == [config]


@pytest.mark.rest("takes tenths of a second")
def test_a_config_that_cannot_be_read_is_no_comparison(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fit.yaml").write_text(CONFIG.replace("depth: 3", "depth: three"))
    status, printed = run(capsys, "--config", str(tmp_path / "fit.yaml"))
    assert status == 2
    assert "could not be read. " in printed["why"]


@pytest.mark.long("takes a second or more")
def test_a_config_without_a_module_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fit.yaml").write_text("trainer: {accelerator: cpu, strategy: ddp, devices: 2}")
    arguments = ["--config", str(tmp_path / "fit.yaml")]
    status, printed = run(capsys, *arguments)
    assert status == 2
    assert "model" in printed["why"]
    factory = ["tests.support.planted:Configured", "--data", "tests.support.planted:Data"]
    status, printed = run(capsys, *factory, *arguments)
    assert status == 0
    assert "files and devices: devices, strategy." in printed["notes"][0]


@pytest.mark.long("nine pairs of modes; each is in the first tier by itself, in tests/equality")
def test_every_mode_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["tests.support.planted:Everything", "--accelerator", "cpu", "--k", "1", "--activations", "all"]
    status, printed = run(capsys, *arguments, "--optimizer-overlap", "all")
    assert status == 0, printed
    modes = [f"superpipeline, {mode}, {overlap}" for mode in ("keep", "recompute", "offload") for overlap in _OVERLAPS]
    assert [each["name"] for each in printed["runs"]] == ["plain", *modes]
    assert "optimizers fused on the CPU" in printed["reference"]


_OVERLAPS = ("off", "forward", "backward")


@pytest.mark.long("models of other kinds; test_check has one in the first tier")
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(
    "name", some(["lora-checkpoint", "vit", "gan", "resnet50"], "lora-checkpoint", "vit", "gan", why="a large model")
)
def test_models_are_equal(name: str, precision: str) -> None:
    """Adapters, attention, two optimizers by hand, and BatchNorm."""
    case = CASES[name]
    trainer = {"accelerator": "cpu", "precision": precision}
    report = sp_lightning.check(case.make, lambda: loader(case.batches()), steps=3, trainer=trainer, k=1, k_prime=1)
    assert report.status == 0, str(report)
    assert {"losses", "weights", "optimizer state", "continued"} <= set(report.rows)
    assert report.rows["buffers"].tensors if name == "resnet50" else True


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    ("wait", "clocks"),
    [
        (Wait.USE_AFTER_FETCH, False),
        pytest.param(Wait.FETCH_AFTER_USE, True, marks=pytest.mark.rest("tests/device/test_waits.py has it as well")),
    ],
)
def test_a_wait_that_is_left_out_is_found(wait: Wait, clocks: bool) -> None:
    """Copies of the simulated device come as late as allowed: a layer is used before it is there. Its clocks see the rest."""
    options: dict[str, Any] = {"steps": 2, "trainer": {"accelerator": "cpu"}, "k": 1, "k_prime": 1}
    with nullcontext() if clocks else mock.patch.object(SimDevice, "_check"), simulated(wait, watch=clocks):
        report = sp_lightning.check(planted.Everything, **options)
    assert report.status == 1, str(report)
    assert ("Race: memory" if clocks else "NaN in ") in str(report)
    with simulated(watch=clocks):
        assert sp_lightning.check(planted.Everything, **options).status == 0
