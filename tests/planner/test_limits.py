"""Limits: the memory that is said to be enough is enough, less is not, and what is chosen within a limit is what fits."""

from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.core.plan.units import in_gib
from tests.support.planner import plan
from tests.support.tiers import some

WIDE = ("tests.planner.models:Wide", "--k", "1", "--k-prime", "1")


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The answer in words."""
    try:
        main(["plan", *arguments])
        status: Any = 0
    except SystemExit as ended:
        status = ended.code
    text = capsys.readouterr().out
    assert status == (
        1 if re.match(r"(It does not fit|You don't need .*\nWith this strategy it does not)", text) else 0
    )
    return text


@pytest.mark.rest("some plans of a model")
def test_device_memory_of_plain_lightning_of_checkpoints_and_of_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    """Each to the byte."""
    found = plan(capsys, *WIDE)
    plain, less, least = found["plain_bytes"], found["checkpointed_bytes"], found["windows"][0]["device_bytes"]
    for limit, first in (
        (plain, "You don't need sp_lightning: plain Lightning fits ("),
        (plain - 1, f"Plain Lightning fits if each layer runs in torch.utils.checkpoint ({in_gib(less)} of "),
        (less - 1, "It fits: Super"),
    ):
        assert said(capsys, *WIDE, "--gpu-memory", f"{limit}B").startswith(first)
    kept = (*WIDE, "--activations", "keep", "--gpu-memory")
    assert said(capsys, *kept, f"{least}B").startswith("It fits: ")
    assert " available, 3 B short." in said(capsys, *kept, f"{least - 3}B")


_ENOUGH = r"does not fit.*?(?:at least ([\d.]+) GiB of GPU|--host-memory ([\d.]+)GiB is enough)"
ENOUGH = {
    "device": ["--precision", "32-true", "--gpu-memory", "4MiB"],
    "host": ["--host-memory", "900MiB"],
    "disk": ["--disk", "1GB/s", "--host-memory", "512MiB"],
    "disk, updates in backward": ["--disk", "1GB/s", "--optimizer-overlap", "backward", "--host-memory", "512MiB"],
    "disk, float32": ["--disk", "1GB/s", "--precision", "32-true", "--host-memory", "512MiB"],
    "disk, inference": ["--disk", "1GB/s", "--predict", "--host-memory", "256MiB"],
    "three processes": ["--devices", "3", "--host-memory", "900MiB"],
    "two processes with a disk": ["--devices", "2", "--disk", "1GB/s", "--host-memory", "1GiB"],
}


@pytest.mark.rest("some plans of a model")
@pytest.mark.parametrize("name", ENOUGH)
def test_what_is_said_to_be_enough(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever limit is asked about, the same memory is enough, and a little less is not."""
    *others, limit = [*WIDE, *ENOUGH[name]]

    def enough(limit: str) -> float:
        line = re.search(_ENOUGH, said(capsys, *others, limit))
        assert line is not None
        return float(line[1] or line[2])

    least = enough(limit)
    assert enough(f"{least - 0.001:.3f}GiB") == least
    rounded = 0.001 * (name == "device")  # and not up
    assert not said(capsys, *others, f"{least + rounded:.3f}GiB").startswith("It does not fit")


@pytest.mark.rest("some plans of a model")
def test_more_memory_is_never_slower(capsys: pytest.CaptureFixture[str]) -> None:
    """Activations that "auto" keeps: what takes least is as fast as the limit allows, and all is kept once there is room."""
    asked = [*WIDE, "--tflops", "10", "--pcie", "5"]

    def window(mode: str, limit: int) -> dict[str, Any]:
        (found,) = plan(capsys, *asked, "--activations", mode, "--gpu-memory", f"{limit}B")["windows"]
        return dict(found)

    kept, recomputed, offloaded = (window(mode, 2**40) for mode in ("keep", "recompute", "offload"))
    least, most = offloaded["device_bytes"], kept["device_bytes"]
    chosen = [window("auto", least + int(share * (most - least))) for share in (0, 0.25, 0.5, 0.75, 1)]
    assert all(each["fits"] for each in chosen)
    assert chosen[0]["seconds"] > chosen[2]["seconds"] > chosen[4]["seconds"] == kept["seconds"]
    assert all(less["seconds"] >= more["seconds"] for less, more in pairwise(chosen))
    assert chosen[0]["seconds"] <= max(recomputed["seconds"], offloaded["seconds"])
    assert re.fullmatch(r"keep \d+ \(.*\); offload \d+ \(.*\).*", chosen[2]["activations"])
    assert "; " not in chosen[4]["activations"]
    assert not window("auto", least - 2**20)["fits"]


