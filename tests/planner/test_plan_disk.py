"""``plan --disk SPEED --host-memory SIZE``: what is below host memory, and what that costs."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.capabilities.disk.host_budget import kept_for_processes
from sp_lightning.core.plan.units import parse_bytes
from tests.support.answers import plan
from tests.support.tiers import first, some

MODEL = ("vit_b_16", "--batch-size", "2", "--k", "1", "--k-prime", "1", "--precision", "32-true")
WEIGHTS = 4 * 86_567_656


def memory(beside: str) -> str:
    """Host memory of which so much is left beside the process."""
    nbytes = total = parse_bytes("beside", beside)
    for _ in range(20):  # a share of the total is kept
        total = nbytes + kept_for_processes(total, 1, disk=True)
    return f"{total}B"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return plan(capsys, *MODEL, *arguments)


@pytest.mark.long("takes a second or more")
def test_optimizer_state_is_on_the_disk_as_far_as_memory_does_not_hold_it(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--disk", "1GB/s", "--host-memory", memory("1GiB"))
    assert found["host_fits"]
    assert found["host_bytes"] <= 2**30
    assert "of optimizer state" in found["disk"][0]
    assert "TB are written in a day" in found["disk"][1]
    below, state = 4 * WEIGHTS - 2**30, 2 * WEIGHTS  # some memory is for state on its way
    assert 2 * below / 1e9 < found["windows"][0]["busy_seconds"]["disk"] < 2 * state / 1e9
    assert found["windows"][0]["seconds"] >= 0.9 * found["windows"][0]["busy_seconds"]["disk"]


@pytest.mark.long("takes a second or more")
@pytest.mark.parametrize(
    "more",
    first(
        [
            ["--disk", "1GB/s", "--host-memory", memory("700MiB")],
            ["--accumulate-grad-batches", "2", "--disk", "1GB/s", "--host-memory", memory("700MiB")],
            ["--accumulate-grad-batches", "2", "--precision", "bf16-true"],
            ["--lora", "4", "--activations", "offload", "--precision", "bf16-true"],
            ["--lora", "4", "--predict", "--disk", "1GB/s", "--host-memory", memory("256MiB")],
            ["--devices", "2", "--disk", "1GB/s", "--host-memory", "2500MiB"],
        ],
        if_=lambda more: more[0] == "--disk",
        why="plans of a whole model",
    ),
)
def test_parts_of_host_memory_add_up_to_it(more: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Where a disk has some of it, the parts that were printed were those of a run without one."""
    main(["plan", *MODEL, *more])
    found = re.search(
        r"^host memory.*? ([\d.]+ \w+), .* bytes per parameter: (.*)$", capsys.readouterr().out, re.MULTILINE
    )
    assert found is not None
    total, *parts = (parse_bytes("it", size) for size in re.findall(r"[\d.]+ [KMG]?i?B", f"{found[1]} {found[2]}"))
    assert sum(parts) == pytest.approx(total, rel=0.01), "rounded"
    answered = answer(capsys, *more)
    assert sum(answered["host_parts"].values()) == answered["host_bytes"]


