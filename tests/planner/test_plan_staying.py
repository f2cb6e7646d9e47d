"""``plan --gpu-layers``: layers that stay on the device, what that takes and saves, and how many fit."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from sp_lightning import SuperpipelineStrategy
from sp_lightning.__main__ import main
from sp_lightning.core.plan.units import in_gib
from tests.support.answers import plan, question
from tests.support.models import Module, Stack, vectors
from tests.support.runs import fit

WINDOW = ("tests.support.models:Stack", "--input", "4", "16", "--k", "1", "--k-prime", "1")


@pytest.mark.rest("takes tenths of a second")
def test_layers_that_stay_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    """The device has all of them, and host memory nothing."""
    none, half, one, everything = (plan(capsys, *WINDOW, "--gpu-layers", stay) for stay in ("0", "0.5", "1", "1.0"))
    layers = len(none["layers"])
    assert [each["windows"][0]["gpu_layers"] for each in (none, half, one, everything)] == [
        0,
        round(layers / 2),
        1,
        layers,
    ]
    for less, more in pairwise((none, one, half, everything)):
        assert less["windows"][0]["device_bytes"] < more["windows"][0]["device_bytes"]
        for part in ("weights", "gradients", "optimizer state"):
            assert less["host_parts"][part] > more["host_parts"].get(part, 0), part
        assert less["plain_bytes"] == more["plain_bytes"]
    assert everything["host_bytes"] == 0
    assert "gpu_layers=0.5)" in half["verdict"]
    assert "gpu_layers" not in none["verdict"]
    assert f"{round(layers / 2)} of {layers} layers stay on the GPU, and take " in half["verdict"]
    assert f"{in_gib(half['host_bytes'])} of host memory; " in half["verdict"]


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_a_run_with_layers_that_stay_has_the_host_memory_of_its_plan(
    precision: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    options: Any = {"optimizer_on": "gpu", "optimizer_overlap": "forward", "gpu_layers": 2}
    strategy = SuperpipelineStrategy(k=1, k_prime=1, **options)
    fit(lambda: Module(Stack()), vectors(4), strategy, recorded="nothing", precision=precision, gradient_clip_val=0.1)
    size = [str(each) for each in vectors()[0].shape]
    found = plan(
        capsys, "tests.support.models:Stack", "--input", *size, "--k", "1", "--k-prime", "1", "--precision", precision,
        "--gradient-clip", "norm", "--optimizer-on", "gpu", "--optimizer-overlap", "forward", "--gpu-layers", "2",
    )  # fmt: skip
    assert found["host_bytes"] == strategy.ledger.nbytes
    limit = strategy.plan.peak_device_bytes
    assert found["windows"][0]["device_bytes"] - found["activation_bytes"] == limit


@pytest.mark.long("takes a second or more")
def test_as_many_stay_as_fit_beside_the_window_and_activations(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*WINDOW, "--gradient-clip", "norm", "--host-bandwidth", "0.005GB/s"]
    sizes = [plan(capsys, *asked, "--gpu-layers", str(n))["windows"][0] for n in range(8)]
    for number in (0, 3, 7):
        limit = sizes[number]["device_bytes"]
        (window,) = (found := plan(capsys, *asked, "--gpu-layers", "auto", "--gpu-memory", f"{limit}B"))["windows"]
        assert window == sizes[number] | {"fits": True}, number
        assert found["best"] == {"k": 1, "k_prime": 1, "gpu_layers": number}
        assert (f"gpu_layers={number})" in found["verdict"]) is (number > 0), "which is what is pasted"
    assert (
        "No layer stays on the GPU"
        in plan(capsys, *asked, "--gpu-layers", "auto", "--gpu-memory", f"{sizes[0]['device_bytes']}B")["verdict"]
    )
    seconds = [each["seconds"] for each in sizes]
    assert seconds == sorted(seconds, reverse=True), "the host's memory bounds them"
    refused = plan(capsys, *asked, "--gpu-layers", "auto", "--gpu-memory", "1KiB")
    assert refused["best"] is None


@pytest.mark.rest("takes tenths of a second")
def test_no_more_stay_than_are_of_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Where backward hides all updates of the host, kernels of steps on a slow device only take time."""
    asked = [*WINDOW, "--host-bandwidth", "4000GB/s", "--pcie", "1000GB/s"]
    slow = ["--device-bandwidth", "0.01GB/s", "--gpu-memory", "24GiB"]
    none, auto, four = (plan(capsys, *asked, *slow, "--gpu-layers", stay) for stay in ("0", "auto", "4"))
    assert four["windows"][0]["seconds"] > 1.01 * none["windows"][0]["seconds"]
    assert auto["windows"][0]["seconds"] <= 1.01 * none["windows"][0]["seconds"]


@pytest.mark.long("takes a second or more")
def test_the_most_stay_of_what_is_equally_fast(capsys: pytest.CaptureFixture[str]) -> None:
    """They save host memory and transfers."""
    rates = ["--host-bandwidth", "4000GB/s", "--pcie", "1000GB/s", "--tflops", "5"]
    asked = ["resnet18", "--k", "1", "--k-prime", "1", "--batch-size", "64", *rates, "--gpu-memory", "24GiB"]
    assert plan(capsys, *asked, "--gpu-layers", "auto")["best"]["gpu_layers"] == 7


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--gpu-layers", "auto"], "--gpu-layers auto needs another option. Add --gpu-memory"),
        (["--gpu-layers", "2", "--predict"], "--gpu-layers does not work with --predict or --generate"),
        (["--gpu-layers", "2", "--devices", "2"], "--gpu-layers does not work with --devices"),
        (["--gpu-layers", "2", "--disk", "7"], "--gpu-layers does not work with --disk"),
        (["--gpu-layers", "1.5"], "'1.5' is not a number of layers. For example 8, 0.5 (half of them) or auto"),
        (["--gpu-layers", "half"], "'half' is not a number of layers"),
        (["--gpu-layers", "-1"], "'-1' is not a number of layers"),
    ],
)
def test_layers_that_cannot_stay(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["plan", "resnet18", *arguments])
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.long("takes a second or more")
def test_fewer_stay_where_those_that_were_asked_for_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*WINDOW, "--gpu-layers", "7"]
    limit = plan(capsys, *WINDOW, "--gpu-layers", "3")["windows"][0]["device_bytes"]
    with pytest.raises(SystemExit) as stop:
        main(["plan", *asked, "--gpu-memory", f"{limit}B"])
    assert stop.value.code == 1
    assert capsys.readouterr().out.startswith("It does not fit: at least ")


def test_a_share_is_read_as_it_was_given() -> None:
    """1.0 is all layers, and 1 is one."""
    for given, expected in (("1.0", 1.0), ("1", 1), ("0.25", 0.25), ("auto", "auto")):
        asked = question("resnet18", "--gpu-layers", given, "--gpu-memory", "1GiB").gpu_layers
        assert (asked, type(asked)) == (expected, type(expected))
