"""``plan --devices N``: what several devices of one node have together, and what each has for itself."""

from __future__ import annotations

from typing import Any

import pytest

from sp_lightning.__main__ import main
from sp_lightning.tools.planner.arguments import make_parser
from tests.support.answers import plan

DEVICES = 4
MODEL = ("vit_b_16", "--batch-size", "2", "--k", "1", "--k-prime", "1", "--precision", "32-true")
WEIGHTS = 4 * 86_567_656
GIGA = 1e9


def answers(
    capsys: pytest.CaptureFixture[str], *arguments: str, of_several: tuple[str, ...] = ()
) -> tuple[dict[str, Any], dict[str, Any]]:
    """For one device and for several, with the arguments that count with several alone."""
    one = plan(capsys, *MODEL, *arguments)
    return one, plan(capsys, *MODEL, *arguments, "--devices", str(DEVICES), *of_several)


@pytest.mark.long("models of billions of parameters")
def test_the_node_has_weights_gradients_and_state_once_and_activations_for_each(
    capsys: pytest.CaptureFixture[str],
) -> None:
    one, several = answers(capsys, "--activations", "offload")
    assert one["host_bytes"] == pytest.approx(4 * WEIGHTS + one["offloaded_bytes"], rel=1e-3)
    assert several["host_bytes"] - one["host_bytes"] == (DEVICES - 1) * one["offloaded_bytes"]


@pytest.mark.long("plans of a whole model")
def test_gradients_of_several_devices_are_as_wide_as_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = (plan(capsys, *MODEL[:-1], "bf16-mixed", *more) for more in ((), ("--devices", str(DEVICES))))
    casts = several["host_bytes"] - 4 * WEIGHTS
    assert casts > WEIGHTS / 4
    assert several["host_bytes"] - one["host_bytes"] == pytest.approx(casts, rel=0.02), (
        "half of these weights' gradients"
    )
    (window,) = several["windows"][:1]
    sent = (WEIGHTS - casts) * (DEVICES - 1) / DEVICES
    assert window["busy_seconds"]["links"] == pytest.approx(sent / (200 * GIGA), rel=0.01), (
        "between devices they are narrow"
    )


@pytest.mark.long("two plans of a whole model; the first tier has one of them")
def test_each_device_fetches_all_and_sends_a_part(capsys: pytest.CaptureFixture[str]) -> None:
    plans = answers(capsys, "--host-bandwidth", "1000", "--pcie", "5", of_several=("--links", "10"))
    one, several = (each["windows"][0] for each in plans)
    assert several["busy_seconds"]["fetch"] == one["busy_seconds"]["fetch"]
    assert several["busy_seconds"]["compute"] == one["busy_seconds"]["compute"]
    assert several["busy_seconds"]["optimizer"] == one["busy_seconds"]["optimizer"]
    assert several["busy_seconds"]["drain"] == pytest.approx(one["busy_seconds"]["drain"] / DEVICES, rel=1e-3)
    assert one["busy_seconds"]["links"] == 0
    sent = WEIGHTS * (DEVICES - 1) / DEVICES
    assert several["busy_seconds"]["links"] == pytest.approx(sent / (10 * GIGA), rel=1e-3)
    copied = (several["busy_seconds"]["fetch"] + several["busy_seconds"]["drain"]) * 5
    once = (one["busy_seconds"]["fetch"] + one["busy_seconds"]["drain"]) * 5
    more = several["busy_seconds"]["host memory"] - one["busy_seconds"]["host memory"]
    assert more == pytest.approx((DEVICES * copied - once) / 1000, rel=1e-3)


@pytest.mark.long("two plans of a whole model; the first tier has one of them")
def test_a_device_has_room_for_what_is_sent_and_received(capsys: pytest.CaptureFixture[str]) -> None:
    one, several = answers(capsys)
    largest = max(layer["bytes"] for layer in one["layers"])
    more = several["windows"][0]["device_bytes"] - one["windows"][0]["device_bytes"]
    assert 2 * (2 + 1 / DEVICES) * largest <= more < 4 * 2 * largest


@pytest.mark.long("two plans of a whole model; the first tier has one of them")
@pytest.mark.parametrize(
    ("slow", "binds"),
    [("--links", "links"), ("--pcie", "fetch"), ("--host-bandwidth", "host memory"), ("--tflops", "compute")],
)
def test_what_is_slow_binds(slow: str, binds: str, capsys: pytest.CaptureFixture[str]) -> None:
    fast = {
        "--links": "1e3",
        "--pcie": "1e3",
        "--host-bandwidth": "1e5",
        "--tflops": "1e4",
        "--device-bandwidth": "1e6",
    }
    rates = [each for pair in {**fast, slow: "0.01"}.items() for each in pair]
    found = plan(capsys, *MODEL, *rates, "--devices", str(DEVICES))
    assert found["windows"][0]["binds"] == binds
    assert found["windows"][0]["seconds"] >= found["windows"][0]["busy_seconds"][binds]


@pytest.mark.long("takes a second or more")
def test_the_text_says_what_is_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", *MODEL, "--devices", str(DEVICES), "--links", "77"])
    text = capsys.readouterr().out
    assert f"on each of {DEVICES} devices" in text
    assert "host memory of the node" in text
    assert "77 GB/s from each device to the others (--links)" in text
    assert f"SuperpipelineStrategy(k=1, k_prime=1) in Trainer(devices={DEVICES})" in text


@pytest.mark.long("two plans of a whole model; the first tier has one of them")
def test_updates_in_backward_keep_few_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    late, early = (
        plan(capsys, *MODEL, "--devices", "2", "--optimizer-overlap", each) for each in ("forward", "backward")
    )
    assert 0.6 * WEIGHTS < late["host_bytes"] - early["host_bytes"] < WEIGHTS


@pytest.mark.parametrize(
    ("text", "rate"),
    [("25", 25e9), ("25GB/s", 25e9), ("200Gb/s", 25e9), ("200 Gbit/s", 25e9), ("100Gbps", 12.5e9), ("800Mb/s", 0.1e9)],
)
def test_rates_are_in_bytes_or_in_bits_as_networks_are_sold(text: str, rate: float) -> None:
    question = make_parser().parse_args(["plan", "vit_b_16", "--links", text])
    assert question.links == rate


@pytest.mark.parametrize("text", ["fast", "0Gb/s", "25Gx/s", "1.2.3Gb/s"])
def test_what_is_no_rate_is_refused_with_an_example(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "vit_b_16", "--links", text])
    assert "200Gb/s" in capsys.readouterr().err