@pytest.mark.long("two plans of a whole model; the first tier has one of them")
def test_a_faster_disk_is_faster_and_speeds_are_numbers_too(capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = (answer(capsys, "--disk", speed, "--host-memory", memory("1GiB")) for speed in ("0.5GB/s", "5"))
    assert slow["windows"][0]["seconds"] > 3 * fast["windows"][0]["seconds"]


@pytest.mark.long("plans of a whole model; the first tier has one of them")
def test_trained_weights_are_on_the_disk_where_state_alone_is_not_enough(capsys: pytest.CaptureFixture[str]) -> None:
    backward = ("--optimizer-overlap", "backward", "--disk", "1GB/s", "--host-memory")
    found, more = answer(capsys, *backward, memory("400MiB")), answer(capsys, *backward, memory("600MiB"))
    assert found["host_fits"]
    assert found["host_bytes"] <= 400 * 2**20 < WEIGHTS + 100 * 2**20
    assert "of trained weights, which" in found["disk"][1]
    assert not any("trained weights" in line for line in more["disk"])
    assert found["windows"][0]["busy_seconds"]["disk"] > more["windows"][0]["busy_seconds"]["disk"]


@pytest.mark.long("plans of a whole model; the first tier has one of them")
def test_gradients_are_on_the_disk_where_all_of_them_are_there_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    little = ("--disk", "1GB/s", "--host-memory", memory("700MiB"), "--optimizer-overlap")
    early, late = answer(capsys, *little, "backward"), answer(capsys, *little, "forward")
    assert late["host_fits"]
    assert late["host_bytes"] <= 700 * 2**20
    assert "of gradients, which each batch writes and reads once, through" in late["disk"][1]
    assert not any("gradients" in line for line in early["disk"])
    assert late["windows"][0]["busy_seconds"]["disk"] > early["windows"][0]["busy_seconds"]["disk"]


@pytest.mark.long("a plan of a whole model; the first tier has one of them")
def test_weights_are_read_in_place_in_inference(capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--predict", "--disk", "1GB/s", "--host-memory", memory("256MiB"))
    assert found["host_bytes"] <= 2**28
    assert "writes nothing" in found["disk"][0]
    assert not any("are written" in line for line in found["disk"])


@pytest.mark.long("a plan of a whole model; the first tier has one of them")
def test_nothing_is_on_the_disk_where_all_of_it_fits(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--disk", "1GB/s", "--host-memory", "64GiB")
    assert answer(capsys, *asked)["disk"] == ["disk: not used, because everything is in host memory"]
    main(["plan", *MODEL, *asked])
    assert "of the 64.0 GiB, 4.8 GiB are for the process, its libraries and batches" in capsys.readouterr().out


@pytest.mark.long("a plan of a whole model; the first tier has one of them")
def test_weights_and_gradients_that_memory_does_not_hold_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *MODEL, "--disk", "1GB/s", "--host-memory", memory("256MiB")])
    said = capsys.readouterr().out
    assert "disk: in use as far as possible, but host memory is still too small" in said
    assert "\nthe times are predicted without a disk, with enough host memory\n" in said
    assert re.search(r"^It does not fit, even with a disk: .* --host-memory [\d.]+GiB is enough", said, re.MULTILINE)


@pytest.mark.long("four plans of a whole model")
@pytest.mark.parametrize("precision", some(["32-true", "bf16-mixed"], "bf16-mixed", why="without casts"))
@pytest.mark.parametrize("overlap", some(["forward", "backward"], "forward", why="with few gradients"))
def test_the_memory_that_is_said_to_be_enough_is(
    overlap: str, precision: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["plan", *MODEL[:-1], precision, "--disk", "1GB/s", "--optimizer-overlap", overlap, "--host-memory"]

    def enough(limit: str) -> float:
        with pytest.raises(SystemExit):
            main([*arguments, limit])
        found = set(re.findall(r"--host-memory ([\d.]+)GiB is enough", capsys.readouterr().out))
        assert len(found) == 1
        return float(found.pop())

    least = enough("512MiB")
    assert enough(f"{least - 0.001:.3f}GiB") == least
    main([*arguments, f"{least}GiB"])
    assert " s for the disk. Use more CPU memory" in capsys.readouterr().out


@pytest.mark.long("plans of a whole model; the first tier has one of them")
@pytest.mark.parametrize("devices", some(["1", "3"], "3", why="one process is the smaller case"))
def test_processes_take_memory_without_a_disk_too(devices: str, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--devices", devices, "--host-memory"]
    with pytest.raises(SystemExit):
        main(["plan", *MODEL, *asked, "900MiB"])
    said = capsys.readouterr().out
    assert "\nthe times are predicted with enough host memory\n" in said
    (enough,) = re.findall(r"--host-memory ([\d.]+)GiB is enough", said)
    assert answer(capsys, *asked, f"{enough}GiB")["host_fits"]
    with pytest.raises(SystemExit):
        main(["plan", *MODEL, *asked, f"{float(enough) - 0.001:.3f}GiB"])


@pytest.mark.long("plans of a whole model; the first tier has one of them")
def test_several_devices_have_state_on_the_disk_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    """As a run has. The second process takes memory, too."""
    asked = ("--devices", "2", "--disk", "1GB/s", "--optimizer-overlap", "backward", "--host-memory")
    found = answer(capsys, *asked, "2500MiB")
    assert found["host_fits"]
    assert found["host_bytes"] <= 2500 * 2**20 - kept_for_processes(2500 * 2**20, 2, disk=True)
    assert "of optimizer state" in found["disk"][0]
    assert found["windows"][0]["busy_seconds"]["disk"] > 0
    assert kept_for_processes(2**32, 2, disk=True) - kept_for_processes(2**32, 1, disk=True) > 2**29
    with pytest.raises(SystemExit):
        main(["plan", *MODEL, *asked, "1900MiB"])
    said = capsys.readouterr().out
    assert "trained weights" not in said
    (enough,) = re.findall(r" short\. --host-memory ([\d.]+GiB) is enough\.$", said, re.MULTILINE)
    assert answer(capsys, *asked, enough)["host_fits"]


def test_weights_of_several_devices_are_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", *MODEL, "--predict", "--disk", "1GB/s", "--devices", "2"])
    assert "--disk does not work with --predict or --generate on several devices" in capsys.readouterr().err


@pytest.mark.rest("takes tenths of a second")
def test_a_plan_without_a_limit_says_why_nothing_is_on_the_disk(capsys: pytest.CaptureFixture[str]) -> None:
    found = plan(capsys, "tests.planner.test_plan_command:Known", "--k", "1", "--disk", "1GB/s")
    assert found["disk"] == ["disk: not used, because everything is in host memory (--host-memory is not set)"]