@pytest.mark.rest("some plans of a model")
def test_the_largest_window_that_fits_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    (seven,) = plan(capsys, WIDE[0], "--k", "7", "--k-prime", "1")["windows"]
    windows = plan(capsys, WIDE[0], "--k-prime", "1", "--gpu-memory", f"{seven['device_bytes']}B")["windows"]
    assert max(each["k"] for each in windows if each["fits"]) == 7
    assert {1, 2, 4, 7, 8} <= {each["k"] for each in windows}
    sizes = [each["device_bytes"] for each in windows]
    assert sizes == sorted(sizes), "a larger k takes more"


@pytest.mark.rest("takes tenths of a second")
@pytest.mark.parametrize("limit", [(), ("--gpu-memory", "100GiB")])
def test_a_window_with_a_slot_for_each_layer_is_tried(
    capsys: pytest.CaptureFixture[str], limit: tuple[str, ...]
) -> None:
    found = plan(capsys, "tests.planner.models:Sixteen", *limit)
    assert {(14, 2), (15, 1)} <= {(each["k"], each["k_prime"]) for each in found["windows"]}


@pytest.mark.rest("some plans of a model")
def test_a_larger_window_that_takes_less_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A bisection said that k = 4 is the largest."""
    uneven = ("tests.planner.models:Uneven", "--predict", "--precision", "32-true", "--k-prime", "1")
    five, six, seven = (each["device_bytes"] for each in plan(capsys, *uneven, "--k", "5", "6", "7")["windows"])
    assert six < five < seven
    windows = plan(capsys, *uneven, "--gpu-memory", f"{six}B")["windows"]
    assert max(each["k"] for each in windows if each["fits"]) == 6


@pytest.mark.rest("some plans of a model")
def test_more_staying_layers_that_take_less_are_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A bisection said that two of five fit."""
    frozen = ("tests.planner.models:Frozen", "--precision", "32-true", "--k", "1", "--k-prime", "1", "--gpu-layers")
    three, five = (plan(capsys, *frozen, number)["windows"][0]["device_bytes"] for number in ("3", "5"))
    assert five < three
    assert plan(capsys, *frozen, "auto", "--gpu-memory", f"{five}B")["best"]["gpu_layers"] == 5


@pytest.mark.rest("some plans of a model")
@pytest.mark.parametrize("number", some([0, 3, 12], 3, why="none, and all"))
def test_as_many_layers_stay_as_fit(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside the window and activations; and the host's memory bounds the time."""
    asked = [*WIDE, "--gradient-clip", "norm", "--host-bandwidth", "1GB/s"]
    (one,), (two,) = (
        plan(capsys, *asked, "--gpu-layers", str(each))["windows"] for each in (number, max(0, number - 1))
    )
    limit = ["--gpu-memory", f"{one['device_bytes']}B"]
    found = plan(capsys, *asked, "--gpu-layers", "auto", "--activations", "keep", *limit)
    assert found["windows"] == [one]
    assert found["best"] == {"k": 1, "k_prime": 1, "gpu_layers": number}
    assert (f"gpu_layers={number})" in found["verdict"]) is (number > 0)
    assert one["seconds"] <= two["seconds"]
    with_more = [*asked, "--activations", "keep", "--gpu-layers", str(min(12, number + 1)), *limit]
    assert said(capsys, *with_more).startswith("It does not fit: at least ") is (number < 12)
